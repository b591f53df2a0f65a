//! A session's control connection: the bytes of both directions, beats, and how its end is noted.
//!
//! A connection that must be cut is gone at once for everybody: nothing is sent on it any more, and nobody waits for an
//! answer. What follows from that (flows stop, notifications are lost) is done when the call in which it happened is
//! over, so that no part of a session changes under another one.

use crate::common::{Call, Effect};
use crate::event::Event;
use crate::frame::Frame;
use crate::handshake::{Established, Identity, Join, JoinKind};
use crate::nics::Nics;
use crate::sync::Ordering;
use kvik_core::{Code, EngineId, Error, Result};
use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use std::time::Duration;

/// More channels than this do not join a session.
pub const MAX_CHANNELS: u16 = 64;
/// A peer that leaves more than this unread is cut off.
const MAX_OUTPUT: usize = 32 << 20;
/// Where more than this waits to be sent, this side begins nothing new: a whole frame more stays below `MAX_OUTPUT`.
const MAX_UNSENT: usize = 16 << 20;
/// A peer that leaves the ends of more transfers unanswered is cut off.
const MAX_CLOSING: usize = 1 << 16;
/// A session whose data channel has ended waits this long for its peer's last word on the control connection.
pub const LAST_WORD: Duration = Duration::from_millis(500);
/// Buffers that were needed once are not kept beyond this.
const KEPT_INPUT: usize = 64 << 10;

/// What a connection does when its time has come.
pub(crate) enum Beat {
    /// It goes on.
    On,
    /// The peer is dead, or its last word has not come.
    Dead(Error),
    /// The connection is one too many, and its goodbye has had its time to go out.
    Spare,
}

pub(crate) struct Connection {
    established: Arc<Established>,
    input: Vec<u8>,
    output: Vec<u8>,
    last_in: Duration,
    last_out: Duration,
    joined: HashSet<(JoinKind, u16)>,
    /// Transfers whose `End` was sent and not yet answered.
    closing: BTreeSet<u64>,
    /// When beats, deaths and spare connections are looked at next.
    due: Duration,
    /// New transfers with the peer go over it.
    preferred: bool,
    /// Since when another session is preferred and nothing goes on in this one.
    spare_since: Option<Duration>,
    /// This side has said goodbye in it.
    leaving: bool,
    /// A data channel has ended, and why; whether in order is not known before this time.
    lost: Option<(Error, Duration)>,
    /// Nothing was heard for so long that the peer may be dead.
    suspect: bool,
}

/// A little earlier than `at`, at a time that the beats of other sessions have too: an engine with many peers
/// wakes up for many of them at once.
fn together(at: Duration, heartbeat: Duration) -> Duration {
    let step = (heartbeat / 8).max(Duration::from_nanos(1));
    at - Duration::from_nanos((at.as_nanos() % step.as_nanos()) as u64)
}

impl Connection {
    pub fn new(established: Established, heartbeat: Duration, now: Duration) -> Connection {
        Connection {
            established: Arc::new(established),
            input: Vec::new(),
            output: Vec::new(),
            last_in: now,
            last_out: now,
            joined: HashSet::new(),
            closing: BTreeSet::new(),
            due: now + heartbeat,
            preferred: false,
            spare_since: None,
            leaving: false,
            lost: None,
            suspect: false,
        }
    }

    pub fn established(&self) -> &Arc<Established> {
        &self.established
    }

    pub fn peer(&self) -> Identity {
        self.established.peer
    }

    /// The peer in words, for errors.
    pub fn peer_text(&self) -> String {
        match self.established.facts.name.as_str() {
            "" => format!("engine {}", self.established.peer.engine),
            name => format!("engine {} ({name})", self.established.peer.engine),
        }
    }

    /// Who opened it, seen by an engine.
    pub fn opened_by(established: &Established, own: EngineId) -> EngineId {
        if established.opener { own } else { established.peer.engine }
    }

    pub fn set_preferred(&mut self, preferred: bool) {
        self.preferred = preferred;
    }

    pub fn is_leaving(&self) -> bool {
        self.leaving
    }

    /// Whether new transfers may go over it.
    pub fn stays(&self) -> bool {
        !self.leaving && self.lost.is_none()
    }

    /// A data channel has ended. True when it is the first one.
    pub fn lose_channel(&mut self, error: Error, now: Duration) -> bool {
        let first = self.lost.is_none();
        self.lost.get_or_insert((error, now + LAST_WORD));
        first
    }

    pub fn is_suspect(&self) -> bool {
        self.suspect
    }

