//! libfabric, as this host has it: endpoints of one process that read and write each other's memory, over every
//! provider that needs no device. The library is a Debian package that the build installs.

use kvik_host::event::{Epoll, Events};
use kvik_host::fabric::{Device, Endpoint, Fabric, FabricError, Nic, Posted, Registration, Rma, RmaOp, Slot};
use kvik_host::rma::Completion;
use kvik_host::{HugePages, Memory};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(60);
const LEN: usize = 1 << 20;

fn fabric() -> Arc<Fabric> {
    Fabric::load(None).unwrap()
}

/// The NIC to test a provider on: loopback, where there is a choice.
fn nic(provider: &str) -> Arc<Nic> {
    let source = (provider != "shm").then_some("127.0.0.1");
    let nics = fabric().nics(provider, source).unwrap();
    Arc::new(nics.into_iter().next().unwrap_or_else(|| panic!("libfabric has no {provider}")))
}

struct Side {
    endpoint: Endpoint,
    memory: Arc<Memory>,
    known: Rc<Registration>,
    done: Vec<Completion<FabricError>>,
}

impl Side {
    fn new(nic: &Arc<Nic>, fill: u8) -> Side {
        let device = Device::open(nic).unwrap();
        let endpoint = Endpoint::open(&device, 64).unwrap();
        let memory = Arc::new(Memory::shared(LEN, HugePages::Never).unwrap());
        memory.copy_in(0, &vec![fill; LEN]).unwrap();
        let known = device.register(memory.clone(), true).unwrap();
        Side { endpoint, memory, known, done: Vec::new() }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; LEN];
        self.memory.copy_out(0, &mut bytes).unwrap();
        bytes
    }
}

/// Two endpoints that know each other, as `a`'s slot for `b`.
fn pair(provider: &str) -> (Side, Side, Slot) {
    let nic = nic(provider);
    let (mut a, mut b) = (Side::new(&nic, 1), Side::new(&nic, 2));
    let slot = a.endpoint.add_peer(&b.endpoint.address().unwrap()).unwrap();
    b.endpoint.add_peer(&a.endpoint.address().unwrap()).unwrap();
    (a, b, slot)
}

/// Both sides work until `a` has as many completions.
fn until(a: &mut Side, b: &mut Side, count: usize) {
    let began = Instant::now();
    while a.done.len() < count {
        assert!(began.elapsed() < LIMIT, "{} of {count} completions", a.done.len());
        a.endpoint.poll(&mut a.done).unwrap();
        b.endpoint.poll(&mut b.done).unwrap();
    }
}

/// Posts it as soon as there is room: a provider may first have to connect.
fn post(a: &mut Side, b: &mut Side, order: &Rma<'_>) {
    let began = Instant::now();
    while a.endpoint.post(order).unwrap() == Posted::Full {
        assert!(began.elapsed() < LIMIT, "never room");
        a.endpoint.poll(&mut a.done).unwrap();
        b.endpoint.poll(&mut b.done).unwrap();
    }
}

fn rma<'a>(
    op: RmaOp,
    (here, there): (&'a Rc<Registration>, &Registration),
    peer: Slot,
    (from, len): (usize, usize),
    token: u64,
) -> Rma<'a> {
    let (remote, key) = (there.base() + from as u64, there.key());
    Rma { op, memory: here, offset: from, len, peer, remote, key, token }
}

