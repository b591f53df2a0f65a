//! Who reads a block reads that one, whatever becomes of it meanwhile.

use crate::rig::*;
use kvik_store::policy::PolicyKind;
use kvik_store::{BlockKey, Getting, StoreOptions};
use std::time::{Duration, Instant};

/// Longer than the test takes, so that nothing ends by itself.
const LONG: Duration = Duration::from_secs(60);

/// A get of blocks that are lent, and of which none was read yet, and its pages.
fn lent(rig: &Rig, keys: &[BlockKey]) -> (Getting, Pages, Vec<u32>) {
    let pages = Pages::new(&rig.engine, keys.len() as u32, shape());
    let ids: Vec<u32> = (0..keys.len() as u32).collect();
    let getting = rig.space.get(keys, &pages.set(&ids), Some(LONG)).unwrap();
    let series = format!("kvik_store_lent_bytes {}\n", keys.len() as u64 * BLOCK);
    let until = Instant::now() + Duration::from_secs(20);
    while !rig.client.metrics().unwrap().contains(&series) {
        assert!(Instant::now() < until, "they are not lent");
        std::thread::yield_now();
    }
    (getting, pages, ids)
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
