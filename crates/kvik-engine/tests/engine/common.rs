//! What the tests share.

use kvik_core::{Code, Error, Layout, Right, Ticket, Use};
use kvik_engine::{
    Config, Engine, GrantOptions, PageSet, Preference, Region, Rejected, Report, TransferOptions,
};
use std::sync::Arc;
use std::time::{Duration, Instant};

#[path = "../../../../tests/common/watch.rs"]
pub mod watch;

pub const PAGE: u64 = 16 << 10;
/// Longer than anything here may take.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub fn engine(transport: Preference) -> Engine {
    Engine::start(Config { transport, ..Config::default() }).unwrap()
}

/// A region of `pages` pages whose bytes depend on `seed` and their place.
pub fn region(engine: &Engine, pages: u32, seed: u8) -> Region {
    let region = engine.allocate(u64::from(pages) * PAGE).unwrap();
    fill(&region, seed);
    region
}

pub fn fill(region: &Region, seed: u8) {
    region.write_at(0, &pattern(region.bytes(), seed)).unwrap();
}

/// Bytes that depend on `seed`, their place in 4 KiB, and the number of these 4 KiB.
pub fn pattern(bytes: u64, seed: u8) -> Vec<u8> {
    let mut all = vec![0; bytes as usize];
    for (number, part) in all.chunks_mut(4096).enumerate() {
        for (at, byte) in part.iter_mut().enumerate() {
            *byte = (at as u8).wrapping_mul(7).wrapping_add(number as u8) ^ seed;
        }
    }
    all
}

/// Every byte the same.
pub fn blank(region: &Region, byte: u8) {
    let bytes = vec![byte; 1 << 20];
    let mut at = 0;
    while at < region.bytes() as usize {
        let len = bytes.len().min(region.bytes() as usize - at);
        region.write_at(at, &bytes[..len]).unwrap();
        at += len;
    }
}

pub fn bytes(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.bytes() as usize];
    region.read_at(0, &mut bytes).unwrap();
    bytes
}

pub fn byte(region: &Region, at: u64) -> u8 {
    let mut byte = [0];
    region.read_at(at as usize, &mut byte).unwrap();
    byte[0]
}

pub fn pages(region: &Region, ids: &[u32]) -> PageSet {
    paged(region, ids, PAGE)
}

pub fn paged(region: &Region, ids: &[u32], page: u64) -> PageSet {
    let count = (region.bytes() / page) as u32;
    PageSet::new(region, Arc::new(Layout::contiguous(count, page).unwrap()), ids.into(), None, None).unwrap()
}

pub fn all(region: &Region) -> PageSet {
    pages(region, &(0..(region.bytes() / PAGE) as u32).collect::<Vec<_>>())
}

pub fn check(from: &Region, from_ids: &[u32], to: &Region, to_ids: &[u32]) {
    let (source, target) = (bytes(from), bytes(to));
    for (a, b) in from_ids.iter().zip(to_ids) {
        let (a, b) = (*a as usize * PAGE as usize, *b as usize * PAGE as usize);
        assert!(source[a..a + PAGE as usize] == target[b..b + PAGE as usize], "page at {a} differs");
    }
}

pub fn many() -> GrantOptions {
    GrantOptions { uses: Use::Many, ..GrantOptions::default() }
}

pub fn to_write() -> GrantOptions {
    GrantOptions { right: Right::Write, ..many() }
}

pub fn within(deadline: Duration) -> TransferOptions {
    TransferOptions { deadline: Some(deadline), ..TransferOptions::default() }
}

/// Reads all pages of the ticket into `into`, with the default options.
pub fn read(engine: &Engine, into: &PageSet, ticket: &Ticket) -> Result<Report, Error> {
    read_with(engine, into, ticket, TransferOptions::default())
}

pub fn read_with(
    engine: &Engine,
    into: &PageSet,
    ticket: &Ticket,
    options: TransferOptions,
) -> Result<Report, Error> {
    engine.read(into, ticket, None, options)?.wait(Some(PATIENCE))
}

/// The error's code, after a look at what every error owes its reader.
/// The transports that were not taken, as texts.
pub fn reasons(of: &[Rejected]) -> Vec<String> {
    of.iter().map(Rejected::to_string).collect()
}

/// The same in one text.
pub fn rejected(of: &[Rejected]) -> String {
    reasons(of).join("; ")
}

pub fn code<T: std::fmt::Debug>(result: Result<T, Error>) -> Code {
    let error = result.unwrap_err();
    assert!(error.text.len() > 20, "{error:?} says too little");
    error.code
}

pub fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < until, "{what} did not happen");
        std::thread::yield_now();
    }
}

/// Tries with this time, and with more where it was over before that which it is for had begun: `attempt` gives none then.
pub fn in_time<T>(shortest: Duration, attempt: impl FnMut(Duration) -> Option<T>) -> T {
    let times = [1, 4, 16].map(|times| times * shortest);
    times.into_iter().find_map(attempt).expect("the time was over each time before anything had begun")
}

/// Random numbers whose seed is printed.
pub struct Random(u64);

impl Random {
    pub fn new() -> Random {
        let seed = match std::env::var("KVIK_SEED") {
            Ok(seed) => seed.parse().unwrap(),
            Err(_) => kvik_core::Incarnation::random().unwrap().0,
        };
        println!("KVIK_SEED={seed}");
        Random::of(seed)
    }

    pub fn of(seed: u64) -> Random {
        Random(seed | 1)
    }

    pub fn below(&mut self, limit: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 32) % u64::from(limit)) as u32
    }

    /// `count` different numbers below `limit`.
    pub fn distinct(&mut self, count: u32, limit: u32) -> Vec<u32> {
        let mut all: Vec<u32> = (0..limit).collect();
        for i in 0..count {
            all.swap(i as usize, (i + self.below(limit - i)) as usize);
        }
        all.truncate(count as usize);
        all
    }

    pub fn fork(&mut self) -> Random {
        Random((u64::from(self.below(u32::MAX)) << 32 | u64::from(self.below(u32::MAX))) | 1)
    }
}
