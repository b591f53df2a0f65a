//! Classes: which transfer's chunk is next, wherever chunks are claimed. Nothing is moved: work requests are only taken
//! and called done, and bytes are counted.

use crate::memory::{Mem, view};
use crate::world::{Action, World, layout};
use kvik_core::{Class, Right, Use};
use kvik_proto::{Batch, Claim, Event, FlowKey, OWN_SESSION, Op, Path, WorkOutcome, WorkRequest};
use std::collections::HashMap;
use std::time::Duration;

const PAGE: u64 = 64 << 10;
const CHUNK: u64 = 512 << 10;
/// Bytes of each transfer.
const BYTES: u64 = 32 << 20;
/// So many bytes of handovers go before the first chunk of bulk.
const FIRST: u64 = 4 << 20;

/// Peers 0 and 2 use grants of peer 1.
struct Scene {
    world: World,
    sessions: [u64; 2],
    /// Who moves the bytes.
    mover: usize,
    path: Path,
    keys: Vec<(FlowKey, usize)>,
}

/// A class, and which of the two begins a transfer of it.
type Wanted = (Class, usize);

const HANDOVER: Class = Class::Handover;
const BULK: Class = Class::Bulk;

impl Scene {
    /// Transfers in this order, whose chunks peer 1 moves, or peer 0.
    fn new(op: Op, path: Path, wanted: &[Wanted]) -> Scene {
        let mut world = World::new(3, 5);
        let sessions = [0, 2].map(|opener| world.connect_with(opener, 1, [true; 2]));
        let layout = layout((BYTES / PAGE) as u32, PAGE);
        let pages = view(&layout, &(0..(BYTES / PAGE) as u32).collect::<Vec<_>>());
        let (here, there) = (Mem::for_layout(&layout, 1), Mem::for_layout(&layout, 2));
        let right = if op == Op::Write { Right::Write } else { Right::Read };
        let grant = world.grant(1, &there, &pages, right, Use::Many);
        let owner_moves = matches!((op, path), (Op::Read, Path::Channels) | (Op::Write, Path::Memory));
        let mut keys = Vec::new();
        for &(class, from) in wanted {
            let peer = [0, 2][from];
            let mut open = world.open(peer, grant, op, path, Some((&here, &pages)));
            (open.class, open.chunk, open.sums) = (class, CHUNK, false);
            keys.push((world.begin(peer, sessions[from], open), from));
        }
        let mut scene = Scene { world, sessions, mover: usize::from(owner_moves), path, keys };
        scene.frames();
        scene
    }

    fn frames(&mut self) {
        let frames = |world: &World| world.actions().into_iter().find(|act| matches!(act, Action::Bytes(..)));
        while let Some(action) = frames(&self.world) {
            self.world.act(action, usize::MAX);
        }
    }

    fn claim(&mut self, from: usize, claim: Claim) -> Option<WorkRequest<Mem>> {
        let (now, node) = (self.world.now, &mut self.world.peers[self.mover].node);
        match self.path {
            Path::Memory => node.next_copy(now),
            path => node.session(self.sessions[from]).next_of(path, claim, now),
        }
    }

    /// Whether somebody was told that there may be something to send.
    fn told(&mut self) -> bool {
        let node = &mut self.world.peers[self.mover].node;
        std::iter::from_fn(|| node.next_event()).filter(|event| matches!(event, Event::Send(_))).count() > 0
    }

    fn done(&mut self, request: WorkRequest<Mem>) {
        let outcome = WorkOutcome::Done { extents: 1, verify: Duration::ZERO };
        self.world.peers[self.mover].node.work_done(request.id, outcome);
    }

    /// Takes chunks while every class still waits: of what they were.
    fn take(&mut self, bytes: u64) -> Vec<(Class, usize)> {
        let (mut taken, mut total) = (Vec::new(), 0);
        while total < bytes {
            let request = self.claim(0, Claim::Next).expect("something waits");
            total += request.part.end - request.part.start;
            let (session, class) = (request.id.session(), request.id.class());
            taken.push((class, usize::from(session != self.sessions[0])));
            self.done(request);
        }
        taken
    }
}

/// Every queue that a session has, by who claims from it.
const QUEUES: [(Op, Path); 5] = [
    (Op::Read, Path::Channels),
    (Op::Write, Path::Channels),
    (Op::Read, Path::Memory),
    (Op::Write, Path::Memory),
    (Op::Read, Path::OneSided),
];

fn count(taken: &[(Class, usize)], which: impl Fn(&(Class, usize)) -> bool) -> usize {
    taken.iter().filter(|one| which(one)).count()
}

