//! Who is there: sessions as the engine sees them, and peers that are being reached.
//!
//! - [`peer`]: a peer, for whoever asks;
//! - [`table`]: all peers that the engine has met, and when one that was lost is dialled again;
//! - [`dial`]: reaching one, address by address, or whoever listens at one.

mod dial;
mod peer;
mod table;

use crate::base::Base;
use crate::budget::Lease;
use crate::commands::ControlCommand;
use crate::end::End;
use crate::events::{Event, Who};
use crate::inbox::Came;
use crate::protocol::Calls;
use crate::sync::lock;
pub(crate) use dial::{ATTEMPT, Dial, Target};
use kvik_core::{Code, EngineId, Error, Result};
use kvik_host::clock::boottime;
use kvik_proto::{Event as Proto, Identity, Notification};
use kvik_transport::tls::{TLS_CONTROL_BYTES, TLS_DATA_BYTES};
pub use peer::{Peer, PeerState};
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use table::PeerTable;

/// What a session is charged from its start: its part of the tables, and buffers as they are without load.
const SESSION_BYTES: u64 = 128 << 10;
/// What a data channel is charged: both directions' trailers, and the checksums of what was placed.
const CHANNEL_BYTES: u64 = 32 << 10;

/// See the module's text.
pub(crate) struct Peers {
    base: Arc<Base>,
    pub table: PeerTable,
    here: Mutex<Here>,
    /// What becomes of a peer is told in the order in which it happens.
    telling: Mutex<()>,
}

#[derive(Default)]
struct Here {
    links: HashMap<u64, Link>,
    dials: HashMap<Target, Dial>,
}

/// Where this side found the peer of a session that it opened.
pub(crate) struct Found {
    at: SocketAddr,
    /// All addresses that are known of it.
    known: Vec<SocketAddr>,
    /// For those who wait to hear who it is.
    met: Arc<End<Who>>,
}

/// A session as the engine sees it.
struct Link {
    peer: Identity,
    /// Where this side found the peer, if it opened the session.
    address: Option<SocketAddr>,
    /// It was warmed, or is being so.
    warm: bool,
    lease: Lease,
    /// The part of the lease that stays to the session's end.
    kept: u64,
}

impl Peers {
    pub fn new(base: Arc<Base>) -> Peers {
        Peers { base, table: PeerTable::default(), here: Mutex::default(), telling: Mutex::default() }
    }

    // ---- sessions ----

    /// How many sessions there are.
    pub fn sessions(&self) -> usize {
        lock(&self.here).links.len()
    }

    /// Whether a session is there.
    pub fn has(&self, session: u64) -> bool {
        lock(&self.here).links.contains_key(&session)
    }

    /// The peer of a session.
    pub fn of(&self, session: u64) -> Option<Identity> {
        lock(&self.here).links.get(&session).map(|link| link.peer)
    }

    /// Where this side found the peer of a session, if it opened the session; outside none if it is not there.
    pub fn address(&self, session: u64) -> Option<Option<SocketAddr>> {
        lock(&self.here).links.get(&session).map(|link| link.address)
    }

    /// The sessions with any start of an engine.
    pub fn sessions_of(&self, engine: EngineId) -> Vec<u64> {
        let here = lock(&self.here);
        here.links.iter().filter(|(_, link)| link.peer.engine == engine).map(|(id, _)| *id).collect()
    }

    /// Marks a session that is being warmed; false when it is not there.
    pub fn set_warm(&self, session: u64) -> bool {
        lock(&self.here).links.get_mut(&session).map(|link| link.warm = true).is_some()
    }

    /// Whether a session with the same peer is being warmed.
    pub fn is_warm_beside(&self, session: u64) -> bool {
        let here = lock(&self.here);
        let peer = here.links.get(&session).map(|link| link.peer);
        here.links.values().any(|link| link.warm && Some(link.peer) == peer)
    }

    /// What a session is charged to its end.
    ///
    /// # Errors
    /// `MemoryCapReached`.
    pub fn charge_session(&self) -> Result<Lease> {
        let tls = if self.base.setup.tls.is_some() { TLS_CONTROL_BYTES } else { 0 };
        self.base.budget.take(SESSION_BYTES + tls, "a session")
    }

