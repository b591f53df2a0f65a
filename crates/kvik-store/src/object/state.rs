//! What a tier of objects knows of its objects, and what its threads have in common.
//!
//! Invariants:
//! - A number is given to one batch. An object is never written again: what a place names stays what it was, or goes.
//! - A place is given out only when its bytes are in a batch; they are read from there until their object is stored.
//! - An object with removals goes only when no older one is left, or when a later one that is stored holds them too: else what
//!   they removed could be found again.

use super::batch::{Batch, Finished};
use super::breaker::Breaker;
use super::options::ObjectOptions;
use super::said::Said;
use crate::NamespaceId;
use crate::log::format::Seed;
use crate::log::place::position;
use crate::tier::{Place, TierOwner};
use kvik_core::{Code, Error, Result};
use object_store::ObjectStore;
use object_store::path::Path;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use tokio::sync::Notify;

/// Batches that are whole and wait to be sent, with the one that is being sent.
pub(super) const QUEUED: usize = 3;

/// An object that is stored.
#[derive(Debug, Clone, Copy)]
pub(super) struct Object {
    pub seed: Seed,
    pub size: u64,
    /// Blocks of it that somebody knows.
    pub live: u32,
    /// Removals in it, until a later one holds them too.
    pub removals: u32,
}

/// How far the tier is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// Nothing was listed yet: which numbers are taken is not known.
    Listing,
    /// Objects were listed, and their ends are read.
    Reading,
    /// All that was there is known.
    Open,
}

/// What the lock of a tier is over.
pub(super) struct State {
    pub stage: Stage,
    pub next_number: u32,
    /// The batch that is being filled.
    pub batch: Option<Batch>,
    /// Those that are whole, the oldest first.
    pub whole: VecDeque<Finished>,
    /// Objects that are stored, by their numbers.
    pub objects: BTreeMap<u32, Object>,
    /// Bytes of all of them.
    pub bytes: u64,
    /// Blocks of batches that are not stored yet, of which nobody knows any more.
    pub freed: HashMap<u32, u32>,
    /// Which removals objects hold.
    pub said: Said,
    /// Who waits for what was gathered: it is sent though it is little.
    pub send_now: bool,
    /// Batches that will not be stored, for those who wait for them.
    pub given_up: HashSet<u32>,
    /// Writing has failed, and is not tried again before this.
    pub send_again: Option<Instant>,
    /// Removing has failed, and is not tried again before this.
    pub remove_again: Option<Instant>,
    /// Another server has the prefix now: nothing is written or removed any more.
    pub taken_over: bool,
    pub closed: bool,
}

impl State {
    pub fn new() -> State {
        State {
            stage: Stage::Listing,
            next_number: 1,
            batch: None,
            whole: VecDeque::new(),
            objects: BTreeMap::new(),
            bytes: 0,
            freed: HashMap::new(),
            said: Said::default(),
            send_now: false,
            given_up: HashSet::new(),
            send_again: None,
            remove_again: None,
            taken_over: false,
            closed: false,
        }
    }

    /// Bytes that are gathered or wait, and are not stored.
    pub fn unsent(&self) -> u64 {
        let whole: usize = self.whole.iter().map(|batch| batch.bytes.len()).sum();
        (whole + self.batch.as_ref().map_or(0, |batch| batch.bytes.len())) as u64
    }

    /// The bytes of a place that are not stored yet: all of its batch.
    pub fn buffered(&self, number: u32) -> Option<(Seed, &[u8])> {
        let filling = self.batch.iter().find(|batch| batch.number == number);
        let filling = filling.map(|batch| (batch.seed, &batch.bytes[..]));
        let mut whole = self.whole.iter().filter(|batch| batch.number == number);
        filling.or_else(|| whole.next().map(|batch| (batch.seed, &batch.bytes[..])))
    }

    /// Whether the object of this number has its end before it.
    pub fn is_unsent(&self, number: u32) -> bool {
        self.buffered(number).is_some()
    }

    /// Blocks of which nobody knows any more. What they are of goes when none is left.
    pub fn free(&mut self, places: &[Place]) {
        for place in places {
            let number = position(*place).0;
            if let Some(object) = self.objects.get_mut(&number) {
                object.live = object.live.saturating_sub(1);
            } else if self.is_unsent(number) {
                *self.freed.entry(number).or_default() += 1;
            }
        }
    }

