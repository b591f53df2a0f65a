//! An open device, and the memory that it knows.

use super::abi::{self, Fid, FidDomain, FidFabric, FidMr};
use super::{Fabric, FabricError, Nic};
use crate::Memory;
use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::ptr::{self, NonNull};
use std::rc::Rc;
use std::sync::Arc;

/// An object of libfabric, closed with the value.
pub(super) struct Object<T>(NonNull<T>);

impl<T> Object<T> {
    /// Makes an object.
    ///
    /// # Safety
    /// `call` writes an open object that begins with a [`Fid`], as every object does, when it returns 0; and the value
    /// is dropped before what the object needs.
    pub unsafe fn make(
        lib: &Fabric,
        what: &'static str,
        call: impl FnOnce(*mut *mut T) -> c_int,
    ) -> Result<Object<T>, FabricError> {
        let mut made = ptr::null_mut();
        lib.check(what, call(&mut made) as isize)?;
        NonNull::new(made).map(Object).ok_or_else(|| lib.error(what, libc::EIO))
    }

    pub fn as_ptr(&self) -> *mut T {
        self.0.as_ptr()
    }

    pub fn fid(&self) -> *mut Fid {
        self.0.as_ptr().cast()
    }
}

impl<T> Drop for Object<T> {
    fn drop(&mut self) {
        // SAFETY: by the rule of `make` an open object, closed once.
        let code = unsafe { ((*(*self.fid()).ops).close)(self.fid()) };
        debug_assert_eq!(code, 0, "something that needs this object was not closed before it");
    }
}

/// An open NIC. It and all that comes of it are one thread's, and the types see to that.
pub struct Device {
    // In the order in which they are closed.
    pub(super) domain: Object<FidDomain>,
    pub(super) fabric: Object<FidFabric>,
    pub(super) nic: Arc<Nic>,
    next_key: Cell<u64>,
}

impl Device {
    /// Opens the NIC.
    ///
    /// # Errors
    /// libfabric's own, by the step that failed.
    pub fn open(nic: &Arc<Nic>) -> Result<Rc<Device>, FabricError> {
        let (lib, info) = (&nic.fabric, nic.info.as_ptr());
        // SAFETY: `info` is a whole description, which lives as long as `nic`; each call writes an object if it returns
        // 0, and they are kept in the order in which they must be closed.
        let (fabric, domain) = unsafe {
            let fabric: Object<FidFabric> = Object::make(lib, "opening the fabric", |out| {
                (lib.table.fabric)((*info).fabric_attr, out, ptr::null_mut())
            })?;
            let f = fabric.as_ptr();
            let domain = Object::make(lib, "opening the device", |out| {
                ((*(*f).ops).domain)(f, info, out, ptr::null_mut())
            })?;
            (fabric, domain)
        };
        Ok(Rc::new(Device { domain, fabric, nic: nic.clone(), next_key: Cell::new(1) }))
    }

    /// What its provider says of it.
    pub fn nic(&self) -> &Nic {
        &self.nic
    }

    pub(super) fn lib(&self) -> &Fabric {
        &self.nic.fabric
    }

    /// Makes memory known to the NIC: for own operations, and for peers' where they may reach it.
    ///
    /// # Errors
    /// libfabric's own: often the limit of locked memory (`ulimit -l`).
    pub fn register(
        self: &Rc<Device>,
        memory: Arc<Memory>,
        remote: bool,
    ) -> Result<Rc<Registration>, FabricError> {
        let wanted = self.next_key.get();
        self.next_key.set(wanted + 1);
        let mut access = abi::FI_READ | abi::FI_WRITE;
        if remote {
            access |= abi::FI_REMOTE_READ | abi::FI_REMOTE_WRITE;
        }
        let (at, len) = (memory.addr(), memory.len());
        let domain = self.domain.as_ptr();
        // SAFETY: an open device; the memory is mapped while `memory` lives, which is kept until the registration is
        // closed. `wanted` is a key of its own where the caller has to give one.
        let mr: Object<FidMr> = unsafe {
            let reg = (*(*domain).mr).reg;
            Object::make(self.lib(), "registering memory", |out| {
                reg(self.domain.fid(), at as *const c_void, len, access, 0, wanted, 0, out, ptr::null_mut())
            })?
        };
        let base = if self.nic.mr_mode() & abi::FI_MR_VIRT_ADDR != 0 { at as u64 } else { 0 };
        Ok(Rc::new(Registration { mr, memory, base, _device: self.clone() }))
    }
}

/// Memory that a NIC knows. It stays so while an operation on it is under way.
///
/// The end of it is no fence: what a peer has under way may still land.
pub struct Registration {
    // In the order in which they are let go of.
    mr: Object<FidMr>,
    memory: Arc<Memory>,
    base: u64,
    _device: Rc<Device>,
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

    /// The memory.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// What own operations on it carry.
    pub(super) fn desc(&self) -> *mut c_void {
        // SAFETY: an open registration.
        unsafe { (*self.mr.as_ptr()).desc }
    }
}
