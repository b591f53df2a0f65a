//! Model memory: every access names the lease that it is made under, so a single late byte is caught as it moves.
//!
//! A lease is one grant's hold on the owner's pages, or one transfer's on its initiator's. It ends when the protocol
//! tells the owner of the memory that it is free; at that moment the memory is filled with other bytes.

use kvik_core::{Layout, View};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

pub const PAGES: u32 = 5;
pub const PAGE_BYTES: u64 = 4096;

/// Memory of one region.
pub struct Arena {
    pub layout: Arc<Layout>,
    bytes: RefCell<Vec<u8>>,
    /// Pages of each lease.
    leases: RefCell<BTreeMap<u64, Vec<u32>>>,
}

/// Memory as nodes hold it: for one lease.
#[derive(Clone)]
pub struct Mem {
    pub arena: Rc<Arena>,
    pub lease: u64,
}

impl std::fmt::Debug for Mem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Mem(lease {})", self.lease)
    }
}

impl Arena {
    pub fn new(layout: Arc<Layout>, seed: u64) -> Rc<Arena> {
        let bytes = RefCell::new(vec![0; layout.end() as usize]);
        let arena = Arena { layout, bytes, leases: RefCell::default() };
        arena.fill(seed);
        Rc::new(arena)
    }

    /// Its owner uses it for something else.
    pub fn fill(&self, seed: u64) {
        self.bytes.borrow_mut().copy_from_slice(&pattern(seed, self.layout.end()));
    }

    /// The owner puts these bytes there.
    pub fn put(&self, view: &View, from: &[u8]) {
        let (mut bytes, mut at) = (self.bytes.borrow_mut(), 0);
        for run in view.runs(0..view.bytes()) {
            bytes[run.offset as usize..][..run.len as usize].copy_from_slice(&from[at..][..run.len as usize]);
            at += run.len as usize;
        }
    }

    pub fn lease(&self, lease: u64, pages: Vec<u32>) {
        self.leases.borrow_mut().insert(lease, pages);
    }

    /// The owner is told that the memory is its own again, and uses it at once.
    pub fn release(&self, lease: u64, seed: u64) {
        assert!(self.leases.borrow_mut().remove(&lease).is_some(), "lease {lease} ended twice");
        self.fill(seed);
    }

    /// What a part of a view's stream holds, without asking anybody.
    pub fn peek(&self, view: &View, part: Range<u64>) -> Vec<u8> {
        let bytes = self.bytes.borrow();
        let mut out = Vec::with_capacity((part.end - part.start) as usize);
        for run in view.runs(part) {
            out.extend_from_slice(&bytes[run.offset as usize..][..run.len as usize]);
        }
        out
    }

    /// What lies at a place, without asking anybody.
    pub fn take(&self, place: u64, len: u64) -> Vec<u8> {
        self.bytes.borrow()[place as usize..][..len as usize].to_vec()
    }

    /// Puts bytes at a place, without asking anybody.
    pub fn place(&self, place: u64, from: &[u8]) {
        self.bytes.borrow_mut()[place as usize..][..from.len()].copy_from_slice(from);
    }

    pub fn snapshot(&self) -> Vec<u8> {
        self.bytes.borrow().clone()
    }

    fn check(&self, lease: u64, offset: u64, what: &str) {
        let leases = self.leases.borrow();
        let Some(pages) = leases.get(&lease) else {
            panic!("P2: byte {offset} was {what} for lease {lease} after its owner was told that it is free");
        };
        let page = (offset / PAGE_BYTES) as u32;
        assert!(pages.contains(&page), "P4: byte {offset} was {what}, which lease {lease} does not cover");
    }
}

impl Mem {
    pub fn read(&self, view: &View, part: Range<u64>) -> Vec<u8> {
        for run in view.runs(part.clone()) {
            self.arena.check(self.lease, run.offset, "read");
            self.arena.check(self.lease, run.offset + run.len - 1, "read");
        }
        self.arena.peek(view, part)
    }

    pub fn write(&self, view: &View, part: Range<u64>, mut from: &[u8]) {
        let mut bytes = self.arena.bytes.borrow_mut();
        for run in view.runs(part) {
            self.arena.check(self.lease, run.offset, "written");
            self.arena.check(self.lease, run.offset + run.len - 1, "written");
            let (head, rest) = from.split_at(run.len as usize);
            bytes[run.offset as usize..][..run.len as usize].copy_from_slice(head);
            from = rest;
        }
        assert!(from.is_empty());
    }
}

/// Bytes that depend on a seed in every word, and differ from word to word. Much of a schedule's time goes here: one
/// addition a word.
pub fn pattern(seed: u64, len: u64) -> Vec<u8> {
    let (mut word, mut bytes) = (Rng(seed).next(), vec![0; len.next_multiple_of(8) as usize]);
    for place in bytes.chunks_exact_mut(8) {
        place.copy_from_slice(&word.to_le_bytes());
        word = word.wrapping_add(STEP);
    }
    bytes.truncate(len as usize);
    bytes
}

/// What a view's stream holds in these bytes of its region.
pub fn pick(bytes: &[u8], view: &View) -> Vec<u8> {
    let mut out = Vec::with_capacity(view.bytes() as usize);
    for run in view.runs(0..view.bytes()) {
        out.extend_from_slice(&bytes[run.offset as usize..][..run.len as usize]);
    }
    out
}

/// What a view's stream holds over memory that was filled from a seed.
pub fn content(seed: u64, view: &View) -> Vec<u8> {
    pick(&pattern(seed, view.layout().end()), view)
}

/// Odd, so that no word comes twice.
const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

/// SplitMix64: small, and the same everywhere.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }

    /// True once in `times`.
    pub fn once_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }
}
