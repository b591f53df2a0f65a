//! Ended means yours: whatever ends a transfer or a grant, memory is only reported free when no work request is open on
//! it.

use crate::memory::{Mem, view};
use crate::world::{Action, World, layout, ms};
use kvik_core::{Code, Error, GrantId, GrantState, Right, Use, View};
use kvik_proto::{Claim, Closed, FlowKey, Offer, Op, Path};

/// A transfer of 16 chunks that has come halfway, with the executors of both engines stopped inside their work
/// requests.
struct Halfway {
    world: World,
    session: u64,
    grant: GrantId,
    key: FlowKey,
}

const PATHS: [(Op, Path); 4] = [
    (Op::Read, Path::Channels),
    (Op::Read, Path::Memory),
    (Op::Write, Path::Channels),
    (Op::Write, Path::Memory),
];

fn begun(op: Op, path: Path, pages: u32) -> Halfway {
    let (mut world, session) = World::pair(u64::from(pages));
    let layout = layout(pages, 8192);
    let (here, there) = (Mem::for_layout(&layout, 1), Mem::for_layout(&layout, 2));
    let all: View = view(&layout, &(0..pages).collect::<Vec<u32>>());
    let right = if op == Op::Write { Right::Write } else { Right::Read };
    let grant = world.grant(1, &there, &all, right, Use::Once(1));
    let open = world.open(0, grant, op, path, Some((&here, &all)));
    let key = world.begin(0, session, open);
    Halfway { world, session, grant, key }
}

fn halfway(op: Op, path: Path) -> Halfway {
    let mut h = begun(op, path, 16);
    for _ in 0..12 {
        if let Some(action) = h.world.actions().pop() {
            h.world.act(action, 1000);
        }
    }
    for peer in &mut h.world.peers {
        peer.hold = true;
    }
    h.world.settle();
    h
}

impl Halfway {
    fn ended(&self) -> bool {
        self.world.outcome(0, self.key).is_some()
    }

    /// One step of the sender; nothing is placed.
    fn send_on(&mut self) {
        let mut actions = self.world.actions();
        actions.retain(|action| !matches!(action, Action::Chunk(..)));
        self.world.act(actions.pop().unwrap(), 1 << 20);
    }

    /// Lets the executors go on: all must end, and nothing be left.
    fn release(&mut self) {
        for peer in &mut self.world.peers {
            peer.hold = false;
        }
        self.world.settle();
        assert!(self.ended());
        self.world.assert_quiet();
    }
}

#[test]
fn a_revoked_grant_ends_when_its_work_has() {
    for (op, path) in PATHS {
        for state in [GrantState::Revoked, GrantState::Closed, GrantState::Expired] {
            let mut h = halfway(op, path);
            match state {
                GrantState::Expired => {
                    // Held so long only in the owner: everything else would have ended it before.
                    h.world.now += ms(120_000);
                    h.world.peers[1].node.session(h.session).touch(h.world.now);
                    let _ = h.world.peers[1].node.next_copy(h.world.now);
                    h.world.pump(1);
                }
                _ => h.world.end_grant(1, h.grant, state),
            }
            h.world.settle();
            // A read from the owner's memory is cut off by its generation; all else holds pins.
            let pinned = (op, path) != (Op::Read, Path::Memory);
            assert_eq!(h.world.peers[1].ended.contains_key(&h.grant), !pinned, "{op:?} {path:?} {state:?}");
            assert!(!h.ended() || (op, path) == (Op::Write, Path::Memory), "{op:?} {path:?}");
            h.release();
            assert_eq!(h.world.peers[1].ended[&h.grant], state);
            assert!(h.world.peers[1].fences[1] > 7, "the grant's fence was not raised");
            let expected = match state {
                GrantState::Revoked => Code::GrantRevoked,
                GrantState::Closed => Code::RegionClosed,
                _ => Code::GrantExpired,
            };
            let code = h.world.code(0, h.key).unwrap();
            assert!(
                code == expected || (path == Path::Memory && code == Code::StaleGeneration),
                "{op:?} {path:?} {state:?} gave {code}"
            );
            h.world.assert_no_leak();
        }
    }
}

#[test]
fn a_cancelled_transfer_ends_when_its_work_has() {
    for (op, path) in PATHS {
        let mut h = halfway(op, path);
        h.world.cancel(0, h.key);
        h.world.settle();
        // Only where the owner copies from here has this side no work request of its own: its fence ends it at once.
        assert_eq!(h.ended(), (op, path) == (Op::Write, Path::Memory), "{op:?} {path:?}");
        h.release();
        assert_eq!(h.world.code(0, h.key), Some(Code::Cancelled));
        assert_eq!(h.world.peers[0].node.reclaims().transfers, [1, 0, 0], "no peer was asked");
        assert_eq!(h.world.peers[1].node.grant_state(h.grant), Some(GrantState::Live));
        h.world.assert_no_leak();
    }
}

