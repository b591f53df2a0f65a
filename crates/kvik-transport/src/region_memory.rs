//! The memory that a work request names.
//!
//! Which kind of memory a region is of is part of its type: whoever needs bytes that this processor can read and
//! write asks for them with [`RegionMemory::host`], and names itself, so that a device's address is never taken for one
//! of them. Bytes of a device come and go by copies of its streams, and by nothing else.

use crate::from_host;
use kvik_core::{Code, Error, RegionId, Result};
use kvik_host::Memory;
use kvik_host::cuda::GpuMemory;
use kvik_host::device::{Device, DeviceMemory, Handle};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Weak};

/// Memory as work requests name it: it stays registered while any work request holds it.
#[derive(Debug, Clone)]
pub enum RegionMemory {
    /// Memory of this process, which the processor and the kernel reach.
    Host(Arc<Memory>),
    /// Memory of a device.
    Device(Arc<dyn DeviceMemory>),
}

impl From<Memory> for RegionMemory {
    fn from(memory: Memory) -> RegionMemory {
        RegionMemory::Host(Arc::new(memory))
    }
}

impl From<GpuMemory> for RegionMemory {
    fn from(memory: GpuMemory) -> RegionMemory {
        RegionMemory::Device(Arc::new(memory))
    }
}

impl From<Arc<dyn DeviceMemory>> for RegionMemory {
    fn from(memory: Arc<dyn DeviceMemory>) -> RegionMemory {
        RegionMemory::Device(memory)
    }
}

impl RegionMemory {
    /// Address of the first byte: of the processor, or of the device.
    pub fn addr(&self) -> usize {
        match self {
            RegionMemory::Host(memory) => memory.addr(),
            RegionMemory::Device(memory) => memory.addr(),
        }
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        match self {
            RegionMemory::Host(memory) => memory.len(),
            RegionMemory::Device(memory) => memory.len(),
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
            RegionMemory::Device(memory) => memory.writable(),
        }
    }

    /// The device that it lies on.
    pub fn device(&self) -> Option<&dyn Device> {
        match self {
            RegionMemory::Host(_) => None,
            RegionMemory::Device(memory) => Some(memory.device()),
        }
    }

    /// The sealed memfd, for memory that processes on this host can map.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        match self {
            RegionMemory::Host(memory) => memory.fd(),
            RegionMemory::Device(_) => None,
        }
    }

    /// What other processes of this host open memory of a device by; none for memory of the host, which is shown as it is.
    ///
    /// # Errors
    /// Why they cannot read it. They may still have it written to: that is this process's own copy.
    pub fn export(&self, region: RegionId) -> Option<std::result::Result<Handle, Arc<str>>> {
        let RegionMemory::Device(memory) = self else { return None };
        Some(memory.export().map_err(|error| {
            let device = memory.device();
            let text = format!(
                "region {} lies on {device} and cannot be opened by other processes: {error}",
                region.0
            );
            text.into()
        }))
    }

    /// Copies `from` to `offset`; it is there when this returns. On a device behind all that its default stream was
    /// given before.
    ///
    /// # Errors
    /// `PageOutOfRange` beyond the end, `InvalidArgument` for read-only memory, `DeviceFailed`.
    pub fn copy_in(&self, offset: usize, from: &[u8]) -> Result<()> {
        let copied = match self {
            RegionMemory::Host(memory) => memory.copy_in(offset, from),
            RegionMemory::Device(memory) => memory.copy_in(offset, from),
        };
        copied.map_err(|error| from_host(Code::BufferInvalid, error))
    }

    /// Copies from `offset` into `into`. On a device behind all that its default stream was given before.
    ///
    /// # Errors
    /// `PageOutOfRange` beyond the end, `DeviceFailed`.
    pub fn copy_out(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        let copied = match self {
            RegionMemory::Host(memory) => memory.copy_out(offset, into),
            RegionMemory::Device(memory) => memory.copy_out(offset, into),
        };
        copied.map_err(|error| from_host(Code::BufferInvalid, error))
    }

    /// Has the device that it lies on see what NICs have written there so far, all over it. The processor sees it anyway.
    ///
    /// # Errors
    /// `DeviceFailed`.
    pub fn flush_writes(&self) -> Result<()> {
        match self {
            RegionMemory::Host(_) => Ok(()),
            RegionMemory::Device(memory) => {
                memory.flush_writes().map_err(|error| from_host(Code::DeviceFailed, error))
            }
        }
    }

    /// The memory, for who reaches no other kind: `who` says who that is.
    ///
    /// # Errors
    /// `TransportUnavailable`: it lies on a device.
    pub fn host(&self, who: &str) -> Result<&Arc<Memory>> {
        match self {
            RegionMemory::Host(memory) => Ok(memory),
            RegionMemory::Device(memory) => Err(Error::new(
                Code::TransportUnavailable,
                format!("the region lies on {}, and {who} reaches host memory only", memory.device()),
            )),
        }
    }

    /// What stands for it: somebody holds it meanwhile, so no other memory has this name.
    pub(crate) fn name(&self) -> usize {
        match self {
            RegionMemory::Host(memory) => Arc::as_ptr(memory) as usize,
            RegionMemory::Device(memory) => Arc::as_ptr(memory).cast::<()>() as usize,
        }
    }

    /// A way back to it that does not keep it registered.
    pub fn downgrade(&self) -> WeakRegionMemory {
        match self {
            RegionMemory::Host(memory) => WeakRegionMemory::Host(Arc::downgrade(memory)),
            RegionMemory::Device(memory) => WeakRegionMemory::Device(Arc::downgrade(memory)),
        }
    }
}

/// See [`RegionMemory::downgrade`].
#[derive(Debug, Clone)]
pub enum WeakRegionMemory {
    /// As [`RegionMemory::Host`].
    Host(Weak<Memory>),
    /// As [`RegionMemory::Device`].
    Device(Weak<dyn DeviceMemory>),
}

impl WeakRegionMemory {
    /// The memory, while anybody holds it.
    pub fn upgrade(&self) -> Option<RegionMemory> {
        match self {
            WeakRegionMemory::Host(memory) => memory.upgrade().map(RegionMemory::Host),
            WeakRegionMemory::Device(memory) => memory.upgrade().map(RegionMemory::Device),
        }
    }
}
