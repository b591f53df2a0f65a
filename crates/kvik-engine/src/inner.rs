//! What an engine's threads and handles share.
//!
//! Locks, always in this order: a control connection's output, the node, the tables; the others are taken last and
//! held for a few lines. Everything that a node's call made happen is carried out after its lock is released, but
//! for raised fences, which happen under it: nobody may learn that pages are free before their fence is up.

use crate::budget::{Budget, Lease};
use crate::config::Config;
use crate::control::ControlCommand;
use crate::dial::Dial;
use crate::end::End;
use crate::events::{EventBus, Quarantine};
use crate::grant::GrantCell;
use crate::launch::Taken;
use crate::metrics::Metrics;
use crate::notify::NotificationQueue;
use crate::observer::Observer;
use crate::output::ControlConn;
use crate::peers::PeerTable;
use crate::select::Rejected;
use crate::transfer::Report;
use crate::transports::Transports;
use kvik_core::{Code, EngineId, Error, GrantId, GrantState, HostTag, RegionId, Result};
use kvik_host::clock::boottime;
use kvik_host::event::EventFd;
use kvik_host::thread::ThreadOptions;
use kvik_host::{FenceSlot, FenceTable, ForkGuard, HostFacts};
use kvik_proto::{
    Event, Facts, FlowKey, Identity, Local, NicAnswer, NicCall, Nics, Node, Op, Path, Secret, Served, Timing,
};
use kvik_transport::rma::Rma;
use kvik_transport::tls::Tls;
use kvik_transport::{Queue, RegionMemory, Transport, WeakRegionMemory, from_host};
use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// Grants, and writes within the host, that can be open at once: 512 KiB of generations.
const FENCE_SLOTS: u32 = 1 << 16;

