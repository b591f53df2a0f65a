//! Checksums of many blocks at once.
//!
//! Summing a block takes about as long as copying it, so that one thread that sums what several copy would be the limit
//! of a put or a get. Several sum a window.

use crate::Shape;
use crate::entry::sum_of;
use kvik_core::Result;
use kvik_engine::PageSet;
use std::ops::Range;
use std::sync::OnceLock;
use std::thread::Builder;

/// Threads that sum one window, at most: with more, memory is the limit.
const THREADS: usize = 4;
/// Bytes for which another thread pays: starting one takes as long as summing about a tenth of them.
const EACH: u64 = 2 << 20;

/// A checksum for each page of a page set, as [`crate::Entry::sum`] has it.
///
/// # Errors
/// The region of the pages was closed.
pub(crate) fn block_sums(pages: &PageSet) -> Result<Vec<u64>> {
    let (layers, slices, run_bytes) = pages.shape();
    let shape = Shape::new(layers, slices, run_bytes)?;
    let threads = (pages.bytes() / EACH).clamp(1, most_threads() as u64) as usize;
    if threads == 1 {
        return sums_of(pages, shape);
    }
    let each = pages.len().div_ceil(threads);
    let sum = |range: Range<usize>| sums_of(&pages.select(range)?, shape);
    std::thread::scope(|scope| {
        let begin = |start: usize| {
            let (sum, range) = (&sum, start..(start + each).min(pages.len()));
            let some = range.clone();
            let thread = Builder::new().name("kvik-store-sum".into()).spawn_scoped(scope, move || sum(some));
            (range, thread.ok())
        };
        let others: Vec<_> = (each..pages.len()).step_by(each).map(begin).collect();
        let mut sums = sum(0..each)?;
        for (range, thread) in others {
            // Where the machine gave no thread, this one does it.
            sums.extend(match thread.map(|thread| thread.join()) {
                Some(Ok(more)) => more?,
                _ => sum(range)?,
            });
        }
        Ok(sums)
    })
}

/// Found out once: it takes some files of the system.
fn most_threads() -> usize {
    static MOST: OnceLock<usize> = OnceLock::new();
    *MOST.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from).min(THREADS))
}

fn sums_of(pages: &PageSet, shape: Shape) -> Result<Vec<u64>> {
    let parts = pages.sums(shape.summed_layers())?;
    Ok(parts.chunks(shape.sums()).map(sum_of).collect())
}
