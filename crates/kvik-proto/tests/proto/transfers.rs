//! Bytes arrive where they should, in every way that they can go.

use crate::memory::{Mem, view};
use crate::world::{World, layout, ms};
use kvik_core::{Code, Layers, Layout, Order, Right, Use, View};
use kvik_proto::{Claim, OWN_SESSION, Op, PageList, Path, Select};
use std::sync::Arc;

const PATHS: [(Op, Path); 4] = [
    (Op::Read, Path::Channels),
    (Op::Read, Path::Memory),
    (Op::Write, Path::Channels),
    (Op::Write, Path::Memory),
];

fn right(op: Op) -> Right {
    if op == Op::Write { Right::Write } else { Right::Read }
}

/// Moves `mine` and `theirs` in every way, and within one engine; the destination then holds the source.
fn all_paths(mine: &View, theirs: &View) {
    for (op, path) in PATHS {
        for own in [false, true] {
            let (mut world, session) = World::pair(7);
            let (owner, session) = if own { (0, OWN_SESSION) } else { (1, session) };
            let here = Mem::for_layout(mine.layout(), 1);
            let there = Mem::for_layout(theirs.layout(), 2);
            let grant = world.grant(owner, &there, theirs, right(op), Use::Once(1));
            let mut open = world.open(0, grant, op, path, Some((&here, mine)));
            if op == Op::Write && path == Path::Channels {
                open.sums = false;
            }
            let slots = open.side.as_ref().and_then(|side| side.fence);
            world.transfer(0, session, open).unwrap();
            let theirs = theirs.clone().with_order(mine.order());
            assert_eq!(
                here.peek(mine, 0..mine.bytes()),
                there.peek(&theirs, 0..mine.bytes()),
                "{op:?} {path:?}"
            );
            assert_eq!(world.peers[owner].node.grant_state(grant), Some(kvik_core::GrantState::Consumed));
            if let Some((slot, generation)) = slots {
                assert!(
                    world.peers[0].fences[slot as usize] > generation,
                    "the source's fence was not raised"
                );
            }
            world.assert_quiet();
            world.assert_no_leak();
        }
    }
}

#[test]
fn pages_go_both_ways_on_every_path() {
    let layout = layout(16, 5000);
    all_paths(&view(&layout, &[3, 1, 2, 9]), &view(&layout, &[15, 0, 7, 8]));
}

#[test]
fn layers_slices_and_orders_are_arithmetic() {
    let strided = |stride| Layers::Strided { count: 3, stride };
    // Layers apart with four slices, against page-major memory with two slices that touch.
    let heads = Arc::new(Layout::new(64, 12, 600, 4000, 4, 1000, strided(50_000)).unwrap());
    let halves = Arc::new(Layout::new(0, 12, 1200, 7200, 2, 1200, strided(2400)).unwrap());
    for order in [Order::LayerFirst, Order::PageFirst] {
        let mine = view(&heads, &[11, 2, 3]).with_order(order);
        all_paths(&mine, &view(&halves, &[0, 5, 4]).with_order(Order::LayerFirst));
    }
    // Half of the slices of twice the bytes: unequal tensor parallelism.
    let mine = View::new(heads, [5, 6].into(), 1..2, 2..4, Order::LayerFirst).unwrap();
    let one = Arc::new(Layout::new(0, 12, 1200, 1200, 1, 0, Layers::At(vec![0])).unwrap());
    all_paths(&mine, &view(&one, &[1, 7]));
}

#[test]
fn a_part_of_a_grant_can_be_named() {
    let (mut world, session) = World::pair(3);
    let strided = Layers::Strided { count: 4, stride: 40_000 };
    let theirs = Arc::new(Layout::new(0, 10, 1000, 4000, 4, 1000, strided).unwrap());
    let there = Mem::for_layout(&theirs, 2);
    let whole = view(&theirs, &[0, 1, 2, 3, 9]);
    let grant = world.grant(1, &there, &whole, Right::Read, Use::Many);
    let part = View::new(theirs.clone(), [9, 2].into(), 1..3, 1..2, Order::PageFirst).unwrap();
    let mine =
        Arc::new(Layout::new(0, 2, 1000, 1000, 1, 0, Layers::Strided { count: 2, stride: 9000 }).unwrap());
    let (here, side) = (Mem::for_layout(&mine, 1), view(&mine, &[0, 1]).with_order(Order::PageFirst));
    let mut open = world.open(0, grant, Op::Read, Path::Channels, Some((&here, &side)));
    let positions = Some(PageList::of(&[4, 2].into()));
    open.select = Select { positions, layers: Some(1..3), slices: Some(1..2), parts: None };
    world.transfer(0, session, open).unwrap();
    assert_eq!(here.peek(&side, 0..4000), there.peek(&part, 0..4000));
    world.assert_quiet();
}

