//! The object store below memory and the log: how blocks go there, and how they come back.
//!
//! Invariants:
//! - What comes back is published only after the tier has compared all of it.
//! - Nobody waits for an object store but who asks for what only it has, and by a thread that serves nobody else.
//! - A read that ends in whatever way, its task's end included, is entered: no block is on its way for ever.

use crate::BlockKey;
use crate::below::Far;
use crate::bring::most;
use crate::figures::Where;
use crate::index::{Id, Life};
use crate::object::{Loaded, Wanted, runs};
use crate::state::{Filling, State};
use crate::store::Store;
use crate::tier::Place;
use kvik_core::{Code, Error, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

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

impl Far {
    /// Has blocks written to the object store soon.
    pub fn write_soon(&self, store: &Store, namespace: u16, keys: &[BlockKey]) {
        self.soon.add_all(store, &self.writers, namespace, keys);
    }

    /// Whether only the object store has a block, so that whoever needs it has to wait for that; not where it does not
    /// answer, which makes such a block a miss.
    pub fn has_only(&self, store: &Store, namespace: u16, key: &BlockKey) -> bool {
        if self.objects.is_shut() {
            return false;
        }
        let state = store.state();
        state.index.find(namespace, key).is_some_and(|id| state.index.node(id).is_far())
    }

    /// Brings blocks back that only the object store has, from the first key on, as many as make a window, with one
    /// request for those that lie together. How many of the keys are in memory then, from the first one on, and how many
    /// of them came from there. Waits no longer than `until`.
    ///
    /// # Errors
    /// The machine has no memory.
    pub fn bring(
        &self,
        store: &Store,
        namespace: u16,
        keys: &[BlockKey],
        until: Instant,
    ) -> Result<(usize, usize)> {
        let (count, coming) = self.begin(store, namespace, keys)?;
        let came: Vec<BlockKey> = coming.iter().map(|coming| coming.wanted.identity.key).collect();
        let began = Instant::now();
        for run in runs(coming, |coming| &coming.wanted) {
            let latencies = store.latencies().clone();
            let done = move |coming: Coming, loaded: Loaded| {
                if let Ok(Some(_)) = loaded {
                    latencies.fetch.add(began.elapsed());
                }
                coming.ended(loaded);
            };
            self.objects.fetch(run, |coming| &coming.wanted, done);
        }
        let mut state = store.state();
        let life = |state: &State, key: &BlockKey| -> Option<Life> {
            let id: Id = state.index.find(namespace, key)?;
            Some(state.index.node(id).life)
        };
        for key in &keys[..count] {
            while life(&state, key) == Some(Life::Loading) && Instant::now() < until {
                state = store.wait(state, until);
            }
        }
        let here = keys[..count].iter().take_while(|key| life(&state, key) == Some(Life::Resident)).count();
        Ok((here, keys[..here].iter().filter(|key| came.contains(key)).count()))
    }

    /// Begins to bring a window of blocks: how many keys it has, and those that nobody else is bringing.
    fn begin(&self, store: &Store, namespace: u16, keys: &[BlockKey]) -> Result<(usize, Vec<Coming>)> {
        let mut state = store.state();
        let (bytes, capacity) = (state.tenants.shape(namespace).bytes(), state.slabs.capacity());
        // Changed under this lock, but by those that end.
        let has_room = || match self.coming.load(Ordering::Relaxed) {
            0 => true,
            coming => coming + bytes <= capacity / 4,
        };
        let (mut count, mut coming, mut failed) = (0, Vec::new(), None);
        while let Some(id) = keys.get(count).and_then(|key| state.index.find(namespace, key))
            && coming.len() < most(capacity, bytes)
        {
            let node = state.index.node(id).clone();
            if node.life == Life::Below && node.is_far() {
                if !has_room() {
                    break;
                }
                let (place, identity) = (Place(node.object), state.tenants.identity(&state.index, id));
                let filling = match state.begin(id, Life::Loading) {
                    Ok(Ok(filling)) => filling,
                    Ok(Err(_)) => break,
                    Err(error) => {
                        failed = Some(error);
                        break;
                    }
                };
                let Some((memory, offset)) = state.slabs.bytes(filling.slot) else {
                    state.abandon(filling);
                    break;
                };
                let wanted = Wanted { place, identity, memory, offset: offset as usize };
                self.coming.fetch_add(bytes, Ordering::Relaxed);
                let (store, all) = (store.clone(), self.coming.clone());
                coming.push(Coming { store, filling: Some(filling), wanted, all });
            } else if node.life != Life::Resident && !node.is_far() {
                break;
            }
            count += 1;
        }
        // Those that are dropped take this lock.
        drop(state);
        failed.map_or(Ok((count, coming)), Err)
    }

    /// Waits until all is known that the object store holds, so that what is removed now does not come back.
    ///
    /// # Errors
    /// `DeadlineExceeded`.
    pub fn know(&self, by: Instant) -> Result<()> {
        self.objects.opened(by)
    }
}
