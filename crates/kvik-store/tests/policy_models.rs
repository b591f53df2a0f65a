//! Policies beside straightforward models of them: the same victims in the same order.
//!
//! `KVIK_SEED=n` repeats what a run has drawn.

use kvik_store::policy::PolicyKind;
use std::collections::{BTreeMap, VecDeque};

struct Random(u64);

impl Random {
    fn from_env(default: u64) -> Random {
        let seed = std::env::var("KVIK_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(default);
        println!("KVIK_SEED={seed}");
        Random(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

/// What a model answers; blocks are called by their fingerprints.
trait Model {
    fn has(&self, fingerprint: u64) -> bool;
    fn admits(&mut self, _fingerprint: u64) -> bool {
        true
    }
    fn insert(&mut self, fingerprint: u64, bytes: u64);
    fn touch(&mut self, fingerprint: u64);
    fn evict(&mut self) -> u64;
    fn remove(&mut self, fingerprint: u64);
}

/// Oldest use first.
#[derive(Default)]
struct Lru(Vec<u64>);

impl Model for Lru {
    fn has(&self, fingerprint: u64) -> bool {
        self.0.contains(&fingerprint)
    }
    fn insert(&mut self, fingerprint: u64, _bytes: u64) {
        self.0.push(fingerprint);
    }
    fn touch(&mut self, fingerprint: u64) {
        self.remove(fingerprint);
        self.0.push(fingerprint);
    }
    fn evict(&mut self) -> u64 {
        self.0.remove(0)
    }
    fn remove(&mut self, fingerprint: u64) {
        self.0.retain(|other| *other != fingerprint);
    }
}

struct Entry {
    fingerprint: u64,
    bytes: u64,
    uses: u32,
}

/// Algorithm 1 of the paper, with bytes in place of counts. Oldest first.
struct S3Fifo {
    share: u64,
    small: VecDeque<Entry>,
    main: VecDeque<Entry>,
    ghost: VecDeque<u64>,
    ghost_len: usize,
}

impl S3Fifo {
    fn new(share: u64, ghost_len: usize) -> S3Fifo {
        S3Fifo { share, small: VecDeque::new(), main: VecDeque::new(), ghost: VecDeque::new(), ghost_len }
    }

    fn remember(&mut self, fingerprint: u64) {
        self.ghost.retain(|other| *other != fingerprint);
        self.ghost.push_back(fingerprint);
        if self.ghost.len() > self.ghost_len {
            self.ghost.pop_front();
        }
    }

    fn small_is_due(&self) -> bool {
        let bytes = |queue: &VecDeque<Entry>| queue.iter().map(|entry| entry.bytes).sum::<u64>();
        let (small, main) = (bytes(&self.small), bytes(&self.main));
        !self.small.is_empty() && (small * 100 >= (small + main) * self.share || self.main.is_empty())
    }
}

impl Model for S3Fifo {
    fn has(&self, fingerprint: u64) -> bool {
        self.small.iter().chain(&self.main).any(|entry| entry.fingerprint == fingerprint)
    }
    fn admits(&mut self, fingerprint: u64) -> bool {
        let admits = self.share > 0 || !self.small.is_empty() || self.ghost.contains(&fingerprint);
        if !admits {
            self.remember(fingerprint);
        }
        admits
    }
    fn insert(&mut self, fingerprint: u64, bytes: u64) {
        let entry = Entry { fingerprint, bytes, uses: 0 };
        if self.ghost.contains(&fingerprint) {
            self.ghost.retain(|other| *other != fingerprint);
            self.main.push_back(entry);
        } else {
            self.small.push_back(entry);
        }
    }
    fn touch(&mut self, fingerprint: u64) {
        for entry in self.small.iter_mut().chain(&mut self.main) {
            if entry.fingerprint == fingerprint {
                entry.uses = (entry.uses + 1).min(3);
            }
        }
    }
    fn evict(&mut self) -> u64 {
        loop {
            if self.small_is_due() {
                let entry = self.small.pop_front().expect("it is due");
                if entry.uses == 0 {
                    self.remember(entry.fingerprint);
                    return entry.fingerprint;
                }
                self.main.push_back(Entry { uses: 0, ..entry });
            } else {
                let entry = self.main.pop_front().expect("the store is not empty");
                if entry.uses == 0 {
                    return entry.fingerprint;
                }
                self.main.push_back(Entry { uses: entry.uses - 1, ..entry });
            }
        }
    }
    fn remove(&mut self, fingerprint: u64) {
        self.small.retain(|entry| entry.fingerprint != fingerprint);
        self.main.retain(|entry| entry.fingerprint != fingerprint);
    }
}

/// A store of at most `capacity` blocks under both, side by side. Gives how many were evicted and refused.
fn side_by_side(kind: PolicyKind, mut model: impl Model, capacity: usize, random: &mut Random) -> (u32, u32) {
    let mut policy = kind.build(1 << 40);
    let names: Vec<u64> = (0..4 * capacity as u64).map(|_| random.next()).collect();
    let (mut ids, mut free) = (BTreeMap::new(), (0..capacity as u32).collect::<Vec<_>>());
    let (mut evicted, mut refused) = (0, 0);
    for step in 0..20_000 {
        // The first ones come more often.
        let name = names[(random.below(names.len() as u64) * random.below(4) / 3) as usize % names.len()];
        assert_eq!(model.has(name), ids.contains_key(&name));
        if let Some(id) = ids.get(&name).copied() {
            if random.below(20) == 0 {
                policy.remove(id);
                model.remove(name);
                free.push(id);
                ids.remove(&name);
            } else {
                policy.touch(id, name);
                model.touch(name);
            }
            continue;
        }
        if free.is_empty() {
            let admitted = policy.admits(name, 1);
            assert_eq!(admitted, model.admits(name), "{} at step {step}", kind.name());
            if !admitted {
                refused += 1;
                continue;
            }
            let (victim, expected) = (policy.victim().expect("none is held"), model.evict());
            assert_eq!(ids.get(&expected), Some(&victim), "{} at step {step}", kind.name());
            policy.evict(victim, expected);
            free.push(victim);
            ids.remove(&expected);
            evicted += 1;
        }
        let (id, bytes) = (free.pop().expect("there is room"), 1 + random.below(2000));
        policy.insert(id, name, bytes as u32);
        model.insert(name, bytes);
        ids.insert(name, id);
    }
    (evicted, refused)
}

#[test]
fn lru_is_a_list_by_last_use() {
    let mut random = Random::from_env(2);
    for capacity in [1, 2, 5, 50] {
        let (evicted, refused) = side_by_side(PolicyKind::Lru, Lru::default(), capacity, &mut random);
        assert!(evicted > 1000 && refused == 0, "{evicted} evicted, {refused} refused");
    }
}

/// With up to 8 blocks the ghost list has one bucket, which is an exact queue of 32.
#[test]
fn s3_fifo_is_that_of_the_paper() {
    let mut random = Random::from_env(3);
    for (kind, share) in
        [(PolicyKind::S3Fifo, 10), (PolicyKind::S3FifoHalf, 50), (PolicyKind::S3FifoAdmit, 0)]
    {
        for capacity in [1, 2, 3, 5, 8] {
            let (evicted, refused) = side_by_side(kind, S3Fifo::new(share, 32), capacity, &mut random);
            assert!(evicted > 1000, "{} with room for {capacity}: {evicted} evicted", kind.name());
            assert_eq!(refused > 0, share == 0, "{} refused {refused}", kind.name());
        }
    }
}
