//! No descriptor of kvik reaches a program that the process starts. One test only, so that nothing else in this
//! program opens descriptors meanwhile.

use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::process::Command;
use std::time::Duration;

use kvik_host::event::{Epoll, EventFd, Interest, wait_ready};
use kvik_host::socket::{TcpConn, TcpListener, TcpOptions};
use kvik_host::unix::{UnixConn, UnixListener};
use kvik_host::{FenceTable, HugePages, Memory, PeerFence, PeerMemory, ProcessMemory};

const BOUND: Duration = Duration::from_secs(60);

/// What a started program finds open, but for its own pipes and the directory that it reads.
fn inherited() -> BTreeSet<String> {
    let output = Command::new("ls").args(["-l", "/proc/self/fd"]).output().unwrap();
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    let targets =
        text.lines().filter_map(|line| line.split_once(" -> ")).map(|(_, target)| target.to_string());
    targets.filter(|target| !target.starts_with("pipe:") && !target.starts_with("/proc/")).collect()
}

#[test]
fn a_started_program_inherits_nothing() {
    let before = inherited();
    let memory = Memory::shared(8192, HugePages::Auto).unwrap();
    let table = FenceTable::new(8).unwrap();
    let name = format!("kvik-test-{}-cloexec", std::process::id());
    let unix = UnixListener::bind(&name).unwrap();
    let near = UnixConn::connect(&name, BOUND).unwrap();
    let far = unix.accept().unwrap().unwrap();
    let pair = UnixConn::pair().unwrap();
    near.send_within(b"two", &[memory.fd().unwrap(), table.fd()], BOUND).unwrap();
    let came = far.recv_within(&mut [0; 8], 2, BOUND).unwrap().unwrap();
    let copies: Vec<_> = came.fds.iter().map(|fd| fd.try_clone().unwrap()).collect();
    let mut copies = copies.into_iter();
    let peer_memory = PeerMemory::map(copies.next().unwrap(), 8192).unwrap();
    let peer_fence = PeerFence::map(copies.next().unwrap()).unwrap();
    let tcp = TcpListener::bind("127.0.0.1:0".parse().unwrap(), 4, &TcpOptions::default()).unwrap();
    let client = TcpConn::connect_within(tcp.local_addr().unwrap(), &TcpOptions::default(), BOUND).unwrap();
    assert!(wait_ready(&tcp, Interest::READ, BOUND).unwrap());
    let server = tcp.accept().unwrap().unwrap();
    let (epoll, flag) = (Epoll::new().unwrap(), EventFd::new().unwrap());
    let process = ProcessMemory::open(std::process::id()).unwrap();

    let own = std::fs::read_dir("/proc/self/fd").unwrap().count();
    assert!(own >= before.len() + 15, "the descriptors are open here: {own}");
    assert_eq!(inherited(), before);
    assert!(rustix::io::fcntl_getfd(epoll.as_fd()).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
    drop((
        memory,
        table,
        unix,
        near,
        far,
        pair,
        came,
        peer_memory,
        peer_fence,
        tcp,
        client,
        server,
        epoll,
        flag,
        process,
    ));
}
