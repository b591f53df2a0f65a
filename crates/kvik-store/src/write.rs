//! From memory to the tiers below: what is written soon, and what a put waits for.
//!
//! Invariants:
//! - A block's place is entered only once the tier has taken it, and only if the block is still the one that was written.
//! - What waits to be written soon is bounded: where the disk is slower than the network, some blocks are in memory only.
//! - Who waits for blocks waits until its deadline. What a thread has begun by then ends by itself.

use crate::below::Meaning;
use crate::crew::{Crew, Work};
use crate::figures::Where;
use crate::index::{Id, Life, Node};
use crate::state::State;
use crate::store::Store;
use crate::sync::lock;
use crate::tier::{Identity, PATIENCE, Place, Tier};
use crate::unsaid::Removed;
use crate::{BlockKey, Entry};
use kvik_core::{Code, Error, Result};
use kvik_engine::PageSet;
use kvik_host::{HugePages, Memory};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Bytes of blocks that wait to be written soon, at most; and at least, whatever the memory.
const WAITING: (u64, u64) = (1 << 30, 16 << 20);

/// Blocks that are written soon, for nobody in particular.
pub(crate) struct Soon {
    tier: Where,
    waiting: Mutex<Waiting>,
}

#[derive(Default)]
struct Waiting {
    blocks: VecDeque<(Id, BlockKey, u64)>,
    bytes: u64,
    closed: bool,
}

impl Soon {
    /// Those for a tier.
    pub fn to(tier: Where) -> Soon {
        Soon { tier, waiting: Mutex::default() }
    }

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
        left
    }

    /// Has those of the blocks written soon that its tier does not have.
    pub fn add_all(
        self: &Arc<Soon>,
        store: &Store,
        writers: &Crew<Store>,
        namespace: u16,
        keys: &[BlockKey],
    ) {
        let mut state = store.state();
        let here = |key: &BlockKey| Some((state.index.find(namespace, key)?, *key));
        let unwritten = |(id, _): &(Id, BlockKey)| state.index.node(*id).place_in(self.tier).is_none();
        let blocks: Vec<_> = keys.iter().filter_map(here).filter(unwritten).collect();
        let (each, capacity) = (state.tenants.shape(namespace).bytes(), state.slabs.capacity());
        let left = self.add(&blocks, each, (capacity / 4).clamp(WAITING.1, WAITING.0));
        *state.counts.unwritten_to(self.tier) += left;
        drop(state);
        writers.offer(self.clone());
    }

    fn next(&self) -> Option<(Id, BlockKey)> {
        let mut waiting = lock(&self.waiting);
        let (id, key, bytes) = waiting.blocks.pop_front()?;
        waiting.bytes -= bytes;
        Some((id, key))
    }

    /// Takes nothing more; what waits is still written.
    pub fn close(&self) {
        lock(&self.waiting).closed = true;
    }

    /// A disk that fails does not keep a store from ending: what waits then stays in memory only. How many those are.
    fn give_up_if_closed(&self) -> u64 {
        let mut waiting = lock(&self.waiting);
        if !waiting.closed {
            return 0;
        }
        waiting.bytes = 0;
        std::mem::take(&mut waiting.blocks).len() as u64
    }
}

impl Work<Store> for Soon {
    fn step(&self, store: &Store) {
        let Some((id, key)) = self.next() else { return };
        match store.write(id, &key, self.tier, PATIENCE) {
            // It went from memory before its turn came.
            Ok(None) if self.tier == Where::Object => store.state().counts.object_unwritten += 1,
            Ok(_) => {}
            Err(error) => {
                let left = 1 + self.give_up_if_closed();
                *store.state().counts.unwritten_to(self.tier) += left;
                let level = if self.tier == Where::Log { log::Level::Warn } else { log::Level::Debug };
                log::log!(level, "block {key} does not come to the tier {}: {error}", self.tier.name());
            }
        }
    }

