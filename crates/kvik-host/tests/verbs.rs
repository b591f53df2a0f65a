//! RDMA devices, as this host has them: queue pairs of one process that reach each other's memory.
//!
//! They need a device, which a soft-RoCE one is: `KVIK_TEST_VERBS=rxe0 cargo test --test verbs -- --include-ignored`.
//! With two names (`rxe0,rxe1`) the two sides are on a device each.

use kvik_host::event::{Epoll, Events};
use kvik_host::verbs::{
    Access, Completion, Device, Event, Family, Link, Piece, Port, PortState, Posted, Queue, QueueAddress,
    QueueOptions, Registration, RequestError, Rma, RmaOp, Verbs,
};
use kvik_host::{HostError, HugePages, Memory};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(60);
const LEN: usize = 4 << 20;
const PAGE: usize = 4096;
const BOTH: Access = Access { remote: true, on_demand: false };

/// The devices to test with.
fn names() -> Vec<String> {
    let names = std::env::var("KVIK_TEST_VERBS").unwrap_or_default();
    let names: Vec<String> = names.split(',').filter(|name| !name.is_empty()).map(Into::into).collect();
    assert!(!names.is_empty(), "KVIK_TEST_VERBS names no RDMA device, such as rxe0");
    names
}

fn port(verbs: &Verbs, name: &str) -> Port {
    let found = verbs.ports().unwrap();
    let port = found.ports.iter().find(|port| port.device == name);
    port.unwrap_or_else(|| panic!("no {name} among {:?}; refused: {:?}", found.ports, found.refused)).clone()
}

struct Side {
    queue: Queue,
    known: Rc<Registration>,
    memory: Arc<Memory>,
    device: Rc<Device>,
    done: Vec<Completion>,
}

impl Side {
    fn on(device: &Rc<Device>, fill: u8, options: &QueueOptions) -> Side {
        let memory = Arc::new(Memory::shared(LEN, HugePages::Never).unwrap());
        memory.copy_in(0, &vec![fill; LEN]).unwrap();
        let known = device.register(memory.clone(), BOTH).unwrap();
        let queue = Queue::open(device, options).unwrap();
        Side { queue, known, memory, device: device.clone(), done: Vec::new() }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; LEN];
        self.memory.copy_out(0, &mut bytes).unwrap();
        bytes
    }

    fn fill(&self, with: u8) {
        self.memory.copy_in(0, &vec![with; LEN]).unwrap();
    }

    fn poll(&mut self) {
        self.device.poll(&mut self.done).unwrap();
    }

    /// The requests that have come back.
    fn ended(&self) -> Vec<(u64, Result<(), RequestError>)> {
        let request = |completion: &Completion| match completion {
            Completion::Request { token, result, .. } => Some((*token, result.clone())),
            _ => None,
        };
        self.done.iter().filter_map(request).collect()
    }

    fn until(&mut self, what: &str, mut is_so: impl FnMut(&Side) -> bool) {
        let began = Instant::now();
        while !is_so(self) {
            assert!(began.elapsed() < LIMIT, "never {what}; {} came back: {:?}", self.done.len(), self.done);
            self.poll();
        }
    }

    fn until_ended(&mut self, count: usize) {
        self.until("enough completions", |side| side.ended().len() >= count);
    }

    /// Gathers a request of one piece.
    fn gather(&mut self, op: RmaOp, peer: &Registration, at: usize, len: usize, token: u64) -> Posted {
        let pieces = [Piece { memory: &self.known, offset: at, len }];
        let (remote, rkey) = (peer.base() + at as u64, peer.rkey());
        self.queue.post(&Rma { op, pieces: &pieces, remote, rkey, token, immediate: None }).unwrap()
    }
}

/// A device for each side, with a completion queue of its own.
fn devices() -> (Rc<Device>, Rc<Device>) {
    let verbs = Verbs::load(None).unwrap();
    let names = names();
    let open = |name: &str| {
        let port = port(&verbs, name);
        let gid = port.choose_gid(Family::Any, None).unwrap().index;
        Device::open(&verbs, &port, gid).unwrap()
    };
    (open(&names[0]), open(names.get(1).unwrap_or(&names[0])))
}

