//! What a store would keep under another policy.

use super::api::Policy;
use super::queue::NONE;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A store without bytes: its policy, its capacity, and the blocks that would be there.
pub(super) struct Shadow {
    policy: Box<dyn Policy>,
    ids: HashMap<u64, u32, BuildHasherDefault<Fingerprint>>,
    slots: Vec<Slot>,
    free: Vec<u32>,
    used: u64,
    capacity: u64,
    /// The block of this request that was named last, if it is there: the child of the one that comes next.
    child: u32,
    /// Blocks of this request that are there, since the last one that is not.
    run: u32,
}

/// A block, and the block of the same request that comes before it, where it was seen when this one was inserted. As
/// references are sampled, a parent may be a block further up: what it is held for is the same.
#[derive(Clone, Copy)]
struct Slot {
    fingerprint: u64,
    bytes: u32,
    parent: u32,
    children: u32,
}

impl Shadow {
    pub(super) fn new(policy: Box<dyn Policy>, capacity: u64) -> Shadow {
        Shadow {
            policy,
            ids: HashMap::default(),
            slots: Vec::new(),
            free: Vec::new(),
            used: 0,
            capacity,
            child: NONE,
            run: 0,
        }
    }

    /// Blocks that are there.
    pub(super) fn len(&self) -> usize {
        self.ids.len()
    }

    /// Ends a request, and gives its hits: the blocks that were there of its leading run, named last.
    pub(super) fn request(&mut self) -> u32 {
        self.child = NONE;
        std::mem::take(&mut self.run)
    }

    /// The next block of a request, nearer to its start than those before.
    pub(super) fn reference(&mut self, fingerprint: u64, bytes: u32) {
        let id = match self.ids.get(&fingerprint) {
            Some(id) => {
                self.run += 1;
                self.policy.touch(*id, fingerprint);
                Some(*id)
            }
            None => {
                self.run = 0;
                self.insert(fingerprint, bytes)
            }
        };
        let Some(id) = id else { return };
        if self.child != NONE && self.child != id && self.slots[self.child as usize].parent == NONE {
            self.slots[self.child as usize].parent = id;
            self.slots[id as usize].children += 1;
            self.policy.hold(id);
        }
        self.child = id;
    }

    fn insert(&mut self, fingerprint: u64, bytes: u32) -> Option<u32> {
        let more = u64::from(bytes);
        if more > self.capacity || self.used + more > self.capacity && !self.policy.admits(fingerprint, bytes)
        {
            return None;
        }
        while self.used + more > self.capacity {
            // None where blocks are each other's parents, which no store has and a trace may.
            let victim = self.policy.victim().or_else(|| {
                self.forget_chains();
                self.policy.victim()
            })?;
            self.policy.evict(victim, self.slots[victim as usize].fingerprint);
            self.drop_slot(victim);
        }
        let slot = Slot { fingerprint, bytes, parent: NONE, children: 0 };
        let id = self.free.pop().unwrap_or(self.slots.len() as u32);
        match self.slots.get_mut(id as usize) {
            Some(free) => *free = slot,
            None => self.slots.push(slot),
        }
        self.ids.insert(fingerprint, id);
        self.used += more;
        self.policy.insert(id, fingerprint, bytes);
        Some(id)
    }

    fn drop_slot(&mut self, id: u32) {
        let slot = self.slots[id as usize];
        self.ids.remove(&slot.fingerprint);
        self.free.push(id);
        self.used -= u64::from(slot.bytes);
        if self.child == id {
            self.child = NONE;
        }
        if let Some(parent) = self.slots.get_mut(slot.parent as usize) {
            parent.children -= 1;
            if parent.children == 0 {
                self.policy.release(slot.parent);
            }
        }
    }

    /// Keeps half of the capacity, and only those blocks that are `sampled`.
    pub(super) fn halve(&mut self, sampled: impl Fn(u64) -> bool) {
        self.capacity /= 2;
        self.forget_chains();
        let gone: Vec<u32> =
            self.ids.iter().filter(|(name, _)| !sampled(**name)).map(|(_, id)| *id).collect();
        for id in gone {
            self.policy.remove(id);
            self.drop_slot(id);
        }
    }

