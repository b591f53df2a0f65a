//! The checksum of a page.
//!
//! XXH3 with 64 bits: it finds corruption (a flipped bit, a lost or moved run), not malice; who may send at all is
//! the handshake's matter. It runs near memory speed on the baseline instruction set, which a CRC does not.

use xxhash_rust::xxh3::Xxh3Default;

/// The checksum of a page in the making: bytes are fed in any division.
#[derive(Clone, Default)]
pub struct PageSum(Xxh3Default);

impl PageSum {
    /// Takes the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The sum of what was taken, ready for the next page.
    pub fn finish(&mut self) -> u64 {
        let sum = self.0.digest();
        self.0.reset();
        sum
    }
}

/// The checksum of these bytes.
pub fn page_sum(bytes: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(bytes)
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
