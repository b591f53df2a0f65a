//! One engine's whole protocol state: sessions, grants, flows and timers.
//!
//! Every call takes the time (`now`, since boot) and may leave bytes to send ([`Node::take_output`]) and events
//! ([`Node::next_event`]). The caller drains events before it lets others in, so their order is the order in which
//! things happened.

use crate::flow::{Flow, Role};
use crate::frame::{Begin, Frame};
use crate::grants::{Grants, Offer};
use crate::handshake::{Established, Identity, Join, JoinKind};
use crate::{FlowKey, OWN_SESSION};
use kvik_core::{Code, Error, GrantId, GrantState, RegionId, Result};
use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::time::Duration;

/// More channels than this do not join a session.
pub const MAX_CHANNELS: u16 = 64;
/// More transfers of a peer than this are not open at once.
pub(crate) const MAX_FLOWS: usize = 4096;
/// A peer that leaves more than this unread is cut off.
const MAX_OUTPUT: usize = 32 << 20;

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
    /// A grant has ended; its pages are the owner's again.
    GrantEnded(GrantId, GrantState),
    /// This fence slot must be raised, at once.
    Raise(u32),
    /// The session is over: its connections must be cut.
    SessionDown(u64, Error),
    /// The peer asks for data channels.
    OpenChannels(u64),
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
    Grant(GrantId),
    Flow(FlowKey),
    Session(u64),
}

pub(crate) struct Session {
    pub established: Established,
    pub input: Vec<u8>,
    pub output: Vec<u8>,
    pub last_in: Duration,
    pub last_out: Duration,
    pub next_transfer: u64,
    pub joined: HashSet<(JoinKind, u16)>,
    /// Transfers with something to send, in turn.
    pub sending: VecDeque<u64>,
    /// Transfers whose `End` was sent and not yet answered.
    pub closing: HashSet<u64>,
    pub owned_flows: usize,
}

/// See the module's text. `R` names memory of this process; the node only hands it back.
pub struct Node<R> {
    pub(crate) identity: Identity,
    timing: Timing,
    pub(crate) sessions: HashMap<u64, Session>,
    preferred: HashMap<Identity, u64>,
    pub(crate) grants: Grants<R>,
    pub(crate) flows: HashMap<FlowKey, Flow<R>>,
    pub(crate) parked: HashMap<GrantId, Vec<(FlowKey, Begin)>>,
    pub(crate) copying: VecDeque<FlowKey>,
    pub(crate) timers: BTreeSet<(Duration, Timer)>,
    pub(crate) events: VecDeque<Event>,
    pub(crate) own_transfers: u64,
    unsent: Vec<u64>,
    last_tick: Duration,
}

impl<R: Clone> Node<R> {
    /// An engine with nothing going on.
    pub fn new(identity: Identity, timing: Timing, now: Duration) -> Node<R> {
        Node {
            identity,
            timing,
            sessions: HashMap::new(),
            preferred: HashMap::new(),
            grants: Grants::default(),
            flows: HashMap::new(),
            parked: HashMap::new(),
            copying: VecDeque::new(),
            timers: BTreeSet::new(),
            events: VecDeque::new(),
            own_transfers: 0,
            unsent: Vec::new(),
            last_tick: now,
        }
    }

    /// The next thing that happened.
    pub fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// When [`Node::tick`] wants to be called again.
    pub fn next_timeout(&self) -> Option<Duration> {
        self.timers.first().map(|(at, _)| *at)
    }

    // ---- sessions ----

    /// A handshake has ended well: the session begins. Where both sides connected at once, the connection that the
    /// lower id opened is preferred for new transfers, and the other one closes when it is idle.
    pub fn add_session(&mut self, established: Established, now: Duration) {
        let (id, peer) = (established.session, established.peer);
        let opened_by =
            |session: &Established| if session.opener { self.identity.engine } else { session.peer.engine };
        let replaces = match self.preferred.get(&peer).and_then(|old| self.sessions.get(old)) {
            Some(old) => opened_by(&established) <= opened_by(&old.established),
            None => true,
        };
        let next_transfer = if established.opener { 2 } else { 3 };
        let session = Session {
            established,
            input: Vec::new(),
            output: Vec::new(),
            last_in: now,
            last_out: now,
            next_transfer,
            joined: HashSet::new(),
            sending: VecDeque::new(),
            closing: HashSet::new(),
            owned_flows: 0,
        };
        self.sessions.insert(id, session);
        if replaces {
            self.preferred.insert(peer, id);
        }
        self.timers.insert((now + self.timing.heartbeat, Timer::Session(id)));
    }

