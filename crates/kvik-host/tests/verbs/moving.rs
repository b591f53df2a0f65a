//! Bytes that move, and requests that come back.

use super::{LEN, LIMIT, PAGE, Side, connected, devices, pair};
use kvik_host::HostError;
use kvik_host::verbs::{Completion, Piece, Posted, Queue, Rma, RmaOp};
use std::time::Instant;

#[test]
#[ignore = "needs an RDMA device: KVIK_TEST_VERBS=rxe0"]
pub fn scattered_pages_are_written_and_read() {
    let (mut a, mut b) = pair(32);
    assert!(a.queue.max_pieces() >= 4, "{}", a.queue.max_pieces());
    // Each side has pages that say whose and which they are.
    for (side, mark) in [(&a, 0xA0u8), (&b, 0xB0)] {
        let bytes: Vec<u8> = (0..LEN).map(|at| mark ^ (at / PAGE * 7 + at) as u8).collect();
        side.memory.copy_in(0, &bytes).unwrap();
    }
    let (ours, theirs) = (a.bytes(), b.bytes());
    // Four pages from the first half here, in falling order, to a run in the first half there; and the other
    // way about in the second half.
    let (half, there) = (LEN / 2, b.known.clone());
    let runs = 8;
    for run in 0..runs {
        for (op, half) in [(RmaOp::Write, 0), (RmaOp::Read, half)] {
            let place = |piece| half + (runs * 4 - 1 - run * 4 - piece) * 2 * PAGE;
            let pieces: Vec<Piece<'_>> =
                (0..4).map(|piece| Piece { memory: &a.known, offset: place(piece), len: PAGE }).collect();
            let (remote, rkey) = (there.base() + (half + run * 4 * PAGE) as u64, there.rkey());
            let token = run as u64;
            let rma = Rma { op, pieces: &pieces, remote, rkey, token };
            assert_eq!(a.queue.post(&rma).unwrap(), Posted::Yes);
        }
    }
    assert_eq!((a.queue.waiting(), a.queue.in_flight()), (2 * runs, 2 * runs));
    a.queue.flush().unwrap();
    a.until_ended(2 * runs);
    assert!(a.ended().iter().all(|(_, result)| result.is_ok()), "{:?}", a.done);
    b.poll();
    assert!(b.done.is_empty(), "the target is not told: {:?}", b.done);
    let (mut here_now, mut there_now) = (ours.clone(), theirs.clone());
    for piece in 0..runs * 4 {
        let (scattered, run) = ((runs * 4 - 1 - piece) * 2 * PAGE, piece * PAGE);
        there_now[run..run + PAGE].copy_from_slice(&ours[scattered..scattered + PAGE]);
        let (scattered, run) = (half + scattered, half + run);
        here_now[scattered..scattered + PAGE].copy_from_slice(&theirs[run..run + PAGE]);
    }
    assert!(a.bytes() == here_now, "what was read");
    assert!(b.bytes() == there_now, "what was written, and nothing else");
}

#[test]
#[ignore = "needs an RDMA device: KVIK_TEST_VERBS=rxe0"]
pub fn there_is_never_more_in_flight_than_the_depth() {
    let (mut a, b) = pair(16);
    let mut token = 0;
    for _ in 0..20 {
        while a.gather(RmaOp::Write, &b.known, token as usize % 64 * PAGE, PAGE, token) == Posted::Yes {
            token += 1;
            assert!(a.queue.in_flight() <= 16);
        }
        assert_eq!((a.queue.room(), a.queue.in_flight()), (0, 16));
        a.queue.flush().unwrap();
        let so_far = a.done.len();
        a.until("room", |side| side.queue.room() > 0);
        assert!(a.done.len() > so_far);
    }
    a.until("empty", |side| side.queue.in_flight() == 0);
    assert_eq!(a.ended().len() as u64, token);
    assert!(a.ended().iter().all(|(_, result)| result.is_ok()), "{:?}", a.done);
}

#[test]
#[ignore = "needs an RDMA device: KVIK_TEST_VERBS=rxe0"]
pub fn every_token_comes_back_in_order_though_few_requests_ask() {
    let (mut a, b) = pair(128);
    let mut token = 0u64;
    // Chains of all lengths, so that the ones that ask lie everywhere.
    for chain in 1..=100usize {
        a.until("room", |side| side.queue.room() >= chain);
        for _ in 0..chain {
            let op = if token.is_multiple_of(3) { RmaOp::Read } else { RmaOp::Write };
            assert_eq!(a.gather(op, &b.known, token as usize % 1000 * 64, 64, token), Posted::Yes);
            token += 1;
        }
        a.queue.flush().unwrap();
    }
    a.until_ended(token as usize);
    let tokens: Vec<u64> = a.ended().iter().map(|(token, _)| *token).collect();
    assert_eq!(tokens, (0..token).collect::<Vec<_>>());
    assert!(a.ended().iter().all(|(_, result)| result.is_ok()));
}

