//! The tier of objects: batches of blocks in an object store, below memory and the log.
//!
//! ```text
//! store:  copy into the batch (the writer's thread) -> whole -> one PUT (`kvik-object`) -> its end lists its blocks
//! load:   blocks that lie together -> one GET of their range -> compare identity, and the sum of every part
//! room:   the oldest object -> its owner hears that its blocks are gone -> DELETE; so an object of which none is known
//! open:   list the names -> read the end of each object -> every block that no later record removes to the owner
//! ```
//!
//! An object is a closed segment of [`crate::log`], and its records are checked in the same way: what another server,
//! a damaged disk or somebody else has put under its name is a miss. A thread of its own asks the store, and no other
//! one waits for it but those that are given to it ([`Objects::aside`]).
//!
//! Reading order: `batch` (what the bytes mean), `state` (the invariants), `upload`, `load`, `open`; `connect` and
//! `breaker` beside them.

mod batch;
mod breaker;
mod connect;
mod load;
mod open;
mod options;
mod said;
mod state;
mod upload;

pub(crate) use load::{Loaded, Wanted, runs};
pub use options::{Bucket, ObjectOptions};

use crate::log::format::MAX_MEANING;
use crate::tier::{Identity, Place, Tier, TierOwner, Usage};
use crate::unsaid::Removed;
use crate::{BlockKey, Entry, NamespaceId};
use kvik_core::{Code, Error, Result, format_size};
use kvik_host::thread::{ThreadOptions, spawn_named};
use kvik_host::{ForkGuard, HostError, Memory};
use said::Said;
use state::{Shared, Stage, State};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::runtime::{Builder, Handle};

/// Requests of clients that wait for the store at a time; what comes beyond is a miss.
const ASIDE: usize = 32;
/// Threads beside them, for what a file system or a name server is asked.
const HELPERS: usize = 8;
/// Bytes of what namespaces mean that are kept in memory.
const MAX_MEANINGS: usize = 64 << 20;
/// How long tasks have that are under way when all is closed.
const LEFT: Duration = Duration::from_secs(2);

/// Blocks in an object store, found again after a restart.
pub(crate) struct Objects {
    shared: Arc<Shared>,
    handle: Handle,
    thread: Mutex<Option<JoinHandle<()>>>,
    aside: Arc<AtomicUsize>,
    fork: ForkGuard,
}

/// Requests that were made, and the bytes of them.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Traffic {
    pub puts: u64,
    pub gets: u64,
    pub lists: u64,
    pub deletes: u64,
    pub sent: u64,
    pub received: u64,
    /// Whether it is left alone for now.
    pub shut: bool,
    /// Whether all that was there is known.
    pub open: bool,
}

impl Objects {
    /// Begins to open the tier: what it holds is told to `owner` in the background, and what is stored meanwhile waits.
    ///
    /// # Errors
    /// `InvalidArgument` for options that cannot be used; the machine gives no thread. That the store does not answer is
    /// none: it is asked again until it does.
    pub fn open(options: ObjectOptions, owner: Arc<dyn TierOwner>) -> Result<Objects> {
        options.check()?;
        let (store, prefix, name) = connect::connect(&options.bucket)?;
        let host = |error: HostError| Error::new(Code::StorageFailed, error.to_string());
        let fork = ForkGuard::new().map_err(host)?;
        let mut id = [0; 16];
        getrandom::fill(&mut id).map_err(|error| Error::new(Code::StorageFailed, error.to_string()))?;
        let shared = Arc::new(Shared {
            store,
            prefix,
            name,
            owner,
            options,
            state: State::new().into(),
            progress: Default::default(),
            work: Default::default(),
            closing: Default::default(),
            breaker: Default::default(),
            meanings: Default::default(),
            counters: Default::default(),
            id,
        });
        let (tell, told) = channel();
        let on = shared.clone();
        let thread =
            spawn_named("kvik-object", &ThreadOptions::default(), move || serve(&on, &tell)).map_err(host)?;
        let no_thread = || Error::new(Code::InvalidArgument, "the thread of the object store did not start");
        let handle = told.recv().map_err(|_| no_thread())??;
        Ok(Objects { shared, handle, thread: Some(thread).into(), aside: Arc::default(), fork })
    }

    /// Where it is, for texts.
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Whether it is not asked at present, since it did not answer lately.
    pub fn is_shut(&self) -> bool {
        self.shared.breaker.closed_for().is_some()
    }

    /// Whether a block of so many bytes has room in an object.
    pub fn takes(&self, bytes: u64) -> bool {
        bytes <= self.shared.options.batch
    }

