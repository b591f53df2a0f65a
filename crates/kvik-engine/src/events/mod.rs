//! What happens, for the engine's user: peers that come and go, grants and pages, notifications.
//!
//! [`bus`] has the queues, one for each [`Events`] that a user holds.
//!
//! Invariants:
//! - Nothing here waits for a user. What the engine has to say goes into a bounded queue; where nobody takes it, the
//!   oldest events go, and an [`Event::EventsLost`] says how many.
//! - A notification is never dropped while its session lives: it is not acknowledged before every user has taken it,
//!   so its sender's window bounds what is held. With its session it goes, and its sender learns that.
//! - Once an engine is closed, nothing comes any more; and a forked child gets nothing of its parent's.

mod bus;
mod event;

use crate::end::duplicate;
use crate::engine::Engine;
use crate::inner::Inner;
pub(crate) use bus::EventBus;
pub use event::{Event, Who};
use kvik_core::Result;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

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
        inner.base.setup.check()?;
        let (id, waker) = inner.base.observers.events.join()?;
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
        self.inner.base.setup.check_fork()?;
        let (event, taken) = self.inner.base.observers.events.take(self.id, timeout, busy);
        if let Some(event) = event {
            self.note_taken(taken);
            return Ok(Some(event));
        }
        self.inner.base.setup.check().map(|()| None)
    }

    /// Notifications that every user has taken are acknowledged.
    fn note_taken(&self, taken: Vec<(u64, u64)>) {
        if !taken.is_empty() {
            self.inner.base.node(|node, _| {
                taken.iter().for_each(|(session, number)| node.session(*session).note_taken(0, *number))
            });
        }
    }

    /// A descriptor that is readable while something waits here, and from the engine's end on; for event loops.
    ///
    /// # Errors
    /// `EngineForked`; `InvalidArgument` when the process has too many descriptors.
    pub fn fd(&self) -> Result<OwnedFd> {
        self.inner.base.setup.check_fork()?;
        duplicate(&self.waker)
    }

    /// Ends it: a call that waits in another thread finds nothing.
    pub fn close(&self) {
        if self.inner.base.setup.check_fork().is_ok() {
            let taken = self.inner.base.observers.events.leave(self.id);
            self.note_taken(taken);
        }
    }

    /// Whether it has ended, by itself or with its engine.
    pub fn is_closed(&self) -> bool {
        self.inner.base.setup.is_closed()
            || (self.inner.base.setup.check_fork().is_ok() && !self.inner.base.observers.events.has(self.id))
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        self.close();
    }
}
