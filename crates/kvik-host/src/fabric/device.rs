//! An open device.

use super::abi::{self, fid, fid_domain, fid_ep, fid_fabric};
use super::nic::Description;
use super::{Fabric, FabricError, Nic};
use std::cell::Cell;
use std::ffi::c_int;
use std::mem::ManuallyDrop;
use std::ptr::{self, NonNull};
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

    pub fn fid(&self) -> *mut fid {
        self.0.as_ptr().cast()
    }

    /// Closes it: 0, or the number of libfabric's error where it refuses to.
    pub fn close(self) -> c_int {
        let this = ManuallyDrop::new(self);
        // SAFETY: by the rule of `make` an open object, closed once: its drop does not run.
        unsafe { ((*(*this.fid()).ops).close)(this.fid()) }
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
    pub(super) domain: Object<fid_domain>,
    pub(super) fabric: Object<fid_fabric>,
    pub(super) nic: Arc<Nic>,
    /// Whether it was opened for memory of GPUs too, or why not.
    gpus: Result<(), String>,
    next_key: Cell<u64>,
}

impl Device {
    pub(super) fn open_as(
        nic: &Arc<Nic>,
        description: &Description,
        gpus: Result<(), String>,
    ) -> Result<Device, FabricError> {
        let (lib, info) = (nic.lib(), description.as_ptr());
        // SAFETY: `info` is a whole description, which lives as long as `nic`; each call writes an object if it returns
        // 0, and they are kept in the order in which they must be closed.
        let (fabric, domain) = unsafe {
            let fabric: Object<fid_fabric> = Object::make(lib, "opening the fabric", |out| {
                (lib.table.fabric)((*info).fabric_attr, out, ptr::null_mut())
            })?;
            let f = fabric.as_ptr();
            let domain = Object::make(lib, "opening the device", |out| {
                ((*(*f).ops).domain)(f, info, out, ptr::null_mut())
            })?;
            (fabric, domain)
        };
        Ok(Device { domain, fabric, nic: nic.clone(), gpus, next_key: Cell::new(1) })
    }

    /// What its provider says of it.
    pub fn nic(&self) -> &Nic {
        &self.nic
    }

    /// Whether it may know memory of GPUs.
    ///
    /// # Errors
    /// Why not, in words.
    pub fn gpus(&self) -> Result<(), &str> {
        match &self.gpus {
            Ok(()) => Ok(()),
            Err(why) => Err(why),
        }
    }

    /// What it was opened by.
    pub(super) fn description(&self) -> &Description {
        match (&self.gpus, &self.nic.gpus) {
            (Ok(()), Ok(description)) => description,
            _ => &self.nic.plain,
        }
    }

    pub(super) fn lib(&self) -> &Fabric {
        self.nic.lib()
    }

    /// A key for a registration, where the caller has to give one.
    pub(super) fn key(&self) -> u64 {
        let key = self.next_key.get();
        self.next_key.set(key + 1);
        key
    }
}

/// Switches off an option of an endpoint that is not enabled yet: 0, or a negative number of an error.
pub(super) fn forbid(ep: &Object<fid_ep>, option: c_int) -> c_int {
    let permitted = false;
    // SAFETY: an open endpoint, whose table begins with what every version of the library has; the value is a C `bool`,
    // and is read during the call.
    unsafe {
        ((*(*ep.as_ptr()).ops).setopt)(
            ep.fid(),
            abi::FI_OPT_ENDPOINT,
            option,
            (&raw const permitted).cast(),
            size_of_val(&permitted),
        )
    }
}
