//! What the control thread is told, and what wakes it.

use crate::peers::Target;
use crate::sync::{lock, signal};
use kvik_core::{Code, Error, Result, Ticket};
use kvik_host::clock::boottime;
use kvik_host::event::EventFd;
use kvik_proto::Identity;
use kvik_transport::from_host;
use kvik_transport::tcp::Stream;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// What the control thread is told.
pub(crate) enum ControlCommand {
    /// Reach a peer.
    Dial(Identity, Arc<Ticket>),
    /// Reach whoever listens at an address.
    Meet(SocketAddr),
    /// Open the data channels of a session that this side opened.
    OpenChannels(u64),
    /// Tell when the control connection of the session has room.
    WantWrite(u64),
    /// A connection of the session broke.
    Broken(u64, Error),
    /// A session is over.
    Forget(u64),
    /// A connection is under TLS, or will never be.
    Secured(Box<Secured>),
    /// Regions were shown or taken back.
    FlushLocal,
    /// End.
    Stop,
}

/// What a connection over TCP is for.
#[derive(Clone, Copy)]
pub(crate) enum Purpose {
    /// Whoever it is came by itself.
    Stranger,
    /// A session with whom is dialled there.
    Session(Target, SocketAddr),
    /// A data channel of a session.
    Channel { session: u64, index: u16 },
}

impl Purpose {
    pub fn is_stranger(&self) -> bool {
        matches!(self, Purpose::Stranger)
    }
}

/// A connection that is to be under TLS.
pub(crate) struct Fresh {
    pub conn: Stream,
    pub purpose: Purpose,
    pub until: Instant,
}

/// A connection that has left the thread for TLS.
pub(crate) struct Secured {
    pub fresh: Fresh,
    pub outcome: Result<()>,
}

/// The control thread, for all others.
pub(crate) struct Commands {
    waiting: Mutex<Vec<ControlCommand>>,
    waker: EventFd,
    /// When the control thread wakes by itself, in nanoseconds of `boottime`.
    wakes_at: AtomicU64,
}

impl Commands {
    pub fn new() -> Result<Commands> {
        let waker = EventFd::new().map_err(|error| from_host(Code::InvalidArgument, error))?;
        Ok(Commands { waiting: Mutex::default(), waker, wakes_at: AtomicU64::new(0) })
    }

    pub fn tell(&self, command: ControlCommand) {
        let mut waiting = lock(&self.waiting);
        let again = matches!(
            (&command, waiting.last()),
            (ControlCommand::FlushLocal, Some(ControlCommand::FlushLocal))
        );
        if !again {
            waiting.push(command);
        }
        drop(waiting);
        self.wake();
    }

    pub fn take(&self) -> Vec<ControlCommand> {
        std::mem::take(&mut lock(&self.waiting))
    }

    /// What the control thread waits for.
    pub fn waker(&self) -> &EventFd {
        &self.waker
    }

    fn wake(&self) {
        signal(&self.waker, "the control thread");
    }

    /// The control thread is awake at this time, at the latest.
    pub fn wake_by(&self, at: Duration) {
        if (at.as_nanos() as u64) < self.wakes_at.load(Ordering::Acquire) {
            self.wake();
        }
    }

    /// How long the control thread sleeps now.
    ///
    /// While `soonest` is asked what is due, every [`Commands::wake_by`] wakes it: whatever is set meanwhile either
    /// is seen there or wakes the thread at once. That takes a fence on both sides: here, and in the protocol between a
    /// time that is set and the call of [`Commands::wake_by`].
    pub fn sleep_until(&self, soonest: impl FnOnce() -> Option<Duration>) -> Duration {
        self.wakes_at.store(u64::MAX, Ordering::Release);
        fence(Ordering::SeqCst);
        let soonest = soonest().unwrap_or(Duration::from_secs(u32::MAX.into()));
        self.wakes_at.store(soonest.as_nanos() as u64, Ordering::Release);
        soonest.saturating_sub(boottime())
    }
}
