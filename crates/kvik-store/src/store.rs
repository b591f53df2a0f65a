//! The store itself: what a server and an embedded store have in common. Who asks is the caller's matter.

use crate::below::{Below, Blocks, Far};
use crate::figures::{Cause, Latencies, Where};
use crate::index::{Id, Life};
use crate::policy::PolicyKind;
use crate::slab::Slabs;
use crate::state::State;
use crate::tenants::{TenantOptions, Tenants};
use crate::tier::Tier;
use crate::{BlockKey, Counts, Log, LogOptions, NamespaceId, ObjectOptions, Shape};
use kvik_core::{Code, Error, Result};
use kvik_engine::Engine;
use std::path::PathBuf;
use std::sync::{Arc, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// The smallest memory of a store.
const LEAST: u64 = 1 << 20;
/// The keys of one request, at most.
pub const MAX_KEYS: usize = 1024;

/// What a store is made with.
#[derive(Debug, Clone)]
pub struct StoreOptions {
    /// Bytes of blocks in memory. Default: 1 GiB.
    pub memory: u64,
    /// Tenants with a quota or regions of their own.
    pub tenants: Vec<TenantOptions>,
    /// Which block makes room for another one. Default: the selector.
    pub policy: PolicyKind,
    /// Where blocks are kept over a restart. Default: nowhere.
    pub log: Option<(PathBuf, LogOptions)>,
    /// An object store below memory and the log. Default: none.
    pub object: Option<ObjectOptions>,
}

impl Default for StoreOptions {
    fn default() -> StoreOptions {
        let (tenants, policy) = (Vec::new(), PolicyKind::default());
        StoreOptions { memory: 1 << 30, tenants, policy, log: None, object: None }
    }
}

/// See the module's text. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Store {
    inner: Arc<Inner>,
}

struct Inner {
    engine: Engine,
    blocks: Arc<Blocks>,
    began: Instant,
    below: Option<Below>,
    far: Option<Far>,
    latencies: Arc<Latencies>,
}

impl Store {
    /// A store whose memory is registered with `engine`.
    ///
    /// # Errors
    /// `InvalidArgument` for options that cannot be used.
    pub fn open(engine: Engine, options: &StoreOptions) -> Result<Store> {
        if options.memory < LEAST {
            let text = format!("a store has at least {LEAST} bytes of memory, not {}", options.memory);
            return Err(Error::new(Code::InvalidArgument, text));
        }
        let slabs = Slabs::new(engine.clone(), options.memory);
        let tenants = Tenants::new(&options.tenants)?;
        let far = options.object.as_ref().map_or(0, |object| object.size);
        let below = options.log.as_ref().map_or(far, |(_, log)| log.size);
        let blocks = Arc::new(Blocks::new(State::new(slabs, tenants, options.policy, below)));
        let log = options.log.as_ref();
        let log = log.map(|(dir, options)| Log::open(dir, options.clone(), blocks.clone())).transpose()?;
        if log.is_some() {
            // The blocks before some may be in the object store only, which is looked through later.
            let left = if options.object.is_none() { blocks.found_all() } else { 0 };
            log::info!("the log has {} blocks", blocks.count());
            if left > 0 {
                log::info!("{left} more in the log are not found any more: the blocks before them are gone");
            }
        }
        let below = log.map(Below::new);
        // Last: what it holds is found in the background, also what the log has of it.
        let far = options.object.as_ref().map(|object| Far::open(object.clone(), &blocks)).transpose()?;
        let (began, latencies) = (Instant::now(), Arc::new(Latencies::new()));
        Ok(Store { inner: Arc::new(Inner { engine, blocks, began, below, far, latencies }) })
    }

    /// The log below memory, and who moves blocks to it and back.
    pub fn below(&self) -> Option<&Below> {
        self.inner.below.as_ref()
    }

    /// The same of the object store.
    pub fn far(&self) -> Option<&Far> {
        self.inner.far.as_ref()
    }

    /// A tier below memory, if there is one.
    pub fn tier(&self, tier: Where) -> Option<&dyn Tier> {
        match tier {
            Where::Memory => None,
            Where::Log => self.below().map(|below| &below.log as &dyn Tier),
            Where::Object => self.far().map(|far| &far.objects as &dyn Tier),
        }
    }

    /// What operations took.
    pub fn latencies(&self) -> &Arc<Latencies> {
        &self.inner.latencies
    }

