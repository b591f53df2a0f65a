//! Bytes that depend on their place, so that one at a wrong place is seen.

use crate::Result;

/// The pages that are moved: every other one, so that no two are neighbours and each is an extent of its own.
pub fn pages(from: u64, count: u64, all: u64) -> Vec<u32> {
    (from..from + count).map(|page| (page % (all / 2) * 2) as u32).collect()
}

/// What a page holds.
pub fn filled(page: usize, size: usize, seed: u64) -> Vec<u8> {
    let first = (page * size / 8) as u64;
    (first..first + (size / 8) as u64).flat_map(|word| (word ^ seed << 48).to_le_bytes()).collect()
}

/// Compares each page that is moved with what it must hold; the rest is left alone.
///
/// # Errors
/// Names the first page that is wrong.
pub fn check(
    len: usize,
    size: usize,
    seed: u64,
    mut read: impl FnMut(usize, &mut [u8]) -> Result<()>,
) -> Result<()> {
    let mut found = vec![0; size];
    for page in (0..len / size / 2 * 2).step_by(2) {
        read(page * size, &mut found)?;
        if found != filled(page, size, seed) {
            return Err(format!("page {page} of {size} bytes does not hold what was moved").into());
        }
    }
    Ok(())
}
