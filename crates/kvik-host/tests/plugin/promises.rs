//! What a plug-in promises, between two of its devices in this process.

use crate::plugins;
use kvik_host::event::{Epoll, Events};
use kvik_host::plugin::{Conn, Plugin, PluginDevice, PluginError, Posted, Region, Rma, RmaOp};
use kvik_host::rma::{Completion, Run};
use kvik_host::{HugePages, Memory};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(60);
const LEN: usize = 4 << 20;

/// The plug-in to check, where it is not the sample.
fn named() -> Option<PathBuf> {
    std::env::var_os("KVIK_NIC_LIBRARY").filter(|file| !file.is_empty()).map(Into::into)
}

struct Side {
    memory: Arc<Memory>,
    known: Rc<Region>,
    done: Vec<Completion<PluginError>>,
    epoll: Epoll,
    waits: bool,
    device: PluginDevice,
}

impl Side {
    fn open(fill: u8, depth: usize) -> Side {
        let plugin = Plugin::load(&named().unwrap_or_else(plugins::sample)).unwrap();
        let mut device = PluginDevice::open(&plugin, 0, depth).unwrap();
        let memory = Arc::new(Memory::shared(LEN, HugePages::Never).unwrap());
        memory.copy_in(0, &vec![fill; LEN]).unwrap();
        let known = device.register(memory.clone()).unwrap();
        let epoll = Epoll::new().unwrap();
        let waits = device.watch(&epoll, 1).unwrap();
        Side { memory, known, done: Vec::new(), epoll, waits, device }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; LEN];
        self.memory.copy_out(0, &mut bytes).unwrap();
        bytes
    }

    fn longest(&self) -> usize {
        self.device.longest().min(256 << 10) as usize
    }

    /// Posts an operation of `len` bytes at `at` on both sides.
    fn post(&mut self, op: RmaOp, conn: Conn, to: &Region, at: usize, len: usize, token: u64) -> Posted {
        let pieces = [Run { offset: at, len }];
        self.post_pieces(op, conn, (to.key(), to.base() + at as u64), &pieces, token)
    }

    fn post_pieces(&mut self, op: RmaOp, conn: Conn, to: (u64, u64), pieces: &[Run], token: u64) -> Posted {
        let (key, remote) = to;
        self.device.post(&Rma { op, memory: &self.known, pieces, conn, remote, key, token }).unwrap()
    }

    fn poll(&mut self) {
        self.device.poll(&mut self.done).unwrap();
    }

    /// Sleeps for a moment where the device says when to wake.
    fn rest(&mut self) {
        if self.waits && self.device.may_wait() {
            self.epoll.wait(&mut Events::new(4), Duration::from_millis(1)).unwrap();
        }
    }
}

fn pair() -> (Side, Side, Conn) {
    let (mut a, b) = (Side::open(1, 256), Side::open(2, 256));
    let conn = a.device.open_conn(b.device.address()).unwrap();
    (a, b, conn)
}

/// Both work until `a` has nothing in flight any more: what has ended.
fn settle(a: &mut Side, b: &mut Side) -> Vec<Completion<PluginError>> {
    let began = Instant::now();
    while a.device.in_flight() > 0 {
        assert!(began.elapsed() < LIMIT, "{} operations have not ended", a.device.in_flight());
        a.poll();
        b.poll();
        a.rest();
        b.rest();
    }
    std::mem::take(&mut a.done)
}

/// Fills the connection with operations while nobody polls, so that something is in the middle.
fn crowd(a: &mut Side, b: &Side, op: RmaOp, conn: Conn) -> usize {
    let longest = a.longest();
    let places = (0..LEN / longest).map(|place| place * longest);
    places.take_while(|at| a.post(op, conn, &b.known, *at, longest, *at as u64) == Posted::Yes).count()
}

/// Something moves over a connection to where `b` is reached now.
fn works(a: &mut Side, b: &mut Side) {
    let conn = a.device.open_conn(b.device.address()).unwrap();
    assert_eq!(a.post(RmaOp::Write, conn, &b.known, 0, 1, 77), Posted::Yes);
    let done = settle(a, b);
    assert!(matches!(done.as_slice(), [Completion { token: 77, result: Ok(()) }]), "{done:?}");
    assert_eq!(b.bytes()[0], a.bytes()[0]);
    a.device.close_conn(conn).unwrap();
}

