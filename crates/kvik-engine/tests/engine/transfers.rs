//! Two engines in one process move pages over every transport.

use crate::common::*;
use kvik_core::{Code, Layers, Layout, Right, Use};
use kvik_engine::{GrantOptions, PageSet, Preference, TransferOptions, Verify};
use std::sync::Arc;
use std::time::Duration;

fn both_ways(transport: Preference, verify: Verify, name: &str) {
    let (owner, reader) = (engine(transport), engine(transport));
    let (there, here) = (region(&owner, 200, 1), region(&reader, 200, 99));
    let options = TransferOptions { verify: Some(verify), ..TransferOptions::default() };
    let theirs: Vec<u32> = (0..150).map(|i| (i * 37) % 199).collect();
    let mine: Vec<u32> = (0..150).map(|i| (i * 61) % 197).collect();

    let many = GrantOptions { uses: Use::Many, ..GrantOptions::default() };
    let grant = owner.grant(&pages(&there, &theirs), many.clone()).unwrap();
    let report =
        reader.read(&pages(&here, &mine), grant.ticket(), None, options.clone()).unwrap().wait(None).unwrap();
    assert_eq!((report.transport.name(), report.bytes), (name, 150 * PAGE));
    check(&there, &theirs, &here, &mine);

    fill(&here, 55);
    let grant = owner.grant(&pages(&there, &theirs), GrantOptions { right: Right::Write, ..many }).unwrap();
    let to = &theirs[10..20];
    let at: Arc<[u32]> = (10..20).collect();
    let report = reader.write(&pages(&here, &mine[..10]), grant.ticket(), Some(at), options).unwrap();
    let report = report.wait(None).unwrap();
    assert_eq!((report.transport.name(), report.bytes), (name, 10 * PAGE));
    check(&here, &mine[..10], &there, to);
    println!("{report:?}");
}

#[test]
fn tcp_moves_pages_both_ways() {
    both_ways(Preference::Tcp, Verify::Auto, "tcp");
    both_ways(Preference::Tcp, Verify::Off, "tcp");
}

#[test]
fn local_moves_pages_both_ways() {
    both_ways(Preference::Local, Verify::Auto, "local");
    both_ways(Preference::Auto, Verify::Full, "local");
}

/// A layout of `pages` pages of `layers` layers with two slices of `run` bytes each: all of a page together, or all of a layer.
fn layered(pages: u32, layers: u32, run: u64, page_major: bool) -> Arc<Layout> {
    let row = 2 * run;
    let (page, layer) = match page_major {
        true => (row * u64::from(layers), row),
        false => (row, row * u64::from(pages)),
    };
    let layers = Layers::Strided { count: layers, stride: layer };
    // Slices of a layer lie apart where pages do, as keys and values of a serving engine do.
    Arc::new(Layout::new(0, pages, run, page, 2, run, layers).unwrap())
}

#[test]
fn checksums_that_are_wanted_are_made_while_the_bytes_are_placed() {
    for (transport, verify, own) in [
        (Preference::Local, Verify::Auto, false),
        (Preference::Local, Verify::Full, false),
        (Preference::Tcp, Verify::Off, false),
        (Preference::Tcp, Verify::Full, false),
        (Preference::Auto, Verify::Auto, true),
    ] {
        let owner = engine(transport);
        let reader = if own { owner.clone() } else { engine(transport) };
        // Layers a checksum: all alike, and a few in the last one; runs of whole vectors, and odd ones; larger than a chunk.
        for (layers, run, each) in
            [(6, 8192, 2), (7, 8192, 3), (5, 1000, 2), (3, 300_000, 1), (40, 32_768, 2)]
        {
            for page_major in [false, true] {
                let layout = layered(9, layers, run, page_major);
                let (there, here) =
                    (owner.allocate(layout.end()).unwrap(), reader.allocate(layout.end()).unwrap());
                fill(&there, 7);
                let set = |region, ids: &[u32], layout: &Arc<Layout>| {
                    PageSet::new(region, layout.clone(), ids.into(), None, None).unwrap()
                };
                let grant = owner.grant(&set(&there, &[8, 0, 3, 4, 1], &layout), many()).unwrap();
                // Positions in no order: checksums come in that of this side's pages.
                let into = set(&here, &[2, 7, 5, 6], &layered(9, layers, run, !page_major));
                let options =
                    TransferOptions { verify: Some(verify), sums: Some(each), ..TransferOptions::default() };
                let read = reader.read(&into, grant.ticket(), Some([3, 0, 4, 2].into()), options).unwrap();
                let report = read.wait(Some(PATIENCE)).unwrap();
                let expected = set(&there, &[4, 8, 1, 3], &layout).sums(each).unwrap();
                let what = format!("{transport:?} {verify:?} {layers} x {run}, {each} each, {page_major}");
                assert_eq!(into.sums(each).unwrap(), expected, "{what}: the bytes");
                assert_eq!(into.sums_after(&report, each).unwrap(), expected, "{what}: the checksums");
                assert_eq!(into.sums_after(&report, layers).unwrap(), into.sums(layers).unwrap(), "{what}");
                let made = report.sums.unwrap();
                let known = (0..made.len()).filter(|number| made.get(*number).is_some()).count();
                // Who places a chunk sums all that lies whole in it; those of a network have 512 KiB.
                let chunk = made.align(512 << 10);
                let whole = made.unit().is_some_and(|unit| chunk.is_multiple_of(unit))
                    || made.align(1 << 20) == chunk;
                println!("{what}: {known} of {} were known", made.len());
                assert!(known == made.len() || !whole && transport == Preference::Tcp, "{what}: {known}");
            }
        }
    }
}

