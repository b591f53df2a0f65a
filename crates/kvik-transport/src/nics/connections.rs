//! A NIC's connections to peers: how they open, mend and close.
//!
//! A connection leads to one NIC of the peer. Some kinds of NIC only need the other's address; others ask first, over
//! the control connection. When an operation fails, the peer is asked in any case: its answer means that nothing which
//! was posted before can land there any more, so what failed may be posted again, by this NIC or by another one.

use super::device::{CancelScope, Disconnected, RmaDevice};
use super::in_flight::PATIENCE;
use super::peers::{CALL, ConnState, gone};
use super::worker::Worker;
use kvik_core::{Code, Error, Result};
use kvik_proto::{NicAnswer, NicCall, NicCallKind, OWN_SESSION};

impl<C: RmaDevice> Worker<C> {
    /// The connection to the session's peer, and which of its NICs it leads to. None: it is being opened.
    pub(super) fn conn(&mut self, session: u64) -> Result<Option<(C::Conn, usize)>> {
        if self.peers.is_degraded(session) {
            return Ok(None);
        }
        if let Some(why) = self.peers.down().cloned() {
            // Nothing of its work requests was posted, or their connection has been cut since.
            self.back_off(session, why);
            return Ok(None);
        }
        if let Some(peer) = self.peers.get(session) {
            match peer.state() {
                ConnState::Open(conn) => return Ok(Some((conn, peer.nic()))),
                ConnState::Requested(_) => return Ok(None),
                ConnState::Unreachable(_) => return Err(peer.why()),
                ConnState::Closed => {}
            }
        }
        let nics = self.services.rma.nics(session).ok_or_else(gone)?.addresses;
        let peer = self.peers.of(session);
        let address = peer.choose(&nics).ok_or_else(gone)?;
        if let Some(conn) = self.device.reach(session, address)? {
            let nic = peer.nic();
            self.peers.open(session, conn, None);
            return Ok(Some((conn, nic)));
        }
        self.request_connection(session)?;
        Ok(None)
    }

    /// Asks the session's peer for a connection to its NIC: also where this one has no end for it, since what was posted
    /// before may be posted again by nobody until the peer has cut its own.
    fn request_connection(&mut self, session: u64) -> Result<()> {
        if self.services.rma.nics(session).is_none() {
            return Err(gone());
        }
        // The address by which the connection was: if the peer has another one by now, that connection is cut already.
        let peer = self.peers.of(session);
        let told = peer.request(self.device.call(session, peer.address()));
        let (from, to) = (self.number as u8, peer.nic() as u8);
        self.peers.degrade(session);
        self.services.rma.call(session, NicCall { from, to, kind: NicCallKind::Connect, address: told });
        Ok(())
    }

    /// Looks after the sessions whose peers cannot be reached as they were.
    pub(super) fn reconnect(&mut self) {
        for session in self.peers.open_again() {
            self.requests.turns().wait(session);
        }
        for session in self.peers.degraded() {
            if let Err(error) = self.reconnect_one(session) {
                self.give_up(session, &error);
            }
        }
    }

    fn reconnect_one(&mut self, session: u64) -> Result<()> {
        let (in_flight, down) = (self.in_flight(session), self.peers.down().is_some());
        let peer = self.peers.of(session);
        match peer.state() {
            ConnState::Requested(since) if since.elapsed() < CALL => return Ok(()),
            ConnState::Requested(_) => {
                let text = format!("the peer did not say within {CALL:?} that its NIC can be reached");
                return Err(Error::new(Code::PeerLost, text));
            }
            ConnState::Unreachable(_) => {
                self.peers.mended(session);
                return Ok(());
            }
            ConnState::Open(_) | ConnState::Closed => {}
        }
        if in_flight > 0 {
            if down || peer.failing_for() > PATIENCE {
                self.cut(session);
            }
            return Ok(());
        }
        self.close_conn(session);
        self.request_connection(session)
    }

    /// A peer that does not answer cannot vouch for what was posted to it.
    fn give_up(&mut self, session: u64, why: &Error) {
        log::warn!("NIC {} ({}) cannot reach a peer: {}", self.number, self.stats.name(), why.text);
        self.peers.mended(session);
        if self.in_flight(session) > 0 {
            self.cut(session);
        }
        self.close_conn(session);
        self.warm_up_ended(session, Err(why));
        self.reassign(session, false, why);
    }

    /// The peer has answered: whatever was posted before cannot land any more.
    pub(super) fn answered(&mut self, session: u64, answer: NicAnswer) {
        if answer.kind == NicCallKind::ProbePage {
            return self.on_probe_page(session, answer);
        }
        // One that the peer has cut for others says nothing of the NICs, or of what is between them.
        let failed = self.peers.has_failed(session) && !answer.moved;
        let Some(peer) = self.peers.get(session) else { return };
        if !peer.was_asked_for(usize::from(answer.to)) {
            return log::debug!("a peer answered for a NIC that it was not asked for");
        }
        if failed {
            peer.failed();
        }
        let nics = self.services.rma.nics(session).map_or(0, |nics| nics.addresses.len());
        let (tried, passes_on, no_end) = (peer.was_tried(nics), peer.is_to_pass_on(), peer.why.clone());
        let here = self.peers.down().cloned().or(no_end);
        let others = here.is_none() && nics > 1;
        if others && passes_on && !tried && answer.outcome.is_ok() {
            // It answers, and moves nothing. What was posted to it cannot land any more, and may go to the next one.
            self.close_conn(session);
            self.peers.of(session).next_nic(nics);
            self.peers.mended(session);
            return self.requests.resume(session);
        }
        let opened = here.map_or(answer.outcome, Err).and_then(|told| match tried {
            // Each of its NICs was tried, and the first one twice.
            true => Err(Error::new(Code::PeerLost, "operations to each of its NICs failed")),
            false => self.device.connect(session, &told).map(|conn| (conn, told)),
        });
        self.peers.mended(session);
        let why = match opened {
            Ok((conn, told)) => {
                self.peers.open(session, conn, Some(told));
                return self.requests.resume(session);
            }
            Err(error) => error,
        };
        self.close_conn(session);
        let peer = self.peers.of(session);
        peer.failed();
        peer.next_nic(nics);
        if others && !peer.was_tried(nics) {
            // The next one is tried with the next work request.
            return self.requests.resume(session);
        }
        self.back_off(session, why);
    }

