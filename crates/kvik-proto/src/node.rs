//! One engine's whole protocol state: sessions, grants, flows and timers.
//!
//! Every call takes the time (`now`, since boot) and may leave bytes to send ([`Node::take_output`]) and events
//! ([`Node::next_event`]). The caller drains events before it lets others in, so their order is the order in which
//! things happened.

use crate::channel::ChunkHeader;
use crate::common::{Common, Effect};
use crate::connection::{Connection, Context};
use crate::dues::Dues;
use crate::event::{Event, Timing};
use crate::frame::{Frame, Path};
use crate::grants::{Offer, ended};
use crate::handshake::{Established, Identity, Join};
use crate::holding::Holding;
use crate::nics::{NicAnswer, NicCall, Nics};
use crate::notify::check_payload;
use crate::peers::SessionState;
use crate::reclaim::ReclaimCounts;
use crate::session::Session;
use crate::transfers::{Claim, Open, Transfers, WorkId, WorkOutcome, WorkRequest, lost};
use crate::{FlowKey, OWN_SESSION};
use kvik_core::{ClassQueue, Code, Error, GrantId, GrantState, RegionId, Result};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

/// See the module's text. `R` names memory of this process; the node only hands it back.
pub struct Node<R> {
    common: Common<R>,
    sessions: BTreeMap<u64, Session<R>>,
    dues: Dues,
    preferred: HashMap<Identity, u64>,
    /// Sessions with something to copy or to sum, in turn.
    copying: ClassQueue<u64>,
    /// Flows that other threads are to stop; see [`Node::hold_stops`].
    held: Option<Vec<(GrantId, GrantState, FlowKey)>>,
}

impl<R: Clone> Node<R> {
    /// An engine with nothing going on.
    pub fn new(identity: Identity, timing: Timing, now: Duration) -> Node<R> {
        // Neither may be zero, or a tick would never end.
        let timing = Timing {
            heartbeat: timing.heartbeat.max(Duration::from_millis(1)),
            dead_after: timing.dead_after.max(Duration::from_millis(1)),
        };
        Node {
            common: Common::new(identity, timing, now),
            sessions: BTreeMap::from([(OWN_SESSION, Session::own())]),
            dues: Dues::default(),
            preferred: HashMap::new(),
            copying: ClassQueue::default(),
            held: None,
        }
    }

    /// Where sessions are under locks of their own, a grant that has ended stops its flows session by session, and
    /// other threads go on meanwhile. From here on so does this node: the stops wait, until [`Node::stop_held`] or the
    /// next [`Node::tick`].
    pub fn hold_stops(&mut self) {
        self.held.get_or_insert_default();
    }

    /// How many stops wait.
    pub fn held_stops(&self) -> usize {
        self.held.as_ref().map_or(0, Vec::len)
    }

    /// Does one of those that wait, in any order.
    pub fn stop_held(&mut self, which: usize) {
        let Some(held) = self.held.as_mut().filter(|held| which < held.len()) else { return };
        let (grant, state, key) = held.swap_remove(which);
        let last = held.iter().all(|(other, _, _)| *other != grant);
        self.stop(grant, state, key);
        if last {
            self.common.note_stopped(grant);
        }
        self.carry_out();
    }

    /// How many bytes the channels of one session may have in flight to send; one chunk is always allowed.
    pub fn set_window(&mut self, bytes: u64) {
        self.common.set_window(bytes);
    }

    /// The next thing that happened.
    pub fn next_event(&mut self) -> Option<Event> {
        self.common.next_event()
    }

    /// When [`Node::tick`] wants to be called again.
    pub fn next_timeout(&self) -> Option<Duration> {
        let session = self.dues.first().map(|(at, _)| at);
        session.into_iter().chain(self.common.grants().next_due()).min()
    }

    // ---- how calls reach a session ----

    /// Does something with a session, which may be over, and carries out what that asked for.
    fn with<T>(&mut self, id: u64, f: impl FnOnce(&mut Session<R>, &mut Common<R>) -> T) -> Option<T> {
        let result = self.with_one(id, f);
        self.carry_out();
        result
    }

