//! One engine's whole protocol: sessions, grants, flows and timers.
//!
//! [`Protocol`] is what all threads of an engine share: each session is under a lock of its own, and so is the table of
//! grants. A [`Node`] is one thread's way into it. Every call takes the time (`now`, since boot) and may leave bytes to
//! send ([`crate::SessionCalls::take_output`]) and events ([`Node::next_event`]). Whoever makes a call drains its
//! events afterwards, with no lock of its own; what the call asks of other sessions happens then, one session at a
//! time.
//!
//! Locks, always in this order: the directory of sessions for new transfers, a session, and then one of those that are
//! held for a few lines: the table of grants, the queue of sessions that copy, the times, the map of sessions.

use crate::common::{Call, Common, Effect, Output, Stop};
use crate::connection::{Connection, Context};
use crate::dues::Dues;
use crate::event::{Event, Timing};
use crate::frame::Frame;
use crate::grants::{Grants, ended};
use crate::handshake::{Established, Identity, Join};
use crate::nics::Nics;
use crate::session::Session;
use crate::sessions::Sessions;
use crate::sync::{Mutex, MutexGuard, lock};
use crate::transfers::{Open, Transfers, WorkId, WorkOutcome, WorkRequest, lost};
use crate::{FlowKey, OWN_SESSION};
use kvik_core::{Code, Error, GrantId, GrantState, Result};
use std::collections::HashMap;
use std::ops::Deref;
use std::time::Duration;

/// What the threads of an engine share. `R` names memory of this process; it is only handed back.
pub struct Protocol<R> {
    pub(crate) common: Common<R>,
    pub(crate) sessions: Sessions<R>,
    pub(crate) dues: Dues,
    /// The session for new transfers with each peer.
    pub(crate) preferred: Mutex<HashMap<Identity, u64>>,
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

    /// The table of grants, for a few lines.
    pub(crate) fn table(&self) -> MutexGuard<'_, Grants<R>> {
        self.common.grants()
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

impl<R, S: Deref<Target = Protocol<R>>> Deref for Node<R, S> {
    type Target = Protocol<R>;

    fn deref(&self) -> &Protocol<R> {
        &self.protocol
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

    /// The next thing that happened. An event is carried out before the next one is asked for: it may free what the
    /// next one says is free.
    pub fn next_event(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.output.events.pop_front() {
                return Some(event);
            }
            self.carry_out()?;
        }
    }

    // ---- how calls reach a session ----

    pub(crate) fn call(&mut self) -> Call<'_, R> {
        Call { common: &self.protocol.common, output: &mut self.output }
    }