    /// The right to wait for the store on a thread of its own; none where too many wait already.
    pub fn permit(&self) -> Option<Permit> {
        let permit = Permit(self.aside.clone());
        (self.aside.fetch_add(1, Ordering::Relaxed) < ASIDE && !self.fork.is_child()).then_some(permit)
    }

    /// Has something done that may wait for the store.
    pub fn aside(&self, permit: Permit, work: impl FnOnce() + Send + 'static) {
        drop(self.handle.spawn_blocking(move || {
            work();
            drop(permit);
        }));
    }

    /// Reads runs of blocks, each by a task of its own; `done` is told what became of each block.
    pub fn fetch<T: Send + Sync + 'static>(
        &self,
        run: Vec<T>,
        wanted: impl Fn(&T) -> &Wanted + Send + 'static,
        done: impl Fn(T, Loaded) + Send + 'static,
    ) {
        let shared = self.shared.clone();
        drop(self.handle.spawn(async move {
            let blocks: Vec<&Wanted> = run.iter().map(wanted).collect();
            let loaded = shared.load_run(&blocks).await;
            run.into_iter().zip(loaded).for_each(|(one, loaded)| done(one, loaded));
        }));
    }

    /// Waits until all that was there is known.
    ///
    /// # Errors
    /// `DeadlineExceeded`.
    pub fn opened(&self, by: Instant) -> Result<()> {
        let mut state = self.shared.state();
        while state.stage != Stage::Open {
            let text = "what it holds is still being listed, so what is removed now may come back";
            state = self.shared.wait(state, by, text)?;
        }
        Ok(())
    }

    /// Requests so far.
    pub fn traffic(&self) -> Traffic {
        let counters = &self.shared.counters;
        let read = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        Traffic {
            puts: read(&counters.puts),
            gets: read(&counters.gets),
            lists: read(&counters.lists),
            deletes: read(&counters.deletes),
            sent: read(&counters.sent),
            received: read(&counters.received),
            shut: self.is_shut(),
            open: self.shared.state().stage == Stage::Open,
        }
    }

    /// Sends what was gathered, for a time, and ends. Nothing is stored afterwards.
    pub fn close(&self) {
        if self.fork.is_child() {
            return;
        }
        self.begin_to_close();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            log::error!("the thread of the object store panicked");
        }
    }

    fn begin_to_close(&self) {
        self.shared.state().closed = true;
        self.shared.closing.notify_one();
        self.shared.work.notify_one();
        self.shared.progress.notify_all();
    }

    /// Changes the batch that is being filled, when there is one.
    fn change<T>(
        &self,
        more: u64,
        within: Duration,
        change: impl Fn(&mut batch::Batch, &mut Said) -> Result<T>,
    ) -> Result<T> {
        if self.fork.is_child() {
            let text =
                "the object store belongs to the parent of this forked process: open another in the child";
            return Err(Error::new(Code::EngineForked, text));
        }
        let by = Instant::now() + within;
        let mut state = self.shared.state();
        loop {
            match self.shared.prepare(&mut state, more) {
                Ok(()) => {
                    let State { batch, said, .. } = &mut *state;
                    if let Some(batch) = batch {
                        return change(batch, said);
                    }
                }
                Err(error) if error.code != Code::DeadlineExceeded => return Err(error),
                // Nothing becomes of waiting for a store that is left alone.
                Err(error) if self.is_shut() => return Err(error),
                Err(_) => state = self.shared.wait(state, by, "what was gathered before is not sent yet")?,
            }
        }
    }

    fn remove_what(&self, what: Removed, within: Duration) -> Result<Place> {
        let place = self.change(0, within, |batch, said| {
            said.removed(batch.number, what);
            Ok(batch.remove(what))
        })?;
        self.shared.work.notify_one();
        Ok(place)
    }
}

impl Drop for Objects {
    fn drop(&mut self) {
        // Who has it last may be a task of its own thread, which cannot wait for itself.
        if !self.fork.is_child() {
            self.begin_to_close();
        }
    }
}

/// See [`Objects::permit`].
pub(crate) struct Permit(Arc<AtomicUsize>);

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn thread_name() -> String {
    "kvik-object-io".into()
}

