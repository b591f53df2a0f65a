//! Which elements take part in a transfer, in which order: the stream, and its extents.
//!
//! Both sides of a transfer number the same bytes from 0 to n: the *stream*. Each side maps a position of the
//! stream to its own memory with its own [`View`], by arithmetic: nothing is built per page. [`Extents`] walks two
//! views at once where one process sees both memories.
//!
//! A page goes slice by slice. Seen in *parts*, each run is that many equal parts, and the page goes part by part,
//! inside a part slice by slice: so a page of `[heads][32 tokens][content]` in two parts is the same stream as two
//! pages of `[heads][16 tokens][content]`.

use crate::{Code, Error, Layout, Result};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// Runs are not cut into more parts than this: more than any two page sizes in tokens differ by.
pub const MAX_PARTS: u32 = 4096;

/// Which dimension of a view is outermost in the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Layer by layer, and in each page by page.
    LayerFirst,
    /// Page by page, and in each layer by layer.
    PageFirst,
}

/// A page set seen through a layout: the elements of a transfer on one side, in the order of the stream.
#[derive(Debug, Clone)]
pub struct View {
    layout: Arc<Layout>,
    pages: Arc<[u32]>,
    layers: Range<u32>,
    slices: Range<u32>,
    parts: u32,
    order: Order,
    pieces: Pieces,
}

/// The pieces of one page in one layer: what is contiguous for sure, in the order of the stream.
#[derive(Debug, Clone, Copy)]
struct Pieces {
    /// Bytes of one: of a run or a part of it, or of all slices of a page where they touch.
    bytes: u64,
    /// How many parts there are, of so many slices each.
    parts: u32,
    slices: u32,
}

impl Pieces {
    fn new(layout: &Layout, slices: u32, parts: u32) -> Pieces {
        let run = layout.run_bytes();
        // Where one run lies behind the other anyway, the parts of a run need not be told apart.
        match slices == 1 || (parts == 1 && layout.slice_stride() == run) {
            true => Pieces { bytes: run * u64::from(slices), parts: 1, slices: 1 },
            false => Pieces { bytes: run / u64::from(parts), parts, slices },
        }
    }

    fn count(&self) -> u64 {
        u64::from(self.parts) * u64::from(self.slices)
    }
}

/// What two views must agree in to map the same stream; small enough to travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Layers.
    pub layers: u32,
    /// Pages.
    pub pages: u32,
    /// Bytes of one page in one layer, all its slices together.
    pub row_bytes: u64,
    /// Bytes of one slice.
    pub run_bytes: u64,
    /// Equal parts of a run, of which the first of all slices go before the second of all slices.
    pub parts: u32,
    /// The order of the stream.
    pub order: Order,
}

impl Shape {
    /// Whether the same stream can be mapped onto both shapes.
    ///
    /// Both need as many layers and bytes a layer, and one part of a page here must be one part of a page there: then
    /// no slice is mistaken for another, whatever the sizes of the pages are. Pages of a single slice are plain bytes,
    /// which only have to divide one another. Page by page goes only what has pages of the same size.
    ///
    /// # Errors
    /// `ShapeMismatch` that names both shapes, and what would help.
    pub fn check_same_stream(&self, there: &Shape) -> Result<()> {
        let whole = |a: u64, b: u64| a > 0 && b > 0 && (a.is_multiple_of(b) || b.is_multiple_of(a));
        let layer = |shape: &Shape| u64::from(shape.pages).checked_mul(shape.row_bytes);
        let flat = |shape: &Shape| shape.row_bytes == shape.run_bytes;
        let same_bytes = self.order == there.order
            && self.layers == there.layers
            && layer(self).is_some()
            && layer(self) == layer(there);
        let same_parts = match (self.part(), there.part()) {
            (Some((row, run)), Some((their_row, their_run))) => {
                (row == their_row && whole(run, their_run))
                    || (flat(self) && flat(there) && whole(self.row_bytes, there.row_bytes))
            }
            _ => false,
        };
        let same_pages = self.order == Order::LayerFirst || self.row_bytes == there.row_bytes;
        if same_bytes && same_parts && same_pages {
            return Ok(());
        }
        let help = match (same_bytes, same_parts) {
            (false, _) => "both need as many layers, and as many bytes a layer",
            (true, false) => {
                "pages of several slices and unequal size need parts, so that one part of a page here is one there"
            }
            (true, true) => {
                "pages of unequal size go layer by layer: name the owner's pages, so that this side knows of it"
            }
        };
        let text = format!("the two sides differ in shape: {self} here against {there} there; {help}");
        Err(Error::new(Code::ShapeMismatch, text))
    }

