//! libfabric, as this host has it: endpoints of one process that read and write each other's memory, over every
//! provider that needs no device. The library is a Debian package that the build installs.

use kvik_host::fabric::{Completion, Endpoint, Fabric, Nic, Posted, Registered, Rma, RmaOp, Slot};
use kvik_host::{HugePages, Memory};
use std::sync::Arc;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(20);
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
    known: Registered,
    done: Vec<Completion>,
}

impl Side {
    fn new(nic: &Arc<Nic>, fill: u8) -> Side {
        let mut endpoint = Endpoint::open(nic, 64).unwrap();
        let memory = Arc::new(Memory::shared(LEN, HugePages::Never).unwrap());
        memory.copy_in(0, &vec![fill; LEN]).unwrap();
        let known = endpoint.register(memory.clone(), true).unwrap();
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
fn post(a: &mut Side, b: &mut Side, order: &Rma) {
    let began = Instant::now();
    while a.endpoint.post(order).unwrap() == Posted::Full {
        assert!(began.elapsed() < LIMIT, "never room");
        a.endpoint.poll(&mut a.done).unwrap();
        b.endpoint.poll(&mut b.done).unwrap();
    }
}

fn rma(op: RmaOp, a: &Side, b: &Side, peer: Slot, (from, len): (usize, usize), token: u64) -> Rma {
    Rma {
        op,
        memory: a.known.id,
        offset: from,
        len,
        peer,
        remote: b.known.base + from as u64,
        key: b.known.key,
        token,
    }
}

fn moves_bytes(provider: &str) {
    let (mut a, mut b, slot) = pair(provider);
    // Every other piece is written there, and those between are read from there.
    let piece = 24 << 10;
    let pieces: Vec<usize> = (0..LEN / piece).collect();
    for number in &pieces {
        let op = if number % 2 == 0 { RmaOp::Write } else { RmaOp::Read };
        let order = rma(op, &a, &b, slot, (number * piece, piece), *number as u64);
        post(&mut a, &mut b, &order);
    }
    until(&mut a, &mut b, pieces.len());
    let mut tokens: Vec<u64> = a.done.iter().map(|done| done.token).collect();
    tokens.sort_unstable();
    assert_eq!(tokens, pieces.iter().map(|piece| *piece as u64).collect::<Vec<_>>());
    assert!(a.done.iter().all(|done| done.result.is_ok()), "{:?}", a.done);
    assert_eq!(a.endpoint.under_way(), 0);
    let (here, there) = (a.bytes(), b.bytes());
    for number in pieces {
        let range = number * piece..(number + 1) * piece;
        let expected = if number % 2 == 0 { 1 } else { 2 };
        assert!(here[range.clone()].iter().all(|byte| *byte == expected), "piece {number} here");
        assert!(there[range].iter().all(|byte| *byte == expected), "piece {number} there");
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

#[test]
fn a_provider_that_is_not_there_has_no_nics() {
    assert!(fabric().nics("efa", None).unwrap().is_empty());
    assert!(fabric().nics("no-such-provider", None).unwrap().is_empty());
}

#[test]
fn there_is_never_more_under_way_than_was_asked_for() {
    let (mut a, mut b, slot) = pair("tcp");
    let first = rma(RmaOp::Write, &a, &b, slot, (0, 64), 0);
    post(&mut a, &mut b, &first);
    until(&mut a, &mut b, 1);
    let mut posted = 0;
    while a.endpoint.post(&rma(RmaOp::Write, &a, &b, slot, (posted * 64, 64), posted as u64)).unwrap()
        == Posted::Yes
    {
        posted += 1;
        assert!(posted <= 64);
    }
    assert!(posted > 0 && a.endpoint.under_way() == posted);
    until(&mut a, &mut b, 1 + posted);
    assert_eq!((a.endpoint.under_way(), a.endpoint.room()), (0, 64));
}

#[test]
fn a_wrong_key_is_an_error_of_that_operation() {
    let (mut a, mut b, slot) = pair("tcp");
    let mut order = rma(RmaOp::Write, &a, &b, slot, (0, 4096), 7);
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
    let order = rma(RmaOp::Write, &a, &b, slot, (LEN - 10, 11), 0);
    a.endpoint.post(&order).unwrap_err();
    a.endpoint.post(&Rma { memory: 99, ..rma(RmaOp::Read, &a, &b, slot, (0, 10), 0) }).unwrap_err();
    assert_eq!(a.endpoint.under_way(), 0);
}

#[test]
fn memory_with_operations_under_way_stays_registered() {
    let (mut a, mut b, slot) = pair("tcp");
    let order = rma(RmaOp::Read, &a, &b, slot, (0, LEN), 0);
    post(&mut a, &mut b, &order);
    let id = a.known.id;
    a.endpoint.unregister(id).unwrap_err();
    until(&mut a, &mut b, 1);
    a.endpoint.unregister(id).unwrap();
    a.endpoint.post(&rma(RmaOp::Read, &a, &b, slot, (0, 1), 0)).unwrap_err();
}

#[test]
fn a_descriptor_tells_of_completions_where_the_provider_has_one() {
    let (mut a, mut b, slot) = pair("tcp");
    assert!(a.endpoint.wait_fd().unwrap().is_some());
    let order = rma(RmaOp::Write, &a, &b, slot, (0, LEN), 0);
    post(&mut a, &mut b, &order);
    until(&mut a, &mut b, 1);
    assert!(a.endpoint.may_wait());
    let (mut c, _, _) = pair("shm");
    assert_eq!(c.endpoint.wait_fd().unwrap(), None);
    assert!(!c.endpoint.may_wait());
}
