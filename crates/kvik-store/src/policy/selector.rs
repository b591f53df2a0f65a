//! The policy that has the most hits on the load that there is.
//!
//! Every fixed policy runs in shadow: a [`Shadow`] has the store's capacity, sees the same requests and keeps the
//! blocks that the policy would keep, without their bytes. The one with the most hits of late decides. Hits are counted
//! by prefixes, and shadows keep parents of resident blocks, as the store does: counted by blocks, policies that tear
//! holes into prompts seem better than they are.
//!
//! To change its mind costs nothing: both orders that policies need, by last use and by S3-FIFO, are kept for the
//! blocks of the store at all times, and choosing means from which of them, and with which share for the small queue,
//! the next victims come. The blocks of the store stay where they are. So there is no margin by which a policy must be
//! better: hits fade by half over [`HORIZON`] fillings of the store, and the most of them decides. Margins that were
//! tried (in hits, and in multiples of what chance would explain) lost more by waiting than they saved. Until there is
//! a difference S3-FIFO decides, as its paper found it best over most traces.
//!
//! What it costs is the time to see a difference. Over 255 pairs of a trace and a capacity, of at least ten thousand
//! requests each, it had 0.1 % fewer hits than the best fixed policy on average and 3.3 % at most; over traces half as
//! long, with room for one block of ten that came, 4.6 % at most.
//!
//! A large store is sampled (Waldspurger et al., "Efficient MRC construction with SHARDS", FAST 2015): when a shadow
//! has more than [`MAX_SAMPLE`] blocks, those of half of the fingerprints are dropped, capacity and later references
//! with them. What is left behaves as the whole does.

use super::PolicyKind;
use super::api::{HORIZON, Policy};
use super::lru::Lru;
use super::s3fifo::S3Fifo;
use super::shadow::Shadow;

/// Blocks of a shadow. The error of a hit rate by sampling falls with the root of it; SHARDS has 8192 for an error of
/// less than 0.01, and here differences count, in which most of it cancels.
const MAX_SAMPLE: usize = 16 << 10;
/// Hits fade after so many references.
const FADE_EVERY: u32 = 64;

/// 28 bytes a block, and a few MiB for the shadows.
pub(super) struct Selector {
    /// The blocks of the store in both orders.
    lru: Lru,
    s3fifo: S3Fifo,
    candidates: Vec<Candidate>,
    /// The candidate that decides.
    chosen: usize,
    /// Sampled are references whose fingerprints have so many zeros in their middle.
    halvings: u32,
    /// Sampled references since hits faded.
    references: u32,
}

struct Candidate {
    kind: PolicyKind,
    shadow: Shadow,
    /// Hits, of which older ones count less.
    hits: f64,
}

impl Selector {
    pub(super) fn new(capacity: u64) -> Selector {
        let candidate = |kind: PolicyKind| Candidate {
            kind,
            shadow: Shadow::new(kind.build(capacity), capacity),
            hits: 0.0,
        };
        let mut selector = Selector {
            lru: Lru::new(),
            s3fifo: S3Fifo::new(0),
            candidates: PolicyKind::FIXED.into_iter().map(candidate).collect(),
            chosen: 0,
            halvings: 0,
            references: 0,
        };
        let first = PolicyKind::FIXED.into_iter().position(|kind| kind == PolicyKind::S3Fifo);
        selector.take(first.unwrap_or_default());
        selector
    }

    fn by_use(&self) -> bool {
        self.candidates[self.chosen].kind.small_share().is_none()
    }

    /// Shows a reference to the shadows.
    fn sample(&mut self, fingerprint: u64, bytes: u32) {
        if !sampled(fingerprint, self.halvings) {
            return;
        }
        let mut most = 0;
        for candidate in &mut self.candidates {
            candidate.shadow.reference(fingerprint, bytes);
            most = most.max(candidate.shadow.len());
        }
        if most > MAX_SAMPLE && self.halvings < 32 {
            self.halvings += 1;
            let halvings = self.halvings;
            for candidate in &mut self.candidates {
                candidate.shadow.halve(|fingerprint| sampled(fingerprint, halvings));
            }
        }
        self.references += 1;
        if self.references == FADE_EVERY {
            self.references = 0;
            let half_life = (HORIZON * most) as f64;
            let kept = 0.5f64.powf(f64::from(FADE_EVERY) / half_life.max(1.0));
            self.candidates.iter_mut().for_each(|candidate| candidate.hits *= kept);
            self.choose();
        }
    }

    /// Lets the candidate with the most hits decide. Of several the one that does.
    fn choose(&mut self) {
        let mut best = self.chosen;
        for (at, candidate) in self.candidates.iter().enumerate() {
            if candidate.hits > self.candidates[best].hits {
                best = at;
            }
        }
        self.take(best);
    }

