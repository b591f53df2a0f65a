//! Topics of notifications: each has one consumer or none, a window of its own, and hears of the ends of its peers.

use crate::common::*;
use crate::events::Child;
use kvik_core::{Code, EngineId, Incarnation};
use kvik_engine::{Engine, Event, Events, Inbox, Message, Notifying, Preference, Who};
use kvik_host::event::{Interest, wait_ready};
use rustix::process::Signal;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

/// Longer than the window of a topic.
const MANY: u32 = 1500;

/// A server and a client that has met it.
fn pair() -> (Engine, Engine) {
    let (server, client) = (engine(Preference::Auto), engine(Preference::Auto));
    client.meet(server.addresses()[0], Some(PATIENCE)).unwrap();
    (server, client)
}

fn next(inbox: &Inbox) -> (EngineId, Vec<u8>) {
    match inbox.next(PATIENCE).unwrap().expect("a notification") {
        Message::Notification(who, payload) => (who.engine, payload.to_vec()),
        Message::PeerLost(who, error) => panic!("{who} was lost: {error}"),
    }
}

fn lost(inbox: &Inbox) -> Who {
    match inbox.next(PATIENCE).unwrap().expect("the end of a peer") {
        Message::PeerLost(who, error) => {
            assert_eq!(error.code, Code::PeerLost, "{error}");
            who
        }
        Message::Notification(who, payload) => panic!("{who} says {payload:?}"),
    }
}

/// Whether the inbox has nothing now.
fn is_empty(inbox: &Inbox) -> bool {
    inbox.next(Duration::ZERO).unwrap().is_none()
}

/// The next notification of the program, if one comes within this time.
fn heard_within(events: &Events, patience: Duration) -> Option<Vec<u8>> {
    loop {
        if let Event::Notification(_, payload) = events.next(patience).unwrap()? {
            return Some(payload.to_vec());
        }
    }
}

fn heard(events: &Events) -> Vec<u8> {
    heard_within(events, PATIENCE).expect("a notification")
}

fn dropped(engine: &Engine) -> u64 {
    let text = engine.metrics();
    let line = text.lines().find_map(|line| line.strip_prefix("kvik_notifications_dropped_total ")).unwrap();
    line.parse().unwrap()
}

fn number(payload: &[u8]) -> u32 {
    u32::from_le_bytes(payload.try_into().unwrap())
}

#[test]
fn a_topic_goes_to_its_consumer_and_to_nobody_else() {
    let (server, client) = pair();
    let (one, two, events) = (server.inbox(1).unwrap(), server.inbox(255).unwrap(), server.events().unwrap());
    assert_eq!((one.topic(), two.topic()), (1, 255));
    let mut notices = Vec::new();
    for round in 0..100u32 {
        for topic in [0, 1, 255] {
            let payload = [&[topic][..], &round.to_le_bytes()].concat();
            notices.push(client.notify_on(topic, server.id(), &payload, Some(PATIENCE)).unwrap());
        }
    }
    for round in 0..100u32 {
        for (topic, inbox) in [(1, &one), (255, &two)] {
            let (from, payload) = next(inbox);
            assert_eq!((from, payload[0], number(&payload[1..])), (client.id(), topic, round));
        }
        let payload = heard(&events);
        assert_eq!((payload[0], number(&payload[1..])), (0, round));
    }
    notices.iter().for_each(|notice| notice.wait(Some(PATIENCE)).unwrap());
    assert!(is_empty(&one) && is_empty(&two));
    assert_eq!(heard_within(&events, Duration::from_millis(100)), None);
    assert_eq!(dropped(&server), 0);
    // And back, on the same session.
    let answers = client.inbox(1).unwrap();
    server.notify_on(1, client.id(), b"back", Some(PATIENCE)).unwrap();
    assert_eq!(next(&answers), (server.id(), b"back".to_vec()));
}

