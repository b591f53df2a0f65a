//! Memory of other processes on the host as a transport: which sessions have a local channel, and what they are shown.

use super::{LocalLink, Populator};
use crate::basics::lock;
use crate::copy::CopyPool;
use crate::pace::Pace;
use crate::{
    Answer, Moved, Queue, RegionMemory, Request, Services, SessionEvents, Transport, TransportId,
    WeakRegionMemory,
};
use kvik_core::{Code, Error, RegionId, Result};
use kvik_host::device::Handle;
use kvik_host::thread::ThreadOptions;
use kvik_host::unix::UnixConn;
use kvik_host::{FenceTable, HostFacts};
use kvik_proto::{Facts, Op, Path};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

/// How long a session's local channel may take to come up before transfers go without it; and how long they wait for
/// the session to end when the peer has closed its channel, as one that dies does a moment before its session ends.
pub const LOCAL_LINK: Duration = Duration::from_secs(1);

/// What processes on this host open a region on a GPU by, or why they cannot.
type GpuHandle = std::result::Result<Handle, Arc<str>>;

/// How an engine uses the memory of other processes.
pub struct LocalConfig {
    /// Whether processes of this host find the engine's socket; without it, only its own memory is copied.
    pub listens: bool,
    /// Threads that copy.
    pub threads: usize,
    /// The host, as this process sees it.
    pub host: HostFacts,
    /// Where peers see whether what they copy is still granted.
    pub fence: Arc<FenceTable>,
}

/// Copies into this process's memory: from a process on the same host, or from itself. Its threads also sum what NICs
/// have moved.
pub struct Local {
    listens: bool,
    host: HostFacts,
    fence: Arc<FenceTable>,
    pool: CopyPool,
    populator: Arc<Populator>,
    events: Weak<dyn SessionEvents>,
    links: Arc<Links>,
    regions: Mutex<HashMap<RegionId, PeerRegions>>,
}

/// The local channels of sessions.
#[derive(Default)]
pub(crate) struct Links {
    sessions: Mutex<HashMap<u64, Session>>,
}

struct Session {
    link: State,
    pace: Pace,
}

enum State {
    /// There will not be one, and why.
    No(Arc<str>),
    /// It is being made, or the peer closed it and the session may be about to end. After this time transfers go
    /// without it, for this reason.
    Unsettled(Instant, Arc<str>),
    Up(Arc<LocalLink>),
}

struct PeerRegions {
    memory: WeakRegionMemory,
    handle: Option<GpuHandle>,
}

impl Links {
    pub fn get(&self, session: u64) -> Option<Arc<LocalLink>> {
        match &lock(&self.sessions).get(&session)?.link {
            State::Up(link) => Some(link.clone()),
            State::No(_) | State::Unsettled(..) => None,
        }
    }

    fn all(&self) -> Vec<Arc<LocalLink>> {
        let sessions = lock(&self.sessions);
        let up = sessions.values().filter_map(|session| match &session.link {
            State::Up(link) => Some(link.clone()),
            State::No(_) | State::Unsettled(..) => None,
        });
        up.collect()
    }

    fn set(&self, session: u64, state: State) {
        let before =
            lock(&self.sessions).get_mut(&session).map(|session| std::mem::replace(&mut session.link, state));
        // Not under the lock: the end of a channel's regions has somebody told.
        drop(before);
    }
}

impl Local {
    /// Starts its threads.
    ///
    /// # Errors
    /// `InvalidArgument` where a thread cannot be started as the options say.
    pub fn start(config: LocalConfig, services: &Services, options: &ThreadOptions) -> Result<Local> {
        let LocalConfig { listens, threads, host, fence } = config;
        let links = Arc::<Links>::default();
        let pool = CopyPool::start(services.work.clone(), links.clone(), threads, options)?;
        let populator = Arc::new(Populator::start(options)?);
        let events = Arc::downgrade(&services.sessions);
        Ok(Local { listens, host, fence, pool, populator, events, links, regions: Mutex::default() })
    }

    /// Whether a session that has just begun is to have a channel.
    pub fn is_opening(&self, session: u64) -> bool {
        let sessions = lock(&self.links.sessions);
        sessions.get(&session).is_some_and(|session| matches!(session.link, State::Unsettled(..)))
    }

    /// The peer of a session has joined over this connection: it is shown all regions.
    pub fn join(
        &self,
        session: u64,
        conn: UnixConn,
        peer: &Facts,
        nonce: [u8; 32],
    ) -> Option<Arc<LocalLink>> {
        let near = self.host.why_not_process_vm(&host_facts(peer)).is_none();
        let pid = conn.credentials().ok().and_then(|peer| peer.pid).filter(|_| near).unwrap_or(0);
        let events = self.events.clone();
        let wake = move || {
            if let Some(events) = events.upgrade() {
                events.flush_local();
            }
        };
        let link = LocalLink::new(conn, self.fence.clone(), pid, nonce, wake);
        let link = Arc::new(link.with_populator(self.populator.clone()));
        let mut sessions = lock(&self.links.sessions);
        let before = std::mem::replace(&mut sessions.get_mut(&session)?.link, State::Up(link.clone()));
        for (id, shown) in &*lock(&self.regions) {
            if let Some(memory) = shown.memory.upgrade() {
                let handle = shown.handle.as_ref().and_then(|handle| handle.as_ref().ok().copied());
                link.share(*id, &memory, handle);
            }
        }
        drop(sessions);
        drop(before);
        Some(link)
    }

    /// A session's channel did not come up, or broke: it goes without, after [`LOCAL_LINK`] where the peer closed it.
    pub fn failed(&self, session: u64, error: &Error) {
        let why = format!("the local link failed: {}", error.text).into();
        let state = match error.code {
            Code::PeerLost => State::Unsettled(Instant::now() + LOCAL_LINK, why),
            _ => State::No(why),
        };
        self.links.set(session, state);
    }

