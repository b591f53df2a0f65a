//! Transfers from the engine's side: where they wait and over what they go; and the answers that the transports get.

use crate::config::Preference;
use crate::control::Ask;
use crate::planner::chunk_bytes;
use crate::region::Region;
use crate::shared::{Book, GpuHandle, Link, MemoryPath, NicKeys, Record, Shared, lock};
use crate::tag::Tag;
use crate::warm::Warm;
use kvik_core::{Code, ContentClaim, Error, RegionId, Result, Ticket, View};
use kvik_proto::{
    ChunkHeader, Identity, NicAnswer, NicCall, Nics, Node, Op, Open, Order, OrderOutcome, OrderRef, Path,
    Select, Side,
};
use kvik_transport::local::LocalLink;
use kvik_transport::{Desk, Held, from_host};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// What a transfer is to do.
pub(crate) struct Job {
    pub ticket: Arc<Ticket>,
    /// None: nothing is asked of the owner, only how it would be reached.
    pub op: Option<Op>,
    /// What is to be ready before it has ended; without an operation only.
    pub warm: Option<Arc<Warm>>,
    pub memory: Option<(Held, RegionId, View)>,
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

impl Job {
    pub fn owner(&self) -> Identity {
        Identity { engine: self.ticket.engine, incarnation: self.ticket.incarnation }
    }

    pub fn moves(&self) -> bool {
        self.memory.is_some()
    }

