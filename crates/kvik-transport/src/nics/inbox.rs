//! What a NIC is told, and what wakes its thread for it.

use crate::basics::lock;
use crate::{RegionMemory, from_host};
use kvik_core::{Code, Result};
use kvik_host::event::{Epoll, EventFd, Interest};
use kvik_proto::{NicAnswer, NicCall, NicCallKind, NicKey};
use std::collections::{HashMap, HashSet};
use std::ops::Deref;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// The token of what NICs are told; a NIC's own is its place.
pub(super) const TOLD: u64 = u64::MAX;

/// What a NIC is told.
pub(crate) enum Command {
    /// The session may have something to post.
    Post(u64),
    /// A transfer must stop: look at the work requests in flight.
    Halt,
    /// Peers may reach this engine's memory: they need the thread's help.
    Expose,
    /// The session's peer has other addresses now.
    Find(u64),
    /// A NIC of the session's peer wants a connection to this one.
    Called(u64, NicCall),
    /// The session's peer has answered this one.
    Answered(u64, NicAnswer),
    /// The connection to the session's peer is to be open, before this time is over.
    WarmUp(u64, Instant),
    /// The session is over.
    Forget(u64),
    /// The session is over, and its peer may still reach memory here.
    Fence(Arc<Fence>),
    /// The NIC must know this memory.
    Register(RegionMemory, SyncSender<Result<NicKey>>),
    /// It is to move this memory of a device, which it cannot know, through a ring.
    Stage(RegionMemory, SyncSender<Result<()>>),
    /// It need not know it any more.
    Unregister(usize, SyncSender<()>),
    /// It must know it again, as before.
    Keep(usize),
    /// End.
    Stop,
}

/// NICs that have not yet cut the path of a session's peer.
pub(crate) struct Fence {
    session: u64,
    left: AtomicUsize,
}

impl Fence {
    /// That so many NICs have to cut.
    pub fn new(session: u64, nics: usize) -> Arc<Fence> {
        Arc::new(Fence { session, left: AtomicUsize::new(nics) })
    }

    pub fn session(&self) -> u64 {
        self.session
    }

    /// This NIC has: true for the last one.
    pub fn is_done(&self) -> bool {
        self.left.fetch_sub(1, Ordering::AcqRel) == 1
    }
}

/// What the thread of some NICs sleeps on: their own sets, by their places there, and one descriptor for what they are
/// told.
pub(super) struct Waker {
    pub epoll: Epoll,
    fd: EventFd,
    /// The NICs that something waits for, by their places on the thread. Who finds none here signals.
    told: AtomicU32,
}

impl Waker {
    /// # Errors
    /// The kernel's: it has no descriptor to spare.
    pub fn new() -> Result<Arc<Waker>> {
        let fail = |error| from_host(Code::InvalidArgument, error);
        let (epoll, fd) = (Epoll::new().map_err(fail)?, EventFd::new().map_err(fail)?);
        epoll.add(&fd, TOLD, Interest::READ).map_err(fail)?;
        Ok(Arc::new(Waker { epoll, fd, told: AtomicU32::new(0) }))
    }

    /// The NICs that something waits for, by their places.
    pub fn take(&self) -> u32 {
        // First: who tells a NIC from here on finds none told, and signals anew.
        if let Err(error) = self.fd.drain() {
            log::error!("a thread of NICs cannot read its waker: {error}");
        }
        self.told.swap(0, Ordering::AcqRel)
    }

    fn wake(&self, at: usize) {
        if self.told.fetch_or(1 << at, Ordering::AcqRel) == 0
            && let Err(error) = self.fd.signal()
        {
            log::error!("a thread of NICs cannot be woken: {error}");
        }
    }
}

/// What waits for a NIC.
pub(super) struct Inbox {
    waiting: Mutex<Waiting>,
    waker: Arc<Waker>,
    /// The NIC's place on its thread.
    at: usize,
}

