//! Checksums of a part of a stream, unit by unit.

use crate::from_host;
use kvik_core::{Code, PageSum, Result, View};
use kvik_host::Memory;
use std::ops::Range;

/// Copies pieces of memory to where they can be summed: registered memory is never a slice.
pub(crate) struct Summer {
    scratch: Vec<u8>,
    sum: PageSum,
}

impl Default for Summer {
    /// 16 KiB fit the first-level cache beside the page itself.
    fn default() -> Self {
        Summer { scratch: vec![0; 16 << 10], sum: PageSum::default() }
    }
}

impl Summer {
    /// Calls `each` with the start and checksum of every unit of the part.
    pub fn units(
        &mut self,
        memory: &Memory,
        view: &View,
        part: Range<u64>,
        unit: u64,
        mut each: impl FnMut(u64, u64),
    ) -> Result<()> {
        let mut start = part.start;
        while start < part.end {
            let end = (start + unit).min(part.end);
            let sum = self.sum_of(view, start..end, |offset, len, scratch, f| {
                memory.for_each_chunk(offset, len, scratch, f)
            })?;
            each(start, sum);
            start = end;
        }
        Ok(())
    }

    /// The checksum of the part, read by `read(offset, len, scratch, take)`.
    pub fn sum_of(
        &mut self,
        view: &View,
        part: Range<u64>,
        read: impl Fn(usize, usize, &mut [u8], &mut dyn FnMut(&[u8])) -> Result<(), kvik_host::HostError>,
    ) -> Result<u64> {
        let Summer { scratch, sum } = self;
        let read = view.runs(part).try_for_each(|run| {
            read(run.offset as usize, run.len as usize, scratch, &mut |bytes| sum.update(bytes))
        });
        // Also after an error: what was summed until then must not be in the next one.
        let sum = sum.finish();
        read.map_err(|error| from_host(Code::InvalidArgument, error))?;
        Ok(sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvik_core::{Layout, Order};
    use kvik_host::HostError;
    use std::sync::Arc;

    #[test]
    fn a_read_that_failed_is_not_in_the_next_sum() {
        let layout = Arc::new(Layout::contiguous(1, 4096).unwrap());
        let view = View::new(layout, [0].into(), 0..1, 0..1, Order::LayerFirst).unwrap();
        let mut summer = Summer::default();
        let mut sum = |fail: bool| {
            summer.sum_of(&view, 0..4096, |_, _, _, take| {
                take(b"what is there");
                if fail { Err(HostError::InvalidArgument("the source has gone".into())) } else { Ok(()) }
            })
        };
        let whole = sum(false).unwrap();
        sum(true).unwrap_err();
        assert_eq!(sum(false).unwrap(), whole);
    }
}
