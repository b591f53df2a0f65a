//! What a NIC knows of the peers of its sessions: which of their NICs it talks to, and who cannot be reached now.

use super::stats::NicStats;
use super::told::Unreachable;
use kvik_core::{Code, Error, Result};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
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
    /// One of them was to the peer's NIC of now.
    tried: bool,
    backoff: Duration,
    /// Something went through since the connection opened.
    warm: bool,
    /// When operations were first seen to fail.
    since: Option<Instant>,
    /// Why it cannot be reached, or why this side has no end of the connection that was asked for.
    pub why: Option<Error>,
}

#[derive(Clone, Copy)]
pub(super) enum ConnState<W> {
    /// It was not needed yet, or must be opened anew.
    Closed,
    /// The peer was asked.
    Requested(Instant),
    Open(W),
    /// Others may try until then.
    Unreachable(Instant),
}

impl<W: Copy> Peer<W> {
    fn new(nic: usize) -> Peer<W> {
        Peer {
            nic,
            address: Vec::new(),
            state: ConnState::Closed,
            failures: 0,
            tried: false,
            backoff: BACKOFF[0],
            warm: false,
            since: None,
            why: None,
        }
    }

    pub fn state(&self) -> ConnState<W> {
        self.state
    }

    /// The number of the peer's NIC.
    pub fn nic(&self) -> usize {
        self.nic
    }

    pub fn address(&self) -> &[u8] {
        &self.address
    }

    /// Why it cannot be reached.
    pub fn why(&self) -> Error {
        self.why.clone().unwrap_or_else(gone)
    }

    /// Whether something went over the connection as it is.
    pub fn is_warm(&self) -> bool {
        self.warm && matches!(self.state, ConnState::Open(_))
    }

    /// An operation went through.
    pub fn works(&mut self) {
        (self.failures, self.tried, self.backoff, self.warm) = (0, false, BACKOFF[0], true);
    }

    /// Takes the address of its turn of these.
    pub fn choose(&mut self, addresses: &[Vec<u8>]) -> Option<&[u8]> {
        self.nic %= addresses.len().max(1);
        self.address.clone_from(addresses.get(self.nic)?);
        Some(&self.address)
    }

    /// It is asked for a connection, with this side's end of it, if there is one: what it is told.
    pub fn request(&mut self, end: Result<Vec<u8>>) -> Vec<u8> {
        (self.state, self.why) = (ConnState::Requested(Instant::now()), end.as_ref().err().cloned());
        end.unwrap_or_default()
    }

    /// Whether it was asked for a connection to this NIC of it.
    pub fn was_asked_for(&self, nic: usize) -> bool {
        matches!(self.state, ConnState::Requested(_)) && self.nic == nic
    }

    /// A connection has failed.
    pub fn failed(&mut self) {
        (self.failures, self.tried) = (self.failures + 1, true);
    }

    /// Whether this one of its NICs was tried in vain: the first one twice, since a new connection may mend it.
    pub fn is_to_pass_on(&self) -> bool {
        self.tried && self.failures > 1
    }

    /// Whether each of its NICs was tried in vain, and the first one twice.
    pub fn was_tried(&self, nics: usize) -> bool {
        self.failures > nics
    }

    /// The next one of its NICs is tried from now on.
    pub fn next_nic(&mut self, nics: usize) {
        (self.nic, self.tried, self.since) = ((self.nic + 1) % nics.max(1), false, None);
    }

    /// How long operations have been failing.
    pub fn failing_for(&mut self) -> Duration {
        self.since.get_or_insert_with(Instant::now).elapsed()
    }
}

/// Why a session has no connection.
pub(super) fn gone() -> Error {
    Error::new(Code::PeerLost, "the session has ended")
}

/// See the module's text.
pub(super) struct Peers<W> {
    /// This NIC's number.
    number: usize,
    stats: Arc<NicStats>,
    unreachable: Arc<Unreachable>,
    peers: HashMap<u64, Peer<W>>,
    /// Sessions whose peer cannot be reached as it was, and whether their connection has failed.
    degraded: BTreeMap<u64, bool>,
    /// Why the NIC cannot be used now.
    down: Option<Error>,
}

impl<W: Copy> Peers<W> {
    pub fn new(number: usize, stats: Arc<NicStats>, unreachable: Arc<Unreachable>) -> Peers<W> {
        let (peers, degraded) = (HashMap::new(), BTreeMap::new());
        Peers { number, stats, unreachable, peers, degraded, down: None }
    }

    pub fn get(&mut self, session: u64) -> Option<&mut Peer<W>> {
        self.peers.get_mut(&session)
    }