/// The thread of a tier, until it is closed. Those that it starts are as deaf to signals as it is.
fn serve(shared: &Arc<Shared>, tell: &Sender<Result<Handle>>) {
    let built = Builder::new_current_thread()
        .enable_all()
        .thread_name_fn(thread_name)
        .max_blocking_threads(ASIDE + HELPERS)
        .build();
    let runtime = match built {
        Ok(runtime) => runtime,
        Err(error) => {
            let text = format!("a thread of the object store did not start: {error}");
            drop(tell.send(Err(Error::new(Code::InvalidArgument, text))));
            return;
        }
    };
    drop(tell.send(Ok(runtime.handle().clone())));
    runtime.block_on(async {
        let mut keeping = std::pin::pin!(shared.clone().keep());
        tokio::select! {
            () = &mut keeping => {}
            () = shared.closing.notified() => {
                if tokio::time::timeout(upload::LAST, keeping).await.is_err() {
                    log::warn!("the object store at {} takes too long: what was not sent is lost", shared.name);
                }
            }
        }
    });
    shared.give_up();
    runtime.shutdown_timeout(LEFT);
}

impl Tier for Objects {
    fn declare(&self, namespace: NamespaceId, meaning: &[u8]) -> Result<()> {
        let mut meanings = self.shared.meanings.lock().unwrap_or_else(PoisonError::into_inner);
        if meanings.contains_key(&namespace) {
            return Ok(());
        }
        let bytes: usize = meanings.values().map(|meaning| meaning.len()).sum();
        if meaning.len() >= MAX_MEANING || bytes + meaning.len() > MAX_MEANINGS {
            let text = "what namespaces mean takes more memory than an object store keeps for it: use fewer";
            return Err(Error::new(Code::MemoryCapReached, text));
        }
        meanings.insert(namespace, meaning.into());
        Ok(())
    }

    fn store(&self, entry: &Entry, memory: &Memory, offset: usize, within: Duration) -> Result<Place> {
        let bytes = entry.shape.bytes();
        if !self.takes(bytes) || entry.sums.len() != entry.shape.sums() {
            let text = format!(
                "a block of {} does not fit into an object of {}: take larger objects",
                format_size(bytes),
                format_size(self.shared.options.batch)
            );
            return Err(Error::new(Code::InvalidArgument, text));
        }
        let place = self.change(bytes, within, |batch, said| {
            if !batch.takes(&entry.namespace) {
                return Err(Error::new(Code::StorageFull, "an object has no room for another namespace"));
            }
            let place = batch.add(entry, memory, offset)?;
            said.stored(&Identity::from(entry));
            Ok(place)
        })?;
        state::count(&self.shared.counters.stored, bytes);
        Ok(place)
    }

    fn sync(&self, places: &[Place], within: Duration) -> Result<()> {
        self.shared.stored(places, Instant::now() + within)
    }

    fn load(
        &self,
        place: Place,
        expected: &Identity,
        into: &Memory,
        offset: usize,
    ) -> Result<Option<Box<[u64]>>> {
        let scratch = Memory::shared(expected.shape.bytes() as usize, kvik_host::HugePages::Never);
        let failed = |error: HostError| Error::new(Code::MemoryCapReached, error.to_string());
        let memory = Arc::new(scratch.map_err(failed)?);
        let wanted = Wanted { place, identity: *expected, memory, offset: 0 };
        let loaded = self.handle.block_on(self.shared.load_run(&[&wanted])).pop().unwrap_or(Ok(None))?;
        Memory::copy_between(into, offset, &wanted.memory, 0, wanted.memory.len()).map_err(failed)?;
        Ok(loaded)
    }

    fn remove(&self, key: &BlockKey, within: Duration) -> Result<Place> {
        self.remove_what(Removed::Block(*key), within)
    }

    fn remove_namespace(&self, namespace: &NamespaceId, within: Duration) -> Result<Place> {
        self.shared.meanings.lock().unwrap_or_else(PoisonError::into_inner).remove(namespace);
        self.remove_what(Removed::Namespace(*namespace), within)
    }

    fn never_again(&self) -> Option<Error> {
        self.shared.check_writable(&self.shared.state()).err()
    }

    fn usage(&self) -> Usage {
        let counters = &self.shared.counters;
        let read = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        let (bytes, unsynced, segments) = {
            let state = self.shared.state();
            (state.bytes, state.unsent(), state.objects.len() as u64)
        };
        Usage {
            capacity: self.shared.options.size,
            bytes,
            segments,
            unsynced,
            stored: read(&counters.stored),
            loaded: read(&counters.loaded),
            copied: 0,
            dropped: read(&counters.dropped),
            syncs: read(&counters.puts),
            quarantined: read(&counters.quarantined),
            failures: read(&counters.failures),
        }
    }
}
