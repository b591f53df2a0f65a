//! Page lists and views as they travel.

use crate::wire::{Reader, Writer};
use kvik_core::{Code, Error, Layers, Layout, Order, Result, Shape, View};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// More pages than this in one transfer are refused: 1 Mi pages, 4 MiB of ids.
pub const MAX_PAGES: u64 = 1 << 20;

/// Page ids, or positions, in the smaller of two encodings. Decoding allocates no more than arrived.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PageList {
    /// First id and count of each run of consecutive ids.
    Runs(Vec<(u32, u32)>),
    /// Each id.
    Ids(Arc<[u32]>),
}

impl PageList {
    /// The encoding that takes fewer bytes.
    pub fn of(ids: &Arc<[u32]>) -> PageList {
        let breaks = ids.windows(2).filter(|pair| pair[0].checked_add(1) != Some(pair[1])).count();
        if (breaks + 1) * 2 > ids.len() {
            return PageList::Ids(ids.clone());
        }
        let mut runs: Vec<(u32, u32)> = Vec::with_capacity(breaks + 1);
        for &id in ids.iter() {
            match runs.last_mut() {
                Some((first, count)) if first.checked_add(*count) == Some(id) => *count += 1,
                _ => runs.push((id, 1)),
            }
        }
        PageList::Runs(runs)
    }

    /// Bytes that it holds.
    pub(crate) fn held(&self) -> usize {
        match self {
            PageList::Runs(runs) => runs.len() * 8,
            PageList::Ids(ids) => ids.len() * 4,
        }
    }

    /// How many pages it names.
    pub fn count(&self) -> u64 {
        match self {
            PageList::Runs(runs) => runs.iter().map(|(_, count)| u64::from(*count)).sum(),
            PageList::Ids(ids) => ids.len() as u64,
        }
    }

    /// The numbers as one range, where each follows the one before; none where they do not, or there are none.
    pub fn as_range(&self) -> Option<Range<u64>> {
        let follow = |range: Range<u64>, first: u32, count: u32| {
            (u64::from(first) == range.end).then(|| range.start..range.end + u64::from(count))
        };
        let start = |first: u32| u64::from(first)..u64::from(first);
        let range = match self {
            PageList::Runs(runs) => runs
                .iter()
                .try_fold(start(runs.first()?.0), |range, (first, count)| follow(range, *first, *count))?,
            PageList::Ids(ids) => {
                ids.iter().try_fold(start(*ids.first()?), |range, id| follow(range, *id, 1))?
            }
        };
        (!range.is_empty()).then_some(range)
    }

    /// Whether all ids are below `count`.
    fn is_below(&self, count: u64) -> bool {
        match self {
            PageList::Runs(runs) => {
                runs.iter().all(|(first, len)| u64::from(*first) + u64::from(*len) <= count)
            }
            PageList::Ids(ids) => ids.iter().all(|id| u64::from(*id) < count),
        }
    }

    /// The ids, of which there may be `most`.
    pub fn expand(&self, most: u64) -> Result<Arc<[u32]>> {
        if self.count() > most {
            return Err(Error::new(
                Code::PageNotGranted,
                format!("{} pages were asked for where there are {most}", self.count()),
            ));
        }
        match self {
            PageList::Ids(ids) => Ok(ids.clone()),
            PageList::Runs(runs) => {
                if runs.iter().any(|(first, count)| first.checked_add(*count).is_none()) {
                    return Err(Error::new(Code::ProtocolError, "a run of page ids goes beyond 2^32"));
                }
                Ok(runs.iter().flat_map(|(first, count)| *first..*first + *count).collect())
            }
        }
    }

    pub(crate) fn encode(&self, out: &mut Writer) {
        match self {
            PageList::Runs(runs) => {
                out.u8(0).u32(runs.len() as u32);
                for (first, count) in runs {
                    out.u32(*first).u32(*count);
                }
            }
            PageList::Ids(ids) => {
                out.u8(1).u32(ids.len() as u32);
                for id in ids.iter() {
                    out.u32(*id);
                }
            }
        }
    }

