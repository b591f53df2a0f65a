//! Least recently used.

use super::api::Policy;
use super::queue::{Links, NONE, Queue, grow};

const RESIDENT: u8 = 1;
const HELD: u8 = 2;
/// Held, and out of the queue.
const PARKED: u8 = 4;

/// Names the block whose last use is longest ago. 9 bytes a block.
pub(super) struct Lru {
    links: Links,
    queue: Queue,
    state: Vec<u8>,
}

impl Lru {
    pub(super) fn new() -> Lru {
        Lru { links: Links::default(), queue: Queue::new(), state: Vec::new() }
    }

    fn state(&self, id: u32) -> u8 {
        self.state.get(id as usize).copied().unwrap_or(0)
    }

    fn take_out(&mut self, id: u32) {
        if self.state(id) & PARKED == 0 {
            self.links.unlink(&mut self.queue, id);
        }
    }
}

impl Policy for Lru {
    fn insert(&mut self, id: u32, _fingerprint: u64, _bytes: u32) {
        if id == NONE {
            return;
        }
        self.remove(id);
        self.links.grow(id);
        grow(&mut self.state, id, 0);
        self.state[id as usize] = RESIDENT;
        self.links.push_newest(&mut self.queue, id);
    }

    fn touch(&mut self, id: u32, _fingerprint: u64) {
        if self.state(id) != 0 {
            self.take_out(id);
            self.state[id as usize] &= !PARKED;
            self.links.push_newest(&mut self.queue, id);
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
            self.links.push_oldest(&mut self.queue, id);
        }
        if state != 0 {
            self.state[id as usize] = RESIDENT;
        }
    }

    fn victim(&mut self) -> Option<u32> {
        while let Some(id) = self.queue.oldest() {
            if self.state(id) & HELD == 0 {
                return Some(id);
            }
            self.links.unlink(&mut self.queue, id);
            self.state[id as usize] |= PARKED;
        }
        None
    }

    fn remove(&mut self, id: u32) {
        if self.state(id) != 0 {
            self.take_out(id);
            self.state[id as usize] = 0;
        }
    }

    fn memory(&self) -> usize {
        self.links.memory() + self.state.capacity()
    }
}
