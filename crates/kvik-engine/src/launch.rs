//! Transfers from the engine's side: where they wait and over what they go; and the answers that the transports get.

use crate::config::Preference;
use crate::control::ControlCommand;
use crate::inner::{Inner, Tables, TransferEntry, lock};
use crate::planner::chunk_bytes;
use crate::region::Region;
use crate::select::{Rejected, Selection, select};
use crate::tag::Tag;
use crate::warm_up::WarmUpState;
use kvik_core::{Class, Code, ContentClaim, Error, RegionId, Result, Ticket, View};
use kvik_proto::{
    ChunkHeader, Claim, Identity, NicAnswer, NicCall, Nics, Node, Op, Open, Path, Select, Side, WorkId,
    WorkOutcome, WorkRequest,
};
use kvik_transport::{
    Estimate, Moved, Placement, Queue, RegionMemory, Request, RmaPeers, SessionEvents, Transport,
    TransportId, WorkSource, from_host,
};
use std::sync::Arc;
use std::time::Duration;

/// What a transfer is to do.
pub(crate) struct TransferRequest {
    pub ticket: Arc<Ticket>,
    /// None: nothing is asked of the owner, only how it would be reached.
    pub op: Option<Op>,
    pub class: Class,
    /// What is to be ready before it has ended; without an operation only.
    pub warm: Option<Arc<WarmUpState>>,
    pub memory: Option<(RegionMemory, RegionId, View)>,
    /// Stays registered, and shown to the peers on this host, while the transfer runs.
    pub _region: Option<Region>,
    pub select: Select,
    /// What the pages are taken to hold, or are written to hold.
    pub content: Option<ContentClaim>,
    pub confirm: bool,
    pub readers: u16,
    pub tag: Tag,
    pub extend: Duration,
    pub deadline: Duration,
    pub want: Preference,
    pub verify: crate::config::Verify,
    pub extents: u64,
    pub pages: u64,
}

impl TransferRequest {
    pub fn owner(&self) -> Identity {
        Identity { engine: self.ticket.engine, incarnation: self.ticket.incarnation }
    }

    pub fn moves(&self) -> bool {
        self.memory.is_some()
    }

    /// What transports are asked.
    pub fn request(&self, session: u64) -> Request<'_> {
        let memory = self.memory.as_ref().map(|(memory, region, _)| (*region, memory));
        let bytes = self.memory.as_ref().map_or(0, |(_, _, view)| view.bytes());
        Request { session, op: self.op, memory, bytes }
    }

    pub fn open(&self, path: Path, channels: u16, fence: Option<(u32, u64)>) -> Option<Open<RegionMemory>> {
        let side = self.memory.as_ref().map(|(memory, id, view)| Side {
            region: memory.clone(),
            region_id: *id,
            view: view.clone(),
            fence,
        });
        let bytes = side.as_ref().map_or(0, |side| side.view.bytes());
        let network = path != Path::Memory;
        Some(Open {
            grant: self.ticket.grant,
            layout: self.ticket.layout,
            content: self.content,
            op: self.op?,
            class: self.class,
            path,
            sums: path != Path::OneSided && self.verify.sums(network),
            check: self.verify.of_nics(),
            confirm: self.confirm,
            readers: self.readers,
            deadline: self.deadline,
            chunk: chunk_bytes(bytes, network, channels),
            side,
            select: self.select.clone(),
            extend: self.extend,
        })
    }
}

impl Inner {
    /// Takes up a transfer whose owner is a peer: launches it, or lets it wait for a session.
    pub fn take_up(&self, id: u64) {
        let owner = match lock(&self.tables).transfers.get(&id) {
            Some(entry) => entry.request.owner(),
            None => return,
        };
        match self.node(|node, _| node.session_with(&owner)) {
            Some(session) => self.launch(id, session),
            None => self.wait_for_session(id, owner),
        }
    }

    fn wait_for_session(&self, id: u64, owner: Identity) {
        if let Err(error) = self.peers.check(&owner) {
            return self.give_up(id, error);
        }
        let mut tables = lock(&self.tables);
        let Some(entry) = tables.transfers.get(&id) else { return };
        let (ticket, deadline) = (entry.request.ticket.clone(), entry.request.deadline);
        tables.waiting.insert(id);
        drop(tables);
        self.command(ControlCommand::Dial(owner, ticket));
        self.wake_by(deadline);
    }

