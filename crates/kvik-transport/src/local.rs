//! What another process on this host has shown of its memory.
//!
//! Both engines hold one end of a UNIX connection that joined their session (same user, proven by the session's
//! key). Over it each shows its fence table and its regions: memory that kvik allocated as a sealed memfd, which is
//! mapped here read-only; other memory as an address that `process_vm_readv` may reach, after a nonce has proven
//! that the process number means the peer. Each process writes only its own memory.

use crate::{Held, from_host};
use kvik_core::{Code, Error, RegionId, Result};
use kvik_host::unix::UnixConn;
use kvik_host::{FenceTable, Io, Memory, PeerFence, PeerMemory, ProcessMemory};
use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// How long a copy waits for a region that was announced on the control connection and is still on its way here.
const ARRIVAL: Duration = Duration::from_secs(1);
/// How often a copy that waits for a region looks whether it must stop.
const LOOK: Duration = Duration::from_millis(5);
/// More regions than this a peer does not show.
const MAX_REGIONS: usize = 4096;
const MESSAGE: usize = 64;

/// Readable memory of the peer.
#[derive(Debug)]
pub enum PeerRegion {
    /// Mapped here, read-only.
    Mapped(PeerMemory),
    /// Read through the kernel.
    Process {
        /// The peer's process.
        process: Arc<ProcessMemory>,
        /// First byte, in the peer.
        addr: u64,
        /// Bytes.
        len: u64,
    },
}

impl PeerRegion {
    /// How it is read: `"memfd"` or `"process_vm_readv"`.
    pub fn way(&self) -> &'static str {
        match self {
            PeerRegion::Mapped(_) => "memfd",
            PeerRegion::Process { .. } => "process_vm_readv",
        }
    }
}

/// The local link of a session.
pub struct LocalLink {
    conn: UnixConn,
    peer_pid: u32,
    /// Proves this process's number to the peer: it reads the nonce where it lies.
    nonce: Box<[u8; 32]>,
    shown: Mutex<Shown>,
    arrived: Condvar,
    to_send: Mutex<VecDeque<Message>>,
}

#[derive(Default)]
struct Shown {
    fence: Option<Arc<PeerFence>>,
    process: Option<Result<Arc<ProcessMemory>>>,
    regions: HashMap<RegionId, Result<Arc<PeerRegion>>>,
    down: bool,
}

enum Message {
    Hello {
        fence: Arc<FenceTable>,
        pid: u32,
    },
    /// Not held: what waits to be shown must not keep a region from closing.
    Share {
        region: RegionId,
        memory: Weak<Memory>,
    },
    Unshare {
        region: RegionId,
    },
}

impl LocalLink {
    /// A link over a connection whose join was accepted. `peer_pid` comes from the handshake's facts when the two
    /// share a PID namespace, else 0.
    pub fn new(conn: UnixConn, fence: Arc<FenceTable>, peer_pid: u32, nonce: [u8; 32]) -> LocalLink {
        let hello = Message::Hello { fence, pid: std::process::id() };
        LocalLink {
            conn,
            peer_pid,
            nonce: Box::new(nonce),
            shown: Mutex::default(),
            arrived: Condvar::new(),
            to_send: Mutex::new(VecDeque::from([hello])),
        }
    }

    /// Shows a region to the peer. Call [`LocalLink::flush`] afterwards. One on a GPU is not shown: its addresses mean
    /// nothing to a processor.
    pub fn share(&self, region: RegionId, memory: &Held) {
        let Held::Host(memory) = memory else { return };
        lock(&self.to_send).push_back(Message::Share { region, memory: Arc::downgrade(memory) });
    }

    /// Takes a region back. What the peer has mapped stays mapped there, so grants over it must have ended.
    ///
    /// What waits to be sent stays in proportion to the regions that are open and those that the peer has been
    /// shown: one that it has not heard of yet is simply not shown.
    pub fn unshare(&self, region: RegionId) {
        let mut queue = lock(&self.to_send);
        let shown = |message: &Message| matches!(message, Message::Share { region: of, .. } if *of == region);
        match queue.iter().rposition(shown) {
            Some(at) => drop(queue.remove(at)),
            None => queue.push_back(Message::Unshare { region }),
        }
    }

