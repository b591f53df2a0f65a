//! Blocks that were found in a tier before the one that they come after: that one was copied to make room, say, and its
//! copy is younger; or it is in the object store only, which is looked through after the log.
//!
//! Invariant: what is said of a block counts for one that waits as for one that is known. A removal takes it, and what
//! waits behind it; what is found of it later is found.

use crate::figures::Where;
use crate::state::State;
use crate::sync::lock;
use crate::tier::{Identity, Place};
use crate::{BlockKey, NamespaceId};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Mutex;

/// A block, and where it was found.
type Block = (Identity, Where, Place);

/// See the module's text.
#[derive(Default)]
pub(crate) struct Early {
    waiting: Mutex<Waiting>,
}

#[derive(Default)]
struct Waiting {
    /// By key, of which each namespace may have one in each tier.
    blocks: HashMap<BlockKey, Vec<Block>>,
    /// The keys of those that come after one; some of them may wait no longer.
    behind: HashMap<BlockKey, Vec<BlockKey>>,
}

impl Waiting {
    fn add(&mut self, parent: BlockKey, block: Block) {
        let (identity, tier, _) = block;
        let same = self.blocks.entry(identity.key).or_default();
        let is_known = |other: &&mut Block| (other.0.namespace, other.1) == (identity.namespace, tier);
        let known = same.iter_mut().find(is_known);
        let after = known.as_ref().and_then(|(other, ..)| other.parent);
        match known {
            Some(known) => *known = block,
            None => same.push(block),
        }
        if after != Some(parent) {
            self.behind.entry(parent).or_default().push(identity.key);
        }
    }

    /// Takes out those that come after a block.
    fn take_behind(&mut self, parent: &BlockKey) -> Vec<Block> {
        let mut all = Vec::new();
        for key in self.behind.remove(parent).unwrap_or_default() {
            self.take(&key, |(identity, ..)| identity.parent == Some(*parent), |one| all.push(one));
        }
        all
    }

    fn take(&mut self, key: &BlockKey, wanted: impl Fn(&Block) -> bool, mut taken: impl FnMut(Block)) {
        if let Some(blocks) = self.blocks.get_mut(key) {
            blocks.extract_if(.., |block| wanted(block)).for_each(&mut taken);
            if blocks.is_empty() {
                self.blocks.remove(key);
            }
        }
    }

    fn retain(&mut self, wanted: impl Fn(&Block) -> bool) {
        self.blocks.retain(|_, blocks| {
            blocks.retain(&wanted);
            !blocks.is_empty()
        });
    }
}

impl Early {
    /// Enters a block that was found, and those that have waited for it.
    pub fn enter(&self, state: &Mutex<State>, block: Block) {
        // What its tier loses meanwhile is either waiting or known.
        let (mut waiting, mut all) = (lock(&self.waiting), vec![block]);
        while let Some(block) = all.pop() {
            let (identity, tier, place) = block;
            if lock(state).found(&identity, tier, place) {
                all.extend(waiting.take_behind(&identity.key));
            } else if let Some(parent) = identity.parent {
                waiting.add(parent, block);
            }
        }
    }

    /// A block was removed, in whatever namespace: it waits no longer, nor does what waits behind it.
    pub fn forget(&self, key: &BlockKey) {
        let mut waiting = lock(&self.waiting);
        waiting.take(key, |_| true, drop);
        let mut gone = vec![*key];
        while let Some(key) = gone.pop() {
            gone.extend(waiting.take_behind(&key).into_iter().map(|(identity, ..)| identity.key));
        }
    }

    /// A namespace was removed: none of its blocks waits any longer.
    pub fn forget_namespace(&self, id: &NamespaceId) {
        lock(&self.waiting).retain(|(identity, ..)| identity.namespace != *id);
    }

    /// What was at this place of a tier is gone.
    pub fn lose(&self, key: &BlockKey, tier: Where, place: Place) {
        lock(&self.waiting).take(key, |(_, in_tier, at)| (*in_tier, *at) == (tier, place), drop);
    }

    /// What was in these places of a tier is gone.
    pub fn lose_places(&self, tier: Where, places: Range<Place>) {
        lock(&self.waiting).retain(|(_, in_tier, at)| *in_tier != tier || !places.contains(at));
    }

