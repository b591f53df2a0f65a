//! The table in which a transfer's page checksums come together.
//!
//! Who moves bytes has them in a cache, and sums them there for a fraction of what it costs to read them again from
//! memory. The table says which part of the stream each checksum covers, and keeps those that are known; several
//! threads fill it, each for what it moved.

use crate::{Code, Error, Order, Result, View};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A checksum for each so many layers of a page, of all pages of a view that goes page by page.
#[derive(Debug)]
pub struct PageSums {
    /// Bytes of a page in the stream, and of the part of one that a checksum covers; the last may be shorter.
    page: u64,
    part: u64,
    table: Box<[(AtomicBool, AtomicU64)]>,
}

impl PageSums {
    /// An empty table for checksums of `layers` layers each.
    ///
    /// # Errors
    /// `InvalidArgument` for 0 layers, or a view that goes layer by layer.
    pub fn new(view: &View, layers: u32) -> Result<PageSums> {
        if layers == 0 || view.order() != Order::PageFirst {
            let text = "a checksum covers at least one layer, of pages that follow one another";
            return Err(Error::new(Code::InvalidArgument, text));
        }
        let page = view.row_bytes() * view.layers().len() as u64;
        let part = view.row_bytes() * u64::from(layers).min(view.layers().len() as u64);
        let count = view.pages().len() as u64 * page.div_ceil(part);
        Ok(PageSums { page, part, table: (0..count).map(|_| Default::default()).collect() })
    }

    /// How many checksums it has when it is full, those of a page after those of the page before.
    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// Whether it has room for none; never so.
    pub fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    /// Bytes that each checksum covers, where all cover as many.
    pub fn unit(&self) -> Option<u64> {
        self.page.is_multiple_of(self.part).then_some(self.part)
    }

    /// Whether both have checksums of the same parts of as many pages.
    pub fn is_like(&self, other: &PageSums) -> bool {
        (self.page, self.part, self.len()) == (other.page, other.part, other.len())
    }

    /// The part of the stream that a checksum covers.
    pub fn covers(&self, number: usize) -> Range<u64> {
        let each = self.page.div_ceil(self.part);
        let (page, within) = (number as u64 / each, number as u64 % each);
        let start = page * self.page + within * self.part;
        start..(start + self.part).min((page + 1) * self.page)
    }

    /// The checksums of which all that they cover lies in a part of the stream.
    pub fn within(&self, part: Range<u64>) -> Range<usize> {
        let each = self.page.div_ceil(self.part);
        let first = part.start / self.page * each + (part.start % self.page).div_ceil(self.part);
        let last = part.end / self.page * each + part.end % self.page / self.part;
        let (first, last) = (first as usize, (last as usize).min(self.table.len()));
        first.min(last)..last
    }

    /// Whether a part of the stream is what some checksums cover, and no more.
    pub fn is_whole(&self, part: &Range<u64>) -> bool {
        let numbers = self.within(part.clone());
        !numbers.is_empty()
            && self.covers(numbers.start).start == part.start
            && self.covers(numbers.end - 1).end == part.end
    }

    /// Where about so many bytes end, at least one byte, so that no checksum covers bytes on both sides if they begin so.
    pub fn align(&self, bytes: u64) -> u64 {
        match bytes {
            _ if bytes >= self.page => bytes / self.page * self.page,
            _ => match self.unit() {
                Some(unit) if bytes >= unit => bytes / unit * unit,
                _ => bytes.max(1),
            },
        }
    }

    /// Keeps a checksum, also in place of one that is there.
    pub fn set(&self, number: usize, sum: u64) {
        if let Some((known, kept)) = self.table.get(number) {
            kept.store(sum, Ordering::Relaxed);
            known.store(true, Ordering::Release);
        }
    }

    /// A checksum that is known.
    pub fn get(&self, number: usize) -> Option<u64> {
        let (known, kept) = self.table.get(number)?;
        known.load(Ordering::Acquire).then(|| kept.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Layers, Layout};
    use proptest::prelude::*;
    use std::sync::Arc;

    proptest! {
        #[test]
        fn checksums_cover_the_stream_and_none_covers_two_pages(
            (pages, count, each) in (1u32..6, 1u32..10, 1u32..12), run in 1u64..9, cut in 1u64..400, from in 0u64..400,
        ) {
            let layers = Layers::Strided { count, stride: run * u64::from(pages) };
            let layout = Arc::new(Layout::new(0, pages, run, run, 1, run, layers).unwrap());
            let ids: Vec<u32> = (0..pages).rev().collect();
            let view = View::new(layout, ids.into(), 0..count, 0..1, Order::PageFirst).unwrap();
            let sums = PageSums::new(&view, each).unwrap();
            let page = run * u64::from(count);
            let mut at = 0;
            for number in 0..sums.len() {
                let part = sums.covers(number);
                prop_assert_eq!(part.start, at);
                prop_assert!(part.end > at && at / page == (part.end - 1) / page);
                at = part.end;
            }
            prop_assert_eq!(at, view.bytes());
            // Within a part lie those that begin and end there.
            let part = from.min(view.bytes())..(from + cut).min(view.bytes());
            let inside = |number: &usize| {
                let covers = sums.covers(*number);
                covers.start >= part.start && covers.end <= part.end
            };
            let expected: Vec<usize> = (0..sums.len()).filter(inside).collect();
            prop_assert_eq!(sums.within(part.clone()).collect::<Vec<_>>(), expected.clone());
            let bytes: u64 = expected.iter().map(|number| sums.covers(*number)).map(|part| part.end - part.start).sum();
            prop_assert_eq!(sums.is_whole(&part), bytes > 0 && bytes == part.end - part.start);
            // Chunks of an aligned size leave none on both sides, where there is such a size.
            let chunk = sums.align(cut);
            if cut >= page || (cut >= sums.part && page.is_multiple_of(sums.part)) {
                prop_assert!(chunk <= cut);
                let chunks = (0..view.bytes()).step_by(chunk as usize);
                let whole: usize = chunks.map(|at| sums.within(at..(at + chunk).min(view.bytes())).len()).sum();
                prop_assert_eq!(whole, sums.len());
            }
        }
    }

    #[test]
    fn a_checksum_is_there_when_it_was_set_and_layer_by_layer_there_are_none() {
        let layout = Arc::new(Layout::contiguous(2, 64).unwrap());
        let view = View::new(layout, [1, 0].into(), 0..1, 0..1, Order::PageFirst).unwrap();
        let sums = PageSums::new(&view, 9).unwrap();
        assert_eq!((sums.len(), sums.get(1), sums.get(2)), (2, None, None));
        sums.set(1, 0);
        sums.set(2, 7);
        assert_eq!((sums.get(0), sums.get(1), sums.get(2)), (None, Some(0), None));
        assert!(PageSums::new(&view, 0).is_err());
        assert!(PageSums::new(&view.with_order(Order::LayerFirst), 1).is_err());
    }
}
