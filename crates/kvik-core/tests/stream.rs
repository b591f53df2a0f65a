//! The arithmetic of views and extents against a naive model that lists every byte.

use kvik_core::{Extents, Layers, Layout, Order, View};
use proptest::prelude::*;
use std::sync::Arc;

/// Offsets of every byte of the stream, one by one.
fn naive(view: &View) -> Vec<u64> {
    let layout = view.layout();
    let mut bytes = Vec::new();
    let mut row = |layer: u32, page: u32| {
        for slice in view.slices() {
            let start = layout.at(layer, page, slice);
            bytes.extend(start..start + layout.run_bytes());
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

prop_compose! {
    fn views(run: u64)(layout in layouts(run))(
        pages in proptest::sample::subsequence((0..layout.pages()).collect::<Vec<_>>(), 1..=layout.pages() as usize).prop_shuffle(),
        first_layer in 0..layout.layers(), first_slice in 0..layout.slices(), page_first in any::<bool>(), layout in Just(layout),
    ) -> View {
        let order = if page_first { Order::PageFirst } else { Order::LayerFirst };
        let (layers, slices) = (first_layer..layout.layers(), first_slice..layout.slices());
        View::new(Arc::new(layout), pages.into(), layers, slices, order).unwrap()
    }
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
