//! The local link against a peer that is played by hand over a UNIX socket.

use kvik_core::{Code, RegionId};
use kvik_host::unix::{Received, UnixConn};
use kvik_host::{FenceTable, HugePages, Memory};
use kvik_transport::RegionMemory;
use kvik_transport::local::{LocalLink, PeerRegion};
use rustix::fs::{MemfdFlags, SealFlags};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

#[path = "../../../tests/common/watch.rs"]
mod watch;

static GO: AtomicBool = AtomicBool::new(false);
const SIZE: usize = 1 << 16;
const PATIENCE: Duration = Duration::from_secs(60);
/// Less than the second in which a peer's next word may come.
const AT_ONCE: Duration = Duration::from_millis(900);

fn link() -> (LocalLink, UnixConn) {
    let (mine, theirs) = UnixConn::pair().unwrap();
    (LocalLink::new(mine, FenceTable::new(64).unwrap(), 0, [7; 32], || ()), theirs)
}

fn message(kind: u8, region: u32, addr: u64, len: u64) -> [u8; 64] {
    let mut bytes = [0; 64];
    bytes[0] = kind;
    bytes[4..8].copy_from_slice(&region.to_le_bytes());
    bytes[8..16].copy_from_slice(&addr.to_le_bytes());
    bytes[16..24].copy_from_slice(&len.to_le_bytes());
    bytes
}

fn say(conn: &UnixConn, bytes: &[u8], fd: Option<BorrowedFd<'_>>) {
    conn.send_within(bytes, fd.as_slice(), PATIENCE).unwrap();
}

fn hear(conn: &UnixConn) -> ([u8; 64], Received) {
    let mut bytes = [0; 64];
    let received = conn.recv_within(&mut bytes, 1, PATIENCE).unwrap().unwrap();
    (bytes, received)
}

