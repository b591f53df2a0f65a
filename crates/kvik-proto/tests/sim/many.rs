//! 320 engines, each of one half connected to each of the other: what five do, and nothing grows beyond its bounds.

use crate::engine::ms;
use crate::world::{Action, World};
use kvik_core::GrantState;

const HALF: usize = 160;
/// Transfers that each engine of one half begins.
const EACH: usize = 4;

#[test]
fn three_hundred_and_twenty_engines_keep_the_promises() {
    let seed = std::env::var("KVIK_SEED").ok().and_then(|n| n.parse().ok()).unwrap_or(1);
    println!("again: KVIK_SEED={seed} cargo test -p kvik-proto --test sim three_hundred");
    let mut world = World::new(2 * HALF, seed);
    for reader in HALF..2 * HALF {
        for owner in 0..HALF {
            world.dial(reader, owner, world.engines[owner].identity);
        }
    }
    world.settle_in_rounds();
    let sessions: usize = world.engines.iter().map(|engine| engine.node.sessions().len()).sum();
    assert_eq!(sessions, 2 * HALF * HALF);
    let tickets: Vec<usize> = (0..HALF).map(|owner| world.plan(owner, owner % 2 == 0)).collect();
    tickets.iter().for_each(|ticket| world.issue(*ticket, ms(60_000)));
    for round in 0..EACH {
        for reader in HALF..2 * HALF {
            let ticket = tickets[world.rng.below(HALF)];
            world.begin(reader, ticket);
            world.notify(reader);
        }
        match round {
            1 => {
                (0..8).for_each(|_| world.strike_some());
                tickets.iter().for_each(|ticket| world.ready(*ticket));
            }
            2 => tickets.iter().step_by(10).for_each(|at| world.end_grant(*at, GrantState::Revoked)),
            _ => {}
        }
        world.pass(ms(250));
    }
    world.let_go();
    world.pass(ms(9000));
    world.check_quiet();
    println!("{} transfers in {sessions} sessions: {:?}", world.begun.len(), world.coverage.outcomes);
    assert!(world.begun.len() > HALF * EACH / 2 && world.regrants > 0);
    assert!(world.coverage.outcomes["ok"] > HALF as u64);
}

impl World {
    fn strike_some(&mut self) {
        while !self.injure() {}
    }

    /// Lets time pass in steps of a tenth of a beat.
    fn pass(&mut self, by: std::time::Duration) {
        let end = self.now + by;
        while self.now < end {
            self.settle_in_rounds();
            self.now += ms(50);
            self.tick();
        }
        self.settle_in_rounds();
    }

    /// Like `settle`, but looks for what can happen once a round and not once a step.
    fn settle_in_rounds(&mut self) {
        let mut actions = Vec::new();
        for _ in 0..100_000 {
            self.actions(&mut actions);
            if actions.is_empty() {
                return;
            }
            while !actions.is_empty() {
                let pick = self.rng.below(actions.len());
                match actions.swap_remove(pick) {
                    // Others may have gone before, and moved what is behind them.
                    Action::Finish(at) if at >= self.running.len() || !self.works(at) => {}
                    Action::Nic(at) if at >= self.posts.len() => {}
                    Action::Fence(at) if at >= self.fences.len() => {}
                    Action::Bytes(at, from) if self.links[at].control[from].is_empty() => {}
                    action => self.act(action),
                }
            }
        }
        panic!("the world does not come to rest");
    }

    fn works(&self, running: usize) -> bool {
        let engine = &self.engines[self.running[running].engine];
        !engine.hold && !engine.asleep
    }
}
