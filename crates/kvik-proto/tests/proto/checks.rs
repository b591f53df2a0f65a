//! What a NIC has moved is compared by both sides, and counts when both are alike.

use crate::memory::{Mem, view};
use crate::world::{World, layout, ms};
use kvik_core::{Code, GrantId, Right, Use, View};
use kvik_proto::{Check, Claim, FlowKey, Frame, Op, Open, Path, WorkOutcome, WorkRequest};
use std::time::Duration;

const PAGES: u32 = 40;
const PAGE: u64 = 8192;
const DONE: WorkOutcome = WorkOutcome::Done { extents: 1, verify: Duration::ZERO };

/// A transfer of as many chunks as there are pages, and nothing of it is posted yet.
struct Moving {
    world: World,
    session: u64,
    key: FlowKey,
    grant: GrantId,
    here: Mem,
    there: Mem,
    all: View,
    op: Op,
}

impl Moving {
    fn new(op: Op, check: Check) -> Moving {
        let (mut world, session) = World::one_sided_pair(5);
        let layout = layout(PAGES, PAGE);
        let (here, there) = (Mem::for_layout(&layout, 1), Mem::for_layout(&layout, 2));
        let all = view(&layout, &(0..PAGES).collect::<Vec<u32>>());
        let right = if op == Op::Write { Right::Write } else { Right::Read };
        let grant = world.grant(1, &there, &all, right, Use::Once(1));
        let open = Open { check, ..world.open(0, grant, op, Path::OneSided, Some((&here, &all))) };
        let key = world.begin(0, session, open);
        world.settle();
        Moving { world, session, key, grant, here, there, all, op }
    }

    fn post(&mut self) -> Option<WorkRequest<Mem>> {
        self.world.peers[0].node.session(self.session).next_of(Path::OneSided, Claim::Next, self.world.now)
    }

    /// What the NIC does for a work request, with one byte wrong where `damage` says so.
    fn deliver(&mut self, request: &WorkRequest<Mem>, damage: bool) {
        let (from, to) =
            if self.op == Op::Write { (&self.here, &self.there) } else { (&self.there, &self.here) };
        let mut bytes = from.peek(&self.all, request.part.clone());
        if damage {
            *bytes.last_mut().unwrap() ^= 1;
        }
        to.write(&self.all, request.part.clone(), &bytes);
        self.world.peers[0].node.work_done(request.id, DONE);
        self.world.pump(0);
    }

    /// Moves all, with damage in one page.
    fn run(mut self, damaged: Option<u64>) -> Moving {
        while let Some(request) = self.post() {
            self.deliver(&request, damaged.is_some_and(|page| request.part.contains(&(page * PAGE))));
        }
        self.world.settle();
        self
    }
}

#[test]
fn both_sides_alike_is_a_success() {
    for op in [Op::Read, Op::Write] {
        for check in [Check::No, Check::Sample, Check::All] {
            let mut m = Moving::new(op, check).run(None);
            assert_eq!(m.world.outcome(0, m.key), Some(Ok(())), "{op:?} {check:?}");
            assert!(m.world.peers[1].ended.contains_key(&m.grant));
            assert_eq!(m.here.all(), m.there.all());
            m.world.assert_quiet();
            m.world.assert_no_leak();
        }
    }
}

#[test]
fn damage_anywhere_is_found_by_name() {
    for op in [Op::Read, Op::Write] {
        for page in [0, 1, 17, u64::from(PAGES) - 1] {
            let mut m = Moving::new(op, Check::All).run(Some(page));
            let error = m.world.outcome(0, m.key).unwrap().unwrap_err();
            assert_eq!(error.code, Code::ChecksumMismatch, "{op:?}");
            assert!(error.text.contains(&format!("page {page} of the owner")), "{}", error.text);
            m.world.assert_quiet();
            // The grant was not used: the reader may try again.
            assert!(!m.world.peers[1].ended.contains_key(&m.grant));
        }
    }
}

