//! libibverbs, loaded at run time: reliable connections that write and read a peer's memory.
//!
//! * [`Verbs`]: the library, and the ports of all devices ([`Found`]);
//! * [`Port`]: one of them, with its GID table, and the choice of a GID;
//! * [`Device`]: one port, open: its completion queue and its events; [`Registration`]: memory that it knows;
//! * [`Queue`]: one connected queue pair: posts reads and writes ([`Rma`]) to one peer.
//!
//! A device and all that comes of it are one thread's: nothing here locks, and the types are neither `Send` nor `Sync`.
//! Nothing here waits, but for [`Queue::connect`], where the kernel may look for the peer's hardware address.
//!
//! Bytes move without this process. What ends that is the queue pair in its error state: [`Queue::fail`]
//! stops the peer's accesses, and once [`Queue::is_drained`] says so, the own ones.
//!
//! Forks: kernels from 5.12 on copy pinned pages for a child, so that a parent's stay where the device knows them. On
//! an older one, memory that is not shared must be protected by the user (`RDMAV_FORK_SAFE=1`, which libibverbs reads).

mod abi;
mod address;
mod complete;
mod device;
mod event;
mod gid;
mod port;
mod queue;
mod registration;
mod ring;
#[cfg(test)]
mod ring_tests;

pub use crate::error::VerbsError;
pub use crate::rma::{Posted, RmaOp};
pub use address::{AddressError, QueueAddress};
pub use device::Device;
pub use event::Event;
pub use gid::{Gid, GidKind};
pub use port::{Found, Link, Port, PortState, rank};
pub use queue::Queue;
pub use registration::Registration;
pub use ring::{Completion, Piece, QueueId, RequestError, Rma};

use crate::library::{Library, LibraryError, Wanted, text};
use abi::Table;
use std::ffi::c_int;
use std::io;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

/// Where libibverbs is found.
pub const LIBIBVERBS: Wanted = Wanted {
    soname: "libibverbs.so.1",
    folders: &[],
    option: "`nic_library` (KVIK_NIC_LIBRARY)",
    packages: "Debian and Ubuntu: libibverbs1 and ibverbs-providers; Fedora: libibverbs",
    container: "install the packages in the image, and give it /dev/infiniband and locked memory \
                (--device=/dev/infiniband --ulimit memlock=-1)",
};

impl VerbsError {
    /// The kernel's or the driver's refusal.
    fn os(what: impl Into<String>, number: c_int) -> VerbsError {
        let text = io::Error::from_raw_os_error(number).to_string();
        VerbsError { what: what.into(), number, text }
    }

    /// kvik's own refusal.
    fn own(what: impl Into<String>, text: impl Into<String>) -> VerbsError {
        VerbsError { what: what.into(), number: 0, text: text.into() }
    }

    /// Adds what to do.
    fn hint(mut self, hint: &str) -> VerbsError {
        self.text = format!("{}; {hint}", self.text);
        self
    }
}

/// What the last call left in `errno`.
fn errno() -> c_int {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

/// The error number of a call that returns 0, an error number, or -1 with `errno` set: drivers differ.
fn number(code: c_int) -> Result<(), c_int> {
    match code {
        0 => Ok(()),
        ..0 => Err(errno()),
        1.. => Err(code),
    }
}

/// The loaded library.
#[derive(Debug)]
pub struct Verbs {
    library: Library,
    table: Table,
}

type End<T> = unsafe extern "C" fn(*mut T) -> c_int;

impl Verbs {
    /// Loads the library: `file`, if the user names one.
    ///
    /// # Errors
    /// It is nowhere, or too old.
    pub fn load(file: Option<&Path>) -> Result<Arc<Verbs>, LibraryError> {
        let library = Library::open(LIBIBVERBS, file)?;
        let table = Table::load(&library)?;
        Ok(Arc::new(Verbs { library, table }))
    }

    /// The file that it came from.
    pub fn path(&self) -> &Path {
        self.library.path()
    }

    /// The ports of all devices of this host, in the library's order; none where the kernel has no RDMA at all.
    ///
    /// # Errors
    /// The devices cannot be listed. One that cannot be opened is among [`Found::refused`].
    pub fn ports(&self) -> Result<Found, VerbsError> {
        port::list(self)
    }

    /// The library's words for the status of a completion.
    fn status_text(&self, status: abi::ibv_wc_status) -> String {
        // SAFETY: for any number a C string that is a constant of the library.
        unsafe { text((self.table.wc_status_str)(status)) }
    }

    /// The library's words for an asynchronous event.
    fn event_text(&self, kind: abi::ibv_event_type) -> String {
        // SAFETY: as above.
        unsafe { text((self.table.event_type_str)(kind)) }
    }
}

/// An object of the library, ended with the value.
struct Object<T> {
    at: NonNull<T>,
    end: End<T>,
}

impl<T> Object<T> {
    /// Takes what a call made: null means that it failed, with `errno` set.
    ///
    /// # Safety
    /// `made` is null or an object that nobody else ends, which `end` ends; what it needs is ended after it.
    unsafe fn new(made: *mut T, end: End<T>) -> Result<Object<T>, c_int> {
        let number = errno();
        match NonNull::new(made) {
            Some(at) => Ok(Object { at, end }),
            None => Err(if number == 0 { libc::ENOMEM } else { number }),
        }
    }

    fn as_ptr(&self) -> *mut T {
        self.at.as_ptr()
    }

    /// Ends it.
    ///
    /// # Errors
    /// The number of the library's error: the device may still use it.
    fn close(self) -> Result<(), c_int> {
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: by the rule of `new`; it is not dropped after this.
        number(unsafe { (this.end)(this.as_ptr()) })
    }
}

impl<T> Drop for Object<T> {
    fn drop(&mut self) {
        // SAFETY: by the rule of `new` an object that is there, ended once.
        let code = unsafe { (self.end)(self.as_ptr()) };
        // Other failures are a device's that is gone, and there is nothing left to do about them.
        debug_assert!(code != libc::EBUSY, "something that needs this object was not ended before it");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_says_what_to_whom_and_what_to_do() {
        let error = VerbsError::os("opening device x", libc::EACCES).hint("do this").to_string();
        assert!(error.starts_with("libibverbs: opening device x: Permission denied"), "{error}");
        assert!(error.ends_with("; do this"), "{error}");
        assert_eq!((number(0), number(libc::EINVAL)), (Ok(()), Err(libc::EINVAL)));
    }
}
