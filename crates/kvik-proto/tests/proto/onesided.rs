//! Links on which a NIC moves the bytes: pages are the owner's again when nothing can land in them any more, and not
//! because nothing here holds them.

use crate::memory::{Mem, view};
use crate::world::{World, layout, ms};
use kvik_core::{Code, Error, GrantId, GrantState, Right, Use};
use kvik_proto::{
    Batch, Check, Claim, FlowKey, Frame, NicAnswer, NicCallKind, Op, Open, Path, Reclaim, ReclaimCounts,
    WorkId, WorkKind, WorkOutcome, WorkRequest,
};
use std::time::Duration;

/// A transfer of three chunks; the first is posted, and the NIC has said nothing of it yet.
struct Posted {
    world: World,
    session: u64,
    grant: GrantId,
    key: FlowKey,
    request: WorkRequest<Mem>,
}

const DONE: WorkOutcome = WorkOutcome::Done { extents: 1, verify: Duration::ZERO };

fn posted(op: Op) -> Posted {
    checked(op, Check::No)
}

fn checked(op: Op, check: Check) -> Posted {
    let (mut world, session) = World::one_sided_pair(3);
    let layout = layout(3, 8192);
    let (here, there) = (Mem::for_layout(&layout, 1), Mem::for_layout(&layout, 2));
    let all = view(&layout, &[0, 1, 2]);
    let right = if op == Op::Write { Right::Write } else { Right::Read };
    let grant = world.grant(1, &there, &all, right, Use::Once(1));
    let open = Open { check, ..world.open(0, grant, op, Path::OneSided, Some((&here, &all))) };
    let key = world.begin(0, session, open);
    world.settle();
    let request =
        world.peers[0].node.session(session).next_of(Path::OneSided, Claim::Next, world.now).unwrap();
    Posted { world, session, grant, key, request }
}

impl Posted {
    fn is_free(&self) -> bool {
        self.world.peers[1].ended.contains_key(&self.grant)
    }

    fn done(&mut self, outcome: WorkOutcome) {
        self.world.peers[0].node.work_done(self.request.id, outcome);
        self.world.pump(0);
        self.world.settle();
    }

    fn next(&mut self) -> WorkRequest<Mem> {
        let now = self.world.now;
        self.world.peers[0].node.session(self.session).next_of(Path::OneSided, Claim::Next, now).unwrap()
    }

    /// Nothing of the first chunk is on the wire any more; a device of the initiator's still has something of it.
    fn landed(&mut self) {
        self.world.peers[0].node.work_landed(&mut self.request.id);
        self.world.pump(0);
        self.world.settle();
    }

    /// A device does not come to its end.
    fn stuck(&mut self, id: WorkId) {
        let error = Error::new(Code::PagesQuarantined, "a device has its pages in use");
        self.world.peers[0].node.work_stuck(id, error);
        self.world.pump(0);
        self.world.settle();
    }

    /// One end of each kind has been counted, under this step: the initiator's transfer, and the owner's grant.
    fn assert_reclaims(&self, transfer: Reclaim, grant: Reclaim) {
        let [initiator, owner] = [0, 1].map(|peer: usize| self.world.peers[peer].node.reclaims());
        let one = |reclaim: Reclaim| Reclaim::ALL.map(|other| u64::from(other == reclaim));
        assert_eq!((initiator.transfers, initiator.grants), (one(transfer), [0; 3]));
        assert_eq!((owner.transfers, owner.grants), ([0; 3], one(grant)));
    }

    fn fenced(&mut self, peer: usize) {
        self.world.peers[peer].node.session(self.session).fenced();
        self.world.pump(peer);
        self.world.settle();
    }
}

