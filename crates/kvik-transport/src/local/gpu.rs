//! Memory of a GPU that a peer has shown.
//!
//! It is opened by the first thread that copies from it: the driver may take a while, and makes a context on the GPU
//! where this process has none. The control thread, which hears of it, asks the driver for nothing. Before, the peer is
//! asked to hold it: memory must not be freed while somebody has it open.

use super::LocalLink;
use super::channel::Lease;
use crate::basics::lock;
use crate::from_host;
use kvik_core::{Code, Error, RegionId, Result};
use kvik_host::HostError;
use kvik_host::cuda::{Cuda, GpuMemory, IpcHandle, PeerGpu};
use std::fmt;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

/// A region of the peer on a GPU. The peer is told when it is not open here any more, which is after the last copy.
pub struct PeerGpuRegion {
    region: RegionId,
    handle: IpcHandle,
    opened: Mutex<Option<PeerGpu>>,
    lease: Arc<Lease>,
}

impl PeerGpuRegion {
    pub(super) fn new(region: RegionId, handle: IpcHandle, lease: Lease) -> PeerGpuRegion {
        PeerGpuRegion { region, handle, opened: Mutex::default(), lease: Arc::new(lease) }
    }

    /// Its memory, to copy from, once the peer holds it. What was refused once is asked for again the next time.
    ///
    /// # Errors
    /// `TransportUnavailable`: this process does not use CUDA or does not see the GPU, the driver refuses it, or the
    /// peer has taken it back or does not answer. `DeviceFailed` where the GPU has, `PeerLost` where the link is over.
    pub fn open(&self, link: &LocalLink, stop: &AtomicBool) -> Result<Arc<GpuMemory>> {
        if let Some(peer) = &*lock(&self.opened) {
            return Ok(peer.memory().clone());
        }
        // Whoever does not use CUDA gets no context of it, nor the trouble with forks that comes along.
        if Cuda::loaded().is_none() {
            return Err(self.unavailable("this process does not use CUDA"));
        }
        self.lease.ask()?;
        if !link.wait_held(self, stop) {
            return Err(link.not_shown(&format!("that it holds its region {} for others", self.region.0)));
        }
        let mut opened = lock(&self.opened);
        if let Some(peer) = &*opened {
            return Ok(peer.memory().clone());
        }
        let peer = PeerGpu::open_keeping(&self.handle, Box::new(self.lease.clone()));
        let peer = opened.insert(peer.map_err(|error| self.refused(error))?);
        Ok(peer.memory().clone())
    }

    pub(super) fn region(&self) -> RegionId {
        self.region
    }

    pub(super) fn lease(&self) -> &Lease {
        &self.lease
    }

    fn refused(&self, error: HostError) -> Error {
        match &error {
            HostError::Cuda(lost) if lost.is_lost() => from_host(Code::DeviceFailed, error),
            _ => self.unavailable(&error.to_string()),
        }
    }

    fn unavailable(&self, why: &str) -> Error {
        let region = self.region.0;
        let text =
            format!("the peer's region {region} lies on a GPU and cannot be opened by this process: {why}");
        Error::new(Code::TransportUnavailable, text)
    }
}

impl fmt::Debug for PeerGpuRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PeerGpuRegion({}, {:?})", self.region.0, lock(&self.opened))
    }
}