#[test]
fn a_deadline_ends_a_transfer_that_hangs_in_the_owner() {
    for (op, path) in PATHS {
        let mut h = halfway(op, path);
        h.world.peers[0].hold = false;
        h.world.advance(ms(30_001));
        let code = h.world.code(0, h.key);
        // A read from the owner's memory needs nothing of it any more.
        let expected = ((op, path) != (Op::Read, Path::Memory)).then_some(Code::DeadlineExceeded);
        assert_eq!(code, expected, "{op:?} {path:?}");
        h.release();
        h.world.assert_no_leak();
    }
}

#[test]
fn a_deadline_waits_for_the_work_of_this_side() {
    for (op, path) in PATHS {
        let mut h = halfway(op, path);
        h.world.advance(ms(31_500));
        assert_eq!(h.ended(), (op, path) == (Op::Write, Path::Memory), "{op:?} {path:?}");
        h.release();
        assert_eq!(h.world.code(0, h.key), Some(Code::DeadlineExceeded));
        h.world.assert_no_leak();
    }
}

#[test]
fn a_closed_session_ends_its_transfers_when_their_work_has() {
    for (op, path) in PATHS {
        for by in [0, 1] {
            let mut h = halfway(op, path);
            h.world.cut(by, h.session);
            h.world.settle();
            assert_eq!(h.ended(), (op, path) == (Op::Write, Path::Memory), "{op:?} {path:?}");
            h.release();
            assert_eq!(h.world.code(0, h.key), Some(Code::PeerLost), "{op:?} {path:?}");
            assert_eq!(h.world.peers[0].node.reclaims().transfers, [0, 0, 1], "{op:?} {path:?}");
            assert_eq!(h.world.peers[1].node.grant_state(h.grant), Some(GrantState::Live));
            assert_eq!(h.world.peers[0].downs.len() + h.world.peers[1].downs.len(), 2);
            h.world.assert_no_leak();
        }
    }
}

/// The executor that sent the last chunk may report it after the peer has already said that all is in place.
#[test]
fn success_may_overtake_the_report_of_the_last_work_request() {
    for op in [Op::Read, Op::Write] {
        let mut h = begun(op, Path::Channels, 3);
        let sender = if op == Op::Read { 1 } else { 0 };
        while h.world.links[0].chunks.iter().all(|chunks| chunks.len() < 2) {
            h.send_on();
        }
        let request = h.world.peers[sender]
            .node
            .session(h.session)
            .next_of(Path::Channels, Claim::Next, h.world.now)
            .unwrap();
        let kvik_proto::WorkKind::Send(header) = &request.kind else { panic!("no send") };
        let payload = request.region.read(&request.view, request.part.clone());
        let sums = payload.chunks(request.unit as usize).map(kvik_core::page_sum).collect();
        let link = &mut h.world.links[0];
        let side = usize::from(link.ends[1] == sender);
        let status = kvik_proto::STATUS_WHOLE;
        link.chunks[side].push_back(crate::world::Chunk { header: *header, payload, sums, status });
        h.world.settle();
        // The other side has ended well by now; here the work request is still open on the memory.
        assert_eq!(h.world.peers[0].downs.len() + h.world.peers[1].downs.len(), 0, "{op:?}");
        match op {
            Op::Read => {
                assert_eq!(h.world.outcome(0, h.key), Some(Ok(())));
                assert!(
                    !h.world.peers[1].ended.contains_key(&h.grant),
                    "the grant ended under an open work request"
                );
            }
            _ => {
                assert!(!h.ended(), "the transfer ended under an open work request");
                assert!(h.world.peers[1].ended.contains_key(&h.grant));
            }
        }
        // A cancel or a cut that comes in between changes nothing about it.
        h.world.cut(sender, h.session);
        let done = kvik_proto::WorkOutcome::Done { extents: 1, verify: ms(0) };
        h.world.peers[sender].node.work_done(request.id, done);
        h.world.pump(sender);
        assert_eq!(h.world.outcome(0, h.key), Some(Ok(())), "{op:?}");
        assert_eq!(h.world.peers[1].ended[&h.grant], GrantState::Consumed);
        h.release();
        h.world.assert_no_leak();
    }
}

#[test]
fn a_failed_work_request_ends_the_transfer_on_both_sides() {
    for op in [Op::Read, Op::Write] {
        let mut h = begun(op, Path::Channels, 16);
        while h.world.links[0].chunks.iter().all(|chunks| chunks.is_empty()) {
            h.send_on();
        }
        let side = usize::from(h.world.links[0].chunks[0].is_empty());
        h.world.links[0].chunks[side][0].payload[17] ^= 1;
        h.world.settle();
        assert_eq!(h.world.code(0, h.key), Some(Code::ChecksumMismatch));
        h.release();
        assert_eq!(h.world.peers[1].node.grant_state(h.grant), Some(GrantState::Live));
        h.world.assert_no_leak();
    }
}

