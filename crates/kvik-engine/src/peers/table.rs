//! The peers that an engine has met: how each stands, and when one that was lost is dialled again.
//!
//! A peer that this side had dialled, and whose session broke unexpectedly, is dialled again in the background: after
//! [`FIRST`], then after twice as long each time up to [`SLOWEST`], each time longer or shorter by up to half so that
//! many engines do not come at once, for [`AS_LONG`]. A goodbye, a protocol error, or another engine at its address
//! ends that. A request for the peer does not wait for it: it dials at once.
//!
//! Where another start of it, or another engine, listens at the very address at which a peer was reached before, that
//! peer is gone: an address belongs to one engine for its life. Its older tickets then fail here without a dial, until
//! it is heard of again after all.
//!
//! Peers without a session are forgotten beyond [`MOST_GONE`], those that were lost first before the others.

use super::peer::{Peer, PeerState};
use crate::events::Who;
use crate::sync::lock;
use kvik_core::{Code, EngineId, Error, Incarnation, Result};
use kvik_proto::Identity;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::Mutex;
use std::time::Duration;

const FIRST: Duration = Duration::from_millis(100);
const SLOWEST: Duration = Duration::from_secs(5);
const AS_LONG: Duration = Duration::from_secs(60);
const MOST_GONE: usize = 256;

/// See the module's text.
#[derive(Default)]
pub(crate) struct PeerTable {
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    peers: HashMap<Identity, Entry>,
    /// Rises whenever a peer comes or goes.
    clock: u64,
    /// Those that are to be dialled again, and when.
    redials: BTreeSet<(Duration, Identity)>,
}

#[derive(Default)]
struct Entry {
    name: String,
    addresses: Vec<SocketAddr>,
    /// At which of them it was reached last.
    reached: Option<SocketAddr>,
    sessions: BTreeMap<u64, Standing>,
    last_session: u64,
    /// It was told to be silent.
    suspect: bool,
    /// Every session that is left ends by the peer's goodbye, or the last one did.
    goodbye: bool,
    /// One that this side had dialled was lost beside those that are left: with the last of them it is dialled again.
    lost_beside: bool,
    /// When the last session ended.
    lost_at: Duration,
    lost: Option<Error>,
    restarted: bool,
    redial: Option<Redial>,
    /// When the latest session began, and whether it came of dialling again.
    begun_at: Duration,
    tried: Option<Redial>,
    moved: u64,
}

/// How a session stands.
#[derive(Default)]
struct Standing {
    /// This side had dialled.
    dialled: bool,
    /// The peer closes it in order: the whole engine, or one connection of two.
    goodbye: bool,
    /// This side does: of two connections, the one that it had dialled.
    left: bool,
    /// Nothing was heard in it for half of the time after which the peer is dead.
    silent: bool,
}

#[derive(Clone, Copy)]
struct Redial {
    at: Duration,
    pause: Duration,
    until: Duration,
}

impl Known {
    fn schedule(&mut self, peer: Identity, redial: Option<Redial>) {
        let Some(entry) = self.peers.get_mut(&peer) else { return };
        if let Some(old) = std::mem::replace(&mut entry.redial, redial) {
            self.redials.remove(&(old.at, peer));
        }
        if let Some(new) = redial {
            self.redials.insert((new.at, peer));
        }
    }

    fn who(&self, peer: &Identity) -> Who {
        let name = self.peers.get(peer).map_or_else(String::new, |entry| entry.name.clone());
        Who { engine: peer.engine, incarnation: peer.incarnation, name }
    }

    fn forget_one(&mut self) {
        let gone = || self.peers.iter().filter(|(_, entry)| entry.sessions.is_empty());
        if gone().count() <= MOST_GONE {
            return;
        }
        if let Some(oldest) = gone().min_by_key(|(_, entry)| entry.moved).map(|(peer, _)| *peer) {
            self.schedule(oldest, None);
            self.peers.remove(&oldest);
        }
    }
}

