//! Memory that a NIC knows.

use super::FabricError;
use super::abi::{self, fid_mr};
use super::device::{Device, Object};
use super::newer::{FI_MR_DMABUF, MrAttr, MrDevice, MrDmabuf};
use crate::device::DeviceMemory;
use crate::rma::{Kept, RmaOp};
use crate::{HostError, Memory};
use std::ffi::{c_int, c_void};
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::ptr;
use std::rc::Rc;
use std::sync::Arc;

/// Memory that a NIC knows. It stays so while an operation on it is in flight.
///
/// The end of it is no fence: what a peer has in flight may still land.
pub struct Registration {
    mr: ManuallyDrop<Object<fid_mr>>,
    kept: ManuallyDrop<Kept>,
    base: u64,
    device: Rc<Device>,
}

impl Device {
    /// Makes memory known to the NIC: for own operations, and for peers' where they may reach it.
    ///
    /// # Errors
    /// libfabric's own: often the limit of locked memory (`ulimit -l`), or a provider that takes no memory that may
    /// only be read.
    pub fn register(
        self: &Rc<Device>,
        memory: Arc<Memory>,
        remote: bool,
    ) -> Result<Rc<Registration>, FabricError> {
        let (at, len, writable, wanted) = (memory.addr(), memory.len(), memory.writable(), self.key());
        let domain = self.domain.as_ptr();
        // SAFETY: an open device; the memory is mapped while `memory` lives, which is kept until the registration is
        // closed. `wanted` is a key of its own where the caller has to give one.
        let mr = unsafe {
            let reg = (*(*domain).mr).reg;
            Object::make(self.lib(), "registering memory", |out| {
                let (from, access) = (at as *const c_void, access(remote, writable));
                reg(self.domain.fid(), from, len, access, 0, wanted, 0, out, ptr::null_mut())
            })
        };
        let mr = mr.map_err(|mut error| {
            if !writable {
                error.text.push_str(
                    " (memory that may only be read: some providers take none; use memory that may be written)",
                );
            }
            error
        })?;
        Ok(self.registered(mr, Kept::Host(memory), at))
    }

    /// Makes memory of a GPU known to the NIC, by its dma-buf.
    ///
    /// # Errors
    /// The NIC knows no such memory ([`Device::gpus`]), the GPU or its driver makes no dma-bufs, or libfabric's own.
    pub fn register_gpu(
        self: &Rc<Device>,
        memory: Arc<dyn DeviceMemory>,
        remote: bool,
    ) -> Result<Rc<Registration>, FabricError> {
        let what = "registering memory of a GPU";
        let number = memory.device().number();
        let refused = |text: String| FabricError {
            what,
            number: libc::EOPNOTSUPP,
            text: format!("GPU {number}: {text}"),
        };
        self.gpus().map_err(|why| refused(why.to_owned()))?;
        let buffer = memory.dmabuf().map_err(|error| refused(error.to_string()))?;
        let (at, domain) = (memory.addr(), self.domain.as_ptr());
        let dmabuf = MrDmabuf {
            fd: buffer.fd.as_raw_fd(),
            offset: buffer.offset,
            len: memory.len(),
            base_addr: (at - buffer.offset as usize) as *mut c_void,
        };
        let attr = attributes(&dmabuf, number, access(remote, memory.writable()), self.key());
        // SAFETY: an open device of libfabric 1.20 or newer, which was asked for that interface (it would not be open
        // for GPUs otherwise), so the attributes are those of its own header. They and the descriptor live during the
        // call, and descriptor and memory are kept until the registration is closed.
        let mr = unsafe {
            let regattr = (*(*domain).mr).regattr;
            Object::make(self.lib(), what, |out| regattr(self.domain.fid(), &attr, FI_MR_DMABUF, out))
        };
        let mr = mr.map_err(|mut error| {
            error.text = format!(
                "GPU {number}: {} (a dma-buf of {} bytes): libfabric must be built for dma-bufs (rdma-core 34), and the \
                 NIC's driver take them",
                error.text,
                memory.len()
            );
            error
        })?;
        Ok(self.registered(mr, Kept::Device { _dmabuf: Some(buffer.fd), memory }, at))
    }

