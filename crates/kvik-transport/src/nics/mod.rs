//! Chunks that a NIC moves, one-sided. One thread alone touches it, which may have several NICs.
//!
//! - [`NicOptions`]: which NICs, and what speaks to them;
//! - [`NicPool`]: their threads;
//! - `device`: what a thread needs of a NIC; `libfabric`, `verbs` and `plugin` have it;
//! - `thread`: when a thread sleeps, and which of its NICs has its turn;
//! - `worker`: one NIC of it: what it is told (`inbox`), and what it does in a turn;
//! - `posting`: the work requests that it has in flight (`requests`), each session's in its turn (`turns`);
//! - `staged`: those whose pages lie on a device that it does not reach, and go through its `ring`;
//! - `connections`: its connections to `peers`: how they open, mend and close;
//! - `warm_up`: connections that are opened before anything moves over them (`probes`);
//! - `memories`: the memory that it knows; `told`: what all NICs of the engine share.

mod connections;
mod device;
mod in_flight;
mod inbox;
mod libfabric;
mod memories;
mod options;
mod peers;
mod plugin;
mod posting;
mod probes;
mod requests;
mod ring;
mod staged;
mod stats;
mod thread;
mod told;
mod turns;
mod verbs;
mod warm_up;
mod worker;

pub use options::{NicKind, NicOptions};
pub use stats::NicStats;

use crate::basics::lock;
use crate::{RegionMemory, Services, TransportId, from_host};
pub(crate) use inbox::Command;
use inbox::{Fence, Inbox, Reader, Waker};
use kvik_core::{Code, Error, Result};
use kvik_host::thread::{ThreadOptions, spawn_named};
use kvik_proto::{NicAnswer, NicCall, NicKey, Nics};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use thread::NicThread;
use told::{Told, Unreachable};
use worker::{Place, Worker};

/// How long a thread may take to answer before its caller goes on without: far longer than any driver takes to forget
/// memory.
const ANSWER: Duration = Duration::from_secs(1);

/// How long a NIC may take to open: some take seconds.
const OPEN: Duration = Duration::from_secs(60);

/// The NICs of an engine, and their threads.
pub(crate) struct NicPool {
    /// What each NIC is told.
    workers: Vec<Arc<Inbox>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Threads that have opened their NICs wait here for somebody to serve.
    waiting: Mutex<Vec<SyncSender<Arc<Services>>>>,
    pub told: Arc<Told>,
    pub transport: TransportId,
    /// What reports call the mechanism.
    pub mechanism: String,
    /// What each NIC has done.
    pub stats: Vec<Arc<NicStats>>,
}

/// What a NIC's thread said, which may have ended instead, or may be stuck in a driver.
fn answered<T>(
    wait: &Receiver<Result<T>>,
    nic: &NicStats,
    what: &str,
    limit: (Duration, Instant),
) -> Result<T> {
    let (limit, until) = limit;
    wait.recv_timeout(until.saturating_duration_since(Instant::now())).unwrap_or_else(|why| {
        let name = nic.name();
        Err(match why {
            RecvTimeoutError::Disconnected => {
                Error::new(Code::TransportUnavailable, format!("the thread of NIC {name} has ended"))
            }
            RecvTimeoutError::Timeout => Error::new(
                Code::DeadlineExceeded,
                format!(
                    "NIC {name} did not {what} within {limit:?}: its driver is busy or stuck; try again, or leave \
                     this NIC out of `nics`"
                ),
            ),
        })
    })
}

/// Whether this NIC is the device of that name. libfabric calls a NIC `DEVICE-rdm` where the kernel, and who reads what
/// it says, calls it `DEVICE`.
fn is(nic: &str, device: &str) -> bool {
    nic == device || nic.strip_suffix("-rdm") == Some(device)
}

/// The NICs that the options name, or all; no more than peers can be told of.
fn named<N>(options: &NicOptions, mut nics: Vec<(String, N)>) -> Result<Vec<(String, N)>> {
    let names: Vec<&String> = nics.iter().map(|(name, _)| name).collect();
    if let Some(other) = options.devices.iter().find(|device| !names.iter().any(|nic| is(nic, device))) {
        let text = format!("nics={options} names {other:?}, and the NICs here are {names:?}");
        return Err(Error::new(Code::TransportUnavailable, text));
    }
    let wanted = |nic: &str| options.devices.iter().any(|device| is(nic, device));
    nics.retain(|(name, _)| options.devices.is_empty() || wanted(name));
    nics.truncate(kvik_proto::MAX_NICS);
    Ok(nics)
}

impl Drop for NicPool {
    fn drop(&mut self) {
        self.stop();
    }
}