impl Entry {
    /// To be called while there is a session, after what changes that.
    fn note_goodbyes(&mut self) {
        self.goodbye = self.sessions.values().all(|standing| standing.goodbye);
    }
}

impl Redial {
    /// The next one, if there is to be one.
    fn later(self, now: Duration) -> Option<Redial> {
        let pause = (2 * self.pause).min(SLOWEST);
        (now < self.until).then(|| Redial { at: now + about(pause), pause, until: self.until })
    }
}

/// So long, or up to half longer or shorter.
fn about(pause: Duration) -> Duration {
    let die = Incarnation::random().map_or(0, |die| die.0 % 1024) as u32;
    pause / 2 + pause * die / 1024
}

impl PeerTable {
    /// What is known of a peer's name.
    pub fn who(&self, peer: &Identity) -> Who {
        lock(&self.known).who(peer)
    }

    /// A session has begun: true when it is the peer's only one.
    pub fn begun(
        &self,
        peer: Identity,
        session: u64,
        name: &str,
        at: Option<(SocketAddr, Vec<SocketAddr>)>,
        now: Duration,
    ) -> bool {
        let mut known = lock(&self.known);
        known.clock += 1;
        let clock = known.clock;
        let entry = known.peers.entry(peer).or_default();
        (entry.begun_at, entry.tried) = (now, entry.redial);
        known.schedule(peer, None);
        let entry = known.peers.entry(peer).or_default();
        name.clone_into(&mut entry.name);
        let standing = Standing { dialled: at.is_some(), ..Standing::default() };
        if let Some((reached, addresses)) = at {
            (entry.reached, entry.addresses) = (Some(reached), addresses);
        }
        (entry.moved, entry.last_session) = (clock, session);
        (entry.goodbye, entry.lost_beside, entry.restarted, entry.lost) = (false, false, false, None);
        entry.sessions.insert(session, standing);
        entry.sessions.len() == 1
    }

    /// A session has ended: true when it was the peer's last one. With `again` the peer is dialled again, if this side
    /// had dialled.
    pub fn ended(&self, peer: Identity, session: u64, error: &Error, again: bool, now: Duration) -> bool {
        let mut known = lock(&self.known);
        known.clock += 1;
        let clock = known.clock;
        let Some(entry) = known.peers.get_mut(&peer) else { return false };
        let Some(standing) = entry.sessions.remove(&session) else { return false };
        let dialled = standing.dialled && !standing.left;
        if !entry.sessions.is_empty() {
            // Of what is lost at once, one ends first.
            entry.lost_beside |= again && dialled && !standing.goodbye;
            entry.note_goodbyes();
            return false;
        }
        (entry.moved, entry.lost_at, entry.suspect, entry.lost) = (clock, now, false, Some(error.clone()));
        let again = again && (dialled || entry.lost_beside) && !entry.goodbye;
        if again && !entry.addresses.is_empty() {
            // One that takes us in and drops us at once is as good as one that does not answer.
            let short = entry.tried.filter(|_| now.saturating_sub(entry.begun_at) < SLOWEST);
            let first = Redial { at: now + about(FIRST), pause: FIRST, until: now + AS_LONG };
            let redial = short.map_or(Some(first), |before| before.later(now));
            known.schedule(peer, redial);
        }
        known.forget_one();
        true
    }

    /// Notes whether a session is silent.
    pub fn note_silence(&self, peer: &Identity, session: u64, silent: bool) {
        let mut known = lock(&self.known);
        let entry = known.peers.get_mut(peer);
        if let Some(standing) = entry.and_then(|entry| entry.sessions.get_mut(&session)) {
            standing.silent = silent;
        }
    }

    /// Whether a peer is silent, which it is when each of its sessions is; none when that was told before.
    pub fn tell_silence(&self, peer: &Identity) -> Option<bool> {
        let mut known = lock(&self.known);
        let entry = known.peers.get_mut(peer).filter(|entry| !entry.sessions.is_empty())?;
        let suspect = entry.sessions.values().all(|standing| standing.silent);
        (std::mem::replace(&mut entry.suspect, suspect) != suspect).then_some(suspect)
    }

