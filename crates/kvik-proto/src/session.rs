//! Sessions: one control connection to a peer each, its beats and its death.

use crate::FlowKey;
use crate::flow::Flow;
use crate::frame::Frame;
use crate::handshake::{Established, Identity, Join, JoinKind};
use crate::node::{Event, Node, Timer, Timing};
use crate::notify::Notes;
use kvik_core::{Code, EngineId, Error, Result};
use std::collections::{BTreeSet, HashSet, VecDeque};
use std::time::Duration;

/// More channels than this do not join a session.
pub const MAX_CHANNELS: u16 = 64;
/// More transfers of a peer than this are not open at once.
pub(crate) const MAX_FLOWS: usize = 4096;
/// More bytes than this are not held for a peer's open transfers.
pub(crate) const MAX_HELD: usize = 32 << 20;
/// A peer that leaves more than this unread is cut off.
const MAX_OUTPUT: usize = 32 << 20;
/// Where more than this waits to be sent, this side begins nothing new: a whole frame more stays below `MAX_OUTPUT`.
pub(crate) const MAX_UNSENT: usize = 16 << 20;
/// A peer that leaves the ends of more transfers unanswered is cut off.
const MAX_CLOSING: usize = 1 << 16;
/// A session whose data channel has ended waits this long for its peer's last word on the control connection.
pub const LAST_WORD: Duration = Duration::from_millis(500);
/// Buffers that were needed once are not kept beyond this.
const KEPT_INPUT: usize = 64 << 10;

pub(crate) struct Session {
    pub established: Established,
    input: Vec<u8>,
    pub output: Vec<u8>,
    pub last_in: Duration,
    last_out: Duration,
    pub next_transfer: u64,
    /// The peer's latest transfer.
    pub last_begun: u64,
    joined: HashSet<(JoinKind, u16)>,
    /// Transfers with something to send, in turn.
    pub sending: VecDeque<u64>,
    /// Bytes of chunks that its channels have in hand, and whether they are all that the window allows.
    pub in_flight: u64,
    pub full: bool,
    /// There is a one-sided link to the peer, and transfers with something to post on it, in turn.
    pub one_sided: bool,
    pub posting: VecDeque<u64>,
    /// Transfers whose `End` was sent and not yet answered.
    pub closing: BTreeSet<u64>,
    /// Transfers that the peer began and that are open, and bytes held for them.
    pub owned_flows: usize,
    pub held: usize,
    /// Since when another session is preferred and nothing goes on in this one.
    spare_since: Option<Duration>,
    /// This side has said goodbye in it.
    pub leaving: bool,
    /// A data channel has ended, and why; whether in order is not known yet.
    lost: Option<Error>,
    /// Nothing was heard for so long that the peer may be dead.
    pub suspect: bool,
    pub notes: Notes,
}

impl Session {
    fn new(established: Established, now: Duration) -> Session {
        let next_transfer = if established.opener { 2 } else { 3 };
        Session {
            established,
            input: Vec::new(),
            output: Vec::new(),
            last_in: now,
            last_out: now,
            next_transfer,
            last_begun: 0,
            joined: HashSet::new(),
            sending: VecDeque::new(),
            in_flight: 0,
            full: false,
            one_sided: false,
            posting: VecDeque::new(),
            closing: BTreeSet::new(),
            owned_flows: 0,
            held: 0,
            spare_since: None,
            leaving: false,
            lost: None,
            suspect: false,
            notes: Notes::default(),
        }
    }
}

/// A little earlier than `at`, at a time that the beats of other sessions have too: an engine with many peers
/// wakes up for many of them at once.
fn together(at: Duration, heartbeat: Duration) -> Duration {
    let step = (heartbeat / 8).max(Duration::from_nanos(1));
    at - Duration::from_nanos((at.as_nanos() % step.as_nanos()) as u64)
}

