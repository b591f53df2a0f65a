//! Checksums of blocks that a transfer has brought.

use crate::Shape;
use crate::entry::sum_of;
use kvik_core::Result;
use kvik_engine::{PageSet, Report};

/// A checksum for each page of a page set that was read, as [`crate::Entry::sum`] has it.
///
/// # Errors
/// The region of the pages was closed.
pub(crate) fn sums_after(read: &Report, pages: &PageSet) -> Result<Vec<u64>> {
    let shape = shape_of(pages)?;
    let parts = pages.sums_after(read, shape.summed_layers())?;
    Ok(parts.chunks(shape.sums()).map(sum_of).collect())
}

/// How many layers of a page a checksum covers, for [`kvik_engine::TransferOptions::sums`].
///
/// # Errors
/// `InvalidArgument` for pages that no store keeps.
pub(crate) fn summed_layers(pages: &PageSet) -> Result<u32> {
    Ok(shape_of(pages)?.summed_layers())
}

fn shape_of(pages: &PageSet) -> Result<Shape> {
    let (layers, slices, run_bytes) = pages.shape();
    Shape::new(layers, slices, run_bytes)
}
