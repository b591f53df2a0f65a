//! Chunks that a NIC moves, by libfabric: one thread a NIC, which alone touches its endpoints.
//!
//! A thread has two endpoints. With one it posts its own operations; the other is what peers reach. So an operation
//! that never ends costs the first one alone: it is closed, which stops whatever was posted, and what other transfers
//! had under way on it is posted again on a new one, unseen by anybody. The address that peers know stays.

mod active;
mod worker;

use crate::local::lock;
use crate::{Desk, Held, from_host};
use kvik_core::{Code, Error, Result};
use kvik_host::event::EventFd;
use kvik_host::fabric::{Fabric, Nic};
use kvik_host::thread::{ThreadOptions, spawn_named};
use kvik_proto::{NicKey, Nics};
use std::collections::HashSet;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Which NICs an engine uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FabricOptions {
    /// libfabric's provider: `efa`, `verbs`, `tcp`, `shm`, ...
    pub provider: String,
    /// The library's file, where the usual places are not meant.
    pub library: Option<PathBuf>,
    /// The address of the interface, for providers that have addresses of the internet.
    pub source: Option<IpAddr>,
    /// Operations under way on a NIC, beside the provider's own bound.
    pub depth: usize,
}

/// How long a thread may take to answer before its caller goes on without.
const ANSWER: Duration = Duration::from_millis(100);

/// Operations under way on a NIC: more than one link needs, and less than the completion queues of any provider hold.
const DEPTH: usize = 256;

impl FabricOptions {
    /// All NICs of a provider, of the library that is found.
    pub fn of(provider: impl Into<String>) -> FabricOptions {
        FabricOptions { provider: provider.into(), library: None, source: None, depth: DEPTH }
    }
}

/// The threads of an engine's NICs.
pub struct FabricPool {
    lanes: Vec<Arc<Inbox>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    nics: Mutex<Nics>,
}

/// What a thread is told.
pub(crate) enum Command {
    /// Orders come from here.
    Serve(Arc<dyn Desk>),
    /// The session may have something to post.
    Post(u64),
    /// A transfer must stop: look at the orders in hand.
    Halt,
    /// Peers may reach this engine's memory: they need the thread's help.
    Expose,
    /// The session's peer has other addresses now.
    Find(u64),
    /// The session is over.
    Forget(u64),
    /// The session is over, and its peer may still reach memory here.
    Fence(Arc<Fence>),
    /// The NIC must know this memory.
    Register(Held, SyncSender<Result<NicKey>>),
    /// It need not know it any more.
    Unregister(usize, SyncSender<()>),
    /// It must know it again, as before.
    Keep(usize),
    /// End.
    Stop,
}

/// Threads that have not yet cut the path of a session's peer.
pub(crate) struct Fence {
    session: u64,
    left: AtomicUsize,
}

impl Fence {
    /// This thread has: true for the last one.
    fn is_done(&self) -> bool {
        self.left.fetch_sub(1, Ordering::AcqRel) == 1
    }
}

/// What waits for a thread.
pub(crate) struct Inbox {
    waiting: Mutex<Waiting>,
    bell: EventFd,
}

#[derive(Default)]
struct Waiting {
    commands: Vec<Command>,
    /// Sessions that have a `Post` among the commands already, and whether `Halt` and `Expose` are there.
    posts: HashSet<u64>,
    told: [bool; 2],
}

impl Inbox {
    fn put(&self, command: Command) {
        let mut waiting = lock(&self.waiting);
        let news = match &command {
            Command::Post(session) => waiting.posts.insert(*session),
            Command::Halt => !std::mem::replace(&mut waiting.told[0], true),
            Command::Expose => !std::mem::replace(&mut waiting.told[1], true),
            _ => true,
        };
        let first = waiting.commands.is_empty();
        if news {
            waiting.commands.push(command);
        }
        drop(waiting);
        if first && let Err(error) = self.bell.signal() {
            log::error!("a NIC's thread cannot be woken: {error}");
        }
    }

