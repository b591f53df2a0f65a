//! What every transport keeps, written once against [`kvik_transport::Transport`], with the protocol's node and
//! nothing of an engine. Whoever adds a transport adds a line at the end of this file. What is of the whole engine
//! (selection, death, restarts, layouts through its public face) is in `kvik-engine`'s tests.
//!
//! `KVIK_TEST_NICS` names NICs that the checks run over, too (`libfabric:tcp`, for instance).

mod device;
#[path = "../../../../tests/standins/faulty.rs"]
#[allow(dead_code)]
mod faulty;
mod host;
#[path = "../../../../tests/standins/make.rs"]
#[allow(dead_code)]
mod make;
mod moves;
#[path = "../../../../tests/standins/standin.rs"]
#[allow(dead_code)]
mod standin;

use host::{Kind, PATIENCE, Pair, bytes, memory, view};
use kvik_core::{Code, Error, Right};
use kvik_proto::Op;
use kvik_transport::Answer;
use std::sync::{Arc, OnceLock};

const PAGE: u64 = 16 << 10;
const PAGES: usize = 64;
const SIZE: usize = PAGES * PAGE as usize;
const OPS: [(Op, Right); 2] = [(Op::Read, Right::Read), (Op::Write, Right::Write)];

/// Every second page there, backwards, to the first pages here.
fn ids() -> (Vec<u32>, Vec<u32>) {
    let there: Vec<u32> = (0..PAGES as u32).rev().filter(|id| id % 2 == 0).collect();
    (there.clone(), (0..there.len() as u32).collect())
}

/// What the destination must hold after a transfer.
fn expected(from: (&[u8], &[u32]), to: (&[u8], &[u32])) -> Vec<u8> {
    let (mut all, page) = (to.0.to_vec(), PAGE as usize);
    for (from_id, to_id) in from.1.iter().zip(to.1) {
        let (at, source) = (*to_id as usize * page, *from_id as usize * page);
        all[at..at + page].copy_from_slice(&from.0[source..source + page]);
    }
    all
}

fn cancelled() -> Error {
    Error::new(Code::Cancelled, "in a test")
}

mod checks {
    use super::*;

    pub fn every_byte_lands_where_it_belongs_and_no_other_is_touched(kind: Kind) {
        let pair = Pair::new(kind);
        let (there, here) = (memory(SIZE, 1), memory(SIZE, 2));
        let (theirs, ours) = (pair.owner.register(1, &there), pair.other.register(1, &here));
        let (from, to) = ids();
        let (view_there, view_here) = (view(&there, PAGE, &from), view(&here, PAGE, &to));
        for (op, right) in OPS {
            there.copy_in(0, &bytes(&memory(SIZE, 3))).unwrap();
            let before = (bytes(&there), bytes(&here));
            let (grant, _slot) = pair.owner.grant(right, (theirs, &there), &view_there);
            let (key, _fence) = pair.other.begin(op, grant, (ours, &here), &view_here);
            let end = pair.other.finished(key);
            end.outcome.unwrap();
            assert_eq!(end.bytes, from.len() as u64 * PAGE);
            let after = (bytes(&there), bytes(&here));
            match op {
                Op::Read => {
                    assert!(after.0 == before.0, "{op:?}: the source was written");
                    assert!(after.1 == expected((&before.0, &from), (&before.1, &to)), "{op:?}");
                }
                _ => {
                    assert!(after.1 == before.1, "{op:?}: the source was written");
                    assert!(after.0 == expected((&before.1, &to), (&before.0, &from)), "{op:?}");
                }
            }
        }
    }

    pub fn a_cancelled_transfer_ends_when_the_work_in_hand_has_and_nothing_lands_later(kind: Kind) {
        for (op, right) in OPS {
            let pair = Pair::new(kind);
            let (there, here) = (memory(SIZE, 1), memory(SIZE, 2));
            let (theirs, ours) = (pair.owner.register(1, &there), pair.other.register(1, &here));
            let all: Vec<u32> = (0..PAGES as u32).collect();
            let (grant, _slot) = pair.owner.grant(right, (theirs, &there), &view(&there, PAGE, &all));
            let mover = pair.mover(kind, op).clone();
            mover.hold_from(0);
            let (key, _fence) = pair.other.begin(op, grant, (ours, &here), &view(&here, PAGE, &all));
            assert!(mover.wait_held(1, PATIENCE), "{op:?}: no work was claimed");
            pair.other.with(|node, _| node.cancel(key, cancelled()));
            pair.owner.has_heard(&pair.other);
            if Arc::ptr_eq(&mover, &pair.ours) {
                assert!(!pair.other.is_finished(key), "{op:?}: it ended under work in flight");
            }
            mover.release();
            let end = pair.other.finished(key);
            assert_eq!(end.outcome.unwrap_err().code, Code::Cancelled, "{op:?}");
            // What a peer may still write is the owner's again with the end of the grant, and no sooner.
            pair.owner.end_grant(grant);
            let destination = if op == Op::Read { &here } else { &there };
            destination.copy_in(0, &vec![0xEE; SIZE]).unwrap();
            // Another transfer goes through, and with it all that was still on its way.
            let one = view(&there, PAGE, &all[..1]);
            let (grant, _slot) = pair.owner.grant(right, (theirs, &there), &one);
            let (key, _fence) = pair.other.begin(op, grant, (ours, &here), &view(&here, PAGE, &all[..1]));
            pair.other.finished(key).outcome.unwrap();
            assert!(bytes(destination)[PAGE as usize..].iter().all(|byte| *byte == 0xEE), "{op:?}");
        }
    }

