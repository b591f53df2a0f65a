//! An engine in small: the protocol's node, one peer, and the transports under test. It implements the services that
//! transports need by calls of the node, and nothing else.

use crate::faulty::Faults;
use crate::standin::Standin;
use kvik_core::View;
use kvik_core::{
    Class, EngineId, Error, GrantId, GrantState, Incarnation, Layout, Order as Stream, RegionId, Result,
    Right, Use,
};
use kvik_host::clock::boottime;
use kvik_host::event::{Epoll, EventFd, Events, Interest, wait_ready};
use kvik_host::socket::{TcpConn, TcpListener, TcpOptions};
use kvik_host::thread::ThreadOptions;
use kvik_host::unix::UnixConn;
use kvik_host::{FenceSlot, FenceTable, HostFacts, HugePages, Memory};
use kvik_proto::*;
use kvik_transport::local::{Local as LocalTransport, LocalConfig, LocalLink};
use kvik_transport::nics::NicOptions;
use kvik_transport::rma::Rma;
use kvik_transport::tcp::{Tcp, TcpConfig};
use kvik_transport::{
    Ended, Placement, Queue, RegionMemory, Request, RmaPeers, Services, SessionEvents, Transport, WorkSource,
};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub const PATIENCE: Duration = Duration::from_secs(60);
const WAKER: u64 = 0;
const LINK: u64 = 1;

/// Which transport moves the bytes.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Kind {
    Tcp,
    Local,
    /// Of these NICs.
    Rma(&'static str),
    /// Of those of the stand-in for EFA.
    Efa,
}

pub struct Host {
    pub node: Mutex<Node<RegionMemory>>,
    pub session: OnceLock<u64>,
    peer: OnceLock<Weak<Host>>,
    fence: Arc<FenceTable>,
    pub under_test: OnceLock<Arc<dyn Transport>>,
    /// What was under test is here too, by its type, and what it needs beside it: threads that sum.
    tcp: OnceLock<Arc<Tcp>>,
    local: OnceLock<Arc<LocalTransport>>,
    pub rma: OnceLock<Arc<Rma>>,
    /// Frames from the peer.
    inbox: Mutex<Vec<u8>>,
    /// Bytes of frames that were sent, and that were taken up.
    frames: [AtomicUsize; 2],
    link: OnceLock<Arc<LocalLink>>,
    waker: EventFd,
    over: AtomicBool,
    told: Mutex<Told>,
    changed: Condvar,
}

#[derive(Default)]
struct Told {
    finished: HashMap<FlowKey, Finished>,
    grants: HashMap<GrantId, GrantState>,
}

impl Host {
    /// Does something with the node, and carries out what that made happen.
    pub fn with<T>(&self, f: impl FnOnce(&mut Node<RegionMemory>, Duration) -> T) -> T {
        let (result, events) = {
            let mut node = self.node.lock().unwrap();
            let now = boottime();
            let result = f(&mut node, now);
            let (mut events, mut unsent, mut output) = (Vec::new(), Vec::new(), Vec::new());
            while let Some(event) = node.next_event() {
                match event {
                    Event::Raise(slot) => drop(self.fence.raise(slot).unwrap()),
                    event => events.push(event),
                }
            }
            node.take_unsent(&mut unsent);
            unsent.into_iter().for_each(|session| {
                let mut bytes = Vec::new();
                node.session(session).take_output(&mut bytes);
                output.extend(bytes);
            });
            if let Some(rma) = self.rma.get() {
                rma.expose(node.exposed());
            }
            // Under the lock, so that frames keep their order.
            if let Some(peer) = self.peer.get().and_then(Weak::upgrade).filter(|_| !output.is_empty()) {
                self.frames[0].fetch_add(output.len(), Ordering::AcqRel);
                peer.inbox.lock().unwrap().extend_from_slice(&output);
                peer.waker.signal().unwrap();
            }
            (result, events)
        };
        events.into_iter().for_each(|event| self.on(event));
        result
    }

    fn all(&self) -> Vec<Arc<dyn Transport>> {
        let (local, rma, tcp) = (any(&self.local), any(&self.rma), any(&self.tcp));
        [local, rma, tcp].into_iter().flatten().collect()
    }

