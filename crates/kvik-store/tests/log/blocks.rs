//! Blocks whose bytes say which block they are.

use kvik_core::page_sum;
use kvik_host::{HugePages, Memory};
use kvik_store::{BlockKey, Entry, Identity, NamespaceId, Place, Shape, Tier};
use std::time::Duration;

/// Long enough for any disk.
pub const LONG: Duration = Duration::from_secs(60);

/// Numbers that look random and come from a seed: splitmix64.
#[derive(Clone)]
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`.
    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

/// The seed of this run.
pub fn seed() -> u64 {
    let seed = std::env::var("KVIK_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or_else(|| {
        std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(1, |now| now.as_nanos() as u64)
    });
    println!("KVIK_SEED={seed}");
    seed
}

fn digest(text: &str, number: u64) -> [u8; 32] {
    let mut out = [0; 32];
    for (at, part) in out.chunks_mut(8).enumerate() {
        part.copy_from_slice(&page_sum(format!("{text} {number} {at}").as_bytes()).to_le_bytes());
    }
    out
}

/// The namespace of a number.
pub fn namespace(number: u64) -> NamespaceId {
    NamespaceId(digest("namespace", number))
}

/// What a namespace means.
pub fn meaning(number: u64) -> Vec<u8> {
    format!("model {number}").into_bytes()
}

/// A block: which one, how often it was stored before, and how it is divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    pub number: u64,
    pub version: u64,
    pub shape: Shape,
}

impl Block {
    pub fn new(number: u64, version: u64, shape: Shape) -> Block {
        Block { number, version, shape }
    }

    pub fn key(number: u64) -> BlockKey {
        BlockKey(digest("block", number))
    }

    /// Four blocks in a row are of one namespace.
    pub fn namespace(&self) -> u64 {
        self.number / 4 % 3
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut rng = Rng(self.number.wrapping_mul(1_000_003) ^ self.version);
        let mut bytes: Vec<u8> = [self.number, self.version].iter().flat_map(|n| n.to_le_bytes()).collect();
        while (bytes.len() as u64) < self.shape.bytes() {
            bytes.extend(rng.next().to_le_bytes());
        }
        bytes.truncate(self.shape.bytes() as usize);
        bytes
    }

    pub fn entry(&self) -> Entry {
        let bytes = self.bytes();
        let part = self.shape.summed_layers() as usize * self.shape.layer_bytes() as usize;
        Entry {
            key: Block::key(self.number),
            parent: (!self.number.is_multiple_of(3)).then(|| Block::key(self.number - 1)),
            namespace: namespace(self.namespace()),
            shape: self.shape,
            sums: bytes.chunks(part).map(page_sum).collect(),
        }
    }

    pub fn identity(&self) -> Identity {
        Identity::from(&self.entry())
    }

    /// Stores it.
    pub fn store(&self, log: &dyn Tier) -> kvik_core::Result<Place> {
        let bytes = self.bytes();
        // At a page, as in an arena.
        let memory = Memory::shared(bytes.len() + 4096, HugePages::Never).unwrap();
        memory.copy_in(4096, &bytes).unwrap();
        log.declare(namespace(self.namespace()), &meaning(self.namespace()))?;
        log.store(&self.entry(), &memory, 4096, LONG)
    }
}

/// Loads a block; `None` where its place has gone.
pub fn load(log: &dyn Tier, place: Place, identity: &Identity) -> kvik_core::Result<Option<Vec<u8>>> {
    let mut bytes = vec![0; identity.shape.bytes() as usize];
    let memory = Memory::shared(bytes.len() + 4096, HugePages::Never).unwrap();
    let loaded = log.load(place, identity, &memory, 4096)?;
    memory.copy_out(4096, &mut bytes).unwrap();
    Ok(loaded.map(|_| bytes))
}

/// Shapes of all kinds: tiny, odd, with several checksums, and large enough to go past the page cache.
pub fn shape(kind: u64) -> Shape {
    match kind % 8 {
        0 | 1 => Shape::new(1, 1, 64),
        2 => Shape::new(2, 2, 1000),
        3 | 4 => Shape::new(3, 1, 4096),
        5 => Shape::new(5, 2, 555),
        6 => Shape::new(2, 1, 12_345),
        _ => Shape::new(4, 2, 8192),
    }
    .unwrap()
}