    pub fn memory_that_was_withdrawn_is_let_go_of_and_can_be_registered_again_before(kind: Kind) {
        let pair = Pair::new(kind);
        let here = memory(SIZE, 1);
        let region = pair.other.register(7, &here);
        let by = pair.other.under_test.get().unwrap();
        assert!(by.closed(region, &here, Op::Read).is_none());
        by.withdraw(region, PATIENCE);
        by.register(region, &here, PATIENCE).unwrap();
        assert!(by.closed(region, &here, Op::Read).is_none());
        let weak = here.downgrade();
        drop(here);
        pair.other.withdraw(region);
        pair.other.wait("the end of the memory", |_| weak.upgrade().is_none().then_some(()));
    }

    pub fn a_session_that_has_ended_is_answered_no_with_a_reason(kind: Kind) {
        let pair = Pair::new(kind);
        let here = memory(SIZE, 1);
        let region = pair.other.register(7, &here);
        assert!(matches!(pair.other.answer(Some(Op::Read), Some((region, &here))), Answer::Ready(None)));
        let session = *pair.other.session.get().unwrap();
        let by = pair.other.under_test.get().unwrap();
        by.measured(session, 1 << 20, std::time::Duration::from_millis(1));
        let Answer::Ready(Some(estimate)) = pair.other.answer(None, None) else {
            panic!("nothing was measured")
        };
        assert_eq!(estimate.samples, 1);
        by.end_session(session);
        let Answer::No(why) = pair.other.answer(Some(Op::Read), Some((region, &here))) else {
            panic!("it serves a session that has ended");
        };
        assert!(why.contains("ended"), "{why}");
        // What is told to a transport of what it has forgotten does nothing.
        by.measured(session, 1, PATIENCE);
        by.open(session);
        by.cancel(session);
        by.end_session(session);
    }

    pub fn a_peer_that_is_not_reached_is_answered_no_with_a_reason(kind: Kind) {
        let pair = Pair::new(kind);
        let by = pair.other.under_test.get().unwrap();
        by.add_session(99, &kvik_proto::Facts::default());
        let request = kvik_transport::Request { session: 99, op: None, memory: None, bytes: 0 };
        match (kind, by.answer(&request)) {
            // There is a session, and so a connection.
            (Kind::Tcp, Answer::Ready(None)) => {}
            (Kind::Local, Answer::No(why)) => assert!(why.contains("tcp only"), "{why}"),
            (Kind::Rma(_), Answer::No(why)) => assert!(why.contains("no NICs"), "{why}"),
            (_, other) => panic!("{other:?}"),
        }
    }
}

/// The NICs that are named from outside.
fn named() -> Option<Kind> {
    static NAMED: OnceLock<Option<&'static str>> = OnceLock::new();
    let nics = NAMED.get_or_init(|| {
        let nics = std::env::var("KVIK_TEST_NICS").ok().filter(|nics| !nics.is_empty())?;
        Some(String::leak(nics))
    });
    nics.map(Kind::Rma)
}

macro_rules! conform {
    ($($name:ident: $kind:expr;)*) => {
        $(conform!(@ $name $kind,
            every_byte_lands_where_it_belongs_and_no_other_is_touched
            a_cancelled_transfer_ends_when_the_work_in_hand_has_and_nothing_lands_later
            memory_that_was_withdrawn_is_let_go_of_and_can_be_registered_again_before
            a_session_that_has_ended_is_answered_no_with_a_reason
            a_peer_that_is_not_reached_is_answered_no_with_a_reason);)*
    };
    (@ $name:ident $kind:expr, $($check:ident)*) => {
        mod $name {
            $(#[test]
            fn $check() {
                let kind: Option<super::Kind> = $kind;
                if let Some(kind) = kind {
                    super::checks::$check(kind);
                }
            })*
        }
    };
}

conform! {
    tcp: Some(crate::Kind::Tcp);
    local: Some(crate::Kind::Local);
    named_nics: crate::named();
}