    /// The session for new transfers with this peer.
    pub fn session_with(&self, peer: &Identity) -> Option<u64> {
        self.preferred.get(peer).copied()
    }

    /// What the handshake of a session found out.
    pub fn established(&self, session: u64) -> Option<&Established> {
        self.sessions.get(&session).map(|session| &session.established)
    }

    /// Every session's number.
    pub fn sessions(&self) -> Vec<u64> {
        self.sessions.keys().copied().collect()
    }

    /// Lets a further connection into its session, once an index.
    ///
    /// # Errors
    /// `ProtocolError` when the session is not there, the proof is not its own, or the index is taken.
    pub fn join(&mut self, join: &Join, now: Duration) -> Result<()> {
        let refuse = |why: &str| {
            Err(Error::new(Code::ProtocolError, format!("a connection asked to join a session: {why}")))
        };
        let Some(session) = self.sessions.get_mut(&join.session) else {
            return refuse("there is no such session");
        };
        if !join.is_signed_with(&session.established.key) {
            return refuse("its proof is not of that session");
        }
        if join.index >= MAX_CHANNELS || !session.joined.insert((join.kind, join.index)) {
            return refuse("its channel number is taken");
        }
        session.last_in = now;
        Ok(())
    }

    /// Bytes have come on the session's control connection.
    pub fn receive(&mut self, id: u64, bytes: &[u8], now: Duration) {
        self.expire(now);
        let Some(session) = self.sessions.get_mut(&id) else { return };
        session.last_in = now;
        let mut input = std::mem::take(&mut session.input);
        input.extend_from_slice(bytes);
        let mut taken = 0;
        let result = loop {
            match Frame::decode(&input[taken..]) {
                Ok(Some((frame, len))) => {
                    taken += len;
                    if let Err(error) = self.on_frame(id, frame, now) {
                        break Err(error);
                    }
                }
                Ok(None) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        input.drain(..taken);
        if let Some(session) = self.sessions.get_mut(&id) {
            session.input = input;
        }
        if let Err(error) = result {
            self.close_session(id, error);
        }
    }

    /// Some of a chunk has come on one of the session's channels: the peer lives.
    pub fn touch(&mut self, id: u64, now: Duration) {
        if let Some(session) = self.sessions.get_mut(&id) {
            session.last_in = now;
        }
    }

    /// Sessions that have had something to send since they were last asked for.
    pub fn take_unsent(&mut self, into: &mut Vec<u64>) {
        into.append(&mut self.unsent);
    }

    /// Bytes to send on the session's control connection, into an empty buffer.
    pub fn take_output(&mut self, id: u64, into: &mut Vec<u8>) {
        if let Some(session) = self.sessions.get_mut(&id) {
            std::mem::swap(&mut session.output, into);
        }
    }

    /// Ends a session: its flows stop, and conclude once their orders are done.
    pub fn close_session(&mut self, id: u64, error: Error) {
        let Some(session) = self.sessions.remove(&id) else { return };
        let peer = session.established.peer;
        if self.preferred.get(&peer) == Some(&id) {
            self.preferred.remove(&peer);
            if let Some((other, _)) = self.sessions.iter().find(|(_, other)| other.established.peer == peer) {
                self.preferred.insert(peer, *other);
            }
        }
        self.events.push_back(Event::SessionDown(id, error.clone()));
        let flows: Vec<FlowKey> = self.flows.keys().filter(|key| key.0 == id).copied().collect();
        for key in flows {
            if let Some(flow) = self.flows.get_mut(&key) {
                flow.peer_ended = true;
            }
            self.stop_flow(key, error.clone());
        }
    }

    /// The peer's goodbye frames and everything else, in order.
    fn on_frame(&mut self, id: u64, frame: Frame, now: Duration) -> Result<()> {
        match frame {
            Frame::Beat => Ok(()),
            Frame::Begin(begin) => self.on_begin(id, *begin, now),
            Frame::Accept { transfer, source } => self.on_accept(id, transfer, source),
            Frame::End { transfer, outcome } => self.on_end(id, transfer, outcome),
            Frame::Ended { transfer } => {
                if let Some(session) = self.sessions.get_mut(&id) {
                    session.closing.remove(&transfer);
                }
                Ok(())
            }
            Frame::OpenChannels => {
                self.events.push_back(Event::OpenChannels(id));
                Ok(())
            }
            Frame::Goodbye => Err(Error::new(
                Code::PeerLost,
                format!("{} closed the connection in order", self.peer_text(id)),
            )),
        }
    }

    /// Sends a frame on a session that may be gone by now.
    pub(crate) fn send(&mut self, id: u64, frame: &Frame) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        if session.output.is_empty() {
            self.unsent.push(id);
        }
        frame.encode(&mut session.output);
        session.last_out = self.last_tick.max(session.last_out);
        if session.output.len() > MAX_OUTPUT {
            let text = format!("{} does not read its control connection; it was cut off", self.peer_text(id));
            self.close_session(id, Error::new(Code::PeerLost, text));
        }
    }

    /// Asks the peer, who opened the session, for data channels.
    pub fn ask_for_channels(&mut self, id: u64) {
        self.send(id, &Frame::OpenChannels);
    }

    /// Tells every peer that this engine closes. Sessions stay until their connections are cut.
    pub fn goodbye(&mut self) {
        for id in self.sessions() {
            self.send(id, &Frame::Goodbye);
        }
    }

    /// True when nothing that was sent waits for an answer.
    pub fn is_quiet(&self) -> bool {
        self.flows.is_empty() && self.sessions.values().all(|session| session.closing.is_empty())
    }

    /// The peer of a session in words, for errors.
    pub(crate) fn peer_text(&self, id: u64) -> String {
        match self.sessions.get(&id).map(|session| &session.established) {
            Some(session) if session.facts.name.is_empty() => format!("engine {}", session.peer.engine),
            Some(session) => format!("engine {} ({})", session.peer.engine, session.facts.name),
            None => "the peer".to_owned(),
        }
    }

    // ---- grants ----

    /// Gives a grant. Requests that came before it are served now.
    ///
    /// # Errors
    /// `InvalidArgument` for an id that was used before.
    pub fn grant(&mut self, id: GrantId, offer: Offer<R>, now: Duration) -> Result<()> {
        self.timers.insert((offer.expires, Timer::Grant(id)));
        self.grants.insert(id, offer)?;
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

    // ---- time ----

    /// Lets time pass: beats, deaths, deadlines, expiries.
    pub fn tick(&mut self, now: Duration) {
        // After a sleep of this process, what the peers sent meanwhile has not been read yet: nobody is dead for it.
        if now.saturating_sub(self.last_tick) > self.timing.dead_after / 2 {
            self.sessions.values_mut().for_each(|session| session.last_in = now);
        }
        self.last_tick = now;
        self.expire(now);
        while let Some(&(at, timer)) = self.timers.first()
            && at <= now
        {
            self.timers.pop_first();
            match timer {
                Timer::Session(id) => self.session_timer(id, now),
                Timer::Flow(key) => self.flow_timer(key, now),
                Timer::Grant(id) => self.grant_timer(id, now),
            }
        }
    }

    /// Applies expiry before anything that is buffered is looked at.
    pub(crate) fn expire(&mut self, now: Duration) {
        while let Some(&(at, Timer::Grant(id))) = self.timers.first()
            && at <= now
        {
            self.timers.pop_first();
            self.grant_timer(id, now);
        }
    }

    fn grant_timer(&mut self, id: GrantId, now: Duration) {
        match self.grants.expires(id) {
            Some(at) if at <= now => self.end_grant(id, GrantState::Expired),
            Some(at) => drop(self.timers.insert((at, Timer::Grant(id)))),
            None => {}
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
        self.stop_flow(key, error);
    }

    fn session_timer(&mut self, id: u64, now: Duration) {
        let Timing { heartbeat, dead_after } = self.timing;
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let silent = now.saturating_sub(session.last_in);
        if silent >= dead_after {
            let text = format!(
                "nothing was heard from {} for {:.1} s; it is taken for dead",
                self.peer_text(id),
                silent.as_secs_f32()
            );
            return self.close_session(id, Error::new(Code::PeerLost, text));
        }
        let beat_due = session.last_out + heartbeat;
        let idle = session.closing.is_empty() && !self.flows.keys().any(|key| key.0 == id);
        let opener = session.established.opener;
        if self.preferred.get(&session.established.peer) != Some(&id) && idle && opener {
            self.send(id, &Frame::Goodbye);
            let text = "a second connection to the same peer was closed";
            return self.close_session(id, Error::new(Code::PeerLost, text));
        }
        let next = if beat_due <= now {
            session.last_out = now;
            self.send(id, &Frame::Beat);
            now + heartbeat
        } else {
            beat_due
        };
        let death = self.sessions.get(&id).map_or(next, |session| session.last_in + dead_after);
        self.timers.insert((next.min(death), Timer::Session(id)));
    }

    /// The session number of transfers inside the engine, which no peer has.
    pub(crate) fn is_own(key: FlowKey) -> bool {
        key.0 == OWN_SESSION
    }
}
