//! Random schedules, and the table of what met what in them.

use crate::coverage::Coverage;
use crate::engine::ms;
use crate::world::{Action, World};
use kvik_core::GrantState;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What each schedule has at least.
const TRANSFERS: usize = 3;
const FAULTS: usize = 2;
/// Fewer schedules than this need not meet everything.
const ENOUGH: u64 = 50_000;

#[test]
fn whatever_happens_the_promises_are_kept() {
    let number = |name: &str, other| std::env::var(name).ok().and_then(|n| n.parse().ok()).unwrap_or(other);
    let (count, first): (u64, u64) = (number("KVIK_SCHEDULES", 200_000), number("KVIK_SEED", 1));
    let began = std::time::Instant::now();
    let total = run_all(first, count);
    println!("{count} schedules from seed {first} in {:.1} s, 0 violations", began.elapsed().as_secs_f32());
    println!("outcomes: {:?}", total.outcomes);
    let empty = total.print();
    if count >= ENOUGH {
        assert!(empty.is_empty(), "never met: {empty:#?}");
        for code in OUTCOMES {
            assert!(total.outcomes.contains_key(code), "{code} never came: {:?}", total.outcomes);
        }
    }
}

/// What never happened was never tried.
const OUTCOMES: [&str; 25] = [
    "ok",
    "cancelled",
    "grant_revoked",
    "region_closed",
    "grant_expired",
    "grant_consumed",
    "grant_unknown",
    "grant_wrong_right",
    "content_mismatch",
    "content_required",
    "invalid_argument",
    "peer_lost",
    "peer_restarted",
    "deadline_exceeded",
    "checksum_mismatch",
    "stale_generation",
    "transport_unavailable",
    "pages_quarantined",
    "joined",
    "not_joined",
    "notifications_full",
    "notification_beside_a_full_topic",
    "notification_taken",
    "notification_late",
    "notification_unknown",
];

/// Every seed once, on as many threads as there are cores.
fn run_all(first: u64, count: u64) -> Coverage {
    let (next, failed) = (AtomicU64::new(first), AtomicBool::new(false));
    let threads = std::thread::available_parallelism().map_or(2, usize::from).min(count.max(1) as usize);
    let mut total = Coverage::default();
    std::thread::scope(|scope| {
        let work = || {
            let mut covered = Coverage::default();
            loop {
                let seed = next.fetch_add(1, Ordering::Relaxed);
                if seed >= first + count || failed.load(Ordering::Relaxed) {
                    return covered;
                }
                match catch_unwind(AssertUnwindSafe(|| Schedule::new(seed).run())) {
                    Ok(one) => covered.add(&one),
                    Err(_) => {
                        failed.store(true, Ordering::Relaxed);
                        println!(
                            "SEED {seed} FAILED; again: \
                             KVIK_SEED={seed} KVIK_SCHEDULES=1 cargo test -p kvik-proto --test sim whatever"
                        );
                        return covered;
                    }
                }
            }
        };
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        for thread in threads {
            total.add(&thread.join().unwrap());
        }
    });
    assert!(!failed.load(Ordering::Relaxed), "a promise was broken: the seed stands above");
    total
}

struct Schedule {
    world: World,
    actions: Vec<Action>,
    injuries: usize,
    /// This many steps without any fault come first, so that the plain cells of the table are met too.
    quiet: usize,
}

impl Schedule {
    fn new(seed: u64) -> Schedule {
        let engines = 2 + seed as usize % 4;
        let mut world = World::new(engines, seed);
        for opener in 1..engines {
            let listener = world.rng.below(opener);
            world.dial(opener, listener, world.engines[listener].identity);
        }
        for at in 0..1 + world.rng.below(3) {
            let (owner, again) = (world.rng.below(engines), at == 0 || world.rng.once_in(2));
            let ticket = world.plan(owner, again);
            if at == 0 || !world.rng.once_in(4) {
                world.issue(ticket, ms(60_000));
            }
        }
        let quiet = world.rng.below(80);
        Schedule { world, actions: Vec::new(), injuries: 0, quiet }
    }

    fn run(mut self) -> Coverage {
        let steps = 150 + self.world.rng.below(250);
        for step in 0..steps {
            self.step(step >= self.quiet);
        }
        self.complete();
        self.world.let_go();
        self.world.advance(ms(9000));
        self.world.check_quiet();
        self.world.check_leaks();
        self.world.coverage
    }

    /// What a schedule has at least, it has now at the latest.
    fn complete(&mut self) {
        for _ in 0..40 {
            if self.injuries >= FAULTS {
                break;
            }
            self.injuries += usize::from(self.world.injure());
        }
        for _ in 0..60 {
            if self.world.begun.len() >= TRANSFERS && self.world.regrants > 0 {
                return;
            }
            self.world.let_go();
            let owner = self.world.rng.below(self.world.engines.len());
            let ticket = self.world.plan(owner, true);
            self.world.issue(ticket, ms(60_000));
            self.world.ready(ticket);
            for _ in 0..2 {
                let reader = self.world.rng.below(self.world.engines.len());
                self.world.begin(reader, ticket);
                self.world.advance(ms(50));
            }
            self.world.end_grant(ticket, GrantState::Revoked);
            self.world.advance(ms(3000));
        }
        panic!("the schedule never got to what it should have");
    }

    fn step(&mut self, injure: bool) {
        let world = &mut self.world;
        let engine = world.rng.below(world.engines.len());
        let ticket = world.rng.below(world.tickets.len());
        match world.rng.below(200) {
            0..12 => _ = world.begin(engine, ticket),
            12 => world.cancel(),
            13 => {
                let state = if world.rng.once_in(2) { GrantState::Revoked } else { GrantState::Closed };
                world.end_grant(ticket, state);
            }
            14..16 => {
                let life = if world.rng.once_in(3) { world.rng.next() % 3000 } else { 60_000 };
                world.issue(ticket, ms(life));
            }
            16 if world.tickets.len() < 8 => {
                let again = world.rng.once_in(2);
                _ = world.plan(engine, again);
            }
            17..21 if injure => self.injuries += usize::from(world.injure()),
            21..26 => world.relent(),
            26 if world.rng.once_in(2) => world.tell_nics(engine),
            26 => world.ask_for_channels(engine),
            39..45 => world.notify(engine),
            45 => world.engines[engine].deaf = true,
            46 => world.engines[engine].eager ^= true,
            // As an engine whose sessions are under locks of their own.
            47..49 => world.engines[engine].node.hold_stops(),
            38 => world.speak_early(),
            27 => {
                world.now += ms(900);
                world.tick();
                // Then whatever is in flight comes after a silence.
                if world.rng.once_in(3) {
                    world.now += ms(150);
                    world.tick();
                }
            }
            28 => world.ready(ticket),
            29..38 => {
                world.now += ms(world.rng.next() % 100);
                world.tick();
            }
            _ => {
                world.actions(&mut self.actions);
                if !self.actions.is_empty() {
                    let pick = world.rng.below(self.actions.len());
                    world.act(self.actions.swap_remove(pick));
                }
            }
        }
    }
}
