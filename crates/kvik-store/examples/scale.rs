//! What a block costs besides its bytes, and how long a lookup of 512 keys takes among many blocks.
//!
//! ```text
//! cargo run --release -p kvik-store --example scale -- [BLOCKS [DIR]]
//! ```
//!
//! Blocks of 64 bytes are put into a store within this process, in prompts of 1,024; then `contains` is asked for 512
//! random keys at a time, half of which are there. With a directory the puts are durable in a log there, and the store is
//! opened again at the end.

use kvik_core::{Code, Error, Layout, Result};
use kvik_engine::{Config, Engine, PageSet};
use kvik_store::{Ack, BlockKey, Client, LogOptions, MAX_KEYS, Namespace, Shape, Space, StoreOptions};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

const BYTES: u64 = 64;
const LOOKUPS: usize = 2000;
const KEYS: usize = 512;

/// The key of a block: evenly spread, as real ones are.
fn key(number: u64) -> BlockKey {
    BlockKey(blake3::hash(&number.to_le_bytes()).into())
}

/// Bytes that this process has in memory.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) << 10
}

fn namespace() -> Namespace {
    Namespace {
        model: "scale".into(),
        revision: String::new(),
        kv_dtype: "uint8".into(),
        quantisation: String::new(),
        layers: 0..1,
        model_layers: 1,
        heads: 0..1,
        model_heads: 1,
        block_tokens: 1,
        layout: String::new(),
        salt: Vec::new(),
        lora: String::new(),
    }
}

/// Puts all blocks.
fn fill(engine: &Engine, space: &Space, blocks: u64, ack: Ack) -> Result<()> {
    let layout = Arc::new(Layout::contiguous(MAX_KEYS as u32, BYTES)?);
    let region = engine.allocate(layout.end())?;
    let pages = PageSet::new(&region, layout, (0..MAX_KEYS as u32).collect(), None, None)?;
    for first in (0..blocks).step_by(MAX_KEYS) {
        let keys: Vec<BlockKey> = (first..(first + MAX_KEYS as u64).min(blocks)).map(key).collect();
        let pages = pages.select(0..keys.len())?;
        space.put(&keys, &pages, ack, Some(Duration::from_secs(60)))?.wait(None)?;
    }
    Ok(())
}

/// How long lookups take, the fastest first.
fn lookups(space: &Space, blocks: u64) -> Result<Vec<Duration>> {
    let mut times = Vec::new();
    for round in 0..LOOKUPS as u64 {
        let wanted = |at: u64| key((round * 7_919 + at * 104_729) % (2 * blocks));
        let keys: Vec<BlockKey> = (0..KEYS as u64).map(wanted).collect();
        let began = Instant::now();
        space.contains(&keys)?;
        times.push(began.elapsed());
    }
    times.sort_unstable();
    Ok(times)
}

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let blocks: u64 = args
        .next()
        .map_or(Ok(10_000_000), |text| text.parse())
        .map_err(|_| Error::new(Code::InvalidArgument, "the first argument is a number of blocks"))?;
    let dir = args.next().map(PathBuf::from);
    let ack = if dir.is_some() { Ack::Durable } else { Ack::Stored };
    let memory = (blocks + 16 * MAX_KEYS as u64) * BYTES;
    // A record takes some 330 bytes.
    let log = dir.map(|dir| (dir, LogOptions::new(blocks * 600 + (4 << 30))));
    let options = StoreOptions { memory, log, ..StoreOptions::default() };
    {
        let engine = Engine::start(Config::default())?;
        let client = Client::embedded(&engine, &options)?;
        let space = client.open("scale", &namespace(), Shape::new(1, 1, BYTES)?)?;
        let (before, began) = (resident(), Instant::now());
        fill(&engine, &space, blocks, ack)?;
        let (put, after, counts) = (began.elapsed(), resident(), client.stat()?);
        let times = lookups(&space, blocks)?;
        let each = (after - before) as f64 / counts.blocks as f64;
        println!("{} blocks of {BYTES} bytes, put in {:.1} s", counts.blocks, put.as_secs_f64());
        println!("{each:.0} bytes a block in memory, its own {BYTES} included");
        let at = |share: f64| times[(times.len() as f64 * share) as usize].as_secs_f64() * 1e3;
        println!("contains of {KEYS} keys: p50 {:.3} ms, p99 {:.3} ms, {LOOKUPS} calls", at(0.5), at(0.99));
    }
    if options.log.is_some() {
        let engine = Engine::start(Config::default())?;
        let began = Instant::now();
        let client = Client::embedded(&engine, &options)?;
        println!("opened in {:.1} s: {} blocks", began.elapsed().as_secs_f64(), client.stat()?.blocks);
    }
    Ok(())
}
