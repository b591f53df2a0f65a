//! Memory of a device that a peer has shown.
//!
//! It is opened by the first thread that copies from it: the driver may take a while, and makes a context on the
//! device where this process has none. The control thread, which hears of it, asks the driver for nothing. Before, the peer is
//! asked to hold it: memory must not be freed while somebody has it open.

use super::LocalLink;
use super::channel::Lease;
use crate::basics::lock;
use crate::from_host;
use kvik_core::{Code, Error, RegionId, Result};
use kvik_host::HostError;
use kvik_host::device::{self, DeviceMemory, Handle};
use std::fmt;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

/// A region of the peer on a device. The peer is told when it is not open here any more, which is after the last copy.
pub struct PeerDeviceRegion {
    region: RegionId,
    handle: Handle,
    opened: Mutex<Option<Arc<dyn DeviceMemory>>>,
    lease: Arc<Lease>,
}

impl PeerDeviceRegion {
    pub(super) fn new(region: RegionId, handle: Handle, lease: Lease) -> PeerDeviceRegion {
        PeerDeviceRegion { region, handle, opened: Mutex::default(), lease: Arc::new(lease) }
    }

    /// Its memory, to copy from, once the peer holds it. What was refused once is asked for again the next time.
    ///
    /// # Errors
    /// `TransportUnavailable`: this process does not use such devices or does not see this one, the driver refuses it, or the
    /// peer has taken it back or does not answer. `DeviceFailed` where the device has, `PeerLost` where the link is over.
    pub fn open(&self, link: &LocalLink, stop: &AtomicBool) -> Result<Arc<dyn DeviceMemory>> {
        if let Some(memory) = &*lock(&self.opened) {
            return Ok(memory.clone());
        }
        device::is_used().map_err(|error| self.refused(error))?;
        self.lease.ask()?;
        if !link.wait_held(self, stop) {
            return Err(link.not_shown(&format!("that it holds its region {} for others", self.region.0)));
        }
        let mut opened = lock(&self.opened);
        if let Some(memory) = &*opened {
            return Ok(memory.clone());
        }
        let memory = device::open(&self.handle, Box::new(self.lease.clone()));
        Ok(opened.insert(memory.map_err(|error| self.refused(error))?).clone())
    }

    /// How it is read, once it is open.
    pub(super) fn mechanism(&self) -> &'static str {
        lock(&self.opened).as_ref().map_or("device memory", |memory| memory.device().ipc())
    }

    pub(super) fn region(&self) -> RegionId {
        self.region
    }

    pub(super) fn lease(&self) -> &Lease {
        &self.lease
    }

    fn refused(&self, error: HostError) -> Error {
        if error.is_device_lost() {
            return from_host(Code::DeviceFailed, error);
        }
        let region = self.region.0;
        let text =
            format!("the peer's region {region} lies on a GPU and cannot be opened by this process: {error}");
        Error::new(Code::TransportUnavailable, text)
    }
}

impl fmt::Debug for PeerDeviceRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PeerDeviceRegion({}, {:?})", self.region.0, lock(&self.opened))
    }
}