/// Two sides that are connected, their addresses having gone as bytes.
fn connected(devices: &(Rc<Device>, Rc<Device>), options: &QueueOptions) -> (Side, Side) {
    let (mut a, mut b) = (Side::on(&devices.0, 1, options), Side::on(&devices.1, 2, options));
    let (to_a, to_b) = (a.queue.address().encode(), b.queue.address().encode());
    a.queue.connect(&QueueAddress::decode(&to_b).unwrap()).unwrap();
    b.queue.connect(&QueueAddress::decode(&to_a).unwrap()).unwrap();
    (a, b)
}

fn pair(depth: usize) -> (Side, Side) {
    connected(&devices(), &QueueOptions { depth, ..QueueOptions::default() })
}

fn all_are(bytes: &[u8], value: u8) -> bool {
    bytes.iter().all(|byte| *byte == value)
}

#[test]
fn the_library_says_where_it_came_from_and_lists_what_there_is() {
    let verbs = Verbs::load(None).unwrap();
    assert!(verbs.path().is_absolute() && verbs.path().exists(), "{}", verbs.path().display());
    // None, on most hosts that build this.
    for port in verbs.ports().unwrap().ports {
        assert!(!port.device.is_empty() && port.number > 0 && port.mtu >= 256, "{port:?}");
    }
}

#[test]
#[ignore = "needs an RDMA device: KVIK_TEST_VERBS=rxe0"]
fn a_port_says_what_it_is() {
    let verbs = Verbs::load(None).unwrap();
    for name in names() {
        let port = port(&verbs, &name);
        assert_eq!((port.number, port.state), (1, PortState::Active), "{port:?}");
        assert!(port.longest >= 1 << 20 && !port.gids.is_empty(), "{port:?}");
        let gid = port.choose_gid(Family::Any, None).unwrap();
        if port.link == Link::Ethernet {
            assert!(gid.ip().is_ipv4() && !gid.interface.is_empty(), "{gid} of {port:?}");
        }
        let error = port.choose_gid(Family::Any, Some(200)).unwrap_err().to_string();
        assert!(error.contains(&name) && error.contains(&gid.to_string()), "{error}");
        assert!(Device::open(&verbs, &port, 200).is_err());
    }
}

