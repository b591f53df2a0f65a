//! What a side of a local link shows: its messages, and what it holds for as long as the peer has it open.
//!
//! A message is 64 bytes, little-endian, and begins with its kind; what has no meaning is zero, and is not looked at:
//!
//! | kind | descriptor | bytes |
//! |---|---|---|
//! | 1: hello | the fence table | 4: what this side understands; 8: address of the nonce; 16: process; 32: the nonce |
//! | 2: a region | its memfd, if it is one | 4: region; 8: address; 16: length |
//! | 3: a region no more | | 4: region |
//! | 4: a region on a GPU, of 128 bytes | | 4: region; 8: number of this showing; 32: the handle |
//! | 5: it is about to be opened | | 4, 8: as in the showing |
//! | 6: it is held | | 4, 8: as in the showing |
//! | 7: it is not open any more | | 4, 8: as in the showing |
//!
//! CUDA leaves it undefined what becomes of memory that is freed while another process has it open. So who wants to
//! open it asks, its owner holds it from then on and says so, and until it hears that it was closed; what nobody has
//! opened is its owner's at once. A region that was taken back meanwhile is not held any more, and not opened.
//!
//! A peer that was built before regions on GPUs could be shown takes the last four for nonsense, so they are for peers
//! that have said in their hello that they understand them.