    /// When something was heard last.
    pub fn last_in(&self) -> Duration {
        self.last_in
    }

    pub fn due(&self) -> Duration {
        self.lost.as_ref().map_or(self.due, |(_, until)| self.due.min(*until))
    }

    /// Something has come from the peer: it lives. True when that was in doubt.
    pub fn heard(&mut self, now: Duration) -> bool {
        self.last_in = now;
        std::mem::take(&mut self.suspect)
    }

    /// Lets a further connection join, once an index. Who opened the session dials them all: a join that comes to that
    /// side is one of its own, sent back by somebody in between.
    pub fn join(&mut self, join: &Join) -> Result<(), &'static str> {
        if self.established.opener {
            return Err("this engine opened that session, and asks itself");
        }
        if !join.is_signed_with(&self.established.key) {
            return Err("its proof is not of that session");
        }
        if join.index >= MAX_CHANNELS || !self.joined.insert((join.kind, join.index)) {
            return Err("its channel number is taken");
        }
        Ok(())
    }

    // ---- bytes ----

    /// What has come and was not read, with this.
    pub fn take_input(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut input = std::mem::take(&mut self.input);
        input.extend_from_slice(bytes);
        input
    }

    /// What of it is no whole frame yet.
    pub fn keep_input(&mut self, mut input: Vec<u8>) {
        if input.len() <= KEPT_INPUT {
            input.shrink_to(KEPT_INPUT);
        }
        self.input = input;
    }

    /// Bytes to send. An empty buffer is taken in exchange.
    pub fn take_output(&mut self, into: &mut Vec<u8>) {
        match into.is_empty() {
            true => std::mem::swap(&mut self.output, into),
            false => into.append(&mut self.output),
        }
    }

    /// Whether so much waits to be sent that nothing new is begun.
    pub fn is_full(&self) -> bool {
        self.output.len() > MAX_UNSENT
    }

    /// Whether all that was ended here was answered.
    pub fn is_quiet(&self) -> bool {
        self.closing.is_empty()
    }

    /// The peer has answered the end of a transfer.
    pub fn answered(&mut self, transfer: u64) {
        self.closing.remove(&transfer);
    }

    /// Bytes that are held because of the peer.
    pub fn held(&self) -> usize {
        self.input.capacity() + self.output.capacity() + self.closing.len() * 4 * size_of::<u64>()
    }

    // ---- NICs ----

    pub fn has_one_sided(&self) -> bool {
        self.established.one_sided
    }

    /// The peer's NICs are reached at other addresses now.
    pub fn move_nics(&mut self, nics: Nics) -> Result<()> {
        let known = &self.established.facts.nics;
        if !self.has_one_sided() || known.provider != nics.provider {
            let text = "the peer told of NICs that this engine does not use";
            return Err(Error::new(Code::ProtocolError, text));
        }
        Arc::make_mut(&mut self.established).facts.nics = nics;
        Ok(())
    }
}

/// What a part of a session reaches beside itself: the session's connection, and what all sessions share.
pub(crate) struct Context<'a, R> {
    session: u64,
    connection: &'a mut Option<Connection>,
    /// Why the connection was cut, until the session has drawn the consequences.
    cut: &'a mut Option<Error>,
    call: Call<'a, R>,
}

