//! A NIC's connections to peers: how they open, mend and close.
//!
//! A connection leads to one NIC of the peer. Some kinds of NIC only need the other's address; others ask first, over
//! the control connection. When an operation fails, the peer is asked in any case: its answer means that nothing which
//! was posted before can land there any more, so what failed may be posted again, by this NIC or by another one.

use super::device::{CancelScope, RmaDevice};
use super::posting::PATIENCE;
use super::stats::NicStats;
use super::worker::Worker;
use crate::Services;
use kvik_core::{Code, Error, Result};
use kvik_proto::{NicAnswer, NicCall, NicCallKind};
use std::time::{Duration, Instant};

/// How long a peer may take to answer.
pub(super) const CALL: Duration = Duration::from_secs(2);
/// How long a NIC that cannot reach a peer leaves it to others, at first and at most.
const BACKOFF: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(8)];

/// A session's peer.
pub(super) struct Peer<W> {
    /// Which of its NICs this one talks to.
    nic: usize,
    /// The address of that one by which the connection was opened, or asked for.
    address: Vec<u8>,
    state: ConnState<W>,
    /// Connections that failed since something last went through.
    failures: usize,
    backoff: Duration,
    /// Something went through since the connection opened.
    warm: bool,
    /// When operations were first seen to fail.
    since: Option<Instant>,
    /// Why it cannot be reached.
    why: Option<Error>,
}

#[derive(Clone, Copy)]
enum ConnState<W> {
    /// It was not needed yet, or must be opened anew.
    Closed,
    /// The peer was asked.
    Requested(Instant),
    Open(W),
    /// Others may try until then.
    Unreachable(Instant),
}

impl<W> Peer<W> {
    /// An operation went through.
    pub fn works(&mut self) {
        (self.failures, self.backoff, self.warm) = (0, BACKOFF[0], true);
    }

    /// The number of the peer's NIC.
    pub fn nic(&self) -> usize {
        self.nic
    }

    /// Whether something went over the connection as it is.
    pub fn is_warm(&self) -> bool {
        self.warm && matches!(self.state, ConnState::Open(_))
    }

    fn open(&mut self, conn: W, stats: &NicStats) {
        (self.state, self.warm) = (ConnState::Open(conn), false);
        stats.connection_opened();
    }
}

fn gone() -> Error {
    Error::new(Code::PeerLost, "the session has ended")
}

impl<C: RmaDevice> Worker<C> {
    pub(super) fn peer(&mut self, session: u64) -> &mut Peer<C::Conn> {
        let nic = self.number;
        let new = || Peer {
            nic,
            address: Vec::new(),
            state: ConnState::Closed,
            failures: 0,
            backoff: BACKOFF[0],
            warm: false,
            since: None,
            why: None,
        };
        self.peers.entry(session).or_insert_with(new)
    }

    /// Whether to take work requests of a session: not while others can do better.
    pub(super) fn may_take(&mut self, session: u64) -> bool {
        match self.peers.get(&session).map(|peer| &peer.state) {
            _ if self.down.is_some() => !self.unreachable.mark(session, self.number),
            Some(ConnState::Unreachable(_)) => !self.unreachable.mark(session, self.number),
            _ => true,
        }
    }

    /// The connection to the session's peer, and which of its NICs it leads to. None: it is being opened.
    pub(super) fn conn(&mut self, services: &Services, session: u64) -> Result<Option<(C::Conn, usize)>> {
        if self.degraded.contains(&session) {
            return Ok(None);
        }
        if let Some(why) = self.down.clone() {
            // Nothing of its work requests was posted, or their connection has been cut since.
            self.back_off(services, session, why);
            return Ok(None);
        }
        if !self.peers.contains_key(&session) && services.rma.nics(session).is_none() {
            return Err(gone());
        }
        match self.peer(session).state {
            ConnState::Open(conn) => return Ok(Some((conn, self.peer(session).nic))),
            ConnState::Requested(_) => return Ok(None),
            ConnState::Unreachable(_) => return Err(self.peer(session).why.clone().unwrap_or_else(gone)),
            ConnState::Closed => {}
        }
        let nics = services.rma.nics(session).ok_or_else(gone)?.addresses;
        let peer = self.peer(session);
        peer.nic %= nics.len().max(1);
        let nic = peer.nic;
        let address = nics.get(nic).ok_or_else(gone)?;
        peer.address.clone_from(address);
        if let Some(conn) = self.device.reach(session, address)? {
            let stats = self.stats.clone();
            self.peer(session).open(conn, &stats);
            return Ok(Some((conn, nic)));
        }
        self.request_connection(services, session)?;
        Ok(None)
    }