    /// Does something with a session, which may be over.
    pub(crate) fn with<T>(
        &mut self,
        id: u64,
        f: impl FnOnce(&mut Session<R>, &mut Call<'_, R>) -> T,
    ) -> Option<T> {
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
    pub(crate) fn with_transfers<T>(
        &mut self,
        id: u64,
        f: impl FnOnce(&mut Transfers<R>, &mut Context<'_, R>) -> T,
    ) -> Option<T> {
        self.with(id, |session, call| {
            let (transfers, _, mut cx) = session.parts(call);
            f(transfers, &mut cx)
        })
    }

    /// Does something with the connection of a session that is not over, which has no consequences.
    pub(crate) fn with_connection(&self, id: u64, f: impl FnOnce(&mut Connection)) {
        let cell = self.protocol.sessions.get(id);
        if let Some(cell) = &cell
            && let Some(connection) = lock(cell).connection_mut()
        {
            f(connection);
        }
    }

    /// Does one of the things that calls have asked for; `None` when there is none left.
    fn carry_out(&mut self) -> Option<()> {
        self.stop_flows();
        match self.output.effects.pop_front()? {
            Effect::Stopped(grant) => {
                let waits = self.held.iter().flatten().any(|(held, _, _)| *held == grant);
                if !waits {
                    self.call().note_stopped(grant);
                }
            }
            Effect::Avoid(session, peer) => self.prefer_another(session, peer),
            Effect::Lend((session, transfer)) => {
                self.with_transfers(session, |transfers, cx| transfers.lend(transfer, cx));
            }
        }
        Some(())
    }

    /// Tells the flows of grants that are over.
    fn stop_flows(&mut self) {
        while let Some(Stop { grant, state, flows }) = self.output.stops.pop_front() {
            match &mut self.held {
                Some(held) => held.extend(flows.into_iter().map(|key| (grant, state, key))),
                None => flows.into_iter().for_each(|key| self.stop(grant, state, key)),
            }
        }
    }

    /// Applies expiry before anything that is buffered is looked at.
    pub(crate) fn expire(&mut self, now: Duration) {
        self.call().expire(now);
        self.stop_flows();
    }

    /// Stops a flow of a grant that has ended.
    pub(crate) fn stop(&mut self, grant: GrantId, state: GrantState, (session, transfer): FlowKey) {
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
            self.with_connection(session, |connection| connection.set_preferred(preferred));
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

    /// Sessions that have had something to send since they were last asked for.
    pub fn take_unsent(&mut self, into: &mut Vec<u64>) {
        into.append(&mut self.output.unsent);
    }

    /// Sends a frame on a session that may be gone by now.
    pub(crate) fn send(&mut self, id: u64, frame: &Frame) {
        self.with(id, |session, call| session.send(frame, call));
    }

    /// Tells every peer that this engine closes. Sessions stay until their connections are cut.
    pub fn goodbye(&mut self) {
        for id in self.sessions() {
            self.send(id, &Frame::Goodbye);
        }
    }

    // ---- transfers ----

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

    /// The next part to copy or to sum, of any transfer. Sessions take turns, and their transfers.
    pub fn next_copy(&mut self, now: Duration) -> Option<WorkRequest<R>> {
        self.expire(now);
        while let Some((class, id)) = self.protocol.common.next_to_copy() {
            match self.with_transfers(id, |transfers, cx| transfers.next_copy(class, now, cx)) {
                Some(Some(request)) => return Some(request),
                Some(None) => {}
                None => self.protocol.common.copied(class, id, 0, true),
            }
        }
        None
    }

    /// A work request has ended; whoever executed it does not touch its memory any more.
    pub fn work_done(&mut self, id: WorkId, outcome: WorkOutcome) {
        self.with_transfers(id.session(), |transfers, cx| transfers.done(id, outcome, cx));
    }

    /// The same of several, which are taken out. Those of one session that follow each other are told in one turn of it.
    pub fn batch_done(&mut self, ended: &mut Vec<(WorkId, WorkOutcome)>) {
        let mut ended = ended.drain(..).peekable();
        while let Some((id, outcome)) = ended.next() {
            self.with_transfers(id.session(), |transfers, cx| {
                transfers.done(id, outcome, cx);
                // What cuts a session has its consequences before anything else of it is looked at.
                while cx.is_live()
                    && let Some((id, outcome)) = ended.next_if(|(next, _)| next.session() == id.session())
                {
                    transfers.done(id, outcome, cx);
                }
            });
        }
    }

    /// A work request that must stop cannot be left for a long time: a device touches its memory, and cannot be
    /// stopped. Who began the transfer hears of its end now, and why the pages are not free. The flow stays, and a
    /// grant that it is of, until the work request is done. A NIC's work request ends the session, too: the owner cuts
    /// its own path.
    pub fn work_stuck(&mut self, id: WorkId, error: Error) {
        self.with_transfers(id.session(), |transfers, cx| transfers.stuck(id, error, cx));
    }

    /// Of a work request that a NIC had and that must stop, nothing is on the wire any more, and nothing will be; a device
    /// of this side still has something of it, which [`Node::work_done`] waits for. The session need not end for it.
    pub fn work_landed(&mut self, id: &mut WorkId) {
        self.with_transfers(id.session(), |transfers, cx| id.landed(transfers, cx));
    }

    /// This engine's NICs are reached at other addresses from now on: whoever uses them is told.
    pub fn tell_nics(&mut self, nics: &Nics) {
        let uses = |session: &Session<R>| session.connection().is_some_and(Connection::has_one_sided);
        let users: Vec<u64> = self.each(|id, session| uses(session).then_some(id)).flatten().collect();
        users.into_iter().for_each(|session| self.send(session, &Frame::Nics(nics.clone())));
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