    fn on(&self, event: Event) {
        let wake = |queue| self.all().iter().for_each(|one| one.wake(queue));
        match event {
            Event::Send(session) => wake(Queue::Send(session)),
            Event::Copy => wake(Queue::Copy),
            Event::Post(session) => wake(Queue::Post(session)),
            Event::Stop(session) => self.all().iter().for_each(|one| one.cancel(session)),
            Event::Fence(session) => self.all().iter().for_each(|one| one.fence(session)),
            Event::SessionDown(session, _) => self.all().iter().for_each(|one| one.end_session(session)),
            Event::OpenChannels(session) => self.tcp.get().unwrap().open(session),
            Event::Finished(finished) => {
                self.told.lock().unwrap().finished.insert(finished.key, finished);
            }
            Event::GrantEnded(grant, state) => {
                self.told.lock().unwrap().grants.insert(grant, state);
            }
            Event::NicsMoved(session) => self.rma.get().unwrap().find_again(session),
            Event::Reach(session, call) => {
                if let Some(answer) = self.rma.get().unwrap().called(session, call) {
                    self.with(|node, _| node.session(session).answer_reach(answer));
                }
            }
            Event::Reached(session, answer) => self.rma.get().unwrap().answered(session, answer),
            _ => {}
        }
        self.changed.notify_all();
    }

    /// Reads what the peer sends, and lets time pass.
    fn run(self: Arc<Host>) {
        let epoll = Epoll::new().unwrap();
        epoll.add(&self.waker, WAKER, Interest::READ).unwrap();
        let (mut events, mut linked) = (Events::new(4), false);
        while !self.over.load(Ordering::Acquire) {
            epoll.wait(&mut events, Duration::from_millis(50)).unwrap();
            self.waker.drain().unwrap();
            if let Some(link) = self.link.get() {
                if !std::mem::replace(&mut linked, true) {
                    epoll.add(&**link, LINK, Interest::READ).unwrap();
                }
                if link.flush().and_then(|_| link.receive()).is_err() {
                    link.cut();
                    drop(epoll.delete(&**link));
                }
            }
            let bytes = std::mem::take(&mut *self.inbox.lock().unwrap());
            let session = *self.session.get().unwrap();
            self.with(|node, now| {
                if !bytes.is_empty() {
                    node.session(session).receive(&bytes, now);
                }
                node.tick(now);
            });
            self.frames[1].fetch_add(bytes.len(), Ordering::AcqRel);
        }
    }