    /// Leaves a session to other NICs for a while.
    fn back_off(&mut self, session: u64, why: Error) {
        let cause = self.requests.doubt(session);
        let cause = cause.map_or_else(String::new, |cause| format!(" (what failed first: {})", cause.text));
        let text =
            format!("NIC {} ({}) cannot reach the peer: {}{cause}", self.number, self.stats.name(), why.text);
        let why = Error::new(Code::PeerLost, text);
        let others = self.peers.back_off(session, &why);
        log::warn!("{}; {}", why.text, if others { "others take its work" } else { "nor can any other" });
        self.warm_up_ended(session, Err(&why));
        self.reassign(session, others, &why);
    }

    /// The session's peer has told of addresses. Where this NIC's connection was by one that is no more, that
    /// connection is cut.
    pub(super) fn find(&mut self, session: u64) {
        let told = self.services.rma.nics(session);
        let Some(peer) = self.peers.get(session) else { return };
        let address = told.as_ref().and_then(|nics| nics.addresses.get(peer.nic()));
        let same = address.is_some_and(|address| address == peer.address());
        let asked = matches!(peer.state(), ConnState::Requested(_));
        // What is in flight to the old address ends by itself, with an error, and the peer is asked.
        if !same && !asked && self.in_flight(session) == 0 {
            self.close_conn(session);
            self.peers.mended(session);
            self.requests.resume(session);
        }
    }

    /// A NIC of the session's peer wants a connection to this one.
    pub(super) fn called(&mut self, session: u64, call: NicCall) {
        if call.kind == NicCallKind::ProbePage {
            return self.answer_probe_page(session, call);
        }
        // The session's end may have overtaken it: then nobody would ever cut what is opened now.
        let Some(theirs) = self.services.rma.nics(session) else { return };
        let cut = match self.device.disconnect_peer(session, call.from, &call.address) {
            Ok(cut) => cut,
            // No answer: then the peer cannot vouch for what it has posted, and the session ends.
            Err(error) => return log::error!("NIC {} cannot cut off a peer: {error}", self.number),
        };
        if cut == Disconnected::All {
            self.tell_address();
        }
        let has = theirs.addresses.len();
        let outcome = match &self.broken {
            // Its thread does not look after it any more: what comes by it may never end.
            Some(why) => Err(why.clone()),
            None if usize::from(call.from) < has => self.device.admit(session, call.from, &call.address),
            // One connection for each NIC that the peer has told of: what they take of this one is bounded.
            None => Err(Error::new(
                Code::TransportUnavailable,
                format!("the engine that asks has told of {has} NIC(s), and its number {} asks", call.from),
            )),
        };
        let (NicCall { from, to, kind, .. }, moved) = (call, cut == Disconnected::Before);
        self.services.rma.answer(session, NicAnswer { from, to, kind, moved, outcome });
    }

    /// All peers must take another address from now on.
    pub(super) fn tell_address(&mut self) {
        if self.broken.is_some() {
            return;
        }
        match self.device.address() {
            Ok(address) => self.services.rma.moved(self.told.moved(self.number, address)),
            // Whoever wants a connection asks for it, and it is tried again.
            Err(error) => log::error!("NIC {} cannot be reached by peers: {error}", self.number),
        }
    }

    /// Stops what was posted to a session's peer.
    pub(super) fn cut(&mut self, session: u64) {
        let text = "operations of the NIC did not end when they should have, and were stopped";
        let stopped = Error::new(Code::PeerLost, text);
        let all = match self.device.cancel(session) {
            Ok(cut) => cut == CancelScope::All,
            // It goes on: nobody is let wait for its end, and its pages are nobody's.
            Err(error) => {
                log::debug!("operations of NIC {} cannot be stopped: {error}", self.number);
                return self.requests.give_up(session, &*self.services.work, &error);
            }
        };
        let theirs = |other| all || other == session;
        for stopped in self.requests.stop(theirs, &stopped) {
            // A connection that goes with another peer's has not failed.
            if stopped == session { self.peers.fail(stopped) } else { self.peers.degrade(stopped) }
        }
        self.probes.stop(theirs);
        self.peers.cut(theirs);
    }

    /// Closes the connection to a session's peer; nothing is in flight on it.
    pub(super) fn close_conn(&mut self, session: u64) {
        if let Some(conn) = self.peers.close(session) {
            self.device.leave(session, conn);
        }
    }

    /// The NIC is of no use any more: nothing can be learnt of its operations, say.
    pub(super) fn device_failed(&mut self, error: Error) {
        log::error!("NIC {} ({}) has failed for good: {error}", self.number, self.stats.name());
        self.broken = Some(error);
        for session in self.peers.sessions() {
            if self.in_flight(session) > 0 {
                self.cut(session);
            }
        }
        // What peers have in flight may need turns that the NIC does not have any more. Where all of them share what they
        // reach, it ends, and they ask: no session is named so.
        if let Err(error) = self.device.fence(OWN_SESSION) {
            log::error!("peers of NIC {} ({}) may wait for it: {error}", self.number, self.stats.name());
        }
    }
}
