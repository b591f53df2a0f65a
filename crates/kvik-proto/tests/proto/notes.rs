//! Notifications: in order, acknowledged when they are taken, bounded by the window, told of their end once.

use crate::world::{World, ms};
use kvik_core::{Code, Error, Result};
use kvik_proto::{Frame, MAX_NOTIFICATION, NOTE_WINDOW, NOTE_WINDOW_BYTES, Topic};
use std::sync::Arc;

fn payload(number: usize, len: usize) -> Arc<[u8]> {
    let mut bytes = number.to_le_bytes().to_vec();
    bytes.resize(len, 0);
    bytes.into()
}

fn notify(world: &mut World, from: usize, session: u64, payload: &Arc<[u8]>) -> Result<u64> {
    let deadline = world.now + ms(30_000);
    let number = world.peers[from].node.session(session).notify(0, payload, deadline);
    world.pump(from);
    number
}

/// The consumer takes the oldest that has come.
fn take(world: &mut World, at: usize) -> Option<Arc<[u8]>> {
    let note = world.peers[at].notes.pop_front()?;
    world.peers[at].node.session(note.session).note_taken(note.topic, note.number);
    world.pump(at);
    Some(note.payload)
}

fn end(world: &World, at: usize, session: u64, number: u64) -> Option<Result<(), Code>> {
    world.peers[at]
        .note_ends
        .get(&(session, 0, number))
        .map(|end| end.as_ref().map(|_| ()).map_err(|e| e.code))
}

fn inject(world: &mut World, session: u64, frames: &[Frame]) -> Option<Error> {
    let mut bytes = Vec::new();
    frames.iter().for_each(|frame| frame.encode(&mut bytes));
    let now = world.now;
    world.peers[1].node.session(session).receive(&bytes, now);
    world.pump(1);
    world.peers[1].downs.iter().find(|(down, _)| *down == session).map(|(_, error)| error.clone())
}

#[test]
fn each_call_tells_that_something_waits_to_be_sent() {
    let (mut world, session) = World::pair(1);
    let node = &mut world.peers[0].node;
    for call in 0..3 {
        let mut unsent = Vec::new();
        // What the calls before have left there is not sent yet.
        node.session(session).notify(0, &payload(call, 8), ms(30_000)).unwrap();
        node.session(session).notify(0, &payload(call, 8), ms(30_000)).unwrap();
        node.take_unsent(&mut unsent);
        assert_eq!(unsent, [session]);
    }
}

#[test]
fn they_come_in_order_and_end_when_they_are_taken() {
    for seed in 0..4 {
        let (mut world, session) = World::pair(seed);
        let mut taken = [0usize; 2];
        for number in 0..1500 {
            for from in 0..2 {
                let note = payload(number, 8 + world.rng.below(200));
                while let Err(error) = notify(&mut world, from, session, &note) {
                    assert_eq!(error.code, Code::NotificationsFull);
                    world.settle();
                    let got = take(&mut world, 1 - from).expect("a full window, and nothing to take");
                    assert_eq!(got[..8], taken[1 - from].to_le_bytes());
                    taken[1 - from] += 1;
                    world.settle();
                }
            }
        }
        world.settle();
        for (at, seen) in taken.iter_mut().enumerate() {
            while let Some(got) = take(&mut world, at) {
                assert_eq!(got[..8], seen.to_le_bytes());
                *seen += 1;
            }
        }
        world.settle();
        assert_eq!(taken, [1500; 2]);
        for at in 0..2 {
            assert!((1..=1500).all(|number| end(&world, at, session, number) == Some(Ok(()))));
        }
        world.assert_quiet();
        world.assert_no_leak();
    }
}

#[test]
fn what_nobody_takes_fills_the_window_and_nothing_else() {
    let (mut world, session) = World::pair(1);
    for number in 0..NOTE_WINDOW {
        assert_eq!(notify(&mut world, 0, session, &payload(number, 8)).unwrap(), number as u64 + 1);
    }
    assert_eq!(notify(&mut world, 0, session, &payload(0, 8)).unwrap_err().code, Code::NotificationsFull);
    world.settle();
    // Having come is not being taken.
    assert_eq!(notify(&mut world, 0, session, &payload(0, 8)).unwrap_err().code, Code::NotificationsFull);
    assert_eq!(end(&world, 0, session, 1), None);
    take(&mut world, 1).unwrap();
    world.settle();
    assert_eq!(end(&world, 0, session, 1), Some(Ok(())));
    assert_eq!(notify(&mut world, 0, session, &payload(0, 8)).unwrap(), NOTE_WINDOW as u64 + 1);

    let (mut world, session) = World::pair(2);
    let long = payload(0, MAX_NOTIFICATION);
    for _ in 0..NOTE_WINDOW_BYTES / MAX_NOTIFICATION {
        notify(&mut world, 0, session, &long).unwrap();
    }
    assert_eq!(notify(&mut world, 0, session, &payload(0, 8)).unwrap_err().code, Code::NotificationsFull);
    world.settle();
    let held = world.peers[1].node.held_for(session);
    assert!((NOTE_WINDOW_BYTES as u64..NOTE_WINDOW_BYTES as u64 + (256 << 10)).contains(&held), "{held}");
    let over = payload(0, MAX_NOTIFICATION + 1);
    assert_eq!(notify(&mut world, 0, session, &over).unwrap_err().code, Code::InvalidArgument);
}