#[test]
fn handovers_go_first_and_bulk_keeps_a_tenth_in_every_queue() {
    for (op, path) in QUEUES {
        let wanted = [(BULK, 0), (HANDOVER, 0), (HANDOVER, 0), (HANDOVER, 0), (HANDOVER, 0)];
        let mut scene = Scene::new(op, path, &wanted);
        let taken = scene.take(3 * BYTES);
        let first = taken.iter().take_while(|(class, _)| *class == HANDOVER).count() as u64;
        assert!(first * CHUNK >= FIRST, "{op:?} {path:?}: only {first} chunks went before bulk");
        let bulk = count(&taken, |(class, _)| *class == BULK);
        assert!(bulk * 10 >= taken.len(), "{op:?} {path:?}: bulk got {bulk} of {} chunks", taken.len());
        assert!(bulk * 8 <= taken.len(), "{op:?} {path:?}: bulk got {bulk} of {} chunks", taken.len());
    }
}

#[test]
fn a_handover_that_comes_while_bulk_is_under_way_is_next() {
    for (op, path) in QUEUES {
        let mut scene = Scene::new(op, path, &[(BULK, 0), (BULK, 0), (HANDOVER, 0)]);
        // Until the handover has gone, and then nothing of bulk is behind its turn.
        let taken = scene.take(BYTES + BYTES / 2);
        let (last, _) = taken.iter().enumerate().rfind(|(_, (class, _))| *class == HANDOVER).unwrap();
        let before = count(&taken[..last], |(class, _)| *class == BULK);
        assert!(before * 8 <= last + 1, "{op:?} {path:?}: {before} chunks of bulk went before it");
        assert_eq!(count(&taken, |(class, _)| *class == HANDOVER) as u64, BYTES / CHUNK);
    }
}

#[test]
fn copies_within_an_engine_are_served_by_their_class() {
    let (mut world, layout) = (World::new(1, 5), layout((BYTES / PAGE) as u32, PAGE));
    let pages = view(&layout, &(0..(BYTES / PAGE) as u32).collect::<Vec<_>>());
    let grant = world.grant(0, &Mem::for_layout(&layout, 2), &pages, Right::Read, Use::Many);
    for class in [BULK, HANDOVER] {
        let here = Mem::for_layout(&layout, 1);
        let mut open = world.open(0, grant, Op::Read, Path::Memory, Some((&here, &pages)));
        (open.class, open.chunk, open.sums) = (class, CHUNK, false);
        world.begin(0, OWN_SESSION, open);
    }
    let (now, node) = (world.now, &mut world.peers[0].node);
    let mut first = 0;
    while first < FIRST {
        let request = node.next_copy(now).expect("something waits");
        assert_eq!(request.id.class(), HANDOVER, "after {first} bytes");
        first += request.part.end - request.part.start;
        node.work_done(request.id, WorkOutcome::Done { extents: 1, verify: Duration::ZERO });
    }
}

#[test]
fn sessions_take_turns_in_what_one_thread_copies_for_all() {
    for (op, wanted) in [
        (Op::Write, [(HANDOVER, 0), (HANDOVER, 1)]),
        (Op::Write, [(BULK, 0), (BULK, 1)]),
        // The second has four times as many transfers open.
    ] {
        let more = [wanted[1]; 3];
        let mut scene = Scene::new(op, Path::Memory, &[&wanted[..], &more[..]].concat());
        let taken = scene.take(BYTES);
        let one = count(&taken, |(_, from)| *from == 0);
        assert!(one.abs_diff(taken.len() - one) <= 1, "{one} of {} chunks", taken.len());
    }
}

#[test]
fn classes_are_weighted_between_sessions_too() {
    let wanted = [(BULK, 0), (HANDOVER, 1), (HANDOVER, 1), (HANDOVER, 1)];
    let mut scene = Scene::new(Op::Write, Path::Memory, &wanted);
    let taken = scene.take(2 * BYTES);
    let bulk = count(&taken, |(class, _)| *class == BULK);
    assert!(bulk * 10 >= taken.len() && bulk * 8 <= taken.len(), "{bulk} of {} chunks", taken.len());
    assert!(taken.iter().all(|(class, from)| (*class == BULK) == (*from == 0)), "the class is its own");
    let first = taken.iter().take_while(|(class, _)| *class == HANDOVER).count() as u64;
    assert!(first * CHUNK >= FIRST, "only {first} chunks went first");
}

