//! Peers that are not who or what they should be: every one has its own error, long before the deadline.

use crate::common::*;
use kvik_core::{Code, EngineId, Incarnation, Ticket};
use kvik_engine::{Config, Engine, Grant, Preference, Transfer, TransferOptions};
use kvik_host::socket::{TcpConn, TcpOptions};
use kvik_host::unix::UnixListener;
use kvik_host::{HostFacts, identity};
use kvik_proto::{Facts, Greeting, Handshake, Identity, Local, Secret};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

fn with_secret(secret: Option<&str>) -> Engine {
    let secret = secret.map(|secret| secret.as_bytes().to_vec());
    Engine::start(Config { secret, ..Config::default() }).unwrap()
}

/// A ticket, and an engine that may use it. The owner comes first: handles of an engine do not keep it running.
fn ticket() -> ((Engine, Grant), Ticket, Engine) {
    let (owner, reader) = (engine(Preference::Auto), engine(Preference::Auto));
    let there = region(&owner, 1, 1);
    let grant = owner.grant(&all(&there), many()).unwrap();
    let ticket = grant.ticket().clone();
    ((owner, grant), ticket, reader)
}

#[test]
fn secrets_differ_or_are_on_one_side_only() {
    let cases = [
        (Some("one secret"), Some("another secret"), Code::SecretMismatch),
        (Some("one secret"), None, Code::SecretRequired),
        (None, Some("one secret"), Code::SecretRequired),
    ];
    for (theirs, mine, expected) in cases {
        let (owner, reader) = (with_secret(theirs), with_secret(mine));
        let (there, here) = (region(&owner, 1, 1), region(&reader, 1, 2));
        let grant = owner.grant(&all(&there), many()).unwrap();
        let error = read(&reader, &all(&here), grant.ticket()).unwrap_err();
        assert_eq!(error.code, expected);
        assert!(error.text.contains("`secret`"), "{error}");
        assert!(!error.text.contains("one secret") && !error.text.contains("another"), "{error}");
    }
    let (owner, reader) = (with_secret(Some("one secret")), with_secret(Some("one secret")));
    let (there, here) = (region(&owner, 1, 1), region(&reader, 1, 2));
    let grant = owner.grant(&all(&there), many()).unwrap();
    read(&reader, &all(&here), grant.ticket()).unwrap();
}

#[test]
fn another_engine_and_another_start_at_the_address() {
    let (_owner, ticket, reader) = ticket();
    let here = region(&reader, 1, 2);
    let foreign = Ticket { engine: EngineId::random().unwrap(), ..ticket.clone() };
    assert_eq!(code(read(&reader, &all(&here), &foreign)), Code::TicketForeign);
    let restarted = Ticket { incarnation: Incarnation::random().unwrap(), ..ticket };
    assert_eq!(code(read(&reader, &all(&here), &restarted)), Code::PeerRestarted);
}

#[test]
fn an_engine_that_is_started_again_is_known_and_its_old_tickets_are_void() {
    let reader = engine(Preference::Auto);
    let here = region(&reader, 1, 2);
    let start = |listen| Engine::start(Config { listen: vec![listen], ..Config::default() }).unwrap();
    // Where no other test listens, so that its port stays free.
    let first = start(SocketAddr::from(([127, 0, 0, 4], 0)));
    let (there, place, id) = (region(&first, 1, 1), first.addresses()[0], first.id());
    let old = first.grant(&all(&there), many()).unwrap().ticket().clone();
    read(&reader, &all(&here), &old).unwrap();
    first.close(PATIENCE).unwrap();
    let second = start(place);
    assert_eq!((second.id(), second.addresses()), (id, vec![place]));
    assert_ne!(second.incarnation(), old.incarnation);
    let there = region(&second, 1, 3);
    let new = second.grant(&all(&there), many()).unwrap().ticket().clone();
    for _ in 0..2 {
        assert_eq!(code(read(&reader, &all(&here), &old)), Code::PeerRestarted);
        read(&reader, &all(&here), &new).unwrap();
    }
    assert_eq!(bytes(&here), bytes(&there));
}

#[test]
fn an_own_ticket_of_an_earlier_start_is_void() {
    let owner = engine(Preference::Auto);
    let here = region(&owner, 1, 2);
    let ticket = owner.grant(&all(&here), many()).unwrap().ticket().clone();
    let earlier = Ticket { incarnation: Incarnation::random().unwrap(), ..ticket };
    assert_eq!(code(read(&owner, &all(&here), &earlier)), Code::PeerRestarted);
}

#[test]
fn a_web_server_is_no_engine() {
    let (_owner, ticket, reader) = ticket();
    let here = region(&reader, 1, 2);
    for answer in [&b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"[..], b""] {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = server.local_addr().unwrap();
        let serving = std::thread::spawn(move || {
            let (mut conn, _) = server.accept().unwrap();
            let mut hello = [0; 4];
            conn.read_exact(&mut hello).unwrap();
            conn.write_all(answer).unwrap();
        });
        let ticket = Ticket { addresses: vec![at], ..ticket.clone() };
        let error = read(&reader, &all(&here), &ticket).unwrap_err();
        assert!(matches!(error.code, Code::PeerNotKvik | Code::PeerUnreachable), "{error:?}");
        if !answer.is_empty() {
            assert_eq!(error.code, Code::PeerNotKvik);
        }
        serving.join().unwrap();
    }
}

