//! How many blocks of a put or a get are moved at once.
//!
//! A window is one transfer for each slab; its blocks can be used when all of them are there. The first has one block, and
//! each has twice as many as the one before: so use begins early, at any time a good part of what has come can be used, and
//! few windows are begun. Copying threads keep all processors busy, and windows that move at the same time end at the same
//! time: so much is on its way that they are not idle before the thread that begins windows has had its turn.

/// Bytes of the largest window, at least one block.
const LARGEST: u64 = 64 << 20;
/// No window is begun while so many bytes are on their way.
const AHEAD: u64 = 128 << 20;

/// The windows of one put or get.
pub(crate) struct Windows {
    block_bytes: u64,
    /// Blocks of the next one.
    next: u64,
    /// Blocks on their way.
    moving: u64,
}

impl Windows {
    pub fn new(block_bytes: u64) -> Windows {
        Windows { block_bytes, next: 1, moving: 0 }
    }

    /// Bytes of a block.
    pub fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// Whether another window is to be begun.
    pub fn has_room(&self) -> bool {
        self.moving * self.block_bytes < AHEAD
    }

    /// How many blocks the next window has at most.
    pub fn blocks(&self) -> usize {
        self.next as usize
    }

    /// A window of so many blocks was begun.
    pub fn begun(&mut self, blocks: usize) {
        self.moving += blocks as u64;
        self.next = (self.next * 2).min((LARGEST / self.block_bytes).max(1));
    }

    /// One of so many has ended.
    pub fn ended(&mut self, blocks: usize) {
        self.moving = self.moving.saturating_sub(blocks as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_grow_until_enough_is_on_its_way() {
        let mut windows = Windows::new(1 << 20);
        let mut begun = Vec::new();
        while windows.has_room() {
            begun.push(windows.blocks());
            windows.begun(windows.blocks());
        }
        assert_eq!(begun, [1, 2, 4, 8, 16, 32, 64, 64]);
        windows.ended(64);
        assert!(windows.has_room());
        // A block that is larger than a window is one.
        let mut large = Windows::new(1 << 30);
        for _ in 0..3 {
            assert!(large.has_room() && large.blocks() == 1);
            large.begun(1);
            assert!(!large.has_room());
            large.ended(1);
        }
    }
}
