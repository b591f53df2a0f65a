//! All blocks that a store knows, by key: where each of them lies, and which comes before it.
//!
//! Invariants:
//! - A block names its parent while it is here, and the parent is here. Whoever takes a block out takes out all that
//!   come after it first ([`Index::family`]).
//! - An id is not used again while its block is here. Nothing but the table of keys grows with the number of blocks
//!   beyond [`Node`], of which there is one a block.
//! - A namespace's blocks are counted from their coming to the release of their numbers: while there is one, the number of
//!   the namespace means that one.

use crate::figures::Where;
use crate::{BlockKey, Place};
use hashbrown::HashTable;

/// A block's number in the index.
pub(crate) type Id = u32;
/// No block.
pub(crate) const NONE: Id = u32::MAX;
/// No slab: the block is not in memory.
pub(crate) const NO_SLAB: u16 = u16::MAX;
/// Blocks that are added to the table at once.
const GROWTH: usize = 1 << 14;

/// Where a block is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Life {
    /// There is none of this number.
    Free,
    /// Its bytes are being brought by a put.
    Filling,
    /// It lies in memory.
    Resident,
    /// It lies in a tier below memory only.
    Below,
    /// It lies below, and is being brought into memory.
    Loading,
    /// It was taken out, and somebody still reads it.
    Leaving,
}

impl Life {
    /// Those of a block that is in memory, below, or on its way from there.
    pub const THERE: [Life; 3] = [Life::Resident, Life::Below, Life::Loading];
}

/// What is kept of a block.
#[derive(Debug, Clone)]
pub(crate) struct Node {
    pub key: BlockKey,
    /// The checksum of its bytes, see [`crate::Entry::sum`].
    pub sum: u64,
    /// Where it lies in the log, packed; 0 where it does not.
    pub place: u64,
    /// Where it lies in the object store, packed; 0 where it does not.
    pub object: u64,
    /// Its slot in the slab.
    pub slot: u32,
    pub slab: u16,
    pub namespace: u16,
    /// Who reads it.
    pub pins: u32,
    /// Until when it is to stay, in seconds of the store's clock; 0 for not longer than any other.
    pub kept_until: u32,
    /// When it was stored or last read, in seconds of the store's clock.
    pub used_at: u32,
    pub life: Life,
    /// It was asked for since the tier below last looked for room.
    pub used: bool,
    /// The policy knows that it is in memory.
    pub listed: bool,
    /// It lies below, and could not be read there when it was asked for last.
    pub failed: bool,
    parent: Id,
    child: Id,
    next: Id,
    prev: Id,
}

impl Node {
    /// That of no block.
    const VACANT: Node = Node {
        key: BlockKey([0; 32]),
        sum: 0,
        place: 0,
        object: 0,
        slot: 0,
        slab: NO_SLAB,
        namespace: 0,
        pins: 0,
        kept_until: 0,
        used_at: 0,
        life: Life::Free,
        used: false,
        listed: false,
        failed: false,
        parent: NONE,
        child: NONE,
        next: NONE,
        prev: NONE,
    };

    /// Where it lies in a tier below memory; 0 where it does not.
    pub fn place_mut(&mut self, tier: Where) -> &mut u64 {
        if tier == Where::Object { &mut self.object } else { &mut self.place }
    }

    /// The same, if it lies there.
    pub fn place_in(&self, tier: Where) -> Option<Place> {
        let place = if tier == Where::Object { self.object } else { self.place };
        (place != 0).then_some(Place(place))
    }

    /// Whether only the object store has it, or it is on its way from there.
    pub fn is_far(&self) -> bool {
        matches!(self.life, Life::Below | Life::Loading) && self.place == 0 && self.object != 0
    }

    /// Whether it is to lie below, and no tier has it.
    pub fn is_lost(&self) -> bool {
        self.life == Life::Below && self.place == 0 && self.object == 0
    }
}

/// See the module's text.
#[derive(Default)]
pub(crate) struct Index {
    nodes: Vec<Vec<Node>>,
    keys: HashTable<Id>,
    free: Id,
    len: usize,
    /// The numbers that are taken for blocks of each namespace.
    of_namespaces: Vec<u32>,
}

