//! Turns two page sets into a stream: its order, and which pages the owner is asked for.

use crate::report::TransferOptions;
use kvik_core::{Code, ContentClaim, Error, MAX_PARTS, Order, Result, View};
use kvik_proto::{MAX_PAGES, PageList, Select};
use std::ops::Range;
use std::sync::Arc;

/// Bytes of a chunk on a network: long enough that a call costs little beside its bytes, short enough that its
/// checksum is taken while the bytes are in the cache, and that a transfer of a few MiB uses every channel.
const CHUNK: u64 = 512 << 10;
/// Bytes of a chunk that is copied within the host.
const COPY_CHUNK: u64 = 1 << 20;

/// How a transfer is cut and ordered.
pub(crate) struct Plan {
    /// This side's elements, in the order of the stream.
    pub view: View,
    /// The owner's.
    pub select: Select,
    /// Runs on this side.
    pub extents: u64,
}

/// What is claimed of the content, up to the last position that is named, or else all of it.
///
/// # Errors
/// `InvalidArgument` for content that ends before that position.
pub(crate) fn claim(positions: Option<&[u32]>, options: &TransferOptions) -> Result<Option<ContentClaim>> {
    let Some(content) = &options.content else { return Ok(None) };
    // Grants with content are of whole pages.
    let parts = options.remote_parts.unwrap_or(1).max(1);
    let last = positions.and_then(|named| named.iter().max()).map(|position| (position / parts) as usize);
    let link = last.unwrap_or(content.links() - 1);
    content.claim(link).map(Some).ok_or_else(|| {
        let text = format!(
            "the content ends after {} pages, and page {link} of the grant is asked for: give the content up to there",
            content.links()
        );
        Error::new(Code::InvalidArgument, text)
    })
}

/// Plans a transfer between `local` and the owner's pages: all that the grant covers, or the positions that are named
/// of it.
///
/// Where both lists name pages one to one, they are sorted by position: neighbours in the grant that are neighbours
/// here too become one extent. Where checksums of pages are wanted they stay in their order, and go page by page.
pub(crate) fn plan(view: &View, positions: Option<Arc<[u32]>>, options: &TransferOptions) -> Result<Plan> {
    for (what, list) in [("local pages", Some(view.pages())), ("positions", positions.as_ref())] {
        match list.map(|list| list.len() as u64) {
            Some(0) => {
                return Err(Error::new(Code::InvalidArgument, format!("the list of {what} is empty")));
            }
            Some(count) if count > MAX_PAGES => {
                let text = format!("a transfer of {count} {what} is too large: split it at {MAX_PAGES}");
                return Err(Error::new(Code::InvalidArgument, text));
            }
            _ => {}
        }
    }
    check_remote(options)?;
    let order = order(view, positions.as_deref(), options);
    let (mine, theirs) = match positions {
        Some(theirs)
            if theirs.len() == view.pages().len() && !theirs.is_sorted() && options.sums.is_none() =>
        {
            sorted(view.pages(), &theirs)
        }
        other => (view.pages().clone(), other),
    };
    let (layout, parts) = (view.layout().clone(), view.parts());
    let mut view = View::of_parts(layout, parts, mine, view.layers(), view.slices(), order)?;
    if let Some(layers) = options.sums.filter(|_| order == Order::PageFirst) {
        view = view.summing(layers)?;
    }
    let extents = view.runs(0..view.bytes()).count() as u64;
    let select = Select {
        positions: theirs.as_ref().map(PageList::of),
        layers: options.remote_layers.clone(),
        slices: options.remote_slices.clone(),
        parts: options.remote_parts,
    };
    Ok(Plan { view, select, extents })
}

/// Page by page where that makes longer runs here, or checksums of pages are wanted, and no page can be of another size
/// there: as many of them make as many bytes. Where no positions are named the grant is taken to have as many, and the
/// owner refuses if it has not. All else goes layer by layer, which fits pages of any size.
fn order(view: &View, positions: Option<&[u32]>, options: &TransferOptions) -> Order {
    let as_many = positions.is_none_or(|theirs| theirs.len() == view.pages().len());
    let whole = view.parts() == 1 && options.remote_parts.is_none_or(|parts| parts == 1);
    match (view.layout().page_major() || options.sums.is_some()) && as_many && whole {
        true => Order::PageFirst,
        false => Order::LayerFirst,
    }
}

/// What can be known to be wrong with the owner's side before the owner is asked.
fn check_remote(options: &TransferOptions) -> Result<()> {
    for (what, range) in
        [("remote_layers", &options.remote_layers), ("remote_slices", &options.remote_slices)]
    {
        if let Some(Range { start, end }) = range
            && start >= end
        {
            let text = format!("{what} from {start} to {end} are none: name at least one");
            return Err(Error::new(Code::InvalidArgument, text));
        }
    }
    match options.remote_parts {
        Some(parts) if parts == 0 || parts > MAX_PARTS => Err(Error::new(
            Code::InvalidArgument,
            format!("remote_parts is from 1 to {MAX_PARTS}, not {parts}"),
        )),
        _ => Ok(()),
    }
}

/// About how many bytes a chunk has: smaller where a transfer is small, so that every channel has a part of it.
pub(crate) fn chunk_bytes(view: &View, network: bool, channels: u16) -> u64 {
    let chunk = sensible_chunk(view.bytes(), network, channels);
    // What one checksum covers is not in two chunks, where that can be had.
    view.sums().map_or(chunk, |sums| sums.align(chunk))
}