    /// Begins a transfer on a session, over the transport that is selected for it.
    pub fn launch(&self, id: u64, session: u64) {
        let mut tables = lock(&self.tables);
        let Tables { transfers, links, waiting, .. } = &mut *tables;
        let Some(entry) = transfers.get_mut(&id).filter(|entry| entry.key.is_none()) else { return };
        if !links.contains_key(&session) {
            drop(tables);
            return self.lost_before(id, Error::new(
                Code::PeerLost,
                "the connection to the peer broke before the transfer could go on; a new transfer connects again",
            ));
        }
        let deadline = entry.request.deadline;
        let taken = match self.choose(entry, session) {
            Ok(Some(taken)) => taken,
            Ok(None) => {
                waiting.insert(id);
                drop(tables);
                return self.wake_by(deadline);
            }
            Err(error) => {
                drop(tables);
                return self.give_up(id, error);
            }
        };
        let (by, path) = (taken.by.clone(), taken.path);
        entry.taken = Some(taken);
        if let Some(warm) = entry.request.warm.clone() {
            waiting.insert(id);
            drop(tables);
            self.wake_by(deadline);
            return self.continue_warm_up(id, session, &warm, deadline);
        }
        let fence = self.fence_of(entry, path);
        let moves = entry.request.moves();
        drop(tables);
        match fence {
            Ok(fence) => {
                // What moves nothing, such as a question for the transport, needs nothing opened.
                if let Some(by) = by.filter(|_| moves) {
                    by.open(session);
                }
                self.begin(id, Some(session), path, fence);
            }
            Err(error) => self.give_up(id, error),
        }
    }

    /// The transport that a transfer takes; none while one that is preferred is still opening.
    pub fn choose(&self, entry: &TransferEntry, session: u64) -> Result<Option<Taken>> {
        let transports = self.transports();
        let request = entry.request.request(session);
        let answers = transports.iter().map(|transport| (transport.id(), transport.answer(&request)));
        match select(entry.request.want, &entry.refused, answers) {
            Selection::Taken { place, estimate, rejected } => {
                let by = &transports[place];
                let (id, path, by) = (by.id(), by.path(), Some(by.clone()));
                Ok(Some(Taken { id, path, by, session, estimate, rejected }))
            }
            Selection::Wait => Ok(None),
            Selection::None(error) => Err(error),
        }
    }

    /// A fence slot, where the peer copies from this side's memory.
    fn fence_of(&self, entry: &mut TransferEntry, path: Path) -> Result<Option<(u32, u64)>> {
        if (path, entry.request.op) != (Path::Memory, Some(Op::Write)) {
            return Ok(None);
        }
        let slot = self.fence.slot().map_err(|error| from_host(Code::MemoryCapReached, error))?;
        let generation = slot.generation().map_err(|error| from_host(Code::ProtocolError, error))?;
        let index = slot.index();
        entry.fence = Some(slot);
        Ok(Some((index, generation)))
    }

    /// Begins a launched transfer, unless it was cancelled or begun meanwhile. Without a session its owner is this
    /// engine.
    fn begin(&self, id: u64, session: Option<u64>, path: Path, fence: Option<(u32, u64)>) {
        let began: Result<(), Option<Error>> = self.node(|node: &mut Node<RegionMemory>, now| {
            let mut tables = lock(&self.tables);
            let Tables { transfers, by_key, waiting, .. } = &mut *tables;
            let free = |entry: &&mut TransferEntry| entry.key.is_none() && entry.stopped.is_none();
            let Some(entry) = transfers.get_mut(&id).filter(free) else { return Ok(()) };
            let channels = if session.is_some() { self.config.channels } else { 1 };
            let Some(open) = entry.request.open(path, channels, fence) else { return Err(None) };
            let key = match session {
                Some(session) => node.begin(session, open, now).map_err(Some)?,
                None => node.begin_own(open, now).map_err(Some)?,
            };
            (entry.key, entry.begun) = (Some(key), now);
            let TransferRequest { ticket, tag, .. } = &entry.request;
            log::debug!(engine:% = self.local.identity.engine, transfer = id, grant:% = ticket.grant, peer:% = ticket.engine, request:% = tag; "transfer begun");
            waiting.remove(&id);
            by_key.insert(key, id);
            Ok(())
        });
        match began {
            Ok(()) => {}
            // Only the route was asked for.
            Err(None) => self.finish_unbegun(id, Ok(())),
            Err(Some(error)) if error.code == Code::PeerLost => self.lost_before(id, error),
            Err(Some(error)) => self.give_up(id, error),
        }
    }

    /// Begins a transfer whose owner is this engine.
    pub fn begin_own(&self, id: u64) {
        if let Some(entry) = lock(&self.tables).transfers.get_mut(&id) {
            entry.taken = Some(Taken::own());
        }
        self.begin(id, None, Path::Memory, None);
    }

    /// The session broke before a transfer began on it: it waits for another one, a few times.
    fn lost_before(&self, id: u64, error: Error) {
        let again = {
            let mut tables = lock(&self.tables);
            let Some(entry) = tables.transfers.get_mut(&id) else { return };
            let again = entry.retries > 0;
            entry.retries = entry.retries.saturating_sub(1);
            again.then(|| entry.request.owner())
        };
        match again {
            Some(owner) => self.wait_for_session(id, owner),
            None => self.give_up(id, error),
        }
    }

    /// Transfers that waited for this session, or for its local link, go on.
    pub fn launch_waiting(&self, session: u64) {
        let Some(peer) = self.node(|node, _| node.established(session).map(|session| session.peer)) else {
            return;
        };
        let ids = waiting_for(&lock(&self.tables), &peer);
        ids.into_iter().for_each(|id| self.launch(id, session));
    }

