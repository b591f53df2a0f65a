//! Memory that a plug-in's device knows: the host's, or that of a device such as a GPU.

use super::abi;
use super::device::{Opened, PluginDevice};
use super::{PluginError, RmaOp};
use crate::device::{DeviceKind, DeviceMemory};
use crate::rma::{Kept, Run};
use crate::{HostError, Memory};
use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::ptr::{self, NonNull};
use std::rc::Rc;
use std::sync::Arc;

/// Memory that a device knows. It stays so while an operation on it is in flight.
pub struct Region {
    at: NonNull<abi::kvik_nic_region>,
    kept: ManuallyDrop<Kept>,
    key: u64,
    base: u64,
    device: Rc<Opened>,
}

/// What a plug-in tells of a region that it has made.
struct Made {
    at: *mut abi::kvik_nic_region,
    key: u64,
    base: u64,
}

impl PluginDevice {
    /// Makes memory known to the device.
    ///
    /// # Errors
    /// The plug-in's own.
    pub fn register(&mut self, memory: Arc<Memory>) -> Result<Rc<Region>, PluginError> {
        let mut made = Made { at: ptr::null_mut(), key: 0, base: 0 };
        let (start, len) = (memory.addr() as *mut c_void, memory.len() as u64);
        let add = self.plugin().functions.region_add;
        // SAFETY: an open device; the memory is mapped while `memory` lives, which the region keeps until it
        // was removed.
        let code = unsafe { add(self.at(), start, len, &mut made.at, &mut made.key, &mut made.base) };
        self.made(code, &made, Kept::Host(memory))
    }

    /// Makes memory of a device, such as a GPU, known to this one.
    ///
    /// # Errors
    /// The plug-in reaches no memory of such devices, or needs a dma-buf and there is none, or its own.
    pub fn register_device(&mut self, memory: Arc<dyn DeviceMemory>) -> Result<Rc<Region>, PluginError> {
        let what = "making memory of a device known";
        let (on, memories) = (memory.device(), self.memories());
        let kind = match on.kind() {
            DeviceKind::Cuda if memories.kinds & 1 << abi::KVIK_NIC_MEMORY_CUDA != 0 => {
                Some(abi::KVIK_NIC_MEMORY_CUDA)
            }
            DeviceKind::Cuda | DeviceKind::Other => None,
        };
        let (Some(kind), Some(add)) = (kind, self.plugin().functions.region_add_on) else {
            let text = format!("it reaches no memory of {on}; pages there take another transport");
            return Err(self.plugin().wrong(what, text));
        };
        let buffer = match (memories.dmabuf, memory.dmabuf()) {
            (abi::KVIK_NIC_DMABUF_UNUSED, _) => None,
            (abi::KVIK_NIC_DMABUF_NEEDED, Err(error)) => {
                let text = format!("it needs a dma-buf of the memory of {on}: {error}");
                return Err(self.plugin().wrong(what, text));
            }
            (_, buffer) => buffer.ok(),
        };
        let told = abi::kvik_nic_memory {
            kind,
            number: on.number(),
            address: memory.addr() as u64,
            length: memory.len() as u64,
            offset: buffer.as_ref().map_or(0, |buffer| buffer.offset),
            dmabuf: buffer.as_ref().map_or(-1, |buffer| buffer.fd.as_raw_fd()),
            zero: 0,
        };
        let mut made = Made { at: ptr::null_mut(), key: 0, base: 0 };
        // SAFETY: an open device; what is told is read during the call, while `buffer` is open. The memory stays
        // allocated while `memory` lives, which the region keeps until it was removed.
        let code = unsafe { add(self.at(), &told, &mut made.at, &mut made.key, &mut made.base) };
        self.made(code, &made, Kept::Device { _dmabuf: None, memory })
    }

    fn made(&self, code: i32, made: &Made, kept: Kept) -> Result<Rc<Region>, PluginError> {
        let what = "making memory known";
        self.opened().check(what, code)?;
        let at = NonNull::new(made.at).ok_or_else(|| self.plugin().wrong(what, "it gives no region"))?;
        let kept = ManuallyDrop::new(kept);
        Ok(Rc::new(Region { at, kept, key: made.key, base: made.base, device: self.opened().clone() }))
    }
}

impl Region {
    /// How peers name it.
    pub fn key(&self) -> u64 {
        self.key
    }

    /// What peers take for the address of its first byte.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Those who hold the memory, this region among them.
    pub fn holders(&self) -> usize {
        self.kept.holders()
    }

    /// Whether it is of this device.
    pub(super) fn is_of(&self, device: &Rc<Opened>) -> bool {
        Rc::ptr_eq(&self.device, device)
    }

    /// What the plug-in has for it.
    pub(super) fn region(&self) -> *mut abi::kvik_nic_region {
        self.at.as_ptr()
    }

    /// Where a run begins, which must lie in the memory; and be writable, where the operation writes it.
    pub(super) fn at(&self, run: &Run, op: RmaOp) -> Result<*mut c_void, HostError> {
        Ok(self.kept.at(run.offset, run.len, op)? as *mut c_void)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let device = &self.device;
        // SAFETY: an open device and a region of it, removed once; operations that are in flight keep it.
        let code = unsafe { (device.plugin.functions.region_remove)(device.at.as_ptr(), self.at.as_ptr()) };
        match device.check("removing memory", code) {
            // SAFETY: dropped once, here; no method runs after it.
            Ok(()) => unsafe { ManuallyDrop::drop(&mut self.kept) },
            // The device may still touch it, so nobody else may have it, ever.
            Err(error) => log::error!("{error}; {} bytes of memory stay lost", self.kept.len()),
        }
    }
}
