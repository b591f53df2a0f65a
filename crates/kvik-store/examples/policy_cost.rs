//! What policies cost: bytes a block, and nanoseconds a call, at many blocks.
//!
//! ```text
//! cargo run --release -p kvik-store --example policy_cost -- [BLOCKS]
//! ```

use kvik_store::policy::{Policy, PolicyKind};
use std::time::Instant;

fn main() {
    let blocks: u32 = match std::env::args().nth(1).map(|blocks| blocks.parse()) {
        None => 10_000_000,
        Some(Ok(blocks)) if blocks > 0 => blocks,
        _ => {
            eprintln!("policy_cost: the number of blocks is a number above 0");
            std::process::exit(2);
        }
    };
    println!("{blocks} blocks\n\n| policy | bytes a block | insert ns | touch ns | replace ns |");
    println!("|---|---|---|---|---|");
    for kind in PolicyKind::ALL {
        let mut policy = kind.build(u64::from(blocks) * 64);
        let insert = time(blocks, |at| policy.insert(at, fingerprint(u64::from(at)), 64));
        // As likely everywhere: no cache of the processor helps.
        let touch = time(blocks, |at| {
            let id = fingerprint(u64::from(at) << 32) % u64::from(blocks);
            policy.touch(id as u32, fingerprint(id));
        });
        let mut slots: Vec<u64> = (0..u64::from(blocks)).collect();
        let mut fresh = u64::from(blocks);
        let replace = time(blocks, |_| {
            replace(policy.as_mut(), &mut slots, fresh);
            fresh += 1;
        });
        let bytes = policy.memory() as f64 / f64::from(blocks);
        println!("| {} | {bytes:.1} | {insert:.0} | {touch:.0} | {replace:.0} |", kind.name());
    }
}

/// A new block takes the place of the victim: what a store that is full does for each block.
fn replace(policy: &mut dyn Policy, slots: &mut [u64], fresh: u64) {
    policy.request();
    if !policy.admits(fingerprint(fresh), 64) {
        return;
    }
    if let Some(victim) = policy.victim() {
        policy.evict(victim, fingerprint(slots[victim as usize]));
        slots[victim as usize] = fresh;
        policy.insert(victim, fingerprint(fresh), 64);
    }
}

/// Nanoseconds a call.
fn time(calls: u32, mut call: impl FnMut(u32)) -> f64 {
    let start = Instant::now();
    (0..calls).for_each(&mut call);
    start.elapsed().as_secs_f64() * 1e9 / f64::from(calls)
}

fn fingerprint(number: u64) -> u64 {
    let mixed = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}
