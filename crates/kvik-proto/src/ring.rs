//! A ring: memory of an owner that NICs reach in place of pages that they do not.
//!
//! It is one buffer, in slots, that all NICs of the engine know. The owner lends a slot to a transfer for one chunk: a read's
//! is filled from the pages before, a write's is emptied into them afterwards. Whose a slot is, is decided here alone: no
//! peer ever names one.
//!
//! Invariants:
//! - a slot is lent to one flow at a time, and nobody else's before that flow has given it back;
//! - a slot that is free while somebody may have it is put aside for the next one whose turn it is, and that one is told:
//!   so nobody waits for a slot that nobody holds;
//! - a session takes one more only while it has less than is free, so one whose peer is stuck keeps its share and no more;
//! - who waits for a slot of a ring holds nothing that the ring's other users wait for: the initiator's own ring comes after
//!   this one.

use crate::FlowKey;
use crate::nics::NicKey;
use crate::sync::{Mutex, lock};
use kvik_core::{Class, ClassQueue};
use std::sync::Arc;

/// See the module's text. `R` names memory of this process.
pub struct Ring<R> {
    region: R,
    keys: Arc<[NicKey]>,
    slot_bytes: u64,
    slots: Mutex<Slots>,
}

struct Slots {
    holders: Vec<Option<Holder>>,
    waiting: ClassQueue<FlowKey>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Holder {
    key: FlowKey,
    /// It has the slot; else it was put aside for it.
    taken: bool,
}

impl<R> std::fmt::Debug for Ring<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Ring(slots of {} bytes)", self.slot_bytes)
    }
}

impl<R> Ring<R> {
    /// Of this memory, in so many slots, which each NIC knows by its key.
    pub fn new(region: R, keys: Arc<[NicKey]>, slots: usize, slot_bytes: u64) -> Arc<Ring<R>> {
        let slots = Slots { holders: vec![None; slots], waiting: ClassQueue::default() };
        Arc::new(Ring { region, keys, slot_bytes, slots: Mutex::new(slots) })
    }

    /// The memory.
    pub fn region(&self) -> &R {
        &self.region
    }

    /// How each NIC knows it.
    pub(crate) fn keys(&self) -> &Arc<[NicKey]> {
        &self.keys
    }

    /// Bytes of a slot: the longest chunk that goes through it.
    pub(crate) fn slot_bytes(&self) -> u64 {
        self.slot_bytes
    }

    /// Where a slot begins.
    pub(crate) fn place(&self, slot: usize) -> u64 {
        slot as u64 * self.slot_bytes
    }

    /// Slots that nobody has.
    pub fn free(&self) -> usize {
        lock(&self.slots).free()
    }

    /// To which transfer the slot at this place is lent.
    #[doc(hidden)] // for tests that look where NICs write
    pub fn holder(&self, place: u64) -> Option<FlowKey> {
        let holders = &lock(&self.slots).holders;
        let holder = holders.get((place / self.slot_bytes) as usize).copied().flatten()?;
        holder.taken.then_some(holder.key)
    }

    /// A slot for a flow. None: it waits for one, and is told. Others, whose turn it was, are told of theirs.
    pub(crate) fn take(&self, key: FlowKey, class: Class, mut tell: impl FnMut(FlowKey)) -> Option<usize> {
        let mut slots = lock(&self.slots);
        let found = slots.collect(key);
        if found.is_some() {
            return found;
        }
        slots.waiting.push_once(class, key);
        slots.hand_out(self.slot_bytes, |other| {
            if other != key {
                tell(other)
            }
        });
        slots.collect(key)
    }

    /// A flow needs a slot no longer: flows that got others by that are told of.
    pub(crate) fn give(&self, slot: usize, tell: impl FnMut(FlowKey)) {
        let mut slots = lock(&self.slots);
        slots.holders[slot] = None;
        slots.hand_out(self.slot_bytes, tell);
    }

    /// A flow takes no slot any more, and nothing is put aside for it. Those that it has, it gives back one by one.
    pub(crate) fn leave(&self, key: FlowKey, class: Class, tell: impl FnMut(FlowKey)) {
        let mut slots = lock(&self.slots);
        slots.waiting.remove(class, &key);
        let aside = Some(Holder { key, taken: false });
        slots.holders.iter_mut().filter(|holder| **holder == aside).for_each(|holder| *holder = None);
        slots.hand_out(self.slot_bytes, tell);
    }
}

impl Slots {
    fn free(&self) -> usize {
        self.holders.iter().filter(|holder| holder.is_none()).count()
    }