    /// Bytes of a part of a page with all its slices, and of one slice of it.
    fn part(&self) -> Option<(u64, u64)> {
        let parts = u64::from(self.parts);
        let run = self.run_bytes.checked_div(parts).filter(|run| run * parts == self.run_bytes)?;
        let row = self.row_bytes.checked_div(parts)?;
        (run > 0 && self.row_bytes.is_multiple_of(self.run_bytes)).then_some((row, run))
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let slices = self.row_bytes.checked_div(self.run_bytes).unwrap_or(0);
        let (layers, pages, run) = (self.layers, self.pages, self.run_bytes);
        write!(f, "{layers} layers x {pages} pages x {slices} slices x {run} bytes")?;
        if self.parts == 1 { Ok(()) } else { write!(f, " in {} parts", self.parts) }
    }
}

/// Contiguous bytes of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// First byte, from the start of the region.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// Bytes that are contiguous on both sides: what a transport moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// First byte in the first view's region.
    pub left: u64,
    /// First byte in the second view's region.
    pub right: u64,
    /// Bytes.
    pub len: u64,
}

impl View {
    /// The view of `pages` (ids within the layout) over ranges of layers and slices.
    ///
    /// # Errors
    /// `PageOutOfRange` for a page, layer or slice that the layout does not have, `InvalidArgument` for an empty set
    /// or one of more than 2^63 bytes.
    pub fn new(
        layout: Arc<Layout>,
        pages: Arc<[u32]>,
        layers: Range<u32>,
        slices: Range<u32>,
        order: Order,
    ) -> Result<View> {
        if pages.is_empty() || layers.is_empty() || slices.is_empty() {
            return Err(Error::new(
                Code::InvalidArgument,
                "the page set is empty: it takes at least one page, one layer and one slice",
            ));
        }
        if let Some((position, page)) = pages.iter().enumerate().find(|(_, page)| **page >= layout.pages()) {
            return Err(Error::new(
                Code::PageOutOfRange,
                format!(
                    "page id {page} (position {position}) is out of range: the layout has {} pages",
                    layout.pages()
                ),
            ));
        }
        for (what, range, count) in [("layer", &layers, layout.layers()), ("slice", &slices, layout.slices())]
        {
            if range.end > count {
                return Err(Error::new(
                    Code::PageOutOfRange,
                    format!(
                        "{what} range {}..{} is out of range: the layout has {count}",
                        range.start, range.end
                    ),
                ));
            }
        }
        let pieces = Pieces::new(&layout, slices.len() as u32, 1);
        // A source may name a page many times, so the layout's own bound does not bound the stream.
        let rows = (pages.len() as u64).checked_mul(layers.len() as u64);
        let row_bytes = pieces.bytes * pieces.count();
        if rows.and_then(|rows| rows.checked_mul(row_bytes)).is_none_or(|bytes| bytes > i64::MAX as u64) {
            return Err(Error::new(
                Code::InvalidArgument,
                "the page set is longer than 2^63 bytes: it names its pages too often",
            ));
        }
        Ok(View { layout, pages, layers, slices, parts: 1, order, pieces })
    }