    /// The peer closes a session in order. Where there is another one, that says nothing of the peer: of two
    /// connections that were made at once, one is closed so.
    pub fn goodbye(&self, peer: &Identity, session: u64) {
        let mut known = lock(&self.known);
        let Some(entry) = known.peers.get_mut(peer) else { return };
        if let Some(standing) = entry.sessions.get_mut(&session) {
            standing.goodbye = true;
            entry.note_goodbyes();
        }
    }

    /// This side closes a session in order that it had dialled: the peer dialled the other one, and dials again.
    pub fn left(&self, peer: &Identity, session: u64) {
        let mut known = lock(&self.known);
        let entry = known.peers.get_mut(peer);
        if let Some(standing) = entry.and_then(|entry| entry.sessions.get_mut(&session)) {
            standing.left = true;
        }
    }

    /// The start of an engine that was met last.
    pub fn find(&self, engine: &EngineId) -> Option<Identity> {
        let known = lock(&self.known);
        let starts = known.peers.iter().filter(|(peer, _)| peer.engine == *engine);
        starts.max_by_key(|(_, entry)| (!entry.sessions.is_empty(), entry.moved)).map(|(peer, _)| *peer)
    }

    /// Whether a peer is dialled again in the background, or may be: its last session is just ending, or a new one begins.
    pub fn comes_back(&self, peer: &Identity) -> bool {
        let back = |entry: &Entry| entry.redial.is_some() || !entry.sessions.is_empty();
        lock(&self.known).peers.get(peer).is_some_and(back)
    }

    /// Why there is no session with a peer; none while there is one.
    pub fn why_gone(&self, peer: &Identity) -> Option<Error> {
        let known = lock(&self.known);
        let entry = known.peers.get(peer);
        if entry.is_some_and(|entry| !entry.sessions.is_empty()) {
            return None;
        }
        let why = || Error::new(Code::PeerLost, "there is no connection to the peer");
        Some(entry.and_then(|entry| entry.lost.clone()).unwrap_or_else(why))
    }

    /// # Errors
    /// `PeerRestarted` when it is known that this start of the peer is over.
    pub fn check(&self, peer: &Identity) -> Result<()> {
        match lock(&self.known).peers.get(peer) {
            Some(Entry { restarted: true, lost: Some(error), .. }) => Err(error.clone()),
            _ => Ok(()),
        }
    }

    // ---- dialling again ----

    /// When the next peer is to be dialled again.
    pub fn next_redial(&self) -> Option<Duration> {
        lock(&self.known).redials.first().map(|(at, _)| *at)
    }

    /// A peer that is to be dialled now, and where. It is due again later, should nothing come of it.
    pub fn due(&self, now: Duration) -> Option<(Identity, Vec<SocketAddr>)> {
        let mut known = lock(&self.known);
        let peer = known.redials.first().filter(|(at, _)| *at <= now)?.1;
        let addresses = known.peers.get(&peer)?.addresses.clone();
        let redial = known.peers.get(&peer)?.redial?;
        known.schedule(peer, Some(Redial { at: now + Duration::from_secs(3600), ..redial }));
        Some((peer, addresses))
    }

    /// Dialling a peer has come to nothing: why its tickets are refused from now on, when it is known that it was
    /// started anew, and whether that is news. `elsewhere` says what listens at an address instead of the peer.
    pub fn not_reached(
        &self,
        peer: Identity,
        error: &Error,
        elsewhere: impl Fn(&SocketAddr) -> Option<Error>,
        now: Duration,
    ) -> (Option<Error>, bool) {
        let mut known = lock(&self.known);
        let Some(entry) = known.peers.get_mut(&peer) else { return (None, false) };
        if let Some(found) = entry.reached.as_ref().and_then(elsewhere)
            && entry.sessions.is_empty()
        {
            let text = format!("engine {} was started anew: {}", peer.engine, found.text);
            let error = Error::new(Code::PeerRestarted, text);
            entry.lost = Some(error.clone());
            let news = !std::mem::replace(&mut entry.restarted, true);
            known.schedule(peer, None);
            return (Some(error), news);
        }
        let next = entry.redial.filter(|_| {
            matches!(error.code, Code::PeerUnreachable | Code::PeerLost | Code::MemoryCapReached)
        });
        known.schedule(peer, next.and_then(|redial| redial.later(now)));
        (None, false)
    }
}

