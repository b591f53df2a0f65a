//! What the sessions of an engine share, and what a call of theirs asks of whoever drives them.
//!
//! A session reaches nothing of another one. What concerns others is an [`Effect`]: a value, which the driver carries
//! out after the session's call, while other threads go on. So the order in which that happens is anybody's, and every
//! order must be right: a grant that was ended gives its pages back when the last flow has left it, however late
//! the flows of other sessions are told to stop.
//!
//! The table of grants has a lock of its own, always taken inside a session's and never around one. The end of a grant
//! has an order: it is marked, so that nothing joins it; then its fence is raised and its flows are told to stop; and
//! only when both is done may the last flow that leaves, or the end itself, say that its pages are free.

use crate::FlowKey;
use crate::event::{Event, Timing, WINDOW};
use crate::grants::Grants;
use crate::handshake::Identity;
use crate::offer::Offer;
use crate::reclaim::Reclaim;
use crate::sync::{AtomicU64, Mutex, MutexGuard, Ordering, Soonest, lock};
use kvik_core::{Class, ClassQueue, EngineId, GrantId, GrantState, Result};
use std::collections::VecDeque;
use std::time::Duration;

/// What a call of a session makes happen beyond it.
pub(crate) enum Effect {
    /// The flows of a grant that is over were told, and its fence is up.
    Stopped(GrantId),
    /// A session is over, or soon will be: new transfers with this peer go over another one.
    Avoid(u64, Identity),
    /// A slot of a ring was put aside for this flow.
    Lend(FlowKey),
}

/// A grant is over: these flows take no further part in it.
pub(crate) struct Stop {
    pub grant: GrantId,
    pub state: GrantState,
    pub flows: Vec<FlowKey>,
}

/// Numbers that are read from outside.
#[derive(Default)]
pub(crate) struct Counts {
    /// Flows whose pages a peer's NIC may reach.
    pub exposed: AtomicU64,
    /// Beats that were sent later than half a heartbeat after they were due.
    pub late_beats: AtomicU64,
    /// As in [`ReclaimCounts`](crate::ReclaimCounts).
    pub grants: [AtomicU64; 3],
    pub transfers: [AtomicU64; 3],
}

/// See the module's text.
pub(crate) struct Common<R> {
    identity: Identity,
    timing: Timing,
    window: AtomicU64,
    grants: Mutex<Grants<R>>,
    next_expiry: Soonest,
    /// Sessions with something to copy or to sum, in turn.
    copying: Mutex<ClassQueue<u64>>,
    pub counts: Counts,
}

impl<R> Common<R> {
    pub fn new(identity: Identity, timing: Timing) -> Common<R> {
        Common {
            identity,
            timing,
            window: AtomicU64::new(WINDOW),
            grants: Mutex::default(),
            next_expiry: Soonest::default(),
            copying: Mutex::default(),
            counts: Counts::default(),
        }
    }

    /// Bytes that the channels of one session may have in flight to send.
    pub fn window(&self) -> u64 {
        self.window.load(Ordering::Relaxed)
    }

    pub fn set_window(&self, bytes: u64) {
        self.window.store(bytes, Ordering::Relaxed);
    }

    /// The table of grants, for a few lines.
    pub fn grants(&self) -> MutexGuard<'_, Grants<R>> {
        lock(&self.grants)
    }

    /// When the next grant ends by itself.
    pub fn next_expiry(&self) -> Option<Duration> {
        self.next_expiry.get()
    }

    /// A session has something of a class to copy or to sum; it is not in the queue.
    pub fn queue_copy(&self, class: Class, session: u64) {
        lock(&self.copying).push(class, session);
    }

    /// The session whose turn it is to copy or to sum, and of which class. It stays in the queue, so that other threads
    /// find it while one takes its work.
    pub fn next_to_copy(&self) -> Option<(Class, u64)> {
        let mut copying = lock(&self.copying);
        copying.turn().into_iter().find_map(|class| Some((class, copying.rotate(class)?)))
    }

    /// So many bytes of a session were given out to be copied or summed; `over`: it has no more of the class, and leaves
    /// the queue.
    pub fn copied(&self, class: Class, session: u64, bytes: u64, over: bool) {
        let mut copying = lock(&self.copying);
        if over {
            copying.remove(class, &session);
        }
        if bytes > 0 {
            copying.took(class, bytes);
        }
    }
}

/// What the calls of one thread made happen, until it is carried out.
#[derive(Default)]
pub(crate) struct Output {
    /// The latest time that was heard of.
    clock: Duration,
    /// Flows to stop, which may be done at once: before any event, and any effect.
    pub stops: VecDeque<Stop>,
    pub events: VecDeque<Event>,
    pub effects: VecDeque<Effect>,
    /// Sessions with something to send.
    pub unsent: Vec<u64>,
}

