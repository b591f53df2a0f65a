//! Engines of unequal page sizes and heads a rank: what moves is what a copy token by token would move.

use kvik_core::{Code, Extents, Layers, Layout, Order, View};
use proptest::prelude::*;
use std::sync::Arc;

/// One rank's KV-cache: pages of `[heads][tokens][content]`, with gaps between heads and between pages.
#[derive(Debug, Clone)]
struct Cache {
    tokens: u32,
    heads: u32,
    content: u64,
    pages: u32,
    layers: u32,
    head_gap: u64,
    page_gap: u64,
    page_major: bool,
}

impl Cache {
    fn head_stride(&self) -> u64 {
        u64::from(self.tokens) * self.content + self.head_gap
    }

    fn page_bytes(&self) -> u64 {
        u64::from(self.heads) * self.head_stride() + self.page_gap
    }

    fn strides(&self) -> (u64, u64) {
        match self.page_major {
            true => (self.page_bytes() * u64::from(self.layers), self.page_bytes()),
            false => (self.page_bytes(), self.page_bytes() * u64::from(self.pages)),
        }
    }

    fn layout(&self) -> Layout {
        let (page, layer) = self.strides();
        let (run, head) = (u64::from(self.tokens) * self.content, self.head_stride());
        let layers = Layers::Strided { count: self.layers, stride: layer };
        Layout::new(0, self.pages, run, page, self.heads, head, layers).unwrap()
    }

    /// Where the content of one token of one head starts.
    fn at(&self, layer: u32, page: u32, head: u32, token: u32) -> usize {
        let (page_stride, layer_stride) = self.strides();
        let at = u64::from(layer) * layer_stride + u64::from(page) * page_stride;
        (at + u64::from(head) * self.head_stride() + u64::from(token) * self.content) as usize
    }
}

/// The tokens of both sides go in groups of `unit`; each side has the first head and the ids of parts that hold them.
#[derive(Debug, Clone)]
struct Handover {
    unit: u32,
    heads: u32,
    sides: [(Cache, u32, Vec<u32>); 2],
}

impl Handover {
    fn views(&self) -> [View; 2] {
        [0, 1].map(|side| {
            let (cache, first, ids) = &self.sides[side];
            let (parts, heads) = (cache.tokens / self.unit, *first..first + self.heads);
            let layout = Arc::new(cache.layout());
            View::of_parts(layout, parts, ids.as_slice().into(), 0..cache.layers, heads, Order::LayerFirst)
                .unwrap()
        })
    }

    /// The copy that needs no arithmetic but where a token lies.
    fn token_by_token(&self, from: &[u8], to: &mut [u8]) {
        let [(left, left_head, left_ids), (right, right_head, right_ids)] = &self.sides;
        let place = |cache: &Cache, layer, id: u32, head, token| {
            let parts = cache.tokens / self.unit;
            cache.at(layer, id / parts, head, (id % parts) * self.unit + token)
        };
        for (layer, group) in
            (0..left.layers).flat_map(|layer| (0..left_ids.len()).map(move |group| (layer, group)))
        {
            for (head, token) in
                (0..self.heads).flat_map(|head| (0..self.unit).map(move |token| (head, token)))
            {
                let a = place(left, layer, left_ids[group], left_head + head, token);
                let b = place(right, layer, right_ids[group], right_head + head, token);
                let len = left.content as usize;
                to[b..b + len].copy_from_slice(&from[a..a + len]);
            }
        }
    }
}

fn cache(heads: u32, content: u64, layers: u32) -> impl Strategy<Value = (Cache, u32)> {
    let tokens = prop_oneof![Just(16u32), Just(32), Just(48), Just(64)];
    (
        tokens,
        0u32..4,
        0u32..3,
        1u32..9,
        prop_oneof![Just(0u64), Just(5)],
        prop_oneof![Just(0u64), Just(7)],
        any::<bool>(),
    )
        .prop_map(move |(tokens, before, after, pages, head_gap, page_gap, page_major)| {
            let heads = before + heads + after;
            (Cache { tokens, heads, content, pages, layers, head_gap, page_gap, page_major }, before)
        })
}

fn shuffled(cache: &Cache, unit: u32) -> impl Strategy<Value = Vec<u32>> + use<> {
    Just((0..cache.pages * (cache.tokens / unit)).collect::<Vec<_>>()).prop_shuffle()
}