impl<R: Clone> Node<R> {
    /// A handshake has ended well: the session begins. Where both sides connected at once, the connection that the
    /// lower id opened is preferred for new transfers, and the other one closes when it is idle.
    pub fn add_session(&mut self, established: Established, now: Duration) {
        let (id, peer) = (established.session, established.peer);
        let replaces = match self.preferred.get(&peer).and_then(|old| self.sessions.get(old)) {
            Some(old) => self.opened_by(&established) <= self.opened_by(&old.established),
            None => true,
        };
        self.sessions.insert(id, Session::new(established, now));
        if replaces {
            self.preferred.insert(peer, id);
        }
        self.timers.insert((now + self.timing.heartbeat, Timer::Session(id)));
    }

    fn opened_by(&self, session: &Established) -> EngineId {
        if session.opener { self.identity.engine } else { session.peer.engine }
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

    /// Lets a further connection into its session, once an index. Who opened the session dials them all: a join that
    /// comes to that side is one of its own, sent back by somebody in between.
    ///
    /// # Errors
    /// `ProtocolError` when the session is not there or was opened here, the proof is not its own, or the index is
    /// taken.
    pub fn join(&mut self, join: &Join, now: Duration) -> Result<()> {
        let refuse = |why: &str| {
            Err(Error::new(Code::ProtocolError, format!("a connection asked to join a session: {why}")))
        };
        let Some(session) = self.sessions.get_mut(&join.session) else {
            return refuse("there is no such session");
        };
        if session.established.opener {
            return refuse("this engine opened that session, and asks itself");
        }
        if !join.is_signed_with(&session.established.key) {
            return refuse("its proof is not of that session");
        }
        if join.index >= MAX_CHANNELS || !session.joined.insert((join.kind, join.index)) {
            return refuse("its channel number is taken");
        }
        self.heard(join.session, now);
        Ok(())
    }

    /// Bytes have come on the session's control connection.
    pub fn receive(&mut self, id: u64, bytes: &[u8], now: Duration) {
        self.expire(now);
        self.heard(id, now);
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let mut input = std::mem::take(&mut session.input);
        input.extend_from_slice(bytes);
        let mut taken = 0;
        let result = loop {
            if !self.sessions.contains_key(&id) {
                return;
            }
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
            if input.len() <= KEPT_INPUT {
                input.shrink_to(KEPT_INPUT);
            }
            session.input = input;
        }
        if let Err(error) = result {
            self.close_session(id, error);
        }
    }

    /// Some of a chunk has come on one of the session's channels: the peer lives.
    pub fn touch(&mut self, id: u64, now: Duration) {
        self.heard(id, now);
    }

    /// Sessions that have had something to send since they were last asked for.
    pub fn take_unsent(&mut self, into: &mut Vec<u64>) {
        into.append(&mut self.unsent);
    }

    /// Bytes to send on the session's control connection. An empty buffer is taken in exchange.
    pub fn take_output(&mut self, id: u64, into: &mut Vec<u8>) {
        if let Some(session) = self.sessions.get_mut(&id) {
            match into.is_empty() {
                true => std::mem::swap(&mut session.output, into),
                false => into.append(&mut session.output),
            }
        }
    }

    /// Bytes that are held here because of a session: what its peer sent and asked for, and what it leaves unread.
    pub fn held_for(&self, id: u64) -> u64 {
        self.sessions.get(&id).map_or(0, |session| {
            let flows = session.owned_flows * size_of::<Flow<R>>() + session.held;
            let closing = session.closing.len() * 4 * size_of::<u64>();
            let buffers = session.input.capacity() + session.output.capacity();
            (buffers + flows + closing + session.notes.held()) as u64
        })
    }

    /// A data channel of a session has ended. A peer that closes in order says so on the control connection, and what
    /// goes on another connection may come later: the session's transfers end at once, new ones go in another session, and
    /// this one ends with what its peer says within [`LAST_WORD`], or else as lost. An error that is no end of a connection ends it at once.
    pub fn channel_lost(&mut self, id: u64, error: Error, now: Duration) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        if error.code != Code::PeerLost {
            return self.close_session(id, error);
        }
        if session.lost.is_none() {
            session.lost = Some(error.clone());
            let peer = session.established.peer;
            self.prefer_another(id, &peer);
            self.timers.insert((now + LAST_WORD, Timer::LastWord(id)));
        }
        let flows: Vec<FlowKey> = self.flows.range((id, 0)..=(id, u64::MAX)).map(|(key, _)| *key).collect();
        flows.into_iter().for_each(|key| self.stop_flow(key, error.clone()));
    }

