//! Registered memory of a device: an address that no CPU may touch, a length, and what keeps it.

use super::abi::{self, Addr};
use super::{Cuda, CudaError, Device, Kind, Place};
use crate::error::HostError;
use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::ptr;

/// Memory of a device that transfers read and write. `Send` and `Sync`; never a slice, and never touched by the CPU.
pub struct GpuMemory {
    pub(super) device: Device,
    addr: usize,
    len: usize,
    writable: bool,
    /// What lies at its first byte.
    place: Place,
    // Dropped last: it may free the memory.
    _keep: Box<dyn Any + Send + Sync>,
}

impl GpuMemory {
    /// Registers memory of a device that the caller has (a tensor's, say). `keep` is dropped after the last use.
    ///
    /// # Errors
    /// The address is no device's, some of the range is not allocated or lies on another device, or it belongs to a
    /// context that is not its device's primary one. The text says which, and what to do.
    ///
    /// # Safety
    /// The `len` bytes at `addr` stay allocated until `keep` is dropped. Where transfers write them, nothing else that
    /// relies on them runs meanwhile.
    pub unsafe fn new(
        addr: usize,
        len: usize,
        keep: Box<dyn Any + Send + Sync>,
    ) -> Result<GpuMemory, HostError> {
        let what = || format!("registering {len} bytes at {addr:#x}");
        let refuse = |text: &str| Err(CudaError::own(what(), text).into());
        let Some(cuda) = Cuda::loaded() else {
            return refuse("nobody in this process uses CUDA, so it is no memory of a device");
        };
        let Some(place) = cuda.place_of(addr)? else {
            return refuse(
                "CUDA does not know it: it was freed, or is ordinary memory of the host; register that as such",
            );
        };
        if place.kind == Kind::Pinned {
            return refuse("it is page-locked memory of the host; register it as memory of the host");
        }
        let device = cuda.device(place.device)?;
        if place.context != 0 && place.context != device.0.context as usize {
            return refuse("it was allocated in a context of its own; kvik uses the device's primary one");
        }
        check_range(&cuda, &place, addr, len)?;
        Ok(GpuMemory { device, addr, len, writable: true, place, _keep: keep })
    }

    /// Allocates `len` bytes on a device, for tools and tests. To free them, the driver may wait for all that the
    /// device was given.
    ///
    /// # Errors
    /// There is no room, or the driver's.
    pub fn alloc(device: &Device, len: usize) -> Result<GpuMemory, HostError> {
        let _current = device.0.enter()?;
        let mut addr = 0;
        // SAFETY: the device's context is current; an address is written if it returns 0, and freed once.
        let code = unsafe { (device.cuda().table().alloc)(&mut addr, len) };
        device.0.check(code, || format!("allocating {len} bytes"))?;
        let keep = Box::new(Allocated { device: device.clone(), addr });
        // SAFETY: allocated until `keep` is dropped, and nobody else has it.
        unsafe { GpuMemory::new(addr as usize, len, keep) }
    }

    /// Memory of another process that was opened in this one.
    ///
    /// # Safety
    /// As for [`GpuMemory::new`], but for reading only.
    pub(super) unsafe fn of_peer(
        device: &Device,
        (addr, len): (usize, usize),
        place: Place,
        keep: Box<dyn Any + Send + Sync>,
    ) -> GpuMemory {
        GpuMemory { device: device.clone(), addr, len, writable: false, place, _keep: keep }
    }