/// The keys are a hash already.
fn hash(key: &BlockKey) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&key.0[..8]);
    u64::from_le_bytes(word)
}

impl Index {
    pub fn new() -> Index {
        Index { free: NONE, ..Index::default() }
    }

    /// Blocks that are known.
    pub fn len(&self) -> usize {
        self.len
    }

    /// The numbers that are taken for blocks of a namespace, also of those that were taken out and are read still.
    pub fn taken_for(&self, namespace: u16) -> u32 {
        self.of_namespaces.get(usize::from(namespace)).copied().unwrap_or(0)
    }

    pub fn node(&self, id: Id) -> &Node {
        &self.nodes[id as usize / GROWTH][id as usize % GROWTH]
    }

    pub fn node_mut(&mut self, id: Id) -> &mut Node {
        &mut self.nodes[id as usize / GROWTH][id as usize % GROWTH]
    }

    /// The block of a namespace with this key. The same key in another namespace is another block: whoever says that
    /// of a block gives or takes nothing of it.
    pub fn find(&self, namespace: u16, key: &BlockKey) -> Option<Id> {
        let same = |id: &Id| {
            let node = self.node(*id);
            node.key == *key && node.namespace == namespace
        };
        self.keys.find(hash(key), same).copied()
    }

    /// A block with this key, of whatever namespace.
    pub fn find_any(&self, key: &BlockKey) -> Option<Id> {
        self.keys.find(hash(key), |id| self.node(*id).key == *key).copied()
    }

    /// Enters a block, whose key its namespace does not have, after its parent.
    pub fn add(&mut self, key: BlockKey, parent: Option<Id>, namespace: u16, life: Life) -> Id {
        let id = self.number();
        let next = match parent {
            Some(parent) => std::mem::replace(&mut self.node_mut(parent).child, id),
            None => NONE,
        };
        if next != NONE {
            self.node_mut(next).prev = id;
        }
        *self.node_mut(id) =
            Node { key, namespace, life, parent: parent.unwrap_or(NONE), next, ..Node::VACANT };
        let Index { keys, nodes, .. } = self;
        let rehash = |id: &Id| hash(&nodes[*id as usize / GROWTH][*id as usize % GROWTH].key);
        keys.insert_unique(hash(&key), id, rehash);
        self.len += 1;
        let at = usize::from(namespace);
        self.of_namespaces.resize(self.of_namespaces.len().max(at + 1), 0);
        self.of_namespaces[at] += 1;
        id
    }

    /// A number that is free.
    fn number(&mut self) -> Id {
        if self.free == NONE {
            let first = (self.nodes.len() * GROWTH) as Id;
            let mut more = vec![Node::VACANT; GROWTH];
            for (at, node) in more.iter_mut().enumerate().take(GROWTH - 1) {
                node.next = first + at as Id + 1;
            }
            self.nodes.push(more);
            self.free = first;
        }
        let id = self.free;
        self.free = self.node(id).next;
        id
    }

    /// The block before one.
    pub fn parent(&self, id: Id) -> Option<Id> {
        Some(self.node(id).parent).filter(|parent| *parent != NONE)
    }

    /// All that come before the block with this key, up to the last one that `ends` them, or from the first one of its
    /// prompt on.
    pub fn before(
        &self,
        namespace: u16,
        key: Option<&BlockKey>,
        ends: impl Fn(&Id) -> bool,
    ) -> Vec<BlockKey> {
        let id = key.and_then(|key| self.find(namespace, key));
        let before = std::iter::successors(id, |id| self.parent(*id)).skip(1).take_while(|id| !ends(id));
        let mut keys: Vec<BlockKey> = before.map(|id| self.node(id).key).collect();
        keys.reverse();
        keys
    }

    /// Whether blocks come after it.
    pub fn has_children(&self, id: Id) -> bool {
        self.node(id).child != NONE
    }

