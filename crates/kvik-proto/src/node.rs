//! One engine's whole protocol state: sessions, grants, flows and timers.
//!
//! Every call takes the time (`now`, since boot) and may leave bytes to send ([`Node::take_output`]) and events
//! ([`Node::next_event`]). The caller drains events before it lets others in, so their order is the order in which
//! things happened.

use crate::flow::{Flow, Role};
use crate::frame::Begin;
use crate::grants::{Grants, Offer};
use crate::handshake::Identity;
use crate::nics::{NicAnswer, NicCall};
use crate::notify::Notification;
use crate::rungs::Rungs;
use crate::served::Served;
use crate::session::Session;
use crate::{FlowKey, OWN_SESSION};
use kvik_core::{Code, Error, GrantId, GrantState, RegionId, Result};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::Duration;

/// The times that decide about life and death.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// A side that has sent nothing for this long sends a beat.
    pub heartbeat: Duration,
    /// A peer that was silent for this long is dead.
    pub dead_after: Duration,
}

impl Default for Timing {
    /// A beat every 0.5 s; dead after 2 s, as promised in P6.
    fn default() -> Self {
        Timing { heartbeat: Duration::from_millis(500), dead_after: Duration::from_secs(2) }
    }
}

/// Bytes that a session's channels have in hand at most, unless the engine says otherwise: more than so many channels
/// as a peer usually has ever take, so that it bounds and does not slow.
pub const WINDOW: u64 = 32 << 20;

/// What happened, for the engine around the node.
#[derive(Debug)]
pub enum Event {
    /// There may be something to send on the session's channels.
    Send(u64),
    /// There may be something to copy.
    Copy,
    /// A flow of the session must stop: executors look at their orders' flags.
    Stop(u64),
    /// A transfer that this side began has ended; nothing here touches its memory any more.
    Finished(Finished),
    /// A request of a peer has ended on this side, which owns the grant.
    Served(Served),
    /// A grant has ended; its pages are the owner's again.
    GrantEnded(GrantId, GrantState),
    /// A grant is over while a transfer takes part in it: so many pages are not the owner's yet. `GrantEnded` follows.
    Ending(GrantId, u64),
    /// This fence slot must be raised, at once.
    Raise(u32),
    /// The session is over: its connections must be cut.
    SessionDown(u64, Error),
    /// The peer asks for data channels.
    OpenChannels(u64),
    /// Nothing was heard on the session for half of the time after which its peer is dead.
    Silent(u64),
    /// Something was heard again on a session that was silent.
    Heard(u64),
    /// The peer closes the session in order; `SessionDown` follows.
    Goodbye(u64),
    /// A notification has come.
    Notified(Notification),
    /// A notification that this side sent has ended: acknowledged, or why not.
    NoteEnded {
        /// On which session.
        session: u64,
        /// Its number.
        number: u64,
        /// Acknowledged, or why not.
        outcome: Result<()>,
    },
    /// The window of notifications has room again.
    NoteRoom(u64),
    /// There may be something to post on the session's one-sided link.
    Post(u64),
    /// The NICs of the session's peer have other addresses now.
    NicsMoved(u64),
    /// A NIC of the session's peer wants a way to a NIC here: what it could reach by the way that it had must be cut
    /// first; then [`Node::answer_reach`].
    Reach(u64, NicCall),
    /// The peer has answered what [`Node::reach`] asked.
    Reached(u64, NicAnswer),
    /// The session is over and a NIC may still touch memory for it: the path must be cut (queue pair drained,
    /// endpoint closed), its posted orders be reported, and then [`Node::fenced`] be called.
    Fence(u64),
}

