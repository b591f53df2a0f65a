//! The order of requests, and who asks for a completion, with a device that only writes down what it was given.

use super::abi::{self, ibv_context, ibv_qp, ibv_qp_attr, ibv_send_wr, ibv_wc};
use super::ring::{Ring, Rma, Stage};
use super::{Completion, Posted, RmaOp, Table, Verbs};
use crate::library::Library;
use std::cell::RefCell;
use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::Arc;

/// A request as the device got it.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Got {
    wr_id: u64,
    asks: bool,
}

thread_local! {
    static GOT: RefCell<Vec<Got>> = const { RefCell::new(Vec::new()) };
    /// How many more requests the device takes.
    static ROOM: RefCell<usize> = const { RefCell::new(usize::MAX) };
    /// How often a queue pair was taken to its error state.
    static ERRORS: RefCell<usize> = const { RefCell::new(0) };
}

unsafe extern "C" fn post_send(
    _: *mut ibv_qp,
    first: *mut ibv_send_wr,
    refused: *mut *mut ibv_send_wr,
) -> c_int {
    let mut at = first;
    while !at.is_null() {
        if ROOM.with_borrow(|room| *room == 0) {
            // SAFETY: the caller's place for it.
            unsafe { *refused = at };
            return libc::ENOMEM;
        }
        ROOM.with_borrow_mut(|room| *room -= 1);
        // SAFETY: an element of the caller's chain.
        let wr = unsafe { &*at };
        let asks = wr.send_flags & abi::IBV_SEND_SIGNALED != 0;
        GOT.with_borrow_mut(|got| got.push(Got { wr_id: wr.wr_id, asks }));
        at = wr.next;
    }
    0
}

unsafe extern "C" fn never_receive(
    _: *mut ibv_qp,
    _: *mut abi::ibv_recv_wr,
    _: *mut *mut abi::ibv_recv_wr,
) -> c_int {
    unreachable!("nothing is received")
}

unsafe extern "C" fn modify_qp(_: *mut ibv_qp, attr: *mut ibv_qp_attr, _: c_int) -> c_int {
    // SAFETY: the caller's attributes.
    assert_eq!(unsafe { (*attr).qp_state }, abi::IBV_QPS_ERR);
    ERRORS.with_borrow_mut(|errors| *errors += 1);
    0
}

unsafe extern "C" fn never_poll(_: *mut abi::ibv_cq, _: c_int, _: *mut ibv_wc) -> c_int {
    unreachable!("nothing polls here")
}

unsafe extern "C" fn never_arm(_: *mut abi::ibv_cq, _: c_int) -> c_int {
    unreachable!("nothing waits here")
}

fn ring(depth: usize) -> Ring {
    GOT.with_borrow_mut(Vec::clear);
    ROOM.set(usize::MAX);
    ERRORS.set(0);
    // Both stay for the rest of the process, as the raw pointers need.
    let context = Box::leak(Box::new(MaybeUninit::<ibv_context>::zeroed())).as_mut_ptr();
    // SAFETY: places of the box; of what stays zero nothing is read.
    unsafe {
        (&raw mut (*context).ops.poll_cq).write(never_poll);
        (&raw mut (*context).ops.req_notify_cq).write(never_arm);
        (&raw mut (*context).ops.post_send).write(post_send);
        (&raw mut (*context).ops.post_recv).write(never_receive);
    }
    let qp = Box::new(ibv_qp { context, ..ibv_qp::default() });
    let library = Library::open(super::LIBIBVERBS, None).unwrap();
    let table = Table { modify_qp, ..Table::load(&library).unwrap() };
    let verbs = Arc::new(Verbs { library, table });
    let mut ring =
        Ring::new(5, NonNull::from(Box::leak(qp)), (&verbs, "device x port 1".into()), (depth, 4), 1 << 20);
    ring.stage = Stage::Connected;
    ring
}

/// A write without bytes, which only [`super::Queue::post`] refuses.
fn gather(ring: &mut Ring, token: u64) -> Posted {
    let rma = Rma { op: RmaOp::Write, pieces: &[], remote: 0, rkey: 0, token };
    ring.gather(&rma).unwrap()
}

fn wc(wr_id: u64, status: abi::ibv_wc_status) -> ibv_wc {
    ibv_wc { wr_id, status, ..ibv_wc::default() }
}

/// The tokens that a completion brings, with their status; -1 stands for the end.
fn take(ring: &mut Ring, wc: &ibv_wc) -> Vec<(u64, i32)> {
    let mut into = Vec::new();
    ring.take(wc, &mut into);
    into.into_iter()
        .map(|completion| match completion {
            Completion::Request { token, result, .. } => {
                (token, result.map_or_else(|error| error.status, |()| 0))
            }
            Completion::Drained { .. } => (u64::MAX, -1),
        })
        .collect()
}

