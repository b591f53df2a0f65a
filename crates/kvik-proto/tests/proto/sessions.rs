//! Sessions: beats, deaths, sleeps, and two connections where one would do.

use crate::memory::{Mem, view};
use crate::world::{World, layout, ms};
use kvik_core::{Code, Error, GrantId, Right, Use};
use kvik_proto::{Join, JoinKind, LAST_WORD, MAX_CHANNELS, Op, Path};
use std::sync::Arc;

fn readable(world: &mut World, owner: usize) -> GrantId {
    let layout = layout(4, 8192);
    world.grant(owner, &Mem::for_layout(&layout, 2), &view(&layout, &[0, 1, 2, 3]), Right::Read, Use::Many)
}

fn read(world: &mut World, reader: usize, session: u64, grant: GrantId) -> (u64, u64) {
    let layout = layout(4, 8192);
    let here = Mem::for_layout(&layout, 1);
    let side = view(&layout, &[0, 1, 2, 3]);
    let open = world.open(reader, grant, Op::Read, Path::Channels, Some((&here, &side)));
    world.begin(reader, session, open)
}

#[test]
fn a_silent_peer_is_dead_after_two_seconds_and_not_before() {
    let (mut world, session) = World::pair(1);
    world.advance(ms(60_000));
    assert!(world.peers.iter().all(|peer| peer.downs.is_empty()), "peers that beat are alive");
    let grant = world.grant_id();
    let key = read(&mut world, 0, session, grant);
    world.settle();
    world.peers[1].asleep = true;
    let heard = world.now;
    while world.outcome(0, key).is_none() {
        assert!(world.now < heard + ms(2000), "alive after {:?}", world.now - heard);
        world.advance(ms(1));
    }
    assert!(world.now >= heard + ms(1500), "dead after {:?}", world.now - heard);
    assert_eq!(world.code(0, key), Some(Code::PeerLost));
}

#[test]
fn death_is_not_declared_before_its_time() {
    let (mut world, session) = World::pair(1);
    world.advance(ms(10));
    // The last sign of life comes just now, off the beat.
    world.peers[0].node.session(session).touch(world.now);
    world.peers[1].asleep = true;
    world.link(session).lost = true;
    world.advance(ms(1999));
    assert!(world.peers[0].downs.is_empty());
    world.advance(ms(1));
    assert_eq!(world.peers[0].downs[0].1.code, Code::PeerLost);
}

#[test]
fn a_node_that_slept_reads_before_it_judges() {
    let (mut world, session) = World::pair(1);
    world.advance(ms(3000));
    // Node 0 sleeps for 10 s; node 1 keeps beating (its own judgement is left aside: it hears the other's bytes).
    world.peers[0].asleep = true;
    for _ in 0..20 {
        world.now += ms(500);
        world.peers[1].node.session(session).touch(world.now);
        world.peers[1].node.tick(world.now);
        world.pump(1);
    }
    world.peers[0].asleep = false;
    world.peers[0].node.tick(world.now);
    world.pump(0);
    assert!(world.peers[0].downs.is_empty(), "the peer's beats were there to be read");
    world.advance(ms(5000));
    assert!(world.peers.iter().all(|peer| peer.downs.is_empty()));
}

#[test]
fn slow_beats_do_not_make_a_peer_immortal() {
    let now = ms(0);
    let timing = kvik_proto::Timing { heartbeat: ms(1900), dead_after: ms(2000) };
    let mut node: kvik_proto::Node<Mem> = kvik_proto::Node::new(crate::world::identity(1), timing, now);
    let (left, _) = crate::world::shake(crate::world::local(1, None), crate::world::local(2, None), None, 1);
    node.add_session(left.unwrap(), now);
    let mut at = now;
    while let Some(next) = node.next_timeout() {
        at = next;
        node.tick(at);
        assert!(at <= ms(2000));
    }
    assert_eq!(at, ms(2000));
}

#[test]
fn a_channel_joins_once_and_only_its_own_session() {
    let (mut world, _) = World::pair(1);
    let (left, right) = world.handshake(0, 1);
    let session = right.session;
    assert_eq!(left.session, right.session);
    let now = world.now;
    let node = &mut world.peers[1].node;
    node.add_session(right, now);
    let join = |index, kind| Join::new(session, index, kind, &left.key, [9; 32]);
    node.join(&join(0, JoinKind::Data), now).unwrap();
    node.join(&join(0, JoinKind::Local), now).unwrap();
    node.join(&join(1, JoinKind::Data), now).unwrap();
    for bad in [join(0, JoinKind::Data), join(MAX_CHANNELS, JoinKind::Data)] {
        assert_eq!(node.join(&bad, now).unwrap_err().code, Code::ProtocolError);
    }
    let (other, _) = world.handshake(0, 1);
    let node = &mut world.peers[1].node;
    let forged = Join::new(session, 5, JoinKind::Data, &other.key, [9; 32]);
    assert!(node.join(&forged, now).is_err());
    let nowhere = Join::new(session ^ 1, 5, JoinKind::Data, &left.key, [9; 32]);
    assert!(node.join(&nowhere, now).is_err());
}

