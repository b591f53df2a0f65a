//! TCP on loopback: runs straight between memories, cut paths, and the waits.

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use kvik_host::event::{Epoll, EventFd, Events, Interest, wait_ready};
use kvik_host::socket::{TcpConn, TcpListener, TcpOptions};
use kvik_host::{HostError, HugePages, Io, Memory, RecvRun, RunBuffer, SendRun};
use rustix::net::sockopt;

const BOUND: Duration = Duration::from_secs(60);

fn loopback() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

fn pair_with(options: &TcpOptions, address: SocketAddr) -> (TcpConn, TcpConn) {
    let listener = TcpListener::bind(address, 8, options).unwrap();
    assert!(listener.accept().unwrap().is_none());
    let client = TcpConn::connect_within(listener.local_addr().unwrap(), options, BOUND).unwrap();
    assert!(wait_ready(&listener, Interest::READ, BOUND).unwrap());
    let (server, from) = listener.accept().unwrap().unwrap();
    assert_eq!(from, client.local_addr().unwrap());
    (client, server)
}

fn pair() -> (TcpConn, TcpConn) {
    pair_with(&TcpOptions::default(), loopback())
}

#[test]
fn sockets_are_set_up_as_asked() {
    let options = TcpOptions { send_buffer: Some(65536), recv_buffer: Some(98304) };
    let (client, server) = pair_with(&options, loopback());
    for conn in [&client, &server] {
        assert!(sockopt::tcp_nodelay(conn).unwrap());
        assert_eq!(sockopt::tcp_user_timeout(conn).unwrap(), 0);
        conn.give_up_after(Duration::from_millis(1500)).unwrap();
        assert_eq!(sockopt::tcp_user_timeout(conn).unwrap(), 1500);
        // The kernel doubles what it is told, for its own book-keeping.
        assert_eq!(sockopt::socket_send_buffer_size(conn).unwrap(), 2 * 65536);
        assert_eq!(sockopt::socket_recv_buffer_size(conn).unwrap(), 2 * 98304);
        assert!(rustix::fs::fcntl_getfl(conn).unwrap().contains(rustix::fs::OFlags::NONBLOCK));
        assert!(rustix::io::fcntl_getfd(conn).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
    }
}

#[test]
fn ipv6_listeners_leave_ipv4_alone() {
    let listener = TcpListener::bind("[::1]:0".parse().unwrap(), 8, &TcpOptions::default()).unwrap();
    assert!(sockopt::ipv6_v6only(&listener).unwrap());
    pair_with(&TcpOptions::default(), "[::1]:0".parse().unwrap());
}

/// Header and scattered pages of one memory, into the same places of another, over small buffers.
#[test]
fn runs_go_from_memory_to_memory_without_a_copy_between() {
    const PAGE: usize = 12_345;
    const PAGES: usize = 64;
    let small = TcpOptions { send_buffer: Some(8192), recv_buffer: Some(8192) };
    let (client, server) = pair_with(&small, loopback());
    let source = Memory::shared(PAGE * PAGES, HugePages::Auto).unwrap();
    let target = Memory::shared(PAGE * PAGES, HugePages::Auto).unwrap();
    let bytes: Vec<u8> = (0..PAGE * PAGES).map(|i| (i * 13 + i / 251) as u8).collect();
    source.copy_in(0, &bytes).unwrap();
    let header = *b"header of a channel";
    let order: Vec<usize> = (0..PAGES).map(|i| i * 37 % PAGES * PAGE).collect();

    let (mut out, mut into) = (RunBuffer::new(PAGES + 1), RunBuffer::new(PAGES + 1));
    let mut seen = [0; 19];
    let (mut sending, mut receiving) = (out.begin_send(), into.begin_recv());
    assert!(sending.push(SendRun::from(&header[..])) && receiving.push(RecvRun::from(&mut seen[..])));
    for &at in &order {
        assert!(sending.push(source.send_run(at, PAGE).unwrap()));
        assert!(receiving.push(target.recv_run(at, PAGE).unwrap()));
    }
    assert_eq!(sending.bytes(), header.len() + PAGE * PAGES);
    let (mut blocked, mut moved) = (0, 0);
    while !receiving.is_empty() {
        while !sending.is_empty() {
            if sending.send(&client).unwrap() == Io::Blocked {
                blocked += 1;
                break;
            }
        }
        match receiving.recv(&server).unwrap() {
            Io::Done(n) => moved += n,
            Io::Blocked => assert!(wait_ready(&server, Interest::READ, BOUND).unwrap()),
            Io::Closed => panic!("closed after {moved} bytes"),
        }
    }
    assert!(sending.is_empty() && blocked > 0, "buffers this small must fill up");
    assert_eq!(moved, header.len() + PAGE * PAGES);
    assert_eq!(sending.send(&client).unwrap(), Io::Done(0));
    assert_eq!(seen, header);
    let mut copy = vec![0; bytes.len()];
    target.copy_out(0, &mut copy).unwrap();
    assert!(copy == bytes);
}

#[test]
fn shutdown_cuts_the_path_although_another_holds_the_socket() {
    let (client, server) = pair();
    let held: OwnedFd = client.as_fd().try_clone_to_owned().unwrap();
    client.shutdown_both().unwrap();
    client.shutdown_both().unwrap();
    drop(client);
    assert!(wait_ready(&server, Interest::READ, BOUND).unwrap());
    assert_eq!(server.recv(&mut [0; 8]).unwrap(), Io::Closed);
    let page = Memory::shared(4096, HugePages::Never).unwrap();
    let mut buffer = RunBuffer::new(1);
    let mut batch = buffer.begin_send();
    assert!(batch.push(page.send_run(0, 4096).unwrap()));
    assert!(matches!(batch.send(&held), Err(HostError::Disconnected { .. })));
}

#[test]
fn a_lost_peer_is_an_error_and_never_a_signal() {
    // With the default action a single SIGPIPE would end this test program.
    // SAFETY: sets an action that runs no code of ours.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
    let (client, server) = pair();
    drop(server);
    let begun = Instant::now();
    loop {
        match client.send(&[0; 1024]) {
            Ok(_) => assert!(begun.elapsed() < BOUND, "never noticed"),
            Err(HostError::Disconnected { .. }) => break,
            Err(error) => panic!("{error}"),
        }
    }
    let (page, mut buffer) = ([0u8; 64], RunBuffer::new(1));
    let mut batch = buffer.begin_send();
    assert!(batch.push(SendRun::from(&page[..])));
    assert!(matches!(batch.send(&client), Err(HostError::Disconnected { .. })));
}

#[test]
fn connecting_fails_in_words() {
    // Where no other test listens.
    let own = "127.0.0.2:0".parse().unwrap();
    let gone = {
        let listener = TcpListener::bind(own, 1, &TcpOptions::default()).unwrap();
        listener.local_addr().unwrap()
    };
    let text = TcpConn::connect_within(gone, &TcpOptions::default(), BOUND).unwrap_err().to_string();
    assert!(text.contains(&gone.to_string()) && text.contains("nothing listens"), "{text}");

    let busy = TcpListener::bind(own, 1, &TcpOptions::default()).unwrap().local_addr().unwrap();
    let first = TcpListener::bind(busy, 1, &TcpOptions::default()).unwrap();
    let text = TcpListener::bind(busy, 1, &TcpOptions::default()).unwrap_err().to_string();
    assert!(text.contains("another port"), "{text}");
    assert!(matches!(first.accept(), Ok(None)));
}

#[test]
fn an_eventfd_ends_a_wait_and_is_lowered_once() {
    let (epoll, flag) = (Epoll::new().unwrap(), EventFd::new().unwrap());
    epoll.add(&flag, 42, Interest::READ).unwrap();
    let mut events = Events::new(4);
    epoll.wait(&mut events, Duration::ZERO).unwrap();
    assert!(events.is_empty());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            flag.signal().unwrap();
            flag.signal().unwrap();
        });
        epoll.wait(&mut events, BOUND).unwrap();
    });
    let seen: Vec<_> = events.iter().collect();
    assert_eq!((seen.len(), seen[0].token, seen[0].readable, seen[0].closed), (1, 42, true, false));
    assert!(flag.drain().unwrap());
    assert!(!flag.drain().unwrap());
    epoll.wait(&mut events, Duration::ZERO).unwrap();
    assert!(events.is_empty());
    epoll.delete(&flag).unwrap();
    flag.signal().unwrap();
    epoll.wait(&mut events, Duration::ZERO).unwrap();
    assert!(events.is_empty());
}