#[test]
fn what_is_claimed_at_once_is_what_one_after_the_other_would_be() {
    for (op, path) in QUEUES.into_iter().filter(|(_, path)| *path != Path::Memory) {
        let wanted = [(BULK, 0), (HANDOVER, 0), (HANDOVER, 0), (BULK, 0)];
        let mut single = Scene::new(op, path, &wanted);
        let mut several = Scene::new(op, path, &wanted);
        for scene in [&mut single, &mut several] {
            scene.world.peers[scene.mover].node.set_window(24 * CHUNK);
        }
        let of = |request: &WorkRequest<Mem>| (request.id.class(), request.part.clone());
        let (mut before, mut at_once) = (Vec::new(), Vec::new());
        for claim in [Claim::Next, Claim::Only(BULK), Claim::Only(HANDOVER), Claim::Beside].repeat(20) {
            // The one that reaches the bytes is the last one.
            for (most, bytes, count) in [(5, u64::MAX, 5), (9, 3 * CHUNK, 3), (9, 3 * CHUNK + 1, 4)] {
                let singly: Vec<_> = (0..count).map_while(|_| single.claim(0, claim)).collect();
                let (now, mut given) = (several.world.now, Vec::new());
                let node = &mut several.world.peers[several.mover].node;
                let most = Batch { requests: most, bytes };
                node.session(several.sessions[0]).next_batch(path, claim, most, now, &mut given);
                before.extend(singly.iter().map(of));
                at_once.extend(given.iter().map(of));
                assert_eq!(singly.len(), given.len(), "{op:?} {path:?} {claim:?}");
                singly.into_iter().for_each(|request| single.done(request));
                let done = || WorkOutcome::Done { extents: 1, verify: Duration::ZERO };
                let mut ended = given.into_iter().map(|request| (request.id, done())).collect();
                several.world.peers[several.mover].node.batch_done(&mut ended);
                assert!(ended.is_empty());
            }
        }
        assert_eq!(before, at_once, "{op:?} {path:?}");
        assert_eq!(before.len() as u64, 4 * BYTES / CHUNK);
    }
}

#[test]
fn bulk_leaves_half_of_the_window_to_handovers() {
    let mut scene = Scene::new(Op::Read, Path::Channels, &[(BULK, 0), (BULK, 0)]);
    scene.world.peers[1].node.set_window(8 * CHUNK);
    let bulk: Vec<_> = std::iter::from_fn(|| scene.claim(0, Claim::Next)).collect();
    assert_eq!(bulk.len(), 4);
    // Handovers have what is left of it, and no more.
    let mut scene = Scene::new(Op::Read, Path::Channels, &[(BULK, 0), (HANDOVER, 0)]);
    scene.world.peers[1].node.set_window(8 * CHUNK);
    let bulk: Vec<_> = std::iter::from_fn(|| scene.claim(0, Claim::Only(BULK))).collect();
    let handover: Vec<_> = std::iter::from_fn(|| scene.claim(0, Claim::Next)).collect();
    assert!(handover.iter().all(|request| request.id.class() == HANDOVER));
    assert_eq!((bulk.len(), handover.len()), (4, 4));
    // What is done makes room for its own class.
    scene.told();
    for request in bulk {
        scene.done(request);
    }
    assert!(scene.told(), "nobody was told of the room");
    assert_eq!(scene.claim(0, Claim::Next).map(|request| request.id.class()), Some(HANDOVER));
    drop(handover);
}

#[test]
fn beside_handovers_bulk_waits_for_its_turn_and_is_told_of_it() {
    let mut scene = Scene::new(Op::Read, Path::Channels, &[(BULK, 0), (HANDOVER, 0)]);
    let (mut handovers, mut bulk) = (0, 0);
    scene.told();
    while handovers < BYTES / CHUNK {
        let beside = scene.claim(0, Claim::Beside);
        if let Some(request) = beside {
            assert_eq!(request.id.class(), BULK, "a handover went where bulk is before it");
            bulk += 1;
            scene.done(request);
            continue;
        }
        let request = scene.claim(0, Claim::Only(HANDOVER)).unwrap();
        handovers += 1;
        scene.done(request);
        let turn = handovers * CHUNK >= FIRST && bulk * 8 * CHUNK + FIRST <= handovers * CHUNK;
        assert_eq!(scene.told(), turn || handovers == BYTES / CHUNK, "after {handovers} chunks and {bulk}");
    }
    assert!(bulk * 10 >= handovers / 2, "bulk went {bulk} times");
    // It has nothing beside it any more.
    assert!(scene.claim(0, Claim::Beside).is_some_and(|request| request.id.class() == BULK));
    // And where no bulk waits, handovers may go anywhere.
    let mut scene = Scene::new(Op::Read, Path::Channels, &[(HANDOVER, 0)]);
    assert!(scene.claim(0, Claim::Beside).is_some());
}

#[test]
fn a_handover_that_ends_early_keeps_no_bulk_waiting() {
    let mut scene = Scene::new(Op::Read, Path::Channels, &[(BULK, 0), (HANDOVER, 0)]);
    let request = scene.claim(0, Claim::Next).unwrap();
    assert!(scene.claim(0, Claim::Beside).is_none());
    let (key, from) = scene.keys[1];
    scene.world.cancel([0, 2][from], key);
    scene.frames();
    scene.told();
    scene.world.peers[1].node.work_done(request.id, WorkOutcome::Void);
    assert!(scene.told(), "nobody was told");
    let classes: HashMap<_, _> = (0..2).map(|at| (at, scene.claim(0, Claim::Beside))).collect();
    assert!(classes.values().flatten().all(|request| request.id.class() == BULK));
    assert!(classes[&1].is_some(), "bulk waits for a handover that is over");
}
