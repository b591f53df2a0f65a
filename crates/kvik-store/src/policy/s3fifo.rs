//! S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023).
//!
//! New blocks enter a small queue. Those that are used there go on to the main queue; others leave the store and are
//! remembered in the ghost list. Who comes back from it enters the main queue, which gives a block one more round for
//! each use, at most three.
//!
//! What differs from the paper, and why:
//! - A block that comes to the end of the small queue while it is held goes on to the main queue: its children, which
//!   are in use or were in the ghost list, keep it in the store anyway, and would else fill the small queue with it.
//! - The ghost list remembers [`HORIZON`](super::HORIZON) times as many blocks. An entry has 2 bytes and a block
//!   thousands to millions, so that the main queue's size need not be the limit.
//! - With no share for the small queue this is an admission filter: once all blocks that were used only once have
//!   left, a block that the ghost list does not know is not admitted, and the list remembers it instead.
//! - One call takes a bounded number of steps, and then names what it has come to. A store whose blocks have all been
//!   used since the last eviction would else go round millions of them.

use super::api::Policy;
use super::ghost::Ghost;
use super::queue::{Links, NONE, Queue, grow};

/// Bits 0 and 1: uses, at most 3.
const USES: u8 = 3;
/// In the small queue.
const SMALL: u8 = 4;
/// In the main queue.
const MAIN: u8 = 8;
const HELD: u8 = 16;
/// Held, and out of the main queue.
const PARKED: u8 = 32;

/// Blocks that one call moves at most: well below a millisecond.
const MAX_STEPS: u32 = 4096;

/// 11 bytes a block, and 8 for the ghost list.
pub(super) struct S3Fifo {
    /// What the small queue may have of the bytes, in percent.
    share: u64,
    links: Links,
    small: Queue,
    main: Queue,
    state: Vec<u8>,
    sizes: Vec<Size>,
    small_bytes: u64,
    bytes: u64,
    blocks: usize,
    ghost: Ghost,
}

impl S3Fifo {
    /// With so many percent of the bytes for the small queue.
    pub(super) fn new(share: u64) -> S3Fifo {
        S3Fifo {
            share,
            links: Links::default(),
            small: Queue::new(),
            main: Queue::new(),
            state: Vec::new(),
            sizes: Vec::new(),
            small_bytes: 0,
            bytes: 0,
            blocks: 0,
            ghost: Ghost::default(),
        }
    }

    /// Gives the small queue another share.
    pub(super) fn set_share(&mut self, share: u64) {
        self.share = share;
    }

    /// About the bytes of a resident block.
    pub(super) fn bytes(&self, id: u32) -> Option<u32> {
        (self.state(id) != 0).then(|| self.sizes[id as usize].bytes().min(u64::from(u32::MAX)) as u32)
    }

    fn state(&self, id: u32) -> u8 {
        self.state.get(id as usize).copied().unwrap_or(0)
    }

    /// Takes a block out of its queue, if it stands in one.
    fn take_out(&mut self, id: u32) {
        let state = self.state(id);
        if state & PARKED == 0 {
            let queue = if state & SMALL != 0 { &mut self.small } else { &mut self.main };
            self.links.unlink(queue, id);
        }
    }

    /// A block of the small queue goes on to the main queue.
    fn promote(&mut self, id: u32) {
        self.links.unlink(&mut self.small, id);
        self.links.push_newest(&mut self.main, id);
        self.small_bytes -= self.sizes[id as usize].bytes();
        self.state[id as usize] = self.state(id) & HELD | MAIN;
    }

    /// A block of the main queue has used up one use, and goes round once more.
    fn go_round(&mut self, id: u32) {
        self.links.unlink(&mut self.main, id);
        self.links.push_newest(&mut self.main, id);
        self.state[id as usize] -= 1;
    }
}

impl Policy for S3Fifo {
    fn admits(&mut self, fingerprint: u64, _bytes: u32) -> bool {
        if self.share > 0 || self.small.oldest().is_some() || self.ghost.knows(fingerprint) {
            return true;
        }
        self.ghost.remember(fingerprint, self.blocks);
        false
    }

    fn insert(&mut self, id: u32, fingerprint: u64, bytes: u32) {
        if id == NONE {
            return;
        }
        self.remove(id);
        self.links.grow(id);
        grow(&mut self.state, id, 0);
        grow(&mut self.sizes, id, Size(0));
        let size = Size::new(bytes);
        self.sizes[id as usize] = size;
        self.bytes += size.bytes();
        self.blocks += 1;
        if self.ghost.take(fingerprint) {
            self.state[id as usize] = MAIN;
            self.links.push_newest(&mut self.main, id);
        } else {
            self.state[id as usize] = SMALL;
            self.small_bytes += size.bytes();
            self.links.push_newest(&mut self.small, id);
        }
    }

    fn touch(&mut self, id: u32, _fingerprint: u64) {
        let state = self.state(id);
        if state != 0 && state & USES != USES {
            self.state[id as usize] = state + 1;
        }
    }

    fn hold(&mut self, id: u32) {
        if self.state(id) != 0 {
            self.state[id as usize] |= HELD;
        }
    }

    fn release(&mut self, id: u32) {
        let state = self.state(id);
        if state & PARKED != 0 {
            self.links.push_oldest(&mut self.main, id);
        }
        if state != 0 {
            self.state[id as usize] = state & !(HELD | PARKED);
        }
    }

