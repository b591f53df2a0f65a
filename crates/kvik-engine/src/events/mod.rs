//! What happens, for the engine's user: peers that come and go, grants and pages, notifications.
//!
//! - [`bus`]: the queues, one for each [`Events`] that a user holds;
//! - [`quarantine`]: which grants are worth telling of.
//!
//! Invariants:
//! - Nothing here waits for a user. What the engine has to say goes into a bounded queue; where nobody takes it, the
//!   oldest events go, and an [`Event::EventsLost`] says how many.
//! - A notification is never dropped while its session lives: it is not acknowledged before every user has taken it,
//!   so its sender's window bounds what is held. With its session it goes, and its sender learns that.
//! - Once an engine is closed, nothing comes any more; and a forked child gets nothing of its parent's.

mod bus;
mod quarantine;

use crate::end::duplicate;
use crate::engine::Engine;
use crate::inner::Inner;
pub(crate) use bus::EventBus;
use kvik_core::{EngineId, Error, GrantId, GrantState, Incarnation, Result};
use kvik_transport::TransportId;
pub(crate) use quarantine::Quarantine;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

/// A peer, as far as it is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Who {
    /// Its id.
    pub engine: EngineId,
    /// Its start.
    pub incarnation: Incarnation,
    /// What it calls itself; empty when it does not.
    pub name: String,
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name.is_empty() {
            true => write!(f, "engine {}", self.engine),
            false => write!(f, "engine {} ({})", self.engine, self.name),
        }
    }
}

/// What happened.
#[derive(Debug, Clone)]
pub enum Event {
    /// There is a session with the peer, or it was heard again after it was suspect; with the reason.
    PeerUp(Who, &'static str),
    /// Nothing was heard from the peer for half of the time after which it is dead.
    PeerSuspect(Who),
    /// The last session with the peer has ended, and why.
    PeerLost(Who, Error),
    /// Another engine listens where this peer was reached: it was started anew, and its tickets are void.
    PeerRestarted(Who, Error),
    /// A grant has ended: its pages are the owner's again.
    GrantEnded(GrantId, GrantState),
    /// A grant is over, and so many of its pages may still be touched by a transfer.
    PagesQuarantined(GrantId, u64),
    /// So many pages that were said to be in quarantine are the owner's again.
    PagesReturned(GrantId, u64),
    /// A transfer with this peer goes over another transport than was chosen first.
    TransportChanged {
        /// With whom.
        peer: Who,
        /// What was chosen.
        from: TransportId,
        /// What is used.
        to: TransportId,
        /// Why.
        reason: String,
    },
    /// A notification of this peer.
    Notification(Who, Arc<[u8]>),
    /// So many events before this one were dropped, because they were not taken.
    EventsLost(u64),
}

impl Event {
    /// The word for it.
    pub fn name(&self) -> &'static str {
        match self {
            Event::PeerUp(..) => "peer_up",
            Event::PeerSuspect(_) => "peer_suspect",
            Event::PeerLost(..) => "peer_lost",
            Event::PeerRestarted(..) => "peer_restarted",
            Event::GrantEnded(..) => "grant_ended",
            Event::PagesQuarantined(..) => "pages_quarantined",
            Event::PagesReturned(..) => "pages_returned",
            Event::TransportChanged { .. } => "transport_changed",
            Event::Notification(..) => "notification",
            Event::EventsLost(_) => "events_lost",
        }
    }
}

/// A user's queue of events: those since it was made, and the notifications that waited for a first user.
///
/// Several of them each get every event. Dropped, it holds nothing back any more.
pub struct Events {
    inner: Arc<Inner>,
    id: u64,
    waker: Arc<kvik_host::event::EventFd>,
}

impl Engine {
    /// What happens from now on.
    ///
    /// # Errors
    /// `EngineClosed`, `EngineForked`; `InvalidArgument` when the process has too many descriptors.
    pub fn events(&self) -> Result<Events> {
        let inner = self.inner().clone();
        inner.check()?;
        let (id, waker) = inner.events.join()?;
        Ok(Events { inner, id, waker })
    }
}

impl Events {
    /// The next event; `None` when none came in time.
    ///
    /// # Errors
    /// `EngineClosed` once the engine is closed, `EngineForked`.
    pub fn next(&self, timeout: Duration) -> Result<Option<Event>> {
        self.take(timeout, false)
    }

    /// As [`Events::next`], for a thread that hands events on: closing the engine waits, within its timeout, until
    /// the thread asks for the next one, so that nothing is handed on afterwards. The closing thread itself is not
    /// waited for.
    ///
    /// # Errors
    /// As for [`Events::next`].
    pub fn next_to_hand_on(&self, timeout: Duration) -> Result<Option<Event>> {
        self.take(timeout, true)
    }

    fn take(&self, timeout: Duration, busy: bool) -> Result<Option<Event>> {
        self.inner.check_fork()?;
        let (event, taken) = self.inner.events.take(self.id, timeout, busy);
        if let Some(event) = event {
            self.inner.note_taken(taken);
            return Ok(Some(event));
        }
        self.inner.check().map(|()| None)
    }

    /// A descriptor that is readable while something waits here, and from the engine's end on; for event loops.
    ///
    /// # Errors
    /// `EngineForked`; `InvalidArgument` when the process has too many descriptors.
    pub fn fd(&self) -> Result<OwnedFd> {
        self.inner.check_fork()?;
        duplicate(&self.waker)
    }

    /// Ends it: a call that waits in another thread finds nothing.
    pub fn close(&self) {
        if self.inner.check_fork().is_ok() {
            let taken = self.inner.events.leave(self.id);
            self.inner.note_taken(taken);
        }
    }

    /// Whether it has ended, by itself or with its engine.
    pub fn is_closed(&self) -> bool {
        self.inner.is_closed() || (self.inner.check_fork().is_ok() && !self.inner.events.has(self.id))
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        self.close();
    }
}

impl Inner {
    /// Notifications that every user has taken are acknowledged.
    fn note_taken(&self, taken: Vec<(u64, u64)>) {
        if !taken.is_empty() {
            self.node(|node, _| {
                taken.iter().for_each(|(session, number)| node.note_taken(*session, *number))
            });
        }
    }
}