#[test]
fn pieces_go_both_ways_in_their_order() {
    let (mut a, mut b, conn) = pair();
    let most = a.device.pieces();
    let pieces: Vec<Run> =
        (0..most).map(|place| Run { offset: (most - place) * 8192, len: 1000 + place }).collect();
    for (place, piece) in pieces.iter().enumerate() {
        a.memory.copy_in(piece.offset, &vec![100 + place as u8; piece.len]).unwrap();
    }
    let expected: Vec<u8> =
        pieces.iter().enumerate().flat_map(|(place, piece)| vec![100 + place as u8; piece.len]).collect();
    let to = (b.known.key(), b.known.base() + 77);
    assert_eq!(a.post_pieces(RmaOp::Write, conn, to, &pieces, u64::MAX), Posted::Yes);
    let done = settle(&mut a, &mut b);
    assert!(matches!(done.as_slice(), [Completion { token: u64::MAX, result: Ok(()) }]), "{done:?}");
    let there = b.bytes();
    assert_eq!(there[77..77 + expected.len()], expected);
    assert!(there[..77].iter().chain(&there[77 + expected.len()..]).all(|byte| *byte == 2));
    // And back, over what was there.
    let before = a.bytes();
    a.memory.copy_in(0, &vec![1; LEN]).unwrap();
    assert_eq!(a.post_pieces(RmaOp::Read, conn, to, &pieces, 5), Posted::Yes);
    assert!(settle(&mut a, &mut b).iter().all(|done| done.result.is_ok()));
    assert!(a.bytes() == before);
}

#[test]
fn a_full_device_says_so_and_goes_on() {
    let (mut a, mut b) = (Side::open(1, 5), Side::open(2, 256));
    let conn = a.device.open_conn(b.device.address()).unwrap();
    let posted = crowd(&mut a, &b, RmaOp::Write, conn);
    assert!((1..=5).contains(&posted), "{posted} operations, and 5 are the bound");
    assert_eq!(settle(&mut a, &mut b).len(), posted);
    works(&mut a, &mut b);
}

#[test]
fn what_is_cut_touches_nothing_here_and_is_not_heard_of() {
    for op in [RmaOp::Read, RmaOp::Write] {
        let (mut a, mut b, conn) = pair();
        let other = a.device.open_conn(b.device.address()).unwrap();
        assert!(crowd(&mut a, &b, op, conn) > 0);
        b.poll();
        let longest = a.longest();
        assert_eq!(a.post(RmaOp::Write, other, &b.known, 0, longest.min(16), 1), Posted::Yes);
        let cut = a.device.cancel(conn).unwrap();
        let before = a.bytes();
        let done = settle(&mut a, &mut b);
        let left = usize::from(cut == kvik_host::plugin::CancelScope::Conn);
        assert!(done.len() == left && done.iter().all(|done| done.token == 1), "{op:?}: {done:?}");
        works(&mut a, &mut b);
        assert!(a.bytes() == before, "{op:?}: memory here was written after the cut");
        let rma = Rma {
            op,
            memory: &a.known,
            pieces: &[Run { offset: 0, len: 1 }],
            conn,
            remote: b.known.base(),
            key: b.known.key(),
            token: 0,
        };
        assert!(a.device.post(&rma).unwrap_err().to_string().contains("its connection is closed"));
    }
}

#[test]
fn who_is_fenced_off_reaches_nothing_any_more() {
    for op in [RmaOp::Write, RmaOp::Read] {
        let (mut a, mut b, conn) = pair();
        let old = b.device.address().to_vec();
        let posted = crowd(&mut a, &b, op, conn);
        a.poll();
        b.poll();
        let new = b.device.fence().unwrap();
        assert!(new != old && new == b.device.address());
        let (here, there) = (a.bytes(), b.bytes());
        // What was in flight ends, and what is posted later fails: on the old connection, and by the old address.
        let early = a.done.len();
        assert_eq!(settle(&mut a, &mut b).len(), posted);
        assert!(early <= posted);
        let here = if op == RmaOp::Read { a.bytes() } else { here };
        for conn in [conn, a.device.open_conn(&old).unwrap()] {
            let longest = a.longest();
            assert_eq!(a.post(op, conn, &b.known, 0, longest, 9), Posted::Yes, "{op:?}");
            let done = settle(&mut a, &mut b);
            assert!(done.len() == 1 && done[0].result.is_err(), "{op:?}: {done:?}");
        }
        assert!(b.bytes() == there, "{op:?}: memory was written after the fence");
        assert!(a.bytes() == here, "{op:?}: memory was read after the fence");
        works(&mut a, &mut b);
    }
}