/// In a sample it is found where the sample looks: in the first chunk, here of one unit.
#[test]
fn a_sample_looks_at_the_first_and_the_last_chunk() {
    for (page, found) in [(0, true), (16, true), (u64::from(PAGES) - 1, true), (3, false)] {
        let m = Moving::new(Op::Read, Check::Sample).run(Some(page));
        let outcome = m.world.outcome(0, m.key).unwrap().map_err(|error| error.code);
        assert_eq!(outcome, if found { Err(Code::ChecksumMismatch) } else { Ok(()) }, "page {page}");
    }
}

#[test]
fn nothing_is_a_success_before_the_owner_has_answered() {
    let mut m = Moving::new(Op::Write, Check::Sample);
    while let Some(request) = m.post() {
        m.deliver(&request, false);
    }
    assert!(m.world.outcome(0, m.key).is_none());
    // The owner's grant ends first: what it would compare may be others' by now.
    m.world.end_grant(1, m.grant, kvik_core::GrantState::Revoked);
    m.world.settle();
    assert_eq!(m.world.code(0, m.key), Some(Code::GrantRevoked));
    m.world.assert_quiet();
    m.world.assert_no_leak();
}

/// Summing is no operation of a NIC: a deadline that comes meanwhile ends the transfer and not the session.
#[test]
fn a_deadline_during_a_comparison_leaves_the_session() {
    let mut m = Moving::new(Op::Read, Check::All);
    while let Some(request) = m.post() {
        m.deliver(&request, false);
    }
    let sum = m.world.peers[0].node.next_copy(m.world.now).unwrap();
    m.world.peers[0].node.tick(m.world.now + ms(30_001));
    m.world.peers[0].node.work_done(sum.id, WorkOutcome::Void);
    m.world.pump(0);
    assert_eq!(m.world.code(0, m.key), Some(Code::DeadlineExceeded));
    assert!(m.world.peers[0].downs.is_empty() && m.world.peers[0].asked_to_fence.is_empty());
}

#[test]
fn what_does_not_fit_is_refused() {
    let check = |at, sums| move |transfer| Frame::Check { transfer, at, sums: vec![0; sums] };
    type Make = Box<dyn Fn(u64) -> Frame>;
    let wrong: Vec<(usize, Make)> = vec![
        (1, Box::new(check(1, 1))),
        (1, Box::new(check(0, 0))),
        (1, Box::new(check(0, 2))),
        (1, Box::new(check(u64::from(PAGES) * PAGE, 1))),
        (1, Box::new(check(u64::MAX - 8191, 1))),
        (0, Box::new(check(0, 1))),
        (0, Box::new(|transfer| Frame::Checked { transfer, at: 0 })),
        (1, Box::new(|transfer| Frame::Checked { transfer, at: 0 })),
    ];
    for (to, make) in wrong {
        let mut m = Moving::new(Op::Read, Check::All);
        let mut bytes = Vec::new();
        make(m.key.1).encode(&mut bytes);
        m.world.peers[to].node.session(m.session).receive(&bytes, m.world.now);
        m.world.pump(to);
        assert_eq!(m.world.peers[to].downs[0].1.code, Code::ProtocolError, "{:?}", make(m.key.1));
    }
}

/// A peer that asks for more at once than it may is cut off, whatever it asks.
#[test]
fn only_a_few_parts_are_compared_at_once() {
    let mut m = Moving::new(Op::Read, Check::All);
    let mut bytes = Vec::new();
    for at in 0..5 {
        Frame::Check { transfer: m.key.1, at: at * PAGE, sums: vec![0] }.encode(&mut bytes);
    }
    m.world.peers[1].node.session(m.session).receive(&bytes, m.world.now);
    m.world.pump(1);
    assert_eq!(m.world.peers[1].downs[0].1.code, Code::ProtocolError);
}