use crate::basics::lock;
use crate::{RegionMemory, from_host};
use kvik_core::{Code, Error, RegionId, Result};
use kvik_host::cuda::{GpuMemory, IpcHandle};
use kvik_host::unix::UnixConn;
use kvik_host::{FenceTable, Io, Memory};
use std::collections::{HashMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

/// More regions than this a peer does not show.
pub(super) const MAX_REGIONS: usize = 4096;
/// Bytes of a message, and of one with a GPU's handle.
pub(super) const MESSAGE: usize = 64;
pub(super) const LONG: usize = 128;
const HANDLE: usize = LONG - IpcHandle::LEN;

pub(super) const HELLO: u8 = 1;
pub(super) const SHARE: u8 = 2;
pub(super) const UNSHARE: u8 = 3;
pub(super) const SHARE_GPU: u8 = 4;
pub(super) const OPENS: u8 = 5;
pub(super) const HELD: u8 = 6;
pub(super) const CLOSED: u8 = 7;

/// What a side that understands regions on GPUs says in its hello.
pub(super) const GPUS: u32 = 1;

/// Who shows regions on GPUs reads what the other says of them; of one that does not, none is opened any more.
const MOST_WAITING: usize = 4 * MAX_REGIONS;

/// What waits to be sent, and what was sent and must stay.
pub(super) struct LocalChannel {
    queue: Mutex<Queue>,
    /// Has somebody call [`LocalLink::flush`](super::LocalLink::flush).
    wake: Box<dyn Fn() + Send + Sync>,
}

struct Queue {
    ready: VecDeque<Message>,
    /// Regions on GPUs, until the peer has said whether it understands them.
    later: Vec<Message>,
    takes_gpus: Option<bool>,
    /// What the peer was shown of GPUs and may open, by the number of the showing.
    offered: HashMap<u64, (RegionId, Weak<GpuMemory>)>,
    /// What it has open, or is about to open.
    open: HashMap<u64, Arc<GpuMemory>>,
    showings: u64,
    over: bool,
}

enum Message {
    Hello {
        fence: Arc<FenceTable>,
        pid: u32,
        nonce: Arc<[u8; 32]>,
    },
    /// Not held: what waits to be shown must not keep a region from closing.
    Share {
        region: RegionId,
        memory: Weak<Memory>,
    },
    Unshare {
        region: RegionId,
    },
    ShareGpu {
        region: RegionId,
        memory: Weak<GpuMemory>,
        handle: IpcHandle,
        showing: u64,
    },
    /// One of the short messages about a showing.
    Note {
        kind: u8,
        region: RegionId,
        showing: u64,
    },
}

/// What a message needs while it is sent.
enum Needs {
    Nothing,
    Host(Arc<Memory>),
    Gpu(u64, RegionId, Arc<GpuMemory>),
}

impl LocalChannel {
    pub fn new(
        fence: Arc<FenceTable>,
        nonce: Arc<[u8; 32]>,
        wake: Box<dyn Fn() + Send + Sync>,
    ) -> LocalChannel {
        let hello = Message::Hello { fence, pid: std::process::id(), nonce };
        let queue = Queue {
            ready: VecDeque::from([hello]),
            later: Vec::new(),
            takes_gpus: None,
            offered: HashMap::new(),
            open: HashMap::new(),
            showings: 0,
            over: false,
        };
        LocalChannel { queue: Mutex::new(queue), wake }
    }

    pub fn share(&self, region: RegionId, memory: &RegionMemory, handle: Option<IpcHandle>) {
        let queue = &mut *lock(&self.queue);
        match (memory, handle) {
            (RegionMemory::Host(memory), _) => {
                queue.ready.push_back(Message::Share { region, memory: Arc::downgrade(memory) });
            }
            (RegionMemory::Gpu(memory), Some(handle)) if queue.takes_gpus != Some(false) => {
                queue.showings += 1;
                let (memory, showing) = (Arc::downgrade(memory), queue.showings);
                let message = Message::ShareGpu { region, memory, handle, showing };
                match queue.takes_gpus {
                    Some(_) => queue.ready.push_back(message),
                    None => queue.later.push(message),
                }
            }
            (RegionMemory::Gpu(_), _) => {}
        }
    }

    pub fn unshare(&self, region: RegionId) {
        let mut queue = lock(&self.queue);
        queue.offered.retain(|_, (of, _)| *of != region);
        if let Some(at) = queue.later.iter().rposition(|message| message.shows(region)) {
            queue.later.remove(at);
            return;
        }
        match queue.ready.iter().rposition(|message| message.shows(region)) {
            Some(at) => drop(queue.ready.remove(at)),
            None => queue.ready.push_back(Message::Unshare { region }),
        }
    }

    /// The peer has said whether it understands regions on GPUs.
    pub fn takes_gpus(&self, takes: bool) {
        let mut queue = lock(&self.queue);
        queue.takes_gpus = Some(takes);
        let later = std::mem::take(&mut queue.later);
        if takes && !later.is_empty() {
            queue.ready.extend(later);
            drop(queue);
            (self.wake)();
        }
    }

    /// The peer is about to open what it was shown: it is held until the peer says that it is closed.
    pub fn opens(&self, region: RegionId, showing: u64) {
        let mut queue = lock(&self.queue);
        let offered = queue.offered.get(&showing).and_then(|(_, memory)| memory.upgrade());
        // Once only: nobody makes this side say it without end.
        if let Some(memory) = offered
            && queue.open.insert(showing, memory).is_none()
        {
            queue.ready.push_back(Message::Note { kind: HELD, region, showing });
            drop(queue);
            (self.wake)();
        }
    }

    /// The peer has closed what it was shown: its owner may have it back.
    pub fn closed(&self, showing: u64) {
        let held = lock(&self.queue).open.remove(&showing);
        // Not under the lock: what keeps the memory may do anything at its end.
        drop(held);
    }

    /// Says that a region of the peer is about to be opened here.
    ///
    /// # Errors
    /// `MemoryCapReached`: the peer does not read what it is told.
    fn ask(&self, region: RegionId, showing: u64) -> Result<()> {
        {
            let mut queue = lock(&self.queue);
            if queue.ready.len() >= MOST_WAITING {
                let text =
                    "the peer shows regions over its local link, and does not read what it is told of them";
                return Err(Error::new(Code::MemoryCapReached, text));
            }
            queue.ready.push_back(Message::Note { kind: OPENS, region, showing });
        }
        (self.wake)();
        Ok(())
    }

    /// Sends what waits: true when all of it went, false when the socket must become writable first.
    pub fn flush(&self, conn: &UnixConn) -> Result<bool> {
        let mut queue = lock(&self.queue);
        while let Some(message) = queue.ready.front() {
            let Some(needs) = message.needs() else {
                queue.ready.pop_front();
                continue;
            };
            let (bytes, fd) = message.encode(&needs);
            let len = if bytes[0] == SHARE_GPU { LONG } else { MESSAGE };
            match conn.send_with_fds(&bytes[..len], fd.as_slice()).map_err(broken)? {
                Io::Done(_) => drop(queue.ready.pop_front()),
                Io::Blocked => return Ok(false),
                Io::Closed => return Err(Error::new(Code::PeerLost, "the peer closed its local link")),
            }
            if let Needs::Gpu(showing, region, memory) = needs
                && !queue.over
            {
                queue.offered.insert(showing, (region, Arc::downgrade(&memory)));
            }
        }
        Ok(true)
    }

    /// Nothing is sent any more, and nothing held: what the peer had open it closes, or has lost.
    pub fn cut(&self) {
        let mut queue = lock(&self.queue);
        queue.over = true;
        queue.ready.clear();
        queue.later.clear();
        queue.offered.clear();
        let held = std::mem::take(&mut queue.open);
        drop(queue);
        drop(held);
    }
}

fn broken(error: kvik_host::HostError) -> Error {
    from_host(Code::PeerLost, error)
}

impl Message {
    fn shows(&self, of: RegionId) -> bool {
        match self {
            Message::Share { region, .. } | Message::ShareGpu { region, .. } => *region == of,
            Message::Hello { .. } | Message::Unshare { .. } | Message::Note { .. } => false,
        }
    }

    /// None: the memory is gone, and the message with it.
    fn needs(&self) -> Option<Needs> {
        match self {
            Message::Share { memory, .. } => memory.upgrade().map(Needs::Host),
            Message::ShareGpu { region, memory, showing, .. } => {
                memory.upgrade().map(|memory| Needs::Gpu(*showing, *region, memory))
            }
            Message::Hello { .. } | Message::Unshare { .. } | Message::Note { .. } => Some(Needs::Nothing),
        }
    }

    fn encode<'m>(&'m self, needs: &'m Needs) -> ([u8; LONG], Option<BorrowedFd<'m>>) {
        let mut bytes = [0; LONG];
        let (kind, region, number) = match self {
            Message::Hello { nonce, .. } => (HELLO, GPUS, nonce.as_ptr() as u64),
            Message::Share { region, .. } => {
                let addr = if let Needs::Host(memory) = needs { memory.addr() } else { 0 };
                (SHARE, region.0, addr as u64)
            }
            Message::Unshare { region } => (UNSHARE, region.0, 0),
            Message::ShareGpu { region, showing, .. } => (SHARE_GPU, region.0, *showing),
            Message::Note { kind, region, showing } => (*kind, region.0, *showing),
        };
        bytes[0] = kind;
        bytes[4..8].copy_from_slice(&region.to_le_bytes());
        bytes[8..16].copy_from_slice(&number.to_le_bytes());
        let mut fd = None;
        match (self, needs) {
            (Message::Hello { fence, pid, nonce }, _) => {
                bytes[16..20].copy_from_slice(&pid.to_le_bytes());
                bytes[32..MESSAGE].copy_from_slice(&**nonce);
                fd = Some(fence.fd());
            }
            (Message::Share { .. }, Needs::Host(memory)) => {
                bytes[16..24].copy_from_slice(&(memory.len() as u64).to_le_bytes());
                fd = memory.fd();
            }
            (Message::ShareGpu { handle, .. }, _) => bytes[HANDLE..].copy_from_slice(&handle.encode()),
            _ => {}
        }
        (bytes, fd)
    }
}

