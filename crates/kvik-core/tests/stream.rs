//! The arithmetic of views and extents against a naive model that lists every byte.

use kvik_core::{Code, Extents, Layers, Layout, Order, View};
use proptest::prelude::*;
use std::sync::Arc;

/// Offsets of every byte of the stream, one by one.
fn naive(view: &View) -> Vec<u64> {
    let layout = view.layout();
    let mut bytes = Vec::new();
    let parts = view.parts();
    let len = layout.run_bytes() / u64::from(parts);
    let mut row = |layer: u32, id: u32| {
        for slice in view.slices() {
            let start = layout.at(layer, id / parts, slice) + u64::from(id % parts) * len;
            bytes.extend(start..start + len);
        }
    };
    match view.order() {
        Order::LayerFirst => view.layers().for_each(|l| view.pages().iter().for_each(|p| row(l, *p))),
        Order::PageFirst => view.pages().iter().for_each(|p| view.layers().for_each(|l| row(l, *p))),
    }
    bytes
}

prop_compose! {
    fn layouts(run: u64)(
        pages in 1u32..12, slices in 1u32..4, layers in 1u32..4, gap in 0u64..3, page_first in any::<bool>(), offset in 0u64..9,
    ) -> Layout {
        let slice_stride = run + gap % 2;
        let row = slice_stride * u64::from(slices) + gap;
        let (page_stride, layer_stride) = match page_first {
            true => (row * u64::from(layers), row),
            false => (row, row * u64::from(pages)),
        };
        Layout::new(offset, pages, run, page_stride, slices, slice_stride, Layers::Strided { count: layers, stride: layer_stride })
            .unwrap()
    }
}

fn views(run: u64) -> impl Strategy<Value = View> {
    let parts: Vec<u32> = (1..=run as u32).filter(|parts| run.is_multiple_of((*parts).into())).collect();
    let seen = (layouts(run), proptest::sample::select(parts)).prop_flat_map(|(layout, parts)| {
        let ids: Vec<u32> = (0..layout.pages() * parts).collect();
        let some = 1..=ids.len();
        let (layer, slice) = (0..layout.layers(), 0..layout.slices());
        let ids = proptest::sample::subsequence(ids, some).prop_shuffle();
        (Just(layout), Just(parts), ids, layer, slice, any::<bool>())
    });
    seen.prop_map(|(layout, parts, ids, layer, slice, page_first)| {
        let order = if page_first { Order::PageFirst } else { Order::LayerFirst };
        let (layers, slices) = (layer..layout.layers(), slice..layout.slices());
        View::of_parts(Arc::new(layout), parts, ids.into(), layers, slices, order).unwrap()
    })
}

proptest! {
    #[test]
    fn runs_are_the_bytes_of_the_stream(view in views(5), cut in any::<(u64, u64)>()) {
        let bytes = naive(&view);
        prop_assert_eq!(bytes.len() as u64, view.bytes());
        let (a, b) = (cut.0 % (view.bytes() + 1), cut.1 % (view.bytes() + 1));
        let part = a.min(b)..a.max(b);
        let runs: Vec<_> = view.runs(part.clone()).collect();
        let walked: Vec<u64> = runs.iter().flat_map(|run| run.offset..run.offset + run.len).collect();
        prop_assert_eq!(&walked, &bytes[part.start as usize..part.end as usize]);
        for pair in runs.windows(2) {
            prop_assert_ne!(pair[0].offset + pair[0].len, pair[1].offset, "neighbours must be merged");
        }
        let touching = a > 0 && a < view.bytes() && bytes[a as usize - 1] + 1 == bytes[a as usize];
        prop_assert_eq!(view.joins_at(a), touching);
    }

    #[test]
    fn extents_pair_the_same_positions(left in views(6), right in views(3)) {
        let right = right.with_order(left.order());
        if left.shape().check_same_stream(&right.shape()).is_ok() {
            let pairs: Vec<(u64, u64)> = Extents::new(&left, &right, 0..left.bytes())
                .flat_map(|e| (0..e.len).map(move |i| (e.left + i, e.right + i)))
                .collect();
            let expected: Vec<(u64, u64)> = naive(&left).into_iter().zip(naive(&right)).collect();
            prop_assert_eq!(pairs, expected);
        }
    }

    #[test]
    fn a_position_names_its_page(view in views(4), at in any::<u64>()) {
        let at = at % view.bytes();
        let (layer, page) = view.locate(at);
        let byte = naive(&view)[at as usize];
        let inside = view.slices().any(|s| {
            let start = view.layout().at(layer, page, s);
            (start..start + view.layout().run_bytes()).contains(&byte)
        });
        prop_assert!(inside);
    }
}

#[test]
fn half_the_heads_of_wide_pages_fill_narrow_ones() {
    // 8 heads a page here, 4 there: two transfers by slices.
    let wide = Arc::new(Layout::new(0, 4, 10, 80, 8, 10, Layers::Strided { count: 2, stride: 320 }).unwrap());
    let narrow =
        Arc::new(Layout::new(0, 4, 10, 40, 4, 10, Layers::Strided { count: 2, stride: 160 }).unwrap());
    let pages: Arc<[u32]> = [0, 1, 2, 3].into();
    let upper = View::new(wide, pages.clone(), 0..2, 4..8, Order::LayerFirst).unwrap();
    let all = View::new(narrow, pages, 0..2, 0..4, Order::LayerFirst).unwrap();
    upper.shape().check_same_stream(&all.shape()).unwrap();
    let first = Extents::new(&upper, &all, 0..upper.bytes()).next().unwrap();
    assert_eq!((first.left, first.right, first.len), (40, 0, 40));
}

#[test]
fn other_shapes_are_refused_with_both_named() {
    let layout = |pages, run| Arc::new(Layout::contiguous(pages, run).unwrap());
    let view = |layout: Arc<Layout>, pages: Vec<u32>| {
        View::new(layout, pages.into(), 0..1, 0..1, Order::LayerFirst).unwrap()
    };
    let [here, there] = [16, 24].map(|run| view(layout(4, run), vec![0, 1]).shape());
    let error = here.check_same_stream(&there).unwrap_err();
    assert!(error.text.contains("16 bytes") && error.text.contains("24 bytes"), "{error}");
    assert!(view(layout(4, 16), vec![3, 3]).check_distinct().is_err());
    assert!(view(layout(4, 16), vec![3, 0]).check_distinct().is_ok());
}

#[test]
fn parts_that_cannot_be_are_refused() {
    let of_parts = |parts, ids: &[u32]| {
        let layout =
            Arc::new(Layout::new(0, 4, 12, 24, 2, 12, Layers::Strided { count: 1, stride: 0 }).unwrap());
        View::of_parts(layout, parts, ids.into(), 0..1, 0..2, Order::LayerFirst).map_err(|error| error.code)
    };
    for parts in [0, 5, 24, 257, u32::MAX] {
        assert_eq!(of_parts(parts, &[0]).unwrap_err(), Code::InvalidArgument, "{parts}");
    }
    assert_eq!(of_parts(3, &[11]).unwrap().bytes(), 8);
    assert_eq!(of_parts(3, &[12]).unwrap_err(), Code::PageOutOfRange);
    assert!(of_parts(3, &[9, 11, 10]).unwrap().check_distinct().is_ok());
    let twice = of_parts(3, &[9, 11, 10, 9]).unwrap().check_distinct().unwrap_err();
    assert!(twice.code == Code::DuplicatePage && twice.text.contains("part 0 of 3 of page 3"), "{twice}");
}