fn moves_bytes(provider: &str) {
    let (mut a, mut b, slot) = pair(provider);
    let (here, there) = (a.known.clone(), b.known.clone());
    // Every other piece is written there, and those between are read from there.
    let piece = 24 << 10;
    let pieces: Vec<usize> = (0..LEN / piece).collect();
    for number in &pieces {
        let op = if number % 2 == 0 { RmaOp::Write } else { RmaOp::Read };
        let order = rma(op, (&here, &there), slot, (number * piece, piece), *number as u64);
        post(&mut a, &mut b, &order);
    }
    until(&mut a, &mut b, pieces.len());
    let mut tokens: Vec<u64> = a.done.iter().map(|done| done.token).collect();
    tokens.sort_unstable();
    assert_eq!(tokens, pieces.iter().map(|piece| *piece as u64).collect::<Vec<_>>());
    assert!(a.done.iter().all(|done| done.result.is_ok()), "{:?}", a.done);
    assert_eq!(a.endpoint.in_flight(), 0);
    let (ours, theirs) = (a.bytes(), b.bytes());
    for number in pieces {
        let range = number * piece..(number + 1) * piece;
        let expected = if number % 2 == 0 { 1 } else { 2 };
        assert!(ours[range.clone()].iter().all(|byte| *byte == expected), "piece {number} here");
        assert!(theirs[range].iter().all(|byte| *byte == expected), "piece {number} there");
    }
}

#[test]
fn tcp_moves_bytes_both_ways() {
    moves_bytes("tcp");
}

#[test]
fn shm_moves_bytes_both_ways() {
    moves_bytes("shm");
}

#[test]
fn the_library_says_where_it_came_from_and_its_version() {
    let fabric = fabric();
    assert!(fabric.path().is_absolute() && fabric.path().exists(), "{}", fabric.path().display());
    assert!(fabric.version() >= (1, 14));
}

/// Software that moves bytes of the host is asked for GPUs all the same, and says no without being lost.
#[test]
fn a_provider_of_software_knows_no_gpus_and_says_why() {
    for provider in ["tcp", "shm"] {
        let device = Device::open(&nic(provider)).unwrap();
        let why = device.gpus().unwrap_err();
        println!("{provider}: {why}");
        let old = fabric().version() < (1, 20);
        let words = if old { ["1.20"].as_slice() } else { ["FI_HMEM", "by CUDA", "no CUDA"].as_slice() };
        assert!(words.iter().any(|word| why.contains(word)), "{provider}: {why}");
    }
}

#[test]
fn a_provider_that_is_not_there_has_no_nics() {
    assert!(fabric().nics("efa", None).unwrap().is_empty());
    assert!(fabric().nics("no-such-provider", None).unwrap().is_empty());
}

#[test]
fn there_is_never_more_in_flight_than_was_asked_for() {
    let (mut a, mut b, slot) = pair("tcp");
    let (here, there) = (a.known.clone(), b.known.clone());
    let first = rma(RmaOp::Write, (&here, &there), slot, (0, 64), 0);
    post(&mut a, &mut b, &first);
    until(&mut a, &mut b, 1);
    let mut posted = 0;
    while a
        .endpoint
        .post(&rma(RmaOp::Write, (&here, &there), slot, (posted * 64, 64), posted as u64))
        .unwrap()
        == Posted::Yes
    {
        posted += 1;
        assert!(posted <= 64);
    }
    assert!(posted > 0 && a.endpoint.in_flight() == posted);
    until(&mut a, &mut b, 1 + posted);
    assert_eq!((a.endpoint.in_flight(), a.endpoint.room()), (0, 64));
}

#[test]
fn a_wrong_key_is_an_error_of_that_operation() {
    let (mut a, mut b, slot) = pair("tcp");
    let (here, there) = (a.known.clone(), b.known.clone());
    let mut order = rma(RmaOp::Write, (&here, &there), slot, (0, 4096), 7);
    order.key ^= 0x5A5A;
    post(&mut a, &mut b, &order);
    until(&mut a, &mut b, 1);
    assert_eq!(a.done[0].token, 7);
    let error = a.done[0].result.clone().unwrap_err();
    assert!(error.to_string().contains("operation"), "{error}");
    assert!(b.bytes().iter().all(|byte| *byte == 2), "nothing was written");
}

#[test]
fn what_lies_outside_registered_memory_is_not_posted() {
    let (mut a, b, slot) = pair("tcp");
    let (here, there) = (a.known.clone(), b.known.clone());
    let order = rma(RmaOp::Write, (&here, &there), slot, (LEN - 10, 11), 0);
    a.endpoint.post(&order).unwrap_err();
    assert_eq!(a.endpoint.in_flight(), 0);
}