    fn registered(self: &Rc<Device>, mr: Object<fid_mr>, kept: Kept, at: usize) -> Rc<Registration> {
        let virtual_addresses = self.description().mr_mode() & abi::FI_MR_VIRT_ADDR != 0;
        let base = if virtual_addresses { at as u64 } else { 0 };
        let (mr, kept) = (ManuallyDrop::new(mr), ManuallyDrop::new(kept));
        Rc::new(Registration { mr, kept, base, device: self.clone() })
    }
}

/// Own operations and peers' read it, and write only what may be written: the kernel refuses to pin pages for writing
/// that are mapped to be read.
fn access(remote: bool, writable: bool) -> u64 {
    // Named after the operation: a read writes the memory here, and a write reads it.
    let mut access = abi::FI_WRITE;
    if writable {
        access |= abi::FI_READ;
    }
    if remote {
        access |= abi::FI_REMOTE_READ;
    }
    if remote && writable {
        access |= abi::FI_REMOTE_WRITE;
    }
    access
}

fn attributes(dmabuf: &MrDmabuf, gpu: u32, access: u64, key: u64) -> MrAttr {
    // All 8 bytes of it: providers compare and keep the whole of the union.
    let mut device = MrDevice { reserved: 0 };
    device.cuda = gpu as c_int;
    MrAttr {
        dmabuf,
        iov_count: 1,
        access,
        offset: 0,
        requested_key: key,
        context: ptr::null_mut(),
        auth_key_size: 0,
        auth_key: ptr::null_mut(),
        iface: abi::FI_HMEM_CUDA,
        device,
        hmem_data: ptr::null_mut(),
        page_size: 0,
        base_mr: ptr::null(),
        sub_mr_cnt: 0,
    }
}

impl Registration {
    /// How peers name it.
    pub fn key(&self) -> u64 {
        // SAFETY: an open registration.
        unsafe { (*self.mr.as_ptr()).key }
    }

    /// What peers take for the address of its first byte.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Those who hold the memory, this registration among them.
    pub fn holders(&self) -> usize {
        self.kept.holders()
    }

    /// The device that knows it.
    pub fn device(&self) -> &Rc<Device> {
        &self.device
    }

    /// What own operations on it carry.
    pub(super) fn desc(&self) -> *mut c_void {
        // SAFETY: an open registration.
        unsafe { (*self.mr.as_ptr()).mem_desc }
    }

    /// A range for an own operation, which must lie in it; and be writable, where the operation writes it.
    pub(super) fn run(&self, offset: usize, len: usize, op: RmaOp) -> Result<libc::iovec, HostError> {
        Ok(libc::iovec { iov_base: self.kept.at(offset, len, op)? as *mut c_void, iov_len: len })
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // SAFETY: taken once, here; no method runs after it.
        let (mr, kept) = unsafe { (ManuallyDrop::take(&mut self.mr), ManuallyDrop::take(&mut self.kept)) };
        match mr.close() {
            0 => drop(kept),
            // The NIC may still know the memory: it must never be used for anything else.
            code => {
                let error = self.device.lib().error("giving up memory", code.saturating_abs());
                log::error!("{error}; {} bytes of memory stay lost", kept.len());
                std::mem::forget(kept);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn attributes_lie_where_the_library_looks_for_them() {
        // `struct fi_mr_attr` and `struct fi_mr_dmabuf` of libfabric 1.20 to 2.6 on 64-bit machines.
        assert_eq!((offset_of!(MrAttr, access), offset_of!(MrAttr, requested_key)), (16, 32));
        assert_eq!((offset_of!(MrAttr, iface), offset_of!(MrAttr, device)), (64, 72));
        assert_eq!((offset_of!(MrAttr, hmem_data), size_of::<MrAttr>()), (80, 112));
        assert_eq!((offset_of!(MrDmabuf, offset), offset_of!(MrDmabuf, len)), (8, 16));
        assert_eq!((offset_of!(MrDmabuf, base_addr), size_of::<MrDmabuf>()), (24, 32));
    }

    #[test]
    fn only_what_may_be_written_is_written() {
        let own = abi::FI_READ | abi::FI_WRITE;
        assert_eq!(access(false, true), own);
        assert_eq!(access(false, false), abi::FI_WRITE);
        assert_eq!(access(true, false), abi::FI_WRITE | abi::FI_REMOTE_READ);
        assert_eq!(access(true, true), own | abi::FI_REMOTE_READ | abi::FI_REMOTE_WRITE);
    }
}