#[test]
#[ignore = "needs an RDMA device: KVIK_TEST_VERBS=rxe0"]
pub fn what_no_device_should_see_is_not_posted() {
    let (mut a, b) = pair(16);
    let (remote, rkey) = (b.known.base(), b.known.rkey());
    let known = a.known.clone();
    let mut refused = |op, pieces: &[(usize, usize)], remote| {
        let pieces: Vec<Piece<'_>> =
            pieces.iter().map(|(offset, len)| Piece { memory: &known, offset: *offset, len: *len }).collect();
        a.queue.post(&Rma { op, pieces: &pieces, remote, rkey, token: 0 }).unwrap_err()
    };
    let outside = refused(RmaOp::Write, &[(0, 64), (LEN - 10, 11)], remote);
    assert!(matches!(outside, HostError::OutOfBounds { .. }), "{outside}");
    assert!(refused(RmaOp::Write, &[(0, 64), (64, 0)], remote).to_string().contains("empty piece"));
    assert!(refused(RmaOp::Write, &[], remote).to_string().contains("0 pieces"));
    assert!(refused(RmaOp::Write, &[(0, 1); 99], remote).to_string().contains("99 pieces"));
    assert!(refused(RmaOp::Write, &[(0, 64)], u64::MAX - 3).to_string().contains("bytes at"));
    assert_eq!((a.queue.in_flight(), a.queue.waiting()), (0, 0));
    // Another device's keys, though it may be the same port.
    let other = devices().0;
    let theirs = other.register(a.memory.clone()).unwrap();
    let pieces = [Piece { memory: &theirs, offset: 0, len: 64 }];
    let rma = Rma { op: RmaOp::Write, pieces: &pieces, remote, rkey, token: 0 };
    assert!(a.queue.post(&rma).unwrap_err().to_string().contains("another device"));
    let error = a.queue.connect(&b.queue.address()).unwrap_err().to_string();
    assert!(error.contains("once"), "{error}");
    let mut unconnected = Queue::open(&a.device, 128).unwrap();
    let pieces = [Piece { memory: &a.known, offset: 0, len: 64 }];
    let rma = Rma { op: RmaOp::Write, pieces: &pieces, remote, rkey, token: 0 };
    assert!(unconnected.post(&rma).unwrap_err().to_string().contains("not connected"));
    unconnected.fail().unwrap();
    assert!(unconnected.is_drained());
    a.until("told", |side| side.done == [Completion::Drained { queue: unconnected.id() }]);
}

#[test]
#[ignore = "needs an RDMA device: KVIK_TEST_VERBS=rxe0"]
pub fn completions_of_queue_pairs_that_share_a_device_are_told_apart() {
    let devices = devices();
    let depth = 16;
    let mut pairs: Vec<(Side, Side)> = (0..3).map(|_| connected(&devices, depth)).collect();
    for (number, (a, b)) in pairs.iter_mut().enumerate() {
        for token in 0..10 {
            // The second one's peer refuses the sixth.
            let at = if number == 1 && token == 5 { None } else { Some(token as usize * PAGE) };
            let (offset, remote) = (at.unwrap_or(0), b.known.base() + at.unwrap_or(LEN) as u64);
            let pieces = [Piece { memory: &a.known, offset, len: PAGE }];
            let rkey = b.known.rkey();
            let rma = Rma { op: RmaOp::Write, pieces: &pieces, remote, rkey, token };
            assert_eq!(a.queue.post(&rma).unwrap(), Posted::Yes);
        }
        a.queue.flush().unwrap();
    }
    let (mut done, began) = (Vec::new(), Instant::now());
    while done.len() < 31 {
        assert!(began.elapsed() < LIMIT, "{done:?}");
        devices.0.poll(&mut done).unwrap();
    }
    for (number, (a, _)) in pairs.iter().enumerate() {
        let own = |completion: &&Completion| match completion {
            Completion::Request { queue, .. } | Completion::Drained { queue } => *queue == a.queue.id(),
        };
        let own: Vec<&Completion> = done.iter().filter(own).collect();
        assert_eq!(own.len(), if number == 1 { 11 } else { 10 });
        for (index, completion) in own.iter().take(10).enumerate() {
            let Completion::Request { token, result, .. } = completion else { panic!("{completion:?}") };
            assert_eq!((*token, result.is_ok()), (index as u64, number != 1 || index < 5), "{number}");
        }
        assert_eq!(a.queue.is_drained(), number == 1);
    }
}
