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
use kvik_host::device::{DeviceMemory, Handle};
use kvik_host::unix::UnixConn;
use kvik_host::{FenceTable, Io, Memory};
use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

/// More regions than this a peer does not show.
pub(super) const MAX_REGIONS: usize = 4096;
/// Bytes of a message, and of one with a GPU's handle.
pub(super) const MESSAGE: usize = 64;
pub(super) const LONG: usize = 128;
const HANDLE: usize = LONG - size_of::<Handle>();

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
    /// Once each: who registers a region may come at the same time as who joins, and both show it.
    shown: HashSet<RegionId>,
    /// What the peer was shown of GPUs and may open, by the number of the showing.
    offered: HashMap<u64, (RegionId, Weak<dyn DeviceMemory>)>,
    /// What it has open, or is about to open.
    open: HashMap<u64, Arc<dyn DeviceMemory>>,
    showings: u64,
    over: bool,
}

/// A message that waits.
struct Message {
    bytes: [u8; LONG],
    about: About,
}

/// What a message is about. What waits to be shown is not held: that must not keep a region from closing.
enum About {
    Nothing,
    Fence(Arc<FenceTable>),
    Host(Weak<Memory>),
    Gpu(RegionId, u64, Weak<dyn DeviceMemory>),
}

impl LocalChannel {
    /// The peer reads the nonce where it lies: whoever has it keeps it as long as the link.
    pub fn new(fence: Arc<FenceTable>, nonce: &[u8; 32], wake: Box<dyn Fn() + Send + Sync>) -> LocalChannel {
        let mut hello = Message::new(HELLO, RegionId(0), nonce.as_ptr() as u64, About::Fence(fence));
        hello.bytes[4..8].copy_from_slice(&GPUS.to_le_bytes());
        hello.bytes[16..20].copy_from_slice(&std::process::id().to_le_bytes());
        hello.bytes[32..MESSAGE].copy_from_slice(nonce);
        let queue = Queue {
            ready: VecDeque::from([hello]),
            later: Vec::new(),
            takes_gpus: None,
            shown: HashSet::new(),
            offered: HashMap::new(),
            open: HashMap::new(),
            showings: 0,
            over: false,
        };
        LocalChannel { queue: Mutex::new(queue), wake }
    }

    pub fn share(&self, region: RegionId, memory: &RegionMemory, handle: Option<Handle>) {
        let queue = &mut *lock(&self.queue);
        if !queue.shown.insert(region) {
            return;
        }
        match (memory, handle) {
            (RegionMemory::Host(memory), _) => {
                let about = About::Host(Arc::downgrade(memory));
                let mut message = Message::new(SHARE, region, memory.addr() as u64, about);
                message.bytes[16..24].copy_from_slice(&(memory.len() as u64).to_le_bytes());
                queue.ready.push_back(message);
            }
            (RegionMemory::Device(memory), Some(handle)) if queue.takes_gpus != Some(false) => {
                queue.showings += 1;
                let about = About::Gpu(region, queue.showings, Arc::downgrade(memory));
                let mut message = Message::new(SHARE_GPU, region, queue.showings, about);
                message.bytes[HANDLE..].copy_from_slice(&handle);
                match queue.takes_gpus {
                    Some(_) => queue.ready.push_back(message),
                    None => queue.later.push(message),
                }
            }
            (RegionMemory::Device(_), _) => {}
        }
    }

    pub fn unshare(&self, region: RegionId) {
        let mut queue = lock(&self.queue);
        queue.shown.remove(&region);
        queue.offered.retain(|_, (of, _)| *of != region);
        if let Some(at) = queue.later.iter().rposition(|message| message.shows(region)) {
            queue.later.remove(at);
            return;
        }
        match queue.ready.iter().rposition(|message| message.shows(region)) {
            Some(at) => drop(queue.ready.remove(at)),
            None => queue.ready.push_back(Message::new(UNSHARE, region, 0, About::Nothing)),
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
            queue.ready.push_back(Message::new(HELD, region, showing, About::Nothing));
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
            queue.ready.push_back(Message::new(OPENS, region, showing, About::Nothing));
        }
        (self.wake)();
        Ok(())
    }

    /// Sends what waits: true when all of it went, false when the socket must become writable first.
    pub fn flush(&self, conn: &UnixConn) -> Result<bool> {
        let mut queue = lock(&self.queue);
        while let Some(Message { bytes, about }) = queue.ready.front() {
            let len = if bytes[0] == SHARE_GPU { LONG } else { MESSAGE };
            let send = |fd: Option<BorrowedFd<'_>>| conn.send_with_fds(&bytes[..len], fd.as_slice());
            // With memory that is gone goes its message.
            let (sent, shown) = match about {
                About::Nothing => (send(None), None),
                About::Fence(fence) => (send(Some(fence.fd())), None),
                About::Host(memory) => {
                    (memory.upgrade().map_or(Ok(Io::Done(0)), |memory| send(memory.fd())), None)
                }
                About::Gpu(region, showing, memory) => match memory.upgrade() {
                    Some(_) => (send(None), Some((*showing, (*region, memory.clone())))),
                    None => (Ok(Io::Done(0)), None),
                },
            };
            match sent.map_err(broken)? {
                Io::Done(_) => {}
                Io::Blocked => return Ok(false),
                Io::Closed => return Err(Error::new(Code::PeerLost, "the peer closed its local link")),
            }
            queue.ready.pop_front();
            if !queue.over {
                queue.offered.extend(shown);
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
    fn new(kind: u8, region: RegionId, number: u64, about: About) -> Message {
        let mut bytes = [0; LONG];
        bytes[0] = kind;
        bytes[4..8].copy_from_slice(&region.0.to_le_bytes());
        bytes[8..16].copy_from_slice(&number.to_le_bytes());
        Message { bytes, about }
    }

    fn shows(&self, region: RegionId) -> bool {
        matches!(self.bytes[0], SHARE | SHARE_GPU) && self.bytes[4..8] == region.0.to_le_bytes()
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
pub(super) fn handle_in(bytes: &[u8; LONG]) -> Handle {
    let mut handle = [0; size_of::<Handle>()];
    handle.copy_from_slice(&bytes[HANDLE..]);
    handle
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
            queue.ready.push_back(Message::new(CLOSED, region, showing, About::Nothing));
        }
        (channel.wake)();
    }
}
