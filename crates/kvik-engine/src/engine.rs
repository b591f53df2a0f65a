//! The engine: the public face of everything below.

use crate::base::Base;
use crate::begin::{check_own, check_writable, entry, moving, set_out};
use crate::closing::{Handle, give_up};
use crate::config::{Config, Preference};
use crate::control::Control;
use crate::end::End;
use crate::explain::{Explanation, probes};
use crate::grant::{Grant, GrantOptions, grant_bytes};
use crate::grants::GrantCell;
use crate::inner::Inner;
use crate::peers::Peer;
use crate::planner::claim;
use crate::region::{PageSet, Region};
use crate::report::{Report, TransferOptions};
use crate::setup::Setup;
use crate::stream_order::Then;
use crate::sync::lock;
use crate::tag::Tag;
use crate::transfer::Transfer;
use crate::transfers::request::{Listener, TransferRequest};
use kvik_core::{Code, EngineId, Error, GrantId, GrantState, Incarnation, Layout, Result, Right, Ticket};
use kvik_host::clock::boottime;
use kvik_host::socket::{TcpListener, TcpOptions};
use kvik_host::thread::spawn_named;
use kvik_host::unix::UnixListener;
use kvik_host::{HugePages, Memory};
use kvik_proto::{MAX_READERS, Offer, Op, Select};
use kvik_transport::{RegionMemory, from_host};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Moves pages between this process and others. Cheap to clone; the last clone that is dropped closes it.
#[derive(Clone)]
pub struct Engine {
    handle: Arc<Handle>,
}

impl Engine {
    /// Starts an engine: it listens, and its threads run, when this returns.
    ///
    /// # Errors
    /// `InvalidArgument` for an option that cannot be used, an address that cannot be listened on, CPUs that are not
    /// there; `SecretRequired` when it would listen beyond loopback without one.
    pub fn start(mut config: Config) -> Result<Engine> {
        config.check()?;
        let fail = |error| from_host(Code::InvalidArgument, error);
        if config.transport == Preference::Tcp {
            log::debug!("the local transport is off");
        }
        let listen = std::mem::take(&mut config.listen);
        let bind = |address: &SocketAddr| TcpListener::bind(*address, 1024, &TcpOptions::default());
        let listeners: Vec<TcpListener> = listen.iter().map(bind).collect::<Result<_, _>>().map_err(fail)?;
        let bound: Vec<SocketAddr> =
            listeners.iter().map(TcpListener::local_addr).collect::<Result<_, _>>().map_err(fail)?;
        config.listen = bound.clone();
        let advertised = config.advertised(&bound)?;
        let mut setup = Setup::new(config, advertised)?;
        let unix = match setup.config.transport {
            Preference::Tcp => None,
            _ => match UnixListener::bind(&setup.local.facts.local_name) {
                Ok(listener) => Some(listener),
                Err(error) => {
                    log::warn!("the local transport is off: {error}");
                    None
                }
            },
        };
        if unix.is_none() {
            setup.local.facts.local_name.clear();
        }
        let inner = Inner::start(setup)?;
        let engine = Engine {
            handle: Arc::new(Handle { inner: inner.clone(), control: Arc::default(), ended: Arc::default() }),
        };
        let options = inner.base.thread_options();
        let mut control = Control::new(inner, listeners, unix, &options)?;
        let handle = Arc::downgrade(&engine.handle);
        let serve = move || control.run().unwrap_or_else(|why| give_up(&handle, &why));
        let thread = spawn_named("kvik-ctl", &options, serve).map_err(fail)?;
        *lock(&engine.handle.control) = Some(thread);
        log::info!(engine:% = engine.id(); "engine {:?} listens on {bound:?}", engine.name());
        Ok(engine)
    }

    pub(crate) fn inner(&self) -> &Arc<Inner> {
        &self.handle.inner
    }

