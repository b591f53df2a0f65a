//! The tier below memory: blocks are written to it after they were stored, found again in it after a restart, and
//! brought back when they are asked for.
//!
//! Invariants:
//! - A block's place is entered only once the tier has taken it, and only if the block is still the one that was written.
//! - What comes back is published only after the tier has compared all of it.
//! - What waits to be written is bounded: where the disk is slower than the network, some blocks are in memory only.
//! - No lock of the store is held while the tier is called.

use crate::index::{Id, Life};
use crate::state::{Filling, State};
use crate::store::Store;
use crate::tenants::Known;
use crate::tier::{Found, Identity, Place, TierOwner};
use crate::{BlockKey, Entry, NamespaceId, Shape};
use kvik_core::{Code, Error, Result};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Bytes of blocks that wait to be written, at most; and at least, whatever the memory.
const WAITING: (u64, u64) = (1 << 30, 16 << 20);
/// How long the thread that writes waits for the tier, before a block stays in memory only.
const PATIENCE: Duration = Duration::from_secs(10);
/// Bytes that are brought back before the first of them are lent, at least one block.
const WINDOW: u64 = 8 << 20;

/// All that is known of blocks, as the tier's owner has it.
pub(crate) struct Blocks {
    pub state: Mutex<State>,
    /// A block was published, or given up.
    pub changed: Condvar,
    /// Blocks that were found in the tier before the one that they come after.
    early: Mutex<HashMap<BlockKey, Vec<(Identity, Place)>>>,
}

/// Blocks that wait to be written.
#[derive(Default)]
pub(crate) struct Queue {
    waiting: Mutex<Waiting>,
    ready: Condvar,
}

#[derive(Default)]
struct Waiting {
    blocks: VecDeque<(Id, BlockKey, u64)>,
    bytes: u64,
    closed: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Blocks {
    pub fn new(state: State) -> Blocks {
        Blocks { state: Mutex::new(state), changed: Condvar::new(), early: Mutex::default() }
    }

    /// Blocks that are known.
    pub fn count(&self) -> usize {
        lock(&self.state).index.len()
    }

    fn enter(&self, identity: &Identity, place: Place) {
        let mut all = vec![(*identity, place)];
        while let Some((identity, place)) = all.pop() {
            if lock(&self.state).found(&identity, place) {
                all.extend(lock(&self.early).remove(&identity.key).unwrap_or_default());
            } else if let Some(parent) = identity.parent {
                lock(&self.early).entry(parent).or_default().push((identity, place));
            }
        }
    }

    /// All was told: what comes after a block that was not found is nobody's. How many that are.
    pub fn found_all(&self) -> usize {
        std::mem::take(&mut *lock(&self.early)).into_values().map(|blocks| blocks.len()).sum()
    }
}

impl TierOwner for Blocks {
    fn found(&self, found: Found<'_>) {
        match found {
            Found::Namespace(id, meaning) => match Meaning::decode(meaning) {
                Some(Meaning { tenant, model, shape }) => {
                    let opened = lock(&self.state).tenants.open(id, &tenant, shape, &model);
                    if let Err(error) = opened {
                        log::warn!("blocks of namespace {id} in the log are left alone: {error}");
                    }
                }
                None => log::warn!("the log does not say what namespace {id} is: its blocks are left alone"),
            },
            Found::Block(identity, place) => self.enter(&identity, place),
            Found::Removed(key) => lock(&self.state).forget_key(&key),
            Found::NamespaceRemoved(id) => {
                let mut state = lock(&self.state);
                if let Some(number) = state.tenants.find(&id) {
                    state.forget_all(|namespace| namespace == number);
                }
            }
        }
    }

    fn keep(&self, identity: &Identity, place: Place) -> bool {
        lock(&self.state).is_wanted_at(identity, place)
    }

    fn moved(&self, identity: &Identity, from: Place, to: Place) {
        let mut state = lock(&self.state);
        if let Some(id) = state.at(identity, from) {
            state.set_place(id, to);
        }
    }

