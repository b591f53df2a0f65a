//! Who reads a block reads that one, whatever becomes of it meanwhile; and who gives up a get has nothing any more.

use crate::rig::*;
use kvik_engine::{Config, Engine, Preference};
use kvik_store::policy::PolicyKind;
use kvik_store::{BlockKey, Client, Getting, Server, Space, StoreOptions};
use std::time::{Duration, Instant};

/// Longer than the test takes, so that nothing ends by itself.
const LONG: Duration = Duration::from_secs(60);

/// A get of blocks that are lent, and of which none was read yet, and its pages.
fn lent(rig: &Rig, keys: &[BlockKey]) -> (Getting, Pages, Vec<u32>) {
    let pages = Pages::new(&rig.engine, keys.len() as u32, shape());
    let ids: Vec<u32> = (0..keys.len() as u32).collect();
    let getting = rig.space.get(keys, &pages.set(&ids), Some(LONG)).unwrap();
    becomes(|| is_lent(&rig.client, keys.len() as u64));
    (getting, pages, ids)
}

/// Whether so many blocks are lent.
fn is_lent(client: &Client, blocks: u64) -> bool {
    client.metrics().unwrap().contains(&format!("kvik_store_lent_bytes {}\n", blocks * BLOCK))
}

/// Gives gets up, each after another count of its turns; nothing of them is lent long before their deadline.
fn gives_up(client: &Client, space: &Space, pages: &Pages, keys: &[BlockKey]) {
    assert_eq!(put(space, pages, None, keys).stored, keys.len() as u64);
    let before = client.stat().unwrap().hits;
    let begun = Instant::now();
    let ids: Vec<u32> = (20..20 + keys.len() as u32).collect();
    const GETS: u64 = 12;
    for number in 0..GETS {
        let mut getting = space.get(keys, &pages.set(&ids), Some(LONG)).unwrap();
        (0..number % 3).for_each(|_| assert!(getting.next(None).unwrap().is_some()));
        if number % 2 == 0 {
            getting.cancel();
            assert_eq!(getting.next(None).unwrap(), None, "it goes on");
        }
    }
    let all = before + GETS * keys.len() as u64;
    // Also of what the store answers when nobody waits any more.
    becomes(|| client.stat().unwrap().hits == all && is_lent(client, 0));
    assert!(begun.elapsed() < LONG / 2, "they have ended by themselves");
    assert_eq!(get(space, pages, keys), keys.len());
}

fn is_read(getting: Getting, pages: &Pages, ids: &[u32], keys: &[BlockKey]) {
    assert_eq!(getting.wait().unwrap(), keys.len());
    ids.iter().zip(keys).for_each(|(page, key)| assert!(pages.holds(*page, key), "page {page} is another"));
}

#[test]
fn what_is_lent_is_not_evicted() {
    // The policy takes the oldest first, and these are older than what comes.
    let policy = PolicyKind::Lru;
    let rig = Rig::with(StoreOptions { memory: 1 << 20, policy, ..StoreOptions::default() });
    // Each is a prompt of its own, so that any of them could go.
    let keys: Vec<BlockKey> = (0..20).flat_map(|prompt| rig.keys(&[prompt])).collect();
    (0..20).for_each(|prompt| assert_eq!(rig.put(&[prompt]).stored, 1));
    let (getting, pages, ids) = lent(&rig, &keys);
    for prompt in 100..300 {
        rig.put(&[prompt]);
    }
    is_read(getting, &pages, &ids, &keys);
}

#[test]
fn what_is_removed_while_it_is_lent_is_read_to_its_end() {
    let rig = Rig::new(1 << 20);
    let keys = rig.keys(&(0..20).collect::<Vec<u32>>());
    put(&rig.space, &rig.pages, None, &keys);
    let (getting, pages, ids) = lent(&rig, &keys);
    assert_eq!(rig.space.clear().unwrap(), 20);
    // Others come into all places that are free.
    for prompt in 100..200 {
        rig.put(&[prompt]);
    }
    is_read(getting, &pages, &ids, &keys);
    assert_eq!(get(&rig.space, &rig.pages, &keys), 0);
}

#[test]
fn who_gives_up_a_get_gives_back_what_is_lent() {
    let rig = Rig::new(1 << 20);
    let keys = rig.keys(&(0..20).collect::<Vec<u32>>());
    gives_up(&rig.client, &rig.space, &rig.pages, &keys);
    let (getting, ..) = lent(&rig, &keys);
    drop(getting);
    becomes(|| is_lent(&rig.client, 0));
}

#[test]
fn who_gives_up_a_get_of_a_server_gives_back_what_is_lent() {
    for transport in [Preference::Tcp, Preference::Local] {
        let engine = || Engine::start(Config { transport, ..Config::default() }).unwrap();
        let (there, here) = (engine(), engine());
        let _server =
            Server::start(&there, &StoreOptions { memory: 1 << 20, ..StoreOptions::default() }).unwrap();
        let client = Client::connect(&here, &there.addresses()[0].to_string(), None).unwrap();
        let namespace = namespace("tiny");
        let (space, pages) =
            (client.open("one", &namespace, shape()).unwrap(), Pages::new(&here, 64, shape()));
        gives_up(&client, &space, &pages, &keys(&namespace, &(0..20).collect::<Vec<u32>>()));
    }
}