    /// Objects that may go since nothing in them counts.
    pub fn idle(&self) -> Vec<u32> {
        let oldest = self.objects.first_key_value().map(|(number, _)| *number);
        let may_go = |number: u32, object: &Object| {
            object.live == 0 && (object.removals == 0 || oldest == Some(number))
        };
        self.objects.iter().filter(|(number, object)| may_go(**number, object)).map(|(n, _)| *n).collect()
    }
}

/// What was counted since the tier was opened.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub stored: AtomicU64,
    pub loaded: AtomicU64,
    pub dropped: AtomicU64,
    pub quarantined: AtomicU64,
    pub failures: AtomicU64,
    /// Requests to the store: writes, reads, lists and removals.
    pub puts: AtomicU64,
    pub gets: AtomicU64,
    pub lists: AtomicU64,
    pub deletes: AtomicU64,
    /// Bytes of all of them, with what is around blocks.
    pub sent: AtomicU64,
    pub received: AtomicU64,
}

/// Adds to a counter, which orders nothing.
pub(super) fn count(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Ordering::Relaxed);
}

/// A tier of objects, as its threads see it.
pub(super) struct Shared {
    pub store: Arc<dyn ObjectStore>,
    pub prefix: Path,
    pub name: String,
    pub owner: Arc<dyn TierOwner>,
    pub options: ObjectOptions,
    pub state: Mutex<State>,
    /// Something was listed, stored or given up.
    pub progress: Condvar,
    /// There is something to do for the thread that sends.
    pub work: Notify,
    /// The tier is closed: what is left is sent within a time.
    pub closing: Notify,
    pub breaker: Breaker,
    /// What namespaces mean.
    pub meanings: Mutex<HashMap<NamespaceId, Arc<[u8]>>>,
    pub counters: Counters,
    /// Who this server is among those that may have had the prefix.
    pub id: [u8; 16],
}

impl Shared {
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn meaning(&self, id: &NamespaceId) -> Option<Arc<[u8]>> {
        self.meanings.lock().unwrap_or_else(PoisonError::into_inner).get(id).cloned()
    }

    /// The name of an object.
    pub fn path(&self, number: u32) -> Path {
        self.prefix.clone().join(format!("{number:010}.kvik"))
    }

    /// The name of the object that says who has the prefix.
    pub fn owner_path(&self) -> Path {
        self.prefix.clone().join("owner")
    }

    /// Waits for progress until `by`.
    ///
    /// # Errors
    /// `DeadlineExceeded` with this text.
    pub fn wait<'a>(
        &self,
        state: MutexGuard<'a, State>,
        by: Instant,
        what: &str,
    ) -> Result<MutexGuard<'a, State>> {
        let left = by.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let text = format!("the object store at {}: {what}; look whether it answers", self.name);
            return Err(Error::new(Code::DeadlineExceeded, text));
        }
        Ok(self.progress.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0)
    }

    /// A request has failed: counted, and told to the breaker.
    pub fn failed(&self, what: &str, error: &dyn std::fmt::Display) -> Error {
        count(&self.counters.failures, 1);
        let text = format!("{what} at {}: {error}", self.name);
        match self.breaker.failed() {
            Some(time) => log::warn!("{text}; it is left alone for {} s", time.as_secs()),
            None => log::debug!("{text}"),
        }
        Error::new(Code::StorageFailed, text)
    }

    /// Why nothing can be written, if nothing can.
    ///
    /// # Errors
    /// `StorageFailed`.
    pub fn check_writable(&self, state: &State) -> Result<()> {
        let text = if state.closed {
            "the object store was closed".to_owned()
        } else if state.taken_over {
            format!(
                "another server has taken over {}: give each server a prefix of its own, and start this one again",
                self.name
            )
        } else {
            return Ok(());
        };
        Err(Error::new(Code::StorageFailed, text))
    }
}

/// The number in the name of an object.
pub(super) fn number_in(path: &Path) -> Option<u32> {
    let number = path.filename()?.strip_suffix(".kvik")?;
    (number.len() == 10).then(|| number.parse().ok()).flatten()
}