    fn dropped(&self, identity: &Identity, place: Place) {
        let mut state = lock(&self.state);
        if let Some(id) = state.at(identity, place) {
            state.lose_place(id);
        }
    }
}

/// What a namespace is, as the log keeps it.
struct Meaning {
    tenant: String,
    model: String,
    shape: Shape,
}

impl Meaning {
    /// Two texts with their lengths, and three numbers.
    fn encode(known: &Known, tenant: &str) -> Vec<u8> {
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

impl Queue {
    /// Has blocks written soon, as far as there is room; how many will not be.
    fn add(&self, blocks: &[(Id, BlockKey)], each: u64, most: u64) -> u64 {
        let mut waiting = lock(&self.waiting);
        let mut left = 0;
        for block in blocks {
            if waiting.bytes + each > most || waiting.closed {
                left += 1;
                continue;
            }
            waiting.bytes += each;
            waiting.blocks.push_back((block.0, block.1, each));
        }
        self.ready.notify_one();
        left
    }

    fn next(&self) -> Option<(Id, BlockKey)> {
        let mut waiting = lock(&self.waiting);
        loop {
            if let Some((id, key, bytes)) = waiting.blocks.pop_front() {
                waiting.bytes -= bytes;
                return Some((id, key));
            }
            if waiting.closed {
                return None;
            }
            waiting = self.ready.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub fn is_closed(&self) -> bool {
        lock(&self.waiting).closed
    }

    /// Takes nothing more; what waits is still written.
    pub fn close(&self) {
        lock(&self.waiting).closed = true;
        self.ready.notify_all();
    }
}

impl Store {
    /// Writes what waits, until the store ends; then what is left of it, unless the disk keeps it from ending.
    pub fn write_what_waits(&self, queue: &Queue) {
        while let Some((id, key)) = queue.next() {
            if let Err(error) = self.write(id, &key, PATIENCE) {
                self.state().counts.unwritten += 1;
                log::warn!("block {key} stays in memory only: {error}");
                if queue.is_closed() {
                    return;
                }
            }
        }
    }

    /// Has blocks written soon.
    pub fn write_soon(&self, namespace: u16, keys: &[BlockKey]) {
        let Some((_, queue)) = self.below() else { return };
        let mut state = self.state();
        let here = |key: &BlockKey| Some((state.index.find(namespace, key)?, *key));
        let unwritten = |(id, _): &(Id, BlockKey)| state.index.node(*id).place == 0;
        let blocks: Vec<_> = keys.iter().filter_map(here).filter(unwritten).collect();
        let (each, capacity) = (state.shape(namespace).bytes(), state.slabs.capacity());
        state.counts.unwritten += queue.add(&blocks, each, (capacity / 4).clamp(WAITING.1, WAITING.0));
    }

    /// Has blocks on the disk before this returns; how many of them are, from the first one on.
    ///
    /// # Errors
    /// `InvalidArgument` for a store without a log; what the tier says.
    pub fn make_durable(&self, namespace: u16, keys: &[BlockKey], until: Instant) -> Result<usize> {
        let Some((tier, _)) = self.below() else {
            let text = "this store has no log, so nothing in it is durable: ask for `stored`, or start it with a log";
            return Err(Error::new(Code::InvalidArgument, text));
        };
        let left = || until.saturating_duration_since(Instant::now());
        let mut places = Vec::new();
        for key in keys {
            let Some(id) = self.state().index.find(namespace, key) else { break };
            match self.write(id, key, left())? {
                Some(place) => places.push(place),
                None => break,
            }
        }
        tier.sync(&places, left())?;
        Ok(places.len())
    }

    /// Writes a block that is in memory, if it is not written yet: where it is.
    fn write(&self, id: Id, key: &BlockKey, within: Duration) -> Result<Option<Place>> {
        let Some((tier, _)) = self.below() else { return Ok(None) };
        let (pages, at, entry, sum) = {
            let mut state = self.state();
            let node = state.index.node(id).clone();
            if node.key != *key || matches!(node.life, Life::Free | Life::Leaving) {
                return Ok(None);
            }
            if node.place != 0 {
                return Ok(Some(Place(node.place)));
            }
            let Some(slot) = state.pin(id) else { return Ok(None) };
            let known = state.tenants.namespace(node.namespace).clone();
            let meaning = Meaning::encode(&known, &state.tenants.tenant(node.namespace).name);
            let parent = state.index.parent(id).map(|parent| state.index.node(parent).key);
            let found = state
                .slabs
                .pages(slot.slab, [slot.slot].into())
                .map(|pages| (pages, state.slabs.bytes(slot)));
            drop(state);
            let entry =
                Entry { key: *key, parent, namespace: known.id, shape: known.shape, sums: Box::default() };
            match found.and_then(|found| tier.declare(known.id, &meaning).map(|()| found)) {
                Ok((pages, Some(at))) => (pages, at, entry, node.sum),
                other => {
                    self.state().unpin(id);
                    return other.map(|_| None);
                }
            }
        };
        let written = pages.sums(entry.shape.summed_layers()).and_then(|sums| {
            let entry = Entry { sums: sums.into(), ..entry };
            match entry.sum() == sum {
                true => tier.store(&entry, &at.0, at.1 as usize, within).map(Some),
                false => Ok(None),
            }
        });
        let mut state = self.state();
        // Somebody else may have written it meanwhile: the place that is known stays, so that whoever waits for one waits
        // for that.
        let known = Place(state.index.node(id).place);
        let written = written.map(|place| place.map(|place| if known.0 == 0 { place } else { known }));
        if let Ok(Some(place)) = written
            && known.0 == 0
            && state.index.node(id).life != Life::Leaving
        {
            state.note_written(id, place);
        }
        state.unpin(id);
        if let Ok(None) = written {
            log::warn!("block {key} has changed while it lay in memory: it is taken out");
            state.counts.corrupt += 1;
            state.forget_key(key);
        }
        written
    }

    /// Brings blocks back that lie below, from the first key on, as many as make a window. How many of the keys are in
    /// memory then, from the first one on, and how many of them came from below. What another caller is bringing is
    /// waited for.
    ///
    /// # Errors
    /// The machine has no memory.
    pub fn bring(&self, namespace: u16, keys: &[BlockKey], until: Instant) -> Result<(usize, usize)> {
        let (mut here, mut came) = (0, 0);
        let mut brought = 0;
        for key in keys {
            match self.bring_one(namespace, key, until)? {
                Brought::Missing => break,
                Brought::Here => here += 1,
                Brought::Loaded(bytes) => {
                    here += 1;
                    came += 1;
                    brought += bytes;
                    if brought >= WINDOW {
                        break;
                    }
                }
            }
        }
        Ok((here, came))
    }

    fn bring_one(&self, namespace: u16, key: &BlockKey, until: Instant) -> Result<Brought> {
        let mut state = self.state();
        let mut waited = false;
        loop {
            let Some(id) = state.index.find(namespace, key) else { return Ok(Brought::Missing) };
            match state.index.node(id).life {
                // Somebody else has loaded it, and has its bytes counted.
                Life::Resident if waited => return Ok(Brought::Loaded(0)),
                Life::Resident => return Ok(Brought::Here),
                Life::Below => {
                    let identity = state.identity(id);
                    let place = Place(state.index.node(id).place);
                    let Some(filling) = state.begin_load(id)? else { return Ok(Brought::Missing) };
                    let at = state.slabs.bytes(filling.slot);
                    drop(state);
                    let brought = self.load(filling, place, &identity, at);
                    state = self.state();
                    // It may have been moved while it was looked for.
                    let moved = state.index.find(namespace, key).is_some_and(|id| {
                        let node = state.index.node(id);
                        node.life == Life::Below && node.place != place.0
                    });
                    if !(moved && matches!(brought, Brought::Missing)) {
                        return Ok(brought);
                    }
                }
                Life::Loading if Instant::now() < until => {
                    state.figures.waits += u64::from(!std::mem::replace(&mut waited, true));
                    state = self.wait(state, until);
                }
                _ => return Ok(Brought::Missing),
            }
        }
    }

    fn load(
        &self,
        filling: Filling,
        place: Place,
        identity: &Identity,
        at: Option<(Arc<kvik_host::Memory>, u64)>,
    ) -> Brought {
        let began = Instant::now();
        let loaded = match (self.below(), at) {
            (Some((tier, _)), Some((memory, offset))) => tier.load(place, identity, &memory, offset as usize),
            _ => Ok(None),
        };
        let took = began.elapsed();
        let mut state = self.state();
        let brought = match loaded {
            Ok(Some(sums)) => {
                self.latencies().load.add(took);
                state.counts.loaded += 1;
                let sum = crate::entry::sum_of(&sums);
                let id = filling.id;
                if state.publish(filling, sum) {
                    state.list(id);
                    Brought::Loaded(identity.shape.bytes())
                } else {
                    Brought::Missing
                }
            }
            Ok(None) => {
                state.abandon(filling);
                Brought::Missing
            }
            Err(error) => {
                let wrong = error.code == Code::ChecksumMismatch;
                log::warn!("block {} is not served from the log: {error}", identity.key);
                state.counts.corrupt += u64::from(wrong);
                state.abandon(filling);
                // Where it was copied to meanwhile it is another record, of which nothing is known yet.
                if wrong && let Some(id) = state.at(identity, place) {
                    state.lose_place(id);
                }
                Brought::Missing
            }
        };
        drop(state);
        self.note_change();
        brought
    }

    /// Takes blocks out of the tier too.
    ///
    /// # Errors
    /// What the tier says; the blocks are gone from memory all the same.
    pub fn remove_below(&self, gone: &[(BlockKey, u64)]) -> Result<()> {
        let Some((tier, _)) = self.below() else { return Ok(()) };
        let written = gone.iter().filter(|(_, place)| *place != 0);
        let places: Result<Vec<Place>> = written.map(|(key, _)| tier.remove(key, PATIENCE)).collect();
        tier.sync(&places?, PATIENCE)
    }

    /// The same for whole namespaces.
    ///
    /// # Errors
    /// As for [`Store::remove_below`].
    pub fn clear_below(&self, namespaces: &[NamespaceId]) -> Result<()> {
        let Some((tier, _)) = self.below() else { return Ok(()) };
        let places: Result<Vec<Place>> =
            namespaces.iter().map(|namespace| tier.remove_namespace(namespace, PATIENCE)).collect();
        tier.sync(&places?, PATIENCE)
    }
}

/// What became of a block that was to be in memory.
enum Brought {
    Missing,
    Here,
    /// So many bytes were read.
    Loaded(u64),
}
