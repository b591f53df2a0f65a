//! Where a page's bytes lie in a region.
//!
//! A layout is arithmetic: element (layer, page, slice) starts at
//! `offset + layer + page * page_stride + slice * slice_stride` and is `run_bytes` long. Slices are whatever divides
//! a page: KV heads, K and V halves, sub-pages.

use crate::{Code, Error, Result};

/// Pages are not seen in more parts than this, which is more than pages of any two engines differ by.
pub const MAX_PARTS: u32 = 256;

/// Where the layers of a layout start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Layers {
    /// `count` layers, each `stride` bytes after the one before.
    Strided {
        /// Number of layers.
        count: u32,
        /// Bytes from one layer to the next.
        stride: u64,
    },
    /// One start per layer, in bytes from the layout's offset.
    At(Vec<u64>),
}

/// How pages lie in a region. Checked when made: elements never overlap and no arithmetic on it overflows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    offset: u64,
    pages: u32,
    run_bytes: u64,
    page_stride: u64,
    slices: u32,
    slice_stride: u64,
    layers: Layers,
    end: u64,
}

impl Layout {
    /// One layer of contiguous pages, from the start of the region.
    pub fn contiguous(pages: u32, page_bytes: u64) -> Result<Layout> {
        Layout::new(0, pages, page_bytes, page_bytes, 1, page_bytes, Layers::Strided { count: 1, stride: 0 })
    }

    /// A layout of `pages` pages, see the module's text for the formula. All sizes in bytes.
    ///
    /// # Errors
    /// `LayoutMismatch` when a count or `run_bytes` is zero, when two elements overlap (or a stride is too small for
    /// what lies inside it), or when an offset would not fit into 63 bits.
    pub fn new(
        offset: u64,
        pages: u32,
        run_bytes: u64,
        page_stride: u64,
        slices: u32,
        slice_stride: u64,
        layers: Layers,
    ) -> Result<Layout> {
        let count = match &layers {
            Layers::Strided { count, .. } => *count,
            Layers::At(starts) => u32::try_from(starts.len()).unwrap_or(0),
        };
        for (what, value) in [
            ("pages", u64::from(pages)),
            ("run_bytes", run_bytes),
            ("slices", u64::from(slices)),
            ("layers", count.into()),
        ] {
            if value == 0 {
                return Err(wrong(format!("the layout's {what} is zero; it takes at least 1")));
            }
        }
        let mut layout =
            Layout { offset, pages, run_bytes, page_stride, slices, slice_stride, layers, end: 0 };
        layout.end = layout.checked_end()?;
        layout.check_overlap()?;
        Ok(layout)
    }

    /// Number of pages.
    pub fn pages(&self) -> u32 {
        self.pages
    }
    /// Number of layers.
    pub fn layers(&self) -> u32 {
        match &self.layers {
            Layers::Strided { count, .. } => *count,
            Layers::At(starts) => starts.len() as u32,
        }
    }
    /// Number of slices of a page.
    pub fn slices(&self) -> u32 {
        self.slices
    }
    /// Contiguous bytes of one element.
    pub fn run_bytes(&self) -> u64 {
        self.run_bytes
    }
    /// Bytes of one of `parts` equal parts of an element.
    ///
    /// # Errors
    /// `InvalidArgument` for a number that is 0, above [`MAX_PARTS`], or does not divide the element into whole bytes.
    pub fn part_bytes(&self, parts: u32) -> Result<u64> {
        let run = self.run_bytes;
        if parts == 0 || parts > MAX_PARTS || !run.is_multiple_of(parts.into()) {
            let text = format!(
                "pages with runs of {run} bytes cannot be seen in {parts} parts: take a number from 1 to {MAX_PARTS} that divides them"
            );
            return Err(Error::new(Code::InvalidArgument, text));
        }
        Ok(run / u64::from(parts))
    }
    /// Bytes from one page to the next.
    pub fn page_stride(&self) -> u64 {
        self.page_stride
    }
    /// Bytes from one slice to the next.
    pub fn slice_stride(&self) -> u64 {
        self.slice_stride
    }
    /// Bytes from the start of the region to element (0, 0, 0) of a strided layout.
    pub fn offset(&self) -> u64 {
        self.offset
    }
    /// Where the layers start.
    pub fn layer_starts(&self) -> &Layers {
        &self.layers
    }
    /// One past the last byte that any element uses: the least length of a region with this layout.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// First byte of an element, from the start of the region. Indices must be in range (debug-checked).
    pub fn at(&self, layer: u32, page: u32, slice: u32) -> u64 {
        debug_assert!(layer < self.layers() && page < self.pages && slice < self.slices);
        self.offset
            + self.layer_at(layer)
            + u64::from(page) * self.page_stride
            + u64::from(slice) * self.slice_stride
    }