    /// Transfers that wait for a session with this peer have waited in vain, unless the peer has come by itself.
    pub fn fail_waiting(&self, owner: &Identity, error: &Error) {
        if let Some(session) = self.node(|node, _| node.session_with(owner)) {
            return self.launch_waiting(session);
        }
        let ids = waiting_for(&lock(&self.tables), owner);
        ids.into_iter().for_each(|id| self.give_up(id, error.clone()));
    }

    /// A session with this peer broke: transfers that waited for something of it wait for another one.
    pub fn wait_again(&self, owner: &Identity, error: &Error) {
        let (mut over, mut ticket) = (Vec::new(), None);
        {
            let mut tables = lock(&self.tables);
            if tables.dials.contains_key(owner) {
                return;
            }
            for id in waiting_for(&tables, owner) {
                match tables.transfers.get_mut(&id).map(|entry| (entry.retries, entry)) {
                    Some((0, _)) => over.push(id),
                    Some((_, entry)) => {
                        entry.retries -= 1;
                        ticket = Some(entry.request.ticket.clone());
                    }
                    None => {}
                }
            }
        }
        over.into_iter().for_each(|id| self.give_up(id, error.clone()));
        if let Some(ticket) = ticket {
            self.command(ControlCommand::Dial(*owner, ticket));
        }
    }
}

pub(crate) fn waiting_for(tables: &Tables, owner: &Identity) -> Vec<u64> {
    let of_peer = |id: &&u64| tables.transfers.get(id).is_some_and(|entry| entry.request.owner() == *owner);
    tables.waiting.iter().filter(of_peer).copied().collect()
}

/// Which transport a transfer has taken.
pub(crate) struct Taken {
    pub id: TransportId,
    pub path: Path,
    /// None: a plain copy within this engine.
    pub by: Option<Arc<dyn Transport>>,
    /// The session on which it was asked.
    pub session: u64,
    pub estimate: Option<Estimate>,
    pub rejected: Vec<Rejected>,
}

impl Taken {
    fn own() -> Taken {
        let (by, session, estimate, rejected) = (None, 0, None, Vec::new());
        Taken { id: TransportId::Own, path: Path::Memory, by, session, estimate, rejected }
    }

    /// How the bytes go, or went.
    pub fn mechanism(&self, request: &TransferRequest, copied_from: Option<RegionId>) -> String {
        let moved = Moved { request: request.request(self.session), copied_from };
        self.by.as_ref().map_or_else(|| "copy".to_owned(), |by| by.mechanism(&moved))
    }
}

impl WorkSource for Inner {
    fn claim(&self, queue: Queue, claim: Claim) -> Option<WorkRequest<RegionMemory>> {
        self.node(|node, now| match queue {
            Queue::Send(session) => node.next_of(session, Path::Channels, claim, now),
            Queue::Copy => node.next_copy(now),
            Queue::Post(session) => node.next_of(session, Path::OneSided, claim, now),
        })
    }
    fn done(&self, id: WorkId, outcome: WorkOutcome) {
        self.node(|node, _| node.work_done(id, outcome));
    }
    fn stuck(&self, id: WorkId, error: Error) {
        self.node(|node, _| node.work_stuck(id, error));
    }
}

impl Placement for Inner {
    fn place(&self, session: u64, header: &ChunkHeader) -> Result<Option<WorkRequest<RegionMemory>>> {
        self.node(|node, now| node.place(session, header, now))
    }
}

impl SessionEvents for Inner {
    fn heard(&self, session: u64) -> bool {
        self.node(|node, now| {
            node.touch(session, now);
            node.established(session).is_some()
        })
    }
    fn connect(&self, session: u64) {
        match self.node(|node, _| node.established(session).map(|session| session.opener)) {
            Some(true) => self.command(ControlCommand::OpenChannels(session)),
            Some(false) => self.node(|node, _| node.ask_for_channels(session)),
            None => {}
        }
    }
    fn broken(&self, session: u64, error: Error) {
        self.command(ControlCommand::Broken(session, error));
    }
    fn flush_local(&self) {
        self.command(ControlCommand::FlushLocal);
    }
    fn fenced(&self, session: u64) {
        self.node(|node, _| node.fenced(session));
    }
}

impl RmaPeers for Inner {
    fn nics(&self, session: u64) -> Option<Nics> {
        self.node(|node, _| node.established(session).map(|session| session.facts.nics.clone()))
    }
    fn moved(&self, nics: Nics) {
        self.node(|node, _| node.tell_nics(&nics));
    }
    fn call(&self, session: u64, call: NicCall) {
        self.node(|node, _| node.reach(session, call));
    }
    fn answer(&self, session: u64, answer: NicAnswer) {
        self.node(|node, _| node.answer_reach(session, answer));
    }
    fn warm_up_done(&self, session: u64, nic: usize, number: usize, outcome: Result<bool>) {
        self.on_warm_up(session, nic, number, &outcome);
    }
}