/// The error for a transfer whose local link is over before the transfer is.
pub(crate) fn link_broke() -> Error {
    Error::new(
        Code::PeerLost,
        "the local link to the peer broke under the transfer: it ended, or closed it; a new transfer connects again",
    )
}

/// The handle in a message of kind [`SHARE_GPU`].
pub(super) fn handle_in(bytes: &[u8; LONG]) -> IpcHandle {
    let mut handle = [0; IpcHandle::LEN];
    handle.copy_from_slice(&bytes[HANDLE..]);
    IpcHandle::decode(&handle)
}

/// What the peer is told of a region that it has shown: that it is about to be opened here, and, when this is dropped,
/// that it is open no more.
pub(super) struct Lease {
    channel: Weak<LocalChannel>,
    region: RegionId,
    showing: u64,
    asked: AtomicBool,
    held: AtomicBool,
}

impl Lease {
    pub fn new(channel: &Arc<LocalChannel>, region: RegionId, showing: u64) -> Lease {
        let channel = Arc::downgrade(channel);
        Lease { channel, region, showing, asked: AtomicBool::new(false), held: AtomicBool::new(false) }
    }

    /// Asks the peer to hold the region, once.
    ///
    /// # Errors
    /// The peer does not read what it is told.
    pub fn ask(&self) -> Result<()> {
        if self.asked.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let channel = self.channel.upgrade().ok_or_else(link_broke)?;
        channel.ask(self.region, self.showing).inspect_err(|_| self.asked.store(false, Ordering::Release))
    }

    /// The peer holds what it has shown with this number.
    pub fn note_held(&self, showing: u64) {
        if showing == self.showing {
            self.held.store(true, Ordering::Release);
        }
    }

    pub fn is_held(&self) -> bool {
        self.held.load(Ordering::Acquire)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let Some(channel) = self.channel.upgrade().filter(|_| *self.asked.get_mut()) else { return };
        {
            let mut queue = lock(&channel.queue);
            if queue.over {
                return;
            }
            let (region, showing) = (self.region, self.showing);
            queue.ready.push_back(Message::Note { kind: CLOSED, region, showing });
        }
        (channel.wake)();
    }
}