    /// True where a page of all layers lies together, so that going page by page makes longer runs.
    pub fn page_major(&self) -> bool {
        match &self.layers {
            Layers::Strided { count, stride } => *count > 1 && *stride < self.page_stride,
            Layers::At(starts) => starts.len() > 1 && starts.iter().max() < Some(&self.page_stride),
        }
    }

    /// The shape in words, for errors: layers, pages, slices and bytes of an element.
    pub fn shape(&self) -> String {
        format!(
            "{} layers x {} pages x {} slices x {} bytes",
            self.layers(),
            self.pages,
            self.slices,
            self.run_bytes
        )
    }

    /// Eight bytes of blake3 over the canonical encoding: equal layouts have equal digests.
    pub fn digest(&self) -> [u8; 8] {
        let mut hasher = blake3::Hasher::new_derive_key("kvik layout v1");
        for number in [
            self.offset,
            self.pages.into(),
            self.run_bytes,
            self.page_stride,
            self.slices.into(),
            self.slice_stride,
            self.layers().into(),
        ] {
            hasher.update(&number.to_le_bytes());
        }
        for layer in 0..self.layers() {
            hasher.update(&self.layer_at(layer).to_le_bytes());
        }
        let mut digest = [0; 8];
        hasher.finalize_xof().fill(&mut digest);
        digest
    }

    fn layer_at(&self, layer: u32) -> u64 {
        match &self.layers {
            Layers::Strided { stride, .. } => u64::from(layer) * stride,
            Layers::At(starts) => starts.get(layer as usize).copied().unwrap_or(0),
        }
    }

    fn checked_end(&self) -> Result<u64> {
        let last_layer = match &self.layers {
            Layers::Strided { count, stride } => u64::from(count - 1).checked_mul(*stride),
            Layers::At(starts) => starts.iter().max().copied(),
        };
        let end = || {
            let page = u64::from(self.pages - 1).checked_mul(self.page_stride)?;
            let slice = u64::from(self.slices - 1).checked_mul(self.slice_stride)?;
            self.offset
                .checked_add(last_layer?)?
                .checked_add(page)?
                .checked_add(slice)?
                .checked_add(self.run_bytes)
        };
        end().filter(|end| *end <= i64::MAX as u64).ok_or_else(|| {
            wrong(format!(
                "the layout ({}) reaches beyond 2^63 bytes; check its strides and offsets",
                self.shape()
            ))
        })
    }

    /// Nested strides: ordered by stride, each must step over all that lies inside it.
    fn check_overlap(&self) -> Result<()> {
        let mut dims = vec![
            ("slice_stride", self.slice_stride, self.slices),
            ("page_stride", self.page_stride, self.pages),
        ];
        if let Layers::Strided { count, stride } = &self.layers {
            dims.push(("layer_stride", *stride, *count));
        }
        dims.retain(|(_, _, count)| *count > 1);
        dims.sort_by_key(|(_, stride, _)| *stride);
        let Layers::At(starts) = &self.layers else { return nested(&dims, self.run_bytes).map(drop) };

        let mut starts = starts.clone();
        starts.sort_unstable();
        let gap = starts.windows(2).map(|pair| pair[1] - pair[0]).min().unwrap_or(u64::MAX);
        nested(&dims, self.run_bytes)?;
        // Layers lie apart as a whole, or all inside one step of a page, or of a slice: dimensions within a layer, all
        // layers, dimensions around them.
        let reach = starts.last().zip(starts.first()).map_or(0, |(last, first)| last - first);
        let fits = (0..=dims.len()).any(|inner| {
            nested(&dims[..inner], self.run_bytes)
                .is_ok_and(|bytes| bytes <= gap && nested(&dims[inner..], reach + bytes).is_ok())
        });
        if !fits {
            return Err(wrong(format!(
                "layers of the layout overlap: two start {gap} bytes apart, which is too little for what lies between"
            )));
        }
        Ok(())
    }
}

