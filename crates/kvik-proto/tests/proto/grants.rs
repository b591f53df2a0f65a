//! Every request that is not covered by a live grant fails with its own error.

use crate::memory::{Mem, view};
use crate::world::{World, layout, ms};
use kvik_core::{Code, GrantId, GrantState, Layers, Layout, Order, Right, Use, View};
use kvik_proto::{FlowKey, OWN_SESSION, Op, Open, PageList, Path, Select};
use std::sync::Arc;

/// Two engines and a grant by the second over pages 2..6 of 8, and memory of the first for four pages.
struct Scene {
    world: World,
    session: u64,
    here: Mem,
    side: View,
    there: Mem,
    granted: View,
}

fn scene() -> Scene {
    let (world, session) = World::pair(11);
    let strided = || Layers::Strided { count: 2, stride: 80_000 };
    let theirs = Arc::new(Layout::new(0, 8, 4096, 8192, 2, 4096, strided()).unwrap());
    let granted = View::new(theirs.clone(), [2, 3, 4, 5].into(), 0..2, 0..2, Order::LayerFirst).unwrap();
    let mine = Arc::new(Layout::new(0, 4, 4096, 8192, 2, 4096, strided()).unwrap());
    let (here, there) = (Mem::for_layout(&mine, 1), Mem::for_layout(&theirs, 2));
    Scene { world, session, here, side: view(&mine, &[0, 1, 2, 3]), there, granted }
}

impl Scene {
    /// A grant over new memory.
    fn grant(&mut self, right: Right, uses: Use) -> GrantId {
        self.there = Mem::for_layout(self.granted.layout(), 2);
        self.world.grant(1, &self.there, &self.granted, right, uses)
    }

    fn open(&mut self, grant: GrantId, op: Op) -> Open<Mem> {
        self.world.open(0, grant, op, Path::Channels, Some((&self.here, &self.side)))
    }

    fn read(&mut self, grant: GrantId) -> Option<Code> {
        let open = self.open(grant, Op::Read);
        self.world.transfer(0, self.session, open).err().map(|error| error.code)
    }
}

#[test]
fn an_unknown_grant_waits_until_it_is_known() {
    let mut s = scene();
    let id = s.world.grant_id();
    let open = Open { layout: s.granted.layout().digest(), ..s.open(id, Op::Read) };
    let key = s.world.begin(0, s.session, open);
    s.world.advance(ms(20_000));
    assert!(s.world.outcome(0, key).is_none());
    let offer = s.world.offer(1, &s.there, &s.granted, Right::Read, Use::Once(1));
    s.world.issue(1, id, offer);
    s.world.settle();
    assert_eq!(s.world.outcome(0, key), Some(Ok(())));
    assert_eq!(s.here.peek(&s.side, 0..65_536), s.there.peek(&s.granted, 0..65_536));
    s.world.assert_quiet();
    s.world.assert_no_leak();
}

#[test]
fn an_unknown_grant_is_named_before_the_deadline() {
    let mut s = scene();
    let id = s.world.grant_id();
    let open = s.open(id, Op::Read);
    let key = s.world.begin(0, s.session, open);
    s.world.advance(ms(26_900));
    assert!(s.world.outcome(0, key).is_none());
    s.world.advance(ms(200));
    assert_eq!(s.world.code(0, key), Some(Code::GrantUnknown));
    s.world.assert_quiet();
    s.world.assert_no_leak();
}

#[test]
fn a_request_that_waits_can_be_cancelled_or_lose_its_peer() {
    let mut s = scene();
    let id = s.world.grant_id();
    let opens = [s.open(id, Op::Read), s.open(id, Op::Read)];
    let keys = opens.map(|open| s.world.begin(0, s.session, open));
    s.world.settle();
    s.world.cancel(0, keys[0]);
    s.world.settle();
    assert_eq!(s.world.code(0, keys[0]), Some(Code::Cancelled));
    s.world.cut(0, s.session);
    s.world.settle();
    assert_eq!(s.world.code(0, keys[1]), Some(Code::PeerLost));
    let offer = s.world.offer(1, &s.there, &s.granted, Right::Read, Use::Once(1));
    s.world.issue(1, id, offer);
    s.world.assert_quiet();
    s.world.assert_no_leak();
}

#[test]
fn a_grant_that_is_late_for_itself_serves_nobody() {
    let mut s = scene();
    let id = s.world.grant_id();
    let open = s.open(id, Op::Read);
    let key = s.world.begin(0, s.session, open);
    let open = s.world.open(0, id, Op::Confirm, Path::Channels, None);
    let confirm = s.world.begin(0, s.session, open);
    s.world.settle();
    let mut offer = s.world.offer(1, &s.there, &s.granted, Right::Read, Use::Once(1));
    offer.expires = s.world.now - ms(1);
    s.world.issue(1, id, offer);
    s.world.settle();
    assert_eq!(s.world.code(0, key), Some(Code::GrantExpired));
    assert_eq!(s.world.code(0, confirm), Some(Code::GrantExpired));
}

