//! From the tier below to memory: several blocks at once.
//!
//! Invariants:
//! - What comes back is published only after the tier has compared all of it.
//! - Threads of their own read, and who asks waits for them until its deadline. So a disk that stops answering (a server
//!   of NFS that is gone, say) keeps nobody from what is in memory: a call to it that hangs cannot be ended.

use crate::below::{Below, Far};
use crate::crew::Work;
use crate::figures::Where;
use crate::index::Life;
use crate::state::Filling;
use crate::store::Store;
use crate::sync::lock;
use crate::tier::{Identity, Place, Tier};
use crate::{BlockKey, entry};
use kvik_core::{Code, Error, Result};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Bytes that are brought back before the first of them are lent, at least one block.
const WINDOW: u64 = 16 << 20;

/// What became of a block that was to be in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Brought {
    Missing,
    Here,
    /// It came from below, for this caller or for another one that it has waited for.
    Loaded,
}

/// Blocks that are brought back for one caller.
struct Window {
    namespace: u16,
    keys: Vec<BlockKey>,
    until: Instant,
    pieces: Mutex<Pieces>,
    /// The last of them has ended.
    done: Condvar,
}

struct Pieces {
    next: usize,
    /// What comes after a block that is missing is of no use.
    end: usize,
    running: usize,
    found: Vec<Brought>,
    failed: Option<Error>,
}

impl Work<Store> for Window {
    fn step(&self, store: &Store) {
        let at = {
            let mut pieces = lock(&self.pieces);
            if pieces.next >= pieces.end {
                return;
            }
            pieces.running += 1;
            pieces.next += 1;
            pieces.next - 1
        };
        let brought = store.bring_one(self.namespace, &self.keys[at], self.until);
        let mut pieces = lock(&self.pieces);
        pieces.running -= 1;
        match brought {
            Ok(Brought::Missing) => pieces.end = pieces.end.min(at),
            Ok(found) => pieces.found[at] = found,
            Err(error) => (pieces.end, pieces.failed) = (pieces.end.min(at), Some(error)),
        }
        if pieces.next >= pieces.end && pieces.running == 0 {
            self.done.notify_all();
        }
    }

    fn has_more(&self) -> bool {
        let pieces = lock(&self.pieces);
        pieces.next < pieces.end
    }
}

impl Window {
    fn new(namespace: u16, keys: &[BlockKey], until: Instant) -> Window {
        let (keys, found) = (keys.to_vec(), vec![Brought::Missing; keys.len()]);
        let pieces = Pieces { next: 0, end: keys.len(), running: 0, found, failed: None };
        Window { namespace, keys, until, pieces: Mutex::new(pieces), done: Condvar::new() }
    }