#[test]
fn what_nobody_consumes_is_acknowledged_dropped_and_counted() {
    let (server, client) = pair();
    let notices: Vec<_> = (0..MANY)
        .map(|number| client.notify_on(9, server.id(), &number.to_le_bytes(), Some(PATIENCE)).unwrap())
        .collect();
    notices.iter().for_each(|notice| notice.wait(Some(PATIENCE)).unwrap());
    assert_eq!(dropped(&server), u64::from(MANY));
    // Who comes later hears what comes from then on.
    let inbox = server.inbox(9).unwrap();
    client.notify_on(9, server.id(), b"now", Some(PATIENCE)).unwrap();
    assert_eq!(next(&inbox).1, b"now");
    // Those of the program wait for it, as they always do.
    let waits = client.notify(server.id(), b"to the program", Some(PATIENCE)).unwrap();
    assert_eq!(heard(&server.events().unwrap()), b"to the program");
    waits.wait(Some(PATIENCE)).unwrap();
    assert_eq!(dropped(&server), u64::from(MANY));
}

#[test]
fn an_answer_brings_the_acknowledgement_of_its_request_along() {
    let (server, client) = pair();
    let (requests, answers) = (server.inbox(1).unwrap(), client.inbox(2).unwrap());
    for round in 0..100u32 {
        let request = client.notify_on(1, server.id(), &round.to_le_bytes(), Some(PATIENCE)).unwrap();
        assert_eq!(next(&requests).1, round.to_le_bytes());
        // The consumer does not ask for more, so nothing but this sends the acknowledgement before the next heartbeat.
        server.notify_on(2, client.id(), &round.to_le_bytes(), Some(PATIENCE)).unwrap();
        assert_eq!(next(&answers).1, round.to_le_bytes());
        assert!(request.is_done(), "round {round}: answered, and not acknowledged");
    }
    // Without an answer, and with nobody who asks for more, the heartbeat brings it.
    let request = client.notify_on(1, server.id(), b"no answer", Some(PATIENCE)).unwrap();
    assert_eq!(next(&requests).1, b"no answer");
    request.wait(Some(PATIENCE)).unwrap();
    // And who asks for more sends it, for as long as nothing comes. Every other one would wait for a heartbeat, half a
    // second, and all of them ten.
    let began = watch::start();
    for _ in 0..40 {
        let request = client.notify_on(1, server.id(), b"no answer", Some(PATIENCE)).unwrap();
        assert_eq!(next(&requests).1, b"no answer");
        assert!(requests.next(Duration::from_millis(2)).unwrap().is_none());
        request.wait(Some(PATIENCE)).unwrap();
    }
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
}

#[test]
fn a_consumer_that_never_takes_holds_up_its_own_topic_and_no_other() {
    let (server, client) = pair();
    let (stuck, works, events) =
        (server.inbox(1).unwrap(), server.inbox(2).unwrap(), server.events().unwrap());
    let soon = Duration::from_millis(100);
    for number in 0..1024u32 {
        client.notify_on(1, server.id(), &number.to_le_bytes(), Some(PATIENCE)).unwrap();
    }
    let full = client.notify_on(1, server.id(), b"", Some(soon)).err().unwrap();
    assert_eq!(full.code, Code::NotificationsFull);
    assert!(full.text.contains("of topic 1"), "{full}");
    for number in 0..MANY {
        let payload = number.to_le_bytes();
        let others = [
            client.notify_on(2, server.id(), &payload, Some(PATIENCE)).unwrap(),
            client.notify(server.id(), &payload, Some(PATIENCE)).unwrap(),
        ];
        assert_eq!(next(&works).1, payload);
        assert_eq!(heard(&events), payload);
        others.iter().for_each(|notice| notice.wait(Some(PATIENCE)).unwrap());
    }
    assert_eq!(
        client.notify_on(1, server.id(), b"", Some(soon)).err().unwrap().code,
        Code::NotificationsFull
    );
    // Once it takes, it has all of them in their order, and there is room.
    for expected in 0..1024u32 {
        assert_eq!(number(&next(&stuck).1), expected);
    }
    client.notify_on(1, server.id(), b"room", Some(PATIENCE)).unwrap();
    assert_eq!(next(&stuck).1, b"room");
}