#[test]
fn ends_have_names() {
    let mut s = scene();
    let expired = s.grant(Right::Read, Use::Many);
    s.world.advance(ms(120_001));
    assert_eq!(s.world.peers[1].ended[&expired], GrantState::Expired);
    let consumed = s.grant(Right::Read, Use::Once(1));
    assert_eq!(s.read(consumed), None);
    let revoked = s.grant(Right::Read, Use::Many);
    s.world.end_grant(1, revoked, GrantState::Revoked);
    let closed = s.grant(Right::Read, Use::Many);
    s.world.end_grant(1, closed, GrantState::Closed);
    let write = s.grant(Right::Write, Use::Many);
    s.here = Mem::for_layout(s.side.layout(), 5);
    for (grant, code) in [
        (expired, Code::GrantExpired),
        (consumed, Code::GrantConsumed),
        (revoked, Code::GrantRevoked),
        (closed, Code::RegionClosed),
        (write, Code::GrantWrongRight),
    ] {
        assert_eq!(s.read(grant), Some(code));
        s.here = Mem::for_layout(s.side.layout(), 5);
    }
    s.there = Mem::for_layout(s.granted.layout(), 6);
    let read = s.grant(Right::Read, Use::Many);
    let open = s.open(read, Op::Write);
    assert_eq!(s.world.transfer(0, s.session, open).unwrap_err().code, Code::GrantWrongRight);
    s.world.assert_quiet();
    s.world.assert_no_leak();
}

/// The one that a process that slept would get wrong: a timer that is due earlier must not hide the expiry.
#[test]
fn expiry_comes_before_whatever_is_buffered() {
    let mut s = scene();
    let grant = s.grant(Right::Read, Use::Many);
    let open = s.open(grant, Op::Read);
    let key = s.world.begin(0, s.session, open);
    let request: Vec<u8> = s.world.link(s.session).control[0].drain(..).collect();
    // The owner's session timer has been due for long, and nobody has ticked.
    let late = s.world.now + ms(121_000);
    s.world.peers[1].node.session(s.session).receive(&request, late);
    s.world.pump(1);
    assert_eq!(s.world.peers[1].ended[&grant], GrantState::Expired);
    s.world.settle();
    assert_eq!(s.world.code(0, key), Some(Code::GrantExpired));
}

#[test]
fn what_the_grant_does_not_cover_is_refused() {
    let mut s = scene();
    let grant = s.grant(Right::Read, Use::Many);
    let ids = |ids: &[u32]| Some(PageList::of(&ids.into()));
    let cases = [
        (Select { positions: ids(&[0, 1, 2, 4]), ..Select::default() }, "position 4"),
        (Select { positions: ids(&[0, 1, 2, 1 << 30]), ..Select::default() }, "position 1073741824"),
        (Select { positions: ids(&[0, 1, 2, 3, 3]), ..Select::default() }, "5 pages"),
        (
            Select { positions: Some(PageList::Runs(vec![(0, u32::MAX)])), ..Select::default() },
            "4294967295 pages",
        ),
        (Select { layers: Some(1..3), ..Select::default() }, "layers 1..3"),
        (Select { slices: Some(0..3), ..Select::default() }, "slices 0..3"),
    ];
    for (select, text) in cases {
        let mut open = s.open(grant, Op::Read);
        open.select = select;
        if open.select.positions.as_ref().is_some_and(|named| named.count() > 1 << 20) {
            assert!(s.world.peers[0].node.session(s.session).begin(open, s.world.now).is_err());
            continue;
        }
        let error = s.world.transfer(0, s.session, open).unwrap_err();
        assert_eq!(error.code, Code::PageNotGranted, "{error}");
        assert!(error.text.contains(text), "{error}");
        s.here = Mem::for_layout(s.side.layout(), 5);
    }
    for select in [
        Select { positions: ids(&[]), ..Select::default() },
        Select { layers: Some(1..1), ..Select::default() },
    ] {
        let mut open = s.open(grant, Op::Read);
        open.select = select;
        assert_eq!(s.world.transfer(0, s.session, open).unwrap_err().code, Code::InvalidArgument);
        s.here = Mem::for_layout(s.side.layout(), 5);
    }
    s.world.assert_quiet();
}

