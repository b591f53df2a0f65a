//! One engine's whole protocol: sessions, grants, flows and timers.
//!
//! [`Protocol`] is what all threads of an engine share: each session is under a lock of its own, and so is the table of
//! grants. A [`Node`] is one thread's way into it. Every call takes the time (`now`, since boot) and may leave bytes to
//! send ([`Node::take_output`]) and events ([`Node::next_event`]). Whoever makes a call drains its events afterwards,
//! with no lock of its own; what the call asks of other sessions happens then, one session at a time.
//!
//! Locks, always in this order: the directory of sessions for new transfers, a session, and then one of those that are
//! held for a few lines: the table of grants, the queue of sessions that copy, the times, the map of sessions.

use crate::channel::ChunkHeader;
use crate::common::{Call, Common, Effect, Output};
use crate::connection::{Connection, Context};
use crate::dues::Dues;
use crate::event::{Event, Timing};
use crate::frame::{Frame, Path};
use crate::grants::ended;
use crate::handshake::{Established, Identity, Join};
use crate::holding::Holding;
use crate::nics::{NicAnswer, NicCall, Nics};
use crate::notify::check_payload;
use crate::offer::Offer;
use crate::peers::SessionState;
use crate::reclaim::ReclaimCounts;
use crate::session::Session;
use crate::sessions::Sessions;
use crate::sync::{Mutex, lock};
use crate::transfers::{Claim, Open, Transfers, WorkId, WorkOutcome, WorkRequest, lost};
use crate::{FlowKey, OWN_SESSION};
use kvik_core::{Code, Error, GrantId, GrantState, RegionId, Result};
use std::collections::HashMap;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

/// What the threads of an engine share. `R` names memory of this process; it is only handed back.
pub struct Protocol<R> {
    common: Common<R>,
    sessions: Sessions<R>,
    dues: Dues,
    /// The session for new transfers with each peer.
    preferred: Mutex<HashMap<Identity, u64>>,
}

impl<R: Clone> Protocol<R> {
    /// An engine with nothing going on.
    pub fn new(identity: Identity, timing: Timing) -> Protocol<R> {
        // Neither may be zero, or a tick would never end.
        let timing = Timing {
            heartbeat: timing.heartbeat.max(Duration::from_millis(1)),
            dead_after: timing.dead_after.max(Duration::from_millis(1)),
        };
        let sessions = Sessions::new();
        sessions.insert(OWN_SESSION, Session::own());
        let (common, dues, preferred) = (Common::new(identity, timing), Dues::default(), Mutex::default());
        Protocol { common, sessions, dues, preferred }
    }

    /// How many bytes the channels of one session may have in flight to send; one chunk is always allowed.
    pub fn set_window(&self, bytes: u64) {
        self.common.set_window(bytes);
    }

    /// When [`Node::tick`] wants to be called again.
    pub fn next_timeout(&self) -> Option<Duration> {
        self.dues.soonest().into_iter().chain(self.common.next_expiry()).min()
    }

    /// Transfers for which a peer's NIC may reach pages of this engine.
    pub fn exposed(&self) -> usize {
        self.common.counts.exposed() as usize
    }
}

/// One thread's way into the protocol: see the module's text. `S` is how it holds it: alone, or by a reference.
pub struct Node<R, S = Box<Protocol<R>>> {
    protocol: S,
    output: Output,
    /// Flows that other threads are to stop; see [`Node::hold_stops`].
    held: Option<Vec<(GrantId, GrantState, FlowKey)>>,
    of: std::marker::PhantomData<fn() -> R>,
}

impl<R: Clone> Node<R> {
    /// An engine with one thread, and nothing going on.
    pub fn new(identity: Identity, timing: Timing, now: Duration) -> Node<R> {
        Node::on(Box::new(Protocol::new(identity, timing)), now)
    }
}

impl<R: Clone, S: Deref<Target = Protocol<R>>> Node<R, S> {
    /// A thread's calls from now on.
    pub fn on(protocol: S, now: Duration) -> Node<R, S> {
        let mut output = Output::default();
        output.note_time(now);
        Node { protocol, output, held: None, of: std::marker::PhantomData }
    }