#[test]
fn taken_out_of_turn_they_are_acknowledged_in_turn() {
    let (mut world, session) = World::pair(3);
    for number in 0..3 {
        notify(&mut world, 0, session, &payload(number, 8)).unwrap();
    }
    world.settle();
    for (taken, known) in [(3, 0), (2, 0), (2, 0), (9, 0), (0, 0), (1, 3)] {
        world.peers[1].node.session(session).note_taken(0, taken);
        world.pump(1);
        world.settle();
        assert_eq!((1..=3).filter(|number| end(&world, 0, session, *number).is_some()).count(), known);
    }
}

#[test]
fn each_topic_has_a_window_and_an_order_of_its_own() {
    let (mut world, session) = World::pair(9);
    let deadline = world.now + ms(30_000);
    let send = |world: &mut World, topic: Topic, number: usize| {
        let sent = world.peers[0].node.session(session).notify(topic, &payload(number, 8), deadline);
        world.pump(0);
        sent.map_err(|error| error.code)
    };
    // Nobody takes those of topic 7: its window is full, and no other one is.
    for number in 0..NOTE_WINDOW {
        assert_eq!(send(&mut world, 7, number), Ok(number as u64 + 1));
    }
    assert_eq!(send(&mut world, 7, 0), Err(Code::NotificationsFull));
    for number in 0..3 * NOTE_WINDOW {
        for topic in [0, 255] {
            assert_eq!(send(&mut world, topic, number), Ok(number as u64 + 1), "topic {topic}");
        }
        world.settle();
        let (others, stuck): (Vec<_>, Vec<_>) =
            world.peers[1].notes.drain(..).partition(|note| note.topic != 7);
        world.peers[1].notes.extend(stuck);
        assert_eq!(others.len(), 2);
        for note in others {
            assert_eq!((note.number, &note.payload[..]), (number as u64 + 1, &payload(number, 8)[..]));
            world.peers[1].node.session(session).note_taken(note.topic, note.number);
            world.pump(1);
            world.settle();
            let end = &world.peers[0].note_ends[&(session, note.topic, note.number)];
            assert!(end.is_ok(), "{end:?}");
        }
        assert_eq!(send(&mut world, 7, 0), Err(Code::NotificationsFull));
    }
    // What its consumer takes in the end is in its order, and frees its window.
    for number in 0..NOTE_WINDOW {
        let note = world.peers[1].notes.pop_front().unwrap();
        assert_eq!((note.topic, &note.payload[..]), (7, &payload(number, 8)[..]));
        world.peers[1].node.session(session).note_taken(7, note.number);
        world.pump(1);
    }
    world.settle();
    assert_eq!(send(&mut world, 7, 0), Ok(NOTE_WINDOW as u64 + 1));
    world.cut(0, session);
    world.settle();
    let lost = &world.peers[0].note_ends[&(session, 7, NOTE_WINDOW as u64 + 1)];
    assert_eq!(lost.as_ref().unwrap_err().code, Code::PeerLost);
}

#[test]
fn one_that_is_not_taken_ends_at_its_deadline_and_keeps_its_place() {
    let (mut world, session) = World::pair(4);
    let soon = world.now + ms(700);
    let number = world.peers[0].node.session(session).notify(0, &payload(0, 8), soon).unwrap();
    for number in 1..NOTE_WINDOW {
        notify(&mut world, 0, session, &payload(number, 8)).unwrap();
    }
    world.advance(ms(699));
    assert_eq!(end(&world, 0, session, number), None);
    world.advance(ms(1));
    assert_eq!(end(&world, 0, session, number), Some(Err(Code::DeadlineExceeded)));
    assert_eq!(notify(&mut world, 0, session, &payload(0, 8)).unwrap_err().code, Code::NotificationsFull);
    take(&mut world, 1).unwrap();
    world.settle();
    notify(&mut world, 0, session, &payload(0, 8)).unwrap();
    assert_eq!(end(&world, 0, session, number + 1), None);
}

