//! The probes of a NIC: which connections are to be warmed up, and how far each is.

use super::in_flight::PATIENCE;
use super::peers::CALL;
use kvik_proto::NicKey;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// How long this NIC's thread looks after whoever reads its page, and how often it is asked again meanwhile.
const PROBE_WINDOW: Duration = Duration::from_secs(1);
const AGAIN: Duration = Duration::from_millis(500);
/// Tokens of probes: beyond those of work requests.
const FIRST: u64 = 1 << 32;

/// A connection that is to be warmed up.
struct Probe {
    /// Until when somebody waits for it.
    until: Instant,
    /// When the peer was asked for a page, and of which of its NICs.
    asked: Option<(Instant, usize)>,
    /// The peer's NIC that has answered, and the key of its page, if it keeps one.
    page: Option<(usize, Option<NicKey>)>,
    /// The operation that is in flight.
    out: Option<u64>,
    /// Since when the session is over.
    over: Option<Instant>,
}

/// What is to be done for a probe.
pub(super) enum Step {
    /// Nothing yet.
    Wait,
    /// To ask the peer for its page, again.
    Ask,
    /// To see to a connection, and then to what [`Probes::page`] says.
    Connect,
    /// To stop what is in flight for a session that is over, if anything is, and to forget the session.
    Stop,
}

/// What is known of the page of a peer's NIC.
pub(super) enum Page {
    /// Nothing: the peer was asked, and may still answer.
    Asked,
    /// Nothing: it is to be asked.
    Unknown,
    /// The NIC keeps none.
    None,
    Key(NicKey),
}

/// See the module's text.
#[derive(Default)]
pub(super) struct Probes {
    probes: HashMap<u64, Probe>,
    /// The number of the next operation.
    next: u64,
    /// Until when peers' NICs may read the page.
    probed_until: Option<Instant>,
}

impl Probes {
    /// The connection to the session's peer is to be warmed up by then.
    pub fn add(&mut self, session: u64, until: Instant) {
        let new = || Probe { until, asked: None, page: None, out: None, over: None };
        let probe = self.probes.entry(session).or_insert_with(new);
        probe.until = probe.until.max(until);
    }

    pub fn sessions(&self) -> Vec<u64> {
        self.probes.keys().copied().collect()
    }

    /// Whether the thread has to look after probes, its own or a peer's.
    pub fn is_busy(&self) -> bool {
        let now = Instant::now();
        self.probed_until.is_some_and(|until| now < until)
            || self.probes.values().any(|probe| probe.over.is_some() || now < probe.until)
    }

    /// Whether an operation is in flight for the session.
    pub fn is_in_flight(&self, session: u64) -> bool {
        self.probes.get(&session).is_some_and(|probe| probe.out.is_some())
    }

    /// Whether somebody waits for the session's.
    pub fn is_wanted(&self, session: u64) -> bool {
        self.probes.get(&session).is_some_and(|probe| probe.over.is_none())
    }

    /// What is to be done for the session's.
    pub fn step(&mut self, session: u64) -> Step {
        let Some(probe) = self.probes.get(&session) else { return Step::Wait };
        let now = Instant::now();
        match (probe.over, probe.out) {
            (Some(since), Some(_)) if since.elapsed() < PATIENCE => Step::Wait,
            (Some(_), _) => Step::Stop,
            // The peer's thread looks after it for a while only.
            (None, Some(_))
                if now < probe.until && probe.asked.is_none_or(|(asked, _)| asked.elapsed() > AGAIN) =>
            {
                Step::Ask
            }
            (None, Some(_)) => Step::Wait,
            (None, None) if now >= probe.until => {
                self.probes.remove(&session);
                Step::Wait
            }
            (None, None) => Step::Connect,
        }
    }

    /// What is known of the page of this NIC of the session's peer.
    pub fn page(&self, session: u64, nic: usize) -> Page {
        let Some(probe) = self.probes.get(&session) else { return Page::Asked };
        match probe.page {
            Some((of, Some(key))) if of == nic => Page::Key(key),
            Some((of, None)) if of == nic => Page::None,
            _ if probe.asked.is_none_or(|(asked, of)| of != nic || asked.elapsed() > CALL) => Page::Unknown,
            _ => Page::Asked,
        }
    }

    /// The peer was asked for the page of this NIC of it.
    pub fn asked(&mut self, session: u64, nic: usize) {
        if let Some(probe) = self.probes.get_mut(&session) {
            probe.asked = Some((Instant::now(), nic));
        }
    }

    /// What this NIC of the peer has answered.
    pub fn answered(&mut self, session: u64, nic: usize, key: Option<NicKey>) {
        if let Some(probe) = self.probes.get_mut(&session) {
            probe.page = Some((nic, key));
        }
    }

    /// The token of the next operation.
    pub fn token(&self) -> u64 {
        FIRST + self.next
    }

    /// It was posted, for the session.
    pub fn posted(&mut self, session: u64) {
        let token = self.token();
        self.next += 1;
        if let Some(probe) = self.probes.get_mut(&session) {
            probe.out = Some(token);
        }
    }

    /// An operation has ended: the session that it was for.
    pub fn ended(&mut self, token: u64) -> Option<u64> {
        let (&session, probe) = self.probes.iter_mut().find(|(_, probe)| probe.out == Some(token))?;
        probe.out = None;
        Some(session)
    }

    /// Nothing is heard any more of operations for these sessions.
    pub fn stop(&mut self, theirs: impl Fn(u64) -> bool) {
        self.probes
            .iter_mut()
            .filter(|(session, _)| theirs(**session))
            .for_each(|(_, probe)| probe.out = None);
    }

    /// It is known what becomes of the session's: whether anybody waits for that. One that is in flight still is heard
    /// of first.
    pub fn take(&mut self, session: u64) -> bool {
        let known = self.is_wanted(session) && !self.is_in_flight(session);
        known && self.probes.remove(&session).is_some()
    }

    /// The session is over: what is in flight has a moment to end, before it is stopped.
    pub fn end(&mut self, session: u64) {
        match self.probes.get_mut(&session) {
            Some(probe) if probe.out.is_some() => drop(probe.over.get_or_insert_with(Instant::now)),
            _ => drop(self.probes.remove(&session)),
        }
    }

    pub fn remove(&mut self, session: u64) {
        self.probes.remove(&session);
    }

    /// A peer has the key of this NIC's page, and will read there.
    pub fn expect_reads(&mut self) {
        self.probed_until = Some(Instant::now() + PROBE_WINDOW);
    }
}
