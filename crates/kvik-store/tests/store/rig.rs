//! A store, an engine, and pages whose bytes are a function of the block's key.

use kvik_core::{Layers, Layout};
use kvik_engine::{Config, Engine, PageSet, Region};
use kvik_store::{Ack, BlockKey, Chain, Client, Namespace, Shape, Space, StoreOptions, Stored};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub const LAYERS: u32 = 3;
pub const SLICES: u32 = 2;
pub const RUN: u64 = 2048;
pub const BLOCK: u64 = LAYERS as u64 * SLICES as u64 * RUN;

/// Random numbers from `KVIK_SEED`, which is printed.
#[derive(Default)]
pub struct Random(u64);

impl Random {
    pub fn new() -> Random {
        let seed = std::env::var("KVIK_SEED").map_or_else(
            |_| std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64,
            |seed| seed.parse().unwrap(),
        );
        println!("KVIK_SEED={seed}");
        Random(seed)
    }

    pub fn with(seed: u64) -> Random {
        Random(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

pub fn namespace(model: &str) -> Namespace {
    Namespace {
        model: model.into(),
        revision: "1".into(),
        kv_dtype: "bfloat16".into(),
        quantisation: String::new(),
        layers: 0..LAYERS,
        model_layers: LAYERS,
        heads: 0..4,
        model_heads: 4,
        block_tokens: 16,
        layout: "layer, half, token, head".into(),
        salt: Vec::new(),
        lora: String::new(),
    }
}

pub fn shape() -> Shape {
    Shape::new(LAYERS, SLICES, RUN).unwrap()
}

/// The keys of a prompt of `blocks` blocks, which shares its first blocks with others by `prompt`'s digits.
pub fn keys(namespace: &Namespace, prompt: &[u32]) -> Vec<BlockKey> {
    let tokens: Vec<u32> = prompt.iter().flat_map(|block| [*block; 16]).collect();
    namespace.keys(&tokens, b"", &[]).unwrap()
}

/// What a run of a block holds.
fn content(key: &BlockKey, run: u64, bytes: usize) -> Vec<u8> {
    let mut hasher = blake3::Hasher::new_keyed(&key.0);
    hasher.update(&run.to_le_bytes());
    let mut content = vec![0; bytes];
    hasher.finalize_xof().fill(&mut content);
    content
}

/// Pages of a serving engine: layer by layer, each layer apart, slices apart within it.
#[derive(Clone)]
pub struct Pages {
    pub region: Region,
    pub layout: Arc<Layout>,
    shape: Shape,
}

impl Pages {
    pub fn new(engine: &Engine, count: u32, shape: Shape) -> Pages {
        let (run, pages, slices) = (shape.run_bytes(), u64::from(count), u64::from(shape.slices()));
        let layer = run * pages * slices + 64;
        let layers = Layers::Strided { count: shape.layers(), stride: layer };
        let layout = Layout::new(0, count, run, run, shape.slices(), run * pages, layers).unwrap();
        let region = engine.allocate(layout.end()).unwrap();
        Pages { region, layout: Arc::new(layout), shape }
    }

    fn runs(&self) -> impl Iterator<Item = (u32, u32)> + use<> {
        let slices = self.shape.slices();
        (0..self.shape.layers()).flat_map(move |layer| (0..slices).map(move |slice| (layer, slice)))
    }

    pub fn fill(&self, page: u32, key: &BlockKey) {
        for (run, (layer, slice)) in self.runs().enumerate() {
            let bytes = content(key, run as u64, self.shape.run_bytes() as usize);
            self.region.write_at(self.layout.at(layer, page, slice) as usize, &bytes).unwrap();
        }
    }

    pub fn wipe(&self, page: u32) {
        for (layer, slice) in self.runs() {
            let bytes = vec![0xEE; self.shape.run_bytes() as usize];
            self.region.write_at(self.layout.at(layer, page, slice) as usize, &bytes).unwrap();
        }
    }

    /// Whether a page holds all of a block.
    pub fn holds(&self, page: u32, key: &BlockKey) -> bool {
        self.runs().enumerate().all(|(run, (layer, slice))| {
            let mut bytes = vec![0; self.shape.run_bytes() as usize];
            self.region.read_at(self.layout.at(layer, page, slice) as usize, &mut bytes).unwrap();
            bytes == content(key, run as u64, bytes.len())
        })
    }

    pub fn set(&self, pages: &[u32]) -> PageSet {
        PageSet::new(&self.region, self.layout.clone(), pages.into(), None, None).unwrap()
    }
}

/// A directory that goes with the test.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("kvik-store-{name}-{}", std::process::id()));
        drop(std::fs::remove_dir_all(&path));
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.0));
    }
}

