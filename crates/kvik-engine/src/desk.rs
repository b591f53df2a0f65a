//! Transfers from the engine's side: where they wait, over what they go, what comes of them; and the answers that
//! the transports get.

use crate::config::Preference;
use crate::control::Ask;
use crate::planner::chunk_bytes;
use crate::shared::{Book, Channels, Link, MemoryPath, Record, Shared, lock};
use crate::transfer::Report;
use kvik_core::{Code, Error, RegionId, Result, Ticket, View};
use kvik_host::clock::boottime;
use kvik_proto::{
    ChunkHeader, Finished, Identity, Node, Op, Open, Order, OrderOutcome, OrderRef, Path, Select, Side,
};
use kvik_transport::local::LocalLink;
use kvik_transport::{Desk, Held, from_host};
use std::sync::Arc;
use std::time::Duration;

/// What a transfer is to do.
#[derive(Clone)]
pub(crate) struct Job {
    pub ticket: Arc<Ticket>,
    /// None: nothing is asked of the owner, only how it would be reached.
    pub op: Option<Op>,
    pub memory: Option<(Held, RegionId, View)>,
    pub select: Select,
    pub confirm: bool,
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

    fn moves(&self) -> bool {
        self.memory.is_some()
    }

    pub fn open(
        &self,
        path: Path,
        network: bool,
        channels: u16,
        fence: Option<(u32, u64)>,
    ) -> Option<Open<Held>> {
        let side = self.memory.as_ref().map(|(memory, id, view)| Side {
            region: memory.clone(),
            region_id: *id,
            view: view.clone(),
            fence,
        });
        let bytes = side.as_ref().map_or(0, |side| side.view.bytes());
        Some(Open {
            grant: self.ticket.grant,
            layout: self.ticket.layout,
            op: self.op?,
            path,
            sums: self.verify.sums(network),
            confirm: self.confirm,
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
    Memory(Arc<LocalLink>),
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
        let route = route(&book, id, session);
        match route {
            Route::No(error) => {
                drop(book);
                self.give_up(id, error);
            }
            Route::NotYet => drop(book.waiting.insert(id)),
            Route::Channels { passed_over } => {
                if let Some(record) = book.transfers.get_mut(&id) {
                    record.transport = "tcp";
                    record.way = format!("{} channels", self.config.channels);
                    record.passed_over.extend(passed_over);
                }
                drop(book);
                self.ensure_channels(session);
                self.begin(id, session, Path::Channels, None);
            }
            Route::Memory(link) => {
                let Some(record) = book.transfers.get_mut(&id) else { return };
                record.transport = "local";
                let writes = record.job.op == Some(Op::Write);
                let own = record.job.memory.as_ref().is_some_and(|(memory, _, _)| memory.fd().is_some());
                record.way = if own || !writes { "memfd" } else { "process_vm_readv" }.to_owned();
                let fence = if writes { Some(self.fence.slot()) } else { None };
                let fence = fence.transpose().map_err(|error| from_host(Code::MemoryCapReached, error));
                let numbers = fence.and_then(|slot| {
                    let Some(slot) = slot else { return Ok(None) };
                    let generation = slot.generation().map_err(|e| from_host(Code::ProtocolError, e))?;
                    let index = slot.index();
                    record.fence = Some(slot);
                    Ok(Some((index, generation)))
                });
                drop(book);
                drop(link);
                match numbers {
                    Ok(numbers) => self.begin(id, session, Path::Memory, numbers),
                    Err(error) => self.give_up(id, error),
                }
            }
        }
    }

    /// Begins a launched transfer, unless it was cancelled meanwhile.
    fn begin(&self, id: u64, session: u64, path: Path, fence: Option<(u32, u64)>) {
        let began = self.node(|node, now| {
            let mut book = lock(&self.book);
            let Some(record) = book.transfers.get_mut(&id) else { return Ok(()) };
            let Some(open) = record.job.open(path, path == Path::Channels, self.config.channels, fence) else {
                return Err(None);
            };
            let key = node.begin(session, open, now).map_err(Some)?;
            record.key = Some(key);
            log::debug!(transfer = id, grant:% = record.job.ticket.grant, peer:% = record.job.ticket.engine; "transfer begun");
            book.waiting.remove(&id);
            book.by_key.insert(key, id);
            Ok(())
        });
        match began {
            Ok(()) => {}
            // Only the route was asked for.
            Err(None) => self.finish(id, None, Ok(())),
            Err(Some(error)) => self.give_up(id, error),
        }
    }

    /// Begins a transfer whose owner is this engine.
    pub fn begin_own(&self, id: u64) {
        let began = self.node(|node: &mut Node<Held>, now| {
            let mut book = lock(&self.book);
            let Some(record) = book.transfers.get_mut(&id) else { return Ok(()) };
            record.transport = "self";
            record.way = "copy".to_owned();
            let Some(open) = record.job.open(Path::Memory, false, 1, None) else { return Err(None) };
            let key = node.begin_own(open, now).map_err(Some)?;
            record.key = Some(key);
            book.by_key.insert(key, id);
            Ok(())
        });
        match began {
            Ok(()) => {}
            Err(None) => self.finish(id, None, Ok(())),
            Err(Some(error)) => self.give_up(id, error),
        }
    }

    /// Ends a transfer that has not begun.
    pub fn give_up(&self, id: u64, error: Error) {
        self.finish(id, None, Err(error));
    }

    /// Ends a transfer, begun or not.
    pub fn cancel(&self, id: u64, error: Error) {
        let waits = self.node(|node, _| {
            let key = lock(&self.book).transfers.get(&id).map(|record| record.key)?;
            match key {
                Some(key) => {
                    node.cancel(key, error.clone());
                    None
                }
                None => Some(()),
            }
        });
        if waits.is_some() {
            self.give_up(id, error);
        }
    }

    /// The node says that a transfer has ended.
    pub fn on_finished(&self, finished: Finished) {
        let Some(id) = lock(&self.book).by_key.remove(&finished.key) else { return };
        let outcome = finished.outcome.clone();
        if let Err(error) = &outcome
            && error.code == Code::TransportUnavailable
            && self.fall_back(id, finished.key.0, error)
        {
            return self.take_up(id);
        }
        self.finish(id, Some(finished), outcome);
    }

    /// A transfer under `auto` whose copy within the host turned out to be impossible goes over TCP, and so do the
    /// later ones of the session.
    fn fall_back(&self, id: u64, session: u64, error: &Error) -> bool {
        let mut book = lock(&self.book);
        let Some(record) = book.transfers.get_mut(&id) else { return false };
        if record.job.want != Preference::Auto || record.transport != "local" {
            return false;
        }
        (record.key, record.fence) = (None, None);
        if let Some(link) = book.links.get_mut(&session)
            && let MemoryPath::Up(local) = &link.memory
        {
            log::warn!(session = session; "the local transport is given up for tcp: {error}");
            local.cut();
            link.memory = MemoryPath::No(error.text.clone());
        }
        true
    }

    fn finish(&self, id: u64, finished: Option<Finished>, outcome: Result<()>) {
        let record = {
            let mut book = lock(&self.book);
            book.waiting.remove(&id);
            book.transfers.remove(&id)
        };
        let Some(record) = record else { return };
        let outcome = match outcome {
            Ok(()) => Ok(self.report(&record, finished)),
            Err(error) => {
                log::info!(transfer = id, grant:% = record.job.ticket.grant, peer:% = record.job.ticket.engine; "transfer failed: {error}");
                Err(error)
            }
        };
        let end = record.end.clone();
        // The memory that the record holds is let go of before anybody hears of the end.
        drop(record);
        self.count_end(&outcome);
        end.set(outcome);
    }

    fn report(&self, record: &Record, finished: Option<Finished>) -> Report {
        let now = boottime();
        let planned = record.began + record.plan;
        let (bytes, verify, first, extents, copied) = match &finished {
            Some(end) => (end.bytes, end.verify, end.first.unwrap_or(now), end.extents, end.copied_from),
            None => (0, Duration::ZERO, now, 0, None),
        };
        let mut way = record.way.clone();
        if let (Some(end), Some(region)) = (&finished, copied)
            && let Some(link) = self.local_link(end.key.0)
            && let Some(seen) = link.way_of(region)
        {
            way = seen.to_owned();
        }
        let sums = record.job.verify.sums(record.transport == "tcp");
        let mut checks = vec!["grant", "counts"];
        if record.transport == "local" {
            checks.push("generation");
        }
        if sums && record.job.moves() {
            checks.push("page_checksum");
        }
        Report {
            bytes,
            extents: if extents == 0 { record.job.extents } else { extents },
            pages: record.job.pages,
            transport: record.transport,
            way,
            checks,
            plan: record.plan,
            post: first.saturating_sub(planned),
            wire: now.saturating_sub(first),
            verify,
            total: now.saturating_sub(record.began),
            passed_over: record.passed_over.clone(),
        }
    }

    /// Transfers that waited for this session, or for its local link, go on.
    pub fn launch_waiting(&self, session: u64) {
        let Some(peer) = self.node(|node, _| node.established(session).map(|session| session.peer)) else {
            return;
        };
        let ids: Vec<u64> = {
            let book = lock(&self.book);
            let of_peer = |id: &&u64| book.transfers.get(id).is_some_and(|record| record.job.owner() == peer);
            book.waiting.iter().filter(of_peer).copied().collect()
        };
        ids.into_iter().for_each(|id| self.launch(id, session));
    }

    /// Transfers that wait for a session with this peer have waited in vain.
    pub fn fail_waiting(&self, owner: &Identity, error: &Error) {
        let ids: Vec<u64> = {
            let book = lock(&self.book);
            let of_peer =
                |id: &&u64| book.transfers.get(id).is_some_and(|record| record.job.owner() == *owner);
            book.waiting.iter().filter(of_peer).copied().collect()
        };
        ids.into_iter().for_each(|id| self.give_up(id, error.clone()));
    }

    /// Sees to it that a session has data channels.
    pub fn ensure_channels(&self, session: u64) {
        {
            let mut book = lock(&self.book);
            let Some(link) = book.links.get_mut(&session) else { return };
            if link.channels == Channels::Asked {
                return;
            }
        }
        let opener = self.node(|node, _| {
            let opener = node.established(session)?.opener;
            if !opener {
                node.ask_for_channels(session);
            }
            Some(opener)
        });
        match opener {
            Some(true) => self.open_channels(session),
            Some(false) => {
                if let Some(link) = lock(&self.book).links.get_mut(&session) {
                    link.channels = Channels::Asked;
                }
            }
            None => {}
        }
    }

    /// Opens a session's data channels, once.
    pub fn open_channels(&self, session: u64) {
        let fresh = {
            let mut book = lock(&self.book);
            let link = book.links.get_mut(&session).filter(|link| link.channels == Channels::None);
            link.map(|link| link.channels = Channels::Asked).is_some()
        };
        if fresh {
            self.ask(Ask::OpenChannels(session));
        }
    }
}

fn route(book: &Book, id: u64, session: u64) -> Route {
    let (Some(record), Some(link)) = (book.transfers.get(&id), book.links.get(&session)) else {
        return Route::No(Error::new(
            Code::PeerLost,
            "the connection to the peer broke before the transfer began",
        ));
    };
    let Link { memory, .. } = link;
    match (record.job.want, memory) {
        (Preference::Tcp, _) => Route::Channels { passed_over: Vec::new() },
        (_, MemoryPath::Up(link)) => Route::Memory(link.clone()),
        (_, MemoryPath::Making(_)) => Route::NotYet,
        (Preference::Auto, MemoryPath::No(why)) => {
            Route::Channels { passed_over: vec![format!("local: {why}")] }
        }
        (Preference::Local, MemoryPath::No(why)) => Route::No(Error::new(
            Code::TransportUnavailable,
            format!("transport \"local\" cannot reach this peer: {why}; use \"auto\" or \"tcp\""),
        )),
    }
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
    fn alive(&self, session: u64) {
        self.node(|node, now| node.touch(session, now));
    }
    fn channel_lost(&self, session: u64, error: Error) {
        self.node(|node, _| node.close_session(session, error));
    }
    fn local_link(&self, session: u64) -> Option<Arc<LocalLink>> {
        match &lock(&self.book).links.get(&session)?.memory {
            MemoryPath::Up(link) => Some(link.clone()),
            _ => None,
        }
    }
}