    /// Charges a session for one data channel more, which it keeps to its end.
    ///
    /// # Errors
    /// `MemoryCapReached`.
    pub fn charge_channel(&self, session: u64) -> Result<()> {
        let more = CHANNEL_BYTES + if self.base.setup.tls.is_some() { TLS_DATA_BYTES } else { 0 };
        let mut here = lock(&self.here);
        let Some(link) = here.links.get_mut(&session) else { return Ok(()) };
        let bytes = link.lease.bytes() + more;
        self.base.budget.resize(&mut link.lease, bytes, "a data channel")?;
        link.kept += more;
        Ok(())
    }

    /// Charges a session for what its peer makes this process hold now.
    ///
    /// # Errors
    /// `MemoryCapReached`: the session must end, since nothing else makes the peer's requests smaller.
    pub fn charge_peer(&self, session: u64, held: u64) -> Result<()> {
        let mut here = lock(&self.here);
        let Some(link) = here.links.get_mut(&session) else { return Ok(()) };
        let bytes = (link.kept - SESSION_BYTES) + held.max(SESSION_BYTES);
        self.base.budget.resize(&mut link.lease, bytes, "what a peer has sent and asked for")
    }

    /// A session begins. Gives where its peer was found, where this side dialled it.
    pub fn begin(
        &self,
        session: u64,
        peer: Identity,
        dialled: Option<(Target, SocketAddr)>,
        lease: Lease,
    ) -> Option<Found> {
        let mut here = lock(&self.here);
        let (address, kept) = (dialled.map(|(_, at)| at), lease.bytes());
        here.links.insert(session, Link { peer, address, warm: false, lease, kept });
        self.base.observers.counters.sessions_opened.fetch_add(1, Ordering::Relaxed);
        let (target, at) = dialled?;
        let dial = here.dials.remove(&target).unwrap_or_else(|| Dial::again(vec![at]));
        Some(Found { at, known: dial.known().to_vec(), met: dial.met })
    }

    /// A session begins by this: its peer is up. In one step: whoever hears that the peer is up sees it among the
    /// peers, and never after its end.
    pub fn begun(
        &self,
        session: u64,
        peer: Identity,
        name: &str,
        found: Option<Found>,
        begin: impl FnOnce(),
    ) {
        let _telling = lock(&self.telling);
        begin();
        let (at, met) = found.map(|found| ((found.at, found.known), found.met)).unzip();
        if self.table.begun(peer, session, name, at, boottime()) {
            self.base.observers.events.publish(Event::PeerUp(self.table.who(&peer), "connected"));
        }
        self.tell_silence(&peer);
        if let Some(met) = met {
            met.set(Ok(self.table.who(&peer)));
        }
    }

    /// A session has ended; with whom.
    pub fn end(&self, session: u64, error: &Error) -> Option<Identity> {
        let Base { setup, commands, transports, observers, .. } = &*self.base;
        // First of all: from here on nothing begins on it.
        let link = lock(&self.here).links.remove(&session);
        transports.all().iter().for_each(|one| one.end_session(session));
        commands.tell(ControlCommand::Forget(session));
        observers.counters.sessions_lost.fetch_add(1, Ordering::Relaxed);
        let name = link.as_ref().map_or_else(String::new, |link| link.peer.engine.to_string());
        log::info!(engine:% = setup.id(), peer:% = name; "session {session} ended: {error}");
        let Link { peer, .. } = link?;
        observers.metrics.session_ended(peer.engine, error.code);
        let again = error.code == Code::PeerLost && !setup.is_closed();
        let telling = lock(&self.telling);
        let last = self.table.ended(peer, session, error, again, boottime());
        let lost = last.then(|| self.table.who(&peer));
        observers.inboxes.ended(session, lost.as_ref().map(|who| (who, error)));
        if !setup.is_closed() {
            if let Some(who) = lost {
                observers.events.publish(Event::PeerLost(who, error.clone()));
            }
            self.tell_silence(&peer);
        }
        drop(telling);
        observers.events.forget(session);
        observers.notices.moved.note();
        if let Some(at) = self.table.next_redial() {
            commands.wake_by(at);
        }
        Some(peer)
    }

    /// The user hears of a session's life.
    pub fn on_life(&self, session: u64, event: &Proto) {
        let Some(peer) = self.of(session) else { return };
        match event {
            Proto::Goodbye(_) => return self.table.goodbye(&peer, session),
            Proto::Left(_) => return self.table.left(&peer, session),
            _ => {}
        }
        // Silence and its end may be heard of by two threads: what holds now is told.
        let _telling = lock(&self.telling);
        let silent = self.base.node(|node, _| node.is_suspect(session));
        self.table.note_silence(&peer, session, silent);
        self.tell_silence(&peer);
    }