impl Output {
    pub fn note_time(&mut self, now: Duration) {
        self.clock = self.clock.max(now);
    }
}

/// A call, as what it calls sees it: what all share, and where it puts what it made happen.
pub(crate) struct Call<'a, R> {
    pub common: &'a Common<R>,
    pub output: &'a mut Output,
}

impl<'a, R: Clone> Call<'a, R> {
    pub fn identity(&self) -> Identity {
        self.common.identity
    }

    pub fn timing(&self) -> Timing {
        self.common.timing
    }

    pub fn clock(&self) -> Duration {
        self.output.clock
    }

    pub fn tell(&mut self, event: Event) {
        self.output.events.push_back(event);
    }

    pub fn later(&mut self, effect: Effect) {
        self.output.effects.push_back(effect);
    }

    /// A session has something to send on its control connection. Each call notes it, also where something waits there
    /// already: whoever put that may leave it for later.
    pub fn note_unsent(&mut self, session: u64) {
        if self.output.unsent.last() != Some(&session) {
            self.output.unsent.push(session);
        }
    }

    /// A peer's NIC may reach the pages of one flow more, or of one less.
    pub fn expose(&mut self, more: bool) {
        let exposed = &self.common.counts.exposed;
        match more {
            true => exposed.fetch_add(1, Ordering::AcqRel),
            false => exposed.fetch_sub(1, Ordering::AcqRel),
        };
        self.tell(Event::Exposed);
    }

    // ---- grants ----

    pub fn grants(&self) -> MutexGuard<'a, Grants<R>> {
        self.common.grants()
    }

    /// # Errors
    /// `InvalidArgument` for an id that was used before.
    pub fn add_grant(&mut self, id: GrantId, offer: Offer<R>, ready: bool) -> Result<()> {
        let mut grants = self.grants();
        grants.insert(id, offer, ready)?;
        self.common.next_expiry.set(grants.next_due());
        Ok(())
    }

    /// # Errors
    /// The way the grant ended, or `GrantUnknown`.
    pub fn extend_grant(&mut self, id: GrantId, by: Duration) -> Result<Duration> {
        let mut grants = self.grants();
        let until = grants.extend(id, by)?;
        self.common.next_expiry.set(grants.next_due());
        Ok(until)
    }

    /// Ends a live grant: it is over from here on. Its fence is raised next, and then the flows that take part in it
    /// are told to stop.
    pub fn end_grant(&mut self, id: GrantId, state: GrantState) {
        let mut grants = self.grants();
        self.end(&mut grants, id, state);
    }

    fn end(&mut self, grants: &mut Grants<R>, id: GrantId, state: GrantState) {
        let Some((flows, slot)) = grants.end(id, state) else { return };
        self.common.next_expiry.set(grants.next_due());
        self.tell(Event::Raise(slot));
        self.output.stops.push_back(Stop { grant: id, state, flows });
        self.later(Effect::Stopped(id));
    }

    /// The fence of a grant that is over is up, and its flows were told to stop: whether its pages are the owner's now.
    pub fn note_stopped(&mut self, id: GrantId) {
        let mut grants = self.grants();
        if let Some(state) = grants.stopped(id) {
            self.tell(Event::GrantEnded(id, state));
        } else if let Some(pages) = grants.ending(id) {
            self.tell(Event::Ending(id, pages));
        }
    }

    /// A flow that took part in a grant has concluded; `reader`: who has confirmed by it.
    pub fn leave_grant(&mut self, grant: GrantId, key: FlowKey, reader: Option<EngineId>, reclaim: Reclaim) {
        let mut grants = self.grants();
        if grants.waits_for_only(grant, key) {
            self.common.counts.grants[reclaim as usize].fetch_add(1, Ordering::Relaxed);
        }
        if reader.is_some_and(|reader| grants.confirm(grant, reader)) {
            self.end(&mut grants, grant, GrantState::Consumed);
        }
        self.detach(&mut grants, grant, key);
    }

    /// A request that was to take part in a grant does not.
    pub fn refuse_grant(&mut self, grant: GrantId, key: FlowKey) {
        let mut grants = self.grants();
        self.detach(&mut grants, grant, key);
    }

    fn detach(&mut self, grants: &mut Grants<R>, grant: GrantId, key: FlowKey) {
        if let Some(state) = grants.detach(grant, key) {
            self.tell(Event::GrantEnded(grant, state));
        }
    }

    /// Applies expiry before anything that is buffered is looked at.
    pub fn expire(&mut self, now: Duration) {
        self.output.note_time(now);
        if self.common.next_expiry().is_none_or(|at| at > now) {
            return;
        }
        let mut grants = self.grants();
        while let Some(id) = grants.overdue(now) {
            self.end(&mut grants, id, GrantState::Expired);
        }
    }
}
