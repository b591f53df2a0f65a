//! The memory that an order names.
//!
//! Which kind of memory a region is of is part of its type: whoever needs bytes that this processor can read and
//! write asks for them with [`Held::host`], and names itself, so that no address of another kind is ever taken for
//! one of them.

use crate::from_host;
use kvik_core::{Code, Result};
use kvik_host::Memory;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Weak};

/// Memory as orders name it: it stays registered while any order holds it.
#[derive(Debug, Clone)]
pub enum Held {
    /// Memory of this process, which the processor and the kernel reach.
    Host(Arc<Memory>),
}

impl From<Memory> for Held {
    fn from(memory: Memory) -> Held {
        Held::Host(Arc::new(memory))
    }
}

impl Held {
    /// Address of the first byte, where this kind of memory has its addresses.
    pub fn addr(&self) -> usize {
        match self {
            Held::Host(memory) => memory.addr(),
        }
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        match self {
            Held::Host(memory) => memory.len(),
        }
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether transfers may write here.
    pub fn writable(&self) -> bool {
        match self {
            Held::Host(memory) => memory.writable(),
        }
    }

    /// The sealed memfd, for memory that processes on this host can map.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Held::Host(memory) => memory.fd(),
        }
    }

    /// Copies `from` to `offset`; it is there when this returns.
    ///
    /// # Errors
    /// `PageOutOfRange` beyond the end, `InvalidArgument` for read-only memory.
    pub fn copy_in(&self, offset: usize, from: &[u8]) -> Result<()> {
        let copied = match self {
            Held::Host(memory) => memory.copy_in(offset, from),
        };
        copied.map_err(|error| from_host(Code::BufferInvalid, error))
    }

    /// Copies from `offset` into `into`.
    ///
    /// # Errors
    /// `PageOutOfRange` beyond the end.
    pub fn copy_out(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        let copied = match self {
            Held::Host(memory) => memory.copy_out(offset, into),
        };
        copied.map_err(|error| from_host(Code::BufferInvalid, error))
    }

    /// The memory, for who reaches no other kind: `who` says who that is.
    ///
    /// # Errors
    /// `TransportUnavailable`, with the reason.
    pub fn host(&self, _who: &str) -> Result<&Arc<Memory>> {
        match self {
            Held::Host(memory) => Ok(memory),
        }
    }

    /// What stands for it: somebody holds it meanwhile, so no other memory has this name.
    pub(crate) fn name(&self) -> usize {
        match self {
            Held::Host(memory) => Arc::as_ptr(memory) as usize,
        }
    }

    /// A way back to it that does not keep it registered.
    pub fn downgrade(&self) -> WeakHeld {
        match self {
            Held::Host(memory) => WeakHeld::Host(Arc::downgrade(memory)),
        }
    }
}

/// See [`Held::downgrade`].
#[derive(Debug, Clone)]
pub enum WeakHeld {
    /// As [`Held::Host`].
    Host(Weak<Memory>),
}

impl WeakHeld {
    /// The memory, while anybody holds it.
    pub fn upgrade(&self) -> Option<Held> {
        match self {
            WeakHeld::Host(memory) => memory.upgrade().map(Held::Host),
        }
    }
}