    fn with_one<T>(&mut self, id: u64, f: impl FnOnce(&mut Session<R>, &mut Common<R>) -> T) -> Option<T> {
        let session = self.sessions.get_mut(&id)?;
        let result = f(session, &mut self.common);
        session.settle(&mut self.common);
        let due = session.due();
        if session.is_gone() {
            self.sessions.remove(&id);
        }
        self.dues.set(id, due);
        Some(result)
    }

    /// The same with its transfers.
    fn with_transfers<T>(
        &mut self,
        id: u64,
        f: impl FnOnce(&mut Transfers<R>, &mut Context<'_, R>) -> T,
    ) -> Option<T> {
        self.with(id, |session, common| {
            let (transfers, _, mut cx) = session.parts(common);
            f(transfers, &mut cx)
        })
    }

    /// Does what sessions have asked for. Each is done session by session, so that it may be done by another thread,
    /// and later.
    fn carry_out(&mut self) {
        while let Some(effect) = self.common.next_effect() {
            match effect {
                Effect::Stop(grant, state, flows) => match &mut self.held {
                    Some(held) if !flows.is_empty() => {
                        held.extend(flows.into_iter().map(|key| (grant, state, key)));
                    }
                    _ => {
                        flows.into_iter().for_each(|key| self.stop(grant, state, key));
                        self.common.note_stopped(grant);
                    }
                },
                Effect::Avoid(session, peer) => self.prefer_another(session, peer),
                Effect::Copy(session, class) => self.copying.push_once(class, session),
            }
        }
    }

    /// Stops a flow of a grant that has ended.
    fn stop(&mut self, grant: GrantId, state: GrantState, (session, transfer): FlowKey) {
        self.with_one(session, |session, common| {
            let (transfers, _, mut cx) = session.parts(common);
            transfers.stop(transfer, ended(grant, state), &mut cx);
        });
    }

    /// A session that is not over.
    fn live(&self, id: u64) -> Option<&Connection> {
        self.sessions.get(&id)?.connection()
    }

    // ---- sessions ----

    /// A handshake has ended well: the session begins. Where both sides connected at once, the connection that the
    /// lower id opened is preferred for new transfers, and the other one closes when it is idle.
    pub fn add_session(&mut self, established: Established, now: Duration) {
        let (id, peer, own) = (established.session, established.peer, self.common.identity().engine);
        let old = self.preferred.get(&peer).copied();
        let replaces = old.and_then(|old| self.live(old)).is_none_or(|old| {
            Connection::opened_by(&established, own) <= Connection::opened_by(old.established(), own)
        });
        let heartbeat = self.common.timing().heartbeat;
        self.sessions.insert(id, Session::new(established, heartbeat, now));
        if replaces {
            self.prefer(peer, id);
        }
        self.with(id, |_, _| ());
    }

    /// New transfers with a peer go over this session from now on.
    fn prefer(&mut self, peer: Identity, id: u64) {
        let old = self.preferred.insert(peer, id).filter(|old| *old != id);
        for (session, preferred) in old.map(|old| (old, false)).into_iter().chain([(id, true)]) {
            if let Some(connection) = self.sessions.get_mut(&session).and_then(Session::connection_mut) {
                connection.set_preferred(preferred);
            }
        }
    }

    /// A session is over, or soon will be: another one with the same peer is preferred, if there is one that stays.
    fn prefer_another(&mut self, id: u64, peer: Identity) {
        if self.preferred.get(&peer) != Some(&id) {
            return;
        }
        self.preferred.remove(&peer);
        let own = self.common.identity().engine;
        let others = self.sessions.iter().filter_map(|(id, session)| Some((*id, session.connection()?)));
        let usable = others.filter(|(_, other)| other.peer() == peer && other.stays());
        let next = usable.min_by_key(|(_, other)| Connection::opened_by(other.established(), own));
        if let Some((next, _)) = next {
            self.prefer(peer, next);
        }
    }

    /// The session for new transfers with this peer.
    pub fn session_with(&self, peer: &Identity) -> Option<u64> {
        self.preferred.get(peer).copied()
    }

    /// What the handshake of a session found out.
    pub fn established(&self, session: u64) -> Option<&Established> {
        self.live(session).map(Connection::established)
    }

    /// Every session's number.
    pub fn sessions(&self) -> Vec<u64> {
        self.sessions.iter().filter(|(_, session)| session.is_live()).map(|(id, _)| *id).collect()
    }

    /// Every session, as it stands now.
    pub fn session_states(&self, now: Duration) -> Vec<SessionState> {
        self.sessions.values().filter_map(|session| session.state(now)).collect()
    }

    /// Transfers of a session that are open, which may outlive it for as long as it takes to stop them.
    pub fn transfers_in(&self, session: u64) -> usize {
        self.sessions.get(&session).map_or(0, |session| session.transfers().len())
    }

    /// Lets a further connection into its session, once an index. Who opened the session dials them all: a join that
    /// comes to that side is one of its own, sent back by somebody in between.
    ///
    /// # Errors
    /// `ProtocolError` when the session is not there or was opened here, the proof is not its own, or the index is
    /// taken.
    pub fn join(&mut self, join: &Join, now: Duration) -> Result<()> {
        let joined = self.with(join.session, |session, common| session.join(join, now, common));
        joined.unwrap_or(Err("there is no such session")).map_err(|why| {
            Error::new(Code::ProtocolError, format!("a connection asked to join a session: {why}"))
        })
    }

    /// Bytes have come on the session's control connection.
    pub fn receive(&mut self, id: u64, bytes: &[u8], now: Duration) {
        self.expire(now);
        self.with(id, |session, common| session.receive(bytes, now, common));
    }

    /// Some of a chunk has come on one of the session's channels: the peer lives.
    pub fn touch(&mut self, id: u64, now: Duration) {
        self.with(id, |session, common| session.heard(now, common));
    }

    /// Sessions that have had something to send since they were last asked for.
    pub fn take_unsent(&mut self, into: &mut Vec<u64>) {
        self.common.take_unsent(into);
    }

    /// Bytes to send on the session's control connection. An empty buffer is taken in exchange.
    pub fn take_output(&mut self, id: u64, into: &mut Vec<u8>) {
        if let Some(connection) = self.sessions.get_mut(&id).and_then(Session::connection_mut) {
            connection.take_output(into);
        }
    }

    /// Bytes that are held here because of a session: what its peer sent and asked for, and what it leaves unread.
    pub fn held_for(&self, id: u64) -> u64 {
        self.sessions.get(&id).map_or(0, Session::held)
    }

    /// Ends a session: its flows stop, and conclude once their work requests are done.
    pub fn close_session(&mut self, id: u64, error: Error) {
        self.with(id, |session, common| session.close(error, common));
    }

    /// A data channel of a session has ended: the session ends with its peer's last word, or without it soon.
    pub fn channel_lost(&mut self, id: u64, error: Error, now: Duration) {
        self.with(id, |session, common| session.channel_lost(error, now, common));
    }

    /// Sends a frame on a session that may be gone by now.
    fn send(&mut self, id: u64, frame: &Frame) {
        self.with(id, |session, common| session.send(frame, common));
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
        self.sessions.values().all(Session::is_quiet)
    }

    /// Beats that were sent later than half a heartbeat after they were due.
    pub fn late_beats(&self) -> u64 {
        self.common.counts.late_beats
    }

    // ---- grants ----

    /// Gives a grant. Requests that came before it are served now.
    ///
    /// # Errors
    /// `InvalidArgument` for an id that was used before.
    pub fn grant(&mut self, id: GrantId, offer: Offer<R>, now: Duration) -> Result<()> {
        self.common.grants_mut().insert(id, offer)?;
        self.expire(now);
        for (session, transfer) in self.common.grants_mut().take_parked(id) {
            self.with_transfers(session, |transfers, cx| transfers.unpark(transfer, now, cx));
        }
        Ok(())
    }

    /// Ends a grant. `GrantEnded` comes when its pages are the owner's again, which may be at once.
    pub fn end_grant(&mut self, id: GrantId, state: GrantState) {
        self.common.end_grant(id, state);
        self.carry_out();
    }

    /// Gives a live grant more time: how much it now has.
    ///
    /// # Errors
    /// The way the grant ended, or `GrantUnknown`.
    pub fn extend_grant(&mut self, id: GrantId, by: Duration, now: Duration) -> Result<Duration> {
        self.expire(now);
        Ok(self.common.grants_mut().extend(id, by)?.saturating_sub(now))
    }

    /// Where a grant stands; `None` when it is unknown.
    pub fn grant_state(&self, id: GrantId) -> Option<GrantState> {
        self.common.grants().state(id)
    }

    /// Ends all grants over a region that is to be closed.
    pub fn end_grants_of(&mut self, region: RegionId) {
        for id in self.common.grants().of_region(region) {
            self.end_grant(id, GrantState::Closed);
        }
    }

    /// Ends every grant, for an engine that closes.
    pub fn end_all_grants(&mut self) {
        for id in self.common.grants().all() {
            self.end_grant(id, GrantState::Closed);
        }
    }

    /// Number of grants that have not ended.
    pub fn grants(&self) -> usize {
        self.common.grants().len()
    }

    /// Pages of grants that are over while a transfer may still touch them: they are not the owner's again yet.
    pub fn quarantined(&self) -> u64 {
        self.common.grants().quarantined()
    }

    /// What keeps a grant from ending; `None` when it has ended or was never given.
    pub fn holding(&self, id: GrantId) -> Option<Holding> {
        let (view, flows) = self.common.grants().held(id)?;
        let by = flows.iter().map(|key| self.holder(*key)).collect();
        Some(Holding { grant: id, pages: view.pages().clone(), parts: view.parts(), by })
    }

    /// The same of every grant over a region that is ending.
    pub fn holdings_of(&self, region: RegionId) -> Vec<Holding> {
        self.common.grants().of_region(region).into_iter().filter_map(|id| self.holding(id)).collect()
    }

    /// The same of every grant that is ending.
    pub fn holdings(&self) -> Vec<Holding> {
        self.common.grants().all().into_iter().filter_map(|id| self.holding(id)).collect()
    }

    fn holder(&self, (session, transfer): FlowKey) -> String {
        self.sessions.get(&session).map_or_else(String::new, |session| session.holder(transfer))
    }

    // ---- transfers ----

    /// Begins a transfer with the peer of a session. `Finished` tells its end.
    ///
    /// # Errors
    /// `PeerLost` when the session is gone, `InvalidArgument` or `DuplicatePage` for a side that cannot be moved,
    /// `MemoryCapReached` while too much waits to be sent, `TransportUnavailable` for [`crate::Path::OneSided`] without
    /// a one-sided link to the peer.
    pub fn begin(&mut self, session: u64, open: Open<R>, now: Duration) -> Result<FlowKey> {
        if !self.sessions.contains_key(&session) {
            open.check_side()?;
            return Err(lost());
        }
        let begun = self.with_transfers(session, |transfers, cx| transfers.begin(open, now, cx));
        begun.unwrap_or_else(|| Err(lost()))
    }

    /// Begins a transfer with a grant of this engine itself: a copy, with all checks of a peer's transfer.
    ///
    /// # Errors
    /// The way the grant ended, `GrantWrongRight`, `PageNotGranted`, `ShapeMismatch`, `InvalidArgument` or
    /// `DuplicatePage`.
    pub fn begin_own(&mut self, open: Open<R>, now: Duration) -> Result<FlowKey> {
        self.expire(now);
        self.with_transfers(OWN_SESSION, |transfers, cx| transfers.begin_own(open, cx))
            .unwrap_or_else(|| Err(lost()))
    }

    /// Ends a transfer that this side began. `Finished` comes when nothing here touches its memory any more.
    pub fn cancel(&mut self, key: FlowKey, error: Error) {
        self.with_transfers(key.0, |transfers, cx| transfers.stop(key.1, error, cx));
    }

    /// Transfers and requests that have not ended on this side.
    pub fn open_flows(&self) -> usize {
        self.sessions.values().map(|session| session.transfers().len()).sum()
    }

    /// The next chunk to send on a channel of the session. Transfers take turns.
    ///
    /// None also while the session's window is full: then `Event::Send` follows when there is room.
    pub fn next_send(&mut self, session: u64, now: Duration) -> Option<WorkRequest<R>> {
        self.next_of(session, Path::Channels, Claim::Next, now)
    }

    /// The next chunk of those that `claim` may be given: to send over [`Path::Channels`], to post over
    /// [`Path::OneSided`].
    pub fn next_of(
        &mut self,
        session: u64,
        path: Path,
        claim: Claim,
        now: Duration,
    ) -> Option<WorkRequest<R>> {
        self.expire(now);
        self.with_transfers(session, |transfers, cx| match path {
            Path::OneSided => transfers.next_post(claim, cx),
            Path::Channels | Path::Memory => transfers.next_send(claim, cx),
        })?
    }

    /// Whether the session has something to send.
    pub fn wants_to_send(&self, session: u64) -> bool {
        self.live(session).is_some() && self.sessions[&session].transfers().turns().wants_to_send()
    }

    /// What to do with a chunk that a channel of the session announces: `None` means that it must be thrown away,
    /// since its transfer has ended.
    ///
    /// # Errors
    /// `ProtocolError`: the channel must be cut.
    pub fn place(
        &mut self,
        session: u64,
        header: &ChunkHeader,
        now: Duration,
    ) -> Result<Option<WorkRequest<R>>> {
        self.expire(now);
        if header.session != session {
            return Err(Error::new(Code::ProtocolError, "a chunk of another session came on this channel"));
        }
        let placed = self.with(session, |session, common| {
            session.heard(now, common);
            session.parts(common).0.place(header, now)
        });
        placed.unwrap_or(Ok(None))
    }

    /// The next part to copy or to sum, of any transfer. Sessions take turns, and their transfers.
    pub fn next_copy(&mut self, now: Duration) -> Option<WorkRequest<R>> {
        self.expire(now);
        for class in self.copying.turn() {
            while let Some(id) = self.copying.pop(class) {
                let next = self.with_transfers(id, |transfers, _| {
                    (transfers.next_copy(class, now), transfers.turns().copying.waits(class))
                });
                let Some((request, more)) = next else { continue };
                if more {
                    self.copying.push_once(class, id);
                }
                if let Some(request) = request {
                    self.copying.took(class, request.part.end - request.part.start);
                    return Some(request);
                }
            }
        }
        None
    }

    /// A work request has ended; whoever executed it does not touch its memory any more.
    pub fn work_done(&mut self, id: WorkId, outcome: WorkOutcome) {
        self.with_transfers(id.session(), |transfers, cx| transfers.done(id, outcome, cx));
    }

    /// A work request that must stop cannot be left for a long time: a device touches its memory, and cannot be
    /// stopped. Who began the transfer hears of its end now, and why the pages are not free. The flow stays, and a
    /// grant that it is of, until the work request is done. A NIC's work request ends the session, too: the owner cuts
    /// its own path.
    pub fn work_stuck(&mut self, id: WorkId, error: Error) {
        self.with_transfers(id.session(), |transfers, cx| transfers.stuck(id, error, cx));
    }

    /// Bytes of chunks that a session's channels have in flight to send.
    pub fn in_flight(&self, session: u64) -> u64 {
        let live = self.sessions.get(&session).filter(|session| session.is_live());
        live.map_or(0, |session| session.transfers().turns().in_flight())
    }

    /// By what memory came back that was still used when it was asked for.
    pub fn reclaims(&self) -> ReclaimCounts {
        self.common.counts.reclaims
    }

    // ---- notifications ----

    /// Sends a notification: its number in the session. Its end comes as [`Event::NoteEnded`].
    ///
    /// # Errors
    /// `NotificationsFull` while the window is; [`Event::NoteRoom`] says when to try again. `InvalidArgument` for
    /// more than [`crate::MAX_NOTIFICATION`] bytes; `PeerLost` when the session is over.
    pub fn notify(&mut self, session: u64, payload: &Arc<[u8]>, deadline: Duration) -> Result<u64> {
        check_payload(payload)?;
        let sent = self.with(session, |session, common| {
            let (_, notes, mut cx) = session.parts(common);
            notes.send(payload, deadline, &mut cx)
        });
        sent.unwrap_or_else(|| Err(crate::notify::lost()))
    }

    /// The consumer has taken a notification. Those of a session that is over are nobody's any more.
    pub fn note_taken(&mut self, session: u64, number: u64) {
        self.with(session, |session, common| {
            let (_, notes, mut cx) = session.parts(common);
            notes.taken(number, &mut cx);
        });
    }

    // ---- NICs ----

    /// The engine has a one-sided link to the session's peer, for as long as the session lives.
    pub fn add_one_sided(&mut self, session: u64) {
        if let Some(connection) = self.sessions.get_mut(&session).and_then(Session::connection_mut) {
            connection.add_one_sided();
        }
    }

    /// This engine's NICs are reached at other addresses from now on: whoever uses them is told.
    pub fn tell_nics(&mut self, nics: &Nics) {
        let uses = |id: &u64| self.live(*id).is_some_and(Connection::has_one_sided);
        let users: Vec<u64> = self.sessions.keys().copied().filter(uses).collect();
        users.into_iter().for_each(|session| self.tell_nics_to(session, nics.clone()));
    }

    /// As [`Node::tell_nics`], for one session.
    pub fn tell_nics_to(&mut self, session: u64, nics: Nics) {
        self.send(session, &Frame::Nics(nics));
    }

    /// A NIC of this engine wants a connection to one of the session's peer, and that nothing which it posted before
    /// can land there any more: [`Event::Reached`] follows, or the session ends.
    pub fn reach(&mut self, session: u64, call: NicCall) {
        self.send(session, &Frame::Reach(call));
    }

    /// [`Event::Reach`] was done.
    pub fn answer_reach(&mut self, session: u64, answer: NicAnswer) {
        self.send(session, &Frame::Reached(answer));
    }

    /// The next chunk to post on the session's one-sided link. Transfers take turns.
    pub fn next_post(&mut self, session: u64, now: Duration) -> Option<WorkRequest<R>> {
        self.next_of(session, Path::OneSided, Claim::Next, now)
    }

    /// Whether the session has something to post.
    pub fn wants_to_post(&self, session: u64) -> bool {
        self.live(session).is_some() && self.sessions[&session].transfers().turns().wants_to_post()
    }

    /// Transfers for which a peer's NIC may reach pages of this engine.
    pub fn exposed(&self) -> usize {
        self.common.counts.exposed
    }

    /// No NIC can touch memory for this session any more: [`Event::Fence`] was done. Not taken of a live session.
    pub fn fenced(&mut self, session: u64) {
        self.with_transfers(session, Transfers::fenced);
    }

    // ---- time ----

    /// Lets time pass: beats, deaths, deadlines, expiries.
    pub fn tick(&mut self, now: Duration) {
        self.expire(now);
        while self.held_stops() > 0 {
            self.stop_held(0);
        }
        while let Some((_, id)) = self.dues.first().filter(|(at, _)| *at <= now) {
            self.with(id, |session, common| session.tick(now, common));
        }
    }

    /// It is this late by now. What is done next counts its own patience from here: without it, from the last thing
    /// that happened, which may be a heartbeat ago.
    pub fn note_time(&mut self, now: Duration) {
        self.common.note_time(now);
    }

    /// Applies expiry before anything that is buffered is looked at.
    fn expire(&mut self, now: Duration) {
        self.common.expire(now);
        self.carry_out();
    }
}