fn memfd(len: u64, seals: SealFlags) -> OwnedFd {
    let fd = rustix::fs::memfd_create("kvik-test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&fd, len).unwrap();
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    fd
}

#[test]
fn memory_without_its_seals_or_of_another_size_is_refused() {
    let all = SealFlags::FUTURE_WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    let (link, peer) = link();
    say(&peer, &message(1, 0, 0, 0), Some(FenceTable::new(64).unwrap().fd()));
    let mut id = 0;
    for missing in [all, SealFlags::SHRINK, SealFlags::GROW, SealFlags::SEAL, SealFlags::FUTURE_WRITE] {
        let fd = memfd(SIZE as u64, all.difference(missing));
        id += 1;
        say(&peer, &message(2, id, 0, SIZE as u64), Some(fd.as_fd()));
    }
    for len in [SIZE as u64 - 1, SIZE as u64 + 1, 0, 1 << 40, u64::MAX] {
        id += 1;
        say(&peer, &message(2, id, 0, len), Some(memfd(SIZE as u64, all).as_fd()));
    }
    id += 1;
    say(&peer, &message(2, id, 0, SIZE as u64), Some(std::fs::File::open("/dev/null").unwrap().as_fd()));
    link.receive().unwrap();
    for id in 1..=id {
        let refused = link.region(RegionId(id), &GO).unwrap_err();
        assert_eq!(refused.code, Code::SealMissing, "region {id}: {refused}");
    }
    say(&peer, &message(2, 99, 0, SIZE as u64), Some(memfd(SIZE as u64, all).as_fd()));
    link.receive().unwrap();
    assert_eq!(link.region(RegionId(99), &GO).unwrap().mechanism(), "memfd");
}

#[test]
fn a_fence_without_its_seals_or_nonsense_ends_the_link() {
    for (bytes, fd) in [
        (message(1, 0, 0, 0), Some(memfd(4096, SealFlags::empty()))),
        (message(1, 0, 0, 0), None),
        (message(9, 0, 0, 0), None),
    ] {
        let (link, peer) = link();
        say(&peer, &bytes, fd.as_ref().map(AsFd::as_fd));
        assert!(link.receive().is_err());
    }
    let (link, peer) = link();
    say(&peer, &[1; 63], None);
    assert_eq!(link.receive().unwrap_err().code, Code::ProtocolError);
}

#[test]
fn memory_of_a_process_that_was_not_proven_is_refused() {
    let (link, peer) = link();
    say(&peer, &message(2, 1, 4096, 4096), None);
    say(&peer, &message(1, 0, 0, 0), Some(FenceTable::new(64).unwrap().fd()));
    say(&peer, &message(2, 2, 4096, 4096), None);
    link.receive().unwrap();
    assert_eq!(link.region(RegionId(1), &GO).unwrap_err().code, Code::ProtocolError);
    assert_eq!(link.region(RegionId(2), &GO).unwrap_err().code, Code::TransportUnavailable);
}

#[test]
fn a_copy_that_waits_for_a_region_leaves_when_it_must_stop() {
    let (link, _peer) = link();
    let stop = Arc::new(AtomicBool::new(true));
    let began = watch::start();
    assert_eq!(link.region(RegionId(1), &stop).unwrap_err().code, Code::TransportUnavailable);
    assert!(began.elapsed() < AT_ONCE, "{:?}", began.elapsed());
    // What ends the link is the reason, and not that something was never shown.
    link.cut();
    let began = watch::start();
    assert_eq!(link.fence(&GO).unwrap_err().code, Code::PeerLost);
    assert_eq!(link.region(RegionId(1), &GO).unwrap_err().code, Code::PeerLost);
    assert!(began.elapsed() < AT_ONCE, "{:?}", began.elapsed());
}

/// A thread registers it while another one joins the session: both show it.
#[test]
fn a_region_that_two_show_at_once_is_shown_once_and_taken_back_once() {
    let (link, peer) = link();
    let memory = RegionMemory::from(Memory::shared(SIZE, HugePages::Never).unwrap());
    link.flush().unwrap();
    assert_eq!(hear(&peer).0[0], 1, "the fence table");
    let twice = |id| (0..2).for_each(|_| link.share(RegionId(id), &memory, None));
    twice(1);
    link.unshare(RegionId(1));
    twice(2);
    link.flush().unwrap();
    let ids = |bytes: [u8; 64]| (bytes[0], bytes[4]);
    assert_eq!(ids(hear(&peer).0), (2, 2), "the first one was taken back before it went");
    link.unshare(RegionId(2));
    link.share(RegionId(2), &memory, None);
    link.flush().unwrap();
    assert_eq!([ids(hear(&peer).0), ids(hear(&peer).0)], [(3, 2), (2, 2)]);
}

#[test]
fn what_the_peer_does_not_read_keeps_no_memory_and_does_not_pile_up() {
    let (link, peer) = link();
    // The peer reads nothing until the socket is full.
    let held = RegionMemory::from(Memory::shared(SIZE, HugePages::Never).unwrap());
    let mut id = 0;
    loop {
        id += 1;
        link.share(RegionId(id), &held, None);
        if !link.flush().unwrap() {
            break;
        }
        assert!(id < 100_000, "the socket takes everything");
    }
    let shown = id;
    for _ in 0..1000 {
        id += 1;
        let memory = RegionMemory::from(Memory::shared(4096, HugePages::Never).unwrap());
        link.share(RegionId(id), &memory, None);
        let weak = memory.downgrade();
        drop(memory);
        assert!(weak.upgrade().is_none(), "a region could not be closed before the peer reads");
        if id % 2 == 0 {
            link.unshare(RegionId(id));
        }
    }
    // Now it reads: what came and went meanwhile, it never hears of.
    let mut last = 0;
    let mut left = true;
    while left {
        left = !link.flush().unwrap();
        let mut bytes = [0; 64];
        while let kvik_host::Io::Done(message) = peer.recv_with_fds(&mut bytes, 1).unwrap() {
            assert_eq!((message.len, message.fds.len()), (64, 1));
            last = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
        }
    }
    assert_eq!(last, shown);
    link.unshare(RegionId(1));
    assert!(link.flush().unwrap());
    let (bytes, received) = hear(&peer);
    assert_eq!((bytes[0], received.fds.len()), (3, 0));
}

/// A region on a GPU, as a peer shows it.
fn on_gpu(region: u32, showing: u64) -> [u8; 128] {
    let mut bytes = [0x5A; 128];
    bytes[..64].copy_from_slice(&message(4, region, showing, 0));
    bytes
}

#[test]
fn a_region_on_a_gpu_is_refused_without_cuda_and_the_peer_hears_nothing_of_it() {
    let (link, peer) = link();
    assert!(link.flush().unwrap());
    let (hello, _) = hear(&peer);
    assert_eq!((hello[0], hello[4]), (1, 1), "it does not say that it understands GPUs");
    for (region, showing) in [(1, 77), (2, u64::MAX), (1, 78)] {
        say(&peer, &on_gpu(region, showing), None);
    }
    link.receive().unwrap();
    let region = link.region(RegionId(1), &GO).unwrap();
    assert_eq!(
        (region.mechanism(), link.mechanism_of(RegionId(2))),
        ("device memory", Some("device memory"))
    );
    let PeerRegion::Device(device) = &*region else { panic!("{region:?}") };
    let refused = device.open(&link, &GO).unwrap_err();
    assert_eq!(refused.code, Code::TransportUnavailable, "{refused}");
    assert!(refused.text.contains("region 1 lies on a GPU") && refused.text.contains("does not use CUDA"));
    say(&peer, &message(3, 1, 0, 0), None);
    say(&peer, &message(3, 2, 0, 0), None);
    link.receive().unwrap();
    drop(region);
    // It was not going to be opened, so there is nothing to close.
    assert!(link.flush().unwrap());
    assert!(matches!(peer.recv_with_fds(&mut [0; 64], 1).unwrap(), kvik_host::Io::Blocked));
}

#[test]
fn nonsense_about_gpus_ends_the_link_or_means_nothing() {
    let long = on_gpu(1, 1);
    let short = message(4, 1, 0, 0);
    let mut padded = [0; 128];
    padded[..64].copy_from_slice(&message(3, 1, 0, 0));
    for bytes in [&long[..127], &short[..], &padded[..]] {
        let (link, peer) = link();
        say(&peer, bytes, None);
        assert_eq!(link.receive().unwrap_err().code, Code::ProtocolError);
    }
    for bytes in [&long[..], &message(5, 1, 0, 0), &message(6, 1, 0, 0), &message(7, 1, 0, 0)] {
        let (link, peer) = link();
        say(&peer, bytes, Some(FenceTable::new(64).unwrap().fd()));
        assert_eq!(link.receive().unwrap_err().code, Code::ProtocolError);
    }
    // What was never shown is not held, and what was not open is not closed.
    let (link, peer) = link();
    assert!(link.flush().unwrap());
    hear(&peer);
    for kind in [5, 6, 7] {
        for number in [0, 1, u64::MAX] {
            say(&peer, &message(kind, 1, number, 0), None);
            link.receive().unwrap();
        }
    }
    assert!(link.flush().unwrap());
    assert!(matches!(peer.recv_with_fds(&mut [0; 64], 1).unwrap(), kvik_host::Io::Blocked));
}