    /// The user hears whether a peer is silent, where that has changed. Under the lock for telling.
    fn tell_silence(&self, peer: &Identity) {
        let (events, who) = (&self.base.observers.events, || self.table.who(peer));
        match self.table.tell_silence(peer) {
            Some(true) => {
                log::info!(engine:% = self.base.setup.id(), peer:% = peer.engine; "the peer is silent");
                events.publish(Event::PeerSuspect(who()));
            }
            Some(false) => events.publish(Event::PeerUp(who(), "heard again")),
            None => {}
        }
    }

    /// A notification has come.
    pub fn on_notified(&self, note: Notification) {
        if note.topic != 0 {
            return self.on_notified_of(&note);
        }
        let (session, events) = (note.session, &self.base.observers.events);
        events.notified(self.table.who(&note.peer), note);
        // Should its session have ended meanwhile, nobody would take it back any more.
        if !self.has(session) {
            events.forget(session);
        }
    }

    /// A notification of a library's topic has come. In one step with the end of its session: nothing of that comes
    /// after it.
    fn on_notified_of(&self, note: &Notification) {
        let (session, topic, number) = (note.session, note.topic, note.number);
        let inboxes = &self.base.observers.inboxes;
        let telling = lock(&self.telling);
        let came = match self.has(session) {
            true => inboxes.notified(self.table.who(&note.peer), note),
            false => Came::Dropped,
        };
        drop(telling);
        match came {
            Came::Waits => {}
            Came::Dropped => self.base.node(|node, _| node.session(session).note_taken(topic, number)),
            Came::For(queue, who) => {
                // First, so that an answer takes the acknowledgement along.
                let taken = |node: &mut Calls<'_>| node.session(session).note_taken(topic, number);
                let sessions = self.base.protocol.node_unsent(taken);
                queue.hand(&who, &note.payload);
                // This is the control thread, which looks for what is due before it sleeps.
                inboxes.add_unsent(sessions);
            }
        }
    }

    // ---- reaching ----

    /// Whether a peer is being reached.
    pub fn is_dialled(&self, owner: &Identity) -> bool {
        lock(&self.here).dials.contains_key(&Target::Peer(*owner))
    }

    /// What a dial has come to so far; none when there is none.
    pub fn dial_error(&self, target: &Target) -> Option<Error> {
        lock(&self.here).dials.get(target).map(|dial| dial.error(target))
    }

    /// A peer is to be reached: true when nobody is at it, and the caller begins.
    pub fn dial(&self, owner: Identity, dial: Dial) -> bool {
        match lock(&self.here).dials.entry(Target::Peer(owner)) {
            Entry::Occupied(mut under_way) => {
                under_way.get_mut().also(dial);
                false
            }
            Entry::Vacant(place) => {
                place.insert(dial);
                true
            }
        }
    }

    /// A peer whose turn it is to be dialled again, and that is not being reached: the caller begins.
    pub fn dial_again(&self) -> Option<Identity> {
        loop {
            let (peer, addresses) = self.table.due(boottime())?;
            if let Entry::Vacant(place) = lock(&self.here).dials.entry(Target::Peer(peer)) {
                place.insert(Dial::in_background(addresses));
                return Some(peer);
            }
        }
    }

    /// Where to hear who listens at an address. A session that this side opened there says it; else whoever it is
    /// is dialled, once for all who ask meanwhile.
    pub fn meet(&self, address: SocketAddr) -> Arc<End<Who>> {
        let there: Vec<Identity> = {
            let here = lock(&self.here);
            here.links.values().filter(|link| link.address == Some(address)).map(|link| link.peer).collect()
        };
        let met = self.base.node(|node, _| there.into_iter().find(|peer| node.session_with(peer).is_some()));
        if let Some(peer) = met {
            let end = Arc::<End<Who>>::default();
            end.set(Ok(self.table.who(&peer)));
            return end;
        }
        let mut here = lock(&self.here);
        let end = match here.dials.entry(Target::Address(address)) {
            Entry::Occupied(under_way) => under_way.get().met.clone(),
            Entry::Vacant(place) => {
                let end = place.insert(Dial::again(vec![address])).met.clone();
                self.base.commands.tell(ControlCommand::Meet(address));
                end
            }
        };
        drop(here);
        // An engine that closes ends the dials that are there by then: either it has seen this one, or this sees it.
        if let Err(error) = self.base.setup.check() {
            self.close(&error);
        }
        end
    }