    /// The layout that places the elements.
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }
    /// The page ids in the order of the stream.
    pub fn pages(&self) -> &Arc<[u32]> {
        &self.pages
    }
    /// The range of layers.
    pub fn layers(&self) -> Range<u32> {
        self.layers.clone()
    }
    /// The range of slices.
    pub fn slices(&self) -> Range<u32> {
        self.slices.clone()
    }
    /// The order of the stream.
    pub fn order(&self) -> Order {
        self.order
    }
    /// The same elements in another order.
    pub fn with_order(mut self, order: Order) -> View {
        self.order = order;
        self
    }
    /// How many equal parts a run is seen as.
    pub fn parts(&self) -> u32 {
        self.parts
    }

    /// The same elements with each run seen as `parts` equal parts.
    ///
    /// # Errors
    /// `InvalidArgument` for a number that is 0, above [`MAX_PARTS`], or does not divide a run into whole bytes.
    pub fn with_parts(mut self, parts: u32) -> Result<View> {
        let run = self.layout.run_bytes();
        if parts == 0 || parts > MAX_PARTS || !run.is_multiple_of(parts.into()) {
            return Err(Error::new(
                Code::InvalidArgument,
                format!(
                    "{parts} parts of a run of {run} bytes cannot be: take a number from 1 to {MAX_PARTS} that divides it"
                ),
            ));
        }
        self.parts = parts;
        self.pieces = Pieces::new(&self.layout, self.slices.len() as u32, parts);
        Ok(self)
    }
    /// Bytes of one page in one layer.
    pub fn row_bytes(&self) -> u64 {
        self.pieces.bytes * self.pieces.count()
    }
    /// Bytes of one layer.
    pub fn layer_bytes(&self) -> u64 {
        self.row_bytes() * self.pages.len() as u64
    }
    /// Bytes of the whole stream.
    pub fn bytes(&self) -> u64 {
        self.layer_bytes() * self.layers.len() as u64
    }

    /// What the other side must agree with for the streams to be the same.
    pub fn shape(&self) -> Shape {
        Shape {
            layers: self.layers.len() as u32,
            pages: self.pages.len() as u32,
            row_bytes: self.row_bytes(),
            run_bytes: self.layout.run_bytes(),
            parts: self.parts,
            order: self.order,
        }
    }

    /// Whether no page is named twice, which a destination must not.
    ///
    /// # Errors
    /// `DuplicatePage` that names the page.
    pub fn check_distinct(&self) -> Result<()> {
        let mut seen = vec![0u64; (self.layout.pages() as usize).div_ceil(64)];
        for page in self.pages.iter() {
            let (word, bit) = ((page / 64) as usize, 1u64 << (page % 64));
            if seen[word] & bit != 0 {
                return Err(Error::new(
                    Code::DuplicatePage,
                    format!(
                        "page {page} is named twice in the destination: its content would depend on luck"
                    ),
                ));
            }
            seen[word] |= bit;
        }
        Ok(())
    }

    /// Whether some byte of the region belongs to both page sets.
    pub fn overlaps(&self, other: &View) -> bool {
        let mut mine: Vec<Run> = self.runs(0..self.bytes()).collect();
        mine.sort_unstable_by_key(|run| run.offset);
        // The end of the runs up to each, for runs that lie inside longer ones.
        let mut end = 0;
        let ends: Vec<u64> = mine
            .iter()
            .map(|run| {
                end = end.max(run.offset + run.len);
                end
            })
            .collect();
        other.runs(0..other.bytes()).any(|run| {
            let before = mine.partition_point(|other| other.offset < run.offset + run.len);
            before > 0 && ends[before - 1] > run.offset
        })
    }

    /// Layer and page id of a position of the stream, for errors that name a page.
    pub fn locate(&self, position: u64) -> (u32, u32) {
        let row = (position.min(self.bytes().saturating_sub(1)) / self.row_bytes()) as usize;
        let (layer, page) = match self.order {
            Order::LayerFirst => (row / self.pages.len(), row % self.pages.len()),
            Order::PageFirst => (row % self.layers.len(), row / self.layers.len()),
        };
        (self.layers.start + layer as u32, self.pages[page])
    }

    /// Whether the bytes before and at a position of the stream touch: then no run begins there.
    pub fn joins_at(&self, position: u64) -> bool {
        position > 0 && position < self.bytes() && self.runs(position - 1..position + 1).count() == 1
    }

    /// The contiguous runs of a part of the stream, neighbours merged. A part beyond the end is cut off.
    pub fn runs(&self, part: Range<u64>) -> Runs<'_> {
        let end = part.end.min(self.bytes());
        let start = part.start.min(end);
        let (piece, row) = (start / self.pieces.bytes, start / self.row_bytes());
        let inside = piece % self.pieces.count();
        let inner = match self.order {
            Order::LayerFirst => self.pages.len() as u64,
            Order::PageFirst => self.layers.len() as u64,
        };
        Runs {
            view: self,
            outer: (row / inner) as usize,
            inner: (row % inner) as usize,
            part: (inside / u64::from(self.pieces.slices)) as u32,
            slice: (inside % u64::from(self.pieces.slices)) as u32,
            skip: start % self.pieces.bytes,
            left: end - start,
        }
    }
}