    pub fn wait<T>(&self, what: &str, mut find: impl FnMut(&Host) -> Option<T>) -> T {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(found) = find(self) {
                return found;
            }
            assert!(Instant::now() < until, "{what} did not come");
            let told = self.told.lock().unwrap();
            drop(self.changed.wait_timeout(told, Duration::from_millis(5)).unwrap());
        }
    }

    /// Waits until all that the peer has sent so far was taken up here.
    pub fn has_heard(&self, peer: &Host) {
        let sent = peer.frames[0].load(Ordering::Acquire);
        self.wait("a frame", |host| (host.frames[1].load(Ordering::Acquire) >= sent).then_some(()));
    }

    pub fn is_finished(&self, key: FlowKey) -> bool {
        self.told.lock().unwrap().finished.contains_key(&key)
    }

    /// Whether the pages of a grant are the owner's again.
    pub fn has_ended(&self, grant: GrantId) -> bool {
        self.told.lock().unwrap().grants.contains_key(&grant)
    }

    pub fn finished(&self, key: FlowKey) -> Finished {
        self.wait("the end of a transfer", |host| host.told.lock().unwrap().finished.remove(&key))
    }

    /// What the transport under test says of a request on the session.
    pub fn answer(
        &self,
        op: Option<kvik_proto::Op>,
        memory: Option<(RegionId, &RegionMemory)>,
    ) -> kvik_transport::Answer {
        let request = Request { session: *self.session.get().unwrap(), op, memory, bytes: 1 };
        self.under_test.get().unwrap().answer(&request)
    }

    pub fn register(&self, id: u32, memory: &RegionMemory) -> RegionId {
        let id = RegionId(id);
        self.all().iter().for_each(|one| one.register(id, memory, PATIENCE).unwrap());
        id
    }

    pub fn withdraw(&self, region: RegionId) {
        self.all().iter().for_each(|one| one.withdraw(region, PATIENCE));
        self.all().iter().for_each(|one| one.forget(region));
    }

    /// Grants pages, which stay granted for longer than a transfer may take.
    pub fn grant(
        &self,
        right: Right,
        region: (RegionId, &RegionMemory),
        view: &View,
    ) -> (GrantId, FenceSlot) {
        let (id, slot, now) = (GrantId::random().unwrap(), self.fence.slot().unwrap(), boottime());
        let keys = self.rma.get().map(|rma| rma.keys(region.0)).unwrap_or_default();
        let offer = Offer {
            content: None,
            region: region.1.clone(),
            region_id: region.0,
            view: view.clone(),
            right,
            uses: Use::Many,
            expires: now + 2 * PATIENCE,
            latest: now + 2 * PATIENCE,
            slot: slot.index(),
            generation: slot.generation().unwrap(),
            keys,
            ring: self.rma.get().and_then(|rma| rma.ring(region.0)),
            closed: Closed::default(),
        };
        self.with(|node, now| node.grants().give(id, offer, now)).unwrap();
        (id, slot)
    }

    /// Revokes a grant, and waits until its pages are the owner's again.
    pub fn end_grant(&self, grant: GrantId) {
        self.with(|node, _| node.grants().end(grant, GrantState::Revoked));
        self.wait("the end of a grant", |host| host.told.lock().unwrap().grants.get(&grant).copied());
    }

    /// Begins a transfer over the transport under test.
    pub fn begin(
        &self,
        op: Op,
        grant: GrantId,
        region: (RegionId, &RegionMemory),
        view: &View,
    ) -> (FlowKey, Option<FenceSlot>) {
        self.begin_as(Class::default(), op, grant, region, view)
    }

    /// The same of a class.
    pub fn begin_as(
        &self,
        class: Class,
        op: Op,
        grant: GrantId,
        region: (RegionId, &RegionMemory),
        view: &View,
    ) -> (FlowKey, Option<FenceSlot>) {
        let by = self.under_test.get().unwrap();
        let path = by.path();
        let slot = (path == Path::Memory && op == Op::Write).then(|| self.fence.slot().unwrap());
        let fence = slot.as_ref().map(|slot| (slot.index(), slot.generation().unwrap()));
        let side = Side { region: region.1.clone(), region_id: region.0, view: view.clone(), fence };
        let open = Open {
            class,
            content: None,
            grant,
            layout: view.layout().digest(),
            op,
            path,
            sums: path != Path::OneSided,
            check: Check::All,
            confirm: true,
            readers: 1,
            deadline: boottime() + PATIENCE,
            chunk: 256 << 10,
            side: Some(side),
            select: Select::default(),
            extend: Duration::ZERO,
        };
        let session = *self.session.get().unwrap();
        by.open(session);
        (self.with(|node, now| node.session(session).begin(open, now)).unwrap(), slot)
    }
}

impl WorkSource for Host {
    fn claim(&self, queue: Queue, claim: Claim) -> Option<WorkRequest<RegionMemory>> {
        self.with(|node, now| match queue {
            Queue::Send(session) => node.session(session).next_of(Path::Channels, claim, now),
            Queue::Copy => node.next_copy(now),
            Queue::Post(session) => node.session(session).next_of(Path::OneSided, claim, now),
        })
    }
    fn claim_batch(
        &self,
        queue: Queue,
        claim: Claim,
        most: Batch,
        into: &mut Vec<WorkRequest<RegionMemory>>,
    ) {
        self.with(|node, now| match queue {
            Queue::Send(session) => node.session(session).next_batch(Path::Channels, claim, most, now, into),
            Queue::Copy => into.extend(node.next_copy(now)),
            Queue::Post(session) => node.session(session).next_batch(Path::OneSided, claim, most, now, into),
        });
    }
    fn done(&self, id: WorkId, outcome: WorkOutcome) {
        self.with(|node, _| node.work_done(id, outcome));
    }
    fn batch_done(&self, ended: &mut Vec<Ended>) {
        self.with(|node, _| node.batch_done(ended));
    }
    fn stuck(&self, id: WorkId, error: Error) {
        self.with(|node, _| node.work_stuck(id, error));
    }
    fn landed(&self, id: &mut WorkId) {
        self.with(|node, _| node.work_landed(id));
    }
}

impl Placement for Host {
    fn place(&self, session: u64, header: &ChunkHeader) -> Result<Option<WorkRequest<RegionMemory>>> {
        self.with(|node, now| node.session(session).place(header, now))
    }
}

impl SessionEvents for Host {
    fn heard(&self, session: u64) -> bool {
        self.with(|node, now| {
            node.session(session).touch(now);
            node.established(session).is_some()
        })
    }
    /// Channels of TCP over loopback, four of them, whoever asks.
    fn connect(&self, session: u64) {
        let Some(peer) = self.peer.get().and_then(Weak::upgrade) else { return };
        for _ in 0..4 {
            let (mine, theirs) = connected();
            self.tcp.get().unwrap().add(session, mine);
            peer.tcp.get().unwrap().add(session, theirs);
        }
    }
    fn broken(&self, session: u64, error: Error) {
        self.with(|node, _| node.session(session).close(error));
    }
    fn flush_local(&self) {
        self.waker.signal().unwrap();
    }
    fn fenced(&self, session: u64) {
        self.with(|node, _| node.session(session).fenced());
    }
}