/// The end of a transfer.
#[derive(Debug)]
pub struct Finished {
    /// Which.
    pub key: FlowKey,
    /// Success, or why not.
    pub outcome: Result<()>,
    /// Bytes that are in place.
    pub bytes: u64,
    /// When the first order was given, if any was.
    pub first: Option<Duration>,
    /// Runs of memory that were moved, as counted on this side.
    pub extents: u64,
    /// Time spent on checksums on this side, over all threads.
    pub verify: Duration,
    /// The peer's region that was copied from, where this side copied.
    pub copied_from: Option<RegionId>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Timer {
    Flow(FlowKey),
    Session(u64),
    Note(u64, u64),
    LastWord(u64),
}

/// See the module's text. `R` names memory of this process; the node only hands it back.
pub struct Node<R> {
    pub(crate) identity: Identity,
    pub(crate) timing: Timing,
    pub(crate) window: u64,
    pub(crate) sessions: BTreeMap<u64, Session>,
    pub(crate) preferred: HashMap<Identity, u64>,
    pub(crate) grants: Grants<R>,
    pub(crate) flows: BTreeMap<FlowKey, Flow<R>>,
    pub(crate) parked: HashMap<GrantId, Vec<(FlowKey, Begin)>>,
    pub(crate) copying: VecDeque<FlowKey>,
    pub(crate) timers: BTreeSet<(Duration, Timer)>,
    pub(crate) events: VecDeque<Event>,
    pub(crate) own_transfers: u64,
    /// Flows whose pages a peer's NIC may reach.
    pub(crate) exposed: usize,
    pub(crate) unsent: Vec<u64>,
    /// The latest time that was heard of.
    pub(crate) clock: Duration,
    /// Beats that were sent later than half a heartbeat after they were due.
    pub(crate) late_beats: u64,
    pub(crate) rungs: Rungs,
}

impl<R: Clone> Node<R> {
    /// An engine with nothing going on.
    pub fn new(identity: Identity, timing: Timing, now: Duration) -> Node<R> {
        Node {
            identity,
            // Neither may be zero, or a tick would never end.
            timing: Timing {
                heartbeat: timing.heartbeat.max(Duration::from_millis(1)),
                dead_after: timing.dead_after.max(Duration::from_millis(1)),
            },
            window: WINDOW,
            sessions: BTreeMap::new(),
            preferred: HashMap::new(),
            grants: Grants::default(),
            flows: BTreeMap::new(),
            parked: HashMap::new(),
            copying: VecDeque::new(),
            timers: BTreeSet::new(),
            events: VecDeque::new(),
            own_transfers: 0,
            exposed: 0,
            unsent: Vec::new(),
            clock: now,
            late_beats: 0,
            rungs: Rungs::default(),
        }
    }

    /// How many bytes the channels of one session may have in hand to send; one chunk is always allowed.
    pub fn set_window(&mut self, bytes: u64) {
        self.window = bytes;
    }

    /// The next thing that happened.
    pub fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// When [`Node::tick`] wants to be called again.
    pub fn next_timeout(&self) -> Option<Duration> {
        let timer = self.timers.first().map(|(at, _)| *at);
        timer.into_iter().chain(self.grants.next_due()).min()
    }

    // ---- grants ----

    /// Gives a grant. Requests that came before it are served now.
    ///
    /// # Errors
    /// `InvalidArgument` for an id that was used before.
    pub fn grant(&mut self, id: GrantId, offer: Offer<R>, now: Duration) -> Result<()> {
        self.grants.insert(id, offer)?;
        self.expire(now);
        for (key, begin) in self.parked.remove(&id).unwrap_or_default() {
            self.unpark(key, begin, now);
        }
        Ok(())
    }

    /// Ends a grant. `GrantEnded` comes when its pages are the owner's again, which may be at once.
    pub fn end_grant(&mut self, id: GrantId, state: GrantState) {
        let Some((flows, slot)) = self.grants.end(id, state) else { return };
        self.events.push_back(Event::Raise(slot));
        for key in flows {
            self.stop_flow(key, crate::grants::ended(id, state));
        }
        self.note_settled(id);
        if let Some(pages) = self.grants.ending(id) {
            self.events.push_back(Event::Ending(id, pages));
        }
    }