    /// Its id, which an engine that is started again at the same addresses keeps.
    pub fn id(&self) -> EngineId {
        self.inner().base.setup.local.identity.engine
    }
    /// Its start.
    pub fn incarnation(&self) -> Incarnation {
        self.inner().base.setup.local.identity.incarnation
    }
    /// The addresses in its tickets.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.inner().base.setup.addresses.clone()
    }
    /// The addresses that it listens on, with the ports that were chosen for 0, whatever its tickets say.
    pub fn listening(&self) -> &[SocketAddr] {
        &self.inner().base.setup.config.listen
    }
    /// What it is called in logs.
    pub fn name(&self) -> &str {
        &self.inner().base.setup.config.name
    }
    /// Whether it was closed.
    pub fn is_closed(&self) -> bool {
        self.inner().base.setup.is_closed()
    }

    /// Registers memory: of the host ([`Memory`](crate::Memory)), or of a GPU ([`GpuMemory`](crate::GpuMemory)).
    ///
    /// Pages of a GPU are read by streams of kvik's own, which wait for nobody's kernels: what writes such pages has
    /// ended before they are granted, or before a transfer from them begins. Once a transfer is done, what is launched
    /// afterwards on any stream sees its bytes.
    ///
    /// # Errors
    /// `BufferInvalid` for memory without length; `TransportUnavailable` where a NIC of this engine refuses memory of
    /// the host. Memory of a GPU that a NIC does not take moves by other ways, which reports and `explain` name.
    pub fn register(&self, memory: impl Into<RegionMemory>) -> Result<Region> {
        self.inner().base.setup.check()?;
        let memory: RegionMemory = memory.into();
        if memory.is_empty() {
            return Err(Error::new(Code::BufferInvalid, "memory of no length cannot be registered"));
        }
        let id = self.inner().regions.next_id();
        self.inner().regions.show(id, &memory)?;
        Ok(Region::new(self.inner().clone(), id, memory))
    }

    /// Allocates memory that processes on this host can map, of zeros, on huge pages where there are any.
    ///
    /// # Errors
    /// `InvalidArgument` when the machine has no such memory.
    pub fn allocate(&self, bytes: u64) -> Result<Region> {
        self.inner().base.setup.check()?;
        let bytes = usize::try_from(bytes).map_err(|_| {
            Error::new(Code::InvalidArgument, format!("{bytes} bytes are beyond this machine"))
        })?;
        let memory = Memory::shared(bytes, HugePages::Auto)
            .map_err(|error| from_host(Code::InvalidArgument, error))?;
        if let Some(pages) = memory.pages() {
            log::debug!(
                "allocated {bytes} bytes on pages of {} bytes ({})",
                pages.page_size,
                pages.why_not_bigger
            );
        }
        self.register(memory)
    }

    /// Lets whoever has the ticket use pages of this engine.
    ///
    /// # Errors
    /// `InvalidArgument` for a bad expiry, an id that was used before, or content that has not one link for each page;
    /// `DuplicatePage` for a write grant that names a page twice; `RegionClosed`; `MemoryCapReached`.
    pub fn grant(&self, pages: &PageSet, options: GrantOptions) -> Result<Grant> {
        let (inner, base) = (self.inner(), &self.inner().base);
        base.setup.check()?;
        options.check()?;
        check_own(self.inner(), pages)?;
        let memory = pages.region.memory()?;
        if options.right == Right::Write {
            pages.view.check_distinct()?;
            check_writable(&memory)?;
        }
        let layout = pages.view.layout();
        let lease = base.budget.take(grant_bytes(&pages.view, options.content.as_ref()), "a grant")?;
        let slot = base.fence.slot().map_err(|error| from_host(Code::MemoryCapReached, error))?;
        let generation = slot.generation().map_err(|error| from_host(Code::ProtocolError, error))?;
        let id = options.id.map_or_else(GrantId::random, Ok)?;
        let op = if options.right == Right::Read { Op::Read } else { Op::Write };
        let (keys, ring, closed) = base.transports.offer(pages.region.id(), &memory, op);
        let ticket =
            Ticket { right: options.right, ..self.ticket_template(layout)? }.with_grant(id, options.expiry);
        let now = boottime();
        let after = options.after.map(|stream| (stream, memory.clone()));
        let offer = Offer {
            region: memory,
            region_id: pages.region.id(),
            view: pages.view.clone(),
            content: options.content,
            right: options.right,
            uses: options.uses,
            expires: now + options.expiry,
            latest: now + options.max_expiry,
            slot: slot.index(),
            generation,
            keys,
            ring,
            closed,
        };
        let cell = Arc::new(GrantCell { tag: Tag::new(&options.tag), end: End::default() });
        // First, so that its end finds it, however soon that comes.
        inner.grants.add(id, cell.clone(), slot, lease)?;
        let given = base.node(|node, now| match &after {
            None => node.grants().give(id, offer, now),
            Some(_) => node.grants().give_later(id, offer, now),
        });
        given.inspect_err(|_| inner.grants.forget(id))?;
        if let Some((stream, memory)) = after {
            let ready = inner.streams.go_on_after(stream, &memory, Then::Ready(id));
            ready.inspect_err(|_| base.node(|node, _| node.grants().end(id, GrantState::Revoked)))?;
        }
        // As for transfers; and a region that closed meanwhile has ended the grants that it knew of.
        if base.setup.is_closed() || pages.region.is_closed() {
            base.node(|node, _| node.grants().end(id, GrantState::Closed));
            base.setup.check()?;
            pages.region.memory()?;
        }
        base.observers.counters.grants_given.fetch_add(1, Ordering::Relaxed);
        log::debug!(engine:% = self.id(), grant:% = id, request:% = cell.tag; "grant given: {} pages", pages.len());
        Ok(Grant { inner: inner.clone(), ticket: Arc::new(ticket), cell, region: pages.region.clone() })
    }

    /// A read ticket without a grant, for a process that makes tickets on this engine's behalf
    /// ([`Ticket::with_grant`]) and tells the engine of the grants afterwards.
    ///
    /// # Errors
    /// None at present; the engine knows its addresses from its start.
    pub fn ticket_template(&self, layout: &Layout) -> Result<Ticket> {
        Ok(Ticket {
            engine: self.id(),
            incarnation: self.incarnation(),
            grant: GrantId([0; 16]),
            right: Right::Read,
            expiry: Duration::ZERO,
            layout: layout.digest(),
            host: self.inner().base.setup.host_tag(),
            addresses: self.addresses(),
        })
    }

    /// Moves the ticket's pages, all of them in the grant's work request or those at these positions of it, into
    /// `local`.
    ///
    /// Pages of unequal size go as one stream of bytes, layer by layer. Those of several slices are named in parts
    /// that are as large here as there.
    ///
    /// # Errors
    /// At once for what can be seen from here: `GrantWrongRight`, `DuplicatePage`, `RegionClosed`, `InvalidArgument`
    /// for an option that cannot be, `PeerRestarted` for an own ticket of an earlier start. Everything else is the
    /// transfer's outcome.
    pub fn read(
        &self,
        local: &PageSet,
        ticket: &Ticket,
        positions: Option<Arc<[u32]>>,
        options: TransferOptions,
    ) -> Result<Transfer> {
        let began = boottime();
        let request = self.request(ticket, &options)?;
        self.begin(moving(self.inner(), Op::Read, local, request, positions, &options)?, began)
    }

    /// Moves `local` into the ticket's pages: all of them in the grant's work request, or those at these positions of
    /// it.
    ///
    /// # Errors
    /// As for [`Engine::read`].
    pub fn write(
        &self,
        local: &PageSet,
        ticket: &Ticket,
        positions: Option<Arc<[u32]>>,
        options: TransferOptions,
    ) -> Result<Transfer> {
        let began = boottime();
        let request = self.request(ticket, &options)?;
        self.begin(moving(self.inner(), Op::Write, local, request, positions, &options)?, began)
    }

    /// Confirms the use of a `once` grant without moving anything: its owner gets the pages back, once all of its
    /// readers have confirmed. Of the options the content, the deadline, the number of readers and the tag count.
    ///
    /// # Errors
    /// As for [`Engine::read`].
    pub fn release(&self, ticket: &Ticket, options: TransferOptions) -> Result<Transfer> {
        self.inner().base.setup.check()?;
        let TransferOptions { content, deadline, readers, tag, .. } = options;
        let options = TransferOptions { content, deadline, readers, tag, ..TransferOptions::default() };
        let request = TransferRequest {
            op: Some(Op::Confirm),
            content: claim(None, &options)?,
            ..self.request(ticket, &options)?
        };
        self.begin(request, boottime())
    }

    /// Asks the owner for more time, which it gives up to the grant's `max_expiry`. Of the options the content, the
    /// deadline and the tag count.
    ///
    /// # Errors
    /// As for [`Engine::read`].
    pub fn extend(&self, ticket: &Ticket, by: Duration, options: TransferOptions) -> Result<Transfer> {
        self.inner().base.setup.check()?;
        let TransferOptions { content, deadline, tag, .. } = options;
        let options = TransferOptions { content, deadline, tag, ..TransferOptions::default() };
        let content = claim(None, &options)?;
        let request =
            TransferRequest { op: Some(Op::Extend), extend: by, content, ..self.request(ticket, &options)? };
        self.begin(request, boottime())
    }

    /// Connects to the ticket's owner, if that is not done yet, and tells how a transfer with it would go.
    ///
    /// # Errors
    /// Why the owner cannot be reached, by the engine's deadline.
    pub fn explain(&self, ticket: &Ticket) -> Result<Explanation> {
        self.inner().base.setup.check()?;
        let request = self.request(ticket, &TransferOptions::default())?;
        let elsewhere = ticket.engine == self.id() || ticket.host != self.inner().base.setup.host_tag();
        let report = self.begin(request, boottime())?.wait(None)?;
        let mechanism = report.mechanism;
        Ok(Explanation {
            transport: report.transport,
            mechanism,
            estimate: report.estimate,
            rejected_transports: report.rejected_transports,
            // What the machine allows bears on reading another process's memory, and on nothing else.
            probes: if elsewhere { Vec::new() } else { probes() },
        })
    }

    pub(crate) fn request(&self, ticket: &Ticket, options: &TransferOptions) -> Result<TransferRequest> {
        let readers = options.readers.unwrap_or(1);
        if readers == 0 || readers > MAX_READERS {
            let text = format!("readers is from 1 to {MAX_READERS}, not {readers}");
            return Err(Error::new(Code::InvalidArgument, text));
        }
        let config = &self.inner().base.setup.config;
        let time = self.inner().base.setup.time(options.deadline)?;
        Ok(TransferRequest {
            ticket: Arc::new(ticket.clone()),
            op: None,
            class: options.class,
            warm: None,
            memory: None,
            _region: None,
            select: Select::default(),
            content: None,
            confirm: options.confirm.unwrap_or(true),
            readers,
            tag: Tag::new(&options.tag),
            extend: Duration::ZERO,
            deadline: boottime() + time,
            want: options.transport.unwrap_or(config.transport),
            verify: options.verify.unwrap_or(config.verify),
            sums: options.sums,
            after: options.after,
            extents: 0,
            pages: 0,
        })
    }

    pub(crate) fn begin(&self, request: TransferRequest, began: Duration) -> Result<Transfer> {
        let transfers = &self.inner().transfers;
        let end = Arc::<End<Report>>::default();
        let (entry, start) = entry(self.inner(), request, began, Listener::Caller(end.clone()))?;
        let id = transfers.add([entry], |_| ()).start;
        set_out(self.inner(), id, start)?;
        Ok(Transfer { transfers: transfers.clone(), id, end })
    }

    /// What has happened since the start: names and counts. In a forked child there are none.
    pub fn stats(&self) -> Vec<(&'static str, u64)> {
        let inner = self.inner();
        let Base { setup, budget, observers, .. } = &*inner.base;
        if setup.check_fork().is_err() {
            return Vec::new();
        }
        let count = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &observers.counters;
        vec![
            ("transfers_ok", count(&counters.transfers_ok)),
            ("transfers_failed", count(&counters.transfers_failed)),
            ("transfers_open", inner.transfers.count() as u64),
            ("bytes_moved", count(&counters.bytes_moved)),
            ("grants_given", count(&counters.grants_given)),
            ("grants_live", inner.base.node(|node, _| node.open_grants() as u64)),
            ("sessions_opened", count(&counters.sessions_opened)),
            ("sessions_lost", count(&counters.sessions_lost)),
            ("sessions_open", inner.peers.sessions() as u64),
            ("memory_held_bytes", budget.used()),
            ("memory_cap_bytes", setup.config.memory_cap),
        ]
    }

    /// Every peer that is known: those with a session, those that are being reached, and the last of those that were
    /// lost (256 at most). In a forked child there is none.
    pub fn peers(&self) -> Vec<Peer> {
        let inner = self.inner();
        match inner.base.setup.check_fork() {
            Ok(()) => inner.peers.list(),
            Err(_) => Vec::new(),
        }
    }

    /// Ends its transfers and grants, says goodbye, and ends its threads. In a forked child it does nothing.
    ///
    /// It takes as long as `timeout` at most, or half a second where that is longer: what has not answered by then is
    /// cut. Closing it again, or on another thread meanwhile, waits for the same end.
    ///
    /// # Errors
    /// `PagesQuarantined` when a thread of this engine still has memory in use then (the text says which): it is let
    /// go of as soon as the thread goes on, and only then its transfers are reported to have ended.
    pub fn close(&self, timeout: Duration) -> Result<()> {
        self.handle.close(timeout)
    }
}