#[test]
#[ignore = "needs an RDMA device: KVIK_TEST_VERBS=rxe0"]
fn scattered_pages_are_written_and_read() {
    let (mut a, mut b) = pair(32);
    assert!(a.queue.max_pieces() >= 4, "{}", a.queue.max_pieces());
    // Each side has pages that say whose and which they are.
    for (side, mark) in [(&a, 0xA0u8), (&b, 0xB0)] {
        let bytes: Vec<u8> = (0..LEN).map(|at| mark ^ (at / PAGE * 7 + at) as u8).collect();
        side.memory.copy_in(0, &bytes).unwrap();
    }
    let (ours, theirs) = (a.bytes(), b.bytes());
    // Four pages from the first half here, in falling order, to a run in the first half there; and the other way about
    // in the second half.
    let (half, there) = (LEN / 2, b.known.clone());
    let runs = 8;
    for run in 0..runs {
        for (op, half) in [(RmaOp::Write, 0), (RmaOp::Read, half)] {
            let place = |piece| half + (runs * 4 - 1 - run * 4 - piece) * 2 * PAGE;
            let pieces: Vec<Piece<'_>> =
                (0..4).map(|piece| Piece { memory: &a.known, offset: place(piece), len: PAGE }).collect();
            let (remote, rkey) = (there.base() + (half + run * 4 * PAGE) as u64, there.rkey());
            let token = run as u64;
            let rma = Rma { op, pieces: &pieces, remote, rkey, token, immediate: None };
            assert_eq!(a.queue.post(&rma).unwrap(), Posted::Yes);
        }
    }
    assert_eq!((a.queue.waiting(), a.queue.under_way()), (2 * runs, 2 * runs));
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
fn there_is_never_more_under_way_than_the_depth() {
    let (mut a, b) = pair(16);
    let mut token = 0;
    for _ in 0..20 {
        while a.gather(RmaOp::Write, &b.known, token as usize % 64 * PAGE, PAGE, token) == Posted::Yes {
            token += 1;
            assert!(a.queue.under_way() <= 16);
        }
        assert_eq!((a.queue.room(), a.queue.under_way()), (0, 16));
        a.queue.flush().unwrap();
        let so_far = a.done.len();
        a.until("room", |side| side.queue.room() > 0);
        assert!(a.done.len() > so_far);
    }
    a.until("empty", |side| side.queue.under_way() == 0);
    assert_eq!(a.ended().len() as u64, token);
    assert!(a.ended().iter().all(|(_, result)| result.is_ok()), "{:?}", a.done);
}

#[test]
#[ignore = "needs an RDMA device: KVIK_TEST_VERBS=rxe0"]
fn every_token_comes_back_in_order_though_few_requests_ask() {
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
fn a_wrong_key_is_an_error_by_name_and_the_rest_is_flushed() {
    let (mut a, mut b) = pair(64);
    for token in 0..8 {
        let at = token as usize * PAGE;
        let pieces = [Piece { memory: &a.known, offset: at, len: PAGE }];
        let rkey = if token == 3 { b.known.rkey() ^ 0x5A5A } else { b.known.rkey() };
        let remote = b.known.base() + at as u64;
        let rma = Rma { op: RmaOp::Write, pieces: &pieces, remote, rkey, token, immediate: None };
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
    let rma = Rma { op: RmaOp::Write, pieces: &pieces, remote, rkey, token: 9, immediate: None };
    let error = a.queue.post(&rma).unwrap_err().to_string();
    assert!(error.contains("has failed"), "{error}");
    b.queue.fail().unwrap();
    b.until("drained", |side| side.queue.is_drained());
}

/// `a` writes all of `b`'s memory, again and again, until some of it has landed and much is under way.
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
    assert!(a.queue.under_way() > 0);
}

#[test]
#[ignore = "needs an RDMA device: KVIK_TEST_VERBS=rxe0"]
fn a_target_that_fails_its_queue_pair_gets_no_byte_more() {
    let (mut a, mut b) = pair(128);
    keep_writing(&mut a, &b);
    b.queue.fail().unwrap();
    // From here on the memory is somebody else's.
    b.fill(0xEE);
    let count = a.queue.under_way();
    a.until_ended(count);
    a.until("drained", |side| side.queue.is_drained());
    assert!(all_are(&b.bytes(), 0xEE), "late bytes of a write");
    let ended = a.ended();
    let lost = ended.iter().filter(|(_, result)| result.is_err()).count();
    assert!(lost > 0, "all {} writes had ended before: the test shows nothing", ended.len());
    let first = ended.iter().find_map(|(_, result)| result.clone().err()).unwrap();
    assert!(!first.is_flushed() && first.to_string().contains("did not answer"), "{first}");
    b.until("drained", |side| side.queue.is_drained());
    assert!(all_are(&b.bytes(), 0xEE));
}

#[test]
#[ignore = "needs an RDMA device: KVIK_TEST_VERBS=rxe0"]
fn an_initiator_that_fails_its_queue_pair_gets_back_all() {
    let (mut a, mut b) = pair(64);
    // A peer that answers nothing: all of it stays under way.
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
fn reads_of_a_drained_queue_pair_touch_memory_no_more() {
    let devices = devices();
    let options = QueueOptions { depth: 64, ..QueueOptions::default() };
    for _ in 0..5 {
        let (mut a, b) = connected(&devices, &options);
        let mut token = 0;
        while a.gather(RmaOp::Read, &b.known, 0, LEN, token) == Posted::Yes && token < 8 {
            token += 1;
        }
        a.queue.flush().unwrap();
        a.queue.fail().unwrap();
        a.until("drained", |side| side.queue.is_drained());
        a.fill(0xEE);
        // Other traffic of the device goes on, and passes what might still be on its way.
        let (mut c, d) = connected(&devices, &options);
        assert_eq!(c.gather(RmaOp::Write, &d.known, 0, LEN, 1), Posted::Yes);
        c.queue.flush().unwrap();
        c.until_ended(1);
        assert!(c.ended()[0].1.is_ok() && all_are(&a.bytes(), 0xEE) && all_are(&d.bytes(), 1));
    }
}

#[test]
#[ignore = "needs an RDMA device: KVIK_TEST_VERBS=rxe0"]
fn a_peer_that_is_gone_is_an_error_in_time() {
    let (mut a, b) = pair(16);
    let there = b.known.clone();
    drop(b.queue);
    let began = Instant::now();
    assert_eq!(a.gather(RmaOp::Write, &there, 0, PAGE, 0), Posted::Yes);
    a.queue.flush().unwrap();
    a.until_ended(1);
    let (took, error) = (began.elapsed(), a.ended()[0].1.clone().unwrap_err());
    assert!(error.to_string().contains("did not answer"), "{error}");
    assert!(took < Duration::from_secs(5), "{took:?}");
}

#[test]
#[ignore = "needs an RDMA device: KVIK_TEST_VERBS=rxe0"]
fn a_queue_pair_that_is_dropped_gives_back_its_requests() {
    let (mut a, b) = pair(64);
    keep_writing(&mut a, &b);
    let (count, device, queue) = (a.queue.under_way(), a.device.clone(), a.queue.id());
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
    assert!(weak.upgrade().is_none(), "memory stays known only while a request is under way");
}

#[test]
#[ignore = "needs an RDMA device: KVIK_TEST_VERBS=rxe0"]
fn immediates_tell_the_target_that_all_lies_there() {
    let options = QueueOptions { depth: 64, immediates: 8, ..QueueOptions::default() };
    let (mut a, mut b) = connected(&devices(), &options);
    for value in 0..40u32 {
        let pieces = [Piece { memory: &a.known, offset: value as usize * PAGE, len: PAGE }];
        let remote = b.known.base() + u64::from(value) * PAGE as u64;
        let (rkey, token) = (b.known.rkey(), value.into());
        // The last of them has no bytes at all.
        let pieces = if value == 39 { &pieces[..0] } else { &pieces[..] };
        let rma = Rma { op: RmaOp::Write, pieces, remote, rkey, token, immediate: Some(0xF0F0_0000 | value) };
        assert_eq!(a.queue.post(&rma).unwrap(), Posted::Yes);
        a.queue.flush().unwrap();
        b.until("told", |side| side.done.len() > value as usize);
        let place = value as usize * PAGE..(value as usize + 1) * PAGE;
        assert!(all_are(&b.bytes()[place], if value == 39 { 2 } else { 1 }), "{value}");
    }
    a.until_ended(40);
    let told: Vec<Completion> =
        (0..40).map(|n| Completion::Immediate { queue: b.queue.id(), value: 0xF0F0_0000 | n }).collect();
    assert_eq!(b.done, told);
}

#[test]
#[ignore = "needs an RDMA device: KVIK_TEST_VERBS=rxe0"]
fn a_descriptor_tells_of_completions() {
    let (mut a, b) = pair(16);
    let epoll = Epoll::new().unwrap();
    a.device.watch(&epoll, 5).unwrap();
    a.device.watch_events(&epoll, 6).unwrap();
    let mut events = Events::new(4);
    for round in 0..20 {
        assert!(a.device.may_wait().unwrap());
        epoll.wait(&mut events, Duration::ZERO).unwrap();
        assert!(events.is_empty(), "nothing has come: {events:?}");
        assert_eq!(a.gather(RmaOp::Write, &b.known, 0, PAGE, round), Posted::Yes);
        a.queue.flush().unwrap();
        // What came before it was asked for is there; else the descriptor tells.
        let began = Instant::now();
        while a.done.len() as u64 <= round {
            assert!(began.elapsed() < LIMIT, "no event told of the completion");
            if a.device.may_wait().unwrap() {
                epoll.wait(&mut events, LIMIT).unwrap();
                assert!(events.iter().all(|event| event.token == 5), "{events:?}");
            }
            a.poll();
        }
    }
}

#[test]
#[ignore = "needs an RDMA device: KVIK_TEST_VERBS=rxe0"]
fn what_no_device_should_see_is_not_posted() {
    let (mut a, b) = pair(16);
    let (remote, rkey) = (b.known.base(), b.known.rkey());
    let known = a.known.clone();
    let mut refused = |op, pieces: &[(usize, usize)], remote, immediate| {
        let pieces: Vec<Piece<'_>> =
            pieces.iter().map(|(offset, len)| Piece { memory: &known, offset: *offset, len: *len }).collect();
        a.queue.post(&Rma { op, pieces: &pieces, remote, rkey, token: 0, immediate }).unwrap_err()
    };
    let outside = refused(RmaOp::Write, &[(0, 64), (LEN - 10, 11)], remote, None);
    assert!(matches!(outside, HostError::OutOfBounds { .. }), "{outside}");
    assert!(refused(RmaOp::Write, &[(0, 64), (64, 0)], remote, None).to_string().contains("empty piece"));
    assert!(refused(RmaOp::Write, &[], remote, None).to_string().contains("0 pieces"));
    assert!(refused(RmaOp::Write, &[(0, 1); 99], remote, None).to_string().contains("99 pieces"));
    assert!(refused(RmaOp::Read, &[(0, 64)], remote, Some(1)).to_string().contains("immediate"));
    assert!(refused(RmaOp::Write, &[(0, 64)], u64::MAX - 3, None).to_string().contains("bytes at"));
    assert_eq!((a.queue.under_way(), a.queue.waiting()), (0, 0));
    // Another device's keys, though it may be the same port.
    let other = devices().0;
    let theirs = other.register(a.memory.clone(), BOTH).unwrap();
    let pieces = [Piece { memory: &theirs, offset: 0, len: 64 }];
    let rma = Rma { op: RmaOp::Write, pieces: &pieces, remote, rkey, token: 0, immediate: None };
    assert!(a.queue.post(&rma).unwrap_err().to_string().contains("another device"));
    let error = a.queue.connect(&b.queue.address()).unwrap_err().to_string();
    assert!(error.contains("once"), "{error}");
    let mut unconnected = Queue::open(&a.device, &QueueOptions::default()).unwrap();
    let pieces = [Piece { memory: &a.known, offset: 0, len: 64 }];
    let rma = Rma { op: RmaOp::Write, pieces: &pieces, remote, rkey, token: 0, immediate: None };
    assert!(unconnected.post(&rma).unwrap_err().to_string().contains("not connected"));
    unconnected.fail().unwrap();
    assert!(unconnected.is_drained());
    a.until("told", |side| side.done == [Completion::Drained { queue: unconnected.id() }]);
}

#[test]
#[ignore = "needs an RDMA device: KVIK_TEST_VERBS=rxe0"]
fn a_hundred_connections_leave_nothing_behind() {
    let devices = devices();
    let options = QueueOptions { depth: 1000, immediates: 100, ..QueueOptions::default() };
    let round = || {
        let (mut a, mut b) = connected(&devices, &options);
        assert_eq!(a.gather(RmaOp::Write, &b.known, 0, PAGE, 7), Posted::Yes);
        a.queue.flush().unwrap();
        a.until_ended(1);
        b.queue.fail().unwrap();
        b.until("drained", |side| side.queue.is_drained());
    };
    // Descriptors, and mappings that queue pairs have of the driver.
    let held = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let of_driver = maps.lines().filter(|line| line.contains("uverbs")).count();
        let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|file| {
            let target = std::fs::read_link(file.unwrap().path()).ok()?;
            target.to_string_lossy().contains("uverbs").then_some(())
        });
        (of_driver, descriptors.count())
    };
    round();
    let before = held();
    // Were places of the completion queue not given back, there would soon be none left.
    for _ in 0..100 {
        round();
    }
    assert_eq!(held(), before);
    assert_eq!((Rc::strong_count(&devices.0), Rc::strong_count(&devices.1)), (1, 1));
}

#[test]
#[ignore = "needs an RDMA device: KVIK_TEST_VERBS=rxe0"]
fn completions_of_queue_pairs_that_share_a_device_are_told_apart() {
    let devices = devices();
    let options = QueueOptions { depth: 16, ..QueueOptions::default() };
    let mut pairs: Vec<(Side, Side)> = (0..3).map(|_| connected(&devices, &options)).collect();
    for (number, (a, b)) in pairs.iter_mut().enumerate() {
        for token in 0..10 {
            // The second one's peer refuses the sixth.
            let at = if number == 1 && token == 5 { None } else { Some(token as usize * PAGE) };
            let (offset, remote) = (at.unwrap_or(0), b.known.base() + at.unwrap_or(LEN) as u64);
            let pieces = [Piece { memory: &a.known, offset, len: PAGE }];
            let rkey = b.known.rkey();
            let rma = Rma { op: RmaOp::Write, pieces: &pieces, remote, rkey, token, immediate: None };
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
            Completion::Request { queue, .. }
            | Completion::Immediate { queue, .. }
            | Completion::Drained { queue } => *queue == a.queue.id(),
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

/// Runs `ip link set`.
fn set_link(interface: &str, state: &str) {
    let ran = std::process::Command::new("ip").args(["link", "set", interface, state]).status().unwrap();
    assert!(ran.success(), "ip link set {interface} {state}: {ran}");
}

#[test]
#[ignore = "needs an RDMA device whose interface may go down: KVIK_TEST_VERBS_DOWN=rxe1"]
fn a_port_that_loses_its_link_is_an_event() {
    let name = std::env::var("KVIK_TEST_VERBS_DOWN").expect("KVIK_TEST_VERBS_DOWN names an RDMA device");
    let verbs = Verbs::load(None).unwrap();
    let port = port(&verbs, &name);
    let gid = port.choose_gid(Family::Any, None).unwrap();
    let device = Device::open(&verbs, &port, gid.index).unwrap();
    let epoll = Epoll::new().unwrap();
    device.watch_events(&epoll, 9).unwrap();
    let until = |wanted: Event| {
        let (mut told, mut events, began) = (Vec::new(), Events::new(4), Instant::now());
        while !told.contains(&wanted) {
            assert!(began.elapsed() < LIMIT, "never {wanted:?}, but {told:?}");
            epoll.wait(&mut events, LIMIT).unwrap();
            device.events(&mut told).unwrap();
        }
    };
    set_link(&gid.interface, "down");
    until(Event::PortDown { port: 1 });
    assert_eq!(self::port(&verbs, &name).state, PortState::Down);
    set_link(&gid.interface, "up");
    until(Event::PortUp { port: 1 });
    assert_eq!(self::port(&verbs, &name).state, PortState::Active);
}

#[test]
#[ignore = "needs an RDMA device: KVIK_TEST_VERBS=rxe0"]
fn any_gid_of_the_table_can_be_named() {
    let verbs = Verbs::load(None).unwrap();
    let port = port(&verbs, &names()[0]);
    assert!(port.gids.len() > 1, "one GID shows nothing: {port:?}");
    let options = QueueOptions { depth: 4, ..QueueOptions::default() };
    let mut first = None;
    for gid in &port.gids {
        let device = Device::open(&verbs, &port, gid.index).unwrap();
        assert_eq!(device.gid(), gid);
        let (mut a, b) = connected(&(device.clone(), device.clone()), &options);
        assert_eq!(a.queue.address().gid, gid.raw);
        assert_eq!(a.gather(RmaOp::Write, &b.known, 0, PAGE, 0), Posted::Yes);
        a.queue.flush().unwrap();
        a.until_ended(1);
        assert!(a.ended()[0].1.is_ok() && all_are(&b.bytes()[..PAGE], 1), "{gid}: {:?}", a.done);
        // A peer of another kind or family is refused by name.
        let (address, ip) = first.get_or_insert((a.queue.address(), gid.ip()));
        if ip.is_ipv4() != gid.ip().is_ipv4() {
            let error = Queue::open(&device, &options).unwrap().connect(address).unwrap_err().to_string();
            assert!(error.contains(&ip.to_string()) && error.contains(&gid.ip().to_string()), "{error}");
        }
    }
}
