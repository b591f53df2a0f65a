//! What holds for any numbers: overlap, distinctness, elements that never lie on each other, and tickets.

use kvik_core::{
    EngineId, GrantId, HostTag, Incarnation, Layers, Layout, MAX_TICKET_TEXT, Order, Right, Ticket, View,
    format_size, parse_size,
};
use proptest::prelude::*;
use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

/// Every byte that an element uses, with how many elements use it; `None` where there are too many to list.
fn used_twice(layout: &Layout) -> bool {
    let mut seen = HashSet::new();
    for layer in 0..layout.layers() {
        for page in 0..layout.pages() {
            for slice in 0..layout.slices() {
                let start = layout.at(layer, page, slice);
                if !(start..start + layout.run_bytes()).all(|byte| seen.insert(byte)) {
                    return true;
                }
            }
        }
    }
    false
}

fn layers() -> impl Strategy<Value = Layers> {
    prop_oneof![
        (0u32..4, 0u64..70).prop_map(|(count, stride)| Layers::Strided { count, stride }),
        proptest::collection::vec(0u64..70, 0..4).prop_map(Layers::At),
    ]
}

/// Bytes of a view's page set, one by one.
fn bytes_of(view: &View) -> HashSet<u64> {
    let layout = view.layout();
    let part = layout.run_bytes() / u64::from(view.parts());
    let mut bytes = HashSet::new();
    for layer in view.layers() {
        for id in view.pages().iter() {
            for slice in view.slices() {
                let start = layout.at(layer, id / view.parts(), slice) + u64::from(id % view.parts()) * part;
                bytes.extend(start..start + part);
            }
        }
    }
    bytes
}

fn some_view(offset: u64, stride: u64, parts: u32, ids: &[u32], order: Order) -> View {
    let layers = Layers::Strided { count: 2, stride: stride * 6 };
    let layout = Arc::new(Layout::new(offset, 6, 6, stride, 1, 6, layers).unwrap());
    View::of_parts(layout, parts, ids.into(), 0..2, 0..1, order).unwrap()
}

/// What is taken has no two elements in one place.
#[test]
fn no_layout_that_is_taken_overlaps() {
    let sizes = [1, 2, 4, 6, 8, 12, 16];
    let mut taken = 0;
    for (page, slice) in sizes.iter().flat_map(|page| sizes.map(|slice| (*page, slice))) {
        for (first, second) in sizes.iter().flat_map(|first| sizes.map(|second| (*first, second))) {
            let layers = Layers::At(vec![0, first, first + second]);
            let Ok(layout) = Layout::new(0, 2, 2, page, 2, slice, layers) else { continue };
            let mut bytes = HashSet::new();
            for (layer, at) in (0..3).flat_map(|layer| (0..4).map(move |at| (layer, at))) {
                let start = layout.at(layer, at / 2, at % 2);
                assert!(bytes.insert(start) && bytes.insert(start + 1), "{layout:?}");
            }
            taken += 1;
        }
    }
    assert!(taken > 50, "{taken}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Whatever is accepted has no two elements on one byte, and no byte beyond its end.
    #[test]
    fn accepted_layouts_do_not_overlap(
        offset in 0u64..5, pages in 0u32..5, run in 0u64..5, page in 0u64..40, slices in 0u32..4, slice in 0u64..10,
        layers in layers(),
    ) {
        if let Ok(layout) = Layout::new(offset, pages, run, page, slices, slice, layers) {
            prop_assert!(!used_twice(&layout), "{:?}", layout);
            let last = |layer| {
                let row = |page| (0..slices).map(move |slice| (layer, page, slice));
                (0..pages).flat_map(row).map(|(l, p, s)| layout.at(l, p, s) + run).max()
            };
            prop_assert_eq!((0..layout.layers()).filter_map(last).max(), Some(layout.end()));
        }
    }

    /// Huge numbers are refused, or do not overflow.
    #[test]
    fn no_numbers_overflow(
        offset in any::<u64>(), pages in 1u32.., run in 1u64.., page in any::<u64>(), slices in 1u32..,
        slice in any::<u64>(), count in 1u32.., stride in any::<u64>(), shift in 0u32..64,
    ) {
        let layers = Layers::Strided { count: (count >> (shift % 32)).max(1), stride: stride >> shift };
        let [offset, run, page, slice] = [offset, run, page, slice].map(|n| (n >> shift).max(1));
        let [pages, slices] = [pages, slices].map(|n| (n >> (shift % 32)).max(1));
        if let Ok(layout) = Layout::new(offset, pages, run, page, slices, slice, layers) {
            let last = layout.at(layout.layers() - 1, pages - 1, slices - 1);
            prop_assert!(last.checked_add(run).is_some_and(|end| end <= layout.end()));
            prop_assert!(layout.end() <= i64::MAX as u64);
        }
    }

    #[test]
    fn page_sets_overlap_where_they_share_a_byte(
        a in (0u64..40, 6u64..9, 1u32..4, proptest::collection::vec(0u32..6, 1..4), any::<bool>()),
        b in (0u64..40, 6u64..9, 1u32..4, proptest::collection::vec(0u32..6, 1..4), any::<bool>()),
    ) {
        let [a, b] = [a, b].map(|(offset, stride, parts, ids, page_first)| {
            let order = if page_first { Order::PageFirst } else { Order::LayerFirst };
            some_view(offset, stride, parts, &ids, order)
        });
        let shared = !bytes_of(&a).is_disjoint(&bytes_of(&b));
        prop_assert_eq!(a.overlaps(&b), shared);
        prop_assert_eq!(b.overlaps(&a), shared);
    }

    #[test]
    fn a_destination_is_distinct_where_no_byte_is_written_twice(
        parts in 1u32..4, ids in proptest::collection::vec(0u32..6, 1..7),
    ) {
        let view = some_view(0, 6, parts, &ids, Order::LayerFirst);
        let once = bytes_of(&view).len() as u64 == view.bytes();
        prop_assert_eq!(view.check_distinct().is_ok(), once);
    }

    #[test]
    fn tickets_come_back(
        ids in any::<([u8; 16], u64, [u8; 16], [u8; 8], [u8; 8])>(), write in any::<bool>(), expiry in any::<u32>(),
        addresses in proptest::collection::vec(any::<(IpAddr, u16)>(), 1..5),
    ) {
        let usable = addresses.iter().all(|(ip, port)| !ip.is_unspecified() && *port != 0);
        let addresses: Vec<_> = addresses.into_iter().map(|(ip, port)| SocketAddr::new(ip, port)).collect();
        let ticket = Ticket {
            engine: EngineId(ids.0),
            incarnation: Incarnation(ids.1),
            grant: GrantId(ids.2),
            right: if write { Right::Write } else { Right::Read },
            expiry: Duration::from_millis(expiry.into()),
            layout: ids.3,
            host: HostTag(ids.4),
            addresses,
        };
        let text = ticket.to_string();
        prop_assert!(text.len() <= MAX_TICKET_TEXT);
        prop_assert_eq!(text.parse::<Ticket>().ok(), usable.then_some(ticket));
    }

    #[test]
    fn sizes_that_are_shown_exactly_come_back(bytes in any::<u64>(), shift in 0u32..64) {
        let shown = format_size(bytes >> shift);
        match shown.contains('.') {
            true => prop_assert!(parse_size(&shown).map_or(true, |back| back.abs_diff(bytes >> shift) <= (bytes >> shift) / 10)),
            false => prop_assert_eq!(parse_size(&shown).ok(), Some(bytes >> shift)),
        }
    }
}
