//! Which elements take part in a transfer, in which order: the stream, and its extents.
//!
//! Both sides of a transfer number the same bytes from 0 to n: the *stream*. Each side maps a position of the
//! stream to its own memory with its own [`View`], by arithmetic: nothing is built per page. [`Extents`] walks two
//! views at once where one process sees both memories.
//!
//! A page goes slice by slice. Seen in *parts*, each run is that many equal parts, and part p of a page is part p of
//! each of its runs, slice by slice: so a page of `[heads][32 tokens][content]` is two parts that are just like two
//! pages of `[heads][16 tokens][content]`. The ids of a view in k parts count parts: part p of page n is `n * k + p`.

use crate::{Code, Error, Layout, PageSums, Result};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

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
    sums: Option<Arc<PageSums>>,
}

/// The pieces of one page, or part of a page, in one layer: what is contiguous for sure.
#[derive(Debug, Clone, Copy)]
struct Pieces {
    /// Bytes of one: a run or a part of it, or all slices of a page where they touch.
    bytes: u64,
    count: u32,
}

/// What two views must agree in to map the same stream; small enough to travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Layers.
    pub layers: u32,
    /// Pages, or parts of pages.
    pub pages: u32,
    /// Bytes of one of them in one layer, all its slices together.
    pub row_bytes: u64,
    /// Bytes of one slice of it.
    pub run_bytes: u64,
    /// The order of the stream.
    pub order: Order,
}

impl Shape {
    /// Whether the same stream can be mapped onto both shapes.
    ///
    /// Both need as many layers and bytes a layer. Their pages, or parts of pages, are of one size: then no slice is
    /// mistaken for another. Pages of a single slice are plain bytes, which only have to divide one another. Page by
    /// page goes only what has pages of the same size.
    ///
    /// # Errors
    /// `ShapeMismatch` that names both shapes, and what would help.
    pub fn check_same_stream(&self, there: &Shape) -> Result<()> {
        let whole = |a: u64, b: u64| a > 0 && b > 0 && (a.is_multiple_of(b) || b.is_multiple_of(a));
        let layer = |shape: &Shape| u64::from(shape.pages).checked_mul(shape.row_bytes);
        let flat = |shape: &Shape| shape.row_bytes == shape.run_bytes;
        let same_rows = self.row_bytes == there.row_bytes;
        let help = if self.order != there.order
            || self.layers != there.layers
            || layer(self).is_none()
            || layer(self) != layer(there)
        {
            "both need as many layers, and as many bytes a layer"
        } else if !(same_rows || flat(self) && flat(there)) {
            "pages of several slices need one size: name parts of the larger ones that are as large as the smaller"
        } else if !whole(self.row_bytes, there.row_bytes) || !whole(self.run_bytes, there.run_bytes) {
            "pages and slices here and there have to divide one another"
        } else if !same_rows && self.order == Order::PageFirst {
            "pages of unequal size go layer by layer: name positions of the grant, so that this side knows of it"
        } else {
            return Ok(());
        };
        let text = format!("the two sides differ in shape: {self} here against {there} there; {help}");
        Err(Error::new(Code::ShapeMismatch, text))
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let slices = self.row_bytes.checked_div(self.run_bytes).unwrap_or(0);
        write!(
            f,
            "{} layers x {} pages x {slices} slices x {} bytes",
            self.layers, self.pages, self.run_bytes
        )
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
        View::of_parts(layout, 1, pages, layers, slices, order)
    }

    /// The view of parts of pages: `ids` of `page * parts + part`, each run seen as so many equal parts.
    ///
    /// # Errors
    /// As for [`View::new`]; `InvalidArgument` also for a number of parts that is 0, above [`MAX_PARTS`](crate::MAX_PARTS), or does not
    /// divide a run into whole bytes.
    pub fn of_parts(
        layout: Arc<Layout>,
        parts: u32,
        ids: Arc<[u32]>,
        layers: Range<u32>,
        slices: Range<u32>,
        order: Order,
    ) -> Result<View> {
        if ids.is_empty() || layers.is_empty() || slices.is_empty() {
            return Err(Error::new(
                Code::InvalidArgument,
                "the page set is empty: it takes at least one page, one layer and one slice",
            ));
        }
        let part_bytes = layout.part_bytes(parts)?;
        check_ids(&layout, parts, &ids)?;
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
        let count = slices.len() as u32;
        let pieces = match parts == 1 && layout.slice_stride() == part_bytes {
            true => Pieces { bytes: part_bytes * u64::from(count), count: 1 },
            false => Pieces { bytes: part_bytes, count },
        };
        // A source may name a page many times, so the layout's own bound does not bound the stream.
        let rows = (ids.len() as u64).checked_mul(layers.len() as u64);
        let row_bytes = pieces.bytes * u64::from(pieces.count);
        if rows.and_then(|rows| rows.checked_mul(row_bytes)).is_none_or(|bytes| bytes > i64::MAX as u64) {
            return Err(Error::new(
                Code::InvalidArgument,
                "the page set is longer than 2^63 bytes: it names its pages too often",
            ));
        }
        Ok(View { layout, pages: ids, layers, slices, parts, order, pieces, sums: None })
    }