    /// Whether a session may have one more.
    fn may(&self, session: u64) -> bool {
        let theirs = |holder: &&Holder| holder.key.0 == session;
        self.holders.iter().flatten().filter(theirs).count() < self.free()
    }

    /// What was put aside for a flow.
    fn collect(&mut self, key: FlowKey) -> Option<usize> {
        let aside = Some(Holder { key, taken: false });
        let slot = self.holders.iter().position(|holder| *holder == aside)?;
        self.holders[slot] = Some(Holder { key, taken: true });
        Some(slot)
    }

    /// Puts what is free aside for those who wait, handovers before bulk, each session up to its share.
    fn hand_out(&mut self, slot_bytes: u64, mut tell: impl FnMut(FlowKey)) {
        while let Some((class, key)) = self.next() {
            let Some(free) = self.holders.iter_mut().find(|holder| holder.is_none()) else { return };
            *free = Some(Holder { key, taken: false });
            self.waiting.took(class, slot_bytes);
            tell(key);
        }
    }

    fn next(&mut self) -> Option<(Class, FlowKey)> {
        for class in self.waiting.turn() {
            for _ in 0..self.waiting.len(class) {
                let key = self.waiting.pop(class)?;
                if self.may(key.0) {
                    return Some((class, key));
                }
                self.waiting.push(class, key);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring() -> Arc<Ring<()>> {
        Ring::new((), Arc::default(), 8, 64)
    }

    fn take(ring: &Ring<()>, key: FlowKey, class: Class) -> Option<usize> {
        ring.take(key, class, |other| panic!("{other:?} was told of a slot"))
    }

    fn take_all(ring: &Ring<()>, key: FlowKey) -> Vec<usize> {
        std::iter::from_fn(|| take(ring, key, Class::Handover)).collect()
    }

    #[test]
    fn a_session_alone_has_half_and_leaves_as_much() {
        let ring = ring();
        assert_eq!(take_all(&ring, (1, 2)).len(), 4);
        assert_eq!(ring.free(), 4);
    }

    #[test]
    fn a_slot_that_comes_back_is_put_aside_for_who_waits_and_nobody_else_takes_it() {
        let ring = ring();
        let first = take_all(&ring, (1, 2));
        let mut told = Vec::new();
        ring.give(first[0], |key| told.push(key));
        assert_eq!(told, [(1, 2)]);
        // Another flow of that session comes: what was put aside is not for it.
        assert_eq!(take(&ring, (1, 4), Class::Handover), None);
        assert_eq!(take(&ring, (1, 2), Class::Handover), Some(first[0]));
        assert_eq!(ring.holder(first[0] as u64 * 64), Some((1, 2)));
    }

    #[test]
    fn what_was_put_aside_for_who_leaves_is_the_next_ones() {
        let ring = ring();
        let first = take_all(&ring, (1, 2));
        assert_eq!(take(&ring, (1, 4), Class::Handover), None);
        let mut told = Vec::new();
        ring.give(first[0], |key| told.push(key));
        ring.leave((1, 2), Class::Handover, |key| told.push(key));
        assert_eq!(told, [(1, 2), (1, 4)]);
        assert_eq!(take(&ring, (1, 4), Class::Handover), Some(first[0]));
    }

    #[test]
    fn whoever_is_stuck_keeps_its_share_and_others_go_on() {
        let ring = ring();
        assert_eq!(take_all(&ring, (1, 2)).len(), 4);
        for _ in 0..100 {
            let theirs = take_all(&ring, (2, 2));
            assert_eq!(theirs.len(), 2);
            ring.leave((2, 2), Class::Handover, |_| ());
            theirs.into_iter().for_each(|slot| ring.give(slot, |_| ()));
        }
    }

    #[test]
    fn handovers_come_before_bulk() {
        let ring = ring();
        let (first, second) = (take_all(&ring, (1, 2)), take_all(&ring, (2, 2)));
        let third = take_all(&ring, (3, 2));
        assert_eq!((first.len(), second.len(), third.len(), ring.free()), (4, 2, 1, 1));
        assert_eq!(take(&ring, (3, 4), Class::Bulk), None);
        assert_eq!(take(&ring, (3, 6), Class::Handover), None);
        let mut told = Vec::new();
        for key in [(1, 2), (2, 2), (3, 2)] {
            ring.leave(key, Class::Handover, |key| told.push(key));
        }
        ring.give(third[0], |key| told.push(key));
        ring.give(second[0], |key| told.push(key));
        assert_eq!(told, [(3, 6), (3, 4)]);
    }
}
