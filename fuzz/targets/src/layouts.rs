//! Layouts, views and page lists: arithmetic on numbers that a peer chose.

use crate::feed;
use arbitrary::Unstructured;
use kvik_core::{Extents, Layout, View};
use kvik_proto::{Chunking, MAX_PAGES, PageList};
use std::ops::Range;
use std::sync::Arc;

/// Runs that are looked at of a view that may have very many.
const LOOK: usize = 64;

/// Layouts of any numbers; views of small ones against a list of all their bytes; cuts; page lists.
pub fn layout(data: &[u8]) {
    let Some((mode, data)) = data.split_first() else { return };
    let mut u = Unstructured::new(data);
    // What is drawn ends where the input does.
    let _ = match mode % 4 {
        0 => any_numbers(&mut u),
        1 => every_byte(&mut u),
        2 => chunkings(&mut u),
        _ => lists(&mut u),
    };
}

fn any_numbers(u: &mut Unstructured) -> arbitrary::Result<()> {
    let Ok(layout) = feed::layout(u)? else { return Ok(()) };
    let end = layout.end();
    let (layers, pages, slices) = (layout.layers(), layout.pages(), layout.slices());
    let last = layout.at(layers - 1, pages - 1, slices - 1);
    assert!(last + layout.run_bytes() <= end && end <= i64::MAX as u64, "{layout:?}");
    let layout = Arc::new(layout);
    let ids: Vec<u32> = (0..u.int_in_range(1..=8)?).map(|_| feed::small(u)).collect::<Result<_, _>>()?;
    let (layers, slices) = (feed::small(u)?..feed::small(u)?, feed::small(u)?..feed::small(u)?);
    let view = View::of_parts(layout.clone(), feed::small(u)?, ids.into(), layers, slices, feed::order(u)?);
    let Ok(view) = view else { return Ok(()) };
    let _ = (view.check_distinct(), view.shape().to_string());
    let position = feed::number(u)?;
    let (layer, page) = view.locate(position);
    assert!(layer < layout.layers() && page < layout.pages());
    for run in view.runs(position..view.bytes()).take(LOOK) {
        assert!(run.len > 0 && run.offset + run.len <= end, "{run:?} of {layout:?}");
    }
    Ok(())
}

/// The stream's bytes, one by one.
fn listed(view: &View) -> Vec<u64> {
    let (layout, parts) = (view.layout(), view.parts());
    let len = layout.run_bytes() / u64::from(parts);
    let rows: Vec<(u32, u32)> = match view.order() {
        kvik_core::Order::LayerFirst => {
            view.layers().flat_map(|layer| view.pages().iter().map(move |id| (layer, *id))).collect()
        }
        kvik_core::Order::PageFirst => {
            view.pages().iter().flat_map(|id| view.layers().map(move |layer| (layer, *id))).collect()
        }
    };
    let slices = |(layer, id): (u32, u32)| view.slices().map(move |slice| (layer, id, slice));
    rows.into_iter()
        .flat_map(slices)
        .flat_map(|(layer, id, slice)| {
            let start = layout.at(layer, id / parts, slice) + u64::from(id % parts) * len;
            start..start + len
        })
        .collect()
}

fn every_byte(u: &mut Unstructured) -> arbitrary::Result<()> {
    let drawn = |u: &mut Unstructured| -> arbitrary::Result<(Arc<Layout>, View)> {
        let layout = Arc::new(feed::small_layout(u)?);
        let view = feed::view(u, &layout)?;
        Ok((layout, view))
    };
    let ((_, left), (_, right)) = (drawn(u)?, drawn(u)?);
    let [a, b] = [&left, &right].map(listed);
    for (view, bytes) in [(&left, &a), (&right, &b)] {
        assert_eq!(view.bytes(), bytes.len() as u64);
        let at = u.int_in_range(0..=view.bytes())?;
        let walked: Vec<u64> =
            view.runs(at..u64::MAX).flat_map(|run| run.offset..run.offset + run.len).collect();
        assert_eq!(walked, bytes[at as usize..], "{view:?} from {at}");
    }
    let shared = a.iter().any(|byte| b.contains(byte));
    assert_eq!(left.overlaps(&right), shared, "{left:?} and {right:?}");
    if left.shape().check_same_stream(&right.shape()).is_ok() {
        let pairs: Vec<(u64, u64)> = Extents::new(&left, &right, 0..left.bytes())
            .flat_map(|extent| (0..extent.len).map(move |at| (extent.left + at, extent.right + at)))
            .collect();
        assert_eq!(pairs, a.into_iter().zip(b).collect::<Vec<_>>());
    }
    Ok(())
}

fn chunkings(u: &mut Unstructured) -> arbitrary::Result<()> {
    let bytes = feed::number(u)?.min(i64::MAX as u64);
    let Ok(chunking) = Chunking::from_peer(bytes, feed::small(u)?, feed::small(u)?, u.arbitrary()?) else {
        return Ok(());
    };
    let chunks = chunking.chunks();
    assert!(chunks <= bytes / 4096 + 1, "a bit of memory for each of {chunks} chunks of {bytes} bytes");
    let part = |index: u64| -> Range<u64> { chunking.part(index) };
    if chunks > 0 {
        let last = part(chunks - 1);
        assert!(part(0).start == 0 && last.end == bytes && last.start < last.end);
        assert!(chunking.sums_of(&last) <= kvik_proto::MAX_SUMS);
        let at = feed::number(u)? % chunks;
        assert_eq!(part(at).end, if at + 1 < chunks { part(at + 1).start } else { bytes });
    }
    Ok(())
}

fn lists(u: &mut Unstructured) -> arbitrary::Result<()> {
    let list = feed::page_list(u)?;
    let Ok(ids) = list.expand(MAX_PAGES) else { return Ok(()) };
    assert_eq!(ids.len() as u64, list.count());
    let again = PageList::of(&ids);
    assert_eq!(again.expand(MAX_PAGES).expect("as many"), ids);
    assert!(ids.is_empty() || again.expand(ids.len() as u64 - 1).is_err());
    Ok(())
}
