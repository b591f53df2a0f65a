//! The same memory for others: for a NIC as a dma-buf, for another process of this host by a handle.

use super::abi::{self, IpcMemHandle};
use super::device::give_back_apart;
use super::{Cuda, CudaError, Device, GpuMemory, Kind, Place};
use crate::device::DmaBuf;
use crate::error::HostError;
use std::any::Any;
use std::ffi::c_void;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

/// What another process of this host opens a device's memory by ([`GpuMemory::open`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpcHandle {
    /// The driver's name for the allocation.
    pub handle: [u8; 64],
    /// Where in the allocation the memory begins.
    pub offset: u64,
    /// Bytes of the memory.
    pub len: u64,
    /// The device, as every process knows it.
    pub device: [u8; 16],
}

impl IpcHandle {
    /// Bytes of the encoding.
    pub const LEN: usize = 96;

    /// As bytes, for the other process.
    pub fn encode(&self) -> [u8; IpcHandle::LEN] {
        let mut bytes = [0; IpcHandle::LEN];
        bytes[..64].copy_from_slice(&self.handle);
        bytes[64..72].copy_from_slice(&self.offset.to_le_bytes());
        bytes[72..80].copy_from_slice(&self.len.to_le_bytes());
        bytes[80..].copy_from_slice(&self.device);
        bytes
    }

    /// From bytes. What they say is checked when it is opened.
    pub fn decode(bytes: &[u8; IpcHandle::LEN]) -> IpcHandle {
        let number = |at: usize| {
            let mut number = [0; 8];
            number.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(number)
        };
        let (mut handle, mut device) = ([0; 64], [0; 16]);
        handle.copy_from_slice(&bytes[..64]);
        device.copy_from_slice(&bytes[80..]);
        IpcHandle { handle, offset: number(64), len: number(72), device }
    }
}

impl GpuMemory {
    /// The memory as a dma-buf.
    ///
    /// # Errors
    /// The driver is older than CUDA 11.7, the device or the kind of memory cannot do it (the open kernel modules can,
    /// the proprietary ones often not), or the driver's.
    pub fn dmabuf(&self) -> Result<DmaBuf, HostError> {
        let what = || format!("exporting {} bytes at {:#x} as a dma-buf", self.len(), self.addr());
        let refuse = |text: &str| Err(CudaError::own(what(), text).into());
        let inner = &self.device().0;
        inner.cuda.0.check_process()?;
        let Some(export) = inner.cuda.table().range_handle else {
            return refuse("the driver is too old for it: that of CUDA 11.7 has it");
        };
        if !self.device().has_dmabuf() {
            return refuse(
                "this device cannot: it takes NVIDIA's open kernel modules, and a kernel with dma-bufs",
            );
        }
        if self.place().kind == Kind::Managed {
            return refuse("managed memory moves about, and cannot be shared with a NIC");
        }
        let _current = inner.enter()?;
        let page = rustix::param::page_size();
        let first = self.addr() & !(page - 1);
        let Some(end) = (self.addr() + self.len()).checked_next_multiple_of(page) else {
            return refuse("there are no such addresses");
        };
        let ordered = self.finish_copies()?;
        let mut fd: RawFd = -1;
        // SAFETY: whole pages around memory that is allocated, and room for a descriptor.
        let code = unsafe {
            export((&raw mut fd).cast::<c_void>(), first as u64, end - first, abi::RANGE_DMA_BUF, 0)
        };
        inner.check(code, what)?;
        if fd < 0 {
            return refuse("the driver gives no descriptor");
        }
        // SAFETY: a new descriptor, which is nobody else's.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // Not for programs that this one starts. It can only fail for a descriptor that is none.
        let _ = rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC);
        Ok(DmaBuf { fd, offset: (self.addr() - first) as u64, ordered })
    }

    /// What another process opens the memory by. It stays valid while the memory is allocated.
    ///
    /// # Errors
    /// The kind of memory cannot be shared (a pool's, a mapping's, managed), or the driver's.
    pub fn export(&self) -> Result<IpcHandle, HostError> {
        let what = || format!("exporting {} bytes at {:#x} to other processes", self.len(), self.addr());
        let place = self.place();
        if !place.exportable {
            let text = "memory of a pool or a mapping (PyTorch's expandable_segments, cudaMallocAsync) and managed \
                        memory have no handle for other processes; allocate it by cudaMalloc";
            return Err(CudaError::own(what(), text).into());
        }
        let inner = &self.device().0;
        let _current = inner.enter()?;
        self.finish_copies()?;
        let mut handle = IpcMemHandle([0; 64]);
        // SAFETY: memory of the current context, and room for a handle.
        let code = unsafe { (inner.cuda.table().ipc_export)(&mut handle, self.addr() as u64) };
        inner.check(code, what)?;
        let offset = (self.addr() - place.base) as u64;
        Ok(IpcHandle { handle: handle.0, offset, len: self.len() as u64, device: self.device().uuid() })
    }

    /// Has the driver finish each blocking copy into this memory before it returns, where the memory can.
    fn finish_copies(&self) -> Result<bool, HostError> {
        let inner = &self.device().0;
        let yes = 1u32;
        // SAFETY: memory of this process, and a number as the attribute wants it.
        let code = unsafe {
            (inner.cuda.table().set_attribute)(
                (&raw const yes).cast(),
                abi::OF_SYNC_MEMOPS,
                self.addr() as u64,
            )
        };
        match code {
            abi::INVALID_VALUE | abi::NOT_SUPPORTED => Ok(false),
            code => {
                inner.check(code, || "making copies finish before they are said to be".into())?;
                Ok(true)
            }
        }
    }
}

