//! Model memory: bytes that know whether the engine may touch them.

use kvik_core::{Layout, View};
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

/// Memory of one region. `free` means that its owner was told that nothing touches it any more.
pub struct Block {
    bytes: RefCell<Vec<u8>>,
    free: Cell<bool>,
}

/// A handle on memory, as nodes hold it.
#[derive(Clone)]
pub struct Mem(Rc<Block>);

impl std::fmt::Debug for Mem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Mem({} bytes)", self.0.bytes.borrow().len())
    }
}

impl Mem {
    /// Memory for a layout, filled with bytes that depend on `seed`.
    pub fn for_layout(layout: &Layout, seed: u64) -> Mem {
        let mut rng = Rng(seed);
        let bytes = (0..layout.end()).map(|_| rng.next() as u8).collect();
        Mem(Rc::new(Block { bytes: RefCell::new(bytes), free: Cell::new(false) }))
    }

    pub fn is(&self, other: &Mem) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }

    /// Its owner has it back.
    pub fn set_free(&self) {
        self.0.free.set(true);
    }

    pub fn all(&self) -> Vec<u8> {
        self.0.bytes.borrow().clone()
    }

    /// What a part of a view's stream holds, read by whoever owns it, or behind the owner's back.
    pub fn peek(&self, view: &View, part: Range<u64>) -> Vec<u8> {
        let bytes = self.0.bytes.borrow();
        view.runs(part)
            .flat_map(|run| bytes[run.offset as usize..(run.offset + run.len) as usize].to_vec())
            .collect()
    }

    /// The same by a work request, which must not be after the end.
    pub fn read(&self, view: &View, part: Range<u64>) -> Vec<u8> {
        assert!(!self.0.free.get(), "a work request read memory that was reported to be free");
        self.peek(view, part)
    }

    /// Written by a work request, which must not be after the end.
    pub fn write(&self, view: &View, part: Range<u64>, mut from: &[u8]) {
        assert!(!self.0.free.get(), "a work request wrote memory that was reported to be free");
        let mut bytes = self.0.bytes.borrow_mut();
        for run in view.runs(part) {
            let (head, rest) = from.split_at(run.len as usize);
            bytes[run.offset as usize..(run.offset + run.len) as usize].copy_from_slice(head);
            from = rest;
        }
        assert!(from.is_empty());
    }
}

/// The view of `pages` in the whole of a layout, layer first.
pub fn view(layout: &Arc<Layout>, pages: &[u32]) -> View {
    let (layers, slices) = (0..layout.layers(), 0..layout.slices());
    View::new(layout.clone(), pages.into(), layers, slices, kvik_core::Order::LayerFirst).unwrap()
}

/// SplitMix64: small, and the same everywhere.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }
}