    /// Who was dialled at an address is a peer that there is a session with.
    pub fn met(&self, target: &Target, peer: &Identity) {
        let dial = lock(&self.here).dials.remove(target);
        if let Some(dial) = dial {
            dial.met.set(Ok(self.table.who(peer)));
        }
    }

    /// The engine is closed: nobody is dialled any more.
    pub fn close(&self, why: &Error) {
        let dials = std::mem::take(&mut lock(&self.here).dials);
        dials.into_values().for_each(|dial| dial.met.set(Err(why.clone())));
    }

    /// The next address of a dial, after one that failed; inside the error when there is none any more, outside
    /// nothing when there is no such dial.
    pub fn next_address(
        &self,
        target: Target,
        failed: Option<(SocketAddr, Error)>,
    ) -> Option<Result<SocketAddr>> {
        let over = {
            let dials = &mut lock(&self.here).dials;
            let dial = dials.get_mut(&target)?;
            if let Some((address, error)) = failed {
                dial.failed(address, error);
            }
            loop {
                match (dial.next(), dial.for_the_joined()) {
                    (Some(to), _) => return Some(Ok(to)),
                    (None, Some(fresh)) => *dial = fresh,
                    (None, None) => break dials.remove(&target)?,
                }
            }
        };
        Some(Err(self.not_reached(target, &over)))
    }

    /// A peer was reached, and cannot be taken in: the error for those who wait.
    pub fn not_taken_in(&self, target: Target, at: SocketAddr, error: Error) -> Error {
        let dial = lock(&self.here).dials.remove(&target);
        let mut dial = dial.unwrap_or_else(|| Dial::again(vec![at]));
        dial.failed(at, error);
        self.not_reached(target, &dial)
    }

    /// Dialling has come to nothing: the error for those who waited.
    fn not_reached(&self, target: Target, dial: &Dial) -> Error {
        let error = dial.error(&target);
        let Some(peer) = target.peer() else {
            dial.met.set(Err(error.clone()));
            return error;
        };
        let (restarted, news) = self.table.not_reached(peer, &error, |at| dial.found_at(at), boottime());
        if let Some(error) = &restarted
            && news
        {
            log::info!(engine:% = self.base.setup.id(), peer:% = peer.engine; "{error}");
            self.base.observers.events.publish(Event::PeerRestarted(self.table.who(&peer), error.clone()));
        }
        self.base.observers.notices.moved.note();
        restarted.unwrap_or(error)
    }

    // ---- for whoever asks ----

    /// Every peer that is known.
    pub fn list(&self) -> Vec<Peer> {
        let (now, closed) = (boottime(), self.base.setup.is_closed());
        let (states, gone) = self.base.node(|node, now| {
            let _telling = lock(&self.telling);
            let states = node.session_states(now);
            let here: HashSet<Identity> = states.iter().map(|state| state.peer).collect();
            // Of one whose session has just ended, the peer table may not know yet.
            let gone = self.table.others(&here).into_iter();
            let gone: Vec<_> = gone.map(|(peer, session)| (peer, node.transfers_in(session))).collect();
            (states, gone)
        });
        let mut peers: HashMap<Identity, Peer> = HashMap::new();
        for state in states {
            let one = match (closed || state.leaving, state.suspect) {
                (true, _) => PeerState::Draining,
                (_, true) => PeerState::Suspect,
                _ => PeerState::Up,
            };
            let silent = Some(state.silent);
            let first = || Peer { state: one, silent, ..self.table.peer(&state.peer, 0, now) };
            let peer = peers.entry(state.peer).or_insert_with(first);
            (peer.state, peer.silent) = (peer.state.min(one), peer.silent.min(silent));
            peer.transfers += state.transfers;
            if self.has(state.session) {
                peer.add(&self.base.transports, state.session);
            }
        }
        let dialled: Vec<Identity> = lock(&self.here).dials.keys().filter_map(Target::peer).collect();
        for (identity, transfers) in gone.into_iter().chain(dialled.into_iter().map(|peer| (peer, 0))) {
            peers.entry(identity).or_insert_with(|| self.table.peer(&identity, transfers, now));
        }
        let mut peers: Vec<Peer> = peers.into_values().collect();
        peers.sort_by_key(|peer| (peer.state, peer.engine));
        peers
    }
}
