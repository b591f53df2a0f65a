//! Removals that were decided and that a tier below has not confirmed.
//!
//! Invariants:
//! - A key is here from the moment at which its block is taken out until the tier has confirmed that no restart finds it;
//!   or until its block is put again, since what the tier has of it is then wanted. So who removes it again is told the
//!   truth of it, though nobody knows the block any more.
//! - While a removal is being said, its block is not taken: the removal could come behind it, and void it with a restart.
//! - While a block is being brought, no removal of it begins to be said: for the same reason.

use crate::BlockKey;
use crate::figures::Where;
use crate::index::{Index, Life};
use std::collections::{BTreeMap, HashMap};

/// No more blocks are taken out while the removals of so many are not confirmed.
const MOST: usize = 1 << 16;
/// Removals that are said, and made durable, at once.
const AT_ONCE: usize = 4096;

/// Those of each tier.
#[derive(Default)]
pub(crate) struct Removals([Unsaid; Where::ALL.len()]);

impl Removals {
    pub fn of(&mut self, tier: Where) -> &mut Unsaid {
        &mut self.0[tier as usize]
    }

    /// Whether there are so many that there are to be no more.
    pub fn are_full(&self) -> bool {
        self.0.iter().any(|unsaid| unsaid.numbers.len() >= MOST)
    }

    pub fn are_saying(&self, key: &BlockKey) -> bool {
        self.0.iter().any(|unsaid| unsaid.is_saying(key))
    }

    /// The block is here again.
    pub fn put_again(&mut self, key: &BlockKey) {
        self.0.iter_mut().for_each(|unsaid| unsaid.put_again(key));
    }
}

/// Those of one tier.
#[derive(Default)]
pub(crate) struct Unsaid {
    /// The number of each key's removal.
    numbers: HashMap<BlockKey, u64>,
    /// In the order in which they were decided.
    removals: BTreeMap<u64, Removal>,
    next: u64,
}

struct Removal {
    key: BlockKey,
    saying: bool,
    /// It came to be needed again while it was said: what is said may not count for what it is needed for.
    again: bool,
}

impl Unsaid {
    pub fn add(&mut self, key: BlockKey) {
        if let Some(removal) = self.numbers.get(&key).and_then(|number| self.removals.get_mut(number)) {
            removal.again = removal.saying;
            return;
        }
        self.numbers.insert(key, self.next);
        self.removals.insert(self.next, Removal { key, saying: false, again: false });
        self.next += 1;
    }

    fn get(&self, key: &BlockKey) -> Option<&Removal> {
        self.removals.get(self.numbers.get(key)?)
    }

    pub fn has(&self, key: &BlockKey) -> bool {
        self.numbers.contains_key(key)
    }

    fn is_saying(&self, key: &BlockKey) -> bool {
        self.get(key).is_some_and(|removal| removal.saying)
    }

    fn put_again(&mut self, key: &BlockKey) {
        if !self.is_saying(key)
            && let Some(number) = self.numbers.remove(key)
        {
            self.removals.remove(&number);
        }
    }

    /// The number of the next that is decided.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Whether all are confirmed that were decided before this one.
    pub fn are_said(&self, until: u64) -> bool {
        self.removals.first_key_value().is_none_or(|(first, _)| *first >= until)
    }

    /// Begins to say some of those that were decided before this one, and that nobody says.
    pub fn begin(&mut self, until: u64, index: &Index) -> Vec<BlockKey> {
        let waiting = self.removals.range_mut(..until).map(|(_, removal)| removal);
        let waiting = waiting.filter(|removal| !removal.saying && !is_coming(index, &removal.key));
        let begin = |removal: &mut Removal| {
            removal.saying = true;
            removal.key
        };
        waiting.take(AT_ONCE).map(begin).collect()
    }

    /// The same of one key; whether it did.
    pub fn begin_one(&mut self, key: &BlockKey, index: &Index) -> bool {
        let removal = self.numbers.get(key).and_then(|number| self.removals.get_mut(number));
        let removal = removal.filter(|removal| !removal.saying && !is_coming(index, key));
        removal.is_some_and(|removal| !std::mem::replace(&mut removal.saying, true))
    }

    /// These were said, or they were not.
    pub fn end(&mut self, keys: &[BlockKey], said: bool) {
        for key in keys {
            let Some(number) = self.numbers.get(key).copied() else { continue };
            let Some(removal) = self.removals.get_mut(&number) else { continue };
            removal.saying = false;
            if !std::mem::take(&mut removal.again) && said {
                self.removals.remove(&number);
                self.numbers.remove(key);
            }
        }
    }
}

/// Whether a put is bringing a block of this key.
fn is_coming(index: &Index, key: &BlockKey) -> bool {
    index.find_any(key).is_some_and(|id| index.node(id).life == Life::Filling)
}
