//! The checksum of a page.
//!
//! XXH3 with 64 bits: it finds corruption (a flipped bit, a lost or moved run), not malice; who may send at all is
//! the handshake's matter. The instruction set is chosen at run time; on bytes that are in the cache it runs several
//! times faster than memory.

use std::fmt;
use std::hash::Hasher;
use twox_hash::xxhash3_64::{DEFAULT_SECRET_LENGTH, Hasher as Xxh3, RawHasher, SecretBuffer};

/// The checksum of a page in the making: bytes are fed in any division.
///
/// It allocates nothing.
#[derive(Clone)]
pub struct PageSum(RawHasher<&'static [u8; DEFAULT_SECRET_LENGTH]>);

impl Default for PageSum {
    fn default() -> Self {
        PageSum(RawHasher::new(SecretBuffer::default()))
    }
}

impl fmt::Debug for PageSum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageSum(..)")
    }
}

impl PageSum {
    /// Takes the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    /// The sum of what was taken, ready for the next page.
    pub fn finish(&mut self) -> u64 {
        std::mem::take(self).0.finish()
    }
}

/// The checksum of these bytes.
pub fn page_sum(bytes: &[u8]) -> u64 {
    Xxh3::oneshot(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_division_does_not_matter_but_every_bit_does() {
        let mut bytes: Vec<u8> = (0..5000u32).map(|i| (i * 31 % 251) as u8).collect();
        let whole = page_sum(&bytes);
        let mut sum = PageSum::default();
        for part in bytes.chunks(37) {
            sum.update(part);
        }
        assert_eq!(sum.finish(), whole);
        bytes[4321] ^= 1;
        assert_ne!(page_sum(&bytes), whole);
    }
}
