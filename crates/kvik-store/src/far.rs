//! The object store below memory and the log: how blocks go there, and how they come back.
//!
//! Invariants:
//! - What comes back is published only after the tier has compared all of it.
//! - Nobody waits for an object store but who asks for what only it has, and by a thread that serves nobody else.
//! - A read that ends in whatever way, its task's end included, is entered: no block is on its way for ever.

use crate::below::{Blocks, Early, lock};
use crate::bring::most;
use crate::crew::Crew;
use crate::figures::Where;
use crate::index::{Id, Life};
use crate::object::{Loaded, ObjectOptions, Objects, Wanted, runs};
use crate::state::{Filling, Gone, State};
use crate::store::Store;
use crate::tier::{Found, Identity, Place, Tier, TierOwner};
use crate::write::Soon;
use crate::{BlockKey, NamespaceId};
use kvik_core::{Code, Error, Result};
use kvik_host::thread::{ThreadOptions, spawn_named};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long what was gathered may take to be sent when all ends, and what waits to be gathered.
const LAST: Duration = Duration::from_secs(30);

/// The object store of a store.
pub(crate) struct Far {
    pub objects: Objects,
    soon: Arc<Soon>,
    writers: Crew<Store>,
    /// Bytes of blocks on their way from there. They have places in memory, so a quarter of it bounds them: a store that is
    /// slow must not drive out what is in memory.
    coming: Arc<AtomicU64>,
    ended: (Mutex<bool>, Condvar),
}

