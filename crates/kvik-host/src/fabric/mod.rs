//! libfabric, loaded at run time: reliable datagram endpoints with one-sided reads and writes.
//!
//! * [`Fabric`]: the library, and the NICs that one of its providers can use;
//! * [`Nic`]: one of them, with what its provider says of it;
//! * [`Device`]: one that is open, and [`Registration`]: memory that it knows, of the host or of a GPU;
//! * [`Endpoint`]: knows peers by slots, posts reads and writes, and tells which have ended.
//!
//! A device and all that comes of it are one thread's: libfabric is told so (`FI_THREAD_DOMAIN`), and the types are
//! neither `Send` nor `Sync`.
//!
//! Nothing here waits. Providers differ in whether a file descriptor tells of completions ([`Endpoint::watch`]), and
//! many move bytes only while somebody polls, on both sides: when to poll is for the caller.

mod abi;
mod device;
mod endpoint;
mod gpus;
mod newer;
mod nic;
mod registration;
mod within_host;

pub use crate::error::FabricError;
pub use crate::rma::{Posted, RmaOp};
pub use device::Device;
pub use endpoint::{Endpoint, Rma, Slot};
pub use nic::Nic;
pub use registration::Registration;

use crate::library::{Library, LibraryError, Wanted, text};
use abi::Table;
use std::ffi::{CString, c_int};
use std::path::Path;
use std::sync::Arc;

/// Where libfabric is found.
pub const LIBFABRIC: Wanted = Wanted {
    soname: "libfabric.so.1",
    // Of the EFA installer: the distribution's knows older EFA devices only.
    folders: &["/opt/amazon/efa/lib", "/opt/amazon/efa/lib64"],
    option: "`nic_library` (KVIK_NIC_LIBRARY)",
    packages: "Debian and Ubuntu: libfabric1; Fedora: libfabric; AWS: the EFA installer",
    container: "mount the host's /opt/amazon/efa, or install the package in the image",
};

/// The loaded library.
#[derive(Debug)]
pub struct Fabric {
    library: Library,
    table: Table,
}

impl Fabric {
    /// Loads the library: `file`, if the user names one.
    ///
    /// # Errors
    /// It is nowhere, or too old.
    pub fn load(file: Option<&Path>) -> Result<Arc<Fabric>, LibraryError> {
        let library = Library::open(LIBFABRIC, file)?;
        let table = Table::load(&library)?;
        let fabric = Fabric { library, table };
        let (major, minor) = fabric.version();
        if (major, minor) < (1, 14) {
            return Err(LibraryError(format!(
                "{} is libfabric {major}.{minor}; kvik takes 1.14 or newer",
                fabric.path().display()
            )));
        }
        Ok(Arc::new(fabric))
    }

    /// The file that it came from.
    pub fn path(&self) -> &Path {
        self.library.path()
    }

    /// Major and minor version.
    pub fn version(&self) -> (u32, u32) {
        // SAFETY: a function without arguments.
        let version = unsafe { (self.table.version)() };
        (version >> 16, version & 0xFFFF)
    }

    /// The NICs that a provider can use for one-sided transfers, in its own order of preference; none at all if the
    /// provider is not there. `source` is the address of the interface to use, for providers that have addresses of
    /// the internet; with others it says nothing.
    ///
    /// # Errors
    /// The library failed otherwise.
    pub fn nics(self: &Arc<Fabric>, provider: &str, source: Option<&str>) -> Result<Vec<Nic>, FabricError> {
        nic::list(self, provider, source)
    }

    fn check(&self, what: &'static str, code: isize) -> Result<(), FabricError> {
        if code >= 0 {
            return Ok(());
        }
        Err(self.error(what, code.unsigned_abs() as c_int))
    }

    fn error(&self, what: &'static str, number: c_int) -> FabricError {
        // SAFETY: for any number a C string that lives as long as the library.
        let text = unsafe { text((self.table.strerror)(number)) };
        FabricError { what, number, text }
    }
}

fn c_string(what: &'static str, text: &str) -> Result<CString, FabricError> {
    CString::new(text).map_err(|_| FabricError {
        what,
        number: libc::EINVAL,
        text: format!("{text:?} has a zero byte"),
    })
}
