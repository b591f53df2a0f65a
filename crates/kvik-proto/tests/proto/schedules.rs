//! Random schedules: several transfers at once, everything delayed and mixed, with cancels, ends of grants, expiries,
//! cut, silent and doubled sessions, and executors and processes that stop in between.
//!
//! The world itself asserts that no order touches memory after its end was reported, that nothing ends twice, and
//! that no chunk is refused. Freed sources are overwritten at once, so a success with bytes of later is seen.

use crate::memory::{Mem, view};
use crate::world::{Action, World, layout, ms};
use kvik_core::{Code, GrantId, GrantState, Layout, Right, Use, View};
use kvik_proto::{FlowKey, OWN_SESSION, Op, PageList, Path};
use std::collections::BTreeMap;
use std::sync::Arc;

const PAGES: u32 = 6;

struct Granted {
    owner: usize,
    id: GrantId,
    right: Right,
    mem: Mem,
    content: Vec<u8>,
    issued: bool,
}

struct Begun {
    peer: usize,
    key: FlowKey,
    /// Where the bytes should be, and what they should be.
    into: Mem,
    view: View,
    expected: Vec<u8>,
}

struct Schedule {
    world: World,
    layout: Arc<Layout>,
    all: View,
    grants: Vec<Granted>,
    begun: Vec<Begun>,
    early: Vec<Code>,
}

#[test]
fn whatever_happens_the_promises_are_kept() {
    let count: u64 = std::env::var("KVIK_SCHEDULES").ok().and_then(|n| n.parse().ok()).unwrap_or(500);
    let first: u64 = std::env::var("KVIK_SEED").ok().and_then(|n| n.parse().ok()).unwrap_or(1);
    let mut outcomes: BTreeMap<String, u64> = BTreeMap::new();
    println!("schedules {first} to {}; repeat one with KVIK_SEED=n KVIK_SCHEDULES=1", first + count - 1);
    for seed in first..first + count {
        println!("seed {seed}");
        for outcome in Schedule::new(seed).run() {
            *outcomes.entry(outcome).or_default() += 1;
        }
    }
    println!("{outcomes:?}");
    if count >= 500 {
        // What never happened was never tried.
        for code in ["ok", "cancelled", "grant_revoked", "peer_lost", "grant_expired", "grant_consumed"] {
            assert!(outcomes.get(code).is_some_and(|n| *n > 10), "{code} is too rare: {outcomes:?}");
        }
        for code in ["deadline_exceeded", "grant_unknown", "checksum_mismatch", "stale_generation"] {
            assert!(outcomes.contains_key(code), "{code} never came: {outcomes:?}");
        }
    }
}

impl Schedule {
    fn new(seed: u64) -> Schedule {
        let mut world = World::new(2, seed);
        let layout = layout(PAGES, 5000);
        let all = view(&layout, &(0..PAGES).collect::<Vec<u32>>());
        for _ in 0..1 + world.rng.below(2) {
            let opener = world.rng.below(2);
            world.connect(opener, 1 - opener);
        }
        let mut schedule =
            Schedule { world, layout, all, grants: Vec::new(), begun: Vec::new(), early: Vec::new() };
        for _ in 0..1 + schedule.world.rng.below(4) {
            schedule.plan_grant();
        }
        schedule
    }

    /// A grant that may be issued now, later or never.
    fn plan_grant(&mut self) {
        let rng = &mut self.world.rng;
        let (owner, seed) = (rng.below(2), rng.next());
        let right = if rng.once_in(2) { Right::Read } else { Right::Write };
        let mem = Mem::for_layout(&self.layout, seed);
        if right == Right::Read {
            mem.scribble_when_free();
        }
        let content = match right {
            Right::Read => mem.all(),
            // All writers bring the same.
            Right::Write => Mem::for_layout(&self.layout, seed ^ 1).all(),
        };
        let id = self.world.grant_id();
        self.grants.push(Granted { owner, id, right, mem, content, issued: false });
        if !self.world.rng.once_in(4) {
            self.issue(self.grants.len() - 1);
        }
    }

    fn issue(&mut self, at: usize) {
        let grant = &mut self.grants[at];
        if std::mem::replace(&mut grant.issued, true) {
            return;
        }
        let uses = [Use::Once(1), Use::Once(2), Use::Many][self.world.rng.below(3)];
        let mut offer = self.world.offer(grant.owner, &grant.mem, &self.all, grant.right, uses);
        let life = if self.world.rng.once_in(3) { self.world.rng.below(3000) } else { 60_000 };
        offer.expires = self.world.now + ms(life as u64);
        self.world.issue(grant.owner, grant.id, offer);
    }

    fn run(mut self) -> Vec<String> {
        for _ in 0..100 + self.world.rng.below(400) {
            self.step();
        }
        for peer in &mut self.world.peers {
            (peer.hold, peer.asleep) = (false, false);
        }
        self.world.advance(ms(70_000));
        self.world.assert_quiet();
        let outcomes = self.check();
        self.world.assert_no_leak();
        outcomes
    }

