//! Every session by its number, each under a lock of its own: the traffic of one takes no lock that another's takes.

use crate::session::Session;
use crate::sync::{Arc, Mutex, RwLock};
use std::collections::BTreeMap;
use std::sync::PoisonError;

/// So many that who begins or ends a session seldom meets somebody who looks one up.
const SHARDS: usize = if cfg!(feature = "loom") { 1 } else { 64 };

type Shard<R> = RwLock<BTreeMap<u64, Arc<Mutex<Session<R>>>>>;

/// See the module's text. A shard's lock is the last one that is taken.
pub(crate) struct Sessions<R> {
    shards: Box<[Shard<R>]>,
}

impl<R> Sessions<R> {
    pub fn new() -> Sessions<R> {
        Sessions { shards: (0..SHARDS).map(|_| RwLock::new(BTreeMap::new())).collect() }
    }

    fn shard(&self, id: u64) -> &Shard<R> {
        &self.shards[(id % self.shards.len() as u64) as usize]
    }

    pub fn get(&self, id: u64) -> Option<Arc<Mutex<Session<R>>>> {
        self.shard(id).read().unwrap_or_else(PoisonError::into_inner).get(&id).cloned()
    }

    pub fn insert(&self, id: u64, session: Session<R>) {
        let mut shard = self.shard(id).write().unwrap_or_else(PoisonError::into_inner);
        shard.insert(id, Arc::new(Mutex::new(session)));
    }

    pub fn remove(&self, id: u64) {
        self.shard(id).write().unwrap_or_else(PoisonError::into_inner).remove(&id);
    }

    /// All of them, by their numbers.
    pub fn all(&self) -> Vec<(u64, Arc<Mutex<Session<R>>>)> {
        let mut all = Vec::new();
        for shard in &self.shards {
            let shard = shard.read().unwrap_or_else(PoisonError::into_inner);
            all.extend(shard.iter().map(|(id, session)| (*id, session.clone())));
        }
        all.sort_unstable_by_key(|(id, _)| *id);
        all
    }
}