impl NicPool {
    /// Opens the NICs, in so many threads, or in one for each where there are fewer of them.
    ///
    /// # Errors
    /// `TransportUnavailable`: no library, no such NIC, or one that cannot be opened.
    pub fn start(options: &NicOptions, count: usize, threads: &ThreadOptions) -> Result<NicPool> {
        let mut pool = NicPool {
            workers: Vec::new(),
            threads: Mutex::default(),
            waiting: Mutex::default(),
            told: Arc::default(),
            transport: options.kind.transport(),
            mechanism: options.kind.mechanism().unwrap_or_default(),
            stats: Vec::new(),
        };
        let depth = options.depth;
        let addresses = match &options.kind {
            NicKind::Libfabric(provider) => {
                let nics = libfabric::nics(options, provider)?;
                let named = nics.into_iter().map(|nic| (nic.name(), nic));
                pool.open(options, (count, threads), named.collect(), move |nic| {
                    libfabric::FabricRmaDevice::open(&nic, depth)
                })
            }
            NicKind::Verbs => {
                let nics = verbs::nics(options)?;
                pool.open(options, (count, threads), nics, move |nic| verbs::VerbsRmaDevice::open(nic, depth))
            }
            NicKind::Plugin => {
                let plugin = plugin::load(options)?;
                let nics = plugin::nics(&plugin)?;
                pool.mechanism = plugin.name().to_owned();
                pool.open(options, (count, threads), nics, move |number| {
                    plugin::PluginRmaDevice::open(&plugin, number, depth)
                })
            }
        }?;
        // What peers must have too to be reached.
        let provider = format!("{}:{}", options.kind.transport(), pool.mechanism);
        let nics = Nics { provider, addresses };
        if !nics.fit() {
            let text = "the NICs have longer addresses than a greeting has room for: name fewer of them";
            return Err(Error::new(Code::TransportUnavailable, text));
        }
        pool.told.set(nics);
        Ok(pool)
    }