    /// Sends what waits: true when all of it went, false when the socket must become writable first.
    pub fn flush(&self) -> Result<bool> {
        let mut queue = lock(&self.to_send);
        while let Some(message) = queue.front() {
            let memory = match message {
                Message::Share { memory, .. } => memory.upgrade(),
                _ => None,
            };
            if matches!(message, Message::Share { .. }) && memory.is_none() {
                queue.pop_front();
                continue;
            }
            let (bytes, fd) = self.encode(message, memory.as_deref());
            let fds: &[BorrowedFd<'_>] = fd.as_slice();
            match self.conn.send_with_fds(&bytes, fds).map_err(|error| from_host(Code::PeerLost, error))? {
                Io::Done(_) => drop(queue.pop_front()),
                Io::Blocked => return Ok(false),
                Io::Closed => return Err(Error::new(Code::PeerLost, "the peer closed its local link")),
            }
        }
        Ok(true)
    }

    fn encode<'m>(
        &self,
        message: &'m Message,
        memory: Option<&'m Memory>,
    ) -> ([u8; MESSAGE], Option<BorrowedFd<'m>>) {
        let mut bytes = [0; MESSAGE];
        match message {
            Message::Hello { fence, pid } => {
                bytes[0] = 1;
                bytes[8..16].copy_from_slice(&(self.nonce.as_ptr() as u64).to_le_bytes());
                bytes[16..20].copy_from_slice(&pid.to_le_bytes());
                bytes[32..].copy_from_slice(&*self.nonce);
                (bytes, Some(fence.fd()))
            }
            Message::Share { region, .. } => {
                bytes[0] = 2;
                bytes[4..8].copy_from_slice(&region.0.to_le_bytes());
                let (addr, len) = memory.map_or((0, 0), |memory| (memory.addr(), memory.len()));
                bytes[8..16].copy_from_slice(&(addr as u64).to_le_bytes());
                bytes[16..24].copy_from_slice(&(len as u64).to_le_bytes());
                (bytes, memory.and_then(Memory::fd))
            }
            Message::Unshare { region } => {
                bytes[0] = 3;
                bytes[4..8].copy_from_slice(&region.0.to_le_bytes());
                (bytes, None)
            }
        }
    }

    /// Takes what the peer has sent.
    ///
    /// # Errors
    /// The link is over.
    pub fn receive(&self) -> Result<()> {
        let mut bytes = [0; MESSAGE];
        loop {
            let received =
                self.conn.recv_with_fds(&mut bytes, 1).map_err(|error| from_host(Code::PeerLost, error))?;
            match received {
                Io::Blocked => return Ok(()),
                Io::Closed => return Err(Error::new(Code::PeerLost, "the peer closed its local link")),
                Io::Done(message) if message.len == MESSAGE => {
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

    fn take(&self, bytes: &[u8; MESSAGE], fd: Option<OwnedFd>) -> Result<()> {
        let u32_at = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        let mut shown = lock(&self.shown);
        match (bytes[0], fd) {
            (1, Some(fd)) => {
                let fence = PeerFence::map(fd).map_err(|error| from_host(Code::SealMissing, error))?;
                shown.fence = Some(Arc::new(fence));
                shown.process = Some(self.prove_process(u64_at(8), &bytes[32..]));
            }
            (2, fd) if shown.regions.len() < MAX_REGIONS => {
                let region = self.region_of(&shown, fd, u64_at(8), u64_at(16));
                if let Err(error) = &region {
                    log::warn!("a region of the peer cannot be used over the local link: {error}");
                }
                shown.regions.insert(RegionId(u32_at(4)), region);
            }
            (2, _) => {
                return Err(Error::new(
                    Code::MemoryCapReached,
                    format!("the peer showed more than {MAX_REGIONS} regions"),
                ));
            }
            (3, _) => drop(shown.regions.remove(&RegionId(u32_at(4)))),
            _ => {
                return Err(Error::new(
                    Code::ProtocolError,
                    "the peer sent a message of unknown kind on its local link",
                ));
            }
        }
        drop(shown);
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

    fn region_of(&self, shown: &Shown, fd: Option<OwnedFd>, addr: u64, len: u64) -> Result<Arc<PeerRegion>> {
        if let Some(fd) = fd {
            let memory =
                PeerMemory::map(fd, len as usize).map_err(|error| from_host(Code::SealMissing, error))?;
            return Ok(Arc::new(PeerRegion::Mapped(memory)));
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

    fn not_shown(&self, what: &str) -> Error {
        match lock(&self.shown).down {
            true => link_broke(),
            false => Error::new(Code::TransportUnavailable, format!("the peer has not shown {what}")),
        }
    }

    /// Waits, within bounds, until something is shown, the order in hand must stop, or the link is over.
    fn wait<T>(&self, stop: &AtomicBool, mut find: impl FnMut(&Shown) -> Option<T>) -> Option<T> {
        let until = Instant::now() + ARRIVAL;
        let mut shown = lock(&self.shown);
        loop {
            if let Some(found) = find(&shown) {
                return Some(found);
            }
            let left = until.saturating_duration_since(Instant::now());
            if shown.down || left.is_zero() || stopped(stop) {
                return None;
            }
            // A stop rings no bell here: it is looked for.
            shown =
                self.arrived.wait_timeout(shown, left.min(LOOK)).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// How a region of the peer is read, if it has been shown; without waiting.
    pub fn way_of(&self, id: RegionId) -> Option<&'static str> {
        lock(&self.shown).regions.get(&id)?.as_ref().ok().map(|region| region.way())
    }

    /// The link is over: nobody waits for anything on it any more.
    pub fn cut(&self) {
        lock(&self.to_send).clear();
        lock(&self.shown).down = true;
        self.arrived.notify_all();
    }
}

impl AsFd for LocalLink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.conn.as_fd()
    }
}

/// The error for a transfer whose local link is over before the transfer is.
pub(crate) fn link_broke() -> Error {
    Error::new(
        Code::PeerLost,
        "the local link to the peer broke under the transfer: it ended, or closed it; a new transfer connects again",
    )
}

/// Whether a stop was asked for.
pub(crate) fn stopped(flag: &AtomicBool) -> bool {
    flag.load(Ordering::Acquire)
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
