//! Chunks over TCP channels.
//!
//! Each channel belongs to one thread. Both directions of a channel are small state machines over a non-blocking
//! socket ([`outgoing`], [`incoming`]); a thread serves many channels with one epoll set, handovers before bulk. Channels
//! of a session take chunks from its transfers as they can, so a slow channel slows no other. Whether a channel is plain or under TLS
//! is the affair of its [`Stream`]. Pages of a GPU pass through page-locked memory ([`staged`]).

mod incoming;
mod outgoing;
mod staged;
mod stream;
mod transport;
mod worker;

pub use stream::Stream;
pub use transport::{Tcp, TcpConfig};

use crate::basics::lock;
use crate::{Services, from_host};
use kvik_core::{Class, Code, Result};
use kvik_host::event::EventFd;
use kvik_host::thread::{ThreadOptions, spawn_named};
use kvik_proto::Claim;
use std::collections::HashSet;
use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// The threads that serve an engine's TCP channels.
pub(crate) struct TcpPool {
    workers: Vec<Arc<Inbox>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    next: AtomicUsize,
}

/// A channel's place among those of its session.
#[derive(Default)]
pub(crate) struct Place {
    pub index: u16,
    /// How many there are by now.
    pub of: Arc<AtomicU16>,
}

impl Place {
    /// What the channel may send, in the order of its wishes. What a socket has taken goes in order, and a receiver may
    /// be slow to take it: so where a session has several channels, one half of them carries no bulk, and the other one
    /// no handovers while bulk waits.
    fn claims(&self, bulk_has_its_turn: bool) -> &'static [Claim] {
        match self.of.load(Ordering::Relaxed) {
            0 | 1 => &[Claim::Next],
            of if self.index < of / 2 => &[Claim::Only(Class::Handover)],
            _ if bulk_has_its_turn => &[Claim::Only(Class::Bulk), Claim::Beside],
            _ => &[Claim::Beside],
        }
    }
}

/// What a thread is told.
pub(crate) enum Command {
    /// Serve this channel.
    Add { session: u64, stream: Stream, place: Place },
    /// The session may have something to send.
    Send(u64),
    /// A transfer of the session must stop: look at the work requests in flight.
    Halt(u64),
    /// Cut the session's channels.
    Cut(u64),
    /// End.
    Stop,
}

/// What waits for a thread. However often it is told, it holds a few commands a channel and two a session.
pub(crate) struct Inbox {
    waiting: Mutex<Waiting>,
    waker: EventFd,
}

#[derive(Default)]
struct Waiting {
    commands: Vec<Command>,
    /// Sessions that have a `Send` or `Halt` among the commands already.
    told: HashSet<(u64, bool)>,
    /// Nobody reads them any more.
    closed: bool,
}

impl Inbox {
    /// # Errors
    /// The command, where nobody will read it.
    fn put(&self, command: Command) -> Result<(), Command> {
        let mut waiting = lock(&self.waiting);
        if waiting.closed {
            return Err(command);
        }
        let news = match &command {
            Command::Send(session) => waiting.told.insert((*session, false)),
            Command::Halt(session) => waiting.told.insert((*session, true)),
            Command::Add { .. } | Command::Cut(_) | Command::Stop => true,
        };
        // The waker is signalled with the first command, and is drained before any is taken.
        let first = waiting.commands.is_empty();
        if news {
            waiting.commands.push(command);
        }
        drop(waiting);
        if first && let Err(error) = self.waker.signal() {
            log::error!("a data thread cannot be woken: {error}");
        }
        Ok(())
    }

    pub(crate) fn take(&self, into: &mut Vec<Command>) {
        let mut waiting = lock(&self.waiting);
        waiting.told.clear();
        std::mem::swap(&mut waiting.commands, into);
    }

    /// Nobody will read it any more: what was not read.
    fn close(&self) -> Vec<Command> {
        let mut waiting = lock(&self.waiting);
        waiting.closed = true;
        std::mem::take(&mut waiting.commands)
    }
}

impl Drop for TcpPool {
    fn drop(&mut self) {
        self.stop();
    }
}

impl TcpPool {
    /// Starts `threads` threads.
    pub fn start(services: &Services, threads: usize, options: &ThreadOptions) -> Result<TcpPool> {
        let mut pool = TcpPool { workers: Vec::new(), threads: Mutex::default(), next: AtomicUsize::new(0) };
        for number in 0..threads.max(1) {
            let waker = EventFd::new().map_err(|error| from_host(Code::InvalidArgument, error))?;
            let inbox = Arc::new(Inbox { waiting: Mutex::default(), waker });
            let mut worker = worker::Worker::new(services.clone(), inbox.clone())?;
            let thread = spawn_named(&format!("kvik-io-{number}"), options, move || worker.run());
            lock(&pool.threads).push(thread.map_err(|error| from_host(Code::InvalidArgument, error))?);
            pool.workers.push(inbox);
        }
        Ok(pool)
    }

    /// Has a thread serve a channel whose join was accepted. False: all have ended.
    pub fn add(&self, session: u64, stream: impl Into<Stream>, place: Place) -> bool {
        let first = self.next.fetch_add(1, Ordering::Relaxed) % self.workers.len().max(1);
        let mut add = Command::Add { session, stream: stream.into(), place };
        for worker in self.workers.iter().cycle().skip(first).take(self.workers.len()) {
            match worker.put(add) {
                Ok(()) => return true,
                Err(refused) => add = refused,
            }
        }
        false
    }

    /// Tells every thread that has not ended.
    pub fn tell(&self, command: impl Fn() -> Command) {
        self.workers.iter().for_each(|worker| drop(worker.put(command())));
    }

    /// Cuts everything and ends the threads.
    pub fn stop(&self) {
        self.tell(|| Command::Stop);
        for thread in lock(&self.threads).drain(..) {
            if thread.join().is_err() {
                log::error!("a data thread panicked at its end, and what it had in flight stays held");
            }
        }
    }
}