/// Begins ten transfers; each must end with this code, so long after that moment at the soonest, and within so many seconds.
fn ten_fail(
    reader: &Engine,
    ticket: &Ticket,
    options: &TransferOptions,
    expected: Code,
    since: Instant,
    (from, to): (f32, f32),
) {
    let here = region(reader, 10, 2);
    let busy = watch::start();
    let one = |id| reader.read(&pages(&here, &[id]), ticket, None, options.clone()).unwrap();
    let transfers: Vec<Transfer> = (0..10).map(one).collect();
    for transfer in transfers {
        let error = transfer.wait(Some(PATIENCE)).unwrap_err();
        assert_eq!(error.code, expected, "{error}");
        let [least, most] = [since.elapsed(), busy.elapsed()].map(|took| took.as_secs_f32());
        assert!(least >= from && most < to, "after {least} s, of which {most} s count: {error}");
    }
}

#[test]
fn a_peer_that_accepts_and_stays_silent_is_unreachable() {
    let (_owner, ticket, reader) = ticket();
    // The kernel accepts for it.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let ticket = Ticket { addresses: vec![silent.local_addr().unwrap()], ..ticket };
    let (short, began) = (within(Duration::from_secs(1)), Instant::now());
    ten_fail(&reader, &ticket, &short, Code::PeerUnreachable, began, (0.99, 1.6));
    // With time left, the attempt ends by itself: the same one, where it goes on.
    let patient = within(Duration::from_secs(60));
    ten_fail(&reader, &ticket, &patient, Code::PeerUnreachable, began, (2.9, 3.9));
}

/// An address that takes no connection and refuses none: its queue is full.
fn black_hole() -> (kvik_host::socket::TcpListener, SocketAddr, Vec<TcpConn>) {
    let any = "127.0.0.1:0".parse().unwrap();
    let listener = kvik_host::socket::TcpListener::bind(any, 0, &TcpOptions::default()).unwrap();
    let at = listener.local_addr().unwrap();
    let mut held = Vec::new();
    while let Ok(conn) = TcpConn::connect_within(at, &TcpOptions::default(), Duration::from_millis(200)) {
        held.push(conn);
        assert!(held.len() < 64, "the queue does not fill");
    }
    (listener, at, held)
}

#[test]
fn a_black_hole_costs_its_attempt_and_no_more() {
    let (_owner, ticket, reader) = ticket();
    let (_listener, at, _held) = black_hole();
    let lost = Ticket { addresses: vec![at], ..ticket.clone() };
    let short = within(Duration::from_secs(1));
    ten_fail(&reader, &lost, &short, Code::PeerUnreachable, Instant::now(), (0.99, 1.6));
    // With another address behind it the owner is found.
    let mut found = ticket;
    found.addresses.insert(0, at);
    let here = region(&reader, 1, 2);
    let began = watch::start();
    read(&reader, &all(&here), &found).unwrap();
    assert!(began.elapsed() < Duration::from_secs(4));
}

/// Shakes hands as an engine of this host would, with a local socket that nobody serves, and hangs up.
fn hang_up_after_the_handshake(mut conn: TcpStream, local: &Local) {
    let mut shake = Handshake::listen(local.clone(), identity::nonce().unwrap());
    let (mut input, mut bytes) = (Vec::new(), [0; 4096]);
    loop {
        let len = conn.read(&mut bytes).unwrap();
        assert_ne!(len, 0);
        input.extend_from_slice(&bytes[..len]);
        let mut output = Vec::new();
        let greeting = shake.receive(&mut input, &mut output).unwrap();
        conn.write_all(&output).unwrap();
        if let Some(Greeting::Control(_)) = greeting {
            return;
        }
    }
}

#[test]
fn a_session_that_breaks_before_its_local_link_is_up_leaves_no_transfer_waiting() {
    let (_owner, ticket, reader) = ticket();
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let host = HostFacts::read().unwrap();
    let name = format!("kvik-test-{}", EngineId::random().unwrap());
    let _nobody = UnixListener::bind(&name).unwrap();
    let facts = Facts {
        boot: host.boot_id,
        pid_namespace: host.pid_namespace,
        user_namespace: host.user_namespace,
        network_namespace: host.net_namespace,
        uid: host.uid,
        pid: host.pid,
        local_name: name,
        name: "hangs up".into(),
        nics: Default::default(),
    };
    let identity = Identity { engine: EngineId::random().unwrap(), incarnation: ticket.incarnation };
    let local = Local { identity, secret: Secret::new(None), facts };
    let at = server.local_addr().unwrap();
    let ticket = Ticket { engine: identity.engine, addresses: vec![at], ..ticket };
    let sessions = Arc::new(AtomicUsize::new(0));
    let count = sessions.clone();
    std::thread::spawn(move || {
        for conn in server.incoming() {
            // Before it ends, which those who wait for it may see sooner than this thread goes on.
            count.fetch_add(1, Ordering::Relaxed);
            hang_up_after_the_handshake(conn.unwrap(), &local);
        }
    });
    ten_fail(&reader, &ticket, &TransferOptions::default(), Code::PeerLost, Instant::now(), (0.0, 3.0));
    // It was tried again, and not for ever.
    let sessions = sessions.load(Ordering::Relaxed);
    assert!((2..10).contains(&sessions), "{sessions} sessions");
}
