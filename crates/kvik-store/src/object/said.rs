//! Which removals the objects hold that are stored. An object with removals has to stay for as long as an older one does; so a
//! later one takes over what it holds, and it may go.
//!
//! Invariants:
//! - A removal is taken over only if nothing was stored since that it would void, were it said again.
//! - What holds as many as another one takes that one's over: of n removals that are said one by one there are as many objects
//!   as n has binary digits, and each is written as often at most.

use crate::tier::Identity;
use crate::unsaid::Removed;
use std::collections::{BTreeMap, HashMap};

/// Removals that are remembered, in all.
const MOST: usize = 1 << 17;
/// Removals that an object takes over.
const MOST_OF_ONE: usize = 1 << 14;

/// See the module's text.
#[derive(Default)]
pub(super) struct Said {
    /// The last object that holds each removal.
    last: HashMap<Removed, u32>,
    /// How many each object is the last one of; none where nothing takes them over.
    counts: BTreeMap<u32, Option<usize>>,
}

impl Said {
    /// An object is to hold a removal.
    pub fn removed(&mut self, number: u32, what: Removed) {
        if self.last.len() >= MOST {
            self.last.clear();
            self.counts.values_mut().for_each(|count| *count = None);
        }
        let count = self.counts.entry(number).or_insert(Some(0));
        if let Some(count) = count {
            *count += 1;
            let before = self.last.insert(what, number);
            before.into_iter().for_each(|before| self.count_less(before));
        }
    }

    fn count_less(&mut self, number: u32) {
        if let Some(Some(count)) = self.counts.get_mut(&number) {
            *count -= 1;
        }
    }

    /// A block is stored: what was said of it before must not be said again.
    pub fn stored(&mut self, identity: &Identity) {
        if let Some(number) = self.last.remove(&Removed::Block(identity.key)) {
            self.count_less(number);
        }
        // Of other blocks of its namespace that holds still.
        if let Some(number) = self.last.get(&Removed::Namespace(identity.namespace)).copied() {
            self.counts.insert(number, None);
            self.last.retain(|_, other| *other != number);
        }
    }

    /// What an object takes over that is about to be sent, and from which of those that `may_go` for it.
    pub fn take_over(&mut self, by: u32, may_go: impl Fn(u32) -> bool) -> (Vec<Removed>, Vec<u32>) {
        let Some(Some(mut all)) = self.counts.get(&by).copied() else { return Default::default() };
        let mut from = Vec::new();
        for (number, count) in self.counts.range(..by).rev() {
            if let Some(count) = count.filter(|count| *count <= all && may_go(*number)) {
                if all + count > MOST_OF_ONE {
                    break;
                }
                all += count;
                from.push(*number);
            }
        }
        if from.is_empty() {
            return Default::default();
        }
        self.counts.retain(|number, _| !from.contains(number));
        self.counts.insert(by, Some(all));
        let mut taken = Vec::new();
        for (what, number) in self.last.iter_mut().filter(|(_, number)| from.contains(number)) {
            *number = by;
            taken.push(*what);
        }
        (taken, from)
    }

    /// An object is there no longer.
    pub fn gone(&mut self, number: u32) {
        if self.counts.remove(&number).is_some_and(|count| count != Some(0)) {
            self.last.retain(|_, other| *other != number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BlockKey, NamespaceId, Shape};

    const SPACE: NamespaceId = NamespaceId([1; 32]);

    fn block(number: u8) -> Removed {
        Removed::Block(BlockKey([number; 32]))
    }

    fn stored(said: &mut Said, number: u8) {
        let (key, shape) = (BlockKey([number; 32]), Shape::new(1, 1, 64).unwrap());
        said.stored(&Identity { key, parent: None, namespace: SPACE, shape });
    }

    #[test]
    fn few_objects_hold_what_was_removed_one_by_one() {
        let (mut said, mut held) = (Said::default(), BTreeMap::new());
        for number in 1..=200u8 {
            said.removed(number.into(), block(number));
            let (taken, from) = said.take_over(number.into(), |_| true);
            let mut all = vec![block(number)];
            all.extend(taken);
            from.iter().for_each(|from| drop(held.remove(from)));
            held.insert(u32::from(number), all);
            assert!(held.len() <= 8, "{held:?}");
        }
        let all: Vec<Removed> = held.into_values().flatten().collect();
        assert!(all.len() == 200 && (1..=200).all(|number| all.contains(&block(number))));
    }

    #[test]
    fn what_was_stored_since_is_not_removed_again() {
        let mut said = Said::default();
        (1..4).for_each(|number| said.removed(number, block(number as u8)));
        stored(&mut said, 1);
        assert_eq!(said.take_over(3, |number| number != 2), (vec![], vec![1]));
        said.removed(4, Removed::Namespace(SPACE));
        said.removed(4, block(9));
        stored(&mut said, 8);
        // Its blocks are void because of the fourth, which stays.
        said.removed(5, block(7));
        let (taken, from) = said.take_over(5, |_| true);
        assert_eq!((taken.len(), from), (2, vec![3, 2]));
        assert!(taken.contains(&block(2)) && taken.contains(&block(3)));
        said.gone(5);
        said.removed(6, block(2));
        assert_eq!(said.take_over(6, |_| true), (vec![], vec![]));
    }
}
