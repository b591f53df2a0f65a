//! Pages of an owner that no NIC reaches: whose the slots of its ring are, and when a chunk counts.

use crate::memory::{Mem, view};
use crate::world::{World, layout, ms};
use kvik_core::{Code, GrantId, GrantState, Right, Use, View};
use kvik_proto::{Claim, Closed, FlowKey, Frame, Offer, Op, Path, Ring, WorkKind, WorkOutcome, WorkRequest};
use std::sync::Arc;

/// Slots of the ring. One peer has half of them.
const SLOTS: usize = 4;
const CHUNK: u64 = 8192;
const DONE: WorkOutcome = WorkOutcome::Done { extents: 1, verify: ms(0) };
const WHY: &str = "no NIC reaches these pages";

/// Transfers of three chunks, of pages behind a ring.
struct Scene {
    world: World,
    session: u64,
    ring: Arc<Ring<Mem>>,
    grant: GrantId,
    all: View,
}

fn scene(op: Op, version: u16) -> Scene {
    let mut world = World::new(2, 3);
    let (mut left, mut right) = world.handshake(0, 1);
    let session = left.session;
    for established in [&mut left, &mut right] {
        (established.one_sided, established.version) = (true, version);
    }
    let now = world.now;
    world.peers[0].node.add_session(left, now);
    world.peers[1].node.add_session(right, now);
    let (pages, slots) = (layout(3, CHUNK), layout(SLOTS as u32, CHUNK));
    let all = view(&pages, &[0, 1, 2]);
    let there = Mem::for_layout(&pages, 2);
    let ring = Ring::new(Mem::for_layout(&slots, 5), Arc::default(), SLOTS, CHUNK);
    let right = if op == Op::Write { Right::Write } else { Right::Read };
    let closed = Closed { memory: None, nics: Some(WHY.into()) };
    let offer = world.offer(1, &there, &all, right, Use::Many);
    let grant = world.grant_id();
    world.issue(1, grant, Offer { ring: Some(ring.clone()), closed, ..offer });
    Scene { world, session, ring, grant, all }
}

impl Scene {
    fn begin(&mut self, op: Op) -> FlowKey {
        let here = Mem::for_layout(self.all.layout(), 1);
        let open = self.world.open(0, self.grant, op, Path::OneSided, Some((&here, &self.all)));
        let key = self.world.begin(0, self.session, open);
        self.world.settle();
        key
    }

    /// The next chunk for the initiator's NIC.
    fn post(&mut self) -> Option<WorkRequest<Mem>> {
        let now = self.world.now;
        self.world.peers[0].node.session(self.session).next_of(Path::OneSided, Claim::Next, now)
    }

    fn done(&mut self, request: &WorkRequest<Mem>, outcome: WorkOutcome) {
        self.world.peers[0].node.work_done(request.id, outcome);
        self.world.pump(0);
        self.world.settle();
    }

    /// Sends a frame to one engine as the other, whatever its node would say: why that one ends the session.
    fn inject(&mut self, to: usize, frame: &Frame) -> Option<Code> {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        let now = self.world.now;
        self.world.peers[to].node.session(self.session).receive(&bytes, now);
        self.world.pump(to);
        self.world.peers[to].downs.last().map(|(_, error)| error.code)
    }

    fn hold(&mut self, hold: bool) {
        self.world.peers[1].hold = hold;
        self.world.settle();
    }
}

fn place(request: &WorkRequest<Mem>) -> u64 {
    match request.kind {
        WorkKind::Post(_, _, Some(place)) => place,
        _ => panic!("no chunk of a ring"),
    }
}

