//! The tiers below memory: what the log tells of blocks, and what it is told to forget. `write` is the way down, `bring`
//! the way back; `far` is what is different of the object store.
//!
//! Invariant: no lock of the store is held while the tier is called.

mod early;

use crate::crew::{Crew, Work};
use crate::figures::Where;
use crate::object::{ObjectOptions, Objects};
use crate::pulse::Pulse;
use crate::state::State;
use crate::store::Store;
use crate::sync::lock;
use crate::tenants::Known;
use crate::tier::{Found, Identity, Place, TierOwner};
use crate::write::Soon;
use crate::{Log, NamespaceId, Shape};
use early::Early;
use kvik_core::{Code, Error, Result};
use kvik_host::thread::{ThreadOptions, spawn_named};
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Threads that write. Past the page cache one request at a time leaves a disk idle while the next block is summed and on
/// its way: measured (`examples/log_io.rs`), four write as fast as any number.
const WRITERS: usize = 4;
/// Threads that read: past the page cache four keep a disk as busy as any number.
const READERS: usize = 4;
/// How long a removal waits for the tier: less than a client waits for the answer, who would take the store for gone.
pub(crate) const REMOVAL: Duration = Duration::from_secs(4);

/// The log below the memory of a store.
pub(crate) struct Below {
    pub log: Log,
    pub soon: Arc<Soon>,
    pub writers: Crew<Store>,
    pub readers: Crew<Store>,
    pub pulse: Pulse,
}

impl Below {
    pub fn new(log: Log) -> Below {
        Below {
            log,
            soon: Arc::new(Soon::to(Where::Log)),
            writers: Crew::new(),
            readers: Crew::new(),
            pulse: Pulse::default(),
        }
    }

    /// What waits is still written; then the threads end.
    fn close(&self) {
        self.soon.close();
        self.writers.close();
        self.readers.close();
    }
}

/// All that is known of blocks, as the tier's owner has it.
pub(crate) struct Blocks {
    pub state: Mutex<State>,
    /// A block was published, or given up.
    pub changed: Condvar,
    early: Early,
}

impl Blocks {
    pub fn new(state: State) -> Blocks {
        Blocks { state: Mutex::new(state), changed: Condvar::new(), early: Early::default() }
    }

    /// Blocks that are known.
    pub fn count(&self) -> usize {
        lock(&self.state).index.len()
    }

    /// A tier below has blocks of a namespace, and says what it is.
    pub fn found_namespace(&self, id: NamespaceId, meaning: &[u8]) {
        match Meaning::decode(meaning) {
            Some(Meaning { tenant, model, shape }) => {
                let opened = lock(&self.state).tenants.open(id, &tenant, shape, &model);
                if let Err(error) = opened {
                    log::warn!("blocks of namespace {id} that were found are left alone: {error}");
                }
            }
            None => {
                log::warn!("nothing says what namespace {id} is: blocks of it that were found are left alone")
            }
        }
    }

    /// All was told: what comes after a block that was not found is nobody's. How many that are.
    pub fn found_all(&self) -> usize {
        self.early.left().count()
    }
}

impl TierOwner for Blocks {
    fn found(&self, found: Found<'_>) {
        match found {
            Found::Namespace(id, meaning) => self.found_namespace(id, meaning),
            Found::Block(identity, place) => self.early.enter(&self.state, (identity, Where::Log, place)),
            Found::Removed(key) => {
                self.early.forget(&key);
                lock(&self.state).forget_key(&key);
            }
            Found::NamespaceRemoved(id) => {
                self.early.forget_namespace(&id);
                let mut state = lock(&self.state);
                if let Some(number) = state.tenants.find(&id) {
                    state.forget_all(|namespace| namespace == number);
                    // It may have gone for one that is told of next.
                    let State { tenants, index, .. } = &mut *state;
                    tenants.forget(&[id], |namespace| index.taken_for(namespace) == 0);
                }
            }
        }
    }

    fn keep(&self, identity: &Identity, place: Place) -> bool {
        lock(&self.state).is_wanted_at(identity, place)
    }

    fn moved(&self, identity: &Identity, from: Place, to: Place) {
        let mut state = lock(&self.state);
        if let Some(id) = state.at(identity, Where::Log, from) {
            state.set_place(id, Where::Log, to);
        }
    }

    fn knows(&self, identity: &Identity, place: Place) -> bool {
        lock(&self.state).at(identity, Where::Log, place).is_some()
    }