impl<'a, R: Clone> Context<'a, R> {
    pub fn new(
        session: u64,
        connection: &'a mut Option<Connection>,
        cut: &'a mut Option<Error>,
        call: Call<'a, R>,
    ) -> Context<'a, R> {
        Context { session, connection, cut, call }
    }

    pub fn session(&self) -> u64 {
        self.session
    }

    /// What all sessions share.
    pub fn call(&mut self) -> &mut Call<'a, R> {
        &mut self.call
    }

    pub fn clock(&self) -> Duration {
        self.call.clock()
    }

    pub fn tell(&mut self, event: Event) {
        self.call.tell(event);
    }

    /// The connection, unless it is gone.
    pub fn connection(&mut self) -> Option<&mut Connection> {
        self.connection.as_mut()
    }

    pub fn is_live(&self) -> bool {
        self.connection.is_some()
    }

    pub fn has_one_sided(&self) -> bool {
        self.connection.as_ref().is_some_and(Connection::has_one_sided)
    }

    pub fn reader(&self) -> Option<EngineId> {
        self.connection.as_ref().map(|connection| connection.peer().engine)
    }

    /// The peer in words, for errors.
    pub fn peer_text(&self) -> String {
        self.connection.as_ref().map_or_else(|| "the peer".to_owned(), Connection::peer_text)
    }

    /// Sends a frame on a connection that may be gone by now.
    pub fn send(&mut self, frame: &Frame) {
        let Some(connection) = self.connection.as_mut() else { return };
        self.call.note_unsent(self.session);
        frame.encode(&mut connection.output);
        connection.last_out = self.call.clock();
        if connection.output.len() > MAX_OUTPUT {
            let text = format!("{} does not read its control connection; it was cut off", self.peer_text());
            self.cut(Error::new(Code::PeerLost, text));
        }
    }

    /// Tells the peer that this side takes no further part in a transfer; the peer answers.
    pub fn send_end(&mut self, transfer: u64, outcome: Result<()>) {
        let Some(connection) = self.connection.as_mut() else { return };
        connection.closing.insert(transfer);
        if connection.closing.len() > MAX_CLOSING {
            let text = format!(
                "{} does not answer the ends of its transfers; it was cut off",
                connection.peer_text()
            );
            return self.cut(Error::new(Code::ProtocolError, text));
        }
        self.send(&Frame::End { transfer, outcome });
    }

    /// The session ends: nothing is sent to its peer any more.
    pub fn cut(&mut self, error: Error) {
        let Some(connection) = self.connection.take() else { return };
        self.call.later(Effect::Avoid(self.session, connection.peer()));
        self.call.tell(Event::SessionDown(self.session, error.clone()));
        *self.cut = Some(error);
    }

    /// A data channel of the session has ended, as seen here or by the peer: new transfers go in another session.
    pub fn lose_channel(&mut self, error: Error, now: Duration) {
        let session = self.session;
        let Some(connection) = self.connection.as_mut() else { return };
        let peer = connection.peer();
        if connection.lose_channel(error, now) {
            self.call.later(Effect::Avoid(session, peer));
        }
    }

    /// Looks after the connection, whose time has come. `busy`: something goes on in it.
    pub fn beat(&mut self, now: Duration, busy: bool) -> Beat {
        let (heartbeat, dead_after) = (self.call.timing().heartbeat, self.call.timing().dead_after);
        let session = self.session;
        let Some(connection) = self.connection.as_mut() else { return Beat::On };
        if let Some((error, _)) = connection.lost.take_if(|(_, until)| *until <= now) {
            return Beat::Dead(error);
        }
        // This process slept: what the peer sent meanwhile has not been read yet, so it is not dead for that.
        if now.saturating_sub(connection.due) > dead_after / 2 {
            connection.last_in = now;
        }
        let last_in = connection.last_in;
        let silent = now.saturating_sub(last_in);
        if silent >= dead_after {
            let text = format!(
                "nothing was heard from {} for {:.1} s; it is taken for dead",
                connection.peer_text(),
                silent.as_secs_f32()
            );
            return Beat::Dead(Error::new(Code::PeerLost, text));
        }
        let suspect = silent >= dead_after / 2;
        let soonest = if suspect { last_in + dead_after } else { last_in + dead_after / 2 };
        if suspect && !std::mem::replace(&mut connection.suspect, true) {
            self.call.tell(Event::Silent(session));
        }
        let beat_due = together(connection.last_out + heartbeat, heartbeat);
        let next = if beat_due <= now {
            if now.saturating_sub(beat_due) > heartbeat / 2 {
                self.call.common.counts.late_beats.fetch_add(1, Ordering::Relaxed);
            }
            self.send(&Frame::Beat);
            together(now + heartbeat, heartbeat)
        } else {
            beat_due
        };
        let spare = self.leave_spare(now, busy);
        if let Some(connection) = self.connection.as_mut() {
            connection.due = next.min(soonest);
        }
        spare
    }

    /// Closes a second connection to the same peer, by the side that opened it, once nothing has gone on in it for
    /// so long that the peer must know by now which one is preferred: no request can cross the goodbye.
    fn leave_spare(&mut self, now: Duration, busy: bool) -> Beat {
        let dead_after = self.call.timing().dead_after;
        let Some(connection) = self.connection.as_mut() else { return Beat::On };
        let needed =
            connection.preferred || !connection.established.opener || busy || !connection.closing.is_empty();
        connection.spare_since = (!needed).then(|| connection.spare_since.unwrap_or(now));
        let over = connection.spare_since.is_some_and(|since| now >= since + dead_after);
        let left = connection.leaving;
        connection.leaving |= over;
        match (over, left) {
            (true, false) => {
                self.call.tell(Event::Left(self.session));
                self.send(&Frame::Goodbye);
            }
            (true, true) => return Beat::Spare,
            (false, _) => {}
        }
        Beat::On
    }
}