    fn has_more(&self) -> bool {
        !lock(&self.waiting).blocks.is_empty()
    }
}

/// Blocks that a put waits for.
pub(crate) struct Awaited {
    until: Instant,
    pieces: Mutex<Pieces>,
    /// The last of them has ended.
    done: Condvar,
}

#[derive(Default)]
struct Pieces {
    left: VecDeque<(Id, BlockKey)>,
    running: usize,
    failed: Option<Error>,
}

impl Awaited {
    pub fn new(until: Instant) -> Arc<Awaited> {
        Arc::new(Awaited { until, pieces: Mutex::default(), done: Condvar::new() })
    }

    /// Waits until none is left to write to the log of this name.
    fn wait(&self, log: &str) -> Result<()> {
        let mut pieces = lock(&self.pieces);
        while !pieces.left.is_empty() || pieces.running > 0 {
            let left = self.until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let text = format!(
                    "{} blocks of a put are not in the log in {log} by its deadline: give it more time, put fewer at once, \
                     or look whether that disk answers",
                    pieces.left.len() + pieces.running
                );
                pieces.left.clear();
                return Err(Error::new(Code::DeadlineExceeded, text));
            }
            pieces = self.done.wait_timeout(pieces, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        pieces.failed.take().map_or(Ok(()), Err)
    }
}

impl Work<Store> for Awaited {
    fn step(&self, store: &Store) {
        let Some((id, key)) = ({
            let mut pieces = lock(&self.pieces);
            let next = pieces.left.pop_front();
            pieces.running += usize::from(next.is_some());
            next
        }) else {
            return;
        };
        let written = store.write(id, &key, Where::Log, self.until.saturating_duration_since(Instant::now()));
        let mut pieces = lock(&self.pieces);
        pieces.running -= 1;
        if let Err(error) = written {
            pieces.left.clear();
            pieces.failed = Some(error);
        }
        if pieces.left.is_empty() && pieces.running == 0 {
            self.done.notify_all();
        }
    }

    fn has_more(&self) -> bool {
        !lock(&self.pieces).left.is_empty()
    }
}

impl Store {
    /// Has blocks written soon.
    pub fn write_soon(&self, namespace: u16, keys: &[BlockKey]) {
        if let Some(below) = self.below() {
            below.soon.add_all(self, &below.writers, namespace, keys);
        }
    }

    /// Has blocks written that somebody waits for, several at once. Without a tier below nothing is.
    pub fn write_now(&self, awaited: &Arc<Awaited>, blocks: impl IntoIterator<Item = (Id, BlockKey)>) {
        let Some(below) = self.below() else { return };
        lock(&awaited.pieces).left.extend(blocks);
        below.writers.offer(awaited.clone());
    }

    /// Has blocks on the disk before this returns, with all that come before them in their prompt, without which no restart
    /// finds them; how many of them are, from the first one on. Some of them may be on their way there by
    /// [`Store::write_now`] already.
    ///
    /// # Errors
    /// `InvalidArgument` for a store without a log; `DeadlineExceeded`; what the tier says.
    pub fn make_durable(&self, namespace: u16, keys: &[BlockKey], awaited: &Arc<Awaited>) -> Result<usize> {
        let Some(below) = self.below() else {
            let text = "this store has no log, so nothing in it is durable: ask for `stored`, or start it with a log";
            return Err(Error::new(Code::InvalidArgument, text));
        };
        let log = below.log.name();
        awaited.wait(&log)?;
        let all = {
            let state = self.state();
            state.durable.unknown(&state.index, namespace, keys)
        };
        let (before, keys) = (all.len() - keys.len(), &all[..]);
        let unwritten: Vec<_> = {
            let state = self.state();
            let here = |key: &BlockKey| Some((state.index.find(namespace, key)?, *key));
            let unwritten = |(id, _): &(Id, BlockKey)| state.index.node(*id).place == 0;
            keys.iter().map_while(here).filter(unwritten).collect()
        };
        if !unwritten.is_empty() {
            self.write_now(awaited, unwritten);
            awaited.wait(&log)?;
        }
        let placed: Vec<(BlockKey, Place)> = {
            let state = self.state();
            let place =
                |key: &BlockKey| state.index.node(state.index.find(namespace, key)?).place_in(Where::Log);
            keys.iter().map_while(|key| Some((*key, place(key)?))).collect()
        };
        let places: Vec<Place> = placed.iter().map(|(_, place)| *place).collect();
        let synced = below.log.sync(&places, awaited.until.saturating_duration_since(Instant::now()));
        if synced.is_err() {
            self.forget_failed(namespace, keys, &below.log);
        }
        synced?;
        let mut state = self.state();
        let State { durable, index, .. } = &mut *state;
        durable.note(index, namespace, &placed);
        Ok(places.len().saturating_sub(before))
    }