    /// The layout that places the elements.
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }
    /// The ids of pages, or of parts of pages, in the order of the stream.
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
    pub fn with_order(self, order: Order) -> View {
        View { order, sums: None, ..self }
    }
    /// The same elements, with a table for checksums of their pages, of `layers` layers each: who places bytes here fills
    /// it with what it has in its cache.
    ///
    /// # Errors
    /// As for [`PageSums::new`].
    pub fn summing(self, layers: u32) -> Result<View> {
        let sums = Some(Arc::new(PageSums::new(&self, layers)?));
        Ok(View { sums, ..self })
    }
    /// Where checksums of its pages are wanted: the table.
    pub fn sums(&self) -> Option<&Arc<PageSums>> {
        self.sums.as_ref()
    }
    /// How many parts of a page are told apart: 1 where ids are those of pages.
    pub fn parts(&self) -> u32 {
        self.parts
    }
    /// Bytes of one page, or part of a page, in one layer.
    pub fn row_bytes(&self) -> u64 {
        self.pieces.bytes * u64::from(self.pieces.count)
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
            run_bytes: self.layout.run_bytes() / u64::from(self.parts),
            order: self.order,
        }
    }

    /// Whether no page, or part of one, is named twice, which a destination must not.
    ///
    /// # Errors
    /// `DuplicatePage` that names the page.
    pub fn check_distinct(&self) -> Result<()> {
        let mut ids = self.pages.to_vec();
        ids.sort_unstable();
        match ids.windows(2).find(|pair| pair[0] == pair[1]) {
            None => Ok(()),
            Some(pair) => Err(Error::new(
                Code::DuplicatePage,
                format!(
                    "{} is named twice in the destination: its content would depend on luck",
                    page_name(pair[0], self.parts)
                ),
            )),
        }
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
        (self.layers.start + layer as u32, self.pages[page] / self.parts)
    }

    /// Whether the bytes before and at a position of the stream touch: then no run begins there.
    pub fn joins_at(&self, position: u64) -> bool {
        position > 0 && position < self.bytes() && self.runs(position - 1..position + 1).count() == 1
    }

    /// The contiguous runs of a part of the stream, neighbours merged. A part beyond the end is cut off.
    pub fn runs(&self, part: Range<u64>) -> Runs<'_> {
        let end = part.end.min(self.bytes());
        let start = part.start.min(end);
        let piece = start / self.pieces.bytes;
        let row = piece / u64::from(self.pieces.count);
        let inner = match self.order {
            Order::LayerFirst => self.pages.len() as u64,
            Order::PageFirst => self.layers.len() as u64,
        };
        Runs {
            view: self,
            outer: (row / inner) as usize,
            inner: (row % inner) as usize,
            slice: (piece % u64::from(self.pieces.count)) as u32,
            skip: start % self.pieces.bytes,
            left: end - start,
        }
    }
}

/// A page, or part of one, in an error.
pub fn page_name(id: u32, parts: u32) -> String {
    match parts {
        0 | 1 => format!("page {id}"),
        parts => format!("part {} of {parts} of page {} (id {id})", id % parts, id / parts),
    }
}

fn check_ids(layout: &Layout, parts: u32, ids: &[u32]) -> Result<()> {
    let count = u64::from(layout.pages()) * u64::from(parts);
    match ids.iter().enumerate().find(|(_, id)| u64::from(**id) >= count) {
        None => Ok(()),
        Some((position, id)) => {
            let name = page_name(*id, parts);
            let text = format!(
                "{name}, at position {position}, is out of range: the layout has {} pages",
                layout.pages()
            );
            Err(Error::new(Code::PageOutOfRange, text))
        }
    }
}

/// Iterator over the runs of a part of a view's stream.
#[derive(Debug, Clone)]
pub struct Runs<'a> {
    view: &'a View,
    outer: usize,
    inner: usize,
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
        let (layer, id, slice) =
            (view.layers.start + layer as u32, view.pages[page], view.slices.start + self.slice);
        let start = match view.parts {
            1 => view.layout.at(layer, id, slice),
            parts => view.layout.at(layer, id / parts, slice) + u64::from(id % parts) * view.pieces.bytes,
        };
        start + self.skip
    }

    /// Takes the next piece, or what is left of it, and steps past it.
    fn take(&mut self) -> u64 {
        let len = (self.view.pieces.bytes - self.skip).min(self.left);
        self.left -= len;
        self.skip = 0;
        self.slice += 1;
        if self.slice == self.view.pieces.count {
            self.slice = 0;
            self.inner += 1;
            let inner = match self.view.order {
                Order::LayerFirst => self.view.pages.len(),
                Order::PageFirst => self.view.layers.len(),
            };
            if self.inner == inner {
                self.inner = 0;
                self.outer += 1;
            }
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