/// Who opened a session dials its channels. A join that comes to it is its own, sent back by somebody in between.
#[test]
fn a_join_that_is_sent_back_to_its_sender_is_refused() {
    let (mut world, _) = World::pair(2);
    let (left, right) = world.handshake(0, 1);
    let now = world.now;
    let join = Join::new(left.session, 0, JoinKind::Data, &left.key, [9; 32]);
    world.peers[0].node.add_session(left, now);
    world.peers[1].node.add_session(right, now);
    assert_eq!(world.peers[0].node.join(&join, now).unwrap_err().code, Code::ProtocolError);
    world.peers[1].node.join(&join, now).unwrap();
}

/// Both connect at once. A request that one side still sent on the loser must be served.
#[test]
fn two_connections_become_one_and_nothing_fails() {
    for seed in 0..30 {
        let mut world = World::new(2, seed);
        let (a_opener, a_listener) = world.handshake(0, 1);
        let (b_opener, b_listener) = world.handshake(1, 0);
        let (winner, loser) = (a_opener.session, b_opener.session);
        let grants = [readable(&mut world, 0), readable(&mut world, 1)];
        // Engine 0 knows its own connection last: until then it uses the other one.
        let now = world.now;
        world.peers[1].node.add_session(b_opener, now);
        world.peers[0].node.add_session(b_listener, now);
        world.peers[1].node.add_session(a_listener, now);
        let peers = [world.peers[0].identity, world.peers[1].identity];
        assert_eq!(world.peers[1].node.session_with(&peers[0]), Some(winner));
        assert_eq!(world.peers[0].node.session_with(&peers[1]), Some(loser));
        world.advance(ms(500));
        let early = read(&mut world, 0, loser, grants[1]);
        // The request is on its way while engine 1 looks whether the loser is idle.
        world.tick();
        world.peers[0].node.add_session(a_opener, world.now);
        assert_eq!(world.peers[0].node.session_with(&peers[1]), Some(winner));
        let late = [read(&mut world, 0, winner, grants[1]), read(&mut world, 1, winner, grants[0])];
        world.advance(ms(400));
        assert_eq!(world.outcome(0, early), Some(Ok(())), "seed {seed}");
        assert_eq!(world.outcome(0, late[0]), Some(Ok(())), "seed {seed}");
        assert_eq!(world.outcome(1, late[1]), Some(Ok(())), "seed {seed}");
        world.advance(ms(6000));
        for peer in &world.peers {
            assert_eq!(peer.downs.len(), 1, "seed {seed}: {:?}", peer.downs);
            assert_eq!(peer.downs[0].0, loser);
            assert_eq!(peer.node.sessions(), [winner]);
        }
        assert!(world.peers[0].downs[0].1.text.contains("in order"), "the goodbye arrived");
        assert_eq!([0, 1].map(|at| world.peers[at].lives.clone()), [["goodbye"], ["left"]], "seed {seed}");
        world.assert_no_leak();
    }
}

/// A program may take a notification late: until then the connection that it came on is needed.
#[test]
fn a_second_connection_stays_while_a_notification_of_it_is_not_taken() {
    for senders in [vec![0], vec![1], vec![0, 1]] {
        let mut world = World::new(2, 1);
        let (winner, loser) = (world.connect(0, 1), world.connect(1, 0));
        let (payload, deadline) = (Arc::from([1]), world.now + ms(30_000));
        for from in &senders {
            let node = &mut world.peers[*from].node;
            node.session(loser).notify(7, &payload, deadline).unwrap();
            world.pump(*from);
        }
        world.advance(ms(10_000));
        for peer in &world.peers {
            assert!(peer.downs.is_empty() && peer.note_ends.is_empty(), "{senders:?}: {:?}", peer.downs);
        }
        for from in &senders {
            let note = world.peers[1 - from].notes.pop_front().expect("a notification");
            world.peers[1 - from].node.session(loser).note_taken(note.topic, note.number);
            world.pump(1 - from);
        }
        world.settle();
        assert!(senders.iter().all(|from| world.peers[*from].note_ends[&(loser, 7, 1)].is_ok()));
        world.advance(ms(6000));
        assert!(world.peers.iter().all(|peer| peer.node.sessions() == [winner]), "{senders:?}");
        world.assert_no_leak();
    }
}

