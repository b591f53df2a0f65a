//! What every policy keeps to, whatever is asked of it in whatever order.
//!
//! `KVIK_SEED=n` repeats what a run has drawn.

use kvik_store::policy::{Policy, PolicyKind};
use std::collections::{BTreeMap, BTreeSet};

struct Random(u64);

impl Random {
    fn from_env(default: u64) -> Random {
        let seed = std::env::var("KVIK_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(default);
        println!("KVIK_SEED={seed}");
        Random(seed)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        fingerprint(self.0) % bound
    }
}

fn fingerprint(number: u64) -> u64 {
    let mixed = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// The blocks that are there: id, fingerprint and whether it is held.
struct Store {
    policy: Box<dyn Policy>,
    blocks: BTreeMap<u32, (u64, bool)>,
}

impl Store {
    fn new(kind: PolicyKind) -> Store {
        Store { policy: kind.build(1000), blocks: BTreeMap::new() }
    }

    /// Names a victim, and checks that it may be one.
    fn victim(&mut self) -> Option<u32> {
        let victim = self.policy.victim();
        assert_eq!(victim, self.policy.victim(), "it changes its mind though nothing happened");
        match victim {
            Some(id) => assert_eq!(self.blocks.get(&id).map(|(_, held)| *held), Some(false), "block {id}"),
            None => {
                assert!(self.blocks.values().all(|(_, held)| *held), "none is named, and one is not held")
            }
        }
        victim
    }

    fn step(&mut self, random: &mut Random) {
        let id = random.below(200) as u32;
        let known = self.blocks.get(&id).map(|(fingerprint, _)| *fingerprint);
        match random.below(12) {
            0..=3 if known.is_none() => {
                let (fingerprint, bytes) = (fingerprint(random.below(1000)), 1 + random.below(20) as u32);
                if self.blocks.len() < 100 || self.policy.admits(fingerprint, bytes) {
                    self.policy.insert(id, fingerprint, bytes);
                    self.blocks.insert(id, (fingerprint, false));
                }
            }
            // Whether it is there or not: a call about one that is not does nothing.
            0..=6 => self.policy.touch(id, known.unwrap_or(7)),
            7 => {
                self.policy.hold(id);
                self.blocks.entry(id).and_modify(|(_, held)| *held = true);
            }
            8 => {
                self.policy.release(id);
                self.blocks.entry(id).and_modify(|(_, held)| *held = false);
            }
            9 => {
                self.policy.remove(id);
                self.blocks.remove(&id);
            }
            10 => {
                if let Some(id) = self.victim() {
                    self.policy.evict(id, self.blocks[&id].0);
                    self.blocks.remove(&id);
                }
            }
            _ => self.policy.request(),
        }
    }

    /// Evicts all that there is: each block is named once.
    fn drain(&mut self) {
        for (id, (_, held)) in &mut self.blocks {
            self.policy.release(*id);
            *held = false;
        }
        while let Some(id) = self.victim() {
            let Some((fingerprint, _)) = self.blocks.remove(&id) else { panic!("{id} is named twice") };
            self.policy.evict(id, fingerprint);
        }
        assert!(self.blocks.is_empty(), "{} blocks are never named", self.blocks.len());
    }
}

#[test]
fn each_block_is_named_once_and_none_that_is_held_or_gone() {
    let mut random = Random::from_env(1);
    for kind in PolicyKind::ALL {
        let mut store = Store::new(kind);
        for _ in 0..20 {
            (0..2000).for_each(|_| store.step(&mut random));
            store.drain();
        }
    }
}

/// All victims, one after another, where each is kept from being named again by `keep`.
fn named(policy: &mut dyn Policy, keep: impl Fn(&mut dyn Policy, u32)) -> Vec<u32> {
    let mut named = Vec::new();
    while let Some(id) = policy.victim() {
        keep(policy, id);
        named.push(id);
    }
    named
}

#[test]
fn whoever_is_held_makes_way_for_the_next_one_and_comes_back() {
    for kind in PolicyKind::ALL {
        let mut policy = kind.build(1000);
        (0..500).for_each(|id| policy.insert(id, fingerprint(u64::from(id)), 2));
        // The index may not evict what is named, again and again: each time another one is named, and then none.
        let all = named(policy.as_mut(), |policy, id| policy.hold(id));
        assert_eq!(all.len(), 500, "{}", kind.name());
        assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), 500, "{}", kind.name());
        policy.release(77);
        assert_eq!(policy.victim(), Some(77), "{}", kind.name());
        policy.hold(77);
        assert_eq!(policy.victim(), None);
        policy.touch(78, fingerprint(78));
        assert_eq!(policy.victim(), None, "one that is used while it is held is held still");
        policy.remove(79);
        policy.insert(79, fingerprint(1079), 2);
        assert_eq!(policy.victim(), Some(79), "a new block with an old id is not held");
    }
}

