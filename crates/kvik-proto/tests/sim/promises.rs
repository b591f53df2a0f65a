//! The promises as invariants, checked after every step of an engine.

use crate::world::World;
use kvik_core::GrantState;
use kvik_proto::{CopyFrom, OWN_SESSION, Timing, WorkKind};
use std::collections::BTreeSet;

impl World {
    /// A work request of this engine is open under a lease.
    fn is_touched(&self, engine: usize, lease: u64) -> bool {
        let running = self.running.iter().filter(|running| running.engine == engine);
        let posted = self.posts.iter().filter(|post| post.engine == engine);
        running.map(|running| &running.request).chain(posted.filter_map(|post| post.request.as_ref())).any(
            |request| {
                let from = match &request.kind {
                    WorkKind::Copy(CopyFrom::Own(mem, _)) => Some(mem.lease),
                    _ => None,
                };
                request.region.lease == lease || from == Some(lease)
            },
        )
    }

    /// P2: the owner of memory is told that it is free.
    pub fn release(&mut self, engine: usize, arena: &crate::memory::Arena, lease: u64) {
        assert!(
            !self.is_touched(engine, lease),
            "P2: a work request is open on memory that was reported to be free"
        );
        arena.release(lease, self.rng.0 ^ 0xDEAD);
    }

    /// What a device had is free when it has nothing of it any more.
    pub fn release_kept(&mut self) {
        for (engine, arena, lease) in std::mem::take(&mut self.kept) {
            match self.is_touched(engine, lease) {
                true => self.kept.push((engine, arena, lease)),
                false => self.release(engine, &arena, lease),
            }
        }
    }

    /// P2, P3, P4: what holds between any two steps of an engine.
    pub fn check_engine(&self, at: usize) {
        let engine = &self.engines[at];
        for (key, index) in &engine.open {
            let begun = &self.begun[*index];
            let late = engine.ticked >= begun.deadline;
            let lost = key.0 != OWN_SESSION && engine.node.established(key.0).is_none();
            if late || lost {
                let why = if late { "P3: after its deadline" } else { "P6: after its session" };
                assert!(
                    self.is_touched(at, begun.lease),
                    "{why} transfer {key:?} goes on without a work request"
                );
            }
        }
        if let Some((deadline, _, _, number)) = engine.unended.first() {
            assert!(*deadline > engine.ticked, "P3: notification {number} goes on after its deadline");
        }
        let mut pages = BTreeSet::new();
        for ticket in engine.given.iter().map(|at| &self.tickets[*at]) {
            let state = engine.node.grant_state(ticket.id);
            assert!(state.is_some(), "P4: grant {} was forgotten with its pages", ticket.id);
            if state != Some(GrantState::Live) {
                let arena = std::rc::Rc::as_ptr(&ticket.arena) as usize;
                pages.extend(
                    ticket.view.pages().iter().map(|id| (arena, ticket.id, id / ticket.view.parts())),
                );
            }
        }
        assert_eq!(engine.node.quarantined(), pages.len() as u64, "pages in quarantine were not said to be");
    }

    /// P6: whoever was silent for too long is dead, by the simulator's own account.
    pub fn check_silence(&self, at: usize) {
        let engine = &self.engines[at];
        for (session, heard) in &engine.heard {
            let silent = engine.ticked.saturating_sub(*heard);
            assert!(
                silent < Timing::default().dead_after,
                "P6: engine {at} heard nothing for {silent:?} in session {session}, and holds it for alive"
            );
        }
    }

    /// The end of a schedule: all has ended, nothing is kept.
    pub fn check_quiet(&self) {
        assert!(self.running.is_empty(), "a work request never ended");
        let free = |engine: &crate::engine::Engine| engine.process.ring.free() == crate::engine::SLOTS;
        assert!(self.engines.iter().all(free), "slots of a ring never came back");
        for (at, engine) in self.engines.iter().enumerate() {
            assert!(
                engine.open.is_empty(),
                "P3: engine {at} has transfers that never ended: {:?}",
                engine.open
            );
            assert!(engine.node.is_quiet(), "engine {at} is not quiet");
            assert_eq!(engine.node.quarantined(), 0, "engine {at} keeps pages in quarantine");
        }
        self.check_lines();
    }

    /// Ends everything; no timer, grant or lease may be left then.
    pub fn check_leaks(&mut self) {
        self.tickets.iter_mut().for_each(|ticket| ticket.again = false);
        for at in 0..self.engines.len() {
            self.engines[at].node.grants().end_all();
            for session in self.engines[at].node.sessions() {
                self.close(at, session);
            }
            self.pump(at);
        }
        self.advance(crate::engine::ms(3000));
        for (at, engine) in self.engines.iter().enumerate() {
            assert_eq!(engine.node.open_grants(), 0, "engine {at} has grants that never ended");
            assert_eq!(engine.node.next_timeout(), None, "engine {at} has a timer for nothing");
        }
    }
}
