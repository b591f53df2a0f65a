//! What another process on this host has shown of its memory.
//!
//! Both engines hold one end of a UNIX connection that joined their session (same user, proven by the session's
//! key). Over it each shows its fence table and its regions: memory that kvik allocated as a sealed memfd, which is
//! mapped here read-only; memory of a GPU by CUDA's handle for other processes; other memory as an address that
//! `process_vm_readv` may reach, after a nonce has proven that the process number means the peer. Each process writes
//! only its own memory.
//!
//! - `device`: a peer's memory on a GPU, and when it is opened;
//! - [`Local`]: the transport of all sessions;
//! - `populate`: the page tables of what is mapped here;
//! - `channel`: the messages, and what is held until the peer has closed it.

mod channel;
mod device;
mod populate;
mod transport;

pub(crate) use transport::Links;
pub use transport::{LOCAL_LINK, Local, LocalConfig};

pub use device::PeerDeviceRegion;
pub use populate::{Populated, Populator};

use crate::basics::{lock, stopped};
use crate::{RegionMemory, from_host};
pub(crate) use channel::link_broke;
use channel::{
    CLOSED, GPUS, HELD, HELLO, LONG, Lease, LocalChannel, MAX_REGIONS, MESSAGE, OPENS, SHARE, SHARE_GPU,
    UNSHARE, handle_in,
};
use kvik_core::{Code, Error, RegionId, Result};
use kvik_host::device::Handle;
use kvik_host::unix::UnixConn;
use kvik_host::{FenceTable, Io, PeerFence, PeerMemory, ProcessMemory};
use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long a copy waits for a region that was announced on the control connection and is still on its way here.
const ARRIVAL: Duration = Duration::from_secs(1);
/// How often a copy that waits for a region looks whether it must stop.
const LOOK: Duration = Duration::from_millis(5);

/// Readable memory of the peer.
#[derive(Debug)]
pub enum PeerRegion {
    /// Mapped here, read-only, and how far its page tables are made.
    Mapped(PeerMemory, Populated),
    /// Read through the kernel.
    Process {
        /// The peer's process.
        process: Arc<ProcessMemory>,
        /// First byte, in the peer.
        addr: u64,
        /// Bytes.
        len: u64,
    },
    /// On a device.
    Device(PeerDeviceRegion),
}

impl PeerRegion {
    /// How it is read: `"memfd"`, `"process_vm_readv"` or `"cuda_ipc"`.
    pub fn mechanism(&self) -> &'static str {
        match self {
            PeerRegion::Mapped(..) => "memfd",
            PeerRegion::Process { .. } => "process_vm_readv",
            PeerRegion::Device(region) => region.mechanism(),
        }
    }
}

/// The local link of a session.
pub struct LocalLink {
    conn: UnixConn,
    peer_pid: u32,
    /// Proves this process's number to the peer, which reads the nonce where it lies.
    _nonce: Arc<[u8; 32]>,
    peer_regions: Mutex<PeerRegions>,
    arrived: Condvar,
    channel: Arc<LocalChannel>,
    populator: Option<Arc<Populator>>,
}

#[derive(Default)]
struct PeerRegions {
    fence: Option<Arc<PeerFence>>,
    process: Option<Result<Arc<ProcessMemory>>>,
    regions: HashMap<RegionId, Result<Arc<PeerRegion>>>,
    down: bool,
}

impl LocalLink {
    /// A link over a connection whose join was accepted. `peer_pid` comes from the handshake's facts when the two
    /// share a PID namespace, else 0. `wake` has somebody call [`LocalLink::flush`], from any thread and soon.
    pub fn new(
        conn: UnixConn,
        fence: Arc<FenceTable>,
        peer_pid: u32,
        nonce: [u8; 32],
        wake: impl Fn() + Send + Sync + 'static,
    ) -> LocalLink {
        let nonce = Arc::new(nonce);
        let channel = LocalChannel::new(fence, &nonce, Box::new(wake));
        LocalLink {
            conn,
            peer_pid,
            _nonce: nonce,
            peer_regions: Mutex::default(),
            arrived: Condvar::new(),
            channel: Arc::new(channel),
            populator: None,
        }
    }

    /// The same, with page tables that are made before they are needed.
    pub fn with_populator(self, populator: Arc<Populator>) -> LocalLink {
        LocalLink { populator: Some(populator), ..self }
    }