#[test]
fn memory_that_is_not_known_is_out_of_reach() {
    let (mut a, mut b, _) = pair();
    let (key, base) = (b.known.key(), b.known.base());
    for (op, key, remote) in [
        (RmaOp::Write, key ^ 0x5A5A, base),
        (RmaOp::Read, key ^ 0x5A5A, base),
        (RmaOp::Write, key, base + LEN as u64 - 99),
        (RmaOp::Read, key, base.wrapping_sub(1)),
    ] {
        // Such an end may cost the connection.
        let conn = a.device.open_conn(b.device.address()).unwrap();
        let pieces = [Run { offset: 0, len: 100 }];
        assert_eq!(a.post_pieces(op, conn, (key, remote), &pieces, 3), Posted::Yes);
        let done = settle(&mut a, &mut b);
        assert!(done.len() == 1 && done[0].result.is_err(), "{op:?}: {done:?}");
    }
    assert!(a.bytes().iter().all(|byte| *byte == 1) && b.bytes().iter().all(|byte| *byte == 2));
    works(&mut a, &mut b);
}

#[test]
fn memory_that_is_removed_in_the_middle_is_touched_no_more() {
    let (mut a, mut b, conn) = pair();
    let more = Arc::new(Memory::shared(LEN, HugePages::Never).unwrap());
    let region = b.device.register(more.clone()).unwrap();
    let longest = a.longest();
    for place in 0..LEN / longest {
        let _ = a.post(RmaOp::Write, conn, &region, place * longest, longest, place as u64);
    }
    a.poll();
    b.poll();
    drop(region);
    let mut before = vec![0; LEN];
    more.copy_out(0, &mut before).unwrap();
    let done = settle(&mut a, &mut b);
    // The sample has moved some of it by then; who moves more needs no errors.
    let moved = done.iter().filter(|done| done.result.is_ok()).count();
    assert!(named().is_some() || (1..done.len()).contains(&moved), "{moved} of {} went through", done.len());
    let mut after = vec![0; LEN];
    more.copy_out(0, &mut after).unwrap();
    assert!(after == before);
    works(&mut a, &mut b);
}

#[test]
fn a_peer_that_is_gone_fails_what_is_posted_and_not_the_post() {
    let (mut a, b, conn) = pair();
    let (key, base) = (b.known.key(), b.known.base());
    let pieces = [Run { offset: 0, len: 64 }];
    drop(b);
    let mut c = Side::open(3, 256);
    for token in 0..3 {
        assert_eq!(a.post_pieces(RmaOp::Write, conn, (key, base), &pieces, token), Posted::Yes);
        let done = settle(&mut a, &mut c);
        let error = done[0].result.as_ref().unwrap_err().to_string();
        assert!(done[0].token == token && error.starts_with("the plug-in "), "{error}");
    }
    // A completion that waits to be taken is not told after a cut.
    assert_eq!(a.post_pieces(RmaOp::Write, conn, (key, base), &pieces, 3), Posted::Yes);
    a.device.cancel(conn).unwrap();
    works(&mut a, &mut c);
}

#[test]
fn a_cut_leaves_as_much_room_as_there_was() {
    let (mut a, mut b) = (Side::open(1, 256), Side::open(2, 256));
    let mut room = Vec::new();
    for _ in 0..40 {
        let conn = a.device.open_conn(b.device.address()).unwrap();
        room.push(crowd(&mut a, &b, RmaOp::Write, conn));
        a.device.cancel(conn).unwrap();
    }
    assert!(room.iter().all(|posted| *posted == room[0] && *posted > 0), "{room:?}");
    works(&mut a, &mut b);
}

/// Of the sample, whose address ends with its pass.
#[test]
fn who_has_not_the_pass_is_turned_away() {
    if named().is_some() {
        return println!("not run: only of the sample is it known how an address is made");
    }
    let (mut a, mut b, _) = pair();
    let mut guessed = b.device.address().to_vec();
    *guessed.last_mut().unwrap() ^= 1;
    let conn = a.device.open_conn(&guessed).unwrap();
    assert_eq!(a.post(RmaOp::Write, conn, &b.known, 0, 64, 1), Posted::Yes);
    assert!(settle(&mut a, &mut b)[0].result.is_err());
    assert!(b.bytes().iter().all(|byte| *byte == 2));
}

#[test]
fn what_is_no_address_is_refused() {
    let mut a = Side::open(1, 16);
    for address in [&b""[..], b"?", &[7; 512], &[7; 513]] {
        a.device.open_conn(address).unwrap_err();
    }
}