fn handovers() -> impl Strategy<Value = Handover> {
    // Groups of 16 tokens divide every page.
    let unit = 16;
    let dims = (1u32..5, 1u64..4, 1u32..4);
    let sides = dims.prop_flat_map(|(heads, content, layers)| {
        (Just(heads), cache(heads, content, layers), cache(heads, content, layers), any::<bool>())
    });
    let ids = sides.prop_flat_map(move |(heads, left, right, sorted)| {
        (shuffled(&left.0, unit), shuffled(&right.0, unit), Just((heads, left, right, sorted)))
    });
    ids.prop_map(move |(left_ids, right_ids, (heads, left, right, sorted))| {
        let groups = left_ids.len().min(right_ids.len());
        let [left_ids, right_ids] = [left_ids, right_ids].map(|mut ids| {
            ids.truncate(groups);
            if sorted {
                ids.sort_unstable();
            }
            ids
        });
        Handover { unit, heads, sides: [(left.0, left.1, left_ids), (right.0, right.1, right_ids)] }
    })
}

proptest! {
    #[test]
    fn every_token_of_every_head_lands_where_it_belongs(handover in handovers()) {
        let [left, right] = handover.views();
        left.shape().check_same_stream(&right.shape()).unwrap();
        let from: Vec<u8> = (0..left.layout().end()).map(|at| (at ^ at >> 8 ^ at >> 16) as u8).collect();
        let mut expected = vec![0xAA; right.layout().end() as usize];
        let mut moved = expected.clone();
        handover.token_by_token(&from, &mut expected);
        let mut last = None;
        for extent in Extents::new(&left, &right, 0..left.bytes()) {
            let (a, b, len) = (extent.left as usize, extent.right as usize, extent.len as usize);
            moved[b..b + len].copy_from_slice(&from[a..a + len]);
            prop_assert_ne!(last, Some((a, b)), "neighbours on both sides must be one extent");
            last = Some((a + len, b + len));
        }
        prop_assert_eq!(moved, expected);
    }

    /// One head is plain tokens: pages of any sizes that divide one another need no parts.
    #[test]
    fn one_head_needs_no_parts(pages in 1u32..6, times in 1u32..5, content in 1u64..4, layers in 1u32..3, swapped in any::<bool>()) {
        let of = |tokens: u32, pages: u32| {
            let layers = Layers::Strided { count: layers, stride: u64::from(pages * tokens) * content };
            let run = u64::from(tokens) * content;
            let layout = Arc::new(Layout::new(0, pages, run, run, 1, run, layers.clone()).unwrap());
            let ids: Vec<u32> = (0..pages).rev().collect();
            View::new(layout.clone(), ids.into(), 0..layout.layers(), 0..1, Order::LayerFirst).unwrap()
        };
        let (mut left, mut right) = (of(16 * times, pages), of(16, pages * times));
        if swapped {
            std::mem::swap(&mut left, &mut right);
        }
        left.shape().check_same_stream(&right.shape()).unwrap();
        let order = |order| (left.clone().with_order(order).shape(), right.clone().with_order(order).shape());
        let (here, there) = order(Order::PageFirst);
        prop_assert_eq!(here.check_same_stream(&there).is_ok(), times == 1);
    }
}

/// Without parts the second half of a large page's first head would land in the small page's second head.
#[test]
fn several_heads_of_unequal_pages_are_refused_without_parts() {
    for heads in [2, 3, 8] {
        let cache = |tokens: u32, pages| {
            let run = u64::from(tokens) * 10;
            let layout =
                Layout::new(0, pages, run, run * heads, heads as u32, run, Layers::At(vec![0])).unwrap();
            Arc::new(layout)
        };
        let (large, small) = (cache(32, 4), cache(16, 8));
        let view = |layout: &Arc<Layout>, parts, ids: std::ops::Range<u32>| {
            let ids: Vec<u32> = ids.collect();
            View::of_parts(layout.clone(), parts, ids.into(), 0..1, 0..heads as u32, Order::LayerFirst)
                .unwrap()
        };
        let (whole, parts, two) = (view(&large, 1, 0..1), view(&large, 2, 0..2), view(&small, 1, 0..2));
        let error = whole.shape().check_same_stream(&two.shape()).unwrap_err();
        assert_eq!(error.code, Code::ShapeMismatch);
        assert!(error.text.contains("parts"), "{error}");
        parts.shape().check_same_stream(&two.shape()).unwrap();
        // A last page that is half full.
        view(&large, 2, 0..3).shape().check_same_stream(&view(&small, 1, 5..8).shape()).unwrap();
    }
}