    pub fn open(&self, path: Path, channels: u16, fence: Option<(u32, u64)>) -> Option<Open<Held>> {
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

/// How a transfer will go.
enum Route {
    Channels { passed_over: Vec<String> },
    Memory,
    Nics { passed_over: Vec<String> },
    NotYet,
    No(Error),
}

impl Shared {
    /// Takes up a transfer whose owner is a peer: launches it, or lets it wait for a session.
    pub fn take_up(&self, id: u64) {
        let owner = match lock(&self.book).transfers.get(&id) {
            Some(record) => record.job.owner(),
            None => return,
        };
        match self.node(|node, _| node.session_with(&owner)) {
            Some(session) => self.launch(id, session),
            None => self.wait_for_session(id, owner),
        }
    }

    fn wait_for_session(&self, id: u64, owner: Identity) {
        if let Err(error) = self.roster.check(&owner) {
            return self.give_up(id, error);
        }
        let mut book = lock(&self.book);
        let Some(record) = book.transfers.get(&id) else { return };
        let (ticket, deadline) = (record.job.ticket.clone(), record.job.deadline);
        book.waiting.insert(id);
        drop(book);
        self.ask(Ask::Dial(owner, ticket));
        self.wake_by(deadline);
    }

    /// Begins a transfer on a session, over the transport that fits.
    pub fn launch(&self, id: u64, session: u64) {
        let mut book = lock(&self.book);
        let Book { transfers, links, waiting, nic_keys, handles, .. } = &mut *book;
        let Some(record) = transfers.get_mut(&id).filter(|record| record.key.is_none()) else { return };
        let Some(link) = links.get(&session) else {
            drop(book);
            return self.lost_before(id, Error::new(
                Code::PeerLost,
                "the connection to the peer broke before the transfer could go on; a new transfer connects again",
            ));
        };
        let mut own = Own::of(&record.job, nic_keys, handles);
        own.memory = own.memory.or_else(|| record.not_local.clone());
        let route = route(record.job.want, &own, link);
        if let Some(warm) = record.job.warm.clone()
            && !matches!(route, Route::No(_) | Route::NotYet)
        {
            self.note_route(record, route);
            waiting.insert(id);
            let deadline = record.job.deadline;
            drop(book);
            self.wake_by(deadline);
            return self.warm_up(id, session, &warm, deadline);
        }
        match route {
            Route::No(error) => {
                drop(book);
                self.give_up(id, error);
            }
            Route::NotYet => {
                waiting.insert(id);
                let deadline = record.job.deadline;
                drop(book);
                self.wake_by(deadline);
            }
            Route::Channels { passed_over } => {
                record.transport = "tcp";
                record.passed_over.extend(passed_over);
                let moves = record.job.moves();
                drop(book);
                // What moves nothing, such as a question for the way, needs no channels.
                if moves {
                    self.ensure_channels(session);
                }
                self.begin(id, Some(session), Path::Channels, None);
            }
            Route::Nics { passed_over } => {
                record.transport = self.nic_transport();
                record.way = self.nics.get().map_or_else(String::new, |nics| nics.way().to_owned());
                record.passed_over.extend(passed_over);
                drop(book);
                self.begin(id, Some(session), Path::OneSided, None);
            }
            Route::Memory => {
                let numbers = self.launch_local(record);
                drop(book);
                match numbers {
                    Ok(numbers) => self.begin(id, Some(session), Path::Memory, numbers),
                    Err(error) => self.give_up(id, error),
                }
            }
        }
    }

    /// Notes how a transfer would go.
    fn note_route(&self, record: &mut Record, route: Route) {
        let (transport, passed_over) = match route {
            Route::Memory => ("local", Vec::new()),
            Route::Channels { passed_over } => ("tcp", passed_over),
            Route::Nics { passed_over } => (self.nic_transport(), passed_over),
            Route::NotYet | Route::No(_) => return,
        };
        record.transport = transport;
        record.passed_over = passed_over;
    }

    /// Notes how a transfer goes within the host, with a fence slot where the peer copies from this side's memory.
    fn launch_local(&self, record: &mut Record) -> Result<Option<(u32, u64)>> {
        record.transport = "local";
        let writes = record.job.op == Some(Op::Write);
        let own = record.job.memory.as_ref().is_some_and(|(memory, _, _)| memory.fd().is_some());
        let gpu = record.job.memory.as_ref().is_some_and(|(memory, _, _)| memory.device().is_some());
        let way = match (writes, gpu) {
            (true, true) => "cuda_ipc",
            (true, false) if !own => "process_vm_readv",
            _ => "memfd",
        };
        record.way = way.to_owned();
        if !writes {
            return Ok(None);
        }
        let slot = self.fence.slot().map_err(|error| from_host(Code::MemoryCapReached, error))?;
        let generation = slot.generation().map_err(|error| from_host(Code::ProtocolError, error))?;
        let index = slot.index();
        record.fence = Some(slot);
        Ok(Some((index, generation)))
    }

    /// Begins a launched transfer, unless it was cancelled or begun meanwhile. Without a session its owner is this
    /// engine.
    fn begin(&self, id: u64, session: Option<u64>, path: Path, fence: Option<(u32, u64)>) {
        let began: Result<(), Option<Error>> = self.node(|node: &mut Node<Held>, now| {
            let mut book = lock(&self.book);
            let Book { transfers, by_key, waiting, .. } = &mut *book;
            let free = |record: &&mut Record| record.key.is_none() && record.stopped.is_none();
            let Some(record) = transfers.get_mut(&id).filter(free) else { return Ok(()) };
            let channels = if session.is_some() { self.config.channels } else { 1 };
            let Some(open) = record.job.open(path, channels, fence) else { return Err(None) };
            let key = match session {
                Some(session) => node.begin(session, open, now).map_err(Some)?,
                None => node.begin_own(open, now).map_err(Some)?,
            };
            record.key = Some(key);
            let Job { ticket, tag, .. } = &record.job;
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
        if let Some(record) = lock(&self.book).transfers.get_mut(&id) {
            record.transport = "self";
            record.way = "copy".to_owned();
        }
        self.begin(id, None, Path::Memory, None);
    }

    /// The session broke before a transfer began on it: it waits for another one, a few times.
    fn lost_before(&self, id: u64, error: Error) {
        let again = {
            let mut book = lock(&self.book);
            let Some(record) = book.transfers.get_mut(&id) else { return };
            let again = record.lives > 0;
            record.lives = record.lives.saturating_sub(1);
            again.then(|| record.job.owner())
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
        let ids = waiting_for(&lock(&self.book), &peer);
        ids.into_iter().for_each(|id| self.launch(id, session));
    }

    /// Transfers that wait for a session with this peer have waited in vain, unless the peer has come by itself.
    pub fn fail_waiting(&self, owner: &Identity, error: &Error) {
        if let Some(session) = self.node(|node, _| node.session_with(owner)) {
            return self.launch_waiting(session);
        }
        let ids = waiting_for(&lock(&self.book), owner);
        ids.into_iter().for_each(|id| self.give_up(id, error.clone()));
    }

    /// A session with this peer broke: transfers that waited for something of it wait for another one.
    pub fn wait_again(&self, owner: &Identity, error: &Error) {
        let (mut over, mut ticket) = (Vec::new(), None);
        {
            let mut book = lock(&self.book);
            if book.dials.contains_key(owner) {
                return;
            }
            for id in waiting_for(&book, owner) {
                match book.transfers.get_mut(&id).map(|record| (record.lives, record)) {
                    Some((0, _)) => over.push(id),
                    Some((_, record)) => {
                        record.lives -= 1;
                        ticket = Some(record.job.ticket.clone());
                    }
                    None => {}
                }
            }
        }
        over.into_iter().for_each(|id| self.give_up(id, error.clone()));
        if let Some(ticket) = ticket {
            self.ask(Ask::Dial(*owner, ticket));
        }
    }

    /// Sees to it that a session has data channels.
    pub fn ensure_channels(&self, session: u64) {
        if lock(&self.book).links.get(&session).is_none_or(|link| link.asked) {
            return;
        }
        match self.node(|node, _| node.established(session).map(|session| session.opener)) {
            Some(true) => self.open_channels(session),
            Some(false) if self.first_to_ask(session) => {
                self.node(|node, _| node.ask_for_channels(session));
            }
            _ => {}
        }
    }

    /// Opens a session's data channels, once.
    pub fn open_channels(&self, session: u64) {
        if self.first_to_ask(session) {
            self.ask(Ask::OpenChannels(session));
        }
    }

    fn first_to_ask(&self, session: u64) -> bool {
        let mut book = lock(&self.book);
        book.links.get_mut(&session).is_some_and(|link| !std::mem::replace(&mut link.asked, true))
    }
}

pub(crate) fn waiting_for(book: &Book, owner: &Identity) -> Vec<u64> {
    let of_peer = |id: &&u64| book.transfers.get(id).is_some_and(|record| record.job.owner() == *owner);
    book.waiting.iter().filter(of_peer).copied().collect()
}

/// What this side's memory does not allow, and why.
pub(crate) struct Own {
    pub memory: Option<String>,
    pub nics: Option<String>,
}

impl Own {
    pub fn of(job: &Job, keys: &HashMap<RegionId, NicKeys>, handles: &HashMap<RegionId, GpuHandle>) -> Own {
        let Some((memory, region, _)) = &job.memory else { return Own { memory: None, nics: None } };
        // What is read this side copies itself, into whatever memory.
        let opened = (job.op == Some(Op::Write)).then(|| not_opened(*region, memory, handles)).flatten();
        Own {
            memory: opened.map(|why| why.to_string()),
            nics: keys.get(region).and_then(|keys| keys.as_ref().err()).map(|why| why.to_string()),
        }
    }
}

/// Why the peer cannot copy from a region of this side, where it cannot.
fn not_opened(region: RegionId, memory: &Held, handles: &HashMap<RegionId, GpuHandle>) -> Option<Arc<str>> {
    let device = memory.device()?.ordinal();
    match handles.get(&region) {
        Some(Ok(_)) => None,
        Some(Err(why)) => Some(why.clone()),
        None => Some(
            format!(
                "region {} lies on GPU {device}, and this engine shows no memory to other processes",
                region.0
            )
            .into(),
        ),
    }
}

impl Shared {
    /// The same, for a region that is granted.
    pub fn not_opened(&self, region: RegionId, memory: &Held) -> Option<Arc<str>> {
        not_opened(region, memory, &lock(&self.book).handles)
    }
}

fn route(want: Preference, own: &Own, link: &Link) -> Route {
    let no = |why: &String| MemoryPath::No(why.clone());
    let memory = own.memory.as_ref().map_or_else(|| link.memory.clone(), no);
    match (want, memory) {
        (Preference::Tcp, _) => Route::Channels { passed_over: Vec::new() },
        (Preference::Nics, _) => over_nics(own, link),
        (_, MemoryPath::Up(_)) => Route::Memory,
        (_, MemoryPath::Making(_)) => Route::NotYet,
        (Preference::Auto, MemoryPath::No(why)) => {
            let mut passed_over = vec![format!("local: {why}")];
            match (&link.nics, &own.nics) {
                (Ok(()), None) => Route::Nics { passed_over },
                (Ok(()), Some(why)) => {
                    passed_over.push(format!("nics: {why}"));
                    Route::Channels { passed_over }
                }
                (Err(_), _) => Route::Channels { passed_over },
            }
        }
        (Preference::Local, MemoryPath::No(why)) => Route::No(Error::new(
            Code::TransportUnavailable,
            format!("transport \"local\" cannot be used: {why}; use \"auto\" or \"tcp\""),
        )),
    }
}

/// Over NICs and nothing else.
fn over_nics(own: &Own, link: &Link) -> Route {
    let text = match (&link.nics, &own.nics) {
        (Ok(()), None) => return Route::Nics { passed_over: Vec::new() },
        (Err(why), _) => format!("cannot be used with this peer: {why}"),
        (_, Some(why)) => format!("cannot be used: {why}"),
    };
    let text = format!("transport \"nics\" {text}; use \"auto\" or \"tcp\"");
    Route::No(Error::new(Code::TransportUnavailable, text))
}

impl Desk for Shared {
    fn next_send(&self, session: u64) -> Option<Order<Held>> {
        self.node(|node, now| node.next_send(session, now))
    }
    fn place(&self, session: u64, header: &ChunkHeader) -> Result<Option<Order<Held>>> {
        self.node(|node, now| node.place(session, header, now))
    }
    fn next_copy(&self) -> Option<Order<Held>> {
        self.node(|node, now| node.next_copy(now))
    }
    fn done(&self, id: OrderRef, outcome: OrderOutcome) {
        self.node(|node, _| node.order_done(id, outcome));
    }
    fn stuck(&self, id: OrderRef, error: Error) {
        self.node(|node, _| node.order_stuck(id, error));
    }
    fn alive(&self, session: u64) -> bool {
        self.node(|node, now| {
            node.touch(session, now);
            node.established(session).is_some()
        })
    }
    fn channel_lost(&self, session: u64, error: Error) {
        self.ask(Ask::Broken(session, error));
    }
    fn next_post(&self, session: u64) -> Option<Order<Held>> {
        self.node(|node, now| node.next_post(session, now))
    }
    fn is_exposed(&self) -> bool {
        self.exposed.load(Ordering::Acquire) > 0
    }
    fn peer_nics(&self, session: u64) -> Option<Nics> {
        self.node(|node, _| node.established(session).map(|session| session.facts.nics.clone()))
    }
    fn nic_moved(&self, number: usize, address: Vec<u8>) {
        self.with_nics(|nics| {
            let nics = nics.moved(number, address);
            self.node(|node, _| node.tell_nics(&nics));
        });
    }
    fn call_nic(&self, session: u64, call: NicCall) {
        self.node(|node, _| node.reach(session, call));
    }
    fn answer_nic(&self, session: u64, answer: NicAnswer) {
        self.node(|node, _| node.answer_reach(session, answer));
    }
    fn warmed(&self, session: u64, nic: usize, number: usize, outcome: Result<bool>) {
        self.on_warmed(session, nic, number, &outcome);
    }
    fn fenced(&self, session: u64) {
        self.node(|node, _| node.fenced(session));
    }
    fn local_link(&self, session: u64) -> Option<Arc<LocalLink>> {
        match &lock(&self.book).links.get(&session)?.memory {
            MemoryPath::Up(link) => Some(link.clone()),
            _ => None,
        }
    }
}