#[test]
fn another_shape_is_refused_with_both_named() {
    let mut s = scene();
    let grant = s.grant(Right::Read, Use::Many);
    let mine = layout(3, 5000);
    for session in [s.session, OWN_SESSION] {
        let here = Mem::for_layout(&mine, 1);
        let side = view(&mine, &[0, 1, 2]);
        let owner = if session == OWN_SESSION { 1 } else { 0 };
        let open = s.world.open(owner, grant, Op::Read, Path::Channels, Some((&here, &side)));
        let error = match session {
            OWN_SESSION => s.world.peers[1].node.begin_own(open, s.world.now).unwrap_err(),
            _ => s.world.transfer(0, session, open).unwrap_err(),
        };
        assert_eq!(error.code, Code::ShapeMismatch);
        for shape in
            ["1 layers x 3 pages x 1 slices x 5000 bytes", "2 layers x 4 pages x 2 slices x 4096 bytes"]
        {
            assert!(error.text.contains(shape), "{error}");
        }
    }
}

#[test]
fn every_reader_counts_once() {
    let mut world = World::new(3, 5);
    let sessions = [world.connect(0, 2), world.connect(2, 1)];
    let layout = layout(4, 8192);
    let there = Mem::for_layout(&layout, 9);
    let all = view(&layout, &[0, 1, 2, 3]);
    let grant = world.grant(2, &there, &all, Right::Read, Use::Once(2));
    let read = |world: &mut World, reader: usize, confirm: bool, pages: &[u32]| {
        let here = Mem::for_layout(&layout, 1);
        let mut open =
            world.open(reader, grant, Op::Read, Path::Channels, Some((&here, &view(&layout, pages))));
        (open.confirm, open.select.positions) = (confirm, Some(PageList::of(&pages.into())));
        world.transfer(reader, sessions[reader], open).map_err(|error| error.code)
    };
    // In parts, of which only the last one confirms; and again, since a reader may retry.
    read(&mut world, 0, false, &[0, 1]).unwrap();
    read(&mut world, 0, true, &[2, 3]).unwrap();
    read(&mut world, 0, true, &[0]).unwrap();
    assert_eq!(world.peers[2].node.grant_state(grant), Some(GrantState::Live));
    read(&mut world, 1, false, &[0, 1, 2, 3]).unwrap();
    assert_eq!(world.peers[2].node.grant_state(grant), Some(GrantState::Live));
    read(&mut world, 1, true, &[3]).unwrap();
    assert_eq!(world.peers[2].ended[&grant], GrantState::Consumed);
    assert_eq!(read(&mut world, 0, true, &[0]), Err(Code::GrantConsumed));
    world.assert_quiet();
    world.assert_no_leak();
}

#[test]
fn more_time_is_given_up_to_a_maximum_and_never_taken() {
    let mut s = scene();
    let grant = s.grant(Right::Read, Use::Many);
    let extend = |s: &mut Scene, by: u64| {
        let mut open = s.world.open(0, grant, Op::Extend, Path::Channels, None);
        (open.extend, open.confirm) = (ms(by), true);
        s.world.transfer(0, s.session, open).unwrap();
    };
    extend(&mut s, 100_000);
    s.world.advance(ms(219_000));
    assert_eq!(s.world.peers[1].node.grant_state(grant), Some(GrantState::Live));
    for _ in 0..10 {
        extend(&mut s, u64::from(u32::MAX));
    }
    s.world.advance(ms(600_000 - 219_000 - 1));
    assert_eq!(s.world.peers[1].node.grant_state(grant), Some(GrantState::Live));
    s.world.advance(ms(2));
    assert_eq!(s.world.peers[1].ended[&grant], GrantState::Expired);

    s.there = Mem::for_layout(s.granted.layout(), 6);
    let mut offer = s.world.offer(1, &s.there, &s.granted, Right::Read, Use::Many);
    offer.latest = offer.expires - ms(60_000);
    let id = s.world.grant_id();
    s.world.issue(1, id, offer);
    let left = s.world.peers[1].node.grants().extend(id, ms(5), s.world.now).unwrap();
    assert_eq!(left, ms(120_000));
    s.world.assert_no_leak();
}

/// A grant over pages that are still in use, and two requests that wait for it.
fn later(s: &mut Scene) -> (GrantId, [FlowKey; 2]) {
    let (id, offer) = (s.world.grant_id(), s.world.offer(1, &s.there, &s.granted, Right::Read, Use::Many));
    s.world.issue_later(1, id, offer);
    let side = (&s.here, &s.side);
    let keys = [(Op::Read, Some(side)), (Op::Extend, None)].map(|(op, side)| {
        let open = s.world.open(0, id, op, Path::Channels, side);
        s.world.begin(0, s.session, Open { layout: s.granted.layout().digest(), ..open })
    });
    s.world.settle();
    (id, keys)
}