    /// Waits until some block was published or given up, or it is time.
    pub fn wait<'a>(&self, state: MutexGuard<'a, State>, until: Instant) -> MutexGuard<'a, State> {
        let left = until.saturating_duration_since(Instant::now());
        self.inner.blocks.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Some block was published or given up.
    pub fn note_change(&self) {
        self.inner.blocks.changed.notify_all();
    }

    pub fn engine(&self) -> &Engine {
        &self.inner.engine
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.now(self.inner.blocks.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The same, where nobody else has it.
    pub fn try_state(&self) -> Option<MutexGuard<'_, State>> {
        match self.inner.blocks.state.try_lock() {
            Ok(state) => Some(self.now(state)),
            Err(TryLockError::Poisoned(poisoned)) => Some(self.now(poisoned.into_inner())),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    fn now<'a>(&self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let now = u32::try_from(self.inner.began.elapsed().as_secs()).unwrap_or(u32::MAX);
        if now != state.now() {
            state.set_now(now);
        }
        state
    }

    /// The number of a namespace, see [`Tenants::open`]. Where there are too many, the longest-unused are forgotten for it.
    ///
    /// # Errors
    /// As there; what a tier below says against forgetting any.
    pub fn namespace(&self, id: NamespaceId, tenant: &str, shape: Shape, model: &str) -> Result<u16> {
        let mut unused = {
            let mut state = self.state();
            if !state.tenants.is_full_for(&id) {
                return state.tenants.open(id, tenant, shape, model);
            }
            let kept = state.kept.iter().map(|(_, id)| state.index.node(*id).namespace).collect();
            state.tenants.unused(|namespace| state.index.taken_for(namespace) == 0, &kept)
        };
        // Their blocks go as if they were cleared: none that was removed later may come back after a restart. So also of those
        // without blocks, of which a tier may have some whose parents are gone.
        let (gone, cleared) = self.take_out(|known, _| unused.contains(&known.id));
        let mut state = self.state();
        state.counts.dropped += gone as u64;
        let State { tenants, index, unsaid, .. } = &mut *state;
        unused.retain(|id| !unsaid.have(id));
        tenants.forget(&unused, |namespace| index.taken_for(namespace) == 0);
        if tenants.is_full_for(&id) {
            cleared.map_err(|error| not_forgotten(&id, &error))?;
        }
        tenants.open(id, tenant, shape, model)
    }

    /// Of each key whether the store has its block, whatever comes before it. Nothing is touched.
    ///
    /// # Errors
    /// `InvalidArgument` for no keys, or too many.
    pub fn contains(&self, namespace: u16, keys: &[BlockKey]) -> Result<Vec<bool>> {
        check_keys(keys)?;
        let state = self.state();
        let here = |id: Id| !matches!(state.index.node(id).life, Life::Filling);
        Ok(keys.iter().map(|key| state.index.find(namespace, key).is_some_and(here)).collect())
    }

    /// Where a block is in its life; none of one that is not known.
    pub fn life(&self, namespace: u16, key: &BlockKey) -> Option<Life> {
        let state = self.state();
        state.index.find(namespace, key).map(|id| state.index.node(id).life)
    }

    /// Keeps blocks for so long, whoever else needs room; no time at all lets go of them. How many are kept, from the
    /// first key on: the first that is not in memory, or that would be too much, ends it.
    ///
    /// # Errors
    /// As for [`Store::contains`].
    pub fn keep(&self, namespace: u16, keys: &[BlockKey], time: Duration) -> Result<usize> {
        check_keys(keys)?;
        let mut state = self.state();
        let seconds = u32::try_from(time.as_millis().div_ceil(1000)).unwrap_or(u32::MAX);
        let until = if time.is_zero() { 0 } else { state.now().saturating_add(seconds) };
        let mut keep = |key: &BlockKey| {
            let id = state.index.find(namespace, key);
            id.is_some_and(|id| state.keep(id, until))
        };
        Ok(keys.iter().take_while(|key| keep(key)).count())
    }

    /// What has happened, and what is here now.
    pub fn counts(&self) -> Counts {
        let state = self.state();
        let refused = |cause| state.figures.refused(cause);
        let (orphan, lost) = (refused(Cause::ParentMissing), refused(Cause::Lost));
        Counts {
            blocks: state.index.len() as u64,
            memory_bytes: state.used(),
            memory_taken: state.slabs.taken(),
            refused_orphan: orphan,
            refused_lost: lost,
            refused_room: Cause::ALL.map(refused).iter().sum::<u64>() - orphan - lost,
            ..state.counts.clone()
        }
    }
}

/// There is no room for a namespace, since this keeps others from being forgotten for it.
fn not_forgotten(id: &NamespaceId, error: &Error) -> Error {
    let text = format!(
        "there is no room for namespace {id}: others are forgotten for it once a tier has written down that they are gone, \
         and it has not ({error})"
    );
    Error::new(error.code, text)
}

/// # Errors
/// `InvalidArgument` for no keys, or more than [`MAX_KEYS`].
pub(crate) fn check_keys(keys: &[BlockKey]) -> Result<()> {
    match keys.len() {
        1..=MAX_KEYS => Ok(()),
        count => {
            let text = format!("a request names 1 to {MAX_KEYS} keys, not {count}: divide it");
            Err(Error::new(Code::InvalidArgument, text))
        }
    }
}