#[test]
fn memory_with_operations_in_flight_stays_registered() {
    let (mut a, mut b, slot) = pair("tcp");
    let (here, there) = (a.known.clone(), b.known.clone());
    post(&mut a, &mut b, &rma(RmaOp::Read, (&here, &there), slot, (0, LEN), 0));
    // Held by the operation alone.
    let weak = Rc::downgrade(&here);
    a.known = there;
    drop(here);
    assert!(weak.upgrade().is_some());
    until(&mut a, &mut b, 1);
    assert!(weak.upgrade().is_none());
}

#[test]
fn a_descriptor_tells_of_completions_where_the_provider_has_one() {
    let (mut a, mut b, slot) = pair("tcp");
    let (here, there) = (a.known.clone(), b.known.clone());
    let epoll = Rc::new(Epoll::new().unwrap());
    assert!(a.endpoint.watch(&epoll, 5).unwrap());
    let order = rma(RmaOp::Write, (&here, &there), slot, (0, 4096), 0);
    post(&mut a, &mut b, &order);
    let (began, mut events) = (Instant::now(), Events::new(4));
    while a.done.is_empty() {
        assert!(began.elapsed() < LIMIT, "no event told of the completion");
        b.endpoint.poll(&mut b.done).unwrap();
        if a.endpoint.may_wait() {
            epoll.wait(&mut events, Duration::from_millis(1)).unwrap();
        }
        a.endpoint.poll(&mut a.done).unwrap();
    }
    let (mut c, _, _) = pair("shm");
    assert!(!c.endpoint.watch(&epoll, 6).unwrap());
    assert!(!c.endpoint.may_wait());
}

/// A forked child holds a copy of each descriptor until it ends, or begins a program of its own.
#[test]
fn an_endpoint_that_is_closed_wakes_nobody_though_a_child_holds_its_descriptor() {
    let (epoll, mut side) = (Rc::new(Epoll::new().unwrap()), Side::new(&nic("tcp"), 1));
    let watched = || {
        let text =
            std::fs::read_to_string(format!("/proc/self/fdinfo/{}", epoll.as_fd().as_raw_fd())).unwrap();
        let fds = text
            .lines()
            .filter_map(|line| line.strip_prefix("tfd:")?.split_whitespace().next()?.parse().ok());
        fds.collect::<Vec<i32>>()
    };
    assert!(side.endpoint.watch(&epoll, 5).unwrap());
    let [fd] = watched()[..] else { panic!("one descriptor is watched: {:?}", watched()) };
    // SAFETY: the endpoint has it open.
    let copy = unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned().unwrap();
    side.endpoint.close().unwrap();
    assert!(watched().is_empty(), "{copy:?} still wakes whoever waits");
}

#[test]
fn an_endpoint_that_is_closed_ends_what_it_had_in_flight() {
    let (mut a, mut b, slot) = pair("tcp");
    let (here, there) = (a.known.clone(), b.known.clone());
    let order = rma(RmaOp::Read, (&here, &there), slot, (0, LEN), 0);
    post(&mut a, &mut b, &order);
    // The other side does not move, so nothing has come yet.
    drop(a.endpoint);
    for _ in 0..1000 {
        b.endpoint.poll(&mut b.done).unwrap();
    }
    a.endpoint = Endpoint::open(&Device::open(&nic("tcp")).unwrap(), 64).unwrap();
    assert_eq!(a.endpoint.in_flight(), 0);
    let bytes = a.bytes();
    let landed = bytes.iter().filter(|byte| **byte == 2).count();
    for _ in 0..1000 {
        b.endpoint.poll(&mut b.done).unwrap();
        a.endpoint.poll(&mut a.done).unwrap();
    }
    assert_eq!(a.bytes(), bytes, "{landed} bytes had landed, and more came");
}
