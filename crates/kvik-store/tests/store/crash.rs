//! A server is killed at the system calls by which it changes its disk, while a client puts, gets and removes; then its
//! log is opened again and asked for everything.

use crate::meddled::*;
use crate::rig::*;
use crate::tracer::{CHANGES, Fate};
use kvik_core::Result;
use kvik_store::Ack;
use std::path::Path;
use std::time::Duration;

/// Prompts that are put: more than the log has room for.
const PROMPTS: u32 = 40;
const LOG: u64 = 1 << 20;
/// Of those that were put last, so many are always in the log: it drops from its oldest part on.
const LATE: usize = 4;
/// Asked for after every put, so never dropped.
const FAVOURITE: [u32; 3] = [9001, 9002, 9003];
/// One call in so many is killed at. `KVIK_KILLS` says otherwise: about how many kills there are, or `all`.
const STRIDE: u64 = 7;

/// What the server has acknowledged.
#[derive(Default)]
struct Ledger {
    favourite: bool,
    durable: Vec<u32>,
    /// Of these no more than the first block may be found.
    removed: Vec<u32>,
    /// A removal that nobody has an answer to.
    doubtful: Option<u32>,
}

impl Asking {
    fn put_durably(&self, prompt: &[u32]) -> Result<()> {
        let stored = self.put(prompt, Ack::Durable, PATIENCE)?;
        assert_eq!(stored.refused, 0, "{prompt:?}");
        Ok(())
    }

    /// Puts, gets and removes until the server is gone, or nothing is left to do.
    fn work(&self, ledger: &mut Ledger) -> Result<()> {
        self.put_durably(&FAVOURITE)?;
        ledger.favourite = true;
        for number in 0..PROMPTS {
            self.put_durably(&prompt(number))?;
            ledger.durable.push(number);
            assert_eq!(self.get(&FAVOURITE)?, FAVOURITE.len(), "after {number}");
            if number % 5 == 4 {
                let gone = number - 1;
                ledger.durable.retain(|other| *other != gone);
                ledger.doubtful = Some(gone);
                self.space.remove(&keys(&namespace("tiny"), &prompt(gone))[1..])?;
                ledger.removed.push(gone);
                ledger.doubtful = None;
            }
        }
        Ok(())
    }
}

/// How many calls the server made, and what it had acknowledged when it was killed at one of them.
fn killed_at(dir: &Path, at: u64) -> (u64, Ledger) {
    let (mut calls, mut ledger) = (0, Ledger::default());
    let kill = |_| {
        calls += 1;
        if calls == at { Fate::Killed } else { Fate::Goes }
    };
    meddled((dir, LOG), &CHANGES, kill, |server| {
        let Some(server) = server else { return };
        let worked = Asking::server(&server.address).and_then(|asking| asking.work(&mut ledger));
        assert!(worked.is_ok() || at < u64::MAX, "{worked:?}");
    });
    (calls, ledger)
}

/// Opens what the server has left, and asks for everything: how long opening took, and how many blocks had to be there.
fn check(dir: &Path, ledger: &Ledger, context: &str) -> (Duration, u64) {
    let asking = Asking::embedded(&options(dir, LOG)).unwrap_or_else(|error| panic!("{context}: {error}"));
    // Each block that comes is compared.
    let found = |prompt: &[u32]| asking.get(prompt).unwrap_or_else(|error| panic!("{context}: {error}"));
    let favourite = found(&FAVOURITE);
    assert!(favourite == 3 || !ledger.favourite, "{context}: of the favourite {favourite} blocks are there");
    let late = ledger.durable.iter().rev().take(LATE);
    let mut needed = 3 * u64::from(ledger.favourite);
    for number in late.filter(|number| ledger.doubtful != Some(**number)) {
        assert_eq!(found(&prompt(*number)), 3, "{context}: prompt {number} was durable");
        needed += 3;
    }
    for number in (0..PROMPTS).filter(|number| !ledger.durable.contains(number)) {
        let there = found(&prompt(number));
        assert!(there < 2 || !ledger.removed.contains(&number), "{context}: prompt {number} was removed");
    }
    assert_eq!(asking.client.stat().unwrap().corrupt, 0, "{context}");
    (asking.opened, needed)
}

#[test]
fn a_server_may_be_killed_at_any_write() {
    let seed = Random::new().next();
    let folder = |at: u64| Folder::new(&format!("crash-{at}"));
    let whole = folder(0);
    let (all, ledger) = killed_at(&whole.0, u64::MAX);
    assert!(ledger.removed.len() == 8 && all > 150, "{all} calls: too few for this to mean anything");
    let stride = match std::env::var("KVIK_KILLS") {
        Ok(kills) if kills == "all" => 1,
        Ok(kills) => (all / kills.parse::<u64>().unwrap()).max(1),
        Err(_) => STRIDE,
    };
    let (mut kills, mut needed, mut slowest) = (0, 0, Duration::ZERO);
    for at in (1..=all).filter(|at| at % stride == seed % stride) {
        let dir = folder(at);
        let (calls, ledger) = killed_at(&dir.0, at);
        let context = format!("KVIK_SEED={seed} killed at call {at} of {all}");
        let (opened, had_to_be) = check(&dir.0, &ledger, &context);
        (kills, needed, slowest) = (kills + u64::from(calls == at), needed + had_to_be, slowest.max(opened));
    }
    println!("{kills} kills at {all} calls: {needed} blocks had to be there, opened in {slowest:?} at most");
    assert!(kills > all / stride / 2 && needed > kills, "the server was seldom killed");
}
