//! A process is killed at every operation that changes its disk.

use crate::basics::Dir;
use crate::blocks::{Rng, seed};
use crate::disk::{Fate, Kind, Meddled, Meddler};
use crate::owner::Index;
use crate::workload::{self, Checked, Journal, Step};
use kvik_store::{Directory, Log, Tier};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const STEPS: u64 = 56;

fn die() -> ! {
    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    unreachable!("nobody survives this signal")
}

/// Ends the process at one operation: before it, in the middle of it, or after it. With the count of the operations.
fn killer(at: u64, how: u64) -> (Meddler, Arc<AtomicU64>) {
    let (done, armed) = (Arc::new(AtomicU64::new(0)), AtomicU64::new(0));
    let count = done.clone();
    let meddler = move |kind, after| {
        if matches!(kind, Kind::List | Kind::Open | Kind::Read) {
            return Fate::Done;
        }
        if after {
            if armed.load(Ordering::SeqCst) == 1 {
                die();
            }
            return Fate::Done;
        }
        if done.fetch_add(1, Ordering::SeqCst) + 1 == at {
            match how {
                0 => die(),
                1 if kind == Kind::Write => {
                    armed.store(1, Ordering::SeqCst);
                    return Fate::Torn(std::io::ErrorKind::Interrupted);
                }
                _ => armed.store(1, Ordering::SeqCst),
            }
        }
        Fate::Done
    };
    (Arc::new(meddler), count)
}

/// Steps, each told to the parent before the next.
#[derive(Default)]
struct Told(AtomicU64);

impl Journal for Told {
    fn add(&self, step: Step) -> u64 {
        // One write for line and number: threads of the log tell of drops.
        let mut out = std::io::stdout().lock();
        let number = self.0.fetch_add(1, Ordering::SeqCst);
        let line = format!("\nstep {}\n", step.to_line());
        out.write_all(line.as_bytes()).and_then(|()| out.flush()).unwrap();
        number
    }
}

/// What the child does; it is run by the test below.
#[test]
#[ignore = "a part of another test"]
fn child() {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let (Some(dir), Some(at), Some(how), Some(seed)) = (
        std::env::var_os("KVIK_LOG_DIR"),
        number("KVIK_KILL_AT"),
        number("KVIK_KILL_HOW"),
        number("KVIK_SEED"),
    ) else {
        return;
    };
    let files = Box::new(Directory::open(Path::new(&dir)).unwrap());
    let journal = Arc::new(Told::default());
    let index = workload::index(journal.clone());
    let (meddler, count) = killer(at, how);
    let files = Box::new(Meddled { files, meddler });
    let log = Log::open_on(files, workload::options(), index.clone()).unwrap();
    workload::run(&log, &index, &*journal, Rng(seed), (STEPS, 1)).unwrap();
    drop(log);
    println!("\nended {}", count.load(Ordering::SeqCst));
}

/// Runs a child that is killed at an operation. Gives what it told, and how many operations there were if it came to its
/// end.
fn killed_at(dir: &Path, seed: u64, at: u64, how: u64) -> (Vec<Step>, Option<u64>) {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["crash::child", "--exact", "--ignored", "--nocapture"])
        .env("KVIK_LOG_DIR", dir)
        .env("KVIK_KILL_AT", at.to_string())
        .env("KVIK_KILL_HOW", how.to_string())
        .env("KVIK_SEED", seed.to_string())
        .stderr(Stdio::inherit())
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&child.stdout);
    let steps = told.lines().filter_map(|line| Step::from_line(line.strip_prefix("step ")?)).collect();
    let ended = told.lines().find_map(|line| line.strip_prefix("ended ")?.parse().ok());
    use std::os::unix::process::ExitStatusExt;
    assert!(ended.is_some() || child.status.signal() == Some(9), "the child failed by itself: {told}");
    (steps, ended)
}

/// What was seen after kills.
#[derive(Default)]
struct Seen {
    kills: u64,
    checked: Checked,
    slowest: Duration,
}

/// Opens what a process has left, and compares all of it.
fn open_again(dir: &Dir, steps: &[Step], context: &str, seen: &mut Seen) {
    let (index, began) = (Index::all(), Instant::now());
    let log = Log::open(&dir.0, workload::options(), index.clone()).unwrap();
    seen.slowest = seen.slowest.max(began.elapsed());
    let checked = workload::check(&log, &index, steps, context);
    seen.checked.found += checked.found;
    seen.checked.needed += checked.needed;
    let usage = log.usage();
    assert!(usage.bytes <= usage.capacity, "{context}: {usage:?}");
}

/// Kills at every operation, or at one in so many where `KVIK_KILLS` says how many kills that are to be.
fn kill_everywhere(how: u64, base: u64) -> Seen {
    let (mut seen, mut dropped) = (Seen::default(), false);
    let stride = std::env::var("KVIK_KILLS").ok().and_then(|kills| kills.parse::<u64>().ok()).map(|kills| {
        let dir = Dir::new(&format!("crash-{how}"));
        let (_, all) = killed_at(&dir.0, base, u64::MAX, how);
        (all.expect("nobody has killed it") / kills).max(1)
    });
    let stride = stride.unwrap_or(1);
    for at in (1 + base % stride..).step_by(stride as usize) {
        let dir = Dir::new(&format!("crash-{how}"));
        let seed = base.wrapping_add(at / 8);
        let (steps, ended) = killed_at(&dir.0, seed, at, how);
        // Opening has to find all, once after the kill and once after it was opened.
        for round in 0..2 {
            let context = format!("KVIK_SEED={base} killed at {at} in the way {how}, opening {round}");
            open_again(&dir, &steps, &context, &mut seen);
        }
        dropped |= steps.iter().any(|step| matches!(step, Step::Drops(_)));
        if ended.is_some() {
            // Of a few runs none may have come so far.
            assert!(dropped || stride > 1, "no room was ever made");
            assert!(seen.kills * stride > 50, "{} kills: too few for this to mean anything", seen.kills);
            return seen;
        }
        seen.kills += 1;
    }
    unreachable!()
}

#[test]
fn a_process_may_be_killed_at_any_operation() {
    let base = seed();
    std::thread::scope(|scope| {
        let ways = ["before it", "within it", "after it"];
        let runs: Vec<_> = (0..3).map(|how| scope.spawn(move || kill_everywhere(how, base))).collect();
        for (way, run) in ways.iter().zip(runs) {
            let Seen { kills, checked, slowest } = run.join().unwrap();
            println!(
                "{kills} kills at an operation, {way}: {} blocks found, {} of them had to be, opened in {slowest:?} at \
                 most",
                checked.found, checked.needed
            );
            assert!(checked.needed > kills, "too little was done for this to mean anything");
        }
    });
}