#[test]
fn what_comes_after_the_end_is_thrown_away() {
    let mut h = begun(Op::Read, Path::Channels, 16);
    while h.world.links[0].chunks[1].len() < 3 {
        h.send_on();
    }
    let headers: Vec<_> = h.world.links[0].chunks[1].drain(..).map(|chunk| chunk.header).collect();
    let now = h.world.now;
    let node = &mut h.world.peers[0].node;
    let request = node.session(h.session).place(&headers[0], now).unwrap().unwrap();
    let code = |result: kvik_core::Result<Option<kvik_proto::WorkRequest<Mem>>>| result.unwrap_err().code;
    assert_eq!(
        code(node.session(h.session).place(&headers[0], now)),
        Code::ProtocolError,
        "a chunk came twice"
    );
    let odd = kvik_proto::ChunkHeader { len: 77, ..headers[1] };
    assert_eq!(code(node.session(h.session).place(&odd, now)), Code::ProtocolError);
    let odd = kvik_proto::ChunkHeader { sums: 9, ..headers[1] };
    assert_eq!(code(node.session(h.session).place(&odd, now)), Code::ProtocolError);
    for position in [1, 8192 * 16, u64::MAX / 8192 * 8192] {
        let odd = kvik_proto::ChunkHeader { position, ..headers[1] };
        assert_eq!(code(node.session(h.session).place(&odd, now)), Code::ProtocolError);
    }
    let odd = kvik_proto::ChunkHeader { session: h.session ^ 1, ..headers[1] };
    assert_eq!(code(node.session(h.session).place(&odd, now)), Code::ProtocolError);
    h.world.cancel(0, h.key);
    // Stopped, but a work request is open: the rest is already unwanted.
    let node = &mut h.world.peers[0].node;
    assert!(node.session(h.session).place(&headers[1], now).unwrap().is_none());
    assert!(request.stop.load(std::sync::atomic::Ordering::Acquire));
    node.work_done(request.id, kvik_proto::WorkOutcome::Void);
    h.world.pump(0);
    assert_eq!(h.world.code(0, h.key), Some(Code::Cancelled));
    let node = &mut h.world.peers[0].node;
    assert!(node.session(h.session).place(&headers[2], now).unwrap().is_none());
    h.release();
    h.world.assert_no_leak();
}

/// The work requests that a side has in flight, in the words of whoever cannot leave one.
fn stick(h: &mut Halfway, peer: usize) {
    let ids: Vec<_> = h
        .world
        .running
        .iter()
        .filter(|running| running.peer == peer)
        .map(|running| running.request.id)
        .collect();
    assert!(!ids.is_empty(), "nothing is in flight");
    for id in ids {
        let error = Error::new(Code::PagesQuarantined, "a device has its pages in use");
        h.world.peers[peer].node.work_stuck(id, error);
    }
    h.world.pump(peer);
}

#[test]
fn who_began_hears_of_the_end_of_a_transfer_whose_work_cannot_be_left() {
    let mut h = halfway(Op::Read, Path::Channels);
    stick(&mut h, 0);
    assert!(!h.ended(), "nobody has asked for the end yet");
    h.world.cancel(0, h.key);
    assert!(!h.ended());
    stick(&mut h, 0);
    let told = h.world.outcome(0, h.key).unwrap().unwrap_err();
    assert_eq!(told.code, Code::PagesQuarantined);
    assert!(told.text.contains("cancelled") && told.text.contains("in use"), "{told}");
    // The flow is there until the work request is done, and nobody is told twice.
    assert_eq!(h.world.peers[0].node.open_flows(), 1);
    h.release();
    assert_eq!(h.world.code(0, h.key), Some(Code::PagesQuarantined));
}

#[test]
fn a_grant_waits_for_work_of_its_owner_that_cannot_be_left() {
    let mut h = halfway(Op::Write, Path::Channels);
    h.world.end_grant(1, h.grant, GrantState::Revoked);
    stick(&mut h, 1);
    assert!(!h.world.peers[1].ended.contains_key(&h.grant), "its pages were called free");
    h.release();
    assert_eq!(h.world.peers[1].ended[&h.grant], GrantState::Revoked);
}

#[test]
fn a_path_that_does_not_lead_to_the_memory_is_refused_with_the_reason_and_channels_serve() {
    for op in [Op::Read, Op::Write] {
        let (mut world, session) = World::pair(5);
        let layout = layout(4, 8192);
        let (here, there) = (Mem::for_layout(&layout, 1), Mem::for_layout(&layout, 2));
        let all: View = view(&layout, &[0, 1, 2, 3]);
        let right = if op == Op::Write { Right::Write } else { Right::Read };
        let id = world.grant_id();
        let closed = Closed { memory: Some("it lies elsewhere".into()), nics: None };
        let offer = Offer { closed, ..world.offer(1, &there, &all, right, Use::Once(1)) };
        world.issue(1, id, offer);
        let open = world.open(0, id, op, Path::Memory, Some((&here, &all)));
        let refused = world.transfer(0, session, open).unwrap_err();
        assert_eq!((refused.code, &*refused.text), (Code::TransportUnavailable, "it lies elsewhere"));
        let here = Mem::for_layout(&layout, 3);
        let open = world.open(0, id, op, Path::Channels, Some((&here, &all)));
        world.transfer(0, session, open).unwrap();
        world.assert_quiet();
    }
}
