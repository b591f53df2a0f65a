//! What a store keeps of a block besides its bytes.

use crate::{BlockKey, NamespaceId};
use kvik_core::{Code, Error, PageSum, Result};
use std::fmt;

/// Parts of a block have one checksum for each so many bytes, or for each layer where that is more.
const SUMMED: u64 = 64 << 10;
/// The largest block.
const MAX_BLOCK: u64 = 1 << 30;
/// A block has at most so many checksums.
const MAX_SUMS: u64 = 4096;

/// How the bytes of a block are divided: `[layers][slices][run_bytes]`, in this order in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    layers: u32,
    slices: u32,
    run_bytes: u64,
}

impl Shape {
    /// A shape of `layers` layers with `slices` runs of `run_bytes` bytes each, as pages of a layout have it.
    ///
    /// # Errors
    /// `InvalidArgument` for a number that is 0, or a block of more than 1 GiB.
    pub fn new(layers: u32, slices: u32, run_bytes: u64) -> Result<Shape> {
        let shape = Shape { layers, slices, run_bytes };
        let bytes = u128::from(layers) * u128::from(slices) * u128::from(run_bytes);
        if bytes == 0 || bytes > u128::from(MAX_BLOCK) {
            let text = format!(
                "a block of {layers} layers x {slices} slices x {run_bytes} bytes is none that a store keeps: it has \
                 at least 1 byte and at most {MAX_BLOCK}"
            );
            return Err(Error::new(Code::InvalidArgument, text));
        }
        Ok(shape)
    }

    /// Layers.
    pub fn layers(&self) -> u32 {
        self.layers
    }
    /// Runs of a layer.
    pub fn slices(&self) -> u32 {
        self.slices
    }
    /// Bytes of a run.
    pub fn run_bytes(&self) -> u64 {
        self.run_bytes
    }
    /// Bytes of a layer.
    pub fn layer_bytes(&self) -> u64 {
        u64::from(self.slices) * self.run_bytes
    }
    /// Bytes of a block.
    pub fn bytes(&self) -> u64 {
        u64::from(self.layers) * self.layer_bytes()
    }

    /// Layers that one checksum covers; the last one of a block covers those that are left.
    pub fn summed_layers(&self) -> u32 {
        let least = u64::from(self.layers).div_ceil(MAX_SUMS);
        (SUMMED / self.layer_bytes()).max(least).clamp(1, u64::from(self.layers)) as u32
    }

    /// Checksums of a block.
    pub fn sums(&self) -> usize {
        self.layers.div_ceil(self.summed_layers()) as usize
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} layers x {} slices x {} bytes", self.layers, self.slices, self.run_bytes)
    }
}

/// A block's full identity, its shape and the checksums of its parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// What it is called.
    pub key: BlockKey,
    /// The block before it; none for the first of a prompt.
    pub parent: Option<BlockKey>,
    /// Its namespace.
    pub namespace: NamespaceId,
    /// How its bytes are divided.
    pub shape: Shape,
    /// XXH3 with 64 bits over each part of [`Shape::summed_layers`] layers, as many as [`Shape::sums`] says.
    pub sums: Box<[u64]>,
}

impl Entry {
    /// One checksum for all of the block: that of its parts' checksums, in their order.
    pub fn sum(&self) -> u64 {
        sum_of(&self.sums)
    }
}

/// One checksum for those of all parts of a block.
pub(crate) fn sum_of(parts: &[u64]) -> u64 {
    let mut sum = PageSum::default();
    parts.iter().for_each(|part| sum.update(&part.to_le_bytes()));
    sum.finish()
}