pub struct Rig {
    pub engine: Engine,
    pub client: Client,
    pub space: Space,
    pub namespace: Namespace,
    pub pages: Pages,
}

impl Rig {
    pub fn new(memory: u64) -> Rig {
        Rig::with(StoreOptions { memory, ..StoreOptions::default() })
    }

    pub fn with(options: StoreOptions) -> Rig {
        let engine = Engine::start(Config::default()).unwrap();
        let client = Client::embedded(&engine, &options).unwrap();
        let namespace = namespace("tiny");
        let space = client.open("one", &namespace, shape()).unwrap();
        let pages = Pages::new(&engine, 64, shape());
        Rig { engine, client, space, namespace, pages }
    }

    /// A client of the store at an address, with an engine of its own.
    pub fn served(address: &str) -> Rig {
        let engine = Engine::start(Config::default()).unwrap();
        let client = Client::connect(&engine, address, None).unwrap();
        let namespace = namespace("tiny");
        let space = client.open("one", &namespace, shape()).unwrap();
        let pages = Pages::new(&engine, 64, shape());
        Rig { engine, client, space, namespace, pages }
    }

    pub fn keys(&self, prompt: &[u32]) -> Vec<BlockKey> {
        keys(&self.namespace, prompt)
    }

    /// Waits until the store is empty: what was lent comes back a moment after it was read.
    pub fn becomes_empty(&self) {
        becomes(|| {
            let counts = self.client.stat().unwrap();
            (counts.blocks, counts.memory_bytes) == (0, 0)
        });
    }

    pub fn put(&self, prompt: &[u32]) -> Stored {
        put(&self.space, &self.pages, None, &self.keys(prompt))
    }

    /// How many blocks of a prompt come back; each is compared.
    pub fn get(&self, prompt: &[u32]) -> usize {
        get(&self.space, &self.pages, &self.keys(prompt))
    }
}

/// Waits until something is so.
pub fn becomes(mut so: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    while !so() {
        assert!(Instant::now() < until, "it does not become so");
        std::thread::yield_now();
    }
}

pub fn put(space: &Space, pages: &Pages, parent: Option<BlockKey>, keys: &[BlockKey]) -> Stored {
    put_until(Ack::Stored, space, pages, parent, keys)
}

pub fn put_until(
    ack: Ack,
    space: &Space,
    pages: &Pages,
    parent: Option<BlockKey>,
    keys: &[BlockKey],
) -> Stored {
    let ids: Vec<u32> = (0..keys.len() as u32).rev().collect();
    keys.iter().zip(&ids).for_each(|(key, page)| pages.fill(*page, key));
    space.put(Chain::after(parent.as_slice(), keys), &pages.set(&ids), ack, None).unwrap().wait(None).unwrap()
}

pub fn get(space: &Space, pages: &Pages, keys: &[BlockKey]) -> usize {
    let ids: Vec<u32> = (0..keys.len() as u32).map(|page| page + 20).collect();
    ids.iter().for_each(|page| pages.wipe(*page));
    let mut getting = space.get(keys, &pages.set(&ids), None).unwrap();
    let mut last = 0;
    while let Some(verified) = getting.next(None).unwrap() {
        assert!(verified > last, "{verified} after {last}");
        (last..verified).for_each(|at| assert!(pages.holds(ids[at], &keys[at]), "block {at} is another"));
        last = verified;
    }
    last
}