#[test]
fn a_block_that_is_released_is_as_old_as_it_was() {
    let mut policy = PolicyKind::Lru.build(1000);
    (0..4).for_each(|id| policy.insert(id, fingerprint(u64::from(id)), 1));
    policy.hold(0);
    policy.hold(2);
    assert_eq!(policy.victim(), Some(1), "0 is put aside, 2 keeps its place");
    policy.release(2);
    assert_eq!(policy.victim(), Some(1));
    policy.release(0);
    assert_eq!(named(policy.as_mut(), |policy, id| policy.remove(id)), [0, 1, 2, 3]);
}

#[test]
fn a_new_block_in_an_old_slot_has_no_past() {
    let mut policy = PolicyKind::S3Fifo.build(1000);
    (0..10).for_each(|id| policy.insert(id, fingerprint(u64::from(id)), 1));
    (0..3).for_each(|_| policy.touch(0, fingerprint(0)));
    policy.remove(0);
    policy.insert(0, fingerprint(100), 1);
    assert_eq!(named(policy.as_mut(), |policy, id| policy.remove(id)), [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]);
}

#[test]
fn memory_a_block_is_small_and_that_of_sampling_is_bounded() {
    let blocks = 1_000_000;
    for (kind, most) in [
        (PolicyKind::Lru, 9),
        (PolicyKind::S3Fifo, 19),
        (PolicyKind::S3FifoHalf, 19),
        (PolicyKind::S3FifoAdmit, 19),
        (PolicyKind::Selector, 28),
    ] {
        let mut policy = kind.build(u64::from(blocks) * 64);
        (0..blocks).for_each(|id| policy.insert(id, fingerprint(u64::from(id)), 64));
        for id in 0..1000 {
            // Makes the ghost list.
            let victim = policy.victim().expect("none is held");
            policy.evict(victim, fingerprint(u64::from(victim)));
            policy.insert(victim, fingerprint(u64::from(blocks + id)), 64);
        }
        let (bytes, shadows) = (policy.memory(), if kind == PolicyKind::Selector { 8 << 20 } else { 0 });
        println!("{}: {bytes} bytes, {:.1} a block", kind.name(), bytes as f64 / f64::from(blocks));
        // Arrays grow by an eighth.
        assert!(bytes <= blocks as usize * most * 9 / 8 + shadows, "{} takes {bytes} bytes", kind.name());
        assert!(bytes >= blocks as usize * most, "{} says that it takes {bytes} bytes", kind.name());
    }
}

#[test]
fn names_come_back_and_others_are_refused() {
    for kind in PolicyKind::ALL {
        assert_eq!(PolicyKind::parse(kind.name()).unwrap(), kind);
    }
    let text = PolicyKind::parse("arc").unwrap_err().to_string();
    assert!(text.contains("arc") && text.contains("s3-fifo-admit"), "{text}");
    assert_eq!(PolicyKind::default(), PolicyKind::Selector);
}
