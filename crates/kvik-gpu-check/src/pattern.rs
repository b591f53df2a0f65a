//! Bytes that say where they belong, and numbers that are drawn.

/// `len` bytes of the pattern of `seed` from `at` on: a byte that is elsewhere, or of another seed, is another one
/// almost always.
pub fn bytes(seed: u64, at: usize, len: usize) -> Vec<u8> {
    let words = (at / 8..(at + len).div_ceil(8)).flat_map(|word| mix(seed ^ word as u64).to_le_bytes());
    words.skip(at % 8).take(len).collect()
}

/// Whether `have` is that; the first place where it is not.
pub fn compare(have: &[u8], want: &[u8]) -> Result<(), String> {
    match have.iter().zip(want).position(|(have, want)| have != want) {
        None if have.len() == want.len() => Ok(()),
        None => Err(format!("{} bytes where {} belong", have.len(), want.len())),
        Some(at) => {
            let wrong = have.iter().zip(want).filter(|(have, want)| have != want).count();
            Err(format!("{wrong} of {} bytes are wrong, the first at {at}", want.len()))
        }
    }
}

/// The numbers below `count` in an order that is drawn.
pub fn shuffled(seed: u64, count: usize) -> Vec<usize> {
    let mut numbers: Vec<usize> = (0..count).collect();
    for at in (1..count).rev() {
        numbers.swap(at, (mix(seed ^ at as u64) % (at as u64 + 1)) as usize);
    }
    numbers
}

/// A number that is drawn, the same one each time.
pub fn number(seed: u64) -> u64 {
    mix(seed)
}

/// Spreads the bits of a number over all of them (the finaliser of SplitMix64).
fn mix(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