impl PeerTable {
    /// Those that are not among these, and the last session of each.
    pub fn others(&self, these: &HashSet<Identity>) -> Vec<(Identity, u64)> {
        let known = lock(&self.known);
        let others = known.peers.iter().filter(|(peer, _)| !these.contains(peer));
        others.map(|(peer, entry)| (*peer, entry.last_session)).collect()
    }

    /// A peer without a session, with so many transfers that are still open.
    pub fn peer(&self, identity: &Identity, transfers: usize, now: Duration) -> Peer {
        let known = lock(&self.known);
        let entry = known.peers.get(identity);
        let lost = entry.and_then(|entry| Some((entry, entry.lost.as_ref()?)));
        let state = match entry {
            None => PeerState::Connecting,
            Some(entry) if entry.goodbye && transfers > 0 => PeerState::Draining,
            Some(_) => PeerState::Dead,
        };
        Peer {
            engine: identity.engine,
            incarnation: identity.incarnation,
            name: entry.map_or_else(String::new, |entry| entry.name.clone()),
            address: entry.and_then(|entry| entry.reached),
            state,
            silent: lost.map(|(entry, _)| now.saturating_sub(entry.lost_at)),
            transports: Vec::new(),
            channels: 0,
            transfers,
            reconnecting: entry.is_some_and(|entry| entry.redial.is_some()),
            reason: lost.map_or_else(String::new, |(_, lost)| lost.text.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn peer(number: usize) -> Identity {
        Identity { engine: EngineId((number as u128).to_le_bytes()), incarnation: Incarnation(1) }
    }

    fn at() -> Option<(SocketAddr, Vec<SocketAddr>)> {
        let address = SocketAddr::from(([127, 0, 0, 1], 7));
        Some((address, vec![address]))
    }

    fn error(code: Code) -> Error {
        Error::new(code, "in a test")
    }

    /// A peer with two connections, of which this side has dialled the first.
    fn both() -> PeerTable {
        let peers = PeerTable::default();
        peers.begun(peer(1), 1, "", at(), HOUR);
        peers.begun(peer(1), 2, "", None, HOUR);
        peers
    }

    /// A peer that was met at time 0 s after boot, and lost after an hour.
    fn lost(peers: &PeerTable, again: bool) {
        assert!(peers.begun(peer(1), 1, "one", at(), Duration::ZERO));
        assert!(!peers.begun(peer(1), 2, "one", None, Duration::ZERO));
        assert!(!peers.ended(peer(1), 1, &error(Code::PeerLost), again, HOUR));
        assert!(peers.ended(peer(1), 2, &error(Code::PeerLost), again, HOUR));
        assert!(!peers.ended(peer(1), 2, &error(Code::PeerLost), again, HOUR));
    }

    #[test]
    fn pauses_grow_to_their_limit_and_the_attempts_end() {
        let peers = PeerTable::default();
        lost(&peers, true);
        let (mut now, mut most) = (HOUR, FIRST);
        let mut attempts = 0;
        while let Some(next) = peers.next_redial() {
            let pause = next - now;
            assert!(pause >= most / 2 && pause <= most * 3 / 2, "{pause:?} of {most:?}");
            assert!(peers.due(next - Duration::from_nanos(1)).is_none());
            assert_eq!(peers.due(next).map(|(peer, _)| peer), Some(peer(1)));
            assert!(peers.due(next).is_none(), "one attempt at a time");
            let told = peers.not_reached(peer(1), &error(Code::PeerUnreachable), |_| None, next);
            assert_eq!(told, (None, false));
            (now, most, attempts) = (next, (2 * most).min(SLOWEST), attempts + 1);
        }
        assert!(now - HOUR >= AS_LONG && now - HOUR < AS_LONG + 2 * SLOWEST, "{:?}", now - HOUR);
        assert!((14..32).contains(&attempts), "{attempts}");
        assert!(!peers.comes_back(&peer(1)));
    }

    #[test]
    fn a_peer_that_drops_us_at_once_is_not_dialled_faster_for_it() {
        let peers = PeerTable::default();
        lost(&peers, true);
        let (mut now, mut attempts) = (HOUR, 0);
        while let Some(next) = peers.next_redial() {
            assert!(peers.due(next).is_some());
            assert!(peers.begun(peer(1), 9, "one", at(), next));
            assert_eq!(peers.next_redial(), None);
            assert!(peers.ended(peer(1), 9, &error(Code::PeerLost), true, next));
            (now, attempts) = (next, attempts + 1);
        }
        assert!((14..32).contains(&attempts) && now - HOUR < AS_LONG + 2 * SLOWEST, "{attempts}");
    }

    #[test]
    fn goodbyes_other_errors_and_other_engines_end_it() {
        let peers = PeerTable::default();
        lost(&peers, false);
        assert_eq!(peers.next_redial(), None);
        let peers = PeerTable::default();
        peers.begun(peer(1), 1, "", at(), HOUR);
        peers.goodbye(&peer(1), 1);
        assert!(peers.ended(peer(1), 1, &error(Code::PeerLost), true, HOUR));
        assert_eq!(peers.next_redial(), None);
        let peers = PeerTable::default();
        lost(&peers, true);
        peers.not_reached(peer(1), &error(Code::SecretMismatch), |_| None, HOUR);
        assert_eq!(peers.next_redial(), None);
        // Another engine at another address than where it was reached says nothing.
        let peers = PeerTable::default();
        lost(&peers, true);
        let foreign = error(Code::TicketForeign);
        let there =
            |address: SocketAddr| move |at: &SocketAddr| (*at == address).then(|| error(Code::TicketForeign));
        let other = SocketAddr::from(([127, 0, 0, 1], 8));
        assert_eq!(peers.not_reached(peer(1), &foreign, there(other), HOUR), (None, false));
        peers.check(&peer(1)).unwrap();
        let (told, news) = peers.not_reached(peer(1), &foreign, there(at().unwrap().0), HOUR);
        assert_eq!((told.unwrap().code, news), (Code::PeerRestarted, true));
        assert_eq!(peers.check(&peer(1)).unwrap_err().code, Code::PeerRestarted);
        let (told, news) = peers.not_reached(peer(1), &foreign, there(at().unwrap().0), HOUR);
        assert_eq!((told.unwrap().code, news), (Code::PeerRestarted, false));
        // It was not so after all.
        peers.begun(peer(1), 3, "", None, HOUR);
        peers.check(&peer(1)).unwrap();
    }

    #[test]
    fn the_goodbye_of_one_connection_of_two_is_none_of_the_peers() {
        let end = |peers: &PeerTable, session, again| {
            peers.ended(peer(1), session, &error(Code::PeerLost), again, HOUR)
        };
        let peers = both();
        peers.goodbye(&peer(1), 2);
        assert!(!end(&peers, 2, false) && end(&peers, 1, true));
        assert!(peers.comes_back(&peer(1)), "a peer that was lost is not dialled again");
        assert_eq!(peers.peer(&peer(1), 1, HOUR).state, PeerState::Dead);
        // One that closes says goodbye in both, and what comes of that comes in any order.
        for ends in [[1, 2], [2, 1]] {
            let peers = both();
            ends.iter().for_each(|session| peers.goodbye(&peer(1), *session));
            assert_eq!(ends.map(|session| end(&peers, session, true)), [false, true]);
            assert!(!peers.comes_back(&peer(1)));
            assert_eq!(peers.peer(&peer(1), 1, HOUR).state, PeerState::Draining);
            let peers = both();
            let ended = ends.map(|session| {
                peers.goodbye(&peer(1), session);
                end(&peers, session, true)
            });
            assert!(ended == [false, true] && !peers.comes_back(&peer(1)));
        }
    }

    #[test]
    fn of_two_connections_that_are_lost_the_one_dialled_here_is_dialled_again_in_any_order() {
        let end = |peers: &PeerTable, session, code| {
            peers.ended(peer(1), session, &error(code), code == Code::PeerLost, HOUR)
        };
        let lost = |peers: &PeerTable, session| end(peers, session, Code::PeerLost);
        for ends in [[1, 2], [2, 1]] {
            let peers = both();
            assert_eq!(ends.map(|session| lost(&peers, session)), [false, true]);
            assert!(peers.comes_back(&peer(1)), "{ends:?}");
        }
        // The peer has dialled since, and does it again.
        let peers = both();
        assert!(!lost(&peers, 1) && peers.comes_back(&peer(1)) && !peers.begun(peer(1), 3, "", None, HOUR));
        assert!(!lost(&peers, 2) && lost(&peers, 3) && !peers.comes_back(&peer(1)));
        // So it does where this side has closed its own one.
        for ends in [[1, 2], [2, 1]] {
            let peers = both();
            peers.left(&peer(1), 1);
            assert_eq!(ends.map(|session| lost(&peers, session)), [false, true]);
            assert!(!peers.comes_back(&peer(1)), "{ends:?}");
        }
        // How the last one ends says whether there is anything to dial for.
        let peers = both();
        assert!(!lost(&peers, 1) && end(&peers, 2, Code::ProtocolError) && !peers.comes_back(&peer(1)));
        let peers = both();
        assert!(!lost(&peers, 1));
        peers.goodbye(&peer(1), 2);
        assert!(lost(&peers, 2) && !peers.comes_back(&peer(1)));
    }

    #[test]
    fn a_peer_is_silent_when_each_of_its_sessions_is() {
        let peers = PeerTable::default();
        let begin = |session| peers.begun(peer(1), session, "", at(), HOUR);
        let end = |session| peers.ended(peer(1), session, &error(Code::PeerLost), true, HOUR);
        let tell = || peers.tell_silence(&peer(1));
        assert!(begin(1) && !begin(2) && tell().is_none());
        peers.note_silence(&peer(1), 1, true);
        assert_eq!(tell(), None, "it is heard in the other one");
        peers.note_silence(&peer(1), 2, true);
        assert_eq!((tell(), tell()), (Some(true), None));
        peers.note_silence(&peer(1), 1, false);
        assert_eq!((tell(), tell()), (Some(false), None));
        // Its end leaves the silent one, and a new one is heard.
        assert!(!end(1));
        assert_eq!((tell(), tell()), (Some(true), None));
        assert!(!begin(3));
        assert_eq!((tell(), tell()), (Some(false), None));
        assert!(!end(2) && tell().is_none());
        peers.note_silence(&peer(1), 3, true);
        assert_eq!((tell(), end(3), tell()), (Some(true), true, None));
        assert!(begin(4) && tell().is_none());
    }

    #[test]
    fn the_oldest_of_those_that_are_gone_are_forgotten() {
        let peers = PeerTable::default();
        peers.begun(peer(0), 1, "stays", at(), HOUR);
        for number in 1..=MOST_GONE + 10 {
            peers.begun(peer(number), 1, "", at(), HOUR);
            peers.ended(peer(number), 1, &error(Code::PeerLost), true, HOUR);
        }
        let known = lock(&peers.known);
        assert_eq!((known.peers.len(), known.redials.len()), (MOST_GONE + 1, MOST_GONE));
        assert!(known.peers.contains_key(&peer(0)) && known.peers.contains_key(&peer(MOST_GONE + 10)));
        assert!((1..=10).all(|number| !known.peers.contains_key(&peer(number))));
    }
}
