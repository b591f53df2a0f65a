//! What the sessions of an engine share, and what they ask of whoever drives them.
//!
//! A session reaches nothing of another one. What concerns others is an [`Effect`]: a value, which the driver carries
//! out after the session's call, or on another thread. So the order in which that happens is the driver's, and every
//! order must be right: a grant that was ended gives its pages back when the last flow has left it, however late
//! the flows of other sessions are told to stop.

use crate::FlowKey;
use crate::event::{Event, Timing, WINDOW};
use crate::grants::Grants;
use crate::handshake::Identity;
use crate::reclaim::{Reclaim, ReclaimCounts};
use kvik_core::{GrantId, GrantState};
use std::collections::VecDeque;
use std::time::Duration;

/// What a call of a session makes happen beyond it.
pub(crate) enum Effect {
    /// A grant is over: these flows take no further part in it.
    Stop(GrantId, GrantState, Vec<FlowKey>),
    /// A session is over, or soon will be: new transfers with this peer go over another one.
    Avoid(u64, Identity),
    /// A session has something to copy or sum.
    Copy(u64),
}

/// Numbers that are read from outside.
#[derive(Default)]
pub(crate) struct Counts {
    /// Flows whose pages a peer's NIC may reach.
    pub exposed: usize,
    /// Beats that were sent later than half a heartbeat after they were due.
    pub late_beats: u64,
    pub reclaims: ReclaimCounts,
}

/// See the module's text.
pub(crate) struct Common<R> {
    identity: Identity,
    timing: Timing,
    window: u64,
    clock: Duration,
    grants: Grants<R>,
    events: VecDeque<Event>,
    effects: VecDeque<Effect>,
    unsent: Vec<u64>,
    pub counts: Counts,
}

impl<R: Clone> Common<R> {
    pub fn new(identity: Identity, timing: Timing, now: Duration) -> Common<R> {
        Common {
            identity,
            timing,
            window: WINDOW,
            clock: now,
            grants: Grants::default(),
            events: VecDeque::new(),
            effects: VecDeque::new(),
            unsent: Vec::new(),
            counts: Counts::default(),
        }
    }

    pub fn identity(&self) -> Identity {
        self.identity
    }

    pub fn timing(&self) -> Timing {
        self.timing
    }

    /// Bytes that the channels of one session may have in flight to send.
    pub fn window(&self) -> u64 {
        self.window
    }

    pub fn set_window(&mut self, bytes: u64) {
        self.window = bytes;
    }

    /// The latest time that was heard of.
    pub fn clock(&self) -> Duration {
        self.clock
    }

    pub fn note_time(&mut self, now: Duration) {
        self.clock = self.clock.max(now);
    }

    pub fn grants(&self) -> &Grants<R> {
        &self.grants
    }

    /// The table of grants; under a lock of its own where threads share it, always taken inside a session's.
    pub fn grants_mut(&mut self) -> &mut Grants<R> {
        &mut self.grants
    }

    pub fn tell(&mut self, event: Event) {
        self.events.push_back(event);
    }

    pub fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    pub fn later(&mut self, effect: Effect) {
        self.effects.push_back(effect);
    }

    pub fn next_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// A session has something to send on its control connection.
    pub fn note_unsent(&mut self, session: u64) {
        self.unsent.push(session);
    }

    pub fn take_unsent(&mut self, into: &mut Vec<u64>) {
        into.append(&mut self.unsent);
    }

    /// Ends a live grant: it is over from here on, and its fence is up before anybody hears of it. The flows that take
    /// part in it are stopped by the driver.
    pub fn end_grant(&mut self, id: GrantId, state: GrantState) {
        let Some((flows, slot)) = self.grants.end(id, state) else { return };
        self.events.push_back(Event::Raise(slot));
        self.effects.push_back(Effect::Stop(id, state, flows));
    }

    /// The flows of a grant that is over were told to stop: whether its pages are the owner's now.
    pub fn note_stopped(&mut self, id: GrantId) {
        if let Some(state) = self.grants.settle(id) {
            self.events.push_back(Event::GrantEnded(id, state));
        } else if let Some(pages) = self.grants.ending(id) {
            self.events.push_back(Event::Ending(id, pages));
        }
    }

    /// A flow takes no further part in a grant, whose use by its reader it `consumed`.
    pub fn leave_grant(&mut self, grant: GrantId, key: FlowKey, consumed: bool, reclaim: Reclaim) {
        if self.grants.waits_for_only(grant, key) {
            self.counts.reclaims.grants[reclaim as usize] += 1;
        }
        if consumed {
            self.end_grant(grant, GrantState::Consumed);
        }
        if let Some(state) = self.grants.detach(grant, key) {
            self.events.push_back(Event::GrantEnded(grant, state));
        }
    }

    /// Applies expiry before anything that is buffered is looked at.
    pub fn expire(&mut self, now: Duration) {
        self.note_time(now);
        while let Some(id) = self.grants.overdue(now) {
            self.end_grant(id, GrantState::Expired);
        }
    }
}
