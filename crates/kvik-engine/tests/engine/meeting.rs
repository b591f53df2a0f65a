//! Meeting whoever listens at an address: who it is, that one session serves all, and what is said where nobody is met.

use crate::addresses::closed_port;
use crate::common::*;
use crate::events::{Child, expect};
use kvik_core::{Code, Error};
use kvik_engine::{Config, Engine, Event, Events, Meeting, Notifying, PeerState, Preference, To, Who};
use rustix::process::Signal;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::sync::Barrier;
use std::time::{Duration, Instant};

fn meet(engine: &Engine, at: SocketAddr) -> Result<Who, Error> {
    engine.meet(at, Some(PATIENCE))
}

fn opened(engine: &Engine) -> u64 {
    engine.stats().iter().find(|(name, _)| *name == "sessions_opened").unwrap().1
}

/// The next notification, whatever else is told before it.
fn notified(events: &Events) -> (Who, Vec<u8>) {
    loop {
        match events.next(PATIENCE).unwrap().expect("a notification") {
            Event::Notification(who, payload) => return (who, payload.to_vec()),
            Event::PeerUp(..) => {}
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn who_listens_is_met_over_one_session_and_notified_by_its_id() {
    let server = Engine::start(Config { name: "store".into(), ..Config::default() }).unwrap();
    let client = engine(Preference::Auto);
    let (heard, at) = (server.events().unwrap(), server.addresses()[0]);
    let text = format!("localhost:{}", at.port());
    for who in [meet(&client, at).unwrap(), client.meet(text.as_str(), None).unwrap()] {
        assert_eq!((who.engine, who.incarnation), (server.id(), server.incarnation()));
        assert_eq!(who.name, "store");
    }
    let peers = client.peers();
    assert!(peers.len() == 1 && peers[0].state == PeerState::Up && peers[0].address == Some(at), "{peers:?}");
    let notice = client.notify(server.id(), b"hello", Some(PATIENCE)).unwrap();
    let (who, payload) = notified(&heard);
    assert_eq!((who.engine, payload.as_slice()), (client.id(), b"hello".as_slice()));
    notice.wait(Some(PATIENCE)).unwrap();
    // The other way round it is the same session, though nobody had dialled that address: so for a ticket.
    let back = meet(&server, client.addresses()[0]).unwrap();
    assert_eq!((back.engine, back.incarnation), (client.id(), client.incarnation()));
    let (there, here) = (region(&server, 4, 1), region(&client, 4, 2));
    let grant = server.grant(&all(&there), many()).unwrap();
    read(&client, &all(&here), grant.ticket()).unwrap();
    assert_eq!((opened(&client), opened(&server)), (1, 1));
    // A peer that was met by a ticket is met by its address too.
    let other = engine(Preference::Auto);
    read(&other, &all(&region(&other, 4, 2)), grant.ticket()).unwrap();
    assert_eq!(meet(&other, at).unwrap().engine, server.id());
    assert_eq!(opened(&other), 1);
}

#[test]
fn many_who_meet_at_once_share_one_session() {
    let (server, client) = (engine(Preference::Auto), engine(Preference::Auto));
    let (at, start) = (server.addresses()[0], Barrier::new(8));
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                start.wait();
                assert_eq!(meet(&client, at).unwrap().engine, server.id());
            });
        }
    });
    assert_eq!((opened(&client), opened(&server)), (1, 1));
}

#[test]
fn two_that_meet_each_other_at_once_keep_one_session() {
    for _ in 0..10 {
        let (a, b) = (engine(Preference::Auto), engine(Preference::Auto));
        let (start, to) = (Barrier::new(2), (b.addresses()[0], a.addresses()[0]));
        std::thread::scope(|scope| {
            for (one, at, other) in [(&a, to.0, &b), (&b, to.1, &a)] {
                let start = &start;
                scope.spawn(move || {
                    start.wait();
                    assert_eq!(meet(one, at).unwrap().engine, other.id());
                });
            }
        });
        let heard = b.events().unwrap();
        let notice = a.notify(b.id(), b"after", Some(PATIENCE)).unwrap();
        assert_eq!(notified(&heard).1, b"after");
        notice.wait(Some(PATIENCE)).unwrap();
        assert!(opened(&a) <= 2 && opened(&b) <= 2);
    }
}