impl Far {
    pub fn open(options: ObjectOptions, blocks: &Arc<Blocks>) -> Result<Far> {
        let owner = Owner { blocks: blocks.clone(), early: Early::of(Where::Object) };
        let objects = Objects::open(options, Arc::new(owner))?;
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
struct Owner {
    blocks: Arc<Blocks>,
    early: Early,
}

impl TierOwner for Owner {
    fn found(&self, found: Found<'_>) {
        match found {
            Found::Namespace(id, meaning) => self.blocks.found_namespace(id, meaning),
            Found::Block(identity, place) => self.early.enter(&self.blocks.state, &identity, place),
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

    fn freed(&self) -> Vec<Place> {
        let mut freed = std::mem::take(&mut lock(&self.blocks.state).freed);
        freed.extend(self.early.left());
        freed
    }
}

/// A block on its way from the object store. Dropped before it is there, it is where it was.
struct Coming {
    store: Store,
    filling: Option<Filling>,
    wanted: Wanted,
    /// What is on its way, with this one.
    all: Arc<AtomicU64>,
}

impl Coming {
    fn ended(mut self, loaded: Loaded) {
        self.enter(loaded);
    }

    fn enter(&mut self, loaded: Loaded) {
        let Wanted { place, identity, .. } = &self.wanted;
        if let Some(filling) = self.filling.take() {
            self.store.note_loaded(filling, Where::Object, *place, identity, loaded);
        }
    }
}

impl Drop for Coming {
    fn drop(&mut self) {
        self.enter(Err(Error::new(Code::StoreUnavailable, "the object store was closed")));
        self.all.fetch_sub(self.wanted.identity.shape.bytes(), Ordering::Relaxed);
    }
}

impl Store {
    /// Starts the thread that gathers blocks for the object store, if there is one.
    ///
    /// # Errors
    /// The machine gives no thread.
    pub fn start_far(&self, threads: &mut Vec<JoinHandle<()>>) -> Result<()> {
        if self.far().is_some() {
            let store = self.clone();
            let work = move || store.far().iter().for_each(|far| far.serve(&store));
            let writer = spawn_named("kvik-store-o", &ThreadOptions::default(), work);
            threads.push(writer.map_err(crate::no_thread)?);
        }
        Ok(())
    }

    /// Has blocks written to the object store soon.
    pub fn write_far_soon(&self, namespace: u16, keys: &[BlockKey]) {
        if let Some(far) = self.far() {
            self.add_soon(&far.soon, &far.writers, namespace, keys);
        }
    }

    /// Whether only the object store has a block, so that whoever needs it has to wait for that; not where it does not
    /// answer, which makes such a block a miss.
    pub fn is_far(&self, namespace: u16, key: &BlockKey) -> bool {
        let Some(far) = self.far().filter(|far| !far.objects.is_shut()) else { return false };
        let state = self.state();
        let found = state.index.find(namespace, key).is_some_and(|id| state.index.node(id).is_far());
        found && far.objects.takes(state.shape(namespace).bytes())
    }

    /// Brings blocks back that only the object store has, from the first key on, as many as make a window, with one
    /// request for those that lie together. How many of the keys are in memory then, from the first one on, and how many
    /// of them came from there. Waits no longer than `until`.
    ///
    /// # Errors
    /// The machine has no memory.
    pub fn bring_far(&self, namespace: u16, keys: &[BlockKey], until: Instant) -> Result<(usize, usize)> {
        let Some(far) = self.far() else { return Ok((0, 0)) };
        let (count, coming) = self.begin_far(far, namespace, keys)?;
        let came: Vec<BlockKey> = coming.iter().map(|coming| coming.wanted.identity.key).collect();
        let began = Instant::now();
        for run in runs(coming, |coming| &coming.wanted) {
            let latencies = self.latencies().clone();
            let done = move |coming: Coming, loaded: Loaded| {
                if let Ok(Some(_)) = loaded {
                    latencies.fetch.add(began.elapsed());
                }
                coming.ended(loaded);
            };
            far.objects.fetch(run, |coming| &coming.wanted, done);
        }
        let mut state = self.state();
        let life = |state: &State, key: &BlockKey| -> Option<Life> {
            let id: Id = state.index.find(namespace, key)?;
            Some(state.index.node(id).life)
        };
        for key in &keys[..count] {
            while life(&state, key) == Some(Life::Loading) && Instant::now() < until {
                state = self.wait(state, until);
            }
        }
        let here = keys[..count].iter().take_while(|key| life(&state, key) == Some(Life::Resident)).count();
        Ok((here, keys[..here].iter().filter(|key| came.contains(key)).count()))
    }

    /// Begins to bring a window of blocks: how many keys it has, and those that nobody else is bringing.
    fn begin_far(&self, far: &Far, namespace: u16, keys: &[BlockKey]) -> Result<(usize, Vec<Coming>)> {
        let mut state = self.state();
        let (bytes, most) = (state.shape(namespace).bytes(), most(&state, namespace));
        // Changed under this lock, but by those that end.
        let has_room = |state: &State| match far.coming.load(Ordering::Relaxed) {
            0 => true,
            coming => coming + bytes <= state.slabs.capacity() / 4,
        };
        let (mut count, mut coming) = (0, Vec::new());
        while let Some(id) = keys.get(count).and_then(|key| state.index.find(namespace, key))
            && coming.len() < most
        {
            let node = state.index.node(id).clone();
            if node.life == Life::Below && node.is_far() {
                if !has_room(&state) {
                    break;
                }
                let (place, identity) = (Place(node.object), state.identity(id));
                let Some(filling) = state.begin_load(id)? else { break };
                let Some((memory, offset)) = state.slabs.bytes(filling.slot) else {
                    state.abandon(filling);
                    break;
                };
                let wanted = Wanted { place, identity, memory, offset: offset as usize };
                far.coming.fetch_add(bytes, Ordering::Relaxed);
                let (store, all) = (self.clone(), far.coming.clone());
                coming.push(Coming { store, filling: Some(filling), wanted, all });
            } else if node.life != Life::Resident && !node.is_far() {
                break;
            }
            count += 1;
        }
        Ok((count, coming))
    }

    /// Takes blocks out of the object store too.
    ///
    /// # Errors
    /// `DeadlineExceeded` and what the tier says; the blocks are gone from here all the same.
    pub fn remove_far(&self, gone: &[Gone], by: Instant) -> Result<()> {
        let stored: Vec<BlockKey> =
            gone.iter().filter(|gone| gone.object != 0).map(|gone| gone.key).collect();
        self.say_far(&stored, by, |objects, key, within| objects.remove(key, within))
    }

    /// The same for whole namespaces.
    ///
    /// # Errors
    /// As for [`Store::remove_far`].
    pub fn clear_far(&self, namespaces: &[NamespaceId], by: Instant) -> Result<()> {
        self.say_far(namespaces, by, |objects, namespace, within| objects.remove_namespace(namespace, within))
    }

    fn say_far<T>(
        &self,
        of: &[T],
        by: Instant,
        say: fn(&Objects, &T, Duration) -> Result<Place>,
    ) -> Result<()> {
        let Some(far) = self.far().filter(|_| !of.is_empty()) else { return Ok(()) };
        let left = || by.saturating_duration_since(Instant::now());
        let all = || {
            let places =
                of.iter().map(|one| say(&far.objects, one, left())).collect::<Result<Vec<Place>>>()?;
            far.objects.sync(&places, left())
        };
        all().map_err(|error| {
            let text = format!(
                "what was removed may still be in the object store at {}, and be found after a restart: remove it again \
                 ({error})",
                far.objects.name()
            );
            Error::new(error.code, text)
        })
    }

    /// Waits until all is known that the object store holds, so that what is removed now does not come back. Without one,
    /// and where it takes too long, nothing is waited for any more.
    ///
    /// # Errors
    /// `DeadlineExceeded`.
    pub fn know_far(&self, by: Instant) -> Result<()> {
        self.far().map_or(Ok(()), |far| far.objects.opened(by))
    }
}
