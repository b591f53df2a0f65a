//! The ghost list: which blocks were seen of late and are not in the store.

use super::api::HORIZON;

/// Blocks of a bucket: one cache line of tags.
const WAYS: usize = 32;

/// A bounded first-in-first-out list of fingerprints, [`HORIZON`] for each resident block, 2 bytes each. It may name a
/// block that it never saw (about one of 2000), and keeps the order only within a bucket: a wrong answer costs a wrong
/// place in a queue, nothing more. Few wrong answers matter more than little memory: one block of a prompt that is
/// taken for a known one keeps all blocks before it in the store.
#[derive(Default)]
pub(super) struct Ghost {
    /// Newest first; 0 is an empty place.
    buckets: Vec<[u16; WAYS]>,
}

impl Ghost {
    /// Remembers a block, in place of the oldest of its bucket. `resident` blocks are in the store: the list is made
    /// at the first eviction, when the store is full, and made anew where the store holds far more blocks by then.
    pub(super) fn remember(&mut self, fingerprint: u64, resident: usize) {
        let wanted = (resident * HORIZON).div_ceil(WAYS).max(1);
        if wanted > self.buckets.len() + self.buckets.len() / 2 {
            self.buckets = vec![[0; WAYS]; wanted];
        }
        self.take(fingerprint);
        let (at, tag) = self.place(fingerprint);
        let bucket = &mut self.buckets[at];
        bucket.copy_within(..WAYS - 1, 1);
        bucket[0] = tag;
    }

    /// Whether it remembers a block.
    pub(super) fn knows(&self, fingerprint: u64) -> bool {
        if self.buckets.is_empty() {
            return false;
        }
        let (at, tag) = self.place(fingerprint);
        self.buckets[at].contains(&tag)
    }

    /// Forgets a block, and says whether it was remembered.
    pub(super) fn take(&mut self, fingerprint: u64) -> bool {
        if self.buckets.is_empty() {
            return false;
        }
        let (at, tag) = self.place(fingerprint);
        let bucket = &mut self.buckets[at];
        let Some(found) = bucket.iter().position(|known| *known == tag) else { return false };
        bucket.copy_within(found + 1.., found);
        bucket[WAYS - 1] = 0;
        true
    }

    /// Bytes that it takes.
    pub(super) fn memory(&self) -> usize {
        self.buckets.capacity() * size_of::<[u16; WAYS]>()
    }

    /// The bucket by the upper half of the fingerprint, the tag by its lowest bits.
    fn place(&self, fingerprint: u64) -> (usize, u16) {
        let at = ((fingerprint >> 32) * self.buckets.len() as u64) >> 32;
        (at as usize, (fingerprint as u16).max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::mix;

    #[test]
    fn the_newest_are_known_the_oldest_forgotten_and_it_does_not_grow() {
        let (resident, mut ghost) = (10_000, Ghost::default());
        let room = (resident * HORIZON) as u64;
        for number in 0..10 * room {
            ghost.remember(mix(number), resident);
        }
        assert!(ghost.memory() <= resident * HORIZON * 2 + 64, "{} bytes", ghost.memory());
        let known =
            |numbers: std::ops::Range<u64>| numbers.filter(|number| ghost.knows(mix(*number))).count() as u64;
        assert!(known(10 * room - room / 2..10 * room) > room / 2 * 99 / 100);
        assert!(known(0..8 * room) < 8 * room / 1000);
        assert!(known(10 * room..11 * room) < room / 1000);
    }

    #[test]
    fn what_is_taken_is_forgotten() {
        let mut ghost = Ghost::default();
        assert!(!ghost.take(5) && !ghost.knows(5));
        for fingerprint in [5, 6, 7, 0] {
            ghost.remember(fingerprint, 8);
        }
        assert!(ghost.take(6) && !ghost.knows(6) && !ghost.take(6));
        assert!(ghost.knows(5) && ghost.knows(7) && ghost.knows(0));
    }

    #[test]
    fn one_bucket_is_an_exact_queue() {
        let mut ghost = Ghost::default();
        (1..=40).for_each(|fingerprint| ghost.remember(fingerprint, 8));
        ghost.remember(20, 8);
        ghost.remember(41, 8);
        let known: Vec<u64> = (1..=41).filter(|fingerprint| ghost.knows(*fingerprint)).collect();
        assert_eq!(known, (10..=41).collect::<Vec<_>>());
    }
}