    /// What is told to other sessions' flows when a grant ends comes later, and other threads go on meanwhile: in a
    /// simulation of one thread, from here on, when [`Node::stop_held`] says, or at the next [`Node::tick`].
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
            self.call().note_stopped(grant);
        }
    }

    /// How many bytes the channels of one session may have in flight to send; one chunk is always allowed.
    pub fn set_window(&mut self, bytes: u64) {
        self.protocol.set_window(bytes);
    }

    /// The next thing that happened. An event is carried out before the next one is asked for: it may free what the
    /// next one says is free.
    pub fn next_event(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.output.next_event() {
                return Some(event);
            }
            self.carry_out()?;
        }
    }

    /// When [`Node::tick`] wants to be called again.
    pub fn next_timeout(&self) -> Option<Duration> {
        self.protocol.next_timeout()
    }

    // ---- how calls reach a session ----

    fn call(&mut self) -> Call<'_, R> {
        Call { common: &self.protocol.common, output: &mut self.output }
    }

    /// Does something with a session, which may be over.
    fn with<T>(&mut self, id: u64, f: impl FnOnce(&mut Session<R>, &mut Call<'_, R>) -> T) -> Option<T> {
        let cell = self.protocol.sessions.get(id)?;
        let mut session = lock(&cell);
        let mut call = Call { common: &self.protocol.common, output: &mut self.output };
        let result = f(&mut session, &mut call);
        session.settle(&mut call);
        let (before, due) = session.change_due();
        self.protocol.dues.change(id, before, due);
        if session.is_gone() {
            self.protocol.sessions.remove(id);
        }
        Some(result)
    }

    /// The same with its transfers.
    fn with_transfers<T>(
        &mut self,
        id: u64,
        f: impl FnOnce(&mut Transfers<R>, &mut Context<'_, R>) -> T,
    ) -> Option<T> {
        self.with(id, |session, call| {
            let (transfers, _, mut cx) = session.parts(call);
            f(transfers, &mut cx)
        })
    }

    /// Looks at a session.
    fn look<T>(&self, id: u64, f: impl FnOnce(&Session<R>) -> T) -> Option<T> {
        self.protocol.sessions.get(id).map(|cell| f(&lock(&cell)))
    }

    /// Looks at each session, by their numbers.
    fn each<T>(&self, mut f: impl FnMut(u64, &Session<R>) -> T) -> impl Iterator<Item = T> {
        self.protocol.sessions.all().into_iter().map(move |(id, cell)| f(id, &lock(&cell)))
    }

    /// Does one of the things that calls have asked for; `None` when there is none left.
    fn carry_out(&mut self) -> Option<()> {
        self.stop_flows();
        match self.output.next_effect()? {
            Effect::Stop(..) => {}
            Effect::Stopped(grant) => {
                let waits = self.held.iter().flatten().any(|(held, _, _)| *held == grant);
                if !waits {
                    self.call().note_stopped(grant);
                }
            }
            Effect::Avoid(session, peer) => self.prefer_another(session, peer),
        }
        Some(())
    }

    /// Tells the flows of grants that are over.
    fn stop_flows(&mut self) {
        while let Some((grant, state, flows)) = self.output.next_stop() {
            match &mut self.held {
                Some(held) => held.extend(flows.into_iter().map(|key| (grant, state, key))),
                None => flows.into_iter().for_each(|key| self.stop(grant, state, key)),
            }
        }
    }

    /// Applies expiry before anything that is buffered is looked at.
    fn expire(&mut self, now: Duration) {
        self.call().expire(now);
        self.stop_flows();
    }

    /// Stops a flow of a grant that has ended.
    fn stop(&mut self, grant: GrantId, state: GrantState, (session, transfer): FlowKey) {
        self.with_transfers(session, |transfers, cx| transfers.stop(transfer, ended(grant, state), cx));
    }

    // ---- sessions ----

    /// A handshake has ended well: the session begins. Where both sides connected at once, the connection that the
    /// lower id opened is preferred for new transfers, and the other one closes when it is idle.
    pub fn add_session(&mut self, established: Established, now: Duration) {
        let (id, peer, own) = (established.session, established.peer, self.call().identity().engine);
        let heartbeat = self.call().timing().heartbeat;
        let mut preferred = lock(&self.protocol.preferred);
        let opened_by = Connection::opened_by(&established, own);
        let older = preferred.get(&peer).and_then(|old| {
            self.look(*old, |old| Some(Connection::opened_by(old.connection()?.established(), own)))?
        });
        self.protocol.sessions.insert(id, Session::new(established, heartbeat, now));
        if older.is_none_or(|older| opened_by <= older) {
            self.prefer(&mut preferred, peer, id);
        }
        drop(preferred);
        self.with(id, |_, _| ());
    }

    /// New transfers with a peer go over this session from now on.
    fn prefer(&self, directory: &mut HashMap<Identity, u64>, peer: Identity, id: u64) {
        let old = directory.insert(peer, id).filter(|old| *old != id);
        for (session, preferred) in old.map(|old| (old, false)).into_iter().chain([(id, true)]) {
            let Some(cell) = self.protocol.sessions.get(session) else { continue };
            if let Some(connection) = lock(&cell).connection_mut() {
                connection.set_preferred(preferred);
            }
        }
    }

    /// A session is over, or soon will be: another one with the same peer is preferred, if there is one that stays.
    fn prefer_another(&mut self, id: u64, peer: Identity) {
        let own = self.call().identity().engine;
        let mut preferred = lock(&self.protocol.preferred);
        if preferred.get(&peer) != Some(&id) {
            return;
        }
        preferred.remove(&peer);
        let usable = self.each(|id, session| {
            let other = session.connection().filter(|other| other.peer() == peer && other.stays())?;
            Some((Connection::opened_by(other.established(), own), id))
        });
        if let Some((_, next)) = usable.flatten().min() {
            self.prefer(&mut preferred, peer, next);
        }
    }

    /// The session for new transfers with this peer.
    pub fn session_with(&self, peer: &Identity) -> Option<u64> {
        lock(&self.protocol.preferred).get(peer).copied()
    }

    /// What the handshake of a session found out.
    pub fn established(&self, session: u64) -> Option<Arc<Established>> {
        self.look(session, |session| session.connection().map(|connection| connection.established().clone()))?
    }

    /// Whether a session is there, and not over.
    pub fn is_live(&self, session: u64) -> bool {
        self.look(session, Session::is_live).unwrap_or_default()
    }

    /// Every session's number.
    pub fn sessions(&self) -> Vec<u64> {
        self.each(|id, session| session.is_live().then_some(id)).flatten().collect()
    }

    /// Every session, as it stands now.
    pub fn session_states(&self, now: Duration) -> Vec<SessionState> {
        self.each(|_, session| session.state(now)).flatten().collect()
    }

    /// Whether nothing was heard on a session for half of the time after which its peer is dead.
    pub fn is_suspect(&self, session: u64) -> bool {
        self.look(session, |session| session.connection().is_some_and(Connection::is_suspect))
            .unwrap_or_default()
    }

    /// Transfers of a session that are open, which may outlive it for as long as it takes to stop them.
    pub fn transfers_in(&self, session: u64) -> usize {
        self.look(session, |session| session.transfers().len()).unwrap_or_default()
    }

    /// Lets a further connection into its session, once an index. Who opened the session dials them all: a join that
    /// comes to that side is one of its own, sent back by somebody in between.
    ///
    /// # Errors
    /// `ProtocolError` when the session is not there or was opened here, the proof is not its own, or the index is
    /// taken.
    pub fn join(&mut self, join: &Join, now: Duration) -> Result<()> {
        let joined = self.with(join.session, |session, call| session.join(join, now, call));
        joined.unwrap_or(Err("there is no such session")).map_err(|why| {
            Error::new(Code::ProtocolError, format!("a connection asked to join a session: {why}"))
        })
    }

    /// Bytes have come on the session's control connection.
    pub fn receive(&mut self, id: u64, bytes: &[u8], now: Duration) {
        self.expire(now);
        self.with(id, |session, call| session.receive(bytes, now, call));
    }

    /// Some of a chunk has come on one of the session's channels: the peer lives.
    pub fn touch(&mut self, id: u64, now: Duration) {
        self.with(id, |session, call| session.heard(now, call));
    }

    /// Sessions that have had something to send since they were last asked for.
    pub fn take_unsent(&mut self, into: &mut Vec<u64>) {
        self.output.take_unsent(into);
    }

    /// Bytes to send on the session's control connection. An empty buffer is taken in exchange.
    pub fn take_output(&mut self, id: u64, into: &mut Vec<u8>) {
        let Some(cell) = self.protocol.sessions.get(id) else { return };
        if let Some(connection) = lock(&cell).connection_mut() {
            connection.take_output(into);
        }
    }

    /// Bytes that are held here because of a session: what its peer sent and asked for, and what it leaves unread.
    pub fn held_for(&self, id: u64) -> u64 {
        self.look(id, Session::held).unwrap_or_default()
    }

    /// Ends a session: its flows stop, and conclude once their work requests are done.
    pub fn close_session(&mut self, id: u64, error: Error) {
        self.with(id, |session, call| session.close(error, call));
    }

    /// A data channel of a session has ended: the session ends with its peer's last word, or without it soon.
    pub fn channel_lost(&mut self, id: u64, error: Error, now: Duration) {
        self.with(id, |session, call| session.channel_lost(error, now, call));
    }

    /// Sends a frame on a session that may be gone by now.
    fn send(&mut self, id: u64, frame: &Frame) {
        self.with(id, |session, call| session.send(frame, call));
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
        self.each(|_, session| session.is_quiet()).all(|quiet| quiet)
    }

    /// Beats that were sent later than half a heartbeat after they were due.
    pub fn late_beats(&self) -> u64 {
        self.protocol.common.counts.late_beats()
    }

    // ---- grants ----

    /// Gives a grant. Requests that came before it are served now.
    ///
    /// # Errors
    /// `InvalidArgument` for an id that was used before.
    pub fn grant(&mut self, id: GrantId, offer: Offer<R>, now: Duration) -> Result<()> {
        self.call().add_grant(id, offer)?;
        self.expire(now);
        let parked = self.protocol.common.grants().take_parked(id);
        for (session, transfer) in parked {
            self.with_transfers(session, |transfers, cx| transfers.unpark(transfer, now, cx));
        }
        Ok(())
    }

    /// Ends a grant. `GrantEnded` comes when its pages are the owner's again, which may be at once.
    pub fn end_grant(&mut self, id: GrantId, state: GrantState) {
        self.call().end_grant(id, state);
    }

    /// Gives a live grant more time: how much it now has.
    ///
    /// # Errors
    /// The way the grant ended, or `GrantUnknown`.
    pub fn extend_grant(&mut self, id: GrantId, by: Duration, now: Duration) -> Result<Duration> {
        self.expire(now);
        Ok(self.call().extend_grant(id, by)?.saturating_sub(now))
    }

    /// Where a grant stands; `None` when it is unknown.
    pub fn grant_state(&self, id: GrantId) -> Option<GrantState> {
        self.protocol.common.grants().state(id)
    }

    /// Ends all grants over a region that is to be closed.
    pub fn end_grants_of(&mut self, region: RegionId) {
        let over = self.protocol.common.grants().of_region(region);
        for id in over {
            self.end_grant(id, GrantState::Closed);
        }
    }

    /// Ends every grant, for an engine that closes.
    pub fn end_all_grants(&mut self) {
        let all = self.protocol.common.grants().all();
        for id in all {
            self.end_grant(id, GrantState::Closed);
        }
    }

    /// Number of grants that have not ended.
    pub fn grants(&self) -> usize {
        self.protocol.common.grants().len()
    }

    /// Pages of grants that are over while a transfer may still touch them: they are not the owner's again yet.
    pub fn quarantined(&self) -> u64 {
        self.protocol.common.grants().quarantined()
    }

    /// What keeps a grant from ending; `None` when it has ended or was never given.
    pub fn holding(&self, id: GrantId) -> Option<Holding> {
        let (given, flows) = self.protocol.common.grants().held(id)?;
        let view = &given.offer().view;
        let by = flows.iter().map(|key| self.holder(*key)).collect();
        Some(Holding { grant: id, pages: view.pages().clone(), parts: view.parts(), by })
    }

    /// The same of every grant over a region that is ending.
    pub fn holdings_of(&self, region: RegionId) -> Vec<Holding> {
        self.protocol
            .common
            .grants()
            .of_region(region)
            .into_iter()
            .filter_map(|id| self.holding(id))
            .collect()
    }

    /// The same of every grant that is ending.
    pub fn holdings(&self) -> Vec<Holding> {
        self.protocol.common.grants().all().into_iter().filter_map(|id| self.holding(id)).collect()
    }

    fn holder(&self, (session, transfer): FlowKey) -> String {
        self.look(session, |session| session.holder(transfer)).unwrap_or_default()
    }

    // ---- transfers ----

    /// Begins a transfer with the peer of a session. `Finished` tells its end.
    ///
    /// # Errors
    /// `PeerLost` when the session is gone, `InvalidArgument` or `DuplicatePage` for a side that cannot be moved,
    /// `MemoryCapReached` while too much waits to be sent, `TransportUnavailable` for [`crate::Path::OneSided`] without
    /// a one-sided link to the peer.
    pub fn begin(&mut self, session: u64, open: Open<R>, now: Duration) -> Result<FlowKey> {
        let side = open.check_side();
        let begun = self.with_transfers(session, |transfers, cx| transfers.begin(open, now, cx));
        begun.unwrap_or_else(|| side.and(Err(lost())))
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
        self.each(|_, session| session.transfers().len()).sum()
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
        self.look(session, |one| one.is_live() && one.transfers().turns().wants_to_send()).unwrap_or_default()
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
        let placed = self.with(session, |session, call| {
            session.heard(now, call);
            session.parts(call).0.place(header, now)
        });
        placed.unwrap_or(Ok(None))
    }

    /// The next part to copy or to sum, of any transfer. Sessions take turns, and their transfers.
    pub fn next_copy(&mut self, now: Duration) -> Option<WorkRequest<R>> {
        self.expire(now);
        while let Some((class, id)) = self.protocol.common.next_to_copy() {
            let next = self.with_transfers(id, |transfers, cx| transfers.next_copy(class, now, cx));
            if let Some(Some(request)) = next {
                return Some(request);
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
        let look = |one: &Session<R>| if one.is_live() { one.transfers().turns().in_flight() } else { 0 };
        self.look(session, look).unwrap_or_default()
    }

    /// By what memory came back that was still used when it was asked for.
    pub fn reclaims(&self) -> ReclaimCounts {
        self.protocol.common.counts.reclaims()
    }

    // ---- notifications ----

    /// Sends a notification: its number in the session. Its end comes as [`Event::NoteEnded`].
    ///
    /// # Errors
    /// `NotificationsFull` while the window is; [`Event::NoteRoom`] says when to try again. `InvalidArgument` for
    /// more than [`crate::MAX_NOTIFICATION`] bytes; `PeerLost` when the session is over.
    pub fn notify(&mut self, session: u64, payload: &Arc<[u8]>, deadline: Duration) -> Result<u64> {
        check_payload(payload)?;
        let sent = self.with(session, |session, call| {
            let (_, notes, mut cx) = session.parts(call);
            notes.send(payload, deadline, &mut cx)
        });
        sent.unwrap_or_else(|| Err(crate::notify::lost()))
    }

    /// The consumer has taken a notification. Those of a session that is over are nobody's any more.
    pub fn note_taken(&mut self, session: u64, number: u64) {
        self.with(session, |session, call| {
            let (_, notes, mut cx) = session.parts(call);
            notes.taken(number, &mut cx);
        });
    }

    // ---- NICs ----

    /// The engine has a one-sided link to the session's peer, for as long as the session lives.
    pub fn add_one_sided(&mut self, session: u64) {
        let Some(cell) = self.protocol.sessions.get(session) else { return };
        if let Some(connection) = lock(&cell).connection_mut() {
            connection.add_one_sided();
        }
    }

    /// This engine's NICs are reached at other addresses from now on: whoever uses them is told.
    pub fn tell_nics(&mut self, nics: &Nics) {
        let uses = |session: &Session<R>| session.connection().is_some_and(Connection::has_one_sided);
        let users: Vec<u64> = self.each(|id, session| uses(session).then_some(id)).flatten().collect();
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
        self.look(session, |one| one.is_live() && one.transfers().turns().wants_to_post()).unwrap_or_default()
    }

    /// Transfers for which a peer's NIC may reach pages of this engine.
    pub fn exposed(&self) -> usize {
        self.protocol.exposed()
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
        while let Some(id) = self.protocol.dues.overdue(now) {
            self.with(id, |session, call| session.tick(now, call));
        }
    }

    /// It is this late by now. What is done next counts its own patience from here: without it, from the last thing
    /// that happened, which may be a heartbeat ago.
    pub fn note_time(&mut self, now: Duration) {
        self.output.note_time(now);
    }
}