#[test]
fn an_inbox_has_one_owner_and_what_it_leaves_is_acknowledged() {
    let (server, client) = pair();
    let inbox = server.inbox(3).unwrap();
    assert_eq!(code(server.inbox(3).map(|_| ())), Code::InvalidArgument);
    assert_eq!(code(server.inbox(0).map(|_| ())), Code::InvalidArgument);
    let notices: Vec<_> =
        (0..5).map(|_| client.notify_on(3, server.id(), b"left", Some(PATIENCE)).unwrap()).collect();
    assert_eq!(next(&inbox).1, b"left");
    notices[0].wait(Some(PATIENCE)).unwrap();
    wait_until("the others", || {
        inbox.fd().is_ok_and(|fd| wait_ready(&fd, Interest::READ, Duration::ZERO).unwrap())
    });
    assert!(!notices[4].is_done());
    // A call that waits ends with it.
    let other = server.inbox(4).unwrap();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| other.next(PATIENCE).unwrap().is_none());
        other.close();
        assert!(waits.join().unwrap());
    });
    drop(inbox);
    notices.iter().for_each(|notice| notice.wait(Some(PATIENCE)).unwrap());
    assert_eq!(dropped(&server), 4);
    let again = server.inbox(3).unwrap();
    assert!(is_empty(&again));
    client.notify_on(3, server.id(), b"again", Some(PATIENCE)).unwrap();
    assert_eq!(next(&again).1, b"again");
}

#[test]
fn the_end_of_a_peer_comes_after_all_that_it_has_sent() {
    let (server, first) = pair();
    let second = engine(Preference::Auto);
    second.meet(server.addresses()[0], Some(PATIENCE)).unwrap();
    let inbox = server.inbox(1).unwrap();
    // Of the first something is taken, and something is not; of the second nothing is.
    for payload in [&b"taken"[..], b"not taken"] {
        first.notify_on(1, server.id(), payload, Some(PATIENCE)).unwrap();
    }
    assert_eq!(next(&inbox), (first.id(), b"taken".to_vec()));
    second.notify_on(1, server.id(), b"not taken", Some(PATIENCE)).unwrap();
    let who = Who { engine: first.id(), incarnation: first.incarnation(), name: String::new() };
    let events = server.events().unwrap();
    for gone in [&first, &second] {
        gone.close(Duration::from_millis(1)).unwrap();
        let event = events.next(PATIENCE).unwrap().unwrap();
        assert_eq!(event.name(), "peer_lost", "{event:?}");
    }
    let ended = lost(&inbox);
    assert_eq!((ended.engine, ended.incarnation), (who.engine, who.incarnation));
    assert!(is_empty(&inbox), "what was not taken before, or the end of a peer that nothing was taken of");
}

#[test]
fn who_is_followed_is_heard_of_without_a_word() {
    let (child, ticket) = Child::owner();
    let client = engine(Preference::Auto);
    let (inbox, other) = (client.inbox(1).unwrap(), client.inbox(2).unwrap());
    let who = client.meet(ticket.addresses[0], Some(PATIENCE)).unwrap();
    inbox.follow(&who).unwrap();
    assert!(is_empty(&inbox));
    child.signal(Signal::KILL);
    let killed = watch::start();
    assert_eq!(lost(&inbox).engine, who.engine);
    assert!(killed.elapsed() < Duration::from_millis(2500), "{:?}", killed.elapsed());
    assert!(is_empty(&inbox) && is_empty(&other));
    // It is gone: that is told at once, each time.
    for _ in 0..2 {
        other.follow(&who).unwrap();
        assert_eq!(lost(&other), who);
    }
    let stranger = EngineId::random().unwrap();
    other.follow(&Who { engine: stranger, incarnation: Incarnation(1), name: String::new() }).unwrap();
    assert_eq!(lost(&other).engine, stranger);
}