    fn take(&self, into: &mut Vec<Command>) {
        let mut waiting = lock(&self.waiting);
        waiting.posts.clear();
        waiting.told = [false; 2];
        std::mem::swap(&mut waiting.commands, into);
    }
}

/// What stands for memory: somebody holds it meanwhile, so no other has its address.
fn name_of(memory: &Held) -> usize {
    Arc::as_ptr(memory) as usize
}

/// The NICs of a provider, one for each device.
fn nics(options: &FabricOptions) -> Result<Vec<Arc<Nic>>> {
    let no = |text: String| Error::new(Code::TransportUnavailable, text);
    let fabric = Fabric::load(options.library.as_deref()).map_err(|error| no(error.to_string()))?;
    let provider = &options.provider;
    // Its writes into another process go on after its own endpoint was closed, and closing one with operations under
    // way ends the process (seen with libfabric 1.17): nothing that was promised for an end would hold.
    if provider == "shm" {
        let text = "libfabric's provider \"shm\" cannot be stopped in the middle of a transfer: use transport \"local\"";
        return Err(no(text.into()));
    }
    let source = options.source.map(|address| address.to_string());
    let found = fabric.nics(provider, source.as_deref());
    let (path, (major, minor)) = (fabric.path().display(), fabric.version());
    let found = found.map_err(|error| no(format!("{error} ({path}, version {major}.{minor})")))?;
    let mut devices = HashSet::new();
    let nics: Vec<_> = found.into_iter().filter(|nic| devices.insert(nic.name())).map(Arc::new).collect();
    if nics.is_empty() {
        return Err(no(format!(
            "libfabric {major}.{minor} ({path}) has no NIC of provider {provider:?} for one-sided transfers here; \
             `fi_info -p {provider}` shows what it sees, and nothing else is taken in its place"
        )));
    }
    log::info!("libfabric {major}.{minor} ({path}): {} NIC(s) of {:?}", nics.len(), nics[0].provider());
    Ok(nics)
}

impl Drop for FabricPool {
    fn drop(&mut self) {
        self.stop();
    }
}

impl FabricPool {
    /// Opens the NICs, each in a thread of its own.
    ///
    /// # Errors
    /// `TransportUnavailable`: no library, no such provider, or a NIC that cannot be opened.
    pub fn start(options: &FabricOptions, threads: &ThreadOptions) -> Result<FabricPool> {
        let mut addresses = Vec::new();
        let mut pool = FabricPool { lanes: Vec::new(), threads: Mutex::default(), nics: Mutex::default() };
        let nics = nics(options)?;
        let count = nics.len().min(kvik_proto::MAX_NICS);
        for (number, nic) in nics.into_iter().take(count).enumerate() {
            let bell = EventFd::new().map_err(|error| from_host(Code::InvalidArgument, error))?;
            let inbox = Arc::new(Inbox { waiting: Mutex::default(), bell });
            let (opened, tell) = sync_channel(1);
            let (theirs, depth) = (inbox.clone(), options.depth);
            let thread = spawn_named(&format!("kvik-nic-{number}"), threads, move || {
                match worker::Worker::open(&nic, (number, count), theirs, depth) {
                    Ok((mut worker, address)) => {
                        let _ = opened.send(Ok(address));
                        worker.run();
                    }
                    Err(error) => drop(opened.send(Err(error))),
                }
            });
            lock(&pool.threads).push(thread.map_err(|error| from_host(Code::InvalidArgument, error))?);
            pool.lanes.push(inbox);
            let gone =
                || Error::new(Code::TransportUnavailable, "a NIC's thread ended while it opened the NIC");
            addresses.push(tell.recv().map_err(|_| gone())??);
        }
        let nics = Nics { provider: options.provider.clone(), addresses };
        if !nics.fit() {
            let text = "the NICs have longer addresses than a greeting has room for: use fewer of them";
            return Err(Error::new(Code::TransportUnavailable, text));
        }
        *lock(&pool.nics) = nics;
        Ok(pool)
    }

