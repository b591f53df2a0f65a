//! A store does with a load what its policy does with it in a replay.

use crate::rig::{self, Pages, keys};
use kvik_engine::{Config, Engine};
use kvik_store::policy::PolicyKind;
use kvik_store::replay::{Workload, generate, replay};
use kvik_store::{Ack, BlockKey, Chain, Client, Namespace, Shape, StoreOptions};

/// Blocks that there is room for.
const CAPACITY: usize = 256;
const BLOCK: u64 = 4096;
/// The most blocks of a request that are taken.
const MOST: usize = 64;

/// The blocks that came back of all requests, and how many were asked for: as an engine does it, which gets what is
/// there of a prompt, and then puts the rest.
fn hits_of(policy: PolicyKind, requests: &[Vec<BlockKey>], namespace: &Namespace) -> u64 {
    let engine = Engine::start(Config::default()).unwrap();
    let options = StoreOptions { memory: CAPACITY as u64 * BLOCK, policy, ..StoreOptions::default() };
    let client = Client::embedded(&engine, &options).unwrap();
    let shape = Shape::new(1, 1, BLOCK).unwrap();
    let space = client.open("one", namespace, shape).unwrap();
    let pages = Pages::new(&engine, MOST as u32, shape);
    let set = |count: usize| pages.set(&(0..count as u32).collect::<Vec<_>>());
    let mut hits = 0;
    for keys in requests {
        let there = space.get(keys, &set(keys.len()), None).unwrap().wait().unwrap();
        hits += there as u64;
        let (before, rest) = keys.split_at(there);
        if !rest.is_empty() {
            let parent = before.last().copied();
            space
                .put(Chain::after(parent.as_slice(), rest), &set(rest.len()), Ack::Stored, None)
                .unwrap()
                .wait(None)
                .unwrap();
        }
    }
    hits
}

#[test]
fn a_store_has_the_hits_that_its_policy_has_in_a_replay() {
    let seed = 20;
    for workload in [Workload::Conversations, Workload::OneOff] {
        let whole = generate(workload, 1500, seed).unwrap();
        let mut trace = kvik_store::replay::Trace::default();
        let namespace = rig::namespace("replayed");
        let mut requests = Vec::new();
        for (request, blocks) in whole.requests() {
            let ids: Vec<u64> = blocks.iter().take(MOST).map(|block| whole.name(*block).unwrap()).collect();
            trace.push(request.timestamp_ms, 0, 0, &ids).unwrap();
            requests.push(keys(&namespace, &ids.iter().map(|id| *id as u32).collect::<Vec<_>>()));
        }
        for policy in [PolicyKind::Lru, PolicyKind::S3Fifo, PolicyKind::S3FifoHalf] {
            let expected = replay(&trace, policy, CAPACITY).unwrap();
            let hits = hits_of(policy, &requests, &namespace);
            println!("{} {policy:?}: {hits} hits, in a replay {}", workload.name(), expected.hits);
            // In a store a whole request has its places before the first of its blocks counts as used.
            let least = expected.hits as f64 * 0.9;
            assert!(hits as f64 >= least, "{}, {policy:?}: {hits} hits", workload.name());
        }
    }
}