    /// Asks the session's peer for a connection to its NIC.
    fn request_connection(&mut self, services: &Services, session: u64) -> Result<()> {
        if services.rma.nics(session).is_none() {
            return Err(gone());
        }
        // The address by which the connection was: if the peer has another one by now, that connection is cut already.
        let address = self.peer(session).address.clone();
        let told = self.device.call(session, &address)?;
        let from = self.number as u8;
        let peer = self.peer(session);
        peer.state = ConnState::Requested(Instant::now());
        let to = peer.nic as u8;
        self.degraded.insert(session);
        services.rma.call(session, NicCall { from, to, kind: NicCallKind::Connect, address: told });
        Ok(())
    }

    /// Looks after the sessions whose peers cannot be reached as they were.
    pub(super) fn reconnect(&mut self, services: &Services) {
        self.open_again();
        for session in self.degraded.iter().copied().collect::<Vec<_>>() {
            if let Err(error) = self.reconnect_one(services, session) {
                self.give_up(services, session, &error);
            }
        }
    }

    fn reconnect_one(&mut self, services: &Services, session: u64) -> Result<()> {
        let (in_flight, down) = (self.in_flight(session), self.down.is_some());
        let peer = self.peer(session);
        match peer.state {
            ConnState::Requested(since) if since.elapsed() < CALL => return Ok(()),
            ConnState::Requested(_) => {
                let text = format!("the peer did not say within {CALL:?} that its NIC can be reached");
                return Err(Error::new(Code::PeerLost, text));
            }
            ConnState::Unreachable(_) => {
                self.degraded.remove(&session);
                return Ok(());
            }
            ConnState::Open(_) | ConnState::Closed => {}
        }
        if in_flight > 0 {
            if down || peer.since.get_or_insert_with(Instant::now).elapsed() > PATIENCE {
                self.cut(session);
            }
            return Ok(());
        }
        peer.failures += 1;
        self.close_conn(session);
        self.request_connection(services, session)
    }

    /// A peer that does not answer cannot vouch for what was posted to it.
    fn give_up(&mut self, services: &Services, session: u64, why: &Error) {
        log::warn!("NIC {} ({}) cannot reach a peer: {}", self.number, self.stats.name(), why.text);
        self.degraded.remove(&session);
        if self.in_flight(session) > 0 {
            self.cut(session);
        }
        self.close_conn(session);
        self.warm_up_failed(services, session, why);
        self.reassign(services, session, false, why);
    }

    /// The peer has answered: whatever was posted before cannot land any more.
    pub(super) fn answered(&mut self, session: u64, answer: NicAnswer) {
        if answer.kind == NicCallKind::ProbePage {
            return self.on_probe_page(session, answer);
        }
        let Some(services) = self.services.clone() else { return };
        let Some(peer) = self.peers.get_mut(&session) else { return };
        if !matches!(peer.state, ConnState::Requested(_)) || peer.nic != usize::from(answer.to) {
            return log::debug!("a peer answered for a NIC that it was not asked for");
        }
        let nics = services.rma.nics(session).map_or(0, |nics| nics.addresses.len());
        let failures = peer.failures;
        let down = self.down.clone();
        let opened = answer.outcome.and_then(|told| match (down, failures > nics) {
            (Some(why), _) => Err(why),
            // Each of its NICs was tried, and the first one twice.
            (_, true) => Err(Error::new(Code::PeerLost, "operations to each of its NICs failed")),
            _ => self.device.connect(session, &told).map(|conn| (conn, told)),
        });
        self.degraded.remove(&session);
        let why = match opened {
            Ok((conn, told)) => {
                let stats = self.stats.clone();
                let peer = self.peer(session);
                peer.open(conn, &stats);
                (peer.address, peer.since) = (told, None);
                return self.requests.resume(session);
            }
            Err(error) => error,
        };
        self.close_conn(session);
        let peer = self.peer(session);
        peer.failures += 1;
        peer.nic = (peer.nic + 1) % nics.max(1);
        if peer.failures <= nics && nics > 1 && self.down.is_none() {
            // The next one is tried with the next work request.
            return self.requests.resume(session);
        }
        self.back_off(&services, session, why);
    }

    /// Leaves a session to other NICs for a while.
    fn back_off(&mut self, services: &Services, session: u64, why: Error) {
        let cause = self.requests.doubt(session);
        let cause = cause.map_or_else(String::new, |cause| format!(" (what failed first: {})", cause.text));
        let text =
            format!("NIC {} ({}) cannot reach the peer: {}{cause}", self.number, self.stats.name(), why.text);
        let why = Error::new(Code::PeerLost, text);
        let peer = self.peer(session);
        peer.state = ConnState::Unreachable(Instant::now() + peer.backoff);
        (peer.failures, peer.since, peer.why) = (0, None, Some(why.clone()));
        peer.backoff = (peer.backoff * 2).min(BACKOFF[1]);
        let others = self.unreachable.mark(session, self.number);
        log::warn!("{}; {}", why.text, if others { "others take its work" } else { "nor can any other" });
        self.warm_up_failed(services, session, &why);
        self.reassign(services, session, others, &why);
    }

