//! The stand-in for libfabric on EFA (`tests/standins/fabric`), as kvik's own types see it: what later tests rest on.

#[path = "../../../../tests/standins/cuda/standin.rs"]
#[allow(dead_code)]
mod cuda;
mod faults;
mod gpus;
mod limits;
#[path = "../../../../tests/standins/make.rs"]
#[allow(dead_code)]
mod make;
#[path = "../common/peer.rs"]
mod peer;
mod processes;
mod rules;
#[path = "../common/said.rs"]
mod said;
mod side;
#[path = "../../../../tests/standins/standin.rs"]
#[allow(dead_code)]
mod standin;

use kvik_host::fabric::{Device, Endpoint, RmaOp};
use side::{LEN, Side, fabric, nics, pair, post_all, until};

/// Runs a test of this module's file in a process of its own.
macro_rules! alone {
    ($name:ident, $settings:expr, $body:expr) => {
        #[test]
        fn $name() {
            let module =
                module_path!().split_once("::").map_or(String::new(), |(_, path)| format!("{path}::"));
            crate::standin::Standin::Fabric.alone(
                &format!("{module}{}", stringify!($name)),
                &$settings,
                $body,
            );
        }
    };
}
pub(crate) use alone;

/// The device moves everything.
pub const DEVICE: (&str, &str) = ("KVIK_STANDIN_LOOPBACK", "device");

alone!(it_is_efa_and_nothing_else, [("KVIK_STANDIN_DEVICES", "3"), ("KVIK_STANDIN_DEPTH", "64")], |_| {
    let nics = nics();
    let names: Vec<String> = nics.iter().map(|nic| nic.name()).collect();
    assert_eq!(names, ["rdmap0s0-rdm", "rdmap1s0-rdm", "rdmap2s0-rdm"]);
    assert!(nics.iter().all(|nic| (nic.provider().as_str(), nic.depth()) == ("efa", 64)));
    for other in ["tcp", "verbs", "efa;ofi_rxd", "no-such-provider"] {
        assert!(fabric().nics(other, None).unwrap().is_empty(), "{other}");
    }
    // Its addresses are none of the internet, so one of those says nothing about them.
    assert_eq!(fabric().nics("efa", Some("127.0.0.1")).unwrap().len(), 3);
    let mut side = Side::new(&nics[1], 1, 64);
    assert_eq!(side.endpoint.address().unwrap().len(), 32);
});

alone!(a_library_that_cannot_forbid_shared_memory_is_refused, [("KVIK_STANDIN_OLD", "1")], |_| {
    let device = Device::open(&nics()[0]).unwrap();
    let refused = Endpoint::open(&device, 64).err().unwrap().to_string();
    for word in ["shared memory", "1.21", "FI_EFA_ENABLE_SHM_TRANSFER=0"] {
        assert!(refused.contains(word), "{refused}");
    }
});

/// What libfabric was told by its environment holds for every endpoint.
const NO_SHM: (&str, &str) = ("FI_EFA_ENABLE_SHM_TRANSFER", "0");

alone!(an_old_library_that_was_told_by_its_environment_is_taken, [("KVIK_STANDIN_OLD", "1"), NO_SHM], |_| {
    moves_bytes();
});

alone!(it_has_no_descriptor_to_wait_for, [], |_| {
    let mut side = Side::new(&nics()[0], 1, 64);
    let epoll = kvik_host::event::Epoll::new().unwrap().into();
    assert!(!side.endpoint.watch(&epoll, 1).unwrap() && !side.endpoint.may_wait());
});