impl RmaPeers for Host {
    fn nics(&self, session: u64) -> Option<Nics> {
        self.with(|node, _| node.established(session).map(|session| session.facts.nics.clone()))
    }
    fn moved(&self, nics: Nics) {
        self.with(|node, _| node.tell_nics(&nics));
    }
    fn call(&self, session: u64, call: NicCall) {
        self.with(|node, _| node.session(session).reach(call));
    }
    fn answer(&self, session: u64, answer: NicAnswer) {
        self.with(|node, _| node.session(session).answer_reach(answer));
    }
    fn warm_up_done(&self, _session: u64, _nic: usize, _number: usize, _outcome: Result<bool>) {}
}

/// One of them without its type, if it is there.
fn any<T: Transport + 'static>(one: &OnceLock<Arc<T>>) -> Option<Arc<dyn Transport>> {
    let one: Arc<dyn Transport> = one.get()?.clone();
    Some(one)
}

fn connected() -> (TcpConn, TcpConn) {
    let options = TcpOptions::default();
    let listener = TcpListener::bind("127.0.0.1:0".parse().unwrap(), 1, &options).unwrap();
    let mine = TcpConn::connect_within(listener.local_addr().unwrap(), &options, PATIENCE).unwrap();
    assert!(wait_ready(&listener, Interest::READ, PATIENCE).unwrap());
    (mine, listener.accept().unwrap().unwrap().0)
}

/// Two hosts in one session. Their threads end with this.
pub struct Pair {
    pub owner: Arc<Host>,
    pub other: Arc<Host>,
    /// What goes wrong at the owner, and at the other.
    pub theirs: Arc<Faults>,
    pub ours: Arc<Faults>,
    threads: Vec<JoinHandle<()>>,
}

impl Pair {
    pub fn new(kind: Kind) -> Pair {
        let (theirs, ours) = (Faults::new(1), Faults::new(2));
        let (owner, other) = (start(kind, 1, &theirs), start(kind, 2, &ours));
        let (left, right) = shake(local(&other, 2), local(&owner, 1));
        other.peer.set(Arc::downgrade(&owner)).unwrap();
        owner.peer.set(Arc::downgrade(&other)).unwrap();
        for (host, mut side) in [(&other, left), (&owner, right)] {
            let (session, facts) = (side.session, side.facts.clone());
            host.session.set(session).unwrap();
            host.all().iter().for_each(|one| one.add_session(session, &facts));
            side.one_sided = host.rma.get().is_some_and(|rma| rma.reaches(session));
            host.with(|node, now| node.add_session(side, now));
        }
        if kind == Kind::Local {
            let (mine, theirs) = UnixConn::pair().unwrap();
            for (host, conn, peer) in [(&other, mine, &owner), (&owner, theirs, &other)] {
                let (session, facts) = (*host.session.get().unwrap(), local(peer, 0).facts);
                let link = host.local.get().unwrap().join(session, conn, &facts, [7; 32]);
                assert!(host.link.set(link.unwrap()).is_ok());
                host.waker.signal().unwrap();
            }
        }
        let threads = [&owner, &other].map(|host| {
            let host = host.clone();
            std::thread::spawn(move || host.run())
        });
        Pair { owner, other, theirs, ours, threads: threads.into() }
    }

    /// The faults of the side that writes the destination.
    pub fn mover(&self, kind: Kind, op: Op) -> &Arc<Faults> {
        if op == Op::Read || matches!(kind, Kind::Rma(_) | Kind::Efa) { &self.ours } else { &self.theirs }
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        for faults in [&self.ours, &self.theirs] {
            faults.release();
        }
        for host in [&self.owner, &self.other] {
            host.all().iter().for_each(|one| one.stop());
            host.over.store(true, Ordering::Release);
            host.waker.signal().unwrap();
        }
        self.threads.drain(..).for_each(|thread| thread.join().unwrap());
    }
}