/// An allocation of another process that is open here.
struct Opened {
    device: Device,
    base: u64,
    keep: Option<Box<dyn Any + Send + Sync>>,
}

impl GpuMemory {
    /// Opens memory that another process of this host has exported, on a device that both see: readable, and never
    /// writable here. `keep` is dropped once it is closed again, which is after the last use, in a thread of its own.
    ///
    /// CUDA leaves it undefined what becomes of memory that its owner frees while others have it open, so an owner that
    /// lives waits until they have closed it: `keep` tells. The memory of one that died, or does not wait, stays mapped
    /// until this is dropped, and what is read there means nothing.
    ///
    /// # Errors
    /// This process does not see the device, the peer is gone, it is this very process, what it said does not fit the
    /// allocation, or the driver's.
    pub fn open(handle: &IpcHandle, keep: Box<dyn Any + Send + Sync>) -> Result<GpuMemory, HostError> {
        let what = "opening a peer's memory of a device";
        let cuda = Cuda::get()?;
        let device = find(&cuda, handle.device, what)?;
        let inner = &device.0;
        let current = inner.enter()?;
        let mut base = 0;
        // SAFETY: the driver checks the handle; an address is written if it returns 0, and closed once.
        let code = unsafe {
            (cuda.table().ipc_open)(&mut base, IpcMemHandle(handle.handle), abi::IPC_LAZY_PEER_ACCESS)
        };
        if code == abi::INVALID_CONTEXT {
            let text = "a process cannot open what it has exported itself, or the device's context is gone";
            return Err(CudaError::own(what, text).into());
        }
        inner.check(code, || what.into())?;
        let opened = Opened { device: device.clone(), base, keep: Some(keep) };
        let (mut start, mut size) = (0, 0);
        // SAFETY: an address that is open; two numbers are written.
        let code = unsafe { (cuda.table().address_range)(&mut start, &mut size, base) };
        inner.check(code, || what.into())?;
        drop(current);
        let inside = handle.offset.checked_add(handle.len).is_some_and(|end| end <= size as u64);
        if !inside || handle.len == 0 {
            let (len, offset) = (handle.len, handle.offset);
            let text = format!("it says {len} bytes at {offset} of an allocation that has {size}");
            return Err(CudaError::own(what, text).into());
        }
        let range = ((base + handle.offset) as usize, handle.len as usize);
        let place = Place {
            kind: Kind::Device,
            device: device.ordinal(),
            context: inner.context as usize,
            base: base as usize,
            len: size,
            exportable: false,
        };
        // SAFETY: open until `opened` is dropped, which the memory keeps; it is for reading only.
        Ok(unsafe { GpuMemory::of_peer(&device, range, place, Box::new(opened)) })
    }
}

/// The device of this identity.
fn find(cuda: &Cuda, uuid: [u8; 16], what: &str) -> Result<Device, HostError> {
    for ordinal in 0..cuda.devices() {
        if cuda.uuid_of(ordinal)? == uuid {
            return cuda.device(ordinal);
        }
    }
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    let text = format!("it lies on the device {hex}, which this process does not see (CUDA_VISIBLE_DEVICES)");
    Err(CudaError::own(what, text).into())
}

impl Drop for Opened {
    fn drop(&mut self) {
        let (base, keep) = (self.base, self.keep.take());
        give_back_apart(&self.device, move |table| {
            // SAFETY: opened once in this context, and no copy of a stream uses it, since those hold it.
            unsafe { (table.ipc_close)(base) };
            drop(keep);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_comes_back_as_it_went() {
        let mut handle = [0; 64];
        handle.iter_mut().enumerate().for_each(|(at, byte)| *byte = at as u8);
        let there = IpcHandle { handle, offset: 0x0102_0304_0506_0708, len: 9 << 40, device: [0xA5; 16] };
        assert_eq!(IpcHandle::decode(&there.encode()), there);
    }
}