#[test]
fn a_source_may_repeat_pages_and_a_destination_may_not() {
    let layout = layout(2, 4096);
    let thrice = view(&layout, &[1, 1, 1]);
    let target = crate::world::layout(3, 4096);
    for path in [Path::Channels, Path::Memory] {
        let (mut world, session) = World::pair(3);
        let (here, there) = (Mem::for_layout(&layout, 1), Mem::for_layout(&target, 2));
        let to = view(&target, &[0, 1, 2]);
        let grant = world.grant(1, &there, &to, Right::Write, Use::Many);
        let open = world.open(0, grant, Op::Write, path, Some((&here, &thrice)));
        world.transfer(0, session, open).unwrap();
        assert_eq!(there.all(), here.peek(&thrice, 0..3 * 4096));

        let (from, into) = (Mem::for_layout(&target, 3), Mem::for_layout(&layout, 4));
        let read = world.grant(1, &from, &to, Right::Read, Use::Many);
        let open = world.open(0, read, Op::Read, path, Some((&into, &thrice)));
        assert_eq!(
            world.peers[0].node.session(session).begin(open, ms(0)).unwrap_err().code,
            Code::DuplicatePage
        );
        // The owner does not rely on the other side for its own pages.
        let mut open = world.open(0, grant, Op::Write, path, Some((&here, &thrice)));
        open.select.positions = Some(PageList::Ids([0, 1, 1].into()));
        assert_eq!(world.transfer(0, session, open).unwrap_err().code, Code::DuplicatePage);
        assert_eq!(world.peers[0].downs.len() + world.peers[1].downs.len(), 0);
    }
}

#[test]
fn an_engine_does_not_copy_pages_onto_their_neighbours() {
    let mut world = World::new(1, 1);
    let layout = layout(8, 4096);
    let mem = Mem::for_layout(&layout, 1);
    let granted = view(&layout, &[1, 2, 3]);
    let offer = world.offer(0, &mem, &granted, Right::Read, Use::Many);
    let (id, region) = (world.grant_id(), offer.region_id);
    world.issue(0, id, offer);
    let mut open = world.open(0, id, Op::Read, Path::Channels, Some((&mem, &view(&layout, &[2, 3, 4]))));
    open.side.as_mut().unwrap().region_id = region;
    assert_eq!(world.peers[0].node.begin_own(open, world.now).unwrap_err().code, Code::DuplicatePage);
    let mut open = world.open(0, id, Op::Read, Path::Channels, Some((&mem, &view(&layout, &[4, 5, 6]))));
    open.side.as_mut().unwrap().region_id = region;
    world.transfer(0, OWN_SESSION, open).unwrap();
    assert_eq!(mem.peek(&view(&layout, &[4, 5, 6]), 0..12288), mem.peek(&granted, 0..12288));
}

#[test]
fn transfers_take_turns() {
    let (mut world, session) = World::pair(3);
    let layout = layout(64, 8192);
    let there = Mem::for_layout(&layout, 2);
    let pages: Vec<u32> = (0..64).collect();
    let grant = world.grant(1, &there, &view(&layout, &pages), Right::Read, Use::Many);
    let mut keys = Vec::new();
    for seed in [10, 11] {
        let here = Mem::for_layout(&layout, seed);
        let open = world.open(0, grant, Op::Read, Path::Channels, Some((&here, &view(&layout, &pages))));
        keys.push(world.begin(0, session, open));
    }
    let output = world.link(session).control[0].drain(..).collect::<Vec<u8>>();
    world.peers[1].node.session(session).receive(&output, world.now);
    let mut turns = Vec::new();
    for _ in 0..20 {
        let request =
            world.peers[1].node.session(session).next_of(Path::Channels, Claim::Next, world.now).unwrap();
        let kvik_proto::WorkKind::Send(header) = request.kind else { panic!("no send") };
        turns.push(header.transfer);
    }
    for pair in turns.windows(2) {
        assert_ne!(pair[0], pair[1], "{turns:?}");
    }
    // Nothing more is given out once the grant ends, though its open work requests keep the transfers there.
    world.end_grant(1, grant, kvik_core::GrantState::Revoked);
    assert!(world.peers[1].node.session(session).next_of(Path::Channels, Claim::Next, world.now).is_none());
    assert!(!world.peers[1].ended.contains_key(&grant));
}

#[test]
fn something_to_confirm_needs_no_memory() {
    let (mut world, session) = World::pair(3);
    let layout = layout(4, 4096);
    let there = Mem::for_layout(&layout, 2);
    let grant = world.grant(1, &there, &view(&layout, &[0]), Right::Read, Use::Once(1));
    let mut open = world.open(0, grant, Op::Extend, Path::Channels, None);
    open.extend = ms(100_000);
    world.transfer(0, session, open).unwrap();
    assert_eq!(world.peers[1].node.next_timeout().map(|at| at > world.now), Some(true));
    let open = world.open(0, grant, Op::Read, Path::Channels, None);
    assert_eq!(
        world.peers[0].node.session(session).begin(open, ms(0)).unwrap_err().code,
        Code::InvalidArgument
    );
    let mut open = world.open(0, grant, Op::Confirm, Path::Channels, None);
    open.confirm = false;
    world.transfer(0, session, open).unwrap();
    assert_eq!(world.peers[1].ended[&grant], kvik_core::GrantState::Consumed);
    world.assert_quiet();
}