#[test]
fn all_chunks_go_through_the_slots_and_count_once() {
    for op in [Op::Read, Op::Write] {
        let mut s = scene(op, 4);
        for _ in 0..3 {
            let key = s.begin(op);
            let (first, second) = (s.post().unwrap(), s.post().unwrap());
            assert!(s.post().is_none(), "a peer has half of the slots, and more were lent");
            for request in [&first, &second] {
                assert_eq!(s.ring.holder(place(request)), Some(key));
                s.done(request, DONE);
            }
            let third = s.post().unwrap();
            assert_eq!(s.ring.holder(place(&third)), Some(key));
            // Another NIC takes it up.
            s.done(&third, WorkOutcome::Back);
            let again = s.post().unwrap();
            assert_eq!((place(&again), &again.part), (place(&third), &third.part));
            assert!(s.world.outcome(0, key).is_none());
            s.done(&again, DONE);
            assert_eq!(s.world.outcome(0, key), Some(Ok(())));
            assert_eq!(s.ring.free(), SLOTS);
        }
        s.world.assert_quiet();
        s.world.assert_no_leak();
    }
}

#[test]
fn a_written_chunk_counts_and_its_slot_is_free_only_when_the_owner_has_emptied_it() {
    let mut s = scene(Op::Write, 4);
    let key = s.begin(Op::Write);
    s.hold(true);
    let (first, second) = (s.post().unwrap(), s.post().unwrap());
    s.done(&first, DONE);
    s.done(&second, DONE);
    assert_eq!(s.ring.holder(place(&first)), Some(key));
    assert!(s.post().is_none() && s.ring.free() == SLOTS - 2, "a slot was lent before it was emptied");
    s.hold(false);
    let third = s.post().unwrap();
    s.hold(true);
    s.done(&third, DONE);
    assert!(s.world.outcome(0, key).is_none(), "a write is done before its last chunk has landed");
    s.hold(false);
    assert_eq!(s.world.outcome(0, key), Some(Ok(())));
    s.world.assert_no_leak();
}

#[test]
fn a_slot_is_lent_for_a_read_only_when_the_owner_has_filled_it() {
    let mut s = scene(Op::Read, 4);
    s.world.peers[1].hold = true;
    let key = s.begin(Op::Read);
    assert!(s.post().is_none(), "a slot was lent before it was filled");
    s.hold(false);
    while let Some(request) = s.post() {
        s.done(&request, DONE);
    }
    assert_eq!(s.world.outcome(0, key), Some(Ok(())));
}

#[test]
fn slots_of_a_transfer_that_was_stopped_are_held_until_nothing_is_in_flight() {
    for op in [Op::Read, Op::Write] {
        let mut s = scene(op, 4);
        let key = s.begin(op);
        let posted = s.post().unwrap();
        let grant = s.grant;
        s.world.end_grant(1, grant, GrantState::Revoked);
        s.world.settle();
        assert_eq!(s.ring.holder(place(&posted)), Some(key), "a NIC may reach it still");
        s.done(&posted, WorkOutcome::Void);
        assert_eq!((s.ring.free(), s.world.code(0, key)), (SLOTS, Some(Code::GrantRevoked)));
        // The same where the session is over, and only a cut path says so.
        let mut s = scene(op, 4);
        let key = s.begin(op);
        let posted = s.post().unwrap();
        s.world.cut(1, s.session);
        s.world.settle();
        assert_eq!(s.ring.holder(place(&posted)), Some(key), "a NIC may reach it still");
        s.world.peers[1].node.session(s.session).fenced();
        s.world.pump(1);
        assert_eq!(s.ring.free(), SLOTS);
    }
}

#[test]
fn a_success_that_crosses_a_revoke_ends_its_transfer_and_not_the_session() {
    let mut s = scene(Op::Read, 4);
    let key = s.begin(Op::Read);
    for _ in 0..2 {
        let request = s.post().unwrap();
        s.done(&request, DONE);
    }
    let last = s.post().unwrap();
    // The owner has said so, and it has not come when the reader is through.
    let grant = s.grant;
    s.world.end_grant(1, grant, GrantState::Revoked);
    assert_eq!(s.ring.holder(place(&last)), Some(key), "a NIC may reach it still");
    s.done(&last, DONE);
    assert_eq!(s.world.outcome(0, key), Some(Ok(())));
    assert_eq!(s.world.peers[1].ended.get(&grant), Some(&GrantState::Revoked));
    assert_eq!(s.ring.free(), SLOTS);
    for peer in &s.world.peers {
        assert!(peer.downs.is_empty(), "{:?}", peer.downs);
    }
    s.world.assert_quiet();
    s.world.assert_no_leak();
}

