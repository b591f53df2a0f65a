//! The memory that a work request names.
//!
//! Which kind of memory a region is of is part of its type: whoever needs bytes that this processor can read and
//! write asks for them with [`RegionMemory::host`], and names itself, so that a device's address is never taken for one
//! of them. Bytes of a GPU come and go by copies of its streams, and by nothing else.

use crate::from_host;
use kvik_core::{Code, Error, RegionId, Result};
use kvik_host::Memory;
use kvik_host::cuda::{Device, GpuMemory, IpcHandle};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Weak};

/// Memory as work requests name it: it stays registered while any work request holds it.
#[derive(Debug, Clone)]
pub enum RegionMemory {
    /// Memory of this process, which the processor and the kernel reach.
    Host(Arc<Memory>),
    /// Memory of a GPU.
    Gpu(Arc<GpuMemory>),
}

impl From<Memory> for RegionMemory {
    fn from(memory: Memory) -> RegionMemory {
        RegionMemory::Host(Arc::new(memory))
    }
}

impl From<GpuMemory> for RegionMemory {
    fn from(memory: GpuMemory) -> RegionMemory {
        RegionMemory::Gpu(Arc::new(memory))
    }
}

impl RegionMemory {
    /// Address of the first byte: of the processor, or of the GPU.
    pub fn addr(&self) -> usize {
        match self {
            RegionMemory::Host(memory) => memory.addr(),
            RegionMemory::Gpu(memory) => memory.addr(),
        }
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        match self {
            RegionMemory::Host(memory) => memory.len(),
            RegionMemory::Gpu(memory) => memory.len(),
        }
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether transfers may write here.
    pub fn writable(&self) -> bool {
        match self {
            RegionMemory::Host(memory) => memory.writable(),
            RegionMemory::Gpu(memory) => memory.writable(),
        }
    }

    /// The GPU that it lies on.
    pub fn device(&self) -> Option<&Device> {
        match self {
            RegionMemory::Host(_) => None,
            RegionMemory::Gpu(memory) => Some(memory.device()),
        }
    }

    /// The sealed memfd, for memory that processes on this host can map.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        match self {
            RegionMemory::Host(memory) => memory.fd(),
            RegionMemory::Gpu(_) => None,
        }
    }

    /// What other processes of this host open memory of a GPU by; none for memory of the host, which is shown as it is.
    ///
    /// # Errors
    /// Why they cannot read it. They may still have it written to: that is this process's own copy.
    pub fn export(&self, region: RegionId) -> Option<std::result::Result<IpcHandle, Arc<str>>> {
        let RegionMemory::Gpu(memory) = self else { return None };
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
            RegionMemory::Host(memory) => memory.copy_in(offset, from),
            RegionMemory::Gpu(memory) => memory.copy_in(offset, from),
        };
        copied.map_err(|error| from_host(Code::BufferInvalid, error))
    }

    /// Copies from `offset` into `into`. On a GPU behind all that its default stream was given before.
    ///
    /// # Errors
    /// `PageOutOfRange` beyond the end, `DeviceFailed`.
    pub fn copy_out(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        let copied = match self {
            RegionMemory::Host(memory) => memory.copy_out(offset, into),
            RegionMemory::Gpu(memory) => memory.copy_out(offset, into),
        };
        copied.map_err(|error| from_host(Code::BufferInvalid, error))
    }

    /// Has the GPU that it lies on see what NICs have written there so far, all over it. The processor sees it anyway.
    ///
    /// # Errors
    /// `DeviceFailed`.
    pub fn flush_writes(&self) -> Result<()> {
        match self {
            RegionMemory::Host(_) => Ok(()),
            RegionMemory::Gpu(memory) => {
                memory.flush_writes().map_err(|error| from_host(Code::DeviceFailed, error))
            }
        }
    }

    /// The memory, for who reaches no other kind: `who` says who that is.
    ///
    /// # Errors
    /// `TransportUnavailable`: it lies on a GPU.
    pub fn host(&self, who: &str) -> Result<&Arc<Memory>> {
        match self {
            RegionMemory::Host(memory) => Ok(memory),
            RegionMemory::Gpu(memory) => Err(Error::new(
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
            RegionMemory::Host(memory) => Arc::as_ptr(memory) as usize,
            RegionMemory::Gpu(memory) => Arc::as_ptr(memory) as usize,
        }
    }

    /// A way back to it that does not keep it registered.
    pub fn downgrade(&self) -> WeakRegionMemory {
        match self {
            RegionMemory::Host(memory) => WeakRegionMemory::Host(Arc::downgrade(memory)),
            RegionMemory::Gpu(memory) => WeakRegionMemory::Gpu(Arc::downgrade(memory)),
        }
    }
}

/// See [`RegionMemory::downgrade`].
#[derive(Debug, Clone)]
pub enum WeakRegionMemory {
    /// As [`RegionMemory::Host`].
    Host(Weak<Memory>),
    /// As [`RegionMemory::Gpu`].
    Gpu(Weak<GpuMemory>),
}

impl WeakRegionMemory {
    /// The memory, while anybody holds it.
    pub fn upgrade(&self) -> Option<RegionMemory> {
        match self {
            WeakRegionMemory::Host(memory) => memory.upgrade().map(RegionMemory::Host),
            WeakRegionMemory::Gpu(memory) => memory.upgrade().map(RegionMemory::Gpu),
        }
    }
}