#[test]
fn an_engine_that_cannot_be_met_says_why() {
    let client = engine(Preference::Auto);
    // Nobody, and who does not speak the protocol.
    let closed = closed_port();
    let error = meet(&client, closed).unwrap_err();
    assert_eq!(error.code, Code::PeerUnreachable);
    assert!(error.text.contains(&closed.to_string()) && error.text.contains("is it running"), "{error}");
    let web = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = web.local_addr().unwrap();
    let serving = std::thread::spawn(move || {
        let (mut conn, _) = web.accept().unwrap();
        conn.read_exact(&mut [0; 4]).unwrap();
        conn.write_all(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n").unwrap();
    });
    let error = meet(&client, at).unwrap_err();
    serving.join().unwrap();
    assert_eq!(error.code, Code::PeerNotKvik);
    assert!(error.text.contains(&at.to_string()), "{error}");
    // Itself.
    let error = meet(&client, client.addresses()[0]).unwrap_err();
    assert_eq!(error.code, Code::InvalidArgument);
    assert!(error.text.contains("itself"), "{error}");
    // What is no address, and no deadline.
    assert_eq!(code(client.meet("127.0.0.1", None)), Code::InvalidArgument);
    assert_eq!(code(client.meet(&[][..], None)), Code::InvalidArgument);
    assert_eq!(code(client.meet(closed, Some(Duration::ZERO))), Code::InvalidArgument);
    assert!(client.peers().is_empty(), "{:?}", client.peers());
}

#[test]
fn who_has_another_secret_is_not_met() {
    let with = |secret: Option<&str>| {
        let secret = secret.map(|secret| secret.as_bytes().to_vec());
        Engine::start(Config { secret, ..Config::default() }).unwrap()
    };
    let server = with(Some("one secret"));
    let (wrong, none) = (with(Some("another secret")), with(None));
    assert_eq!(code(meet(&wrong, server.addresses()[0])), Code::SecretMismatch);
    assert_eq!(code(meet(&none, server.addresses()[0])), Code::SecretRequired);
    assert_eq!(code(meet(&server, none.addresses()[0])), Code::SecretRequired);
    assert_eq!(opened(&server), 0);
    assert_eq!(meet(&with(Some("one secret")), server.addresses()[0]).unwrap().engine, server.id());
}

#[test]
fn the_next_address_is_tried_where_nobody_is_met() {
    let (server, client) = (engine(Preference::Auto), engine(Preference::Auto));
    let (closed, at) = (closed_port(), server.addresses()[0]);
    let addresses = [closed, client.addresses()[0], at];
    assert_eq!(client.meet(&addresses[..], None).unwrap().engine, server.id());
    // Of several that fail, the one that says most gives the code, and all are named.
    let error = client.meet(&[client.addresses()[0], closed][..], None).unwrap_err();
    assert_eq!(error.code, Code::InvalidArgument);
    assert!(error.text.contains(&closed.to_string()), "{error}");
}

#[test]
fn a_meeting_ends_by_its_deadline_and_with_its_engine() {
    let client = engine(Preference::Auto);
    // The kernel accepts for it.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = silent.local_addr().unwrap();
    let (began, busy) = (Instant::now(), watch::start());
    let error = client.meet(at, Some(Duration::from_millis(300))).unwrap_err();
    assert_eq!(error.code, Code::PeerUnreachable);
    assert!(error.text.contains("deadline") && error.text.contains(&at.to_string()), "{error}");
    assert!(began.elapsed() >= Duration::from_millis(290), "{:?}", began.elapsed());
    assert!(busy.elapsed() < Duration::from_secs(1), "{:?}", busy.elapsed());
    // In steps, and of two that wait for the same dial each has its own deadline.
    let meeting = Meeting::begin(&client, at, Some(PATIENCE)).unwrap();
    assert!(meeting.wait(Duration::from_millis(10)).unwrap().is_none());
    let began = watch::start();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| {
            loop {
                if let Some(who) = meeting.wait(PATIENCE)? {
                    return Ok::<Who, Error>(who);
                }
            }
        });
        // Nothing tells that it waits by now; one that came later would see a closed engine.
        std::thread::sleep(Duration::from_millis(200));
        client.close(PATIENCE).unwrap();
        assert_eq!(code(waits.join().unwrap()), Code::EngineClosed);
    });
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    assert_eq!(code(client.meet(at, None)), Code::EngineClosed);
}

#[test]
fn who_was_met_and_lost_comes_back_by_itself_or_is_met_again() {
    let (child, ticket) = Child::owner();
    let client = engine(Preference::Auto);
    let at = ticket.addresses[0];
    let events = client.events().unwrap();
    let who = meet(&client, at).unwrap();
    assert_eq!((who.engine, who.incarnation), (ticket.engine, ticket.incarnation));
    expect(&events, "peer_up", 1.0);
    // Silent for so long that it is taken for dead: the same peer is dialled again.
    child.signal(Signal::STOP);
    expect(&events, "peer_suspect", 2.0);
    expect(&events, "peer_lost", 2.0);
    assert!(client.peers()[0].reconnecting);
    // Who wants it only while it is connected does not wait for that.
    let began = watch::start();
    let error = client.notify(To::Connected(who.engine), b"hello", Some(PATIENCE)).err().unwrap();
    assert!(error.code == Code::PeerLost, "{error}");
    assert!(began.elapsed() < Duration::from_secs(10), "{error}: {:?}", began.elapsed());
    child.signal(Signal::CONT);
    expect(&events, "peer_up", 8.0);
    assert_eq!(meet(&client, at).unwrap(), who);
    // Another one at its address: whoever goes by the old id hears so, and meets again.
    drop(child);
    expect(&events, "peer_lost", 3.0);
    let (_again, fresh) = Child::owner_at(&at.to_string());
    expect(&events, "peer_restarted", 8.0);
    let error = client.notify(who.engine, b"hello", Some(PATIENCE)).err().unwrap();
    assert_eq!(error.code, Code::PeerRestarted, "{error}");
    let now = meet(&client, at).unwrap();
    assert_eq!((now.engine, now.incarnation), (fresh.engine, fresh.incarnation));
    assert_ne!(now.incarnation, who.incarnation);
    expect(&events, "peer_up", 1.0);
    client.notify(now.engine, b"hello", Some(PATIENCE)).unwrap();
}

#[test]
fn whoever_waits_may_name_any_time() {
    let (server, client) = (engine(Preference::Tcp), engine(Preference::Tcp));
    let meeting = Meeting::begin(&client, server.addresses()[0], None).unwrap();
    assert_eq!(meeting.wait(Duration::MAX).unwrap().unwrap().engine, server.id());
    let sending = Notifying::begin(&client, 0, server.id(), b"hello", None).unwrap();
    assert!(sending.wait(Duration::MAX).unwrap().is_some());
}
