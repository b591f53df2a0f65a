//! The window: how much of a session's stream its channels have in flight.

use crate::memory::{Mem, view};
use crate::world::{Action, World, layout};
use kvik_core::{Right, Use};
use kvik_proto::{Event, Op, Path, WorkOutcome, WorkRequest};
use std::time::Duration;

const CHUNK: u64 = 8192;

/// An owner that has 32 chunks to send, and a window.
fn sending(window: u64) -> (World, u64) {
    let (mut world, session) = World::pair(7);
    let layout = layout(64, 4096);
    let pages = view(&layout, &(0..64).collect::<Vec<_>>());
    let (here, there) = (Mem::for_layout(&layout, 1), Mem::for_layout(&layout, 2));
    let grant = world.grant(1, &there, &pages, Right::Read, Use::Many);
    let mut open = world.open(0, grant, Op::Read, Path::Channels, Some((&here, &pages)));
    open.chunk = CHUNK;
    world.peers[1].node.set_window(window);
    world.begin(0, session, open);
    let frames = |world: &World| world.actions().into_iter().find(|act| matches!(act, Action::Bytes(..)));
    while let Some(action) = frames(&world) {
        world.act(action, usize::MAX);
    }
    (world, session)
}

fn next(world: &mut World, session: u64) -> Option<WorkRequest<Mem>> {
    let now = world.now;
    world.peers[1].node.next_send(session, now)
}

fn done(world: &mut World, request: WorkRequest<Mem>) -> bool {
    let outcome = WorkOutcome::Done { extents: 1, verify: Duration::ZERO };
    let node = &mut world.peers[1].node;
    while node.next_event().is_some() {}
    node.work_done(request.id, outcome);
    std::iter::from_fn(|| node.next_event()).any(|event| matches!(event, Event::Send(_)))
}

#[test]
fn no_more_is_in_flight_than_the_window_and_what_is_done_makes_room() {
    let (mut world, session) = sending(3 * CHUNK + 100);
    let mut requests: Vec<_> = (0..3).map(|_| next(&mut world, session).expect("room")).collect();
    for left in (0..29).rev() {
        assert_eq!(world.peers[1].node.in_flight(session), 3 * CHUNK);
        assert!(next(&mut world, session).is_none(), "the window is full");
        assert!(world.peers[1].node.wants_to_send(session));
        assert!(done(&mut world, requests.remove(0)), "nobody was told of the room");
        requests.push(next(&mut world, session).expect("room again"));
        assert!(left > 0 || next(&mut world, session).is_none());
    }
    for request in requests {
        done(&mut world, request);
    }
    assert_eq!(world.peers[1].node.in_flight(session), 0);
}

#[test]
fn one_chunk_is_always_allowed() {
    let (mut world, session) = sending(1);
    for _ in 0..32 {
        let request = next(&mut world, session).expect("one chunk");
        assert!(next(&mut world, session).is_none());
        done(&mut world, request);
    }
    assert_eq!(world.peers[1].node.in_flight(session), 0);
}

#[test]
fn what_a_stopped_transfer_had_in_flight_counts_until_it_is_done() {
    let (mut world, session) = sending(2 * CHUNK);
    let requests = [next(&mut world, session).unwrap(), next(&mut world, session).unwrap()];
    world.peers[1].node.end_all_grants();
    world.pump(1);
    assert_eq!(world.peers[1].node.in_flight(session), 2 * CHUNK);
    for request in requests {
        world.peers[1].node.work_done(request.id, WorkOutcome::Void);
    }
    assert_eq!(world.peers[1].node.in_flight(session), 0);
    assert!(next(&mut world, session).is_none());
}