    /// All was told: what comes after a block that was not found is nobody's.
    pub fn left(&self) -> impl Iterator<Item = (Where, Place)> + use<> {
        let Waiting { blocks, .. } = std::mem::take(&mut *lock(&self.waiting));
        blocks.into_values().flatten().map(|(_, tier, place)| (tier, place))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::below::{Blocks, Meaning};
    use crate::index::Life;
    use crate::policy::PolicyKind;
    use crate::slab::Slabs;
    use crate::tenants::{Known, Tenants};
    use crate::tier::{Found, TierOwner};
    use crate::{Shape, StoreOptions};
    use kvik_engine::{Config, Engine};

    const SPACES: [NamespaceId; 2] = [NamespaceId([1; 32]), NamespaceId([2; 32])];

    /// What a log tells, each record younger than the one before it.
    struct Told(Blocks, u64);

    fn shape() -> Shape {
        Shape::new(1, 1, 4096).unwrap()
    }

    fn key(number: u8) -> BlockKey {
        BlockKey([number; 32])
    }

    impl Told {
        fn new() -> Told {
            let slabs = Slabs::new(Engine::start(Config::default()).unwrap(), StoreOptions::default().memory);
            let state = State::new(slabs, Tenants::new(&[]).unwrap(), PolicyKind::default(), 1 << 30);
            let told = Told(Blocks::new(state), 0);
            SPACES.into_iter().for_each(|id| told.namespace(id));
            told
        }

        fn namespace(&self, id: NamespaceId) {
            let known = Known { id, shape: shape(), tenant: 0, model: "tiny@1".into() };
            self.0.found(Found::Namespace(id, &Meaning::encode(&known, "one")));
        }

        /// A block of a namespace.
        fn block(&mut self, space: usize, number: u8, parent: u8) {
            self.1 += 1;
            let parent = (parent > 0).then(|| key(parent));
            let identity = Identity { key: key(number), parent, namespace: SPACES[space], shape: shape() };
            self.0.found(Found::Block(identity, Place(self.1)));
        }

        /// What another tier tells.
        fn found(&self, identity: Identity, tier: Where, place: u64) {
            self.0.early.enter(&self.0.state, (identity, tier, Place(place)));
        }

        fn removed(&self, number: u8) {
            self.0.found(Found::Removed(key(number)));
        }

        /// The blocks of a namespace that are known, with their places.
        fn known(&self, space: u16) -> Vec<(u8, u64)> {
            let state = lock(&self.0.state);
            let nodes = state.index.ids().map(|id| state.index.node(id));
            let mut known: Vec<(u8, u64)> = nodes
                .filter(|node| node.namespace == space)
                .map(|node| (node.key.0[0], node.place))
                .collect();
            known.sort_unstable();
            known
        }
    }

    #[test]
    fn what_comes_before_a_block_may_be_found_after_it() {
        let mut told = Told::new();
        told.block(0, 3, 2);
        told.block(0, 2, 1);
        told.block(0, 4, 2);
        // What was stored again lies where it was stored last.
        told.block(0, 3, 2);
        told.block(0, 9, 8);
        assert!(told.known(0).is_empty());
        told.block(0, 1, 0);
        assert_eq!(told.known(0), [(1, 6), (2, 2), (3, 4), (4, 3)]);
        assert_eq!(told.0.found_all(), 1);
    }

    #[test]
    fn what_comes_before_a_block_of_the_log_may_be_in_the_object_store() {
        let mut told = Told::new();
        told.block(0, 3, 2);
        told.block(0, 2, 1);
        told.block(0, 4, 3);
        told.block(0, 5, 1);
        told.block(0, 6, 1);
        let of = |number: u8, parent: Option<u8>| {
            let parent = parent.map(key);
            Identity { key: key(number), parent, namespace: SPACES[0], shape: shape() }
        };
        // The log makes room before that is looked through.
        told.0.dropped(&of(4, Some(3)), Place(3));
        told.0.gone(Place(4), Place(5));
        told.found(of(6, Some(1)), Where::Object, 8);
        told.found(of(1, None), Where::Object, 9);
        assert_eq!(told.known(0), [(1, 0), (2, 2), (3, 1), (6, 5)]);
        assert_eq!(told.0.found_all(), 0);
        let state = lock(&told.0.state);
        assert!(state.index.node(state.index.find(0, &key(6)).unwrap()).object == 8);
    }

    #[test]
    fn a_block_that_was_stored_again_while_it_waits_lies_where_it_was_stored_last() {
        let mut told = Told::new();
        told.block(0, 2, 1);
        {
            let mut state = lock(&told.0.state);
            let first = state.index.add(key(1), None, 0, Life::Below);
            let second = state.index.add(key(2), Some(first), 0, Life::Below);
            state.set_place(second, Where::Log, Place(7));
        }
        let first = Identity { key: key(1), parent: None, namespace: SPACES[0], shape: shape() };
        told.found(first, Where::Object, 9);
        assert_eq!(told.known(0), [(1, 0), (2, 7)]);
    }

    #[test]
    fn a_block_that_was_removed_while_it_waits_is_gone_with_all_behind_it() {
        let mut told = Told::new();
        told.block(0, 2, 1);
        told.block(0, 3, 2);
        told.block(0, 4, 3);
        told.block(0, 5, 1);
        told.removed(2);
        told.block(0, 1, 0);
        assert_eq!(told.known(0), [(1, 5), (5, 4)]);
        // Stored again it is there again, and what came after it is not.
        told.block(0, 2, 1);
        told.block(0, 3, 2);
        assert_eq!(told.known(0), [(1, 5), (2, 6), (3, 7), (5, 4)]);
        assert_eq!(told.0.found_all(), 0);
    }

    #[test]
    fn a_block_that_was_stored_again_after_its_removal_is_found() {
        let mut told = Told::new();
        told.block(0, 2, 1);
        told.removed(2);
        told.block(0, 2, 1);
        // One that is not known itself takes what waits for it.
        told.block(0, 7, 6);
        told.removed(6);
        told.block(0, 6, 0);
        told.block(0, 1, 0);
        assert_eq!(told.known(0), [(1, 5), (2, 2), (6, 4)]);
    }

    #[test]
    fn a_namespace_that_was_removed_takes_its_waiting_blocks_and_no_others() {
        let mut told = Told::new();
        for space in 0..2 {
            told.block(space, 2, 1);
        }
        told.0.found(Found::NamespaceRemoved(SPACES[0]));
        told.namespace(SPACES[0]);
        for space in 0..2 {
            told.block(space, 1, 0);
        }
        assert_eq!((told.known(0), told.known(1)), (vec![(1, 3)], vec![(1, 4), (2, 2)]));
    }
}