    pub(crate) fn note_settled(&mut self, id: GrantId) {
        if let Some(state) = self.grants.settle(id) {
            self.events.push_back(Event::GrantEnded(id, state));
        }
    }

    /// Gives a live grant more time: how much it now has.
    ///
    /// # Errors
    /// The way the grant ended, or `GrantUnknown`.
    pub fn extend_grant(&mut self, id: GrantId, by: Duration, now: Duration) -> Result<Duration> {
        self.expire(now);
        Ok(self.grants.extend(id, by)?.saturating_sub(now))
    }

    /// Where a grant stands; `None` when it is unknown.
    pub fn grant_state(&self, id: GrantId) -> Option<GrantState> {
        self.grants.state(id)
    }

    /// Ends all grants over a region that is to be closed.
    pub fn end_grants_of(&mut self, region: RegionId) {
        for id in self.grants.of_region(region) {
            self.end_grant(id, GrantState::Closed);
        }
    }

    /// Ends every grant, for an engine that closes.
    pub fn end_all_grants(&mut self) {
        for id in self.grants.all() {
            self.end_grant(id, GrantState::Closed);
        }
    }

    /// Number of grants that have not ended.
    pub fn grants(&self) -> usize {
        self.grants.len()
    }

    /// Pages of grants that are over while a transfer may still touch them: they are not the owner's again yet.
    pub fn quarantined(&self) -> u64 {
        self.grants.quarantined()
    }

    /// Beats that were sent later than half a heartbeat after they were due.
    pub fn late_beats(&self) -> u64 {
        self.late_beats
    }

    // ---- time ----

    /// Lets time pass: beats, deaths, deadlines, expiries.
    pub fn tick(&mut self, now: Duration) {
        self.expire(now);
        while let Some(&(at, timer)) = self.timers.first()
            && at <= now
        {
            self.timers.pop_first();
            match timer {
                Timer::Session(id) => self.session_timer(id, at, now),
                Timer::Flow(key) => self.flow_timer(key, now),
                Timer::Note(session, number) => self.note_timer(session, number),
                Timer::LastWord(id) => self.last_word_timer(id),
            }
        }
    }

    /// It is this late by now. What is done next counts its own patience from here: without it, from the last thing that
    /// happened, which may be a heartbeat ago.
    pub fn note_time(&mut self, now: Duration) {
        self.clock = self.clock.max(now);
    }

    /// Applies expiry before anything that is buffered is looked at.
    pub(crate) fn expire(&mut self, now: Duration) {
        self.note_time(now);
        while let Some(id) = self.grants.overdue(now) {
            self.end_grant(id, GrantState::Expired);
        }
    }

    fn flow_timer(&mut self, key: FlowKey, now: Duration) {
        let Some(flow) = self.flows.get(&key).filter(|flow| flow.deadline <= now) else { return };
        let error = match flow.role {
            Role::Parked { grant } => Error::new(
                Code::GrantUnknown,
                format!(
                    "the owner was not told of grant {grant} in time: it never gave it, or forgot it long after its end"
                ),
            ),
            _ => Error::new(
                Code::DeadlineExceeded,
                format!(
                    "the transfer with {} did not end by its deadline: {} of {} bytes were done; \
                     give it a longer deadline, or look at the peer",
                    self.peer_text(key.0),
                    flow.bytes_done(),
                    flow.cut.bytes
                ),
            ),
        };
        // Whoever moves it is asked to stop first. Without an answer, or a completion, only a cut path gives the
        // memory back.
        let told = flow.stop.is_some();
        self.stop_flow(key, error);
        if told && self.flows.get(&key).is_some_and(Flow::is_under_way) {
            self.break_link(key.0);
        }
    }

    /// The session number of transfers inside the engine, which no peer has.
    pub(crate) fn is_own(key: FlowKey) -> bool {
        key.0 == OWN_SESSION
    }
}