#[test]
fn the_end_of_a_session_ends_them_all() {
    let (mut world, session) = World::pair(5);
    for number in 0..4 {
        notify(&mut world, 0, session, &payload(number, 8)).unwrap();
    }
    world.settle();
    take(&mut world, 1).unwrap();
    world.settle();
    world.cut(0, session);
    world.settle();
    assert_eq!(end(&world, 0, session, 1), Some(Ok(())));
    assert!((2..=4).all(|number| end(&world, 0, session, number) == Some(Err(Code::PeerLost))));
    // What was not taken by then belongs to nobody: it is not acknowledged on the next session either.
    let next = world.connect(0, 1);
    take(&mut world, 1).unwrap();
    assert!(world.link(next).control[1].is_empty());
    assert_eq!(notify(&mut world, 0, session, &payload(0, 8)).unwrap_err().code, Code::PeerLost);
    assert_eq!(notify(&mut world, 0, next, &payload(0, 8)).unwrap(), 1);
    world.assert_no_leak();
}

#[test]
fn peers_that_break_the_rules_are_cut_off() {
    let note = |number, len| Frame::Notify { topic: 0, number, payload: payload(0, len) };
    let many = |count: usize, len| (1..=count as u64).map(|number| note(number, len)).collect::<Vec<_>>();
    let rules = [
        ("the first is not 1", vec![note(2, 8)]),
        ("a number twice", vec![note(1, 8), note(1, 8)]),
        ("a gap", vec![note(1, 8), note(3, 8)]),
        ("too many", many(NOTE_WINDOW + 1, 8)),
        ("too many bytes", many(NOTE_WINDOW_BYTES / MAX_NOTIFICATION + 1, MAX_NOTIFICATION)),
        ("too long", vec![note(1, MAX_NOTIFICATION + 1)]),
        ("an answer to nothing", vec![Frame::Noted { topic: 0, upto: 1 }]),
        ("an answer to number 0", vec![Frame::Noted { topic: 0, upto: 0 }]),
        (
            "numbers of another topic",
            vec![note(1, 8), Frame::Notify { topic: 1, number: 2, payload: payload(0, 8) }],
        ),
        ("an answer of another topic", vec![Frame::Noted { topic: 1, upto: 1 }]),
    ];
    for (what, frames) in rules {
        let (mut world, session) = World::pair(6);
        let whole = &frames[..frames.len() - 1];
        assert!(inject(&mut world, session, whole).is_none(), "{what}: cut off before the rule was broken");
        let error = inject(&mut world, session, &frames[frames.len() - 1..]).expect(what);
        assert_eq!(error.code, Code::ProtocolError, "{what}: {error}");
    }
    for upto in [0, 1, 3, u64::MAX] {
        let (mut world, session) = World::pair(7);
        notify(&mut world, 1, session, &payload(0, 8)).unwrap();
        notify(&mut world, 1, session, &payload(0, 8)).unwrap();
        assert!(inject(&mut world, session, &[Frame::Noted { topic: 0, upto: 1 }]).is_none());
        let error = inject(&mut world, session, &[Frame::Noted { topic: 0, upto }]).unwrap();
        assert_eq!(error.code, Code::ProtocolError, "acknowledged up to {upto}: {error}");
    }
}

#[test]
fn a_silent_peer_is_suspect_at_half_time_and_cleared_by_any_sign() {
    let (mut world, session) = World::pair(8);
    world.advance(ms(10_000));
    assert!(world.peers[0].lives.is_empty(), "a peer that beats was suspected");
    let heard = world.peers[0].node.session_states(world.now)[0];
    assert!(heard.session == session && !heard.suspect && heard.silent <= ms(500), "{heard:?}");
    world.peers[1].asleep = true;
    let quiet = world.now - heard.silent;
    while world.peers[0].lives.is_empty() {
        assert!(world.now <= quiet + ms(1000), "not suspected after {:?}", world.now - quiet);
        world.advance(ms(1));
    }
    assert_eq!(world.peers[0].lives, ["silent"]);
    assert!(world.now >= quiet + ms(1000), "suspected after {:?}", world.now - quiet);
    assert!(world.peers[0].node.session_states(world.now)[0].suspect);
    world.advance(ms(500));
    assert_eq!(world.peers[0].lives, ["silent"]);
    world.peers[1].asleep = false;
    world.advance(ms(500));
    assert_eq!(world.peers[0].lives, ["silent", "heard"]);
    assert!(world.peers[0].downs.is_empty());
    world.peers[1].node.goodbye();
    world.pump(1);
    world.settle();
    assert_eq!(world.peers[0].lives, ["silent", "heard", "goodbye"]);
}