    /// No last word has come.
    pub(crate) fn last_word_timer(&mut self, id: u64) {
        let lost = self.sessions.get_mut(&id).and_then(|session| session.lost.take());
        if let Some(error) = lost {
            self.close_session(id, error);
        }
    }

    /// New transfers with the peer go in another session than this one, if there is one.
    fn prefer_another(&mut self, id: u64, peer: &Identity) {
        if self.preferred.get(peer) != Some(&id) {
            return;
        }
        self.preferred.remove(peer);
        let usable = self.sessions.iter().filter(|(other, session)| {
            **other != id && session.established.peer == *peer && !session.leaving && session.lost.is_none()
        });
        if let Some((next, _)) = usable.min_by_key(|(_, other)| self.opened_by(&other.established)) {
            self.preferred.insert(*peer, *next);
        }
    }

    /// Ends a session: its flows stop, and conclude once their orders are done.
    pub fn close_session(&mut self, id: u64, error: Error) {
        let Some(session) = self.sessions.remove(&id) else { return };
        let peer = session.established.peer;
        self.prefer_another(id, &peer);
        self.events.push_back(Event::SessionDown(id, error.clone()));
        let flows: Vec<FlowKey> = self.flows.range((id, 0)..=(id, u64::MAX)).map(|(key, _)| *key).collect();
        for key in flows {
            if let Some(flow) = self.flows.get_mut(&key) {
                flow.peer_ended = true;
            }
            self.stop_flow(key, error.clone());
        }
        self.lose_notes(id, session.notes, &error);
        self.ask_for_fence(id);
    }