    /// When the next session is to go without its channel.
    pub fn next_expiry(&self) -> Option<Instant> {
        let sessions = lock(&self.links.sessions);
        let opening = sessions.values().filter_map(|session| match session.link {
            State::Unsettled(until, _) => Some(until),
            State::No(_) | State::Up(_) => None,
        });
        opening.min()
    }

    /// Sessions that go without their channels from now on.
    pub fn expire(&self, now: Instant) -> Vec<u64> {
        let mut late = Vec::new();
        for (id, session) in &mut *lock(&self.links.sessions) {
            if let State::Unsettled(until, why) = &session.link
                && *until <= now
            {
                session.link = State::No(why.clone());
                late.push(*id);
            }
        }
        late
    }

    fn flush(&self) {
        if let Some(events) = self.events.upgrade() {
            events.flush_local();
        }
    }

    /// Why a process on this host cannot copy from a region, where it cannot.
    fn not_opened(&self, region: RegionId, memory: &RegionMemory) -> Option<Arc<str>> {
        let device = memory.device()?;
        let id = region.0;
        let hidden = "and this engine shows no memory to other processes";
        match lock(&self.regions).get(&region).and_then(|shown| shown.handle.as_ref()) {
            Some(Ok(_)) => None,
            Some(Err(why)) => Some(why.clone()),
            None => Some(format!("region {id} lies on {device}, {hidden}").into()),
        }
    }
}

impl Transport for Local {
    fn id(&self) -> TransportId {
        TransportId::Local
    }

    fn path(&self) -> Path {
        Path::Memory
    }

    fn add_session(&self, session: u64, peer: &Facts) {
        let why_not = match peer.local_name.is_empty() {
            _ if !self.listens => Some("this engine uses tcp only".into()),
            true => Some("the peer uses tcp only".into()),
            false => self.host.why_not_local(&host_facts(peer)).map(Into::into),
        };
        let late = "the peer did not open its local link in time".into();
        let link = why_not.map_or_else(|| State::Unsettled(Instant::now() + LOCAL_LINK, late), State::No);
        lock(&self.links.sessions).insert(session, Session { link, pace: Pace::default() });
    }

    fn end_session(&self, session: u64) {
        let ended = lock(&self.links.sessions).remove(&session);
        if let Some(Session { link: State::Up(link), .. }) = ended {
            link.cut();
        }
    }

    fn register(&self, region: RegionId, memory: &RegionMemory, _limit: Duration) -> Result<()> {
        // Asked of the driver once, by who registers; not by threads that others wait for.
        let handle = self.listens.then(|| memory.export(region)).flatten();
        if let Some(Err(why)) = &handle {
            log::info!("{why}");
        }
        let shown = PeerRegions { memory: memory.downgrade(), handle: handle.clone() };
        lock(&self.regions).insert(region, shown);
        let handle = handle.and_then(std::result::Result::ok);
        self.links.all().iter().for_each(|link| link.share(region, memory, handle));
        self.flush();
        Ok(())
    }

    fn withdraw(&self, region: RegionId, _limit: Duration) {
        lock(&self.regions).remove(&region);
        self.links.all().iter().for_each(|link| link.unshare(region));
        self.flush();
    }

    /// What peers write is copied by this process, from theirs.
    fn closed(&self, region: RegionId, memory: &RegionMemory, op: Op) -> Option<Arc<str>> {
        if op == Op::Read { self.not_opened(region, memory) } else { None }
    }

    fn answer(&self, request: &Request<'_>) -> Answer {
        // What is read this side copies itself, into whatever memory.
        if let (Some(Op::Write), Some((region, memory))) = (request.op, request.memory)
            && let Some(why) = self.not_opened(region, memory)
        {
            return Answer::No(why);
        }
        match lock(&self.links.sessions).get(&request.session) {
            Some(Session { link: State::Up(_), pace }) => Answer::Ready(pace.estimate(request.bytes)),
            Some(Session { link: State::Unsettled(..), .. }) => Answer::Opening,
            Some(Session { link: State::No(why), .. }) => Answer::No(why.clone()),
            None => Answer::No("the session with the peer has ended".into()),
        }
    }

    fn wake(&self, queue: Queue) {
        if queue == Queue::Copy {
            self.pool.wake();
        }
    }

    /// Copies look at their flags after each part.
    fn cancel(&self, _session: u64) {}

    /// As it was seen, where this side has copied; else as it is to be expected.
    fn mechanism(&self, of: &Moved<'_>) -> String {
        let link = self.links.get(of.request.session);
        if let Some(seen) = of.copied_from.and_then(|region| link?.mechanism_of(region)) {
            return seen.to_owned();
        }
        let expected = match (of.request.op, of.request.memory) {
            (Some(Op::Write), Some((_, memory))) => match memory.device() {
                Some(device) => device.ipc(),
                None if memory.fd().is_none() => "process_vm_readv",
                None => "memfd",
            },
            _ => "memfd",
        };
        expected.to_owned()
    }

    fn measured(&self, session: u64, bytes: u64, took: Duration) {
        if let Some(session) = lock(&self.links.sessions).get_mut(&session) {
            session.pace.add(bytes, took);
        }
    }

    fn stop(&self) {
        self.populator.stop();
        self.pool.stop();
    }
}

/// What a peer said of its host, as the host's own facts are compared.
fn host_facts(peer: &Facts) -> HostFacts {
    HostFacts {
        boot_id: peer.boot,
        pid_namespace: peer.pid_namespace,
        user_namespace: peer.user_namespace,
        net_namespace: peer.network_namespace,
        uid: peer.uid,
        pid: peer.pid,
    }
}