/// Who reads an inbox. With it the inbox is closed: nobody waits for an answer of who has ended.
pub(super) struct Reader(pub Arc<Inbox>);

impl Deref for Reader {
    type Target = Inbox;

    fn deref(&self) -> &Inbox {
        &self.0
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.0.close();
    }
}

#[derive(Default)]
struct Waiting {
    commands: Vec<Command>,
    /// Sessions that have a `Post` among the commands already, and whether `Halt` and `Expose` are there.
    posts: HashSet<u64>,
    told: [bool; 2],
    /// Whether nobody reads them any more.
    closed: bool,
    /// Where what is said again and again is among the commands: a later word of its kind takes its place, so that a
    /// peer can fill nothing.
    words: HashMap<(u64, Word), usize>,
}

/// What is said to a NIC again and again, of which the last counts.
#[derive(PartialEq, Eq, Hash)]
enum Word {
    /// One of the peer's NICs calls.
    Call(u8, NicCallKind),
    /// The peer answers.
    Answer(NicCallKind),
    /// The engine wants it warmed up.
    WarmUp,
}

impl Waiting {
    /// Whether it is news, and not said among what waits already.
    fn is_news(&mut self, command: &Command) -> bool {
        match command {
            Command::Post(session) => self.posts.insert(*session),
            Command::Halt => !std::mem::replace(&mut self.told[0], true),
            Command::Expose => !std::mem::replace(&mut self.told[1], true),
            _ => true,
        }
    }

    fn put(&mut self, command: Command) {
        let word = match &command {
            Command::Called(session, call) => Some((*session, Word::Call(call.from, call.kind))),
            Command::Answered(session, answer) => Some((*session, Word::Answer(answer.kind))),
            Command::WarmUp(session, _) => Some((*session, Word::WarmUp)),
            _ => None,
        };
        let next = self.commands.len();
        let at = word.map_or(next, |word| *self.words.entry(word).or_insert(next));
        match (self.commands.get_mut(at), command) {
            (Some(Command::WarmUp(_, earlier)), Command::WarmUp(_, until)) => *earlier = until.max(*earlier),
            (Some(earlier), command) => *earlier = command,
            (None, command) => self.commands.push(command),
        }
    }
}

impl Inbox {
    /// Of the NIC at this place of the thread that is woken so.
    pub fn new(waker: &Arc<Waker>, at: usize) -> Arc<Inbox> {
        Arc::new(Inbox { waiting: Mutex::default(), waker: waker.clone(), at })
    }

    /// Adds what of the NIC is waited for.
    ///
    /// # Errors
    /// The kernel's.
    pub fn watch(&self, nic: &Epoll) -> Result<()> {
        let added = self.waker.epoll.add(nic, self.at as u64, Interest::READ);
        added.map_err(|error| from_host(Code::InvalidArgument, error))
    }

    /// What is put into a closed one is gone, and so is where its answer would have gone: who waits for one hears that.
    pub fn put(&self, command: Command) {
        let mut waiting = lock(&self.waiting);
        if waiting.closed {
            return;
        }
        let first = waiting.commands.is_empty();
        if waiting.is_news(&command) {
            waiting.put(command);
        }
        drop(waiting);
        if first {
            self.waker.wake(self.at);
        }
    }

    /// Nobody will read it any more.
    fn close(&self) {
        let mut waiting = lock(&self.waiting);
        waiting.closed = true;
        let unread = std::mem::take(&mut waiting.commands);
        drop(waiting);
        // Memory may go with them, which takes its time.
        drop(unread);
    }

    /// Takes all that waits.
    pub fn take(&self, into: &mut Vec<Command>) {
        let mut waiting = lock(&self.waiting);
        waiting.posts.clear();
        waiting.words.clear();
        waiting.told = [false; 2];
        std::mem::swap(&mut waiting.commands, into);
    }
}