    fn step(&mut self) {
        let peer = self.world.rng.below(2);
        match self.world.rng.below(200) {
            0..8 => self.begin(peer),
            8 => self.cancel(),
            9 => {
                let at = self.world.rng.below(self.grants.len());
                let state = if self.world.rng.once_in(2) { GrantState::Revoked } else { GrantState::Closed };
                self.world.end_grant(self.grants[at].owner, self.grants[at].id, state);
            }
            10..12 => self.issue(self.world.rng.0 as usize % self.grants.len()),
            12 => self.plan_grant(),
            13 => self.disturb_session(),
            14..17 => self.world.peers[peer].hold ^= true,
            17 => self.world.peers[peer].asleep = true,
            18..26 => self.world.peers[peer].asleep = false,
            26 => self.corrupt(),
            27 => {
                self.world.now += ms(1000);
                self.world.tick();
            }
            28..40 => {
                self.world.now += ms(self.world.rng.next() % 100);
                self.world.tick();
            }
            _ => {
                let mut actions = self.world.actions();
                if !actions.is_empty() {
                    let action: Action = actions.swap_remove(self.world.rng.below(actions.len()));
                    let piece = 1 + self.world.rng.below(300);
                    self.world.act(action, piece);
                }
            }
        }
    }

    fn begin(&mut self, peer: usize) {
        let at = self.world.rng.below(self.grants.len());
        let (owner, id, right) = (self.grants[at].owner, self.grants[at].id, self.grants[at].right);
        let op = match (right, self.world.rng.once_in(20)) {
            (Right::Read, false) | (Right::Write, true) => Op::Read,
            _ => Op::Write,
        };
        let path = if self.world.rng.once_in(2) { Path::Channels } else { Path::Memory };
        let other = self.world.peers[1 - peer].identity;
        let session = match (owner == peer, self.world.peers[peer].node.session_with(&other)) {
            (true, _) => OWN_SESSION,
            (false, Some(session)) => session,
            (false, None) => {
                self.world.connect(peer, 1 - peer);
                return;
            }
        };
        // Some of the pages, in the other order.
        let mut pages: Vec<u32> = (0..PAGES).rev().collect();
        pages.rotate_left(self.world.rng.below(6));
        pages.truncate(1 + self.world.rng.below(6));
        let theirs = view(&self.layout, &pages);
        let mine = view(&self.layout, &(0..pages.len() as u32).collect::<Vec<u32>>());
        let here = Mem::for_layout(&self.layout, self.world.rng.next());
        let bytes = mine.bytes();
        if op == Op::Write {
            let content = &self.grants[at].content;
            let part: Vec<u8> = theirs
                .runs(0..bytes)
                .flat_map(|run| content[run.offset as usize..][..run.len as usize].to_vec())
                .collect();
            here.write(&mine, 0..bytes, &part);
            here.scribble_when_free();
        }
        let mut open = self.world.open(peer, id, op, path, Some((&here, &mine)));
        open.select.pages = Some(PageList::of(&pages.into()));
        open.confirm = !self.world.rng.once_in(3);
        open.deadline = self.world.now + ms(if self.world.rng.once_in(5) { 100 } else { 20_000 });
        let grant = &self.grants[at];
        let expected = theirs
            .runs(0..bytes)
            .flat_map(|run| grant.content[run.offset as usize..][..run.len as usize].to_vec())
            .collect();
        let (into, view) = if op == Op::Read { (here, mine) } else { (grant.mem.clone(), theirs) };
        match self.world.try_begin(peer, session, open) {
            Ok(key) => self.begun.push(Begun { peer, key, into, view, expected }),
            Err(error) => self.early.push(error.code),
        }
    }

    fn cancel(&mut self) {
        if let Some(begun) = self.begun.last() {
            let (peer, key) = (begun.peer, begun.key);
            self.world.cancel(peer, key);
        }
    }

    fn disturb_session(&mut self) {
        let at = self.world.rng.below(self.world.links.len());
        let (session, side) = (self.world.links[at].session, self.world.rng.below(2));
        match self.world.rng.below(6) {
            0 => self.world.links[at].lost = true,
            1 | 2 => self.world.cut(self.world.links[at].ends[side], session),
            _ => _ = self.world.connect(side, 1 - side),
        }
    }

    /// Flips a bit of a chunk that somebody reads.
    fn corrupt(&mut self) {
        let at = self.world.rng.below(self.world.links.len());
        for side in 0..2 {
            let reads =
                |chunk: &&mut crate::world::Chunk| chunk.header.transfer.is_multiple_of(2) == (side == 1);
            if let Some(chunk) = self.world.links[at].chunks[side].iter_mut().find(reads) {
                chunk.payload[0] ^= 1;
            }
        }
    }

    /// Every transfer has ended, and who says success has the bytes.
    fn check(&self) -> Vec<String> {
        let mut names: Vec<String> = self.early.iter().map(|code| code.name().to_owned()).collect();
        for begun in &self.begun {
            let outcome = self.world.outcome(begun.peer, begun.key).expect("a transfer never ended");
            let finished = &self.world.peers[begun.peer].finished[&begun.key];
            if outcome.is_ok() {
                assert_eq!(finished.bytes, begun.view.bytes());
                let got = begun.into.peek(&begun.view, 0..begun.view.bytes());
                assert!(got == begun.expected, "success of {:?} with other bytes", begun.key);
            }
            names.push(outcome.err().map_or("ok".to_owned(), |error| error.code.name().to_owned()));
        }
        names
    }
}
