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
        for run in view.runs(part) {
            read(run.offset as usize, run.len as usize, scratch, &mut |bytes| sum.update(bytes))
                .map_err(|error| from_host(Code::InvalidArgument, error))?;
        }
        Ok(sum.finish())
    }
}
