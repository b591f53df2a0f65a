//! Page-locked memory of the host: what devices copy from and to without a detour.

use super::device::give_back_apart;
use super::{CudaError, Device, abi};
use crate::error::HostError;
use crate::memory::Memory;
use std::ffi::c_void;
use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::Arc;

/// Memory of the host that devices copy from and to by themselves, beside the CPU and at full speed. All that
/// [`Memory`] can is there by [`Pinned::memory`], also after this was dropped.
pub struct Pinned {
    memory: Arc<Memory>,
}

/// What is given back when nobody uses the memory any more.
struct Allocated {
    device: Device,
    at: usize,
}

impl Pinned {
    /// Allocates `len` bytes that all devices of this process can copy from and to. It counts against what may be
    /// locked, and is all there from the start.
    ///
    /// # Errors
    /// There is no room, or the driver's.
    pub fn new(device: &Device, len: usize) -> Result<Pinned, HostError> {
        if len == 0 {
            return Err(HostError::InvalidArgument("page-locked memory needs at least one byte".into()));
        }
        let _current = device.0.enter()?;
        let mut made = ptr::null_mut();
        // SAFETY: a context is current; an address is written if it returns 0.
        let code = unsafe { (device.cuda().table().host_alloc)(&mut made, len, abi::HOST_PORTABLE) };
        let what = || format!("allocating {len} bytes of page-locked memory");
        device.0.check(code, what)?;
        let Some(base) = NonNull::new(made.cast::<u8>()) else {
            return Err(CudaError::own(what(), "the driver gives none").into());
        };
        let keep = Box::new(Allocated { device: device.clone(), at: base.as_ptr() as usize });
        // SAFETY: mapped for `len` bytes until `keep` is dropped; nobody else has it.
        let memory = Arc::new(unsafe { Memory::foreign(base, len, keep) });
        Ok(Pinned { memory })
    }

    /// The memory, for runs, sums and copies by the CPU.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// The address of `offset`, after checking that `len` bytes from there lie inside.
    pub(super) fn at(&self, offset: usize, len: usize) -> Result<*mut c_void, HostError> {
        self.memory.check(offset, len)?;
        Ok((self.memory.addr() + offset) as *mut c_void)
    }
}

impl Drop for Allocated {
    fn drop(&mut self) {
        let at = self.at;
        give_back_apart(&self.device, move |table| {
            // SAFETY: allocated once; no copy of a stream uses it, since those hold it. A context that is lost
            // refuses, and there is nothing left to do.
            unsafe { (table.host_free)(at as *mut c_void) };
        });
    }
}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pinned({:#x}, {} bytes)", self.memory.addr(), self.memory.len())
    }
}