    /// Blocks whose segment the disk has failed to keep are not there: they are written again when they are put again.
    /// What is not durable yet, and may be, stays.
    fn forget_failed(&self, namespace: u16, keys: &[BlockKey], tier: &dyn Tier) {
        let placed: Vec<(Id, Place)> = {
            let state = self.state();
            let of = |key: &BlockKey| state.index.find(namespace, key);
            keys.iter().filter_map(of).map(|id| (id, Place(state.index.node(id).place))).collect()
        };
        for (id, place) in placed.into_iter().filter(|(_, place)| place.0 != 0) {
            let failed = tier.sync(&[place], Duration::ZERO);
            if failed.is_err_and(|error| error.code != Code::DeadlineExceeded) {
                let mut state = self.state();
                // It may have been moved, or stored again, meanwhile.
                if state.index.node(id).place == place.0 {
                    state.lose_place(id, Where::Log);
                }
            }
        }
    }

    /// Writes a block to a tier below, if that does not have it yet: where it is there.
    pub fn write(&self, id: Id, key: &BlockKey, to: Where, within: Duration) -> Result<Option<Place>> {
        let Some(tier) = self.tier(to) else { return Ok(None) };
        let (source, entry, meaning, sum) = {
            let Some(mut state) = self.before_writing((id, key), to, Instant::now() + within)? else {
                return Ok(None);
            };
            let node = state.index.node(id).clone();
            if let Some(place) = node.place_in(to) {
                return Ok(Some(place));
            }
            let Some(source) = Source::of(&mut state, id, &node)? else { return Ok(None) };
            let known = state.tenants.namespace(node.namespace);
            let meaning = Meaning::encode(known, &state.tenants.tenant(node.namespace).name);
            let Identity { parent, namespace, shape, .. } = state.tenants.identity(&state.index, id);
            let entry = Entry { key: *key, parent, namespace, shape, sums: Box::default() };
            state.unsaid.of(to).write((*key, namespace));
            (source, entry, meaning, node.sum)
        };
        let block = (*key, entry.namespace);
        let declared = tier.declare(entry.namespace, &meaning);
        let found = declared.and_then(|()| source.summed(self, entry, sum));
        let written = found.and_then(|found| match found {
            Some((entry, memory, offset)) => tier.store(&entry, &memory, offset, within).map(Some),
            None => Ok(None),
        });
        if self.state().unsaid.of(to).written(&block) {
            self.note_change();
        }
        source.note_end(self, (id, key), to, written)
    }
}

/// Where the bytes of a block that is written come from.
enum Source {
    /// Memory, where it is pinned.
    Memory(PageSet, Arc<Memory>, usize),
    /// The log, since it has gone from memory.
    Log(Identity, Place),
}

impl Source {
    fn of(state: &mut State, id: Id, node: &Node) -> Result<Option<Source>> {
        let Some(slot) = state.pin(id) else {
            let below = node.life == Life::Below && node.place != 0;
            return Ok(
                below.then(|| Source::Log(state.tenants.identity(&state.index, id), Place(node.place)))
            );
        };
        let pages = state.slabs.pages(slot.slab, [slot.slot].into());
        match (pages, state.slabs.bytes(slot)) {
            (Ok(pages), Some((memory, offset))) => Ok(Some(Source::Memory(pages, memory, offset as usize))),
            (pages, _) => {
                state.unpin(id);
                pages.map(|_| None)
            }
        }
    }