    pub(crate) fn decode(input: &mut Reader) -> Result<PageList> {
        match input.u8()? {
            0 => {
                let count = input.count(8)?;
                (0..count)
                    .map(|_| Ok((input.u32()?, input.u32()?)))
                    .collect::<Result<_>>()
                    .map(PageList::Runs)
            }
            1 => {
                let count = input.count(4)?;
                (0..count)
                    .map(|_| input.u32())
                    .collect::<Result<Vec<_>>>()
                    .map(|ids| PageList::Ids(ids.into()))
            }
            _ => Err(input.wrong("its page list has an unknown encoding")),
        }
    }
}

/// Whether a transfer may have this many pages.
pub(crate) fn check_page_count(view: &View) -> Result<()> {
    let pages = view.pages().len();
    if pages as u64 <= MAX_PAGES {
        return Ok(());
    }
    let text = format!("{pages} pages are more than the {MAX_PAGES} of one transfer: move them in parts");
    Err(Error::new(Code::InvalidArgument, text))
}

pub(crate) fn decode_order(input: &mut Reader) -> Result<Order> {
    input.one_of(&[Order::LayerFirst, Order::PageFirst], "its order is unknown")
}

pub(crate) fn encode_range(range: &Range<u32>, out: &mut Writer) {
    out.u32(range.start).u32(range.end);
}

pub(crate) fn decode_range(input: &mut Reader) -> Result<Range<u32>> {
    Ok(input.u32()?..input.u32()?)
}

/// A view as it travels, for a peer that reaches this process's memory itself. Its page ids stay in the few bytes that
/// came until somebody was charged for all of them.
#[derive(Clone)]
pub struct TravellingView {
    /// A view with the same layout, layers, slices, parts and order; its pages mean nothing here.
    one: View,
    pages: PageList,
}

impl fmt::Debug for TravellingView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let one = &self.one;
        let seen = (one.layout(), one.layers(), one.slices(), one.parts(), one.order());
        f.debug_tuple("TravellingView").field(&seen).field(&self.pages).finish()
    }
}

impl TravellingView {
    /// The view, to be sent.
    pub fn of(view: &View) -> TravellingView {
        TravellingView { one: view.clone(), pages: PageList::of(view.pages()) }
    }

    /// Bytes that it holds.
    pub(crate) fn held(&self) -> usize {
        let starts = match self.one.layout().layer_starts() {
            Layers::Strided { .. } => 0,
            Layers::At(starts) => starts.len() * 8,
        };
        starts + self.pages.held()
    }

    /// Bytes that it holds once it is unfolded.
    pub fn unfolded(&self) -> usize {
        self.held() - self.pages.held() + self.pages.count() as usize * size_of::<u32>()
    }

    /// What a view must agree with for the streams to be the same.
    pub fn shape(&self) -> Shape {
        Shape { pages: self.pages.count() as u32, ..self.one.shape() }
    }

    /// The view itself. A source may name a page more than once.
    ///
    /// # Errors
    /// `ProtocolError` for a view that cannot be.
    pub fn unfold(self) -> Result<View> {
        let (one, ids) = (&self.one, self.pages.expand(MAX_PAGES)?);
        View::of_parts(one.layout().clone(), one.parts(), ids, one.layers(), one.slices(), one.order())
            .map_err(|error| Error::new(Code::ProtocolError, error.text))
    }

    pub(crate) fn encode(&self, out: &mut Writer) {
        let layout = self.one.layout();
        out.u64(layout.offset()).u32(layout.pages()).u64(layout.run_bytes()).u64(layout.page_stride());
        out.u32(layout.slices()).u64(layout.slice_stride());
        match layout.layer_starts() {
            Layers::Strided { count, stride } => {
                out.u8(0).u32(*count).u64(*stride);
            }
            Layers::At(starts) => {
                out.u8(1).u32(starts.len() as u32);
                for start in starts {
                    out.u64(*start);
                }
            }
        }
        encode_range(&self.one.layers(), out);
        encode_range(&self.one.slices(), out);
        out.u32(self.one.parts()).u8(self.one.order() as u8);
        self.pages.encode(out);
    }