#[test]
fn nothing_is_served_of_a_grant_before_it_is_ready() {
    let mut s = scene();
    let (id, keys) = later(&mut s);
    assert_eq!(s.world.peers[1].node.grant_state(id), Some(GrantState::Live));
    assert!(keys.iter().all(|key| s.world.outcome(0, *key).is_none()));
    let own = s.world.open(1, id, Op::Confirm, Path::Memory, None);
    assert_eq!(s.world.try_begin(1, OWN_SESSION, own).unwrap_err().code, Code::GrantUnknown);
    s.world.ready(1, id);
    s.world.ready(1, id);
    s.world.settle();
    assert!(keys.iter().all(|key| s.world.outcome(0, *key) == Some(Ok(()))));
    s.world.end_grant(1, id, GrantState::Revoked);
    s.world.ready(1, id);
    assert_eq!(s.read(id), Some(Code::GrantRevoked));
    s.world.assert_no_leak();
}

#[test]
fn who_waits_for_a_grant_to_be_ready_hears_of_its_end() {
    let ends = [GrantState::Revoked, GrantState::Closed, GrantState::Expired];
    let codes = [Code::GrantRevoked, Code::RegionClosed, Code::GrantUnknown];
    for (end, code) in ends.into_iter().zip(codes) {
        let mut s = scene();
        let (id, keys) = later(&mut s);
        match end {
            // Long after the requests have given up.
            GrantState::Expired => s.world.advance(ms(120_001)),
            _ => s.world.end_grant(1, id, end),
        }
        s.world.settle();
        assert_eq!(keys.map(|key| s.world.code(0, key)), [Some(code); 2], "{end:?}");
        assert_eq!(s.world.peers[1].node.grant_state(id), Some(end));
        s.world.ready(1, id);
        assert_eq!(s.world.peers[1].node.grant_state(id), Some(end));
        s.world.assert_quiet();
        s.world.assert_no_leak();
    }
}

#[test]
fn an_id_is_given_once() {
    let mut s = scene();
    let grant = s.grant(Right::Read, Use::Many);
    let offer = s.world.offer(1, &s.there, &s.granted, Right::Read, Use::Many);
    let again = s.world.peers[1].node.grants().give(grant, offer.clone(), s.world.now).unwrap_err();
    assert_eq!(again.code, Code::InvalidArgument);
    s.world.end_grant(1, grant, GrantState::Revoked);
    assert!(s.world.peers[1].node.grants().give(grant, offer, s.world.now).is_err());
    s.world.assert_no_leak();
}

/// What the owner has counted: outcome, whether it was its own answer, and bytes.
fn served(s: &mut Scene) -> Vec<(Option<Code>, bool, u64)> {
    s.world.settle();
    let told = std::mem::take(&mut s.world.peers[1].served);
    let reader = s.world.peers[0].identity.engine;
    assert!(told.iter().all(|one| one.peer == reader && one.path == Path::Channels));
    told.iter().map(|one| (one.outcome.err(), one.refused, one.bytes)).collect()
}

#[test]
fn the_owner_counts_every_request_once() {
    let mut s = scene();
    let whole = s.side.bytes();
    let grant = s.grant(Right::Read, Use::Once(1));
    assert_eq!(s.read(grant), None);
    assert_eq!(served(&mut s), [(None, false, whole)]);
    assert_eq!(s.read(grant), Some(Code::GrantConsumed));
    assert_eq!(served(&mut s), [(Some(Code::GrantConsumed), true, 0)]);
    // One that waits for its grant: refused by the owner, cancelled by the peer, and cut off with its session.
    let unknown = s.world.grant_id();
    let open = s.open(unknown, Op::Read);
    s.world.begin(0, s.session, open.clone());
    let cancelled = s.world.begin(0, s.session, open);
    s.world.settle();
    s.world.cancel(0, cancelled);
    assert_eq!(served(&mut s), [(Some(Code::Cancelled), false, 0)]);
    s.world.advance(ms(27_100));
    assert_eq!(served(&mut s), [(Some(Code::GrantUnknown), true, 0)]);
    let open = s.open(unknown, Op::Read);
    s.world.begin(0, s.session, open);
    s.world.settle();
    s.world.cut(1, s.session);
    assert_eq!(served(&mut s), []);
}

#[test]
fn pages_of_an_ended_grant_are_quarantined_while_a_transfer_holds_them() {
    let mut s = scene();
    let grant = s.grant(Right::Read, Use::Many);
    let open = s.open(grant, Op::Read);
    s.world.begin(0, s.session, open);
    s.world.peers[1].hold = true;
    s.world.settle();
    assert_eq!(s.world.peers[1].node.quarantined(), 0);
    s.world.end_grant(1, grant, GrantState::Revoked);
    assert_eq!(s.world.peers[1].node.quarantined(), 4);
    s.world.peers[1].hold = false;
    s.world.settle();
    assert_eq!(s.world.peers[1].node.quarantined(), 0);
}