    /// The address of the first byte: a number, for devices and NICs.
    pub fn addr(&self) -> usize {
        self.addr
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes; never so for memory that was registered.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The device that it lies on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// What the driver said of its first byte when it was registered.
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// Whether transfers may write here: not in a peer's.
    pub fn writable(&self) -> bool {
        self.writable
    }

    /// Whether `len` bytes at `offset` lie inside.
    ///
    /// # Errors
    /// They do not.
    pub fn check(&self, offset: usize, len: usize) -> Result<(), HostError> {
        self.at(offset, len).map(|_| ())
    }

    /// Copies `from` to `offset`, behind all that the default stream has been given, and returns when it is there.
    ///
    /// It has no deadline: it is for tools, and for moments when nothing else runs. Transfers have a
    /// [`Stream`](super::Stream).
    ///
    /// # Errors
    /// Out of bounds, a peer's memory, or the driver's.
    pub fn copy_in(&self, offset: usize, from: &[u8]) -> Result<(), HostError> {
        let to = self.writable_at(offset, from.len())?;
        let _current = self.device.0.enter()?;
        let table = self.device.cuda().table();
        // SAFETY: the range lies in memory of the current context's device, and the slice lives. The first call may
        // return when the bytes are read; with the second they are in place.
        let code = unsafe {
            match (table.to_device)(to, from.as_ptr().cast::<c_void>(), from.len()) {
                abi::SUCCESS => (table.stream_synchronize)(ptr::null_mut()),
                code => code,
            }
        };
        self.device.0.check(code, || format!("copying {} bytes to {to:#x}", from.len()))?;
        Ok(())
    }

    /// Copies from `offset` into `into`, behind all that the default stream has been given. As for
    /// [`GpuMemory::copy_in`], it has no deadline.
    ///
    /// # Errors
    /// Out of bounds, or the driver's.
    pub fn copy_out(&self, offset: usize, into: &mut [u8]) -> Result<(), HostError> {
        let from = self.at(offset, into.len())?;
        let _current = self.device.0.enter()?;
        // SAFETY: as above, the other way round; it returns when the bytes are there.
        let code = unsafe {
            (self.device.cuda().table().to_host)(into.as_mut_ptr().cast::<c_void>(), from, into.len())
        };
        self.device.0.check(code, || format!("copying {} bytes from {from:#x}", into.len()))?;
        Ok(())
    }

    /// Sees to it that what NICs have written here, and told of, is seen by kernels that are launched from now on. On
    /// devices that see such writes in order anyway it does nothing.
    ///
    /// # Errors
    /// The device cannot do it, or the driver's.
    pub fn flush_writes(&self) -> Result<(), HostError> {
        let inner = &self.device.0;
        // Most desktop boards: no NIC writes there, so there is nothing to flush, and they have no way to.
        if inner.attribute(abi::GPU_DIRECT_RDMA)? == 0 {
            return Ok(());
        }
        if inner.attribute(abi::WRITES_ORDERING)? >= abi::ORDERED_FOR_OWNER {
            return Ok(());
        }
        let what = "flushing the writes of NICs";
        if inner.attribute(abi::FLUSH_OPTIONS)? & abi::FLUSH_BY_HOST == 0 {
            let text = format!("device {} neither orders them nor flushes them for the host", inner.ordinal);
            return Err(CudaError::own(what, text).into());
        }
        let _current = inner.enter()?;
        // SAFETY: plain numbers, for the current context.
        let code = unsafe {
            (self.device.cuda().table().flush_writes)(abi::FLUSH_CURRENT_CONTEXT, abi::FLUSH_TO_OWNER)
        };
        inner.check(code, || what.into())?;
        Ok(())
    }

    /// The address of `offset`, after checking that `len` bytes from there lie inside.
    pub(super) fn at(&self, offset: usize, len: usize) -> Result<Addr, HostError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok((self.addr + offset) as Addr),
            _ => Err(HostError::OutOfBounds { offset, len, size: self.len }),
        }
    }

    /// The same, for writing.
    pub(super) fn writable_at(&self, offset: usize, len: usize) -> Result<Addr, HostError> {
        if !self.writable {
            return Err(HostError::ReadOnlyMemory);
        }
        self.at(offset, len)
    }
}

/// An allocation of kvik's own.
struct Allocated {
    device: Device,
    addr: Addr,
}

impl Drop for Allocated {
    fn drop(&mut self) {
        let Ok(_current) = self.device.0.enter() else { return };
        // SAFETY: allocated once, and no copy uses it, since those hold it.
        unsafe { (self.device.cuda().table().free)(self.addr) };
    }
}

impl fmt::Debug for GpuMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whose = if self.writable { "" } else { ", a peer's" };
        write!(f, "GpuMemory(device {}, {:#x}, {} bytes{whose})", self.device.ordinal(), self.addr, self.len)
    }
}

/// Whether all of a range is memory of the same device: one allocation, or mappings side by side (as PyTorch's
/// expandable segments are).
fn check_range(cuda: &Cuda, first: &Place, addr: usize, len: usize) -> Result<(), HostError> {
    let refuse =
        |text: String| Err(CudaError::own(format!("registering {len} bytes at {addr:#x}"), text).into());
    if len == 0 {
        return refuse("memory needs at least one byte".into());
    }
    let Some(end) = addr.checked_add(len) else {
        return refuse("there are no such addresses".into());
    };
    let mut place = *first;
    loop {
        let known = place.base + place.len;
        if known >= end {
            return Ok(());
        }
        place = match cuda.place_of(known)? {
            Some(next) if (next.kind, next.device) == (first.kind, first.device) => next,
            _ => return refuse(format!("only the first {} of them are allocated there", known - addr)),
        };
    }
}