    /// Opens these NICs, or those that the options name, in as many threads as are wanted: their addresses.
    fn open<N: Send + 'static, C: device::RmaDevice>(
        &mut self,
        options: &NicOptions,
        (count, threads): (usize, &ThreadOptions),
        nics: Vec<(String, N)>,
        open: impl Fn(N) -> Result<C> + Clone + Send + 'static,
    ) -> Result<Vec<Vec<u8>>> {
        let nics = named(options, nics)?;
        let unreachable = Unreachable::new(nics.len());
        let (all, count) = (nics.len(), count.clamp(1, nics.len().max(1)));
        let (mut nics, mut opening) = (nics.into_iter().enumerate(), Vec::new());
        for thread in 0..count {
            // Neighbours share a thread, and none has more than one more than another.
            let of_this = (thread + 1) * all / count - thread * all / count;
            let (waker, mut own) = (Waker::new()?, Vec::new());
            for (number, (name, nic)) in nics.by_ref().take(of_this) {
                let (inbox, stats) = (Inbox::new(&waker, own.len()), Arc::new(NicStats::new(name)));
                let (tell, opened) = sync_channel(1);
                self.workers.push(inbox.clone());
                self.stats.push(stats.clone());
                opening.push(opened);
                let (unreachable, told) = (unreachable.clone(), self.told.clone());
                own.push((nic, Place { number, inbox: Reader(inbox), unreachable, stats, told }, tell));
            }
            let ((serve, begin), open) = (sync_channel::<Arc<Services>>(1), open.clone());
            let thread = spawn_named(&format!("kvik-nic-{thread}"), threads, move || {
                let mut ready = Vec::new();
                for (nic, place, tell) in own {
                    match open(nic).and_then(|device| Worker::open(device, place)) {
                        Ok((address, serve)) => {
                            ready.push(serve);
                            let _ = tell.send(Ok(address));
                        }
                        // The engine does not start then.
                        Err(error) => return drop(tell.send(Err(error))),
                    }
                }
                // Nobody is there when the pool ends before.
                if let Ok(services) = begin.recv() {
                    let nics = ready.into_iter().map(|serve| serve(services.clone()));
                    NicThread::new(waker, nics).run();
                }
            });
            lock(&self.threads).push(thread.map_err(|error| from_host(Code::InvalidArgument, error))?);
            lock(&self.waiting).push(serve);
        }
        // Threads open side by side, and each its NICs one after the other.
        let opened: Result<Vec<_>> = (opening.iter().zip(&self.stats))
            .map(|(opened, nic)| answered(opened, nic, "open", (OPEN, Instant::now() + OPEN)))
            .collect();
        if opened.as_ref().is_err_and(|error| error.code == Code::DeadlineExceeded) {
            // Whoever waited for a stuck one would be stuck with it. It ends when it comes back.
            lock(&self.threads).clear();
        }
        opened
    }

    /// Begins to serve work requests, and to do what it is told.
    pub fn serve(&self, services: &Arc<Services>) {
        for thread in lock(&self.waiting).drain(..) {
            // One that has ended has said why.
            let _ = thread.send(services.clone());
        }
    }

    /// Tells every NIC.
    pub fn tell(&self, command: impl Fn() -> Command) {
        self.workers.iter().for_each(|worker| worker.put(command()));
    }

    /// Tells every NIC, and where each will answer.
    fn ask<T>(&self, command: impl Fn(SyncSender<T>) -> Command) -> Vec<Receiver<T>> {
        let ask = |worker: &Arc<Inbox>| {
            let (answer, wait) = sync_channel(1);
            worker.put(command(answer));
            wait
        };
        self.workers.iter().map(ask).collect()
    }

    /// Makes memory known to every NIC, within `limit`.
    ///
    /// # Errors
    /// A NIC refused, or `DeadlineExceeded` where one did not answer; none knows the memory then, or only until it
    /// comes back to hear so.
    pub fn register(&self, memory: &RegionMemory, limit: Duration) -> Result<Arc<[NicKey]>> {
        let limit = (limit, Instant::now() + limit);
        let answers = self.ask(|answer| Command::Register(memory.clone(), answer));
        let keys: Result<Vec<_>> = (answers.iter().zip(&self.stats))
            .map(|(wait, nic)| answered(wait, nic, "take in the memory", limit))
            .collect();
        if keys.is_err() {
            self.unregister(memory.name(), ANSWER);
        }
        keys.map(Into::into)
    }

    /// Has every NIC move memory of a device through a ring, which none of them can know.
    ///
    /// # Errors
    /// One has no ring for it, or did not answer; none moves it then.
    pub fn stage(&self, memory: &RegionMemory, limit: Duration) -> Result<()> {
        let limit = (limit, Instant::now() + limit);
        let answers = self.ask(|answer| Command::Stage(memory.clone(), answer));
        let made: Result<Vec<()>> = (answers.iter().zip(&self.stats))
            .map(|(wait, nic)| answered(wait, nic, "make a page-locked ring", limit))
            .collect();
        made.map(drop).inspect_err(|_| self.unregister(memory.name(), ANSWER))
    }

    /// The same of memory that was withdrawn and is still held: each has a ring for it.
    pub fn stage_again(&self, memory: &RegionMemory) {
        drop(self.ask(|answer| Command::Stage(memory.clone(), answer)));
    }

    /// Takes memory of this name from every NIC, as soon as nobody else holds it. They have up to `limit` to answer.
    pub fn unregister(&self, name: usize, limit: Duration) {
        // Threads answer at once, unless one is stuck: then it lets go later.
        let until = Instant::now() + limit;
        for wait in self.ask(|answer| Command::Unregister(name, answer)) {
            let _ = wait.recv_timeout(until.saturating_duration_since(Instant::now()));
        }
    }

    /// A NIC of a peer wants a connection to one of these.
    pub fn called(&self, session: u64, call: NicCall) -> Option<NicAnswer> {
        match self.workers.get(usize::from(call.to)) {
            Some(worker) => {
                worker.put(Command::Called(session, call));
                None
            }
            None => {
                let text = format!(
                    "this engine has {} NICs, and number {} was asked for",
                    self.workers.len(),
                    call.to
                );
                let outcome = Err(Error::new(Code::TransportUnavailable, text));
                Some(NicAnswer { from: call.from, to: call.to, kind: call.kind, moved: false, outcome })
            }
        }
    }

    /// A peer has answered one of these.
    pub fn answered(&self, session: u64, answer: NicAnswer) {
        if let Some(worker) = self.workers.get(usize::from(answer.from)) {
            worker.put(Command::Answered(session, answer));
        }
    }

    /// Cuts the path of a session's peer, and tells when no NIC can touch memory for it any more.
    pub fn fence(&self, session: u64) {
        let fence = Fence::new(session, self.workers.len());
        self.tell(|| Command::Fence(fence.clone()));
    }

    /// Closes the NICs and ends the threads.
    pub fn stop(&self) {
        lock(&self.waiting).clear();
        self.tell(|| Command::Stop);
        for thread in lock(&self.threads).drain(..) {
            if thread.join().is_err() {
                log::error!("a thread of NICs panicked; its transfers end by their deadlines");
            }
        }
    }
}
