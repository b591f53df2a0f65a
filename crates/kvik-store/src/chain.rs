//! Which blocks of a prompt a call is about, and which come before them.

use crate::BlockKey;

/// Blocks of one prompt that follow one another, and all keys before them, from the prompt's start: where a block lies
/// among several servers goes by its place in the prompt. Keys alone begin a prompt.
#[derive(Debug, Clone, Copy)]
pub struct Chain<'a> {
    before: &'a [BlockKey],
    keys: &'a [BlockKey],
}

impl<'a> Chain<'a> {
    /// Blocks behind others: `before` has all keys from the prompt's start. With fewer of them a store of several servers
    /// looks in other places, and finds nothing.
    pub fn after(before: &'a [BlockKey], keys: &'a [BlockKey]) -> Chain<'a> {
        Chain { before, keys }
    }

    /// The keys of the blocks themselves.
    pub fn keys(&self) -> &'a [BlockKey] {
        self.keys
    }

    /// How many blocks the prompt has before them.
    pub fn start(&self) -> usize {
        self.before.len()
    }

    /// The block before the first one; none where they begin a prompt.
    pub fn parent(&self) -> Option<BlockKey> {
        self.before.last().copied()
    }

    /// The key at this place of the prompt; none behind the last one.
    pub(crate) fn at(&self, place: usize) -> Option<&'a BlockKey> {
        let key = || self.keys.get(place - self.before.len());
        self.before.get(place).or_else(key)
    }
}

impl<'a, T: AsRef<[BlockKey]> + ?Sized> From<&'a T> for Chain<'a> {
    fn from(keys: &'a T) -> Chain<'a> {
        Chain { before: &[], keys: keys.as_ref() }
    }
}
