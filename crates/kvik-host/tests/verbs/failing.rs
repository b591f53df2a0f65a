//! What fails, and what is sure from then on.

use super::{LEN, LIMIT, PAGE, Side, all_are, connected, devices, names, pair, watch};
use kvik_host::verbs::{Completion, Piece, Posted, RequestError, Rma, RmaOp};
use std::rc::Rc;
use std::time::{Duration, Instant};

#[test]
#[ignore = "needs an RDMA device: KVIK_TEST_VERBS=rxe0"]
pub fn a_wrong_key_is_an_error_by_name_and_the_rest_is_flushed() {
    let (mut a, mut b) = pair(64);
    for token in 0..8 {
        let at = token as usize * PAGE;
        let pieces = [Piece { memory: &a.known, offset: at, len: PAGE }];
        let rkey = if token == 3 { b.known.rkey() ^ 0x5A5A } else { b.known.rkey() };
        let remote = b.known.base() + at as u64;
        let rma = Rma { op: RmaOp::Write, pieces: &pieces, remote, rkey, token };
        assert_eq!(a.queue.post(&rma).unwrap(), Posted::Yes);
    }
    a.queue.flush().unwrap();
    a.until("drained", |side| side.queue.is_drained());
    let ended = a.ended();
    assert_eq!(ended.iter().map(|(token, _)| *token).collect::<Vec<_>>(), (0..8).collect::<Vec<u64>>());
    assert!(ended[..3].iter().all(|(_, result)| result.is_ok()), "{ended:?}");
    let error = ended[3].1.clone().unwrap_err();
    for word in ["write of 4096 bytes", &names()[0], "remote access error", "status 10", "under this key"] {
        assert!(error.to_string().contains(word), "{word} in: {error}");
    }
    assert!(!error.is_flushed());
    for (token, result) in &ended[4..] {
        assert!(result.as_ref().unwrap_err().is_flushed(), "{token}: {result:?}");
    }
    assert!(matches!(a.done.last(), Some(Completion::Drained { queue }) if *queue == a.queue.id()));
    let written = b.bytes();
    assert!(all_are(&written[..3 * PAGE], 1) && all_are(&written[3 * PAGE..], 2));
    // Nothing more is taken, and it says why.
    let pieces = [Piece { memory: &a.known, offset: 0, len: PAGE }];
    let (remote, rkey) = (b.known.base(), b.known.rkey());
    let rma = Rma { op: RmaOp::Write, pieces: &pieces, remote, rkey, token: 9 };
    let error = a.queue.post(&rma).unwrap_err().to_string();
    assert!(error.contains("has failed"), "{error}");
    b.queue.fail().unwrap();
    b.until("drained", |side| side.queue.is_drained());
}

/// `a` writes all of `b`'s memory, again and again, until some of it has landed and much is in flight.
fn keep_writing(a: &mut Side, b: &Side) {
    let mut token = 0;
    while a.gather(RmaOp::Write, &b.known, token as usize % 16 * (LEN / 16), LEN / 16, token) == Posted::Yes {
        token += 1;
    }
    a.queue.flush().unwrap();
    let began = Instant::now();
    let mut first = [2u8];
    while first[0] == 2 {
        assert!(began.elapsed() < LIMIT, "nothing lands");
        b.memory.copy_out(0, &mut first).unwrap();
    }
    assert!(a.queue.in_flight() > 0);
}

#[test]
#[ignore = "needs an RDMA device: KVIK_TEST_VERBS=rxe0"]
pub fn a_target_that_fails_its_queue_pair_gets_no_byte_more() {
    assert!((0..20).any(|_| fails_amid_writes()), "all writes had ended before: the test shows nothing");
}

/// False where all writes had ended before.
fn fails_amid_writes() -> bool {
    let (mut a, mut b) = pair(128);
    keep_writing(&mut a, &b);
    b.queue.fail().unwrap();
    // From here on the memory is somebody else's.
    b.fill(0xEE);
    let count = a.queue.in_flight();
    a.until_ended(count);
    assert!(all_are(&b.bytes(), 0xEE), "late bytes of a write");
    a.until("drained", |side| side.queue.is_drained());
    let ended = a.ended();
    let first = ended.iter().find_map(|(_, result)| result.clone().err());
    if let Some(first) = &first {
        assert!(!first.is_flushed() && first.to_string().contains("did not answer"), "{first}");
    }
    b.until("drained", |side| side.queue.is_drained());
    assert!(all_are(&b.bytes(), 0xEE));
    first.is_some()
}