    /// The session's peer, of whom nothing need be known yet.
    pub fn of(&mut self, session: u64) -> &mut Peer<W> {
        self.peers.entry(session).or_insert_with(|| Peer::new(self.number))
    }

    pub fn sessions(&self) -> Vec<u64> {
        self.peers.keys().copied().collect()
    }

    /// How many NICs the engine has.
    pub fn nics_here(&self) -> usize {
        self.unreachable.nics()
    }

    /// The connection to its peer has failed.
    pub fn fail(&mut self, session: u64) {
        self.degraded.insert(session, true);
    }

    /// Its peer cannot be reached as it was.
    pub fn degrade(&mut self, session: u64) {
        self.degraded.entry(session).or_insert(false);
    }

    /// Whether that is because the connection failed.
    pub fn has_failed(&self, session: u64) -> bool {
        self.degraded.get(&session).copied().unwrap_or_default()
    }

    /// It is, or nobody needs to look after it.
    pub fn mended(&mut self, session: u64) {
        self.degraded.remove(&session);
    }

    pub fn is_degraded(&self, session: u64) -> bool {
        self.degraded.contains_key(&session)
    }

    pub fn degraded(&self) -> Vec<u64> {
        self.degraded.keys().copied().collect()
    }

    /// Whether to take work requests of a session: not while others can do better.
    pub fn may_take(&self, session: u64) -> bool {
        let state = self.peers.get(&session).map(Peer::state);
        let here = self.down.is_none() && !matches!(state, Some(ConnState::Unreachable(_)));
        here || !self.unreachable.mark(session, self.number)
    }

    /// Why the NIC cannot be used now.
    pub fn down(&self) -> Option<&Error> {
        self.down.as_ref()
    }

    /// Whether the NIC itself can be used, or why not.
    pub fn set_down(&mut self, down: Option<Error>) {
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
                ConnState::Open(_) if self.down.is_some() => _ = self.degraded.entry(*session).or_default(),
                _ => {}
            }
        }
        if self.down.is_none() {
            self.unreachable.clear_nic(self.number);
        }
    }

    /// A connection to the session's peer is open, by an address that it has told where it was asked.
    pub fn open(&mut self, session: u64, conn: W, told: Option<Vec<u8>>) {
        let peer = self.of(session);
        (peer.state, peer.warm) = (ConnState::Open(conn), false);
        if let Some(address) = told {
            (peer.address, peer.since) = (address, None);
        }
        self.stats.connection_opened();
    }

    /// The connection to a session's peer is closed: what it was.
    pub fn close(&mut self, session: u64) -> Option<W> {
        let peer = self.peers.get_mut(&session)?;
        match std::mem::replace(&mut peer.state, ConnState::Closed) {
            ConnState::Open(conn) => {
                self.stats.connection_closed();
                Some(conn)
            }
            _ => None,
        }
    }

    /// Connections of these sessions went with what was posted to them.
    pub fn cut(&mut self, theirs: impl Fn(u64) -> bool) {
        for (_, peer) in self.peers.iter_mut().filter(|(session, _)| theirs(**session)) {
            if matches!(peer.state, ConnState::Open(_)) {
                peer.state = ConnState::Closed;
                self.stats.connection_closed();
            }
        }
    }

    /// Leaves a session to other NICs for a while: whether there are any for it.
    pub fn back_off(&mut self, session: u64, why: &Error) -> bool {
        let peer = self.of(session);
        peer.state = ConnState::Unreachable(Instant::now() + peer.backoff);
        (peer.failures, peer.since, peer.why) = (0, None, Some(why.clone()));
        peer.backoff = (peer.backoff * 2).min(BACKOFF[1]);
        self.unreachable.mark(session, self.number)
    }

    /// How long until a session that was left to others is tried again.
    pub fn soonest_opening(&self) -> Option<Duration> {
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

    /// Sessions that were left to others for long enough.
    pub fn open_again(&mut self) -> Vec<u64> {
        if self.down.is_some() {
            return Vec::new();
        }
        let now = Instant::now();
        let mut again = Vec::new();
        for (session, peer) in &mut self.peers {
            if matches!(peer.state, ConnState::Unreachable(until) if until <= now) {
                peer.state = ConnState::Closed;
                self.unreachable.clear(*session, self.number);
                again.push(*session);
            }
        }
        again
    }

    /// The session is over: other NICs need not know any more whether this one reaches its peer.
    pub fn leave(&mut self, session: u64) {
        self.degraded.remove(&session);
        self.unreachable.clear(session, self.number);
    }

    /// Nothing is in flight to its peer either.
    pub fn remove(&mut self, session: u64) {
        self.degraded.remove(&session);
        self.peers.remove(&session);
    }
}