    fn populated(&self, region: PeerRegion) -> Arc<PeerRegion> {
        let region = Arc::new(region);
        self.was_read(&region);
        region
    }

    /// A region was copied from, parts of which its owner may have touched for the first time.
    pub(crate) fn was_read(&self, region: &Arc<PeerRegion>) {
        if let Some(populator) = &self.populator {
            populator.look_at(region);
        }
    }

    /// Shows a region to the peer. Call [`LocalLink::flush`] afterwards. One on a GPU is shown by its handle, to a peer
    /// that understands it; its memory is held while the peer has it open and the link is up.
    pub fn share(&self, region: RegionId, memory: &RegionMemory, handle: Option<Handle>) {
        self.channel.share(region, memory, handle);
    }

    /// Takes a region back. What the peer has mapped stays mapped there, so grants over it must have ended.
    ///
    /// What waits to be sent stays in proportion to the regions that are open and those that the peer has been
    /// shown: one that it has not heard of yet is simply not shown.
    pub fn unshare(&self, region: RegionId) {
        self.channel.unshare(region);
    }

    /// Sends what waits: true when all of it went, false when the socket must become writable first.
    pub fn flush(&self) -> Result<bool> {
        self.channel.flush(&self.conn)
    }

    /// Takes what the peer has sent.
    ///
    /// # Errors
    /// The link is over.
    pub fn receive(&self) -> Result<()> {
        let mut bytes = [0; LONG];
        loop {
            let received =
                self.conn.recv_with_fds(&mut bytes, 1).map_err(|error| from_host(Code::PeerLost, error))?;
            match received {
                Io::Blocked => return Ok(()),
                Io::Closed => return Err(Error::new(Code::PeerLost, "the peer closed its local link")),
                Io::Done(message) if message.len == if bytes[0] == SHARE_GPU { LONG } else { MESSAGE } => {
                    self.take(&bytes, message.fds.into_iter().next())?
                }
                Io::Done(_) => {
                    return Err(Error::new(
                        Code::ProtocolError,
                        "the peer sent a message of another size on its local link",
                    ));
                }
            }
        }
    }

    fn take(&self, bytes: &[u8; LONG], fd: Option<OwnedFd>) -> Result<()> {
        let u32_at = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        let id = RegionId(u32_at(4));
        // What it takes out of the table is dropped when the table is unlocked.
        let mut before = None;
        let mut shown = lock(&self.peer_regions);
        match (bytes[0], fd) {
            (HELLO, Some(fd)) => {
                let fence = PeerFence::map(fd).map_err(|error| from_host(Code::SealMissing, error))?;
                shown.fence = Some(Arc::new(fence));
                shown.process = Some(self.prove_process(u64_at(8), &bytes[32..MESSAGE]));
                self.channel.takes_gpus(u32_at(4) & GPUS != 0);
            }
            (SHARE | SHARE_GPU, _) if shown.regions.len() >= MAX_REGIONS => {
                return Err(Error::new(
                    Code::MemoryCapReached,
                    format!("the peer showed more than {MAX_REGIONS} regions"),
                ));
            }
            (SHARE, fd) => {
                let region = self.region_of(&shown, fd, u64_at(8), u64_at(16));
                if let Err(error) = &region {
                    log::warn!("a region of the peer cannot be used over the local link: {error}");
                }
                before = shown.regions.insert(id, region);
            }
            (SHARE_GPU, None) => {
                let lease = Lease::new(&self.channel, id, u64_at(8));
                let region = PeerDeviceRegion::new(id, handle_in(bytes), lease);
                before = shown.regions.insert(id, Ok(Arc::new(PeerRegion::Device(region))));
            }
            (UNSHARE, _) => before = shown.regions.remove(&id),
            (OPENS, None) => self.channel.opens(id, u64_at(8)),
            (HELD, None) => {
                if let Some(Ok(region)) = shown.regions.get(&id)
                    && let PeerRegion::Device(gpu) = &**region
                {
                    gpu.lease().note_held(u64_at(8));
                }
            }
            (CLOSED, None) => self.channel.closed(u64_at(8)),
            _ => {
                return Err(Error::new(
                    Code::ProtocolError,
                    "the peer sent a message of unknown kind on its local link",
                ));
            }
        }
        drop(shown);
        drop(before);
        self.arrived.notify_all();
        Ok(())
    }

