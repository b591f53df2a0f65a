//! Bytes that change while they lie in memory are not served.

use crate::store::Store;
use crate::survey_tests::watch;
use crate::{Ack, Client, Namespace, Server, Shape, StoreOptions};
use kvik_core::{Code, Layout};
use kvik_engine::{Config, Engine, PageSet, Preference};
use std::sync::Arc;
use std::time::Duration;

const BLOCK: u64 = 70_000;

#[test]
fn a_flipped_bit_is_found_by_whoever_reads() {
    let engine = Engine::start(Config::default()).unwrap();
    let host = crate::host::Host::start(crate::service::Service::new(
        Store::open(engine.clone(), &StoreOptions::default()).unwrap(),
    ))
    .unwrap();
    let store = host.service().store().clone();
    is_found(&engine, &Client::of(&engine, host), &store);
}

#[test]
fn a_flipped_bit_is_found_by_who_reads_from_a_server() {
    for transport in [Preference::Tcp, Preference::Local] {
        let start = || Engine::start(Config { transport, ..Config::default() }).unwrap();
        let (there, here) = (start(), start());
        let server = Server::start(&there, &StoreOptions::default()).unwrap();
        let client = Client::connect(&here, &there.addresses()[0].to_string(), None).unwrap();
        is_found(&here, &client, server.store());
    }
}

/// Flips a bit of each of some blocks; a get finds it, and reads what comes before it.
fn is_found(engine: &Engine, client: &Client, store: &Store) {
    let namespace = Namespace {
        model: "m".into(),
        revision: String::new(),
        kv_dtype: "float16".into(),
        quantisation: String::new(),
        layers: 0..2,
        model_layers: 2,
        heads: 0..1,
        model_heads: 1,
        block_tokens: 4,
        layout: String::new(),
        salt: Vec::new(),
        lora: String::new(),
    };
    let space = client.open("t", &namespace, Shape::new(2, 1, BLOCK / 2).unwrap()).unwrap();
    let strides = kvik_core::Layers::Strided { count: 2, stride: BLOCK / 2 };
    let layout = Arc::new(Layout::new(0, 8, BLOCK / 2, BLOCK, 1, 0, strides).unwrap());
    let region = engine.allocate(8 * BLOCK).unwrap();
    region.write_at(0, &vec![5; 4 * BLOCK as usize]).unwrap();
    let pages = |ids: &[u32]| PageSet::new(&region, layout.clone(), ids.into(), None, None).unwrap();
    let keys = namespace.keys(&(0..16).collect::<Vec<u32>>(), b"", &[]).unwrap();
    space.put(&keys, &pages(&[0, 1, 2, 3]), Ack::Stored, None).unwrap().wait(None).unwrap();
    for (block, at) in [(0usize, 0u64), (2, BLOCK - 1), (3, BLOCK / 2)] {
        let (memory, offset) = {
            let mut state = store.state();
            let id = state.index.find(0, &keys[block]).unwrap();
            let slot = state.pin(id).unwrap();
            state.unpin(id);
            state.slabs.bytes(slot).unwrap()
        };
        let flip = || {
            let mut byte = [0];
            memory.copy_out((offset + at) as usize, &mut byte).unwrap();
            memory.copy_in((offset + at) as usize, &[byte[0] ^ 4]).unwrap();
        };
        flip();
        let mut getting = space.get(&keys, &pages(&[4, 5, 6, 7]), None).unwrap();
        let error = loop {
            match getting.next(None) {
                Ok(verified) => {
                    assert!(verified.unwrap() <= block, "{verified:?} blocks, and {block} is broken")
                }
                Err(error) => break error,
            }
        };
        assert_eq!(error.code, Code::ChecksumMismatch);
        assert!(getting.verified() <= block);
        // It has ended, though its caller has it still: what it was lent is given back.
        let began = watch::start();
        while store.state().lent > 0 {
            assert!(began.elapsed() < Duration::from_secs(2), "it goes on");
            std::thread::yield_now();
        }
        assert_eq!(getting.next(None).unwrap(), None);
        flip();
        assert_eq!(space.get(&keys, &pages(&[4, 5, 6, 7]), None).unwrap().wait().unwrap(), 4);
    }
}
