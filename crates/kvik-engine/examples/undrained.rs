//! A peer that never drains: what it holds, and what that costs the others.
//!
//! `cargo run --release -p kvik-engine --example undrained [ROUNDS] [WINDOW_MIB]`
//!
//! One owner, three honest readers and one whose data threads are stuck, while its heartbeats go on: so nobody takes
//! it for dead, and nothing is ever read from its channels. Rounds with and without it alternate in one run, each
//! with the honest readers' transfers of the same pages over `tcp`. Printed are medians with the lowest and highest
//! of the ratio of adjacent rounds, the most that was in flight to the stuck peer, what the kernel held for it, and
//! the process's resident memory at the first and the last round.

#[path = "../../../tests/standins/faulty.rs"]
#[allow(dead_code)]
mod faulty;

use faulty::Faults;
use kvik_core::{Layout, Use};
use kvik_engine::{
    Config, Engine, Grant, GrantOptions, PageSet, Preference, Region, Transfer, TransferOptions,
};
use std::sync::Arc;
use std::thread::scope;
use std::time::{Duration, Instant};

const PAGE: u64 = 128 << 10;
const PAGES: u32 = 512;
const HONEST: usize = 3;
const TURN: Duration = Duration::from_millis(500);
const LONG: Duration = Duration::from_secs(3600);

fn main() {
    let mut args = std::env::args().skip(1).map(|arg| arg.parse::<u64>().expect("a number"));
    let (rounds, window) = (args.next().unwrap_or(10), args.next().unwrap_or(32) << 20);
    let tcp = || Config { transport: Preference::Tcp, ..Config::default() };
    let owner = Engine::start(Config { window, ..tcp() }).expect("an engine");
    let (there, all) = region(&owner);
    let options = GrantOptions { uses: Use::Many, expiry: LONG, max_expiry: LONG, ..GrantOptions::default() };
    let grant = owner.grant(&all, options).expect("a grant");
    let honest: Vec<(Engine, PageSet)> = (0..HONEST)
        .map(|_| {
            let engine = Engine::start(tcp()).expect("an engine");
            let (_, set) = region(&engine);
            (engine, set)
        })
        .collect();
    turn(&honest, &grant);
    let (mut rates, mut most, mut kernel, mut resident) = (Vec::new(), 0, 0, Vec::new());
    for round in 0..rounds {
        // Which one comes first alternates too.
        let mut pair = [0.0; 2];
        for with in [round % 2 == 0, round % 2 != 0] {
            let stuck = with.then(|| Stuck::start(&grant));
            pair[usize::from(with)] = turn(&honest, &grant);
            if let Some(stuck) = stuck {
                most = most.max(in_flight(&owner, &stuck.engine));
                kernel = kernel.max(unsent());
                stuck.end();
            }
        }
        resident.push(resident_bytes());
        println!("round {round}: {:.2} GB/s without, {:.2} GB/s with", pair[0] / 1e9, pair[1] / 1e9);
        rates.push(pair[1] / pair[0]);
    }
    rates.sort_by(f64::total_cmp);
    let median = rates[rates.len() / 2];
    println!(
        "honest peers' rate with the stuck peer: {median:.3} of without [{:.3}, {:.3}]",
        rates[0],
        rates[rates.len() - 1]
    );
    println!("in flight to the stuck peer: {} KiB at most; window {} KiB", most >> 10, window >> 10);
    println!("unsent in the kernel's buffers of all connections, at most: {} KiB", kernel >> 10);
    println!(
        "resident: {} MiB in the first round, {} MiB in the last",
        resident[0] >> 20,
        resident[resident.len() - 1] >> 20
    );
    drop(there);
}

/// A reader whose data threads never come back from the first chunk.
struct Stuck {
    engine: Engine,
    faults: Arc<Faults>,
    transfer: Transfer,
}

impl Stuck {
    fn start(grant: &Grant) -> Stuck {
        let faults = Faults::new(1);
        let config =
            Config { transport: Preference::Tcp, between: Some(faults.between()), ..Config::default() };
        let engine = Engine::start(config).expect("an engine");
        let (_, set) = region(&engine);
        faults.hold_from(0);
        let transfer = engine.read(&set, grant.ticket(), None, within(LONG)).expect("a transfer");
        assert!(faults.wait_held(1, Duration::from_secs(10)), "nothing came");
        Stuck { engine, faults, transfer }
    }

    fn end(self) {
        assert!(!self.transfer.is_done(), "it was to make no progress");
        self.transfer.cancel();
        self.faults.release();
        drop(self.transfer.wait(Some(Duration::from_secs(10))));
        self.engine.close(Duration::from_secs(5)).expect("a close");
    }
}

fn within(deadline: Duration) -> TransferOptions {
    TransferOptions { deadline: Some(deadline), ..TransferOptions::default() }
}

fn region(engine: &Engine) -> (Region, PageSet) {
    let region = engine.allocate(u64::from(PAGES) * PAGE).expect("memory");
    let layout = Arc::new(Layout::contiguous(PAGES, PAGE).expect("a layout"));
    let ids: Vec<u32> = (0..PAGES).collect();
    let set = PageSet::new(&region, layout, ids.into(), None, None).expect("pages");
    (region, set)
}

/// Bytes a second that the honest readers get, all together.
fn turn(honest: &[(Engine, PageSet)], grant: &Grant) -> f64 {
    let began = Instant::now();
    let moved: u64 = scope(|scope| {
        let one = |(engine, set): &(Engine, PageSet)| {
            let mut moved = 0;
            while began.elapsed() < TURN {
                let read = engine.read(set, grant.ticket(), None, within(Duration::from_secs(30)));
                moved += read.and_then(|read| read.wait(None)).expect("an honest transfer").bytes;
            }
            moved
        };
        let threads: Vec<_> = honest.iter().map(|part| scope.spawn(move || one(part))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a reader")).sum()
    });
    moved as f64 / began.elapsed().as_secs_f64()
}

fn in_flight(owner: &Engine, peer: &Engine) -> u64 {
    let (metrics, id) = (owner.metrics(), peer.id().to_string());
    let lines =
        metrics.lines().filter(|line| line.starts_with("kvik_in_flight_bytes{") && line.contains(&id));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum()
}

/// Bytes that this network namespace's TCP connections have not sent or not had acknowledged.
fn unsent() -> u64 {
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap_or_default();
    let queues = table.lines().skip(1).filter_map(|line| line.split_whitespace().nth(4));
    queues.filter_map(|queue| u64::from_str_radix(queue.split(':').next()?, 16).ok()).sum()
}

fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    statm.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0) * 4096
}
