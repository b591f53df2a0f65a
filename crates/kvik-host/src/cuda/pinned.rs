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
/// [`Memory`] can is there by [`Pinned::memory`]; the two end together.
pub struct Pinned {
    memory: Arc<Memory>,
    // After the memory, which lies in it or which it locks.
    _lock: Arc<Lock>,
}

/// What is undone when nobody uses the memory any more.
struct Lock {
    device: Device,
    at: usize,
    // Memory that was there before, which stays until it is unlocked.
    before: Option<Arc<Memory>>,
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
        let lock = Arc::new(Lock { device: device.clone(), at: base.as_ptr() as usize, before: None });
        // SAFETY: mapped for `len` bytes until the lock, which the memory keeps, is dropped; nobody else has it.
        let memory = unsafe { Memory::foreign(base, len, Box::new(lock.clone())) };
        Ok(Pinned { memory: Arc::new(memory), _lock: lock })
    }

    /// Locks the pages of memory that is there: a NIC or a peer can have the same. For memory that stays: to unlock it,
    /// the driver may wait for all that the device was given.
    ///
    /// # Errors
    /// It is locked already, or may not be, or the driver's.
    pub fn lock(device: &Device, memory: Arc<Memory>) -> Result<Pinned, HostError> {
        let _current = device.0.enter()?;
        let (at, len) = (memory.addr(), memory.len());
        // SAFETY: mapped for `len` bytes while `memory`, which the lock keeps, lives.
        let code =
            unsafe { (device.cuda().table().host_register)(at as *mut c_void, len, abi::HOST_PORTABLE) };
        let what = || format!("locking the pages of {len} bytes at {at:#x}");
        if code == abi::ALREADY_REGISTERED {
            return Err(CudaError::own(what(), "somebody has locked some of them already").into());
        }
        device.0.check(code, what)?;
        let lock = Lock { device: device.clone(), at, before: Some(memory.clone()) };
        Ok(Pinned { memory, _lock: Arc::new(lock) })
    }

    /// The memory, for runs, sums and copies by the CPU.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// Whether there are no bytes; never so.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The address of `offset`, after checking that `len` bytes from there lie inside.
    pub(super) fn at(&self, offset: usize, len: usize) -> Result<*mut c_void, HostError> {
        self.memory.check(offset, len)?;
        Ok((self.memory.addr() + offset) as *mut c_void)
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        let at = self.at;
        if self.before.is_none() {
            give_back_apart(&self.device, move |table| {
                // SAFETY: allocated once; no copy of a stream uses it, since those hold it. A context that is lost
                // refuses, and there is nothing left to do.
                unsafe { (table.host_free)(at as *mut c_void) };
            });
        } else if let Ok(_current) = self.device.0.enter() {
            // SAFETY: as above, locked once. Not apart: it is locked no more when this returns.
            unsafe { (self.device.cuda().table().host_unregister)(at as *mut c_void) };
        }
    }
}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pinned({:#x}, {} bytes)", self.memory.addr(), self.len())
    }
}
