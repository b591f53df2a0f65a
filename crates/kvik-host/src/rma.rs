//! What one-sided operations have in common, whatever library posts them.

use crate::device::DeviceMemory;
use crate::{HostError, Memory};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// The direction of an operation, seen from who posts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RmaOp {
    /// Remote bytes come here.
    Read,
    /// Own bytes go there.
    Write,
}

/// What became of a post.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Posted {
    /// It is in flight.
    Yes,
    /// There is no room: take completions first.
    Full,
}

/// An operation has ended: its memory is not touched any more by it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Completion<E> {
    /// Of the operation.
    pub token: u64,
    /// Whether the bytes were delivered.
    pub result: Result<(), E>,
}

/// A run of registered memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// The first byte in the memory.
    pub offset: usize,
    /// Bytes.
    pub len: usize,
}

/// Memory that a NIC knows: it must stay where it is meanwhile.
pub(crate) enum Kept {
    Host(Arc<Memory>),
    // In this order: the descriptor is closed before the memory may be freed.
    Device { _dmabuf: Option<OwnedFd>, memory: Arc<dyn DeviceMemory> },
}

impl Kept {
    /// Those who hold the memory, this value among them.
    pub fn holders(&self) -> usize {
        match self {
            Kept::Host(memory) => Arc::strong_count(memory),
            Kept::Device { memory, .. } => Arc::strong_count(memory),
        }
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.facts().1
    }

    /// The address of a range, which must lie in the memory; and be writable, where the operation writes it. That of a
    /// device is for NICs alone.
    pub fn at(&self, offset: usize, len: usize, op: RmaOp) -> Result<usize, HostError> {
        let (addr, size, writable) = self.facts();
        if op == RmaOp::Read && !writable {
            return Err(HostError::ReadOnlyMemory);
        }
        match offset.checked_add(len) {
            Some(end) if end <= size => Ok(addr + offset),
            _ => Err(HostError::OutOfBounds { offset, len, size }),
        }
    }

    fn facts(&self) -> (usize, usize, bool) {
        match self {
            Kept::Host(memory) => (memory.addr(), memory.len(), memory.writable()),
            Kept::Device { memory, .. } => (memory.addr(), memory.len(), memory.writable()),
        }
    }
}
