//! The memory that an order names.
//!
//! Which kind of memory a region is of is part of its type: whoever needs bytes that this processor can read and
//! write asks for them with [`Held::host`], and names itself, so that a device's address is never taken for one of
//! them. Bytes of a GPU come and go by copies of its streams, and by nothing else.

use crate::from_host;
use kvik_core::{Code, Error, RegionId, Result};
use kvik_host::Memory;
use kvik_host::cuda::{Device, GpuMemory, IpcHandle};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Weak};

/// Memory as orders name it: it stays registered while any order holds it.
#[derive(Debug, Clone)]
pub enum Held {
    /// Memory of this process, which the processor and the kernel reach.
    Host(Arc<Memory>),
    /// Memory of a GPU.
    Gpu(Arc<GpuMemory>),
}

impl From<Memory> for Held {
    fn from(memory: Memory) -> Held {
        Held::Host(Arc::new(memory))
    }
}

impl From<GpuMemory> for Held {
    fn from(memory: GpuMemory) -> Held {
        Held::Gpu(Arc::new(memory))
    }
}

impl Held {
    /// Address of the first byte: of the processor, or of the GPU.
    pub fn addr(&self) -> usize {
        match self {
            Held::Host(memory) => memory.addr(),
            Held::Gpu(memory) => memory.addr(),
        }
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        match self {
            Held::Host(memory) => memory.len(),
            Held::Gpu(memory) => memory.len(),
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
            Held::Gpu(memory) => memory.writable(),
        }
    }

    /// The GPU that it lies on.
    pub fn device(&self) -> Option<&Device> {
        match self {
            Held::Host(_) => None,
            Held::Gpu(memory) => Some(memory.device()),
        }
    }

    /// The sealed memfd, for memory that processes on this host can map.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Held::Host(memory) => memory.fd(),
            Held::Gpu(_) => None,
        }
    }

    /// What other processes of this host open memory of a GPU by; none for memory of the host, which is shown as it is.
    ///
    /// # Errors
    /// Why they cannot read it. They may still have it written to: that is this process's own copy.
    pub fn export(&self, region: RegionId) -> Option<std::result::Result<IpcHandle, Arc<str>>> {
        let Held::Gpu(memory) = self else { return None };
        Some(memory.export().map_err(|error| {
            let device = memory.device().ordinal();
            let text = format!(
                "region {} lies on GPU {device} and cannot be opened by other processes: {error}",
                region.0
            );
            text.into()
        }))
    }

    /// Copies `from` to `offset`; it is there when this returns. On a GPU behind all that its default stream was
    /// given before.
    ///
    /// # Errors
    /// `PageOutOfRange` beyond the end, `InvalidArgument` for read-only memory, `DeviceFailed`.
    pub fn copy_in(&self, offset: usize, from: &[u8]) -> Result<()> {
        let copied = match self {
            Held::Host(memory) => memory.copy_in(offset, from),
            Held::Gpu(memory) => memory.copy_in(offset, from),
        };
        copied.map_err(|error| from_host(Code::BufferInvalid, error))
    }

    /// Copies from `offset` into `into`. On a GPU behind all that its default stream was given before.
    ///
    /// # Errors
    /// `PageOutOfRange` beyond the end, `DeviceFailed`.
    pub fn copy_out(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        let copied = match self {
            Held::Host(memory) => memory.copy_out(offset, into),
            Held::Gpu(memory) => memory.copy_out(offset, into),
        };
        copied.map_err(|error| from_host(Code::BufferInvalid, error))
    }

    /// The memory, for who reaches no other kind: `who` says who that is.
    ///
    /// # Errors
    /// `TransportUnavailable`: it lies on a GPU.
    pub fn host(&self, who: &str) -> Result<&Arc<Memory>> {
        match self {
            Held::Host(memory) => Ok(memory),
            Held::Gpu(memory) => Err(Error::new(
                Code::TransportUnavailable,
                format!(
                    "the region lies on GPU {}, and {who} reaches host memory only",
                    memory.device().ordinal()
                ),
            )),
        }
    }

    /// What stands for it: somebody holds it meanwhile, so no other memory has this name.
    pub(crate) fn name(&self) -> usize {
        match self {
            Held::Host(memory) => Arc::as_ptr(memory) as usize,
            Held::Gpu(memory) => Arc::as_ptr(memory) as usize,
        }
    }

    /// A way back to it that does not keep it registered.
    pub fn downgrade(&self) -> WeakHeld {
        match self {
            Held::Host(memory) => WeakHeld::Host(Arc::downgrade(memory)),
            Held::Gpu(memory) => WeakHeld::Gpu(Arc::downgrade(memory)),
        }
    }
}

/// See [`Held::downgrade`].
#[derive(Debug, Clone)]
pub enum WeakHeld {
    /// As [`Held::Host`].
    Host(Weak<Memory>),
    /// As [`Held::Gpu`].
    Gpu(Weak<GpuMemory>),
}

impl WeakHeld {
    /// The memory, while anybody holds it.
    pub fn upgrade(&self) -> Option<Held> {
        match self {
            WeakHeld::Host(memory) => memory.upgrade().map(Held::Host),
            WeakHeld::Gpu(memory) => memory.upgrade().map(Held::Gpu),
        }
    }
}