    /// Waits until none is being read, while there is time and the disk gives something; how many are in memory, from the
    /// first one on, and how many of them came from below.
    fn wait(&self, below: &Below) -> Result<(usize, usize)> {
        let mut pieces = lock(&self.pieces);
        while pieces.next < pieces.end || pieces.running > 0 {
            let left = self.until.saturating_duration_since(Instant::now()).min(below.pulse.left());
            if left.is_zero() {
                // Nobody begins another one.
                pieces.end = pieces.end.min(pieces.next);
                if pieces.running > 0 {
                    log::warn!("blocks in the log in {} do not come in time: a miss", below.log.name());
                }
                break;
            }
            pieces = self.done.wait_timeout(pieces, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        let here = || pieces.found.iter().take_while(|found| **found != Brought::Missing);
        let counts = (here().count(), here().filter(|found| **found == Brought::Loaded).count());
        pieces.failed.take().map_or(Ok(counts), Err)
    }
}

/// Blocks of so many bytes that are brought back at once into a memory of this capacity.
pub(crate) fn most(capacity: u64, bytes: u64) -> usize {
    (WINDOW.min(capacity / 4) / bytes).max(1) as usize
}

impl Store {
    /// Brings blocks back that lie in the log, from the first key on, as many as make a window. How many of the keys are in
    /// memory then, from the first one on, and how many of them came from below. What another caller is bringing is
    /// waited for.
    ///
    /// # Errors
    /// The machine has no memory.
    pub fn bring(&self, namespace: u16, keys: &[BlockKey], until: Instant) -> Result<(usize, usize)> {
        let (count, missing) = self.window(namespace, keys);
        if missing == 0 {
            return Ok((count, 0));
        }
        let Some(below) = self.below() else { return Ok((0, 0)) };
        let window = Arc::new(Window::new(namespace, &keys[..count], until));
        if !below.pulse.left().is_zero() {
            below.readers.offer(window.clone());
        }
        window.wait(below)
    }

    /// As [`Store::bring`], from whichever tier the first block lies in.
    ///
    /// # Errors
    /// As there.
    pub fn bring_any(&self, namespace: u16, keys: &[BlockKey], until: Instant) -> Result<(usize, usize)> {
        let only = |far: &&Far| keys.first().is_some_and(|first| far.has_only(self, namespace, first));
        match self.far().filter(only) {
            Some(far) => far.bring(self, namespace, keys, until),
            None => self.bring(namespace, keys, until),
        }
    }

    /// How many keys make a window, and how many of them are not in memory. What a window brings must not drive out
    /// what it brought before.
    fn window(&self, namespace: u16, keys: &[BlockKey]) -> (usize, usize) {
        let state = self.state();
        let most = most(state.slabs.capacity(), state.tenants.shape(namespace).bytes());
        let (mut count, mut missing) = (0, 0);
        while let Some(id) = keys.get(count).and_then(|key| state.index.find(namespace, key))
            && missing < most
            && !state.index.node(id).is_far()
        {
            count += 1;
            missing += usize::from(state.index.node(id).life != Life::Resident);
        }
        (count, missing)
    }

    fn bring_one(&self, namespace: u16, key: &BlockKey, until: Instant) -> Result<Brought> {
        let mut state = self.state();
        let mut waited = false;
        loop {
            let Some(id) = state.index.find(namespace, key) else { return Ok(Brought::Missing) };
            let place = state.index.node(id).place;
            // One whose read hangs is a miss, whatever else the disk gives.
            let left = self.below().map_or(Duration::ZERO, |below| below.pulse.left_of(place));
            match state.index.node(id).life {
                // Somebody else has loaded it.
                Life::Resident if waited => return Ok(Brought::Loaded),
                Life::Resident => return Ok(Brought::Here),
                Life::Below if place != 0 && !left.is_zero() => {
                    let (identity, place) = (state.tenants.identity(&state.index, id), Place(place));
                    let Ok(filling) = state.begin(id, Life::Loading)? else { return Ok(Brought::Missing) };
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
                Life::Loading
                    if !state.index.node(id).is_far() && !left.is_zero() && Instant::now() < until =>
                {
                    state.figures.waits += u64::from(!std::mem::replace(&mut waited, true));
                    state = self.wait(state, until.min(Instant::now() + left));
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
            (Some(below), Some((memory, offset))) => {
                let read = below.pulse.begin(place.0);
                let loaded = below.log.load(place, identity, &memory, offset as usize);
                below.pulse.end(read);
                loaded
            }
            _ => Err(crate::slab_gone()),
        };
        let took = began.elapsed();
        if let Ok(Some(_)) = loaded {
            self.latencies().load.add(took);
        }
        if self.note_loaded(filling, Where::Log, place, identity, loaded) {
            Brought::Loaded
        } else {
            Brought::Missing
        }
    }

    /// Enters what became of a block that was read from a tier below; whether it is in memory now.
    pub fn note_loaded(
        &self,
        filling: Filling,
        tier: Where,
        place: Place,
        identity: &Identity,
        loaded: Result<Option<Box<[u64]>>>,
    ) -> bool {
        let mut state = self.state();
        if state.was_overtaken(&filling) {
            return false;
        }
        let here = match loaded {
            Ok(Some(sums)) => {
                *state.counts.loaded_from(tier) += 1;
                let id = filling.id;
                let published = state.publish(filling, entry::sum_of(&sums));
                if published {
                    state.list(id);
                }
                published
            }
            Ok(None) => {
                state.abandon(filling);
                // Its tier has it no longer. Else it would be known and be missed for ever, and count as durable.
                if let Some(id) = state.at(identity, tier, place) {
                    state.lose_place(id, tier);
                }
                false
            }
            Err(error) => {
                let wrong = error.code == Code::ChecksumMismatch;
                state.counts.corrupt += u64::from(wrong);
                let corrupt = state.counts.corrupt;
                // All wrong blocks are counted, and ever fewer are told of: a disk that decays must not fill the log.
                // Of an object store that fails its breaker tells once.
                let told = if wrong { corrupt.is_power_of_two() } else { tier == Where::Log };
                let level = if told { log::Level::Warn } else { log::Level::Debug };
                let (key, tier_name) = (identity.key, tier.name());
                log::log!(
                    level,
                    "block {key} is not served from the tier {tier_name}: {error} ({corrupt} wrong blocks so far)"
                );
                // Until it comes it may be put again. A tier that is left alone for now has the block still.
                state.index.node_mut(filling.id).failed = !wrong && error.code != Code::StoreUnavailable;
                state.abandon(filling);
                // Where it was copied to meanwhile it is another record, of which nothing is known yet.
                if wrong && let Some(id) = state.at(identity, tier, place) {
                    state.lose_place(id, tier);
                }
                false
            }
        };
        drop(state);
        self.note_change();
        here
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pulse::tests::age;
    use crate::write::tests::{KEY, open, put, write};

    #[test]
    fn a_block_whose_segment_is_gone_is_not_known_any_more() {
        let folder = std::env::temp_dir().join(format!("kvik-store-gone-{}", std::process::id()));
        drop(std::fs::remove_dir_all(&folder));
        let store = open(&folder);
        write(&store, put(&store), |_| {});
        drop(store);
        let store = open(&folder);
        let id = store.state().index.find(0, &KEY).unwrap();
        // A place in a segment that was removed, which nobody told.
        store.state().index.node_mut(id).place = 99 << 32;
        let until = Instant::now() + Duration::from_secs(60);
        assert_eq!(store.bring_one(0, &KEY, until).unwrap(), Brought::Missing);
        assert_eq!(store.contains(0, &[KEY]).unwrap(), [false]);
        // So a put writes it anew.
        write(&store, put(&store), |_| {});
        drop(store);
        assert_eq!(open(&folder).contains(0, &[KEY]).unwrap(), [true]);
        drop(std::fs::remove_dir_all(&folder));
    }

    #[test]
    fn a_block_whose_read_hangs_is_a_miss_and_may_be_put_again() {
        let folder = std::env::temp_dir().join(format!("kvik-store-hangs-{}", std::process::id()));
        drop(std::fs::remove_dir_all(&folder));
        let store = open(&folder);
        write(&store, put(&store), |_| {});
        drop(store);
        let store = open(&folder);
        let id = store.state().index.find(0, &KEY).unwrap();
        let place = store.state().index.node(id).place;
        let pulse = &store.below().unwrap().pulse;
        let (hangs, other) = (pulse.begin(place), pulse.begin(place + 1));
        pulse.end(other);
        age(pulse);
        assert!(!pulse.left().is_zero(), "the disk gives something");
        let until = Instant::now() + Duration::from_secs(60);
        assert_eq!(store.bring_one(0, &KEY, until).unwrap(), Brought::Missing);
        pulse.end(hangs);
        assert_eq!(store.bring_one(0, &KEY, until).unwrap(), Brought::Loaded);
        drop(store);
        drop(std::fs::remove_dir_all(&folder));
    }
}