#[test]
fn when_the_preferred_connection_breaks_the_other_takes_over() {
    let mut world = World::new(2, 1);
    let (first, second) = (world.connect(0, 1), world.connect(1, 0));
    let peer = world.peers[1].identity;
    assert_eq!(world.peers[0].node.session_with(&peer), Some(first));
    world.cut(0, first);
    world.settle();
    assert_eq!(world.peers[0].node.session_with(&peer), Some(second));
    world.advance(ms(10_000));
    assert_eq!(world.peers[0].node.sessions(), [second]);
    // A connection anew by the same side replaces its elder.
    let third = world.connect(1, 0);
    assert_eq!(world.peers[0].node.session_with(&peer), Some(third));
    world.advance(ms(10_000));
    assert_eq!(world.peers[0].node.sessions(), [third]);
    assert_eq!(world.peers[1].node.sessions(), [third]);
}

#[test]
fn goodbye_and_channel_requests_arrive() {
    let (mut world, session) = World::pair(1);
    world.peers[1].node.session(session).ask_for_channels();
    world.pump(1);
    world.settle();
    assert_eq!(world.peers[0].asked_for_channels, 1);
    world.peers[1].node.goodbye();
    world.pump(1);
    world.settle();
    assert_eq!(world.peers[0].downs.len(), 1);
    assert_eq!(world.peers[1].downs.len(), 1);
    assert!(world.peers[0].node.session_with(&world.peers[1].identity).is_none());
}

#[test]
fn bytes_of_a_dead_session_keep_nobody_alive() {
    let (mut world, old) = World::pair(3);
    world.cut(1, old);
    world.settle();
    let new = world.connect(0, 1);
    world.link(new).lost = true;
    let mut beat = Vec::new();
    kvik_proto::Frame::Beat.encode(&mut beat);
    for _ in 0..6 {
        let now = world.now;
        world.peers[1].node.session(old).receive(&beat, now);
        world.advance(ms(400));
    }
    assert!(world.peers[1].node.established(new).is_none(), "a session that was silent is held for alive");
}

fn channel_lost(world: &mut World, peer: usize, session: u64, code: Code) {
    let now = world.now;
    world.peers[peer].node.session(session).channel_lost(Error::new(code, "a channel broke"), now);
    world.pump(peer);
}

/// A peer that closes says so on the control connection, and its data channels end by themselves: which of the two is
/// seen first is chance.
#[test]
fn a_goodbye_counts_that_the_end_of_a_channel_has_overtaken() {
    let (mut world, session) = World::pair(1);
    world.advance(ms(100));
    let peer = world.peers[1].identity;
    channel_lost(&mut world, 0, session, Code::PeerLost);
    assert_eq!(world.peers[0].node.session_with(&peer), None, "new transfers go in another session");
    world.advance(LAST_WORD - ms(10));
    assert!(world.peers[0].downs.is_empty(), "taken for a loss before the peer could say anything");
    world.peers[1].node.goodbye();
    world.pump(1);
    world.settle();
    assert!(world.peers[0].downs[0].1.text.contains("in order"), "{:?}", world.peers[0].downs);
    assert_eq!(world.peers[0].lives, ["goodbye"]);
}

#[test]
fn a_channel_whose_end_the_peer_has_seen_first_gets_no_new_transfers() {
    let (mut world, session) = World::pair(1);
    let grant = readable(&mut world, 1);
    let key = read(&mut world, 0, session, grant);
    world.peers[0].hold = true;
    world.settle();
    channel_lost(&mut world, 1, session, Code::PeerLost);
    world.peers[0].hold = false;
    world.settle();
    assert_eq!(world.code(0, key), Some(Code::PeerLost));
    let peer = world.peers[1].identity;
    assert_eq!(world.peers[0].node.session_with(&peer), None, "the next transfer would end with the session");
}

#[test]
fn a_lost_channel_without_a_goodbye_ends_the_session_soon_whatever_else_lives() {
    let (mut world, session) = World::pair(1);
    let grant = readable(&mut world, 1);
    let key = read(&mut world, 0, session, grant);
    channel_lost(&mut world, 0, session, Code::PeerLost);
    world.settle();
    assert_eq!(world.code(0, key), Some(Code::PeerLost), "its transfers do not wait for that");
    let peer = world.peers[1].identity;
    let second = world.connect(0, 1);
    assert_eq!(world.peers[0].node.session_with(&peer), Some(second));
    world.advance(LAST_WORD - ms(1));
    channel_lost(&mut world, 0, session, Code::PeerLost);
    world.advance(ms(1));
    assert_eq!(world.peers[0].downs.len(), 1, "{:?}", world.peers[0].downs);
    assert_eq!(world.peers[0].downs[0].1.text, "a channel broke");
    assert_eq!(world.peers[0].node.session_with(&peer), Some(second));
    // What is no end of a connection waits for no word.
    channel_lost(&mut world, 0, second, Code::ProtocolError);
    assert_eq!(world.peers[0].downs.len(), 2);
}