#[test]
fn what_was_delivered_is_a_success_on_both_sides() {
    for op in [Op::Read, Op::Write] {
        let mut p = posted(op);
        for _ in 0..2 {
            let request = p.world.peers[0]
                .node
                .session(p.session)
                .next_of(Path::OneSided, Claim::Next, p.world.now)
                .unwrap();
            assert!(matches!(&request.kind, WorkKind::Post(posted, ..) if *posted == op));
            p.world.peers[0].node.work_done(request.id, DONE);
        }
        assert!(
            p.world.peers[0]
                .node
                .session(p.session)
                .next_of(Path::OneSided, Claim::Next, p.world.now)
                .is_none()
        );
        assert!(p.world.outcome(0, p.key).is_none(), "a chunk is in flight");
        p.done(DONE);
        assert_eq!(p.world.outcome(0, p.key), Some(Ok(())));
        assert_eq!(p.world.peers[1].ended[&p.grant], GrantState::Consumed);
        assert!(
            p.world.peers.iter().all(|peer| peer.node.reclaims() == ReclaimCounts::default()),
            "nothing was in use"
        );
        p.world.assert_quiet();
        p.world.assert_no_leak();
    }
}

/// A NIC tells of several work requests at once.
#[test]
fn what_ends_together_ends_as_one_after_the_other() {
    for op in [Op::Read, Op::Write] {
        let mut p = posted(op);
        let (now, mut given) = (p.world.now, Vec::new());
        let (node, most) = (&mut p.world.peers[0].node, Batch { requests: 9, bytes: u64::MAX });
        node.session(p.session).next_batch(Path::OneSided, Claim::Next, most, now, &mut given);
        assert_eq!(given.len(), 2);
        let mut ended: Vec<_> = given.iter().map(|request| (request.id, DONE)).collect();
        node.batch_done(&mut ended);
        assert!(p.world.outcome(0, p.key).is_none(), "a chunk is in flight");
        p.done(DONE);
        assert_eq!(p.world.outcome(0, p.key), Some(Ok(())));
        assert_eq!(p.world.peers[1].ended[&p.grant], GrantState::Consumed);
        p.world.assert_quiet();
        p.world.assert_no_leak();

        // One that failed cuts the session, whatever is told with it.
        let mut p = posted(op);
        let (now, mut given) = (p.world.now, Vec::new());
        p.world.peers[0].node.session(p.session).next_batch(
            Path::OneSided,
            Claim::Next,
            most,
            now,
            &mut given,
        );
        let failed = WorkOutcome::Failed(Error::new(Code::PeerLost, "the NIC gave up"));
        let mut ended = vec![(p.request.id, failed), (given[0].id, DONE), (given[1].id, DONE)];
        p.world.peers[0].node.batch_done(&mut ended);
        p.world.pump(0);
        p.world.settle();
        assert!(ended.is_empty() && p.world.code(0, p.key) == Some(Code::PeerLost));
        for peer in 0..2 {
            p.fenced(peer);
        }
        for peer in &p.world.peers {
            assert_eq!((peer.node.open_flows(), peer.node.quarantined()), (0, 0));
        }
    }
}

/// Another NIC takes what one could not bring to its end.
#[test]
fn what_was_given_back_is_given_out_again_and_counts_once() {
    for op in [Op::Read, Op::Write] {
        let mut p = posted(op);
        p.done(WorkOutcome::Back);
        let mut seen = Vec::new();
        while let Some(request) =
            p.world.peers[0].node.session(p.session).next_of(Path::OneSided, Claim::Next, p.world.now)
        {
            seen.push(request.part.clone());
            assert!(seen.len() < 4, "a chunk was given out twice: {seen:?}");
            p.world.peers[0].node.work_done(request.id, DONE);
        }
        assert!(seen.contains(&p.request.part) && seen.len() == 3, "{seen:?}");
        p.world.pump(0);
        p.world.settle();
        assert_eq!(p.world.outcome(0, p.key), Some(Ok(())));
        p.world.assert_quiet();
        p.world.assert_no_leak();
    }
}

/// The first step of reclaiming: the initiator answers, and not before its NIC has.
#[test]
fn a_revoked_grant_waits_for_the_initiator_to_answer() {
    for op in [Op::Read, Op::Write] {
        let mut p = posted(op);
        p.world.end_grant(1, p.grant, GrantState::Revoked);
        p.world.settle();
        assert!(!p.is_free(), "its pages were called free under a NIC");
        assert_eq!(p.world.peers[1].node.quarantined(), 3);
        assert!(
            p.world.peers[0]
                .node
                .session(p.session)
                .next_of(Path::OneSided, Claim::Next, p.world.now)
                .is_none()
        );
        p.done(DONE);
        assert!(p.is_free());
        assert_eq!(p.world.code(0, p.key), Some(Code::GrantRevoked));
        assert_eq!(p.world.peers[1].node.quarantined(), 0);
        p.assert_reclaims(Reclaim::Released, Reclaim::Acknowledged);
        p.world.assert_quiet();
        p.world.assert_no_leak();
    }
}

