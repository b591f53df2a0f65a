//! Messages with descriptors: what is taken, what is refused, and that what is refused is closed.

use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use kvik_host::event::{Interest, wait_ready};
use kvik_host::unix::{MAX_FDS, Received, UnixConn, UnixListener};
use kvik_host::{HostError, HugePages, Io, Memory, PeerMemory};
use rustix::io::FdFlags;

const BOUND: Duration = Duration::from_secs(60);

/// A name that no other test run has.
fn name(of: &str) -> String {
    format!("kvik-test-{}-{of}", std::process::id())
}

fn received(conn: &UnixConn, max_fds: usize) -> Result<Option<Received>, HostError> {
    conn.recv_within(&mut [0; 64], max_fds, BOUND)
}

/// Sends a message with `count` copies of the writing end of a pipe, receives it with `receive`, and says whether
/// all copies are closed after that, which the reading end knows.
fn all_closed_after(count: usize, receive: impl FnOnce(&UnixConn)) -> bool {
    let (a, b) = UnixConn::pair().unwrap();
    let (mut reader, writer) = std::io::pipe().unwrap();
    send_any(&a, &vec![writer.as_fd(); count]);
    drop(writer);
    receive(&b);
    let ended = wait_ready(&reader, Interest::READ, Duration::ZERO).unwrap();
    ended && reader.read(&mut [0]).unwrap() == 0
}

/// Sends without the limit that `UnixConn` keeps.
fn send_any(conn: &UnixConn, fds: &[BorrowedFd<'_>]) {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    sendmsg(conn, &[std::io::IoSlice::new(b"message")], &mut control, SendFlags::NOSIGNAL).unwrap();
}

#[test]
fn a_peer_maps_memory_that_came_by_message() {
    let (name, memory) = (name("map"), Memory::shared(8192, HugePages::Auto).unwrap());
    let listener = UnixListener::bind(&name).unwrap();
    let client = UnixConn::connect(&name, BOUND).unwrap();
    assert!(wait_ready(&listener, Interest::READ, BOUND).unwrap());
    let server = listener.accept().unwrap().unwrap();
    assert!(listener.accept().unwrap().is_none());

    memory.copy_in(8000, b"shown").unwrap();
    server.send_within(b"region", &[memory.fd().unwrap()], BOUND).unwrap();
    let mut text = [0; 64];
    let mut came = client.recv_within(&mut text, 1, BOUND).unwrap().unwrap();
    assert_eq!(&text[..came.len], b"region");
    let fd = came.fds.pop().unwrap();
    assert!(rustix::io::fcntl_getfd(&fd).unwrap().contains(FdFlags::CLOEXEC));
    let peer = PeerMemory::map(fd, 8192).unwrap();
    let mut seen = [0; 5];
    peer.copy_out(8000, &mut seen).unwrap();
    assert_eq!(&seen, b"shown");
}

#[test]
fn both_sides_know_who_the_other_is() {
    let name = name("who");
    let listener = UnixListener::bind(&name).unwrap();
    let client = UnixConn::connect(&name, BOUND).unwrap();
    let server = listener.accept().unwrap().unwrap();
    for conn in [&client, &server] {
        let who = conn.credentials().unwrap();
        assert_eq!(who.uid, rustix::process::geteuid().as_raw());
        assert_eq!(who.pid, Some(std::process::id()));
        assert_eq!(conn.same_user().unwrap(), who);
    }
}

#[test]
fn another_user_is_refused() {
    if !rustix::process::geteuid().is_root() {
        println!("not run: only root can become another user");
        return;
    }
    let name = name("user");
    let listener = UnixListener::bind(&name).unwrap();
    // Only this thread changes its user: the raw system call, unlike the C library's function, leaves the others be.
    let client = std::thread::spawn({
        let name = name.clone();
        move || {
            // SAFETY: changes the effective user of this thread alone, which ends right after.
            assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, -1i64, 65534i64, -1i64) }, 0);
            UnixConn::connect(&name, BOUND).unwrap()
        }
    });
    let client = client.join().unwrap();
    let server = listener.accept().unwrap().unwrap();
    match server.same_user() {
        Err(HostError::ProcessRefused { pid, why }) => {
            assert!(pid == std::process::id() && why.contains("65534"))
        }
        other => panic!("{other:?}"),
    }
    assert!(client.same_user().is_ok(), "the listener was made as the user of this process");
}