    /// Deals with the next frame.
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
                self.on_answered(id, transfer)
            }
            Frame::OpenChannels => {
                self.events.push_back(Event::OpenChannels(id));
                Ok(())
            }
            Frame::Notify { number, payload } => self.on_notify(id, number, payload),
            Frame::Noted { upto } => self.on_noted(id, upto),
            Frame::Nics(nics) => self.on_nics(id, nics),
            Frame::Reach(call) => self.on_one_sided(id, Event::Reach(id, call)),
            Frame::Reached(answer) => self.on_one_sided(id, Event::Reached(id, answer)),
            Frame::Check { transfer, at, sums } => self.on_check(id, transfer, at, sums),
            Frame::Checked { transfer, at } => self.on_checked(id, transfer, at),
            Frame::Goodbye => {
                self.events.push_back(Event::Goodbye(id));
                Err(Error::new(
                    Code::PeerLost,
                    format!("{} closed the connection in order", self.peer_text(id)),
                ))
            }
        }
    }

    /// Sends a frame on a session that may be gone by now.
    pub(crate) fn send(&mut self, id: u64, frame: &Frame) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        if session.output.is_empty() {
            self.unsent.push(id);
        }
        frame.encode(&mut session.output);
        session.last_out = self.clock;
        if session.output.len() > MAX_OUTPUT {
            let text = format!("{} does not read its control connection; it was cut off", self.peer_text(id));
            self.close_session(id, Error::new(Code::PeerLost, text));
        }
    }

    /// Tells the peer that this side takes no further part in a transfer; the peer answers.
    pub(crate) fn send_end(&mut self, key: FlowKey, outcome: Result<()>) {
        let Some(session) = self.sessions.get_mut(&key.0) else { return };
        session.closing.insert(key.1);
        if session.closing.len() > MAX_CLOSING {
            let text = format!(
                "{} does not answer the ends of its transfers; it was cut off",
                self.peer_text(key.0)
            );
            return self.close_session(key.0, Error::new(Code::ProtocolError, text));
        }
        self.send(key.0, &Frame::End { transfer: key.1, outcome });
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
        self.flows.is_empty()
            && self.parked.is_empty()
            && self.sessions.values().all(|session| session.closing.is_empty() && session.notes.is_quiet())
    }

    /// The peer of a session in words, for errors.
    pub(crate) fn peer_text(&self, id: u64) -> String {
        match self.sessions.get(&id).map(|session| &session.established) {
            Some(session) if session.facts.name.is_empty() => format!("engine {}", session.peer.engine),
            Some(session) => format!("engine {} ({})", session.peer.engine, session.facts.name),
            None => "the peer".to_owned(),
        }
    }

    /// A session's timer, which was due `at` and is looked at `now`.
    pub(crate) fn session_timer(&mut self, id: u64, at: Duration, now: Duration) {
        let Timing { heartbeat, dead_after } = self.timing;
        let Some(session) = self.sessions.get_mut(&id) else { return };
        // This process slept: what the peer sent meanwhile has not been read yet, so it is not dead for that.
        if now.saturating_sub(at) > dead_after / 2 {
            session.last_in = now;
        }
        let silent = now.saturating_sub(session.last_in);
        if silent >= dead_after {
            let text = format!(
                "nothing was heard from {} for {:.1} s; it is taken for dead",
                self.peer_text(id),
                silent.as_secs_f32()
            );
            return self.close_session(id, Error::new(Code::PeerLost, text));
        }
        let half = session.last_in + dead_after / 2;
        let soonest = if silent >= dead_after / 2 { session.last_in + dead_after } else { half };
        if silent >= dead_after / 2 && !session.suspect {
            session.suspect = true;
            self.events.push_back(Event::Silent(id));
        }
        let beat_due = together(session.last_out + heartbeat, heartbeat);
        let next = if beat_due <= now {
            if now.saturating_sub(beat_due) > heartbeat / 2 {
                self.late_beats += 1;
            }
            self.send(id, &Frame::Beat);
            together(now + heartbeat, heartbeat)
        } else {
            beat_due
        };
        self.leave_spare(id, now);
        if self.sessions.contains_key(&id) {
            self.timers.insert((next.min(soonest), Timer::Session(id)));
        }
    }

    /// Closes a second connection to the same peer, by the side that opened it, once nothing has gone on in it for
    /// so long that the peer must know by now which one is preferred: no request can cross the goodbye.
    fn leave_spare(&mut self, id: u64, now: Duration) {
        let Some(session) = self.sessions.get(&id) else { return };
        let preferred = self.preferred.get(&session.established.peer) == Some(&id);
        let busy =
            || !session.closing.is_empty() || self.flows.range((id, 0)..=(id, u64::MAX)).next().is_some();
        let spare_since = match preferred || !session.established.opener || busy() {
            true => None,
            false => Some(session.spare_since.unwrap_or(now)),
        };
        let (leaving, over) =
            (session.leaving, spare_since.is_some_and(|since| now >= since + self.timing.dead_after));
        if let Some(session) = self.sessions.get_mut(&id) {
            session.spare_since = spare_since;
            session.leaving |= over;
        }
        match (over, leaving) {
            (true, false) => self.send(id, &Frame::Goodbye),
            // The goodbye has had its time to go out.
            (true, true) => {
                let text = "a second connection to the same peer was closed";
                self.close_session(id, Error::new(Code::PeerLost, text));
            }
            (false, _) => {}
        }
    }
}