#[test]
fn an_own_ticket_is_a_copy() {
    let engine = engine(Preference::Auto);
    let (a, b) = (region(&engine, 50, 3), region(&engine, 50, 4));
    let grant = engine.grant(&pages(&a, &[1, 2, 40]), GrantOptions::default()).unwrap();
    let read = engine.read(&pages(&b, &[5, 6, 7]), grant.ticket(), None, TransferOptions::default()).unwrap();
    assert_eq!(read.wait(None).unwrap().transport.name(), "self");
    check(&a, &[1, 2, 40], &b, &[5, 6, 7]);
    assert_eq!(grant.wait(PATIENCE), Some(kvik_core::GrantState::Consumed));
    let again =
        engine.read(&pages(&b, &[5, 6, 7]), grant.ticket(), None, TransferOptions::default()).unwrap();
    assert_eq!(again.wait(None).unwrap_err().code, Code::GrantConsumed);
}

#[test]
fn slices_fill_narrow_pages_from_wide_ones() {
    let (owner, reader) = (engine(Preference::Tcp), engine(Preference::Tcp));
    let wide = Arc::new(
        Layout::new(0, 8, 1024, 8192, 8, 1024, Layers::Strided { count: 3, stride: 65_536 }).unwrap(),
    );
    let narrow = Arc::new(
        Layout::new(0, 8, 1024, 4096, 4, 1024, Layers::Strided { count: 3, stride: 32_768 }).unwrap(),
    );
    let (there, here) = (region(&owner, 12, 1), region(&reader, 6, 9));
    let source = PageSet::new(&there, wide.clone(), [0, 3, 7].into(), None, Some(4..8)).unwrap();
    let target = PageSet::new(&here, narrow.clone(), [2, 1, 0].into(), None, None).unwrap();
    let grant = owner.grant(&source, GrantOptions::default()).unwrap();
    reader.read(&target, grant.ticket(), None, TransferOptions::default()).unwrap().wait(None).unwrap();
    let (from, to) = (bytes(&there), bytes(&here));
    for (a, b) in [(0, 2), (3, 1), (7, 0)] {
        for (layer, slice) in (0..3).flat_map(|l| (0..4).map(move |s| (l, s))) {
            let (a, b) = (wide.at(layer, a, slice + 4) as usize, narrow.at(layer, b, slice) as usize);
            assert_eq!(from[a..a + 1024], to[b..b + 1024]);
        }
    }
}

#[test]
fn a_reader_that_is_a_step_ahead_waits_for_the_grant() {
    let (owner, reader) = (engine(Preference::Auto), engine(Preference::Auto));
    let (there, here) = (region(&owner, 10, 1), region(&reader, 10, 9));
    let id = kvik_core::GrantId::random().unwrap();
    let layout = Layout::contiguous(10, PAGE).unwrap();
    let ticket = owner.ticket_template(&layout).unwrap().with_grant(id, Duration::from_secs(60));
    let read = reader.read(&pages(&here, &[0, 1]), &ticket, None, TransferOptions::default()).unwrap();
    assert_eq!(read.wait(Some(Duration::from_millis(200))).unwrap_err().code, Code::WaitTimeout);
    let options = GrantOptions { id: Some(id), ..GrantOptions::default() };
    let grant = owner.grant(&pages(&there, &[4, 5]), options).unwrap();
    read.wait(None).unwrap();
    check(&there, &[4, 5], &here, &[0, 1]);
    assert_eq!(grant.wait(PATIENCE), Some(kvik_core::GrantState::Consumed));
    // The owner says so a tenth of its time before the reader's is over.
    let never = in_time(Duration::from_millis(300), |deadline| {
        let never = ticket.with_grant(kvik_core::GrantId::random().unwrap(), Duration::from_secs(60));
        let read = reader.read(&pages(&here, &[0, 1]), &never, None, within(deadline)).unwrap();
        Some(read.wait(None).unwrap_err()).filter(|error| error.code != Code::DeadlineExceeded)
    });
    assert_eq!(never.code, Code::GrantUnknown, "{never}");
}