/// A device of the initiator's has pages of the initiator's: the owner gets its own back meanwhile, and nobody cuts
/// anything.
#[test]
fn a_device_of_the_initiator_holds_up_no_end_of_the_grant() {
    for op in [Op::Read, Op::Write] {
        let mut p = posted(op);
        p.world.end_grant(1, p.grant, GrantState::Revoked);
        p.world.settle();
        assert!(!p.is_free(), "its pages were called free under a NIC");
        p.landed();
        assert!(p.is_free(), "its pages wait for a device of the initiator's");
        assert!(p.world.outcome(0, p.key).is_none(), "the device has the initiator's pages");
        p.stuck(p.request.id);
        assert_eq!(p.world.code(0, p.key), Some(Code::PagesQuarantined));
        p.world.advance(ms(60_000));
        assert!(p.world.peers.iter().all(|peer| peer.downs.is_empty() && peer.asked_to_fence.is_empty()));
        p.done(WorkOutcome::Void);
        p.assert_reclaims(Reclaim::Released, Reclaim::Acknowledged);
        p.world.assert_quiet();
        p.world.assert_no_leak();
    }
}

/// The same of a part that a device of the initiator's sums: no NIC has anything of it.
#[test]
fn a_sum_of_the_initiator_holds_up_no_end_of_the_grant() {
    for op in [Op::Read, Op::Write] {
        let mut p = checked(op, Check::All);
        for request in [p.next(), p.next()] {
            p.world.peers[0].node.work_done(request.id, DONE);
        }
        p.world.peers[0].hold = true;
        p.done(DONE);
        let sums = p.world.running.iter().filter(|running| running.peer == 0);
        assert!(sums.count() > 0 && !p.is_free(), "the initiator sums nothing");
        p.world.end_grant(1, p.grant, GrantState::Revoked);
        p.world.settle();
        assert!(p.is_free(), "its pages wait for a device of the initiator's");
        p.world.advance(ms(10_000));
        assert!(p.world.outcome(0, p.key).is_none() && p.world.peers[1].downs.is_empty());
        p.world.peers[0].hold = false;
        p.world.settle();
        assert_eq!(p.world.code(0, p.key), Some(Code::GrantRevoked));
        p.world.assert_quiet();
        p.world.assert_no_leak();
    }
}

/// One part is stuck in a device, another one is still on the wire: what is told vouches for both.
#[test]
fn a_stuck_device_vouches_for_no_nic() {
    for (op, revoked) in [(Op::Read, false), (Op::Write, false), (Op::Read, true), (Op::Write, true)] {
        let mut p = posted(op);
        let other = p.next();
        match revoked {
            true => p.world.end_grant(1, p.grant, GrantState::Revoked),
            false => p.world.cancel(0, p.key),
        }
        p.world.settle();
        p.landed();
        p.stuck(p.request.id);
        assert_eq!(p.world.code(0, p.key), Some(Code::PagesQuarantined));
        p.world.end_grant(1, p.grant, GrantState::Revoked);
        p.world.settle();
        assert!(!p.is_free(), "its pages were called free under a NIC");
        // It comes off the wire, and the device has still something of the first part.
        p.world.peers[0].node.work_done(other.id, WorkOutcome::Void);
        p.world.pump(0);
        p.world.settle();
        assert!(p.is_free(), "its pages wait for a device of the initiator's");
        p.done(WorkOutcome::Void);
        p.world.assert_quiet();
        p.world.assert_no_leak();
    }
}