/// Every other piece is written, and those between are read.
fn moves_bytes() {
    let (mut a, mut b, slot) = pair(&nics()[0], 64);
    let piece = 24 << 10;
    let pieces: Vec<usize> = (0..LEN / piece).collect();
    for number in &pieces {
        let op = if number % 2 == 0 { RmaOp::Write } else { RmaOp::Read };
        post_all(&mut a, &b.known, slot, op, [(number * piece, piece, *number as u64)]);
    }
    until(&mut a, pieces.len());
    let mut tokens = a.tokens();
    tokens.sort_unstable();
    assert_eq!(tokens, pieces.iter().map(|piece| *piece as u64).collect::<Vec<_>>());
    assert!(a.done.iter().all(|done| done.result.is_ok()), "{:?}", a.done);
    let (ours, theirs) = (a.bytes(), b.bytes());
    for number in pieces {
        let (range, value) = (number * piece..(number + 1) * piece, if number % 2 == 0 { 1 } else { 2 });
        assert!(ours[range.clone()].iter().all(|byte| *byte == value), "piece {number} here");
        assert!(theirs[range].iter().all(|byte| *byte == value), "piece {number} there");
    }
    b.endpoint.poll(&mut b.done).unwrap();
    assert!(b.done.is_empty());
}

alone!(the_device_moves_bytes_both_ways, [DEVICE], |mut control| {
    moves_bytes();
    let counts = control.counts();
    assert_eq!((counts["software"], counts["orphans"], counts["failed"]), (0, 0, 0), "{counts:?}");
    assert!(counts["bytes"] > 1_000_000, "{counts:?}");
});

alone!(within_a_process_and_device_the_software_moves_bytes, [], |mut control| {
    moves_bytes();
    let counts = control.counts();
    assert!(counts["software"] > 40 && counts["begun"] == 0, "{counts:?}");
});

alone!(the_software_stops_with_either_endpoint, [], |_| {
    let (mut a, mut b, slot) = pair(&nics()[0], 64);
    post_all(&mut a, &b.known, slot, RmaOp::Write, [(0, LEN, 0)]);
    let mut done = Vec::new();
    a.endpoint.poll(&mut done).unwrap();
    assert!(done.is_empty() && b.landed(1) > 0);
    // The one that is reached.
    b.endpoint = Endpoint::open(&b.device, 64).unwrap();
    let landed = b.landed(1);
    until(&mut a, 1);
    assert!(a.done.remove(0).result.unwrap_err().to_string().contains("closed"));
    assert!(landed < LEN && b.landed(1) == landed);
    // The one that posts.
    let slot = a.endpoint.add_peer(&b.endpoint.address().unwrap()).unwrap();
    post_all(&mut a, &b.known, slot, RmaOp::Read, [(0, LEN, 0)]);
    a.endpoint.poll(&mut done).unwrap();
    a.endpoint = Endpoint::open(&a.device, 64).unwrap();
    let landed = a.landed(2);
    a.endpoint.poll(&mut done).unwrap();
    assert!(done.is_empty() && a.landed(2) == landed && landed < LEN);
});

alone!(completions_come_in_another_order, [DEVICE, ("KVIK_STANDIN_SEED", "7")], |mut control| {
    let (mut a, b, slot) = pair(&nics()[0], 64);
    // The device has all of them in flight before it may move any: how fast they are posted says nothing.
    control.say("delay micros=60000000");
    post_all(&mut a, &b.known, slot, RmaOp::Write, (0..64).map(|n| (n << 14, 1 << 14, n as u64)));
    side::wait("an operation", || control.counts()["in_flight"] == 64);
    control.say("clear");
    until(&mut a, 64);
    let tokens = a.tokens();
    let moved = tokens.iter().enumerate().filter(|(at, token)| *at as u64 != **token).count();
    assert!(moved > 32, "{tokens:?}");
});

alone!(bytes_land_in_pieces_and_in_any_order, [DEVICE, ("KVIK_STANDIN_SEED", "7")], |mut control| {
    let (mut a, b, slot) = pair(&nics()[0], 64);
    control.say("delay micros=3000");
    post_all(&mut a, &b.known, slot, RmaOp::Write, [(0, LEN, 0)]);
    // Somewhere a piece is there whose neighbour before is not.
    side::wait("a hole", || {
        let bytes = b.bytes();
        bytes.windows(2).any(|two| two == [2, 1]) && bytes.windows(2).any(|two| two == [1, 2])
    });
    control.say("clear");
    until(&mut a, 1);
    assert_eq!(b.landed(1), LEN);
});