/// How long NICs may take to learn of so many bytes, whose pages the kernel pins one by one.
fn registering(deadline: Duration, bytes: usize) -> Duration {
    deadline + Duration::from_secs(bytes as u64 >> 30)
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// See the module's text.
pub(crate) struct Inner {
    pub config: Config,
    pub local: Local,
    /// Every TCP connection is under it, or none is.
    pub tls: Option<Tls>,
    pub host: HostFacts,
    guard: ForkGuard,
    closed: AtomicBool,
    node: Mutex<Node<RegionMemory>>,
    pub tables: Mutex<Tables>,
    pub conns: Mutex<HashMap<u64, Arc<ControlConn>>>,
    pub fence: Arc<FenceTable>,
    pub transports: OnceLock<Transports>,
    pub addresses: OnceLock<Vec<SocketAddr>>,
    commands: Mutex<Vec<ControlCommand>>,
    pub waker: EventFd,
    /// When the control thread wakes by itself, in nanoseconds of `boottime`.
    wakes_at: AtomicU64,
    progress: (Mutex<u64>, Condvar),
    pub budget: Budget,
    pub counters: Counters,
    pub metrics: Metrics,
    pub observer: OnceLock<Arc<dyn Observer>>,
    pub peers: PeerTable,
    pub events: EventBus,
    pub notes: NotificationQueue,
    pub quarantine: Quarantine,
}

/// Everything that is looked up by id.
#[derive(Default)]
pub(crate) struct Tables {
    pub transfers: HashMap<u64, TransferEntry>,
    pub by_key: HashMap<FlowKey, u64>,
    /// Transfers that wait for a session.
    pub waiting: HashSet<u64>,
    pub grants: HashMap<GrantId, (Arc<GrantCell>, FenceSlot, Lease)>,
    pub regions: HashMap<RegionId, WeakRegionMemory>,
    pub dials: HashMap<Identity, Dial>,
    pub links: HashMap<u64, Link>,
    pub last_transfer: u64,
    pub last_region: u32,
}

/// A session as the engine sees it.
pub(crate) struct Link {
    pub peer: Identity,
    /// Where this side found the peer, if it opened the session.
    pub address: Option<SocketAddr>,
    /// It was warmed, or is being so.
    pub warm: bool,
    pub lease: Lease,
    /// The part of the lease that stays to the session's end.
    pub kept: u64,
}

/// A transfer that this side began.
pub(crate) struct TransferEntry {
    pub end: Arc<End<Report>>,
    pub request: crate::launch::TransferRequest,
    pub began: Duration,
    pub plan: Duration,
    pub key: Option<FlowKey>,
    /// When the protocol began with it.
    pub begun: Duration,
    /// What moves it, once that is known.
    pub taken: Option<Taken>,
    /// Transports that turned out not to serve it.
    pub refused: Vec<Rejected>,
    pub fence: Option<FenceSlot>,
    /// Set when somebody wants its end: it begins nothing any more.
    pub stopped: Option<Error>,
    /// How often it may still wait for another session when one breaks before it begins.
    pub retries: u8,
    pub _lease: Lease,
}

/// What has happened since the start.
#[derive(Default)]
pub(crate) struct Counters {
    pub transfers_ok: AtomicU64,
    pub transfers_failed: AtomicU64,
    pub bytes_moved: AtomicU64,
    pub grants_given: AtomicU64,
    pub sessions_opened: AtomicU64,
    pub sessions_lost: AtomicU64,
}

impl Inner {
    pub fn new(config: Config, advertised: &[SocketAddr]) -> Result<Inner> {
        let fail = |error| from_host(Code::InvalidArgument, error);
        let host = HostFacts::read().map_err(fail)?;
        let identity = Identity {
            engine: EngineId::at(&host.boot_id, host.net_namespace, &[&config.listen, advertised].concat()),
            incarnation: kvik_core::Incarnation::random()?,
        };
        let facts = Facts {
            boot: host.boot_id,
            pid_namespace: host.pid_namespace,
            user_namespace: host.user_namespace,
            network_namespace: host.net_namespace,
            uid: host.uid,
            pid: host.pid,
            // Of this start alone: a forked child of an earlier one may still hold that one's socket.
            local_name: format!("kvik-{}-{:016x}", identity.engine, identity.incarnation.0),
            name: config.name.clone(),
            nics: Nics::default(),
        };
        let local = Local { identity, secret: Secret::new(config.secret.as_deref()), facts };
        let tls = config.tls.as_ref().map(Tls::load).transpose()?;
        let budget = Budget::new(config.memory_cap);
        let mut node = Node::new(identity, Timing::default(), boottime());
        node.set_window(config.window);
        Ok(Inner {
            config,
            local,
            tls,
            host,
            guard: ForkGuard::new().map_err(fail)?,
            closed: AtomicBool::new(false),
            node: Mutex::new(node),
            tables: Mutex::default(),
            conns: Mutex::default(),
            fence: FenceTable::new(FENCE_SLOTS).map_err(fail)?,
            transports: OnceLock::new(),
            addresses: OnceLock::new(),
            commands: Mutex::default(),
            waker: EventFd::new().map_err(fail)?,
            wakes_at: AtomicU64::new(0),
            progress: Default::default(),
            budget,
            counters: Counters::default(),
            metrics: Metrics::new(),
            observer: OnceLock::new(),
            peers: PeerTable::default(),
            events: EventBus::default(),
            notes: NotificationQueue::default(),
            quarantine: Quarantine::default(),
        })
    }

    /// Where the engine's threads run, and where their CPU time is counted.
    pub fn thread_options(&self) -> ThreadOptions {
        ThreadOptions {
            cpus: self.config.cpus.clone(),
            numa_node: self.config.numa_node,
            times: self.metrics.threads.clone(),
        }
    }

    /// Eight bytes that tell whether a loopback address here means the same there.
    pub fn host_tag(&self) -> HostTag {
        HostTag::new(&self.host.boot_id, self.host.net_namespace)
    }

    // ---- may it be used ----

    /// # Errors
    /// `EngineForked` in a child of the process that started the engine.
    pub fn check_fork(&self) -> Result<()> {
        match self.guard.is_child() {
            false => Ok(()),
            true => Err(Error::new(
                Code::EngineForked,
                "the engine belongs to the parent of this process: start one of its own in the child",
            )),
        }
    }

    /// # Errors
    /// `EngineForked`, or `EngineClosed`.
    pub fn check(&self) -> Result<()> {
        self.check_fork()?;
        match self.is_closed() {
            false => Ok(()),
            true => Err(Error::new(Code::EngineClosed, "the engine was closed; start another one")),
        }
    }

    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// True for the one who closes it.
    pub fn set_closed(&self) -> bool {
        !self.closed.swap(true, Ordering::AcqRel)
    }

    // ---- the node ----

    /// Does something with the node, and carries out what that made happen.
    pub fn node<T>(&self, f: impl FnOnce(&mut Node<RegionMemory>, Duration) -> T) -> T {
        let (mut events, mut unsent) = (Vec::new(), Vec::new());
        let (result, timeout) = {
            let mut node = lock(&self.node);
            let now = boottime();
            node.note_time(now);
            let result = f(&mut node, now);
            while let Some(event) = node.next_event() {
                match event {
                    Event::Raise(slot) => {
                        if let Err(error) = self.fence.raise(slot) {
                            log::error!("a fence could not be raised: {error}");
                        }
                    }
                    event => events.push(event),
                }
            }
            node.take_unsent(&mut unsent);
            if let Some(rma) = self.transports.get().and_then(|all| all.rma.as_ref()) {
                rma.expose(node.exposed());
            }
            (result, node.next_timeout())
        };
        unsent.into_iter().for_each(|session| self.flush(session));
        events.into_iter().for_each(|event| self.on_event(event));
        if let Some(at) = timeout {
            self.wake_by(at);
        }
        result
    }

    /// What waits to be sent on a session's control connection, in exchange for an empty buffer.
    pub fn take_output(&self, session: u64, buffer: &mut Vec<u8>) {
        lock(&self.node).take_output(session, buffer);
    }

    pub fn on_event(&self, event: Event) {
        match event {
            Event::Send(session) => self.wake(Queue::Send(session)),
            Event::Copy => self.wake(Queue::Copy),
            Event::Post(session) => self.wake(Queue::Post(session)),
            Event::Stop(session) => self.transports().iter().for_each(|one| one.cancel(session)),
            Event::Raise(_) => {}
            Event::Fence(session) => self.transports().iter().for_each(|one| one.fence(session)),
            Event::NicsMoved(session) => self.with_rma(|rma| rma.find_again(session)),
            Event::Reach(session, call) => self.on_reach(session, call),
            Event::Reached(session, answer) => self.with_rma(|rma| rma.answered(session, answer)),
            Event::Finished(finished) => self.on_finished(finished),
            Event::Served(served) => {
                self.make_seen(&served);
                self.metrics.served(&served, self.transports.get().and_then(|all| all.of(served.path)));
            }
            Event::GrantEnded(id, state) => {
                if let Some((cell, _, _)) = lock(&self.tables).grants.remove(&id) {
                    cell.set(state);
                    log::debug!(engine:% = self.local.identity.engine, grant:% = id, request:% = cell.tag; "grant ended: {}", state.name());
                }
                self.metrics.grant_ended(state);
                self.end_quarantine(id);
                self.events.publish(crate::events::Event::GrantEnded(id, state));
                self.note_progress();
            }
            Event::SessionDown(session, error) => self.on_session_down(session, error),
            Event::OpenChannels(session) => self.with_transports(|all| all.tcp.open(session)),
            Event::Ending(id, pages) => self.begin_quarantine(id, pages),
            Event::Silent(session) | Event::Heard(session) | Event::Goodbye(session) => {
                self.on_life(session, &event);
            }
            Event::Notified(note) => self.on_notified(note),
            Event::NoteEnded { session, number, outcome } => self.notes.ended(session, number, outcome),
            Event::NoteRoom(_) => self.notes.note_move(),
        }
    }

    /// Sees to it that GPUs here see what a peer's NIC has written, before anybody here hears that it is there.
    fn make_seen(&self, served: &Served) {
        if (served.op, served.path) != (Op::Write, Path::OneSided) || served.outcome.is_err() {
            return;
        }
        // Under the lock, so that a region which is closed meanwhile is not held by this.
        let (tables, mut seen) = (lock(&self.tables), Vec::new());
        for held in tables.regions.values().filter_map(WeakRegionMemory::upgrade) {
            let Some(device) = held.device().map(|device| device.ordinal()) else { continue };
            if seen.contains(&device) {
                continue;
            }
            seen.push(device);
            if let Err(error) = held.flush_writes() {
                log::error!("GPU {device} may not see what a peer's NIC has written: {error}");
            }
        }
    }

    /// Does something with the transports by their kinds, once they are there.
    pub fn with_transports(&self, f: impl FnOnce(&Transports)) {
        if let Some(all) = self.transports.get() {
            f(all);
        }
    }

    /// The transports, in the order of preference; none before they have started.
    pub fn transports(&self) -> &[Arc<dyn Transport>] {
        self.transports.get().map_or(&[], Transports::all)
    }

    /// Whether a device moves bytes, which holds memory by itself.
    pub fn has_devices(&self) -> bool {
        self.transports().iter().any(|one| !one.devices().is_empty())
    }

    /// Whether this side's NICs reach those of a session's peer.
    pub fn reaches_by_rma(&self, session: u64) -> bool {
        self.transports.get().and_then(|all| all.rma.as_ref()).is_some_and(|rma| rma.reaches(session))
    }

    fn with_rma(&self, f: impl FnOnce(&Rma)) {
        if let Some(rma) = self.transports.get().and_then(|all| all.rma.as_ref()) {
            f(rma);
        }
    }

    fn wake(&self, queue: Queue) {
        self.transports().iter().for_each(|one| one.wake(queue));
    }

    fn on_reach(&self, session: u64, call: NicCall) {
        let refused = match self.transports.get().and_then(|all| all.rma.as_ref()) {
            Some(rma) => rma.called(session, call),
            None => Some(NicAnswer {
                from: call.from,
                to: call.to,
                kind: call.kind,
                outcome: Err(Error::new(Code::TransportUnavailable, "this engine has no NICs")),
            }),
        };
        if let Some(answer) = refused {
            self.node(|node, _| node.answer_reach(session, answer));
        }
    }

    /// What this engine says of itself in a handshake.
    pub fn local(&self) -> Local {
        let mut local = self.local.clone();
        let rma = self.transports.get().and_then(|all| all.rma.as_ref());
        local.facts.nics = rma.map(|rma| rma.nics()).unwrap_or_default();
        local
    }

    fn on_session_down(&self, session: u64, error: Error) {
        if let Some(conn) = lock(&self.conns).remove(&session)
            && let Err(error) = conn.conn.shutdown_both()
        {
            log::debug!("a control connection could not be shut down: {error}");
        }
        let link = lock(&self.tables).links.remove(&session);
        self.transports().iter().for_each(|one| one.end_session(session));
        self.command(ControlCommand::Forget(session));
        self.counters.sessions_lost.fetch_add(1, Ordering::Relaxed);
        let peer = link.as_ref().map_or_else(String::new, |link| link.peer.engine.to_string());
        log::info!(engine:% = self.local.identity.engine, peer:% = peer; "session {session} ended: {error}");
        if let Some(link) = link {
            self.metrics.session_ended(link.peer.engine, error.code);
            self.on_peer_gone(session, link.peer, link.address.is_some(), &error);
            self.wait_again(&link.peer, &error);
        }
        self.note_progress();
    }

    // ---- grants and regions ----

    /// Ends a grant.
    pub fn end_grant(&self, id: GrantId, state: GrantState) {
        self.node(|node, _| node.end_grant(id, state));
    }

    /// Makes a region known to the transports, or again after [`Inner::withdraw_region`].
    ///
    /// # Errors
    /// `TransportUnavailable` when a NIC refuses memory of the host, `DeadlineExceeded` when one does not answer.
    /// Memory of a device is then not for NICs.
    pub fn show_region(&self, id: RegionId, memory: &RegionMemory) -> Result<()> {
        let limit = registering(self.config.deadline, memory.len());
        lock(&self.tables).regions.insert(id, memory.downgrade());
        let shown = self.transports().iter().try_for_each(|one| one.register(id, memory, limit));
        shown.inspect_err(|_| {
            lock(&self.tables).regions.remove(&id);
            self.transports().iter().for_each(|one| one.withdraw(id));
            self.forget_region(id);
        })
    }

    /// Ends the grants over a region and takes it back from the transports.
    pub fn withdraw_region(&self, id: RegionId, memory: RegionMemory) {
        lock(&self.tables).regions.remove(&id);
        self.node(|node, _| node.end_grants_of(id));
        // NICs let go of memory only when nobody else holds it.
        drop(memory);
        // In order: whoever may be showing it right now comes before the NICs.
        self.transports().iter().for_each(|one| one.withdraw(id));
    }

    /// Drops what is kept of a region until it is closed for good: until then it may be shown again.
    pub fn forget_region(&self, id: RegionId) {
        self.transports().iter().for_each(|one| one.forget(id));
    }

    /// Whether processes on this host may be shown memory.
    pub fn has_local(&self) -> bool {
        !self.local.facts.local_name.is_empty()
    }

    // ---- waking ----

    /// Tells the control thread.
    pub fn command(&self, command: ControlCommand) {
        let mut commands = lock(&self.commands);
        if !matches!(
            (&command, commands.last()),
            (ControlCommand::FlushLocal, Some(ControlCommand::FlushLocal))
        ) {
            commands.push(command);
        }
        drop(commands);
        self.wake_control();
    }

    pub fn take_commands(&self) -> Vec<ControlCommand> {
        std::mem::take(&mut lock(&self.commands))
    }

    pub fn wake_control(&self) {
        if let Err(error) = self.waker.signal() {
            log::error!("the control thread cannot be woken: {error}");
        }
    }

    /// The control thread is awake at this time, at the latest.
    pub fn wake_by(&self, at: Duration) {
        if (at.as_nanos() as u64) < self.wakes_at.load(Ordering::SeqCst) {
            self.wake_control();
        }
    }

    /// How long the control thread sleeps now, given what it waits for itself.
    ///
    /// While `own` and the node are asked, every [`Inner::wake_by`] wakes it: whatever is set meanwhile either is seen
    /// here or wakes the thread at once.
    pub fn sleep_until(&self, own: impl FnOnce() -> Option<Duration>) -> Duration {
        self.wakes_at.store(u64::MAX, Ordering::SeqCst);
        let own = own();
        let soonest = own.into_iter().chain(lock(&self.node).next_timeout()).min();
        let soonest = soonest.unwrap_or(Duration::from_secs(u32::MAX.into()));
        self.wakes_at.store(soonest.as_nanos() as u64, Ordering::SeqCst);
        soonest.saturating_sub(boottime())
    }

    pub fn note_progress(&self) {
        *lock(&self.progress.0) += 1;
        self.progress.1.notify_all();
    }

    /// Waits until a transfer or grant ends, or the time is over.
    pub fn wait_progress(&self, most: Duration) {
        let count = lock(&self.progress.0);
        drop(self.progress.1.wait_timeout(count, most));
    }

    /// The end of a transfer, with its report.
    pub fn count_end(&self, outcome: &Result<Report>) {
        match outcome {
            Ok(report) => {
                self.counters.transfers_ok.fetch_add(1, Ordering::Relaxed);
                self.counters.bytes_moved.fetch_add(report.bytes, Ordering::Relaxed);
            }
            Err(_) => drop(self.counters.transfers_failed.fetch_add(1, Ordering::Relaxed)),
        }
    }
}