/// Bytes that the nested dimensions span, or which of them overlaps.
fn nested(dims: &[(&str, u64, u32)], run_bytes: u64) -> Result<u64> {
    dims.iter().try_fold(run_bytes, |inside, (name, stride, count)| {
        if *stride < inside {
            return Err(wrong(format!(
                "elements of the layout overlap: {name} is {stride} bytes, but {inside} bytes lie inside one step"
            )));
        }
        Ok(inside + u64::from(count - 1) * stride)
    })
}

fn wrong(text: String) -> Error {
    Error::new(Code::LayoutMismatch, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strided(count: u32, stride: u64) -> Layers {
        Layers::Strided { count, stride }
    }

    #[test]
    fn elements_lie_where_the_formula_says() {
        let layout = Layout::new(64, 10, 16, 100, 4, 20, strided(3, 1000)).unwrap();
        assert_eq!(layout.at(2, 9, 3), 64 + 2000 + 900 + 60);
        assert_eq!(layout.end(), 64 + 2000 + 900 + 60 + 16);
        assert!(!layout.page_major());
    }

    #[test]
    fn overlap_zero_and_overflow_are_refused() {
        assert!(Layout::new(0, 10, 16, 15, 1, 0, strided(1, 0)).is_err());
        assert!(Layout::new(0, 10, 16, 64, 5, 16, strided(1, 0)).is_err());
        assert!(Layout::new(0, 0, 16, 64, 1, 16, strided(1, 0)).is_err());
        assert!(Layout::new(0, 2, 16, u64::MAX / 2, 1, 16, strided(9, u64::MAX / 2)).is_err());
        assert!(Layout::new(0, 4, 16, 16, 1, 0, strided(2, 63)).is_err());
        assert!(Layout::new(0, 4, 16, 16, 1, 0, strided(2, 64)).is_ok());
    }

    #[test]
    fn layers_apart_and_layers_inside_a_page_are_both_layouts() {
        assert!(Layout::new(0, 4, 16, 16, 1, 0, Layers::At(vec![1000, 0, 300])).is_ok());
        let page_major = Layout::new(0, 4, 16, 64, 1, 0, Layers::At(vec![0, 16, 48])).unwrap();
        assert!(page_major.page_major());
        assert!(Layout::new(0, 4, 16, 64, 1, 0, Layers::At(vec![0, 8])).is_err());
        assert!(Layout::new(0, 4, 16, 64, 1, 0, Layers::At(vec![0, 56])).is_err());
        assert!(Layout::new(0, 4, 16, 64, 1, 0, Layers::At(vec![])).is_err());
    }

    #[test]
    fn slices_may_lie_around_layers_and_around_pages() {
        let around_layers = |last| Layout::new(0, 3, 16, 96, 2, 48, Layers::At(vec![0, 16, last]));
        assert_eq!(around_layers(32).unwrap().end(), 3 * 96);
        assert!(around_layers(40).is_err());
        let around_pages = |slice| Layout::new(0, 3, 16, 16, 2, slice, Layers::At(vec![0, 96]));
        assert_eq!(around_pages(48).unwrap().end(), 2 * 96);
        assert!(around_pages(40).is_err());
        assert!(around_pages(56).is_err());
    }

    #[test]
    fn the_digest_tells_layouts_apart() {
        let one = Layout::contiguous(10, 64).unwrap();
        assert_eq!(one.digest(), Layout::contiguous(10, 64).unwrap().digest());
        assert_ne!(one.digest(), Layout::contiguous(11, 64).unwrap().digest());
    }
}