fn sensible_chunk(bytes: u64, network: bool, channels: u16) -> u64 {
    let most = if network { CHUNK } else { COPY_CHUNK };
    bytes.div_ceil(u64::from(channels.max(1))).clamp(64 << 10, most)
}

fn sorted(mine: &[u32], theirs: &[u32]) -> (Arc<[u32]>, Option<Arc<[u32]>>) {
    let mut pairs: Vec<(u32, u32)> = theirs.iter().copied().zip(mine.iter().copied()).collect();
    pairs.sort_unstable();
    let mine = pairs.iter().map(|(_, mine)| *mine).collect();
    let theirs = pairs.iter().map(|(theirs, _)| *theirs).collect();
    (mine, Some(theirs))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvik_core::{Extents, Layers, Layout};
    use proptest::prelude::*;

    /// A layout of pages of `slices` runs: all of a page's layers together, or all of a layer's pages.
    fn layout(pages: u32, layers: u32, slices: u32, run: u64, page_first: bool) -> Arc<Layout> {
        let row = u64::from(slices) * run + 1;
        let (page, layer) = match page_first {
            true => (row * u64::from(layers), row),
            false => (row, row * u64::from(pages)),
        };
        let layers = Layers::Strided { count: layers, stride: layer };
        Arc::new(Layout::new(3, pages, run, page, slices, run, layers).unwrap())
    }

    fn side(pages: u32) -> impl Strategy<Value = (Vec<u32>, bool)> {
        (Just((0..pages).collect::<Vec<u32>>()).prop_shuffle(), any::<bool>())
    }

    /// All pairs of bytes that move, one by one: page i of one list belongs to page i of the other.
    fn one_by_one(mine: (&Layout, &[u32]), theirs: (&Layout, &[u32])) -> Vec<(u64, u64)> {
        let mut pairs = Vec::new();
        for layer in 0..mine.0.layers() {
            for (here, there) in mine.1.iter().zip(theirs.1) {
                for slice in 0..mine.0.slices() {
                    let (a, b) = (mine.0.at(layer, *here, slice), theirs.0.at(layer, *there, slice));
                    pairs.extend((0..mine.0.run_bytes()).map(|byte| (a + byte, b + byte)));
                }
            }
        }
        pairs.sort_unstable();
        pairs
    }

    proptest! {
        #[test]
        fn each_page_goes_where_it_was_said_to(
            (mine, theirs) in (side(9), side(9)), count in 1usize..10, layers in 1u32..4, slices in 1u32..3,
            run in 1u64..5, named in any::<bool>(),
        ) {
            let (here, there) =
                (layout(9, layers, slices, run, mine.1), layout(9, layers, slices, run, theirs.1));
            let (ours, asked) = (&mine.0[..count], &theirs.0[..count]);
            let view = View::new(here.clone(), ours.into(), 0..layers, 0..slices, Order::LayerFirst).unwrap();
            let positions: Option<Arc<[u32]>> = named.then(|| asked.into());
            let plan = plan(&view, positions, &TransferOptions::default()).unwrap();
            // What the owner makes of it, which knows the pages that it granted.
            let list = plan.select.positions.as_ref().map_or(asked.into(), |list| list.expand(MAX_PAGES).unwrap());
            let owners = View::new(there.clone(), list, 0..layers, 0..slices, plan.view.order()).unwrap();
            plan.view.shape().check_same_stream(&owners.shape()).unwrap();
            let moved = Extents::new(&plan.view, &owners, 0..plan.view.bytes());
            let mut moved: Vec<(u64, u64)> =
                moved.flat_map(|e| (0..e.len).map(move |byte| (e.left + byte, e.right + byte))).collect();
            moved.sort_unstable();
            prop_assert_eq!(moved, one_by_one((&here, ours), (&there, asked)));
            prop_assert_eq!(plan.extents, plan.view.runs(0..plan.view.bytes()).count() as u64);
        }

        #[test]
        fn pages_of_other_sizes_stay_in_their_order(ids in side(8), times in 1u32..4, page_first in any::<bool>()) {
            // As many bytes in fewer pages there: nothing may be sorted, or positions would pair wrongly.
            let here = layout(8 * times, 2, 1, 4, page_first);
            let ours: Vec<u32> = ids.0.iter().flat_map(|id| (0..times).map(move |part| id * times + part)).collect();
            let view = View::new(here, ours.as_slice().into(), 0..2, 0..1, Order::LayerFirst).unwrap();
            let plan = plan(&view, Some(ids.0.as_slice().into()), &TransferOptions::default()).unwrap();
            let list = plan.select.positions.unwrap().expand(MAX_PAGES).unwrap();
            let pairs: Vec<(u32, u32)> =
                plan.view.pages().chunks(times as usize).zip(list.iter()).map(|(a, b)| (a[0], *b)).collect();
            prop_assert!(pairs.iter().all(|(mine, theirs)| *mine == theirs * times), "{:?}", pairs);
            prop_assert!(times == 1 || plan.view.order() == Order::LayerFirst);
        }

        #[test]
        fn chunks_are_of_a_sensible_size(bytes in any::<u64>(), network in any::<bool>(), channels in any::<u16>()) {
            let chunk = sensible_chunk(bytes, network, channels);
            prop_assert!((64 << 10..=1 << 20).contains(&chunk));
            // Every channel has a part, unless the parts would be too small or too large.
            let share = bytes.div_ceil(channels.max(1).into());
            prop_assert!(chunk <= share.max(64 << 10) && (chunk >= share.min(CHUNK)));
        }
    }
}
