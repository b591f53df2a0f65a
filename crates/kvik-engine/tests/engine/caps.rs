//! What a peer can make an engine hold is bounded by `memory_cap`.

use crate::common::*;
use kvik_core::{Code, EngineId, Incarnation};
use kvik_engine::{Config, Engine, TransferOptions};
use kvik_host::identity;
use kvik_proto::{Facts, Greeting, Handshake, Identity, Local, Secret};
use std::io::{Read, Write};
use std::net::TcpStream;

fn capped(memory_cap: u64) -> Engine {
    Engine::start(Config { memory_cap, ..Config::default() }).unwrap()
}

fn held(engine: &Engine) -> u64 {
    engine.stats().iter().find(|(name, _)| *name == "memory_held_bytes").unwrap().1
}

/// A control connection of a peer that is no engine.
fn connect(owner: &Engine) -> TcpStream {
    let identity =
        Identity { engine: EngineId::random().unwrap(), incarnation: Incarnation::random().unwrap() };
    let local = Local { identity, secret: Secret::new(None), facts: Facts::default() };
    let (mut shake, hello) = Handshake::open(local, identity::nonce().unwrap(), None);
    let mut conn = TcpStream::connect(owner.addresses()[0]).unwrap();
    conn.set_read_timeout(Some(PATIENCE)).unwrap();
    conn.set_write_timeout(Some(PATIENCE)).unwrap();
    conn.write_all(&hello).unwrap();
    let (mut input, mut bytes) = (Vec::new(), [0; 4096]);
    loop {
        let len = conn.read(&mut bytes).unwrap();
        assert_ne!(len, 0);
        input.extend_from_slice(&bytes[..len]);
        let mut output = Vec::new();
        let greeting = shake.receive(&mut input, &mut output).unwrap();
        conn.write_all(&output).unwrap();
        if let Some(Greeting::Control(_)) = greeting {
            return conn;
        }
    }
}

#[test]
fn a_session_that_sends_more_than_the_cap_is_cut() {
    let owner = capped(2 << 20);
    let mut conn = connect(&owner);
    wait_until("the session", || held(&owner) > 0);
    // A frame of 9 MiB that never ends.
    conn.write_all(&kvik_proto::frame_header(2, &vec![0; 9 << 20])).unwrap();
    let piece = vec![0; 64 << 10];
    let sent = (0..144).take_while(|_| conn.write_all(&piece).is_ok()).count();
    assert!(sent < 144, "all of it was taken");
    wait_until("the end of the session", || held(&owner) == 0);
}

#[test]
fn requests_beyond_the_cap_are_refused_and_what_ends_is_given_back() {
    let owner = capped(64 << 20);
    let reader = capped(2 << 20);
    let (there, here) = (region(&owner, 4, 1), region(&reader, 4, 2));
    let grant = owner.grant(&all(&there), many()).unwrap();
    read(&reader, &all(&here), grant.ticket()).unwrap();
    let quiet = held(&reader);
    let big = reader.allocate(400_000 * 64).unwrap();
    let ids: Vec<u32> = (0..400_000).collect();
    let set = paged(&big, &ids, 64);
    let refused = reader.read(&set, grant.ticket(), None, TransferOptions::default());
    let error = refused.err().unwrap();
    assert_eq!(error.code, Code::MemoryCapReached);
    assert!(error.text.contains("`memory_cap`"), "{error}");
    assert_eq!(held(&reader), quiet);
    read(&reader, &all(&here), grant.ticket()).unwrap();
    reader.close(PATIENCE).unwrap();
    drop(grant);
    wait_until("the session's end", || held(&owner) < 128 << 10);
}