/// Iterator over the runs of a part of a view's stream.
#[derive(Debug, Clone)]
pub struct Runs<'a> {
    view: &'a View,
    outer: usize,
    inner: usize,
    part: u32,
    slice: u32,
    skip: u64,
    left: u64,
}

impl Runs<'_> {
    /// Where the next piece starts.
    fn here(&self) -> u64 {
        let view = self.view;
        let (layer, page) = match view.order {
            Order::LayerFirst => (self.outer, self.inner),
            Order::PageFirst => (self.inner, self.outer),
        };
        view.layout.at(view.layers.start + layer as u32, view.pages[page], view.slices.start + self.slice)
            + u64::from(self.part) * view.pieces.bytes
            + self.skip
    }

    /// Takes the next piece, or what is left of it, and steps past it.
    fn take(&mut self) -> u64 {
        let Pieces { bytes, parts, slices } = self.view.pieces;
        let len = (bytes - self.skip).min(self.left);
        self.left -= len;
        self.skip = 0;
        self.slice += 1;
        if self.slice < slices {
            return len;
        }
        (self.slice, self.part) = (0, self.part + 1);
        if self.part < parts {
            return len;
        }
        (self.part, self.inner) = (0, self.inner + 1);
        let inner = match self.view.order {
            Order::LayerFirst => self.view.pages.len(),
            Order::PageFirst => self.view.layers.len(),
        };
        if self.inner == inner {
            (self.inner, self.outer) = (0, self.outer + 1);
        }
        len
    }
}

impl Iterator for Runs<'_> {
    type Item = Run;

    fn next(&mut self) -> Option<Run> {
        if self.left == 0 {
            return None;
        }
        let offset = self.here();
        let mut len = self.take();
        while self.left > 0 && self.here() == offset + len {
            len += self.take();
        }
        Some(Run { offset, len })
    }
}

/// Iterator over the extents of a part of the stream that two views share.
#[derive(Debug, Clone)]
pub struct Extents<'a> {
    left: Runs<'a>,
    right: Runs<'a>,
    left_run: Run,
    right_run: Run,
}

impl<'a> Extents<'a> {
    /// The extents of a part of the stream. The views must have passed [`Shape::check_same_stream`].
    pub fn new(left: &'a View, right: &'a View, part: Range<u64>) -> Extents<'a> {
        let empty = Run { offset: 0, len: 0 };
        Extents { left: left.runs(part.clone()), right: right.runs(part), left_run: empty, right_run: empty }
    }
}

impl Iterator for Extents<'_> {
    type Item = Extent;

    fn next(&mut self) -> Option<Extent> {
        if self.left_run.len == 0 {
            self.left_run = self.left.next()?;
        }
        if self.right_run.len == 0 {
            self.right_run = self.right.next()?;
        }
        let len = self.left_run.len.min(self.right_run.len);
        let extent = Extent { left: self.left_run.offset, right: self.right_run.offset, len };
        for run in [&mut self.left_run, &mut self.right_run] {
            run.offset += len;
            run.len -= len;
        }
        Some(extent)
    }
}
