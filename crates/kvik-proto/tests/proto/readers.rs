//! How many engines a handover is for, by the account of the owner and of each of the readers.

use crate::memory::{Mem, Rng, view};
use crate::world::{World, layout, ms};
use kvik_core::{Code, GrantId, GrantState, Right, Use, View};
use kvik_proto::{FlowKey, MAX_READERS, OWN_SESSION, Op, Open, Path};
use std::collections::BTreeSet;

/// Engine 0 owns a grant; every engine, itself too, may read it.
struct Handover {
    world: World,
    sessions: Vec<u64>,
    grant: GrantId,
    all: View,
}

fn handover(engines: u8, seed: u64, uses: Use) -> Handover {
    let mut world = World::new(engines, seed);
    let others = (1..usize::from(engines)).map(|engine| world.connect(engine, 0));
    let sessions = std::iter::once(OWN_SESSION).chain(others).collect();
    let layout = layout(4, 1024);
    let all = view(&layout, &[0, 1, 2, 3]);
    let grant = world.grant(0, &Mem::for_layout(&layout, 9), &all, Right::Read, uses);
    Handover { world, sessions, grant, all }
}

impl Handover {
    fn open(&mut self, reader: usize, readers: u16) -> Open<Mem> {
        let here = Mem::for_layout(self.all.layout(), 1);
        let open = self.world.open(reader, self.grant, Op::Read, Path::Channels, Some((&here, &self.all)));
        Open { readers, ..open }
    }

    fn read(&mut self, reader: usize, readers: u16) -> Result<(), Code> {
        let open = self.open(reader, readers);
        self.world.transfer(reader, self.sessions[reader], open).map_err(|error| error.code)
    }

    fn begin(&mut self, reader: usize, readers: u16) -> FlowKey {
        let open = self.open(reader, readers);
        self.world.begin(reader, self.sessions[reader], open)
    }

    fn release(&mut self, reader: usize, readers: u16) -> Result<(), Code> {
        let open = self.world.open(reader, self.grant, Op::Confirm, Path::Channels, None);
        let open = Open { readers, ..open };
        self.world.transfer(reader, self.sessions[reader], open).map_err(|error| error.code)
    }

    fn state(&self) -> Option<GrantState> {
        self.world.peers[0].node.grant_state(self.grant)
    }

    fn over(mut self, state: GrantState) {
        assert_eq!(self.state(), Some(state));
        self.world.assert_quiet();
        self.world.assert_no_leak();
    }
}

#[test]
fn a_grant_for_one_waits_for_all_readers_that_were_declared() {
    let mut h = handover(4, 1, Use::Once(1));
    h.read(1, 3).unwrap();
    h.read(1, 3).unwrap();
    h.release(2, 3).unwrap();
    assert_eq!(h.state(), Some(GrantState::Live));
    h.read(0, 3).unwrap();
    assert_eq!(h.read(3, 3), Err(Code::GrantConsumed));
    h.over(GrantState::Consumed);
}

#[test]
fn a_lone_release_ends_a_grant_that_nobody_else_has_asked_about() {
    let mut h = handover(2, 2, Use::Once(1));
    h.release(1, 1).unwrap();
    h.over(GrantState::Consumed);
    let mut h = handover(2, 2, Use::Once(1));
    h.release(1, 2).unwrap();
    assert_eq!(h.state(), Some(GrantState::Live));
    h.world.advance(ms(120_001));
    h.over(GrantState::Expired);
}

#[test]
fn the_owner_may_know_of_more_readers_than_they_do() {
    let mut h = handover(4, 3, Use::Once(3));
    h.read(1, 2).unwrap();
    h.read(2, 2).unwrap();
    assert_eq!(h.state(), Some(GrantState::Live));
    h.read(3, 2).unwrap();
    h.over(GrantState::Consumed);
    let mut h = handover(3, 3, Use::Many);
    h.read(1, 2).unwrap();
    h.read(2, 2).unwrap();
    h.over(GrantState::Live);
}

