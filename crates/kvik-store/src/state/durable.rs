//! Which blocks are known to be durable, so that a durable put need not look at all that come before its own.
//!
//! Invariant: who is here is in the log, and durable, with all that come before it.

use crate::index::{Id, Index};
use crate::{BlockKey, Place};
use std::collections::HashSet;

/// Blocks that are known at a time.
const MOST: usize = 1 << 16;

/// The last blocks of durable puts.
#[derive(Default)]
pub(crate) struct Durable(HashSet<Id>);

impl Durable {
    /// The keys of all before the first one of these in its prompt that may not be durable, and all of these.
    pub fn unknown(&self, index: &Index, namespace: u16, keys: &[BlockKey]) -> Vec<BlockKey> {
        let mut all = index.before(namespace, keys.first(), |id| self.0.contains(id));
        all.extend_from_slice(keys);
        all
    }

    /// These blocks, which [`Durable::unknown`] has given, were made durable at these places.
    pub fn note(&mut self, index: &Index, namespace: u16, blocks: &[(BlockKey, Place)]) {
        let lies = |(key, place): &(BlockKey, Place)| {
            let id = index.find(namespace, key)?;
            (index.node(id).place == place.0).then_some(id)
        };
        let ids: Option<Vec<Id>> = blocks.iter().map(lies).collect();
        let Some((first, last)) = ids.and_then(|ids| Some((*ids.first()?, *ids.last()?))) else { return };
        // All that come before the first one are durable still, unless some block has left the log meanwhile.
        if index.parent(first).is_none_or(|before| self.0.contains(&before)) {
            if self.0.len() >= MOST {
                self.clear();
            }
            self.0.insert(last);
        }
    }

    /// A block goes from the index, and all that come after it do.
    pub fn forget(&mut self, id: Id) {
        self.0.remove(&id);
    }

    /// Some block has left the log: what comes after it is not durable any more.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}