    fn victim(&mut self) -> Option<u32> {
        let mut steps = 0;
        loop {
            let small_first = self.small_bytes * 100 >= self.bytes * self.share;
            let (small, main) = (self.small.oldest(), self.main.oldest());
            let id = if small_first { small.or(main) } else { main.or(small) }?;
            let state = self.state(id);
            let (used, held) = (state & USES != 0 && steps < MAX_STEPS, state & HELD != 0);
            steps += 1;
            if state & SMALL != 0 && (used || held) {
                self.promote(id);
            } else if used {
                self.go_round(id);
            } else if held {
                self.links.unlink(&mut self.main, id);
                self.state[id as usize] |= PARKED;
            } else {
                return Some(id);
            }
        }
    }

    fn evict(&mut self, id: u32, fingerprint: u64) {
        if self.state(id) & SMALL != 0 {
            self.ghost.remember(fingerprint, self.blocks);
        }
        self.remove(id);
    }

    fn remove(&mut self, id: u32) {
        let state = self.state(id);
        if state == 0 {
            return;
        }
        self.take_out(id);
        let bytes = self.sizes[id as usize].bytes();
        self.bytes -= bytes;
        self.blocks -= 1;
        if state & SMALL != 0 {
            self.small_bytes -= bytes;
        }
        self.state[id as usize] = 0;
    }

    fn memory(&self) -> usize {
        self.links.memory()
            + self.state.capacity()
            + self.sizes.capacity() * size_of::<Size>()
            + self.ghost.memory()
    }
}

/// Bytes of a block in 16 bits: 11 bits times a power of two, at most 0.1 % more than they are.
#[derive(Clone, Copy)]
struct Size(u16);

impl Size {
    fn new(bytes: u32) -> Size {
        let shift = (u32::BITS - bytes.leading_zeros()).saturating_sub(11);
        let mantissa = u64::from(bytes).div_ceil(1 << shift);
        // Rounding up may give a twelfth bit.
        let (mantissa, shift) =
            if mantissa >> 11 == 0 { (mantissa, shift) } else { (mantissa >> 1, shift + 1) };
        Size((shift << 11) as u16 | mantissa as u16)
    }

    fn bytes(self) -> u64 {
        u64::from(self.0 & 0x7ff) << (self.0 >> 11)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::mix;

    #[test]
    fn a_size_is_exact_up_to_2047_and_never_less_nor_more_than_a_thousandth_too_much() {
        for bytes in (0..=2047)
            .chain((0..32).flat_map(|bit| [(1 << bit) - 1, 1 << bit, (1 << bit) + 1, 3 << bit >> 1]))
        {
            let (exact, kept) = (u64::from(bytes), Size::new(bytes).bytes());
            assert!(kept >= exact && kept <= exact + exact / 1000, "{exact} is kept as {kept}");
        }
        assert_eq!(Size::new(u32::MAX).bytes(), 1 << 32);
    }

    #[test]
    fn bytes_are_those_of_the_blocks_that_are_there() {
        let mut policy = S3Fifo::new(10);
        for step in 0..50_000u64 {
            let (draw, id) = (mix(step), (mix(step) >> 8) as u32 % 300);
            match draw % 8 {
                0..=2 => policy.insert(id, mix(u64::from(id)), (draw >> 40) as u32),
                3 => policy.touch(id, mix(u64::from(id))),
                4 => policy.hold(id),
                5 => policy.release(id),
                6 => policy.remove(id),
                _ => {
                    if let Some(victim) = policy.victim() {
                        policy.evict(victim, mix(u64::from(victim)));
                    }
                }
            }
            if step % 100 == 0 {
                let sum = |mask: u8| {
                    (0..300)
                        .filter(|id| policy.state(*id) & mask != 0)
                        .map(|id| policy.sizes[id as usize].bytes())
                        .sum::<u64>()
                };
                assert_eq!(
                    (policy.bytes, policy.small_bytes),
                    (sum(SMALL | MAIN), sum(SMALL)),
                    "step {step}"
                );
                assert_eq!(policy.blocks, (0..300).filter(|id| policy.state(*id) != 0).count());
            }
        }
    }

    #[test]
    fn a_call_moves_a_bounded_number_of_blocks() {
        let (mut policy, blocks) = (S3Fifo::new(10), 3 * MAX_STEPS);
        for id in 0..blocks {
            policy.insert(id, mix(u64::from(id)), 1);
            policy.touch(id, mix(u64::from(id)));
        }
        // All have been used: without a bound the whole small queue would go on to the main queue.
        assert!(policy.victim().is_some());
        let moved = (0..blocks).filter(|id| policy.state(*id) & MAIN != 0).count();
        assert!(moved <= MAX_STEPS as usize, "{moved} blocks were moved");
    }

    #[test]
    fn a_block_that_is_released_is_as_old_as_it_was() {
        let mut policy = S3Fifo::new(10);
        for id in 0..5 {
            policy.insert(id, mix(u64::from(id)), 1);
            policy.touch(id, mix(u64::from(id)));
        }
        assert_eq!(policy.victim(), Some(0), "all have gone on to the main queue");
        policy.hold(0);
        assert_eq!(policy.victim(), Some(1), "0 is put aside");
        policy.release(0);
        assert_eq!(policy.victim(), Some(0));
    }
}