/// The second: no answer, so the owner cuts. The third: until that is done, the pages are in quarantine.
#[test]
fn a_silent_initiator_is_cut_off_and_its_pages_wait_for_the_cut() {
    let mut p = posted(Op::Write);
    p.world.end_grant(1, p.grant, GrantState::Revoked);
    p.world.advance(ms(2500));
    assert_eq!(p.world.peers[1].asked_to_fence, [p.session]);
    p.world.advance(ms(600_000));
    assert!(!p.is_free(), "time alone makes no page free");
    assert_eq!(p.world.peers[1].node.quarantined(), 3);
    p.fenced(1);
    assert!(p.is_free());
    assert!(p.world.outcome(0, p.key).is_none(), "its own NIC has not answered yet");
    p.done(WorkOutcome::Void);
    p.fenced(0);
    assert_eq!(p.world.code(0, p.key), Some(Code::GrantRevoked));
    p.assert_reclaims(Reclaim::Disconnected, Reclaim::Disconnected);
    p.world.assert_no_leak();
}

#[test]
fn a_dead_session_frees_nothing_that_a_nic_may_reach() {
    let mut p = posted(Op::Write);
    p.world.cut(1, p.session);
    p.world.end_grant(1, p.grant, GrantState::Closed);
    p.world.settle();
    assert!(!p.is_free());
    assert_eq!(p.world.peers[1].asked_to_fence, [p.session]);
    // Another session with the same peer changes nothing about it, nor does a report of a live one.
    let other = p.world.connect(0, 1);
    p.world.peers[1].node.session(other).fenced();
    p.world.pump(1);
    assert!(!p.is_free());
    p.fenced(1);
    assert!(p.is_free());
    p.done(WorkOutcome::Void);
    p.world.assert_no_leak();
}

/// What is on the wire lands even after the initiator has cut its own side: it can vouch for nothing.
#[test]
fn an_operation_without_completion_ends_the_session() {
    for failed in [false, true] {
        let mut p = posted(Op::Write);
        match failed {
            true => p.done(WorkOutcome::Failed(Error::new(Code::PeerLost, "the NIC gave up"))),
            false => {
                // First its own NIC is asked to stop, which costs nobody else anything.
                p.world.advance(ms(30_001));
                assert!(p.request.stop.load(std::sync::atomic::Ordering::Acquire));
                assert!(p.world.peers[0].asked_to_fence.is_empty() && p.world.peers[0].downs.is_empty());
                p.world.advance(ms(2_001));
            }
        }
        if !failed {
            assert_eq!(p.world.peers[0].asked_to_fence, [p.session], "its own NIC has to be stopped");
            assert!(p.world.outcome(0, p.key).is_none(), "its memory was called free under a NIC");
            p.done(WorkOutcome::Void);
        }
        let code = if failed { Code::PeerLost } else { Code::DeadlineExceeded };
        assert_eq!(p.world.code(0, p.key), Some(code));
        assert_eq!(p.world.peers[1].asked_to_fence, [p.session], "the owner has to cut its side too");
        p.world.end_grant(1, p.grant, GrantState::Revoked);
        assert!(!p.is_free());
        p.fenced(1);
        assert!(p.is_free());
        p.world.assert_no_leak();
    }
}

/// A NIC that can stop what it was given, and vouch for it, costs other transfers nothing.
#[test]
fn an_operation_that_was_stopped_in_time_leaves_the_session() {
    for op in [Op::Read, Op::Write] {
        let mut p = posted(op);
        p.world.advance(ms(30_001));
        assert!(p.world.outcome(0, p.key).is_none(), "its memory was called free under a NIC");
        p.done(WorkOutcome::Void);
        assert_eq!(p.world.code(0, p.key), Some(Code::DeadlineExceeded));
        assert!(p.world.peers.iter().all(|peer| peer.downs.is_empty() && peer.asked_to_fence.is_empty()));
        p.world.end_grant(1, p.grant, GrantState::Revoked);
        assert!(p.is_free());
        p.world.assert_quiet();
        p.world.assert_no_leak();
    }
}

/// A user cancels while nothing goes on: the node has last heard of the time at the last heartbeat.
#[test]
fn a_cancelled_transfer_has_all_of_its_patience() {
    let mut p = posted(Op::Write);
    p.world.now += ms(450);
    p.world.peers[0].node.note_time(p.world.now);
    p.world.cancel(0, p.key);
    p.world.advance(ms(499));
    assert!(p.world.peers[0].downs.is_empty() && p.world.peers[0].asked_to_fence.is_empty());
    p.world.advance(ms(2));
    assert_eq!(p.world.peers[0].asked_to_fence, [p.session]);
    p.done(WorkOutcome::Void);
    assert_eq!(p.world.code(0, p.key), Some(Code::Cancelled));
}

