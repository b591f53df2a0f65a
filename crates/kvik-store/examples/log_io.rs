//! What the log tier moves, to be compared with what `fio` says of the same directory.
//!
//! ```text
//! cargo run --release -p kvik-store --example log_io -- DIR write BLOCK_BYTES TOTAL_BYTES BYTES_A_SYNC THREADS
//! cargo run --release -p kvik-store --example log_io -- DIR read BLOCK_BYTES TOTAL_BYTES 0 THREADS
//! cargo run --release -p kvik-store --example log_io -- DIR small 64 RECORDS 0 THREADS
//! cargo run --release -p kvik-store --example log_io -- DIR open 0 0 0 1
//! ```
//!
//! `write` stores blocks, each thread its own, and waits until they are durable after so many bytes. `read` loads blocks
//! that `write` left, in random order and once each: let the page cache be dropped before it. `small` stores records of
//! 64 bytes. `open` opens what is there, and counts. All print MiB a second, or seconds.

use kvik_core::page_sum;
use kvik_host::{HugePages, Memory};
use kvik_store::{
    BlockKey, Entry, Found, Identity, Log, LogOptions, NamespaceId, Place, Shape, Tier, TierOwner,
};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(300);
const NAMESPACE: NamespaceId = NamespaceId([7; 32]);

#[derive(Default)]
struct Owner {
    count: AtomicU64,
    blocks: Option<Mutex<Vec<(Identity, Place)>>>,
}

impl TierOwner for Owner {
    fn found(&self, found: Found<'_>) {
        if let Found::Block(identity, place) = found {
            self.count.fetch_add(1, Ordering::Relaxed);
            if let Some(blocks) = &self.blocks {
                blocks.lock().unwrap().push((identity, place));
            }
        }
    }
    fn keep(&self, _: &Identity, _: Place) -> bool {
        false
    }
    fn moved(&self, _: &Identity, _: Place, _: Place) {}
    fn gone(&self, _: Place, _: Place) {}

    fn dropped(&self, _: &Identity, _: Place) {}
}

fn key(number: u64) -> BlockKey {
    let mut key = [0; 32];
    for (at, part) in key.chunks_mut(8).enumerate() {
        part.copy_from_slice(&page_sum(&(number * 4 + at as u64).to_le_bytes()).to_le_bytes());
    }
    BlockKey(key)
}

fn arena(bytes: usize) -> Memory {
    let memory = Memory::shared(bytes, HugePages::Never).unwrap();
    let page: Vec<u8> = (0..4096u32).map(|i| (i * 31 % 253) as u8).collect();
    (0..bytes / 4096).for_each(|at| memory.copy_in(at * 4096, &page).unwrap());
    memory
}

fn shape(block: u64) -> Shape {
    let layers = (block >> 16).max(1);
    Shape::new(layers as u32, 1, block / layers).unwrap()
}

fn entry(number: u64, shape: Shape, sums: &[u64]) -> Entry {
    let parent = (number > 0).then(|| key(number - 1));
    Entry { key: key(number), parent, namespace: NAMESPACE, shape, sums: sums.into() }
}

/// Runs `f` on so many threads, and gives the seconds that all of them took.
fn timed(threads: u64, f: impl Fn(u64) + Sync) -> f64 {
    let begun = Instant::now();
    std::thread::scope(|scope| {
        (0..threads).for_each(|thread| {
            drop(scope.spawn({
                let f = &f;
                move || f(thread)
            }))
        })
    });
    begun.elapsed().as_secs_f64()
}

fn write(log: &Log, (block, total, sync, threads): (u64, u64, u64, u64)) {
    let shape = shape(block);
    let memory = arena((block.next_multiple_of(4096) * threads) as usize);
    let part = (u64::from(shape.summed_layers()) * shape.layer_bytes()) as usize;
    let mut bytes = vec![0; block as usize];
    memory.copy_out(0, &mut bytes).unwrap();
    let sums: Vec<u64> = bytes.chunks(part).map(page_sum).collect();
    let count = total / block;
    log.declare(NAMESPACE, b"a model").unwrap();
    let seconds = timed(threads, |thread| {
        let mut places = Vec::new();
        for number in (0..count).filter(|number| number % threads == thread) {
            let entry = entry(number, shape, &sums);
            let at = block.next_multiple_of(4096) * thread;
            places.push(log.store(&entry, &memory, at as usize, LONG).unwrap());
            if sync > 0 && places.len() as u64 * block * threads >= sync {
                log.sync(&places, LONG).unwrap();
                places.clear();
            }
        }
        log.sync(&places, LONG).unwrap();
    });
    let rate = total as f64 / seconds / f64::from(1 << 20);
    println!("{rate:.0} MiB/s, {:.0} records/s", count as f64 / seconds);
}

fn read(log: &Log, owner: &Owner, threads: u64) {
    let mut blocks = owner.blocks.as_ref().unwrap().lock().unwrap().clone();
    let mut random = 88172645463325252u64;
    for at in (1..blocks.len()).rev() {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        blocks.swap(at, (random % (at as u64 + 1)) as usize);
    }
    let block = blocks[0].0.shape.bytes();
    let memory = arena((block.next_multiple_of(4096) * threads) as usize);
    let seconds = timed(threads, |thread| {
        for (identity, place) in blocks.iter().skip(thread as usize).step_by(threads as usize) {
            let at = block.next_multiple_of(4096) * thread;
            log.load(*place, identity, &memory, at as usize).unwrap().unwrap();
        }
    });
    println!("{:.0} MiB/s", (block * blocks.len() as u64) as f64 / seconds / f64::from(1 << 20));
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [dir, what, numbers @ ..] = &args[..] else { panic!("see the top of this file for what to say") };
    let numbers: Vec<u64> = numbers.iter().map(|number| number.parse().unwrap()).collect();
    let [block, total, sync, threads] = numbers[..] else {
        panic!("see the top of this file for what to say")
    };
    let blocks = (what == "read").then(Mutex::default);
    let owner = Arc::new(Owner { blocks, ..Owner::default() });
    let options = LogOptions { unsynced: 256 << 20, flush: LONG, ..LogOptions::new(40 << 30) };
    let begun = Instant::now();
    let log = Log::open(Path::new(dir), options, owner.clone()).unwrap();
    let opened = begun.elapsed().as_secs_f64();
    match what.as_str() {
        "write" => write(&log, (block, total, sync, threads)),
        "small" => write(&log, (block, block * total, 64 << 20, threads)),
        "read" => read(&log, &owner, threads),
        _ => println!("opened in {opened:.2} s, {} blocks", owner.count.load(Ordering::Relaxed)),
    }
}