    /// Begins to serve orders.
    pub fn serve(&self, desk: &Arc<dyn Desk>) {
        self.lanes.iter().for_each(|lane| lane.put(Command::Serve(desk.clone())));
    }

    /// What peers are told.
    pub fn nics(&self) -> Nics {
        lock(&self.nics).clone()
    }

    /// A NIC is reached at another address from now on: what peers are told.
    pub fn moved(&self, number: usize, address: Vec<u8>) -> Nics {
        let mut nics = lock(&self.nics);
        if let Some(known) = nics.addresses.get_mut(number) {
            *known = address;
        }
        nics.clone()
    }

    /// The NICs of a session's peer have other addresses.
    pub fn find_again(&self, session: u64) {
        self.lanes.iter().for_each(|lane| lane.put(Command::Find(session)));
    }

    /// Makes memory known to every NIC.
    ///
    /// # Errors
    /// A NIC refused; none knows the memory then.
    pub fn register(&self, memory: &Held) -> Result<Arc<[NicKey]>> {
        let answers: Vec<_> = self
            .lanes
            .iter()
            .map(|lane| {
                let (answer, wait) = sync_channel(1);
                lane.put(Command::Register(memory.clone(), answer));
                wait
            })
            .collect();
        let gone = || Error::new(Code::TransportUnavailable, "a NIC's thread has ended");
        let keys = answers.into_iter().map(|wait| wait.recv().unwrap_or_else(|_| Err(gone())));
        let keys: Result<Vec<_>> = keys.collect();
        if keys.is_err() {
            self.unregister(memory.clone());
        }
        keys.map(Into::into)
    }

    /// Takes memory from every NIC, as soon as nobody else holds it.
    pub fn unregister(&self, memory: Held) {
        let name = name_of(&memory);
        drop(memory);
        let answers: Vec<_> = self
            .lanes
            .iter()
            .map(|lane| {
                let (answer, wait) = sync_channel(1);
                lane.put(Command::Unregister(name, answer));
                wait
            })
            .collect();
        // Threads answer at once, unless one is stuck: then it lets go later.
        let until = Instant::now() + ANSWER;
        for wait in answers {
            let _ = wait.recv_timeout(until.saturating_duration_since(Instant::now()));
        }
    }

    /// Memory that was to be taken from the NICs stays known to them.
    pub fn keep(&self, memory: &Held) {
        self.lanes.iter().for_each(|lane| lane.put(Command::Keep(name_of(memory))));
    }

    /// The session may have something to post.
    pub fn wake(&self, session: u64) {
        self.lanes.iter().for_each(|lane| lane.put(Command::Post(session)));
    }

    /// Orders that must stop are left, soon.
    pub fn halt(&self) {
        self.lanes.iter().for_each(|lane| lane.put(Command::Halt));
    }

    /// Peers may reach this engine's memory now.
    pub fn expose(&self) {
        self.lanes.iter().for_each(|lane| lane.put(Command::Expose));
    }

    /// The session is over.
    pub fn forget(&self, session: u64) {
        self.lanes.iter().for_each(|lane| lane.put(Command::Forget(session)));
    }

    /// Cuts the path of a session's peer, and tells the desk when no NIC can touch memory for it any more.
    pub fn fence(&self, session: u64) {
        let fence = Arc::new(Fence { session, left: AtomicUsize::new(self.lanes.len()) });
        self.lanes.iter().for_each(|lane| lane.put(Command::Fence(fence.clone())));
    }

    /// Closes the NICs and ends the threads.
    pub fn stop(&self) {
        self.lanes.iter().for_each(|lane| lane.put(Command::Stop));
        for thread in lock(&self.threads).drain(..) {
            if thread.join().is_err() {
                log::error!("a NIC's thread panicked; its transfers end by their deadlines");
            }
        }
    }
}