    /// From now on no block is known to have a parent; those that come again are.
    fn forget_chains(&mut self) {
        for (id, slot) in self.slots.iter_mut().enumerate() {
            (slot.parent, slot.children) = (NONE, 0);
            self.policy.release(id as u32);
        }
        self.child = NONE;
    }

    /// Bytes of memory, about.
    pub(super) fn memory(&self) -> usize {
        let ids = self.ids.capacity() * (size_of::<(u64, u32)>() + 1);
        let slots = self.slots.capacity() * size_of::<Slot>() + self.free.capacity() * size_of::<u32>();
        self.policy.memory() + ids + slots
    }
}

/// A fingerprint is a hash already.
#[derive(Default)]
struct Fingerprint(u64);

impl Hasher for Fingerprint {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }
    fn write_u64(&mut self, fingerprint: u64) {
        self.0 = fingerprint;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::PolicyKind;

    fn request(shadow: &mut Shadow, blocks: &[u64]) -> u32 {
        blocks.iter().rev().for_each(|block| shadow.reference(*block, 1));
        shadow.request()
    }

    #[test]
    fn hits_are_the_leading_run() {
        let mut shadow = Shadow::new(PolicyKind::Lru.build(100), 100);
        assert_eq!(request(&mut shadow, &[1, 2, 3, 4]), 0);
        assert_eq!(request(&mut shadow, &[1, 2, 3, 5]), 3);
        assert_eq!(request(&mut shadow, &[9, 2, 3, 4]), 0);
        assert_eq!(request(&mut shadow, &[1, 2, 8, 3, 4]), 2);
    }

    #[test]
    fn a_parent_stays_while_a_child_does() {
        for kind in PolicyKind::FIXED {
            let mut shadow = Shadow::new(kind.build(20), 20);
            for round in 0..2000u64 {
                let prompt = crate::replay::mix(round) % 7;
                let blocks: Vec<u64> = (0..1 + round % 5).map(|depth| prompt * 100 + depth).collect();
                request(&mut shadow, &blocks);
                for (block, id) in &shadow.ids {
                    let Some(parent) = shadow.slots.get(shadow.slots[*id as usize].parent as usize) else {
                        continue;
                    };
                    // Further up where one in between was not admitted.
                    let above = block / 100 * 100..*block;
                    assert!(
                        above.contains(&parent.fingerprint),
                        "{} is no parent of {block}",
                        parent.fingerprint
                    );
                    assert!(shadow.ids.contains_key(&parent.fingerprint), "{block} has lost its parent");
                }
                assert_eq!(shadow.used, shadow.len() as u64);
            }
        }
    }

    #[test]
    fn blocks_that_are_each_others_parents_do_not_stop_it() {
        let mut shadow = Shadow::new(PolicyKind::Lru.build(3), 3);
        for _ in 0..3 {
            request(&mut shadow, &[1, 2, 1, 2, 3, 1]);
        }
        assert_eq!(request(&mut shadow, &[7, 8, 9]), 0);
        assert_eq!(request(&mut shadow, &[7, 8, 9]), 3);
    }

    #[test]
    fn half_of_the_fingerprints_have_half_of_the_room() {
        let mut shadow = Shadow::new(PolicyKind::Lru.build(100), 100);
        (0..100).for_each(|block| shadow.reference(block, 1));
        shadow.halve(|fingerprint| fingerprint % 2 == 0);
        assert_eq!((shadow.len(), shadow.used, shadow.capacity), (50, 50, 50));
        assert!(shadow.ids.keys().all(|fingerprint| fingerprint % 2 == 0));
        (100..200).for_each(|block| shadow.reference(2 * block, 1));
        assert_eq!((shadow.len(), shadow.used), (50, 50));
        assert!((150..200).all(|block| shadow.ids.contains_key(&(2 * block))), "the newest are there");
    }
}
