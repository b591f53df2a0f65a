//! A piece of a copy, as the driver's calls and kvik's kernel take it.

use super::abi::Addr;

/// Which way the copies of a call go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    ToHost,
    ToDevice,
    Within,
}

/// Bytes that lie side by side. The kernel reads it as it is here (`copy.cu`).
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub to: Addr,
    pub from: Addr,
    pub len: u64,
    unused: u64,
}

const _: () = assert!(size_of::<Piece>() == 32);

impl Piece {
    /// The host's addresses are numbers like the device's.
    pub fn new(to: Addr, from: Addr, len: usize) -> Piece {
        Piece { to, from, len: len as u64, unused: 0 }
    }

    /// The widest word of which both sides lie alike to its boundaries: 16 bytes at most.
    pub fn word(&self) -> u64 {
        1 << ((self.to ^ self.from) | 16).trailing_zeros()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_widest_word_is_that_of_both_sides() {
        for (to, from, word) in
            [(0, 0, 16), (32, 48, 16), (5, 21, 16), (8, 16, 8), (4, 0, 4), (2, 0, 2), (7, 8, 1)]
        {
            assert_eq!(Piece::new(to, from, 1).word(), word, "{to} {from}");
        }
    }
}