#[test]
fn an_inbox_ends_with_its_engine() {
    let (server, client) = pair();
    let inbox = server.inbox(1).unwrap();
    let notice = client.notify_on(1, server.id(), b"not taken", Some(PATIENCE)).unwrap();
    let fd = inbox.fd().unwrap();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| {
            loop {
                match inbox.next(PATIENCE) {
                    Ok(Some(_)) => {}
                    ended => return ended.map(|_| ()),
                }
            }
        });
        server.close(PATIENCE).unwrap();
        assert_eq!(code(waits.join().unwrap()), Code::EngineClosed);
    });
    assert!(wait_ready(&fd, Interest::READ, Duration::ZERO).unwrap());
    wait_until("its end", || notice.is_done());
    assert_eq!(code(inbox.next(Duration::ZERO)), Code::EngineClosed);
    assert_eq!(
        code(inbox.follow(&Who {
            engine: client.id(),
            incarnation: client.incarnation(),
            name: String::new()
        })),
        Code::EngineClosed
    );
    assert_eq!(code(server.inbox(2).map(|_| ())), Code::EngineClosed);
}

/// An inbox of topic 1 whose notifications are handed on, and where they come to.
fn handing(engine: &Engine) -> (Inbox, Receiver<(EngineId, Vec<u8>)>) {
    let (to, from) = channel();
    let take = move |who: &Who, payload: &[u8]| drop(to.send((who.engine, payload.to_vec())));
    (Inbox::handing(engine, 1, take).unwrap(), from)
}

#[test]
fn what_is_handed_on_comes_in_its_order_and_ends_with_the_inbox() {
    let (server, client) = pair();
    let (inbox, came) = handing(&server);
    assert_eq!(code(server.inbox(1).map(|_| ())), Code::InvalidArgument);
    let notices: Vec<_> = (0..MANY)
        .map(|number| client.notify_on(1, server.id(), &number.to_le_bytes(), Some(PATIENCE)).unwrap())
        .collect();
    for number in 0..MANY {
        assert_eq!(came.recv_timeout(PATIENCE).unwrap(), (client.id(), number.to_le_bytes().to_vec()));
    }
    notices.iter().for_each(|notice| notice.wait(Some(PATIENCE)).unwrap());
    assert!(is_empty(&inbox));
    assert_eq!(dropped(&server), 0);
    // Nobody is heard any more, and what took the others is gone.
    inbox.close();
    assert_eq!(came.recv_timeout(PATIENCE), Err(RecvTimeoutError::Disconnected));
    let late = client.notify_on(1, server.id(), b"late", Some(PATIENCE)).unwrap();
    late.wait(Some(PATIENCE)).unwrap();
    assert_eq!(dropped(&server), 1);
    // The end of a peer comes as ever, and the engine's end is one of this.
    let (inbox, came) = handing(&server);
    client.notify_on(1, server.id(), b"again", Some(PATIENCE)).unwrap();
    assert_eq!(came.recv_timeout(PATIENCE).unwrap().1, b"again");
    client.close(PATIENCE).unwrap();
    assert_eq!(lost(&inbox).engine, client.id());
    server.close(PATIENCE).unwrap();
    assert_eq!(came.recv_timeout(PATIENCE), Err(RecvTimeoutError::Disconnected));
}

#[test]
fn an_answer_of_who_was_handed_a_request_brings_its_acknowledgement_along() {
    let (server, client) = pair();
    let answers = client.inbox(2).unwrap();
    let from = server.clone();
    let take = move |who: &Who, payload: &[u8]| {
        let sending = Notifying::begin(&from, 2, who.engine, payload, Some(PATIENCE)).unwrap();
        assert!(sending.wait(Duration::ZERO).unwrap().is_some());
    };
    let _inbox = Inbox::handing(&server, 1, take).unwrap();
    for round in 0..100u32 {
        let request = client.notify_on(1, server.id(), &round.to_le_bytes(), Some(PATIENCE)).unwrap();
        assert_eq!(next(&answers).1, round.to_le_bytes());
        assert!(request.is_done(), "round {round}: answered, and not acknowledged");
    }
}

#[test]
fn what_is_handed_on_and_not_answered_is_acknowledged_soon() {
    let (server, client) = pair();
    let (_inbox, came) = handing(&server);
    // Each would wait for a heartbeat, half a second, and all of them twenty.
    let began = watch::start();
    for round in 0..40u32 {
        let request = client.notify_on(1, server.id(), &round.to_le_bytes(), Some(PATIENCE)).unwrap();
        request.wait(Some(PATIENCE)).unwrap();
        assert_eq!(came.recv_timeout(PATIENCE).unwrap().1, round.to_le_bytes());
    }
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
}