    pub(crate) fn decode(input: &mut Reader) -> Result<TravellingView> {
        let (offset, pages, run_bytes, page_stride) =
            (input.u64()?, input.u32()?, input.u64()?, input.u64()?);
        let (slices, slice_stride) = (input.u32()?, input.u64()?);
        let layers = match input.u8()? {
            0 => Layers::Strided { count: input.u32()?, stride: input.u64()? },
            1 => {
                let count = input.count(8)?;
                Layers::At((0..count).map(|_| input.u64()).collect::<Result<_>>()?)
            }
            _ => return Err(input.wrong("its layers have an unknown encoding")),
        };
        let (range, slice_range) = (decode_range(input)?, decode_range(input)?);
        let (parts, order) = (input.u32()?, decode_order(input)?);
        let list = PageList::decode(input)?;
        let one = || {
            let layout = Layout::new(offset, pages, run_bytes, page_stride, slices, slice_stride, layers)?;
            View::of_parts(Arc::new(layout), parts, [0].into(), range, slice_range, order)
        };
        // Whatever is wrong with it, the peer sent it: it is no mistake in a layout of this side.
        let one = one().map_err(|error| input.wrong(&error.text))?;
        if list.count() == 0 || list.count() > MAX_PAGES {
            return Err(input.wrong("its source has no pages, or more than a transfer has"));
        }
        if !list.is_below(u64::from(pages) * u64::from(parts)) {
            return Err(input.wrong("its source names a page that its layout does not have"));
        }
        if one.bytes().checked_mul(list.count()).is_none_or(|bytes| bytes > i64::MAX as u64) {
            return Err(input.wrong("its source is longer than 2^63 bytes"));
        }
        Ok(TravellingView { one, pages: list })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_come_back_in_the_smaller_form() {
        for (ids, runs) in
            [((0..100).collect::<Vec<u32>>(), true), ((0..100).rev().collect(), false), (vec![7], false)]
        {
            let ids: Arc<[u32]> = ids.into();
            let list = PageList::of(&ids);
            assert_eq!(matches!(list, PageList::Runs(_)), runs);
            let mut out = Writer::default();
            list.encode(&mut out);
            let back = PageList::decode(&mut Reader::new(&out.0, "test")).unwrap();
            assert_eq!(back.expand(MAX_PAGES).unwrap(), ids);
        }
    }

    #[test]
    fn a_small_frame_cannot_ask_for_much_memory() {
        let list = PageList::Runs(vec![(0, u32::MAX); 4]);
        assert!(list.expand(MAX_PAGES).is_err());
        let mut out = Writer::default();
        out.u8(1).u32(u32::MAX);
        assert!(PageList::decode(&mut Reader::new(&out.0, "test")).is_err());
    }

    #[test]
    fn a_range_is_one_however_it_is_told() {
        let ids = |ids: &[u32]| PageList::Ids(ids.into());
        assert_eq!(ids(&[4, 5, 6]).as_range(), Some(4..7));
        assert_eq!(PageList::Runs(vec![(4, 2), (6, 1)]).as_range(), Some(4..7));
        assert_eq!(PageList::Runs(vec![(1, u32::MAX)]).as_range(), Some(1..1 << 32));
        for other in [ids(&[]), ids(&[4, 6]), ids(&[5, 4]), ids(&[4, 4])] {
            assert_eq!(other.as_range(), None, "{other:?}");
        }
        for runs in
            [vec![], vec![(3, 0)], vec![(3, 1), (5, 1)], vec![(0, 2), (1, 2)], vec![(7, u32::MAX), (6, 1)]]
        {
            assert_eq!(PageList::Runs(runs.clone()).as_range(), None, "{runs:?}");
        }
    }
}