#[test]
fn who_has_no_such_link_says_so() {
    for (here, there) in [(false, true), (true, false)] {
        let mut world = World::new(2, 3);
        let session = world.connect_with(0, 1, [here, there]);
        let layout = layout(3, 8192);
        let (mine, theirs) = (Mem::for_layout(&layout, 1), Mem::for_layout(&layout, 2));
        let all = view(&layout, &[0, 1, 2]);
        let grant = world.grant(1, &theirs, &all, Right::Read, Use::Many);
        let open = world.open(0, grant, Op::Read, Path::OneSided, Some((&mine, &all)));
        let code = match world.try_begin(0, session, open) {
            Err(error) => error.code,
            Ok(key) => {
                world.settle();
                world.code(0, key).unwrap()
            }
        };
        assert_eq!(code, Code::TransportUnavailable);
        world.assert_quiet();
    }
}

#[test]
fn an_answer_that_nobody_asked_for_frees_nothing() {
    let mut p = posted(Op::Write);
    let mut bytes = Vec::new();
    kvik_proto::Frame::Ended { transfer: p.key.1 }.encode(&mut bytes);
    p.world.peers[1].node.session(p.session).receive(&bytes, p.world.now);
    p.world.pump(1);
    assert_eq!(p.world.peers[1].downs[0].1.code, Code::ProtocolError);
    p.world.end_grant(1, p.grant, GrantState::Revoked);
    assert!(!p.is_free());
    p.fenced(1);
    p.done(WorkOutcome::Void);
    p.world.assert_no_leak();
}

/// A page that is given in parts, or twice, is one page.
#[test]
fn quarantine_counts_pages() {
    let (mut world, session) = World::one_sided_pair(3);
    let layout = layout(3, 8192);
    let theirs = Mem::for_layout(&layout, 2);
    let halves = |ids: &[u32]| {
        kvik_core::View::of_parts(layout.clone(), 2, ids.into(), 0..1, 0..1, kvik_core::Order::LayerFirst)
            .unwrap()
    };
    let first = world.offer(1, &theirs, &halves(&[0, 1, 2]), Right::Read, Use::Many);
    let mut second = world.offer(1, &theirs, &halves(&[3, 4]), Right::Read, Use::Many);
    second.region_id = first.region_id;
    for (offer, ids) in [(first, 3), (second, 2)] {
        let mine = Mem::for_layout(&layout, 1);
        let id = world.grant_id();
        world.issue(1, id, offer);
        let here = halves(&(0..ids).collect::<Vec<u32>>());
        let open = world.open(0, id, Op::Read, Path::OneSided, Some((&mine, &here)));
        world.begin(0, session, open);
        world.settle();
        assert!(
            world.peers[0].node.session(session).next_of(Path::OneSided, Claim::Next, world.now).is_some()
        );
        world.end_grant(1, id, GrantState::Revoked);
    }
    assert_eq!(world.peers[1].node.quarantined(), 3);
}

/// What a version does not have is not said in it: there the byte with the bit is a NIC's number.
#[test]
fn that_a_nic_has_moved_is_said_to_peers_that_know_the_word() {
    for (version, said) in [(4, false), (5, true)] {
        let mut world = World::new(2, 3);
        let (mut left, _) = world.handshake(0, 1);
        let session = left.session;
        (left.one_sided, left.version) = (true, version);
        let (now, node) = (world.now, &mut world.peers[0].node);
        node.add_session(left, now);
        node.session(session).take_output(&mut Vec::new());
        let (kind, outcome) = (NicCallKind::Connect, Ok(vec![7]));
        node.session(session).answer_reach(NicAnswer { from: 31, to: 2, kind, moved: true, outcome });
        let mut bytes = Vec::new();
        node.session(session).take_output(&mut bytes);
        let Ok(Some((Frame::Reached(answer), _))) = Frame::decode(&bytes) else { panic!("{bytes:?}") };
        assert_eq!((answer.from, answer.kind, answer.moved), (31, kind, said), "version {version}");
    }
}