#[test]
fn a_revoked_grant_stops_every_reader() {
    let mut h = handover(3, 6, Use::Once(2));
    for reader in [1, 2] {
        h.world.peers[reader].hold = true;
    }
    let reading = [1, 2].map(|reader| (reader, h.begin(reader, 2)));
    h.world.settle();
    h.world.end_grant(0, h.grant, GrantState::Revoked);
    // They hear of it before their executors go on, or all of it may be there by then.
    h.world.settle();
    for reader in [1, 2] {
        h.world.peers[reader].hold = false;
    }
    h.world.settle();
    for (reader, key) in reading {
        assert_eq!(h.world.code(reader, key), Some(Code::GrantRevoked), "reader {reader} was not stopped");
    }
    h.over(GrantState::Revoked);
}

/// A reader that counts on others to wait has begun: who knows of no other reader cannot free its pages.
#[test]
fn the_pages_of_a_reader_in_flight_stay_whoever_else_confirms() {
    let mut h = handover(4, 4, Use::Once(1));
    h.world.peers[1].hold = true;
    let reading = h.begin(1, 2);
    h.world.settle();
    assert!(h.world.outcome(1, reading).is_none());
    h.release(3, 1).unwrap();
    assert_eq!(h.state(), Some(GrantState::Live));
    h.world.peers[1].hold = false;
    h.world.settle();
    assert_eq!(h.world.outcome(1, reading), Some(Ok(())));
    h.over(GrantState::Consumed);
}

#[test]
fn a_reader_that_dies_leaves_the_grant_to_its_expiry() {
    let mut h = handover(3, 5, Use::Once(1));
    for reader in [1, 2] {
        h.world.peers[reader].hold = true;
    }
    let (one, two) = (h.begin(1, 2), h.begin(2, 2));
    h.world.settle();
    h.world.cut(2, h.sessions[2]);
    h.world.peers[1].hold = false;
    h.world.peers[2].hold = false;
    h.world.settle();
    assert_eq!((h.world.outcome(1, one), h.world.code(2, two)), (Some(Ok(())), Some(Code::PeerLost)));
    // Not even the one that is left can end it alone, whatever it says.
    h.release(1, 1).unwrap();
    h.world.advance(ms(119_000));
    assert_eq!(h.state(), Some(GrantState::Live));
    h.world.advance(ms(1001));
    h.over(GrantState::Expired);
}

#[test]
fn a_number_of_readers_that_cannot_be_is_refused() {
    let mut h = handover(2, 6, Use::Once(1));
    for readers in [0, MAX_READERS + 1, u16::MAX] {
        let open = h.open(1, readers);
        let refused = h.world.try_begin(1, h.sessions[1], open).unwrap_err();
        assert_eq!(refused.code, Code::InvalidArgument);
        assert!(refused.text.contains("readers"), "{refused}");
        let open = h.open(0, readers);
        assert_eq!(h.world.try_begin(0, OWN_SESSION, open).unwrap_err().code, Code::InvalidArgument);
    }
    h.read(1, MAX_READERS).unwrap();
    h.over(GrantState::Live);
}

/// Whatever is declared in whatever order: the grant is consumed by the first confirmation with which as many engines
/// have confirmed as the owner or anybody has declared by then.
#[test]
fn mixed_declarations_never_end_a_grant_early() {
    let mut rng = Rng(std::env::var("KVIK_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(7));
    println!("KVIK_SEED={}", rng.0);
    let mut consumed = 0;
    for _ in 0..200 {
        let uses = 1 + rng.below(2) as u32;
        let mut h = handover(5, rng.next(), Use::Once(uses));
        let (mut needed, mut confirmed) = (uses as usize, BTreeSet::new());
        for _ in 0..1 + rng.below(8) {
            let (reader, readers) = (rng.below(5), 1 + rng.below(4));
            let done = match rng.below(3) {
                0 => h.release(reader, readers as u16),
                1 => h.read(reader, readers as u16),
                _ => {
                    let open = Open { confirm: false, ..h.open(reader, readers as u16) };
                    let read = h.world.transfer(reader, h.sessions[reader], open);
                    needed = needed.max(readers);
                    assert_eq!(read, Ok(()));
                    continue;
                }
            };
            assert_eq!(done, Ok(()));
            needed = needed.max(readers);
            confirmed.insert(reader);
            let state = if confirmed.len() >= needed { GrantState::Consumed } else { GrantState::Live };
            assert_eq!(h.state(), Some(state), "{confirmed:?} of {needed}");
            if state == GrantState::Consumed {
                consumed += 1;
                break;
            }
        }
        h.world.assert_no_leak();
    }
    assert!((30..170).contains(&consumed), "{consumed} of 200 were consumed: the other case is too rare");
}