    /// How long until a session that was left to others is tried again.
    pub(super) fn soonest_opening(&self) -> Option<Duration> {
        if self.down.is_some() {
            return Some(BACKOFF[0]);
        }
        let now = Instant::now();
        let unreachable = self.peers.values().filter_map(|peer| match peer.state {
            ConnState::Unreachable(until) => Some(until.saturating_duration_since(now)),
            _ => None,
        });
        unreachable.min()
    }

    /// Whether the NIC itself can be used.
    pub(super) fn look_at_port(&mut self) {
        let down = self.broken.clone().or_else(|| self.device.down());
        if down.is_some() == self.down.is_some() {
            return;
        }
        self.stats.set_up(down.is_none());
        match &down {
            Some(why) => log::warn!("NIC {} ({}) is out of use: {why}", self.number, self.stats.name()),
            None => log::info!("NIC {} ({}) is in use again", self.number, self.stats.name()),
        }
        self.down = down;
        for (session, peer) in &mut self.peers {
            match peer.state {
                ConnState::Unreachable(_) if self.down.is_none() => {
                    peer.state = ConnState::Unreachable(Instant::now())
                }
                ConnState::Open(_) if self.down.is_some() => drop(self.degraded.insert(*session)),
                _ => {}
            }
        }
        if self.down.is_none() {
            self.unreachable.clear_nic(self.number);
        }
    }

    fn open_again(&mut self) {
        if self.down.is_some() {
            return;
        }
        let now = Instant::now();
        for (session, peer) in &mut self.peers {
            if matches!(peer.state, ConnState::Unreachable(until) if until <= now) {
                peer.state = ConnState::Closed;
                self.unreachable.clear(*session, self.number);
                self.requests.turns().wait(*session);
            }
        }
    }

    /// The session's peer has told of addresses. Where this NIC's connection was by one that is no more, that
    /// connection is cut.
    pub(super) fn find(&mut self, session: u64) {
        let Some(peer) = self.peers.get(&session) else { return };
        let told = self.services.as_ref().and_then(|services| services.rma.nics(session));
        let same = told.is_some_and(|nics| nics.addresses.get(peer.nic) == Some(&peer.address));
        // What is in flight to the old address ends by itself, with an error, and the peer is asked.
        if !same && !matches!(peer.state, ConnState::Requested(_)) && self.in_flight(session) == 0 {
            self.close_conn(session);
            self.degraded.remove(&session);
            self.requests.resume(session);
        }
    }

    /// A NIC of the session's peer wants a connection to this one.
    pub(super) fn called(&mut self, session: u64, call: NicCall) {
        if call.kind == NicCallKind::ProbePage {
            return self.answer_probe_page(session, call);
        }
        let Some(services) = self.services.clone() else { return };
        match self.device.disconnect_peer(session, call.from, &call.address) {
            Ok(true) => self.tell_address(&services),
            Ok(false) => {}
            // No answer: then the peer cannot vouch for what it has posted, and the session ends.
            Err(error) => return log::error!("NIC {} cannot cut off a peer: {error}", self.number),
        }
        let outcome = self.device.admit(session, call.from, &call.address);
        services.rma.answer(session, NicAnswer { from: call.from, to: call.to, kind: call.kind, outcome });
    }

    /// All peers must take another address from now on.
    pub(super) fn tell_address(&mut self, services: &Services) {
        match self.device.address() {
            Ok(address) => services.rma.moved(self.told.moved(self.number, address)),
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
            Err(error) => return self.cannot_stop(session, &error),
        };
        self.degraded.extend(self.requests.stop(|other| all || other == session, &stopped));
        for (_, probe) in self.probes.iter_mut().filter(|(other, _)| all || **other == session) {
            probe.stop();
        }
        for (other, peer) in &mut self.peers {
            if (all || *other == session) && matches!(peer.state, ConnState::Open(_)) {
                peer.state = ConnState::Closed;
                self.stats.connection_closed();
            }
        }
    }

    /// What was posted for a session goes on: nobody is let wait for its end, and its pages are nobody's.
    fn cannot_stop(&mut self, session: u64, error: &Error) {
        log::debug!("operations of NIC {} cannot be stopped: {error}", self.number);
        let Some(services) = self.services.clone() else { return };
        self.requests.give_up(session, &*services.work, error);
    }

    /// Closes the connection to a session's peer; nothing is in flight on it.
    pub(super) fn close_conn(&mut self, session: u64) {
        let Some(peer) = self.peers.get_mut(&session) else { return };
        if let ConnState::Open(conn) = std::mem::replace(&mut peer.state, ConnState::Closed) {
            self.device.leave(session, conn);
            self.stats.connection_closed();
        }
    }

    /// Nothing can be learnt of the NIC's operations any more.
    pub(super) fn device_failed(&mut self, error: Error) {
        log::error!("the completions of NIC {} ({}) cannot be read: {error}", self.number, self.stats.name());
        self.broken = Some(error);
        let sessions: Vec<u64> = self.peers.keys().copied().collect();
        for session in sessions {
            if self.in_flight(session) > 0 {
                self.cut(session);
            }
        }
    }
}
