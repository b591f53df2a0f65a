//! What a policy would have done: replay of traces, and traces to replay.
//!
//! A hit is counted as a serving engine counts it, by prefixes: of each request, the leading run of blocks that are
//! in the store are hits. What comes after the first miss is computed anyway, and is no hit even where it is there.
//! Afterwards all blocks of the request are used or inserted, the last one first, so that of a prompt the first
//! blocks are the newest. As in the store, a block with children in the store is never evicted.
//!
//! What others print for the trace of conversations that Mooncake published, by this definition, comes out the same for
//! LRU (0.045, 0.065, 0.212, 0.326 and 0.355 at 1k to 50k blocks). Their S3-FIFO remembers only as many blocks as the
//! store holds, and is far lower where the store is small (0.056 in place of 0.077 at 1k). Their figure for Belady's
//! rule is lower, too, as there each block enters the store: see [`optimum()`].

mod compare;
mod generate;
mod optimum;
mod trace;

pub use compare::{Comparison, compare, parse_capacities};
#[cfg(test)]
pub(crate) use generate::mix;
pub use generate::{Workload, generate};
pub use optimum::optimum;
pub use trace::{Request, Trace};

use crate::policy::{Policy, PolicyKind};
use kvik_core::{Code, Error, Result};

/// Bytes of a block in a replay: policies count bytes, and all blocks of a trace are of one size.
const BLOCK_BYTES: u32 = 1 << 20;
/// The most blocks of a replayed store.
const MAX_CAPACITY: usize = 1 << 30;

/// What came of a replay.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Blocks of all requests together.
    pub references: u64,
    /// Those of them that were there, with all blocks before them.
    pub hits: u64,
    /// Blocks written to the store.
    pub inserted: u64,
    /// Blocks that were not admitted.
    pub refused: u64,
    /// Blocks that made room for others.
    pub evicted: u64,
}

impl Outcome {
    /// Hits a reference, 0 to 1.
    pub fn hit_rate(&self) -> f64 {
        self.hits as f64 / self.references.max(1) as f64
    }
}

/// Replays a trace against a policy of a kind, with room for `capacity` blocks.
///
/// # Errors
/// `InvalidArgument` for a capacity of 0, or of more than 2^30 blocks.
pub fn replay(trace: &Trace, kind: PolicyKind, capacity: usize) -> Result<Outcome> {
    let mut policy = kind.build(capacity as u64 * u64::from(BLOCK_BYTES));
    replay_with(trace, policy.as_mut(), capacity)
}

/// Replays a trace against a policy that is new.
///
/// # Errors
/// As for [`replay`]; `InvalidArgument` too where the policy names a block that is not there.
pub fn replay_with(trace: &Trace, policy: &mut dyn Policy, capacity: usize) -> Result<Outcome> {
    if capacity == 0 || capacity > MAX_CAPACITY {
        let text = format!("a replay has room for 1 to {MAX_CAPACITY} blocks, not for {capacity}");
        return Err(Error::new(Code::InvalidArgument, text));
    }
    let mut index = Index::new(trace, policy, capacity);
    for (_, blocks) in trace.requests() {
        let hits = blocks.iter().take_while(|block| index.slots[**block as usize].is_some()).count();
        index.outcome.hits += hits as u64;
        index.outcome.references += blocks.len() as u64;
        index.policy.request();
        for block in blocks.iter().rev() {
            index.refer(*block)?;
        }
    }
    Ok(index.outcome)
}

/// The part of a store's index that matters here.
struct Index<'a> {
    trace: &'a Trace,
    policy: &'a mut dyn Policy,
    capacity: usize,
    /// The id of each block that is there.
    slots: Vec<Option<u32>>,
    /// The block of each id.
    blocks: Vec<u32>,
    free: Vec<u32>,
    /// For each block, how many of its children are there.
    children: Vec<u32>,
    outcome: Outcome,
}

impl<'a> Index<'a> {
    fn new(trace: &'a Trace, policy: &'a mut dyn Policy, capacity: usize) -> Index<'a> {
        Index {
            trace,
            policy,
            capacity,
            slots: vec![None; trace.blocks()],
            blocks: Vec::new(),
            free: Vec::new(),
            children: vec![0; trace.blocks()],
            outcome: Outcome::default(),
        }
    }

    fn refer(&mut self, block: u32) -> Result<()> {
        let fingerprint = fingerprint(block);
        if let Some(id) = self.slots[block as usize] {
            self.policy.touch(id, fingerprint);
            return Ok(());
        }
        let full = self.free.is_empty() && self.blocks.len() == self.capacity;
        if full && !self.policy.admits(fingerprint, BLOCK_BYTES) {
            self.outcome.refused += 1;
            return Ok(());
        }
        if full {
            self.evict()?;
        }
        let id = self.free.pop().unwrap_or_else(|| {
            self.blocks.push(block);
            self.blocks.len() as u32 - 1
        });
        self.blocks[id as usize] = block;
        self.slots[block as usize] = Some(id);
        self.outcome.inserted += 1;
        self.policy.insert(id, fingerprint, BLOCK_BYTES);
        if self.children[block as usize] > 0 {
            self.policy.hold(id);
        }
        if let Some(parent) = self.trace.parent(block) {
            self.children[parent] += 1;
            if let (1, Some(id)) = (self.children[parent], self.slots[parent]) {
                self.policy.hold(id);
            }
        }
        Ok(())
    }

    fn evict(&mut self) -> Result<()> {
        let id = self.policy.victim();
        let found = id.and_then(|id| Some((id, *self.blocks.get(id as usize)?)));
        let Some((id, block)) = found.filter(|(id, block)| self.slots[*block as usize] == Some(*id)) else {
            let text = format!("the policy names {id:?} to be evicted, which is no block of the store");
            return Err(Error::new(Code::InvalidArgument, text));
        };
        self.policy.evict(id, fingerprint(block));
        self.slots[block as usize] = None;
        self.free.push(id);
        self.outcome.evicted += 1;
        if let Some(parent) = self.trace.parent(block) {
            self.children[parent] -= 1;
            if let (0, Some(id)) = (self.children[parent], self.slots[parent]) {
                self.policy.release(id);
            }
        }
        Ok(())
    }
}

/// A fingerprint, as evenly spread as that of a real block.
fn fingerprint(block: u32) -> u64 {
    generate::mix(u64::from(block))
}