    fn dropped(&self, identity: &Identity, place: Place) {
        self.early.lose(&identity.key, Where::Log, place);
        let mut state = lock(&self.state);
        if let Some(id) = state.at(identity, Where::Log, place) {
            state.lose_place(id, Where::Log);
        }
    }

    fn gone(&self, from: Place, to: Place) {
        self.early.lose_places(Where::Log, from..to);
        let mut first = 0;
        while let Some(next) = lock(&self.state).lose_places(Where::Log, first, from..to) {
            first = next;
        }
    }
}

/// How long what was gathered may take to be sent when all ends, and what waits to be gathered.
const LAST: Duration = Duration::from_secs(30);

/// The object store of a store.
pub(crate) struct Far {
    pub objects: Objects,
    pub soon: Arc<Soon>,
    pub writers: Crew<Store>,
    /// Bytes of blocks on their way from there. They have places in memory, so a quarter of it bounds them: a store that is
    /// slow must not drive out what is in memory.
    pub coming: Arc<AtomicU64>,
    ended: (Mutex<bool>, Condvar),
}

impl Far {
    pub fn open(options: ObjectOptions, blocks: &Arc<Blocks>) -> Result<Far> {
        let objects = Objects::open(options, Arc::new(FarOwner { blocks: blocks.clone() }))?;
        Ok(Far {
            objects,
            soon: Arc::new(Soon::to(Where::Object)),
            writers: Crew::new(),
            coming: Arc::default(),
            ended: Default::default(),
        })
    }

    /// What waits is still gathered, and sent for a time.
    pub fn close(&self) {
        self.soon.close();
        self.writers.close();
    }

    /// Gathers and sends until it is closed.
    fn serve(&self, store: &Store) {
        self.writers.serve(store);
        self.objects.close();
        *lock(&self.ended.0) = true;
        self.ended.1.notify_all();
    }

    /// As [`Far::close`], and waits until that is done.
    pub fn end(&self) {
        self.close();
        let ended = self.ended.1.wait_timeout_while(lock(&self.ended.0), LAST, |ended| !*ended);
        if !*ended.unwrap_or_else(PoisonError::into_inner).0 {
            log::warn!("the object store at {} takes too long to end", self.objects.name());
        }
    }
}

/// All blocks, as the object store's owner has them.
struct FarOwner {
    blocks: Arc<Blocks>,
}

impl TierOwner for FarOwner {
    fn found(&self, found: Found<'_>) {
        match found {
            Found::Namespace(id, meaning) => self.blocks.found_namespace(id, meaning),
            Found::Block(identity, place) => {
                self.blocks.early.enter(&self.blocks.state, (identity, Where::Object, place));
            }
            // What was removed is not told of: what is stored meanwhile is not touched by it.
            Found::Removed(_) | Found::NamespaceRemoved(_) => {}
        }
    }

    fn keep(&self, identity: &Identity, place: Place) -> bool {
        lock(&self.blocks.state).at(identity, Where::Object, place).is_some()
    }

    fn moved(&self, identity: &Identity, from: Place, to: Place) {
        let mut state = lock(&self.blocks.state);
        if let Some(id) = state.at(identity, Where::Object, from) {
            state.set_place(id, Where::Object, to);
        }
    }

    fn dropped(&self, identity: &Identity, place: Place) {
        let mut state = lock(&self.blocks.state);
        if let Some(id) = state.at(identity, Where::Object, place) {
            state.lose_place(id, Where::Object);
        }
    }

    // What an object holds is told by its end, or found missing block by block.
    fn gone(&self, _from: Place, _to: Place) {}

    fn freed(&self) -> Vec<Place> {
        let mut freed = std::mem::take(&mut lock(&self.blocks.state).freed);
        // It is first asked when all was told.
        let left = self.blocks.early.left().filter(|(tier, _)| *tier == Where::Object);
        freed.extend(left.map(|(_, place)| place));
        freed
    }
}

/// What a namespace is, as the log keeps it.
pub(crate) struct Meaning {
    tenant: String,
    model: String,
    shape: Shape,
}