#[test]
#[ignore = "needs an RDMA device: KVIK_TEST_VERBS=rxe0"]
pub fn an_initiator_that_fails_its_queue_pair_gets_back_all() {
    let (mut a, mut b) = pair(64);
    // A peer that answers nothing: all of it stays in flight.
    b.queue.fail().unwrap();
    let count = 32;
    for token in 0..count {
        let at = token as usize % 16 * (LEN / 16);
        assert_eq!(a.gather(RmaOp::Read, &b.known, at, LEN / 16, token), Posted::Yes);
    }
    a.queue.flush().unwrap();
    // One that the device never got.
    assert_eq!(a.gather(RmaOp::Read, &b.known, 0, 64, count), Posted::Yes);
    assert!(!a.queue.has_failed() && !a.queue.is_drained());
    a.queue.fail().unwrap();
    assert!(a.queue.has_failed());
    a.until("drained", |side| side.queue.is_drained());
    let tokens: Vec<u64> = a.ended().iter().map(|(token, _)| *token).collect();
    assert_eq!(tokens, (0..=count).collect::<Vec<_>>());
    for (token, result) in a.ended() {
        assert!(result.as_ref().is_err_and(RequestError::is_flushed), "{token}: {result:?}");
    }
    assert!(all_are(&a.bytes(), 1));
    // Once more is no error, and flushing what was never gathered neither.
    a.queue.fail().unwrap();
    a.queue.flush().unwrap();
}

#[test]
#[ignore = "needs an RDMA device: KVIK_TEST_VERBS=rxe0"]
pub fn reads_of_a_drained_queue_pair_touch_memory_no_more() {
    let devices = devices();
    let depth = 64;
    for _ in 0..5 {
        let (mut a, b) = connected(&devices, depth);
        let mut token = 0;
        while a.gather(RmaOp::Read, &b.known, 0, LEN, token) == Posted::Yes && token < 8 {
            token += 1;
        }
        a.queue.flush().unwrap();
        a.queue.fail().unwrap();
        a.until("drained", |side| side.queue.is_drained());
        a.fill(0xEE);
        // Other traffic of the device goes on, and passes what might still be on its way.
        let (mut c, d) = connected(&devices, depth);
        assert_eq!(c.gather(RmaOp::Write, &d.known, 0, LEN, 1), Posted::Yes);
        c.queue.flush().unwrap();
        c.until_ended(1);
        assert!(c.ended()[0].1.is_ok() && all_are(&a.bytes(), 0xEE) && all_are(&d.bytes(), 1));
    }
}

#[test]
#[ignore = "needs an RDMA device: KVIK_TEST_VERBS=rxe0"]
pub fn a_peer_that_is_gone_is_an_error_in_time() {
    let (mut a, b) = pair(16);
    let there = b.known.clone();
    drop(b.queue);
    let began = watch::start();
    assert_eq!(a.gather(RmaOp::Write, &there, 0, PAGE, 0), Posted::Yes);
    a.queue.flush().unwrap();
    a.until_ended(1);
    let (took, error) = (began.elapsed(), a.ended()[0].1.clone().unwrap_err());
    assert!(error.to_string().contains("did not answer"), "{error}");
    assert!(took < Duration::from_secs(5), "{took:?}");
}

#[test]
#[ignore = "needs an RDMA device: KVIK_TEST_VERBS=rxe0"]
pub fn a_queue_pair_that_is_dropped_gives_back_its_requests() {
    let (mut a, b) = pair(64);
    keep_writing(&mut a, &b);
    let (count, device, queue) = (a.queue.in_flight(), a.device.clone(), a.queue.id());
    let weak = Rc::downgrade(&a.known);
    drop((a.queue, a.known));
    b.fill(0xEE);
    let mut done = Vec::new();
    device.poll(&mut done).unwrap();
    let tokens: Vec<u64> = done
        .iter()
        .filter_map(|completion| match completion {
            Completion::Request { queue: of, token, .. } if *of == queue => Some(*token),
            _ => None,
        })
        .collect();
    let all = count as u64;
    assert_eq!(tokens.len() as u64, all);
    assert!(tokens.is_sorted() && tokens.last() == Some(&(64 - 1)), "{tokens:?}");
    assert!(weak.upgrade().is_none(), "memory stays known only while a request is in flight");
}