    fn take(&mut self, candidate: usize) {
        self.chosen = candidate;
        if let Some(share) = self.candidates[candidate].kind.small_share() {
            self.s3fifo.set_share(share);
        }
    }
}

/// The middle of a fingerprint is used for nothing else: its ends choose places in tables.
fn sampled(fingerprint: u64, halvings: u32) -> bool {
    u64::from((fingerprint >> 16) as u32) >> (32 - halvings) == 0
}

impl Policy for Selector {
    fn request(&mut self) {
        for candidate in &mut self.candidates {
            candidate.hits += f64::from(candidate.shadow.request());
        }
    }

    fn admits(&mut self, fingerprint: u64, bytes: u32) -> bool {
        let admits = self.by_use() || self.s3fifo.admits(fingerprint, bytes);
        if !admits {
            self.sample(fingerprint, bytes);
        }
        admits
    }

    fn insert(&mut self, id: u32, fingerprint: u64, bytes: u32) {
        self.sample(fingerprint, bytes);
        self.lru.insert(id, fingerprint, bytes);
        self.s3fifo.insert(id, fingerprint, bytes);
    }

    fn touch(&mut self, id: u32, fingerprint: u64) {
        if let Some(bytes) = self.s3fifo.bytes(id) {
            self.sample(fingerprint, bytes);
            self.lru.touch(id, fingerprint);
            self.s3fifo.touch(id, fingerprint);
        }
    }

    fn hold(&mut self, id: u32) {
        self.lru.hold(id);
        self.s3fifo.hold(id);
    }

    fn release(&mut self, id: u32) {
        self.lru.release(id);
        self.s3fifo.release(id);
    }

    fn victim(&mut self) -> Option<u32> {
        if self.by_use() { self.lru.victim() } else { self.s3fifo.victim() }
    }

    fn evict(&mut self, id: u32, fingerprint: u64) {
        self.lru.evict(id, fingerprint);
        self.s3fifo.evict(id, fingerprint);
    }

    fn remove(&mut self, id: u32) {
        self.lru.remove(id);
        self.s3fifo.remove(id);
    }

    fn chosen(&self) -> Option<&'static str> {
        Some(self.candidates[self.chosen].kind.name())
    }

    fn memory(&self) -> usize {
        let shadows: usize = self.candidates.iter().map(|candidate| candidate.shadow.memory()).sum();
        self.lru.memory() + self.s3fifo.memory() + shadows
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::{Workload, generate, mix, replay_with};

    #[test]
    fn a_large_store_is_sampled() {
        let block = 1 << 20;
        let mut selector = Selector::new(u64::from(block) * 8 * MAX_SAMPLE as u64);
        for id in 0..8 * MAX_SAMPLE as u32 {
            selector.request();
            selector.insert(id, mix(u64::from(id)), block);
        }
        assert!(selector.halvings >= 3, "{} halvings", selector.halvings);
        for candidate in &selector.candidates {
            let len = candidate.shadow.len();
            assert!(
                (MAX_SAMPLE / 4..=MAX_SAMPLE).contains(&len),
                "{} has {len} blocks",
                candidate.kind.name()
            );
        }
    }

    #[test]
    fn it_chooses_by_the_load() {
        let chosen = |workload: Workload| {
            let (trace, capacity) = (generate(workload, 4000, 5).unwrap(), 2000);
            let mut selector = Selector::new(capacity << 20);
            replay_with(&trace, &mut selector, capacity as usize).unwrap();
            selector.candidates[selector.chosen].kind
        };
        assert_eq!(chosen(Workload::Conversations), PolicyKind::Lru);
        assert!([PolicyKind::S3Fifo, PolicyKind::S3FifoAdmit].contains(&chosen(Workload::OneOff)));
    }

    #[test]
    fn hits_of_long_ago_do_not_count() {
        let mut selector = Selector::new(1 << 20);
        selector.insert(0, 7, 1 << 10);
        for _ in 0..10_000 {
            selector.request();
            selector.touch(0, 7);
        }
        for candidate in &selector.candidates {
            assert!(
                (1.0..200.0).contains(&candidate.hits),
                "{} has {}",
                candidate.kind.name(),
                candidate.hits
            );
        }
    }

    #[test]
    fn whoever_has_the_most_hits_decides_and_of_several_the_one_that_did() {
        let mut selector = Selector::new(1 << 20);
        assert_eq!(selector.candidates[selector.chosen].kind, PolicyKind::S3Fifo);
        for at in [3, 2, 0, 1] {
            let most = selector.candidates[selector.chosen].hits;
            selector.candidates[at].hits = most;
            let before = selector.chosen;
            selector.choose();
            assert_eq!(selector.chosen, before);
            selector.candidates[at].hits += 1.0;
            selector.choose();
            assert_eq!(selector.chosen, at);
        }
    }
}