impl Meaning {
    /// Two texts with their lengths, and three numbers.
    pub fn encode(known: &Known, tenant: &str) -> Vec<u8> {
        let mut bytes = vec![1];
        for text in [tenant, &known.model] {
            bytes.extend_from_slice(&(text.len() as u32).to_le_bytes());
            bytes.extend_from_slice(text.as_bytes());
        }
        bytes.extend_from_slice(&known.shape.layers().to_le_bytes());
        bytes.extend_from_slice(&known.shape.slices().to_le_bytes());
        bytes.extend_from_slice(&known.shape.run_bytes().to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Meaning> {
        let mut rest = bytes.strip_prefix(&[1])?;
        let mut text = || {
            let (len, after) = rest.split_first_chunk::<4>()?;
            let (text, after) = after.split_at_checked(u32::from_le_bytes(*len) as usize)?;
            rest = after;
            String::from_utf8(text.to_vec()).ok()
        };
        let (tenant, model) = (text()?, text()?);
        let (layers, rest) = rest.split_first_chunk::<4>()?;
        let (slices, rest) = rest.split_first_chunk::<4>()?;
        let run_bytes = <[u8; 8]>::try_from(rest).ok()?;
        let (layers, slices) = (u32::from_le_bytes(*layers), u32::from_le_bytes(*slices));
        let shape = Shape::new(layers, slices, u64::from_le_bytes(run_bytes)).ok()?;
        Some(Meaning { tenant, model, shape })
    }
}

impl Store {
    /// Starts the threads that move blocks between memory and the tier below, if there is one.
    ///
    /// # Errors
    /// The machine gives no thread.
    pub fn start_below(&self, threads: &mut Vec<JoinHandle<()>>) -> Result<()> {
        if self.far().is_some() {
            let store = self.clone();
            let work = move || store.far().iter().for_each(|far| far.serve(&store));
            let writer = spawn_named("kvik-store-o", &ThreadOptions::default(), work);
            threads.push(writer.map_err(crate::no_thread)?);
        }
        if self.below().is_none() {
            return Ok(());
        }
        let options = ThreadOptions::default();
        for number in 0..WRITERS {
            let store = self.clone();
            let work = move || store.below().iter().for_each(|below| below.writers.serve(&store));
            let writer = spawn_named(&format!("kvik-store-w-{number}"), &options, work);
            threads.push(writer.map_err(crate::no_thread)?);
        }
        for number in 0..READERS {
            let store = self.clone();
            let work = move || store.below().iter().for_each(|below| below.readers.serve(&store));
            let reader = spawn_named(&format!("kvik-store-r-{number}"), &options, work);
            threads.push(reader.map_err(crate::no_thread)?);
        }
        Ok(())
    }

    /// Has what waits written, and ends the threads of [`Store::start_below`].
    pub fn end_below(&self) {
        self.below().iter().for_each(|below| below.close());
        self.far().iter().for_each(|far| far.close());
    }

    /// Has one of the threads that write say something in the log, and waits for it. Where none has begun by then, it is
    /// dropped.
    ///
    /// # Errors
    /// Its own, `DeadlineExceeded`.
    pub fn have_said(
        &self,
        by: Instant,
        say: impl FnOnce(&Store) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let Some(below) = self.below() else { return Ok(()) };
        let (tell, told) = channel();
        // Who asked may wait no longer.
        let all = move |store: &Store| drop(tell.send(say(store)));
        let saying = Arc::new(Saying(Mutex::new(Some(Box::new(all)))));
        below.writers.offer(saying.clone());
        told.recv_timeout(by.saturating_duration_since(Instant::now())).unwrap_or_else(|_| {
            // Whoever asks next has it said.
            drop(lock(&saying.0).take());
            Err(Error::new(Code::DeadlineExceeded, "it was not said in time"))
        })
    }

    /// Has one of the threads that write to a tier do something, for which nobody waits.
    pub fn have_done(&self, to: Where, work: impl FnOnce(&Store) + Send + 'static) {
        let (log, far) = (self.below().map(|below| &below.writers), self.far().map(|far| &far.writers));
        let saying = Arc::new(Saying(Mutex::new(Some(Box::new(work)))));
        if let Some(writers) = if to == Where::Object { far } else { log } {
            writers.offer(saying);
        }
    }
}

/// Something to write that is no block, once.
struct Saying(Mutex<Option<Say>>);

type Say = Box<dyn FnOnce(&Store) + Send>;

impl Work<Store> for Saying {
    fn step(&self, store: &Store) {
        let say = lock(&self.0).take();
        say.into_iter().for_each(|say| say(store));
    }

    fn has_more(&self) -> bool {
        lock(&self.0).is_some()
    }
}