    fn prove_process(&self, addr: u64, nonce: &[u8]) -> Result<Arc<ProcessMemory>> {
        if self.peer_pid == 0 {
            return Err(Error::new(
                Code::TransportUnavailable,
                "the peer is in another PID namespace, so its memory cannot be read; let the containers share it, \
                 or allocate regions with kvik",
            ));
        }
        let process =
            ProcessMemory::open(self.peer_pid).map_err(|e| from_host(Code::TransportUnavailable, e))?;
        process.probe(addr, nonce).map_err(|error| from_host(Code::TransportUnavailable, error))?;
        Ok(Arc::new(process))
    }

    fn region_of(
        &self,
        shown: &PeerRegions,
        fd: Option<OwnedFd>,
        addr: u64,
        len: u64,
    ) -> Result<Arc<PeerRegion>> {
        if let Some(fd) = fd {
            let memory =
                PeerMemory::map(fd, len as usize).map_err(|error| from_host(Code::SealMissing, error))?;
            return Ok(self.populated(PeerRegion::Mapped(memory, Populated::default())));
        }
        match &shown.process {
            Some(Ok(process)) => Ok(Arc::new(PeerRegion::Process { process: process.clone(), addr, len })),
            Some(Err(error)) => Err(error.clone()),
            None => Err(Error::new(Code::ProtocolError, "the peer showed a region before its fence table")),
        }
    }

    /// The peer's fence table.
    ///
    /// # Errors
    /// `TransportUnavailable` when it does not come, or `stop` is set first; `PeerLost` when the link is over.
    pub fn fence(&self, stop: &AtomicBool) -> Result<Arc<PeerFence>> {
        self.wait(stop, |shown| shown.fence.clone()).ok_or_else(|| self.not_shown("its fence table"))
    }

    /// A region of the peer, which may still be on its way.
    ///
    /// # Errors
    /// Why it cannot be read from here.
    pub fn region(&self, id: RegionId, stop: &AtomicBool) -> Result<Arc<PeerRegion>> {
        let region = self.wait(stop, |shown| shown.regions.get(&id).cloned());
        region.unwrap_or_else(|| Err(self.not_shown(&format!("its region {}", id.0))))
    }

    /// Waits until the peer holds a region on a GPU. False when it does not come to that, as when it takes it back.
    fn wait_held(&self, gpu: &PeerDeviceRegion, stop: &AtomicBool) -> bool {
        let shown = |shown: &PeerRegions| match shown.regions.get(&gpu.region()) {
            Some(Ok(region)) => matches!(&**region, PeerRegion::Device(known) if std::ptr::eq(known, gpu)),
            _ => false,
        };
        let held = |all: &PeerRegions| match (gpu.lease().is_held(), shown(all)) {
            (true, _) => Some(true),
            (false, false) => Some(false),
            (false, true) => None,
        };
        self.wait(stop, held).unwrap_or(false)
    }

    fn not_shown(&self, what: &str) -> Error {
        match lock(&self.peer_regions).down {
            true => link_broke(),
            false => Error::new(Code::TransportUnavailable, format!("the peer has not shown {what}")),
        }
    }

    /// Waits, within bounds, until something is shown, the work request in flight must stop, or the link is over.
    fn wait<T>(&self, stop: &AtomicBool, mut find: impl FnMut(&PeerRegions) -> Option<T>) -> Option<T> {
        let until = Instant::now() + ARRIVAL;
        let mut shown = lock(&self.peer_regions);
        loop {
            if let Some(found) = find(&shown) {
                return Some(found);
            }
            let left = until.saturating_duration_since(Instant::now());
            if shown.down || left.is_zero() || stopped(stop) {
                return None;
            }
            // A stop wakes nobody here: it is looked for.
            shown =
                self.arrived.wait_timeout(shown, left.min(LOOK)).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// How a region of the peer is read, if it has been shown; without waiting.
    pub fn mechanism_of(&self, id: RegionId) -> Option<&'static str> {
        lock(&self.peer_regions).regions.get(&id)?.as_ref().ok().map(|region| region.mechanism())
    }

    /// The link is over: nobody waits for anything on it any more.
    pub fn cut(&self) {
        self.channel.cut();
        lock(&self.peer_regions).down = true;
        self.arrived.notify_all();
    }
}

impl AsFd for LocalLink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.conn.as_fd()
    }
}