    /// A block and all that come after it, each behind those that come after it.
    pub fn family(&self, id: Id) -> Vec<Id> {
        let mut all = vec![id];
        let mut at = 0;
        while at < all.len() {
            let mut child = self.node(all[at]).child;
            while child != NONE {
                all.push(child);
                child = self.node(child).next;
            }
            at += 1;
        }
        all.reverse();
        all
    }

    /// Takes a block out that nothing comes after: its key is unknown from now on. Its number stays taken until
    /// [`Index::release`].
    pub fn take_out(&mut self, id: Id) {
        debug_assert!(!self.has_children(id), "blocks come after it");
        let Node { key, parent, next, prev, .. } = *self.node(id);
        if prev != NONE {
            self.node_mut(prev).next = next;
        } else if parent != NONE {
            self.node_mut(parent).child = next;
        }
        if next != NONE {
            self.node_mut(next).prev = prev;
        }
        let Index { keys, .. } = self;
        if let Ok(found) = keys.find_entry(hash(&key), |other| *other == id) {
            found.remove();
        }
        let node = self.node_mut(id);
        (node.parent, node.next, node.prev, node.life) = (NONE, NONE, NONE, Life::Leaving);
        self.len -= 1;
    }

    /// The number of a block that was taken out is free.
    pub fn release(&mut self, id: Id) {
        debug_assert!(self.node(id).life == Life::Leaving);
        let free = std::mem::replace(&mut self.free, id);
        let node = self.node_mut(id);
        (node.life, node.next) = (Life::Free, free);
        let namespace = usize::from(node.namespace);
        self.of_namespaces[namespace] -= 1;
    }

    /// The number above all that were given so far.
    pub fn end(&self) -> Id {
        (self.nodes.len() * GROWTH) as Id
    }

    /// Every block that is here.
    pub fn ids(&self) -> impl Iterator<Item = Id> + '_ {
        self.keys.iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn key(number: u64) -> BlockKey {
        BlockKey(blake3::hash(&number.to_le_bytes()).into())
    }

    #[test]
    fn a_node_is_small() {
        assert!(size_of::<Node>() <= 96, "{}", size_of::<Node>());
    }

    /// Against a map of parents: random trees that grow and lose whole branches.
    #[test]
    fn it_finds_what_was_added_and_not_taken_out() {
        let seed: u64 = std::env::var("KVIK_SEED").map_or(7, |seed| seed.parse().unwrap());
        println!("KVIK_SEED={seed}");
        let mut state = seed;
        let mut random = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        let mut index = Index::new();
        let mut model: HashMap<u64, Option<u64>> = HashMap::new();
        let mut known: Vec<u64> = Vec::new();
        for number in 0..40_000 {
            if random(8) > 0 || known.is_empty() {
                let parent =
                    (random(10) > 0 && !known.is_empty()).then(|| known[random(known.len() as u64) as usize]);
                let before = parent.and_then(|parent| index.find(3, &key(parent)));
                let parent = parent.filter(|_| before.is_some());
                let id = index.add(key(number), before, 3, Life::Resident);
                assert_eq!(index.parent(id), before);
                model.insert(number, parent);
                known.push(number);
            } else {
                let root = known.swap_remove(random(known.len() as u64) as usize);
                let Some(id) = index.find(3, &key(root)) else {
                    assert!(!model.contains_key(&root));
                    continue;
                };
                let family = index.family(id);
                assert_eq!(family.last(), Some(&id));
                for one in family {
                    index.take_out(one);
                    index.release(one);
                }
                let mut gone = vec![root];
                while let Some(one) = gone.pop() {
                    model.remove(&one);
                    gone.extend(
                        model.iter().filter(|(_, parent)| **parent == Some(one)).map(|(child, _)| *child),
                    );
                }
            }
        }
        assert_eq!(index.len(), model.len());
        assert_eq!(index.ids().count(), model.len());
        for (number, parent) in &model {
            let id = index.find(3, &key(*number)).unwrap();
            assert_eq!(index.parent(id).map(|parent| index.node(parent).key), parent.map(key));
        }
    }
}