fn start(kind: Kind, number: u8, faults: &Arc<Faults>) -> Arc<Host> {
    let host = Arc::new(Host {
        node: Mutex::new(Node::new(identity(number), Timing::default(), boottime())),
        session: OnceLock::new(),
        peer: OnceLock::new(),
        fence: FenceTable::new(64).unwrap(),
        under_test: OnceLock::new(),
        tcp: OnceLock::new(),
        local: OnceLock::new(),
        rma: OnceLock::new(),
        inbox: Mutex::default(),
        frames: Default::default(),
        link: OnceLock::new(),
        waker: EventFd::new().unwrap(),
        over: AtomicBool::new(false),
        told: Mutex::default(),
        changed: Condvar::new(),
    });
    let (services, options) = (faults.stand_before(Services::of(&host)), ThreadOptions::default());
    let rest = |under_test: Arc<dyn Transport>| assert!(host.under_test.set(under_test).is_ok());
    let config = LocalConfig {
        listens: kind == Kind::Local,
        threads: 2,
        host: HostFacts::read().unwrap(),
        fence: host.fence.clone(),
    };
    let copies = Arc::new(LocalTransport::start(config, &services, &options).unwrap());
    match kind {
        Kind::Tcp => {
            let config = TcpConfig { threads: 2, channels: 4, tls: false };
            let tcp = Arc::new(Tcp::start(config, &services, &options).unwrap());
            assert!(host.tcp.set(tcp.clone()).is_ok());
            rest(tcp);
        }
        Kind::Local => rest(copies.clone()),
        Kind::Rma(_) | Kind::Efa => {
            let (nics, library) = match kind {
                Kind::Rma(nics) => (nics, None),
                _ => ("efa", Some(Standin::Fabric.library())),
            };
            let nics: NicOptions = nics.parse().unwrap();
            let nics = NicOptions { source: Some([127, 0, 0, 1].into()), library, ..nics };
            let rma = Arc::new(Rma::start(&nics, 1, &options).unwrap());
            rma.serve(&services);
            assert!(host.rma.set(rma.clone()).is_ok());
            rest(rma);
        }
    }
    assert!(host.local.set(copies).is_ok());
    host
}

fn identity(number: u8) -> Identity {
    Identity { engine: EngineId([number; 16]), incarnation: Incarnation(number.into()) }
}

fn local(host: &Host, number: u8) -> Local {
    let here = HostFacts::read().unwrap();
    let facts = Facts {
        boot: here.boot_id,
        pid_namespace: here.pid_namespace,
        user_namespace: here.user_namespace,
        network_namespace: here.net_namespace,
        uid: here.uid,
        pid: here.pid,
        local_name: host.under_test.get().filter(|one| one.path() == Path::Memory).map_or("", |_| "x").into(),
        name: String::new(),
        nics: host.rma.get().map(|rma| rma.nics()).unwrap_or_default(),
    };
    Local { identity: identity(number), secret: Secret::new(None), facts }
}

/// Shakes hands over a perfect wire.
fn shake(opener: Local, listener: Local) -> (Established, Established) {
    let (mut left, mut to_right) = Handshake::open(opener, [1; 32], None);
    let mut right = Handshake::listen(listener, [2; 32]);
    let (mut to_left, mut sides) = (Vec::new(), (None, None));
    for _ in 0..4 {
        if let Some(Greeting::Control(side)) = right.receive(&mut to_right, &mut to_left).unwrap() {
            sides.1 = Some(side);
        }
        if let Some(Greeting::Control(side)) = left.receive(&mut to_left, &mut to_right).unwrap() {
            sides.0 = Some(side);
        }
    }
    (sides.0.unwrap(), sides.1.unwrap())
}

/// Memory of so many bytes, of a pattern of its own.
pub fn memory(bytes: usize, seed: u8) -> RegionMemory {
    let memory = RegionMemory::from(Memory::shared(bytes, HugePages::Never).unwrap());
    memory.copy_in(0, &pattern(bytes, seed)).unwrap();
    memory
}

pub fn pattern(bytes: usize, seed: u8) -> Vec<u8> {
    (0..bytes).map(|at| ((at * 31 + at / 4096) as u8) ^ seed).collect()
}

pub fn bytes(memory: &RegionMemory) -> Vec<u8> {
    let mut bytes = vec![0; memory.len()];
    memory.copy_out(0, &mut bytes).unwrap();
    bytes
}

/// Pages of `page` bytes, in this order.
pub fn view(memory: &RegionMemory, page: u64, ids: &[u32]) -> View {
    let layout = Arc::new(Layout::contiguous((memory.len() as u64 / page) as u32, page).unwrap());
    View::new(layout, ids.into(), 0..1, 0..1, Stream::LayerFirst).unwrap()
}