    fn is_memory(&self) -> bool {
        matches!(self, Source::Memory(..))
    }

    /// The block's entry and bytes, once they were compared with what is known of them; none where they differ, or where
    /// the log does not have it any more.
    fn summed(&self, store: &Store, entry: Entry, sum: u64) -> Result<Option<(Entry, Arc<Memory>, usize)>> {
        match self {
            Source::Memory(pages, memory, offset) => {
                let sums = pages.sums(entry.shape.summed_layers())?;
                let entry = Entry { sums: sums.into(), ..entry };
                Ok((entry.sum() == sum).then(|| (entry, memory.clone(), *offset)))
            }
            Source::Log(identity, place) => {
                let Some(log) = store.tier(Where::Log) else { return Ok(None) };
                let memory = Memory::shared(entry.shape.bytes() as usize, HugePages::Never);
                let memory = Arc::new(memory.map_err(crate::no_memory)?);
                let sums = log.load(*place, identity, &memory, 0)?;
                Ok(sums.map(|sums| (Entry { sums, ..entry }, memory, 0)))
            }
        }
    }

    fn let_go(self, store: &Store, id: Id) {
        if self.is_memory() {
            store.state().unpin(id);
        }
    }

    /// Enters what became of a write.
    fn note_end(
        self,
        store: &Store,
        (id, key): (Id, &BlockKey),
        to: Where,
        written: Result<Option<Place>>,
    ) -> Result<Option<Place>> {
        let mut state = store.state();
        let node = state.index.node(id);
        // One that lay in the log only was not pinned: its number may be another block's by now.
        let same = node.key == *key && !matches!(node.life, Life::Free | Life::Leaving);
        // Somebody else may have written it meanwhile: the place that is known stays, so that whoever waits for one waits
        // for that.
        let known = if same { node.place_in(to) } else { None };
        // One that was put again meanwhile is to be found: what is said of its key now would be said of it. One that is
        // still being brought may not come.
        let there = |id: Id| Life::THERE.contains(&state.index.node(id).life);
        let again = state.index.find_any(key).is_some_and(there);
        let removed = !same && !again && matches!(written, Ok(Some(_)));
        match &written {
            Ok(Some(place)) if same && known.is_none() => state.note_written(id, to, *place),
            Ok(Some(place)) if to == Where::Object => state.freed.push(*place),
            _ => {}
        }
        if removed {
            state.unsaid.of(to).add(Removed::Block(*key));
        }
        let memory_only = self.is_memory();
        drop(state);
        self.let_go(store, id);
        if let (Ok(None), true) = (&written, memory_only) {
            log::warn!("block {key} has changed while it lay in memory: it is taken out");
            let mut state = store.state();
            state.counts.corrupt += 1;
            state.forget_key(key);
        }
        if removed {
            // It was removed while it was written: a restart is not to find it.
            store.say_late(to, key)?;
        }
        match written {
            // It was removed meanwhile, with what its namespace means: that is not who wrote it at fault.
            Err(_) if !same => Ok(None),
            written => Ok(written?.map(|place| known.unwrap_or(place))),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::state::{Filling, Reserved};
    use crate::{Bucket, Log, LogOptions, NamespaceId, ObjectOptions, Shape, StoreOptions, entry};
    use kvik_engine::{Config, Engine};
    use object_store::memory::InMemory;
    use std::path::Path;

    pub const NAMESPACE: NamespaceId = NamespaceId([1; 32]);
    pub const KEY: BlockKey = BlockKey([2; 32]);

    pub fn shape() -> Shape {
        Shape::new(1, 1, 4096).unwrap()
    }

    /// A store that no thread serves: what is written is written here.
    pub fn open(folder: &Path) -> Store {
        let log = Some((folder.to_owned(), LogOptions::new(8 << 20)));
        let options = StoreOptions { memory: 1 << 20, log, ..StoreOptions::default() };
        let store = Store::open(Engine::start(Config::default()).unwrap(), &options).unwrap();
        store.namespace(NAMESPACE, "one", shape(), "tiny@1").unwrap();
        store
    }

    pub fn put(store: &Store) -> Id {
        let reserved = store.state().reserve(0, None, KEY, |_| false);
        let Ok(Reserved::New(filling)) = reserved else { panic!("no room") };
        fill(store, filling)
    }

    /// Ends a put: what lies in the slot is the block.
    pub fn fill(store: &Store, filling: Filling) -> Id {
        let mut state = store.state();
        let pages = state.slabs.pages(filling.slot.slab, [filling.slot.slot].into()).unwrap();
        let (id, sums) = (filling.id, pages.sums(shape().summed_layers()).unwrap());
        assert!(state.publish(filling, entry::sum_of(&sums)));
        id
    }

    /// Writes a block to the log, and has something happen between the first look at it and the writing.
    pub fn write(store: &Store, id: Id, meanwhile: impl FnOnce(&Log)) {
        write_with(store, id, meanwhile).unwrap();
    }

    /// The same, and what became of it.
    pub fn write_with(store: &Store, id: Id, meanwhile: impl FnOnce(&Log)) -> Result<Option<Place>> {
        let log = &store.below().unwrap().log;
        let mut state = store.state();
        let node = state.index.node(id).clone();
        let source = Source::of(&mut state, id, &node).unwrap().unwrap();
        let known = state.tenants.namespace(0).clone();
        drop(state);
        log.declare(NAMESPACE, &Meaning::encode(&known, "one")).unwrap();
        let entry =
            Entry { key: KEY, parent: None, namespace: NAMESPACE, shape: shape(), sums: Box::default() };
        let (entry, memory, offset) = source.summed(store, entry, node.sum).unwrap().expect("its bytes");
        meanwhile(log);
        let written = log.store(&entry, &memory, offset, PATIENCE).map(Some);
        source.note_end(store, (id, &KEY), Where::Log, written)
    }

    /// Ends a put behind another one.
    fn put_behind(store: &Store, parent: Id, key: BlockKey) -> Id {
        let reserved = store.state().reserve(0, Some(parent), key, |_| false);
        let Ok(Reserved::New(filling)) = reserved else { panic!("no room") };
        fill(store, filling)
    }

    /// Has blocks made durable of a store that no thread serves; how many are.
    pub fn durable(store: &Store, keys: &[BlockKey]) -> usize {
        let awaited = Awaited::new(Instant::now() + PATIENCE);
        std::thread::scope(|scope| {
            let durable = scope.spawn(|| store.make_durable(0, keys, &awaited));
            let writers = &store.below().unwrap().writers;
            writers.close();
            while !durable.is_finished() {
                writers.serve(store);
            }
            durable.join().unwrap().unwrap()
        })
    }

    #[test]
    fn a_block_is_durable_with_all_that_come_before_it() {
        let folder = std::env::temp_dir().join(format!("kvik-store-before-{}", std::process::id()));
        drop(std::fs::remove_dir_all(&folder));
        let (store, child) = (open(&folder), BlockKey([3; 32]));
        // It was put by somebody who does not wait for the disk.
        put_behind(&store, put(&store), child);
        assert_eq!(durable(&store, &[child]), 1);
        drop(store);
        assert_eq!(open(&folder).contains(0, &[KEY, child]).unwrap(), [true; 2]);
        drop(std::fs::remove_dir_all(&folder));
    }

    #[test]
    fn a_durable_put_looks_at_what_comes_before_it_where_some_block_has_left_the_log() {
        let folder = std::env::temp_dir().join(format!("kvik-store-known-{}", std::process::id()));
        drop(std::fs::remove_dir_all(&folder));
        let (store, keys) = (open(&folder), [KEY, BlockKey([3; 32]), BlockKey([4; 32])]);
        let first = put(&store);
        let second = put_behind(&store, first, keys[1]);
        assert_eq!(durable(&store, &keys[..2]), 2);
        let place_of = |id: Id| store.state().index.node(id).place;
        // This is not how a block leaves the log: a put that looked at it would write it.
        let place = std::mem::take(&mut store.state().index.node_mut(first).place);
        put_behind(&store, second, keys[2]);
        assert_eq!((durable(&store, &keys[2..]), place_of(first)), (1, 0));
        store.state().index.node_mut(first).place = place;
        // This is, and it must be there for those behind it to be found.
        store.state().lose_place(first, Where::Log);
        assert_eq!(durable(&store, &keys[2..]), 1);
        assert!(place_of(first) > place);
        drop(store);
        assert_eq!(open(&folder).contains(0, &keys).unwrap(), [true; 3]);
        drop(std::fs::remove_dir_all(&folder));
    }

    #[test]
    fn a_block_of_the_log_is_found_behind_one_that_only_the_object_store_has() {
        let folder = std::env::temp_dir().join(format!("kvik-store-far-{}", std::process::id()));
        drop(std::fs::remove_dir_all(&folder));
        let (bucket, child) = (Arc::new(InMemory::new()), BlockKey([3; 32]));
        let open = || {
            let log = Some((folder.clone(), LogOptions::new(8 << 20)));
            let object = Some(ObjectOptions::new(Bucket::Store(bucket.clone(), "kv".into()), 256 << 20));
            let options = StoreOptions { memory: 1 << 20, log, object, ..StoreOptions::default() };
            let store = Store::open(Engine::start(Config::default()).unwrap(), &options).unwrap();
            store.namespace(NAMESPACE, "one", shape(), "tiny@1").unwrap();
            store.far().unwrap().know(Instant::now() + PATIENCE).unwrap();
            store
        };
        let store = open();
        let parent = put(&store);
        let id = put_behind(&store, parent, child);
        let place = store.write(parent, &KEY, Where::Object, PATIENCE).unwrap().unwrap();
        store.far().unwrap().objects.sync(&[place], PATIENCE).unwrap();
        let place = store.write(id, &child, Where::Log, PATIENCE).unwrap().unwrap();
        drop(store);
        let store = open();
        assert_eq!(store.contains(0, &[KEY, child]).unwrap(), [true; 2]);
        let id = store.state().index.find(0, &child).unwrap();
        assert_eq!(store.state().index.node(id).place, place.0);
        drop(store);
        drop(std::fs::remove_dir_all(&folder));
    }

    #[test]
    fn a_block_that_was_removed_before_it_was_written_is_not_found_again() {
        let folder = std::env::temp_dir().join(format!("kvik-store-written-{}", std::process::id()));
        for again in [false, true] {
            drop(std::fs::remove_dir_all(&folder));
            let store = open(&folder);
            let id = put(&store);
            write(&store, id, |log| {
                store.state().forget(id);
                let said = log.remove(&KEY, PATIENCE).unwrap();
                log.sync(&[said], PATIENCE).unwrap();
                if again {
                    put(&store);
                }
            });
            drop(store);
            // One that was put again meanwhile is there: what was written is it.
            assert_eq!(open(&folder).contains(0, &[KEY]).unwrap(), [again]);
        }
        drop(std::fs::remove_dir_all(&folder));
    }
}