fn got() -> Vec<Got> {
    GOT.take()
}

#[test]
fn the_last_of_a_chain_asks_and_some_before_it() {
    let mut ring = ring(16);
    for token in 0..10 {
        assert_eq!(gather(&mut ring, token), Posted::Yes);
    }
    assert_eq!((ring.waiting(), got().len()), (10, 0));
    ring.flush().unwrap();
    let asks: Vec<bool> = got().iter().map(|got| got.asks).collect();
    let yes: Vec<usize> = (0..10).filter(|index| asks[*index]).collect();
    assert_eq!(yes, [3, 7, 9]);
}

#[test]
fn requests_come_back_in_order_across_the_end_of_their_numbers() {
    let mut ring = ring(8);
    let mut next = 0u64;
    let mut back = Vec::new();
    // More rounds than there are numbers would take long: begin near the end.
    ring.begin_at((1 << 24) - 20);
    while next < 80 {
        while gather(&mut ring, next) == Posted::Yes {
            next += 1;
        }
        assert_eq!(ring.room(), 0);
        ring.flush().unwrap();
        for asked in got().iter().filter(|got| got.asks) {
            back.extend(take(&mut ring, &wc(asked.wr_id, 0)));
        }
        assert_eq!(ring.in_flight(), 0);
    }
    assert_eq!(back, (0..next).map(|token| (token, 0)).collect::<Vec<_>>());
}

#[test]
fn what_a_failure_says_of_those_before_it() {
    let mut ring = ring(16);
    assert!((0..6).all(|token| gather(&mut ring, token) == Posted::Yes));
    ring.flush().unwrap();
    let sent = got();
    // The third was refused by the peer: the two before it were done, though they never asked.
    assert_eq!(take(&mut ring, &wc(sent[2].wr_id, 10)), [(0, 0), (1, 0), (2, 10)]);
    assert_eq!((ring.stage, ERRORS.take()), (Stage::Failing, 1));
    let last = got();
    assert_eq!((last.len(), last[0].asks), (1, true));
    // Of those before one that was flushed nothing is known.
    assert_eq!(take(&mut ring, &wc(sent[4].wr_id, 5)), [(3, 5), (4, 5)]);
    // Twice, or never posted, is nothing.
    assert_eq!(take(&mut ring, &wc(sent[4].wr_id, 5)), []);
    assert_eq!(take(&mut ring, &wc(sent[5].wr_id + 1, 0)), []);
    assert_eq!(take(&mut ring, &wc(last[0].wr_id, 5)), [(5, 5), (u64::MAX, -1)]);
    assert_eq!((ring.stage, ring.in_flight(), ERRORS.take()), (Stage::Drained, 0, 0));
}

#[test]
fn a_chain_that_the_device_takes_in_part_comes_back_whole() {
    let mut ring = ring(16);
    ROOM.set(3);
    assert!((0..6).all(|token| gather(&mut ring, token) == Posted::Yes));
    let error = ring.flush().unwrap_err();
    assert!(error.to_string().contains("device x port 1") && error.number == libc::ENOMEM, "{error}");
    let sent = got();
    assert_eq!((sent.len(), ring.stage), (3, Stage::Failing));
    // The fourth was never the device's.
    assert_eq!(take(&mut ring, &wc(sent[2].wr_id + 1, 0)), []);
    assert_eq!(take(&mut ring, &wc(sent[2].wr_id, 5)), [(0, 5), (1, 5), (2, 5)]);
    // Even the request that tells of the end was refused: the owner is told, and must end the queue pair.
    let error = ring.fail().unwrap_err();
    assert!(error.to_string().contains("only its end stops it"), "{error}");
    assert_eq!(ring.in_flight(), 3);
    assert!(ring.gather(&Rma { op: RmaOp::Write, pieces: &[], remote: 0, rkey: 0, token: 0 }).is_err());
}

#[test]
fn every_status_that_has_a_meaning_is_named_to_the_user() {
    for (status, word) in
        [(10, "its owner has closed it"), (12, "did not answer"), (13, "immediates"), (5, "turn")]
    {
        let mut ring = ring(4);
        assert_eq!(gather(&mut ring, 1), Posted::Yes);
        ring.flush().unwrap();
        let (mut into, sent) = (Vec::new(), got());
        ring.take(&ibv_wc { vendor_err: 0x51, ..wc(sent[0].wr_id, status) }, &mut into);
        let Completion::Request { result: Err(error), .. } = &into[0] else { panic!("{into:?}") };
        let text = error.to_string();
        assert!(text.contains(word) && text.contains(&format!("status {status}, vendor 0x51")), "{text}");
        assert!(text.contains("device x port 1") && text.contains("write of 0 bytes"), "{text}");
    }
}
