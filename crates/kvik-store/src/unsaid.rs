//! Removals that were decided and that a tier below has not confirmed.
//!
//! Invariants:
//! - What was removed is here from the moment at which it is taken out until the tier has confirmed that no restart finds
//!   it. So who removes it again is told the truth of it, though nobody knows it any more. A block goes from here before
//!   that where it is put again, since what the tier has of it is then wanted.
//! - While the removal of a block is being said, the block is not taken: the removal could come behind it, and void it with
//!   a restart. While a block is being brought, no removal of it begins to be said: for the same reason. Nor while it is
//!   being written, whatever became of it: the write could come behind the removal, and the block be back with a restart.
//! - A namespace that was removed is taken up in memory at once. But none of its blocks is written to a tier while that has
//!   its removal here: whoever is to write one says the removal first (`Store::before_writing`).
//! - No namespace is forgotten that is here: who removes it again must find it.
//! - Nothing waits here for a tier that is never written again. From the first removal on that it did not take, all fail.

use crate::figures::Where;
use crate::index::{Index, Life};
use crate::{BlockKey, NamespaceId};
use std::collections::{BTreeMap, HashMap};

/// No more blocks are taken out while the removals of so many are not confirmed.
const MOST: usize = 1 << 16;
/// Removals that are said, and made durable, at once.
const AT_ONCE: usize = 4096;

/// What was removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Removed {
    Block(BlockKey),
    /// With all of its blocks.
    Namespace(NamespaceId),
}

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
        self.0.iter().any(|unsaid| unsaid.is_saying(&Removed::Block(*key)))
    }

    /// Whether a tier has not confirmed that a namespace is gone.
    pub fn have(&self, id: &NamespaceId) -> bool {
        self.0.iter().any(|unsaid| unsaid.has(&Removed::Namespace(*id)))
    }

    /// The block is here again.
    pub fn put_again(&mut self, key: &BlockKey) {
        self.0.iter_mut().for_each(|unsaid| unsaid.put_again(&Removed::Block(*key)));
    }
}

/// Those of one tier.
#[derive(Default)]
pub(crate) struct Unsaid {
    /// The number of each removal.
    numbers: HashMap<Removed, u64>,
    /// In the order in which they were decided.
    removals: BTreeMap<u64, Removal>,
    next: u64,
    /// Some were given up: the tier may have what was removed, whatever is said to it.
    given_up: bool,
    /// Blocks that are being written.
    writing: Vec<Block>,
}

/// A block, and its namespace.
pub(crate) type Block = (BlockKey, NamespaceId);

struct Removal {
    what: Removed,
    saying: bool,
    /// It came to be needed again while it was said: what is said may not count for what it is needed for.
    again: bool,
}

impl Unsaid {
    pub fn add(&mut self, what: Removed) {
        if let Some(removal) = self.numbers.get(&what).and_then(|number| self.removals.get_mut(number)) {
            removal.again = removal.saying;
            return;
        }
        self.numbers.insert(what, self.next);
        self.removals.insert(self.next, Removal { what, saying: false, again: false });
        self.next += 1;
    }

    fn get(&self, what: &Removed) -> Option<&Removal> {
        self.removals.get(self.numbers.get(what)?)
    }

    pub fn has(&self, what: &Removed) -> bool {
        self.numbers.contains_key(what)
    }

    fn is_saying(&self, what: &Removed) -> bool {
        self.get(what).is_some_and(|removal| removal.saying)
    }

    fn put_again(&mut self, what: &Removed) {
        if !self.is_saying(what)
            && let Some(number) = self.numbers.remove(what)
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

    /// A block begins to be written, of whose namespace nothing is left to be said.
    pub fn write(&mut self, block: Block) {
        self.writing.push(block);
    }

    /// A write has ended; whether removals may have waited for that.
    pub fn written(&mut self, block: &Block) -> bool {
        if let Some(at) = self.writing.iter().position(|other| other == block) {
            self.writing.swap_remove(at);
        }
        !self.removals.is_empty()
    }

    /// Whether there are some of those that were decided before this one that may begin to be said.
    pub fn may_begin(&self, until: u64, index: &Index) -> bool {
        let mut waiting = self.removals.range(..until).map(|(_, removal)| removal);
        waiting.any(|removal| may_be_said(index, &self.writing, removal))
    }

    /// Begins to say some of them.
    pub fn begin(&mut self, until: u64, index: &Index) -> Vec<Removed> {
        let Unsaid { removals, writing, .. } = self;
        let waiting = removals.range_mut(..until).map(|(_, removal)| removal);
        let begin = |removal: &mut Removal| {
            removal.saying = true;
            removal.what
        };
        waiting.filter(|removal| may_be_said(index, writing, removal)).take(AT_ONCE).map(begin).collect()
    }

    /// The same of one; whether it did.
    pub fn begin_one(&mut self, what: &Removed, index: &Index) -> bool {
        let Unsaid { numbers, removals, writing, .. } = self;
        let removal = numbers.get(what).and_then(|number| removals.get_mut(number));
        let removal = removal.filter(|removal| may_be_said(index, writing, removal));
        removal.is_some_and(|removal| !std::mem::replace(&mut removal.saying, true))
    }

    /// None is ever to be said: those that wait go from here. Whether there was one, now or before.
    pub fn give_up(&mut self) -> bool {
        self.given_up |= !self.removals.is_empty();
        self.removals.retain(|_, removal| removal.saying);
        let removals = &self.removals;
        self.numbers.retain(|_, number| removals.contains_key(number));
        self.given_up
    }

    /// These were said, or they were not.
    pub fn end(&mut self, all: &[Removed], said: bool) {
        for what in all {
            let Some(number) = self.numbers.get(what).copied() else { continue };
            let Some(removal) = self.removals.get_mut(&number) else { continue };
            removal.saying = false;
            if !std::mem::take(&mut removal.again) && said {
                self.removals.remove(&number);
                self.numbers.remove(what);
            }
        }
    }
}

/// Nobody says it, and no put is bringing the block, nor a thread writing it.
fn may_be_said(index: &Index, writing: &[Block], removal: &Removal) -> bool {
    let is_coming = match &removal.what {
        Removed::Block(key) => {
            let brought = index.find_any(key).is_some_and(|id| index.node(id).life == Life::Filling);
            brought || writing.iter().any(|(other, _)| other == key)
        }
        Removed::Namespace(id) => writing.iter().any(|(_, other)| other == id),
    };
    !removal.saying && !is_coming
}
