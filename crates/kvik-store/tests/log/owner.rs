//! An index, as small as it can be.

use kvik_store::{BlockKey, Found, Identity, NamespaceId, Place, TierOwner};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

#[derive(Default)]
pub struct Known {
    pub blocks: HashMap<BlockKey, (Identity, Place)>,
    pub namespaces: HashMap<NamespaceId, Vec<u8>>,
    /// Blocks that were dropped to make room.
    pub dropped: Vec<BlockKey>,
    pub moved: u64,
}

/// Whether a block is worth keeping.
pub type Keep = Box<dyn Fn(&Known, &BlockKey) -> bool + Send + Sync>;

pub struct Index {
    known: Mutex<Known>,
    keep: Keep,
    /// Called with each block that was dropped.
    on_drop: Box<dyn Fn(&BlockKey) + Send + Sync>,
}

impl Index {
    pub fn keeping(keep: impl Fn(&BlockKey) -> bool + Send + Sync + 'static) -> Arc<Index> {
        Index::telling(move |_, key| keep(key), |_| ())
    }

    pub fn telling(
        keep: impl Fn(&Known, &BlockKey) -> bool + Send + Sync + 'static,
        on_drop: impl Fn(&BlockKey) + Send + Sync + 'static,
    ) -> Arc<Index> {
        Arc::new(Index { known: Mutex::default(), keep: Box::new(keep), on_drop: Box::new(on_drop) })
    }

    pub fn all() -> Arc<Index> {
        Index::keeping(|_| true)
    }

    pub fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap()
    }

    pub fn put(&self, identity: Identity, place: Place) {
        self.known().blocks.insert(identity.key, (identity, place));
    }

    pub fn forget(&self, key: &BlockKey) {
        self.known().blocks.remove(key);
    }

    pub fn find(&self, key: &BlockKey) -> Option<(Identity, Place)> {
        self.known().blocks.get(key).copied()
    }
}

impl TierOwner for Index {
    fn found(&self, found: Found<'_>) {
        let mut known = self.known();
        match found {
            Found::Namespace(id, meaning) => drop(known.namespaces.insert(id, meaning.to_vec())),
            Found::Block(identity, place) => {
                assert!(known.namespaces.contains_key(&identity.namespace), "a block of nobody");
                known.blocks.insert(identity.key, (identity, place));
            }
            Found::Removed(key) => drop(known.blocks.remove(&key)),
            Found::NamespaceRemoved(id) => {
                known.namespaces.remove(&id);
                known.blocks.retain(|_, (identity, _)| identity.namespace != id);
            }
        }
    }

    fn keep(&self, identity: &Identity, place: Place) -> bool {
        let known = self.known();
        known.blocks.get(&identity.key) == Some(&(*identity, place)) && (self.keep)(&known, &identity.key)
    }

    fn knows(&self, identity: &Identity, place: Place) -> bool {
        self.find(&identity.key) == Some((*identity, place))
    }

    fn moved(&self, identity: &Identity, from: Place, to: Place) {
        let mut known = self.known();
        known.moved += 1;
        if let Some((_, place)) = known.blocks.get_mut(&identity.key).filter(|(_, place)| *place == from) {
            *place = to;
        }
    }

    fn gone(&self, from: Place, to: Place) {
        let mut known = self.known();
        let gone: Vec<BlockKey> =
            known.blocks.extract_if(|_, (_, at)| (from..to).contains(at)).map(|(key, _)| key).collect();
        known.dropped.extend(&gone);
        drop(known);
        gone.iter().for_each(&self.on_drop);
    }

    fn dropped(&self, identity: &Identity, place: Place) {
        let mut known = self.known();
        if known.blocks.get(&identity.key).is_some_and(|(_, at)| *at == place) {
            known.blocks.remove(&identity.key);
            known.dropped.push(identity.key);
            drop(known);
            (self.on_drop)(&identity.key);
        }
    }
}