#[test]
fn messages_keep_their_boundaries_and_the_end_is_seen() {
    let (a, b) = UnixConn::pair().unwrap();
    let mut text = [0; 64];
    assert!(matches!(b.recv_with_fds(&mut text, 0).unwrap(), Io::Blocked));
    a.send_within(b"one", &[], BOUND).unwrap();
    a.send_within(b"three", &[], BOUND).unwrap();
    drop(a);
    assert_eq!(received(&b, 0).unwrap().unwrap().len, 3);
    assert_eq!(received(&b, 0).unwrap().unwrap().len, 5);
    assert!(received(&b, 0).unwrap().is_none());
    let refused = b.send_with_fds(b"anyone", &[]);
    assert!(matches!(refused, Err(HostError::Disconnected { .. })), "{refused:?}");
}

#[test]
fn descriptors_up_to_the_limit_are_taken() {
    assert!(all_closed_after(MAX_FDS, |conn| {
        let came = received(conn, MAX_FDS).unwrap().unwrap();
        assert_eq!(came.fds.len(), MAX_FDS);
        for fd in &came.fds {
            assert!(rustix::io::fcntl_getfd(fd).unwrap().contains(FdFlags::CLOEXEC));
        }
    }));
}

#[test]
fn descriptors_beyond_the_limit_are_refused_and_closed() {
    for (count, max) in [(1, 0), (2, 1), (MAX_FDS, MAX_FDS - 1), (MAX_FDS + 1, MAX_FDS), (MAX_FDS + 1, 1000)]
    {
        let closed = all_closed_after(count, |conn| match received(conn, max) {
            Err(HostError::TooManyDescriptors { got, .. }) => assert_eq!(got, count),
            other => panic!("{count} of {max}: {other:?}"),
        });
        assert!(closed, "{count} of {max}");
    }
}

#[test]
fn truncated_control_data_is_refused_and_closed() {
    // Far enough beyond the limit that alignment leaves no room for them.
    for count in [2 * MAX_FDS, 100, 253] {
        let closed = all_closed_after(count, |conn| {
            let refused = received(conn, MAX_FDS);
            assert!(matches!(refused, Err(HostError::MessageTruncated { .. })), "{refused:?}");
        });
        assert!(closed, "{count}");
    }
}

#[test]
fn a_message_longer_than_the_buffer_is_refused_and_its_descriptors_closed() {
    assert!(all_closed_after(1, |conn| {
        let refused = conn.recv_within(&mut [0; 3], 1, BOUND);
        assert!(matches!(refused, Err(HostError::MessageTruncated { .. })), "{refused:?}");
    }));
}

#[test]
fn what_cannot_be_a_message_is_not_sent() {
    let (a, b) = UnixConn::pair().unwrap();
    assert!(matches!(a.send_with_fds(b"", &[]), Err(HostError::InvalidArgument(_))));
    let many = vec![b.as_fd(); MAX_FDS + 1];
    assert!(matches!(a.send_with_fds(b"x", &many), Err(HostError::TooManyDescriptors { .. })));
    assert!(matches!(b.recv_with_fds(&mut [0; 8], 8).unwrap(), Io::Blocked));
}

#[test]
fn waits_end_at_their_bound() {
    let (a, b) = UnixConn::pair().unwrap();
    let bound = Duration::from_millis(30);
    let begun = Instant::now();
    assert!(matches!(b.recv_within(&mut [0; 8], 0, bound), Err(HostError::TimedOut { .. })));
    assert!(begun.elapsed() >= bound);

    while a.send_with_fds(&[0; 4096], &[]).unwrap() != Io::Blocked {}
    assert!(matches!(a.send_within(&[0; 4096], &[], bound), Err(HostError::TimedOut { .. })));

    let name = name("full");
    let listener = UnixListener::bind(&name).unwrap();
    let waiting: Vec<_> = (0..1000).map_while(|_| UnixConn::connect(&name, bound).ok()).collect();
    assert!(waiting.len() < 1000, "a queue without bound");
    assert!(matches!(UnixConn::connect(&name, bound), Err(HostError::TimedOut { .. })));
    drop(listener);
}

#[test]
fn names_are_checked_and_errors_name_them() {
    assert!(matches!(UnixListener::bind(""), Err(HostError::InvalidArgument(_))));
    assert!(UnixListener::bind(&"n".repeat(200)).is_err());
    let nobody = name("nobody");
    assert!(UnixConn::connect(&nobody, BOUND).unwrap_err().to_string().contains(&nobody));
    let taken = name("taken");
    let first = UnixListener::bind(&taken).unwrap();
    assert!(UnixListener::bind(&taken).unwrap_err().to_string().contains(&taken));
    drop(first);
    UnixListener::bind(&taken).unwrap();
}

#[test]
fn a_stopped_listener_refuses_although_it_is_still_held() {
    let name = name("stopped");
    let listener = UnixListener::bind(&name).unwrap();
    UnixConn::connect(&name, BOUND).unwrap();
    listener.stop().unwrap();
    assert!(matches!(UnixConn::connect(&name, BOUND), Err(HostError::Os { .. })));
    drop(listener);
}
