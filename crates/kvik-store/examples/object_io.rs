//! What blocks cost an object store, in requests and bytes: put, sent, and read back by a store that was started again.
//!
//! ```text
//! object_io URL [BLOCK_KIB [BLOCKS [BATCH_MIB]]]     such as: object_io file:///tmp/objects 256 512 32
//! ```

use kvik_core::{Layers, Layout};
use kvik_engine::{Config, Engine, PageSet};
use kvik_store::{Ack, BlockKey, Bucket, Client, Namespace, ObjectOptions, Shape, StoreOptions};
use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Blocks of a prompt: what is put, and asked for, at once.
const PROMPT: u32 = 16;

fn value(client: &Client, series: &str) -> Result<u64, Box<dyn Error>> {
    let text = client.metrics()?;
    let line = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    Ok(line.map_or(Ok(0), str::parse)?)
}

fn until(what: impl Fn() -> Result<bool, Box<dyn Error>>) -> Result<(), Box<dyn Error>> {
    while !what()? {
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

fn traffic(
    client: &Client,
    what: &str,
    blocks: u64,
    bytes: u64,
    took: Duration,
) -> Result<(), Box<dyn Error>> {
    let requests =
        |name: &str| value(client, &format!("kvik_store_object_requests_total{{request=\"{name}\"}}"));
    let (put, get, list) = (requests("put")?, requests("get")?, requests("list")?);
    let sent = value(client, "kvik_store_object_sent_bytes_total")?;
    let received = value(client, "kvik_store_object_received_bytes_total")?;
    let each = |count: u64| count as f64 / blocks as f64;
    println!(
        "{what}: {blocks} blocks, {:.1} MiB in {:.2} s; {put} PUT, {get} GET, {list} LIST: {:.4} requests a block; sent \
         {:.4} and received {:.4} bytes for each of theirs",
        bytes as f64 / f64::from(1 << 20),
        took.as_secs_f64(),
        each(put + get + list),
        sent as f64 / bytes as f64,
        received as f64 / bytes as f64,
    );
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let url = arguments.next().ok_or("give the address of an object store, such as file:///tmp/objects")?;
    let mut number = |default: u64| arguments.next().map_or(Ok(default), |text| text.parse());
    let (run, blocks, batch) = (number(256)? << 10, number(512)?, number(32)? << 20);
    let shape = Shape::new(1, 1, run)?;
    let object = ObjectOptions { batch, ..ObjectOptions::new(Bucket::Url(url), 1 << 40) };
    let options = StoreOptions { memory: 2 * blocks * run, object: Some(object), ..StoreOptions::default() };
    let namespace = Namespace {
        model: "object_io".into(),
        revision: format!("{:?}", std::time::SystemTime::now()),
        kv_dtype: "bfloat16".into(),
        quantisation: String::new(),
        layers: 0..1,
        model_layers: 1,
        heads: 0..1,
        model_heads: 1,
        block_tokens: 16,
        layout: String::new(),
        salt: Vec::new(),
        lora: String::new(),
    };
    let prompts: Vec<Vec<BlockKey>> = (0..blocks as u32 / PROMPT)
        .map(|prompt| {
            let tokens: Vec<u32> = (0..16 * PROMPT).map(|token| token + prompt * 1_000_000).collect();
            namespace.keys(&tokens, b"", &[])
        })
        .collect::<Result<_, _>>()?;
    let (blocks, ids) = (prompts.len() as u64 * u64::from(PROMPT), (0..PROMPT).collect::<Vec<_>>());
    let layers = Layers::Strided { count: 1, stride: run * u64::from(PROMPT) };
    let layout = Arc::new(Layout::new(0, PROMPT, run, run, 1, run * u64::from(PROMPT), layers)?);
    {
        let engine = Engine::start(Config::default())?;
        let client = Client::embedded(&engine, &options)?;
        let space = client.open("one", &namespace, shape)?;
        let region = engine.allocate(layout.end())?;
        let pages = PageSet::new(&region, layout.clone(), ids.clone().into(), None, None)?;
        let began = Instant::now();
        for keys in &prompts {
            space.put(keys, &pages, Ack::Stored, None)?.wait(None)?;
        }
        until(|| Ok(client.stat()?.object_written >= blocks))?;
        until(|| Ok(value(&client, "kvik_store_object_unsent_bytes")? == 0))?;
        traffic(&client, "put ", blocks, blocks * run, began.elapsed())?;
    }
    let engine = Engine::start(Config::default())?;
    let client = Client::embedded(&engine, &options)?;
    let space = client.open("one", &namespace, shape)?;
    let region = engine.allocate(layout.end())?;
    let pages = PageSet::new(&region, layout, ids.into(), None, None)?;
    let began = Instant::now();
    until(|| Ok(value(&client, "kvik_store_object_open")? == 1))?;
    println!("open: {} blocks found in {:.3} s", client.stat()?.blocks, began.elapsed().as_secs_f64());
    let began = Instant::now();
    let mut found = 0;
    for keys in &prompts {
        found += space.get(keys, &pages, Some(Duration::from_secs(60)))?.wait()? as u64;
    }
    traffic(&client, "get ", found.max(1), found.max(1) * run, began.elapsed())
}