#[test]
fn what_is_ready_is_told_until_it_is_dealt_with() {
    let (client, server) = pair();
    let (epoll, mut events) = (Epoll::new().unwrap(), Events::new(4));
    let mut count = || {
        epoll.wait(&mut events, Duration::ZERO).unwrap();
        events.iter().filter(|event| event.token == 7 && event.readable).count()
    };
    client.send(b"x").unwrap();
    assert!(wait_ready(&server, Interest::READ, BOUND).unwrap());
    epoll.add(&server, 7, Interest::READ).unwrap();
    assert_eq!((count(), count()), (1, 1));
    assert_eq!(server.recv(&mut [0; 8]).unwrap(), Io::Done(1));
    assert_eq!(count(), 0);
}

/// Who waits only to write is not woken by the other side having said its last word: that would spin.
#[test]
fn a_half_closed_connection_wakes_readers_only() {
    let (client, server) = pair();
    rustix::net::shutdown(&client, rustix::net::Shutdown::Write).unwrap();
    assert!(wait_ready(&server, Interest::READ, BOUND).unwrap());
    let (epoll, mut events) = (Epoll::new().unwrap(), Events::new(4));
    epoll.add(&server, 1, Interest::default()).unwrap();
    epoll.wait(&mut events, Duration::ZERO).unwrap();
    assert!(events.is_empty(), "{events:?}");
    epoll.modify(&server, 1, Interest::BOTH).unwrap();
    epoll.wait(&mut events, Duration::ZERO).unwrap();
    let event = events.iter().next().unwrap();
    assert!(event.readable && event.writable && event.closed, "{event:?}");
}

#[test]
fn waits_end_at_their_bound() {
    let (epoll, mut events) = (Epoll::new().unwrap(), Events::new(1));
    let bound = Duration::from_micros(10_500);
    let begun = Instant::now();
    epoll.wait(&mut events, bound).unwrap();
    assert!(begun.elapsed() >= bound && events.is_empty());
    let (client, _server) = pair();
    let begun = Instant::now();
    assert!(!wait_ready(&client, Interest::READ, bound).unwrap());
    assert!(begun.elapsed() >= bound);
}