#[test]
fn a_slot_that_an_owners_copy_has_is_held_after_the_peer_has_answered() {
    let mut s = scene(Op::Read, 4);
    s.world.peers[1].hold = true;
    let key = s.begin(Op::Read);
    s.world.cancel(0, key);
    s.world.settle();
    assert_eq!(s.world.code(0, key), Some(Code::Cancelled));
    assert_eq!(s.ring.free(), SLOTS - 2, "a copy is in flight");
    s.hold(false);
    assert_eq!(s.ring.free(), SLOTS);
}

#[test]
fn a_peer_of_the_version_before_is_refused_with_the_reason() {
    for op in [Op::Read, Op::Write] {
        let mut s = scene(op, 3);
        let key = s.begin(op);
        let error = s.world.outcome(0, key).unwrap().unwrap_err();
        assert_eq!((error.code, &*error.text), (Code::TransportUnavailable, WHY));
        assert_eq!(s.ring.free(), SLOTS);
    }
}

#[test]
fn chunks_that_no_slot_has_room_for_are_refused() {
    let mut s = scene(Op::Read, 4);
    let here = Mem::for_layout(s.all.layout(), 1);
    let mut open = s.world.open(0, s.grant, Op::Read, Path::OneSided, Some((&here, &s.all)));
    open.chunk = 2 * CHUNK;
    assert_eq!(s.world.transfer(0, s.session, open).unwrap_err().code, Code::TransportUnavailable);
}

#[test]
fn what_no_peer_says_of_slots_ends_the_session() {
    let told = |op, to, frame: &dyn Fn(u64) -> Frame| {
        let mut s = scene(op, 4);
        let (_, transfer) = s.begin(op);
        (to == 0).then(|| s.post().unwrap());
        s.inject(to, &frame(transfer))
    };
    let wrong = Some(Code::ProtocolError);
    for op in [Op::Read, Op::Write] {
        // To the owner: of a chunk that is not lent, and a success that cannot be.
        assert_eq!(told(op, 1, &|transfer| Frame::Used { transfer, at: 2 * CHUNK }), wrong);
        assert_eq!(told(op, 1, &|transfer| Frame::Used { transfer, at: 1 }), wrong);
        assert_eq!(told(op, 1, &|transfer| Frame::End { transfer, outcome: Ok(()) }), wrong);
        assert_eq!(told(op, 1, &|transfer| Frame::Landed { transfer, at: 0 }), wrong);
        // To the initiator: of a chunk that was lent before, or is none, or has not been moved.
        for at in [0, 1, 3 * CHUNK, u64::MAX] {
            assert_eq!(told(op, 0, &|transfer| Frame::Lent { transfer, at, place: 0 }), wrong, "{at}");
            assert_eq!(told(op, 0, &|transfer| Frame::Landed { transfer, at }), wrong, "{at}");
        }
        assert_eq!(told(op, 0, &|transfer| Frame::Used { transfer, at: 0 }), wrong);
        // Of a transfer that has ended nobody minds it.
        assert_eq!(told(op, 0, &|transfer| Frame::Lent { transfer: transfer + 2, at: 0, place: 0 }), None);
    }
    // What was written the owner knows, also when it has stopped.
    let mut s = scene(Op::Write, 4);
    let (grant, (_, transfer)) = (s.grant, s.begin(Op::Write));
    s.world.end_grant(1, grant, GrantState::Revoked);
    assert_eq!(s.inject(1, &Frame::End { transfer, outcome: Ok(()) }), wrong);
}
