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

const STEPS: u64 = 56;

fn die() -> ! {
    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    unreachable!("nobody survives this signal")
}

/// Ends the process at one operation: before it, in the middle of it, or after it.
fn killer(at: u64, how: u64) -> Meddler {
    let (done, armed) = (AtomicU64::new(0), AtomicU64::new(0));
    Arc::new(move |kind, after| {
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
    })
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
    let files = Box::new(Meddled { files, meddler: killer(at, how) });
    let log = Log::open_on(files, workload::options(), index.clone()).unwrap();
    workload::run(&log, &index, &*journal, Rng(seed), (STEPS, 1)).unwrap();
    drop(log);
    println!("\nended");
}

/// Runs a child that is killed at an operation. Gives what it told, and whether it came to its end.
fn killed_at(dir: &Path, seed: u64, at: u64, how: u64) -> (Vec<Step>, bool) {
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
    let ended = told.lines().any(|line| line == "ended");
    use std::os::unix::process::ExitStatusExt;
    assert!(ended || child.status.signal() == Some(9), "the child failed by itself: {told}");
    (steps, ended)
}

fn kill_everywhere(how: u64, base: u64) -> (u64, Checked) {
    let (mut total, mut dropped) = (Checked::default(), false);
    for at in 1.. {
        let dir = Dir::new(&format!("crash-{how}"));
        let seed = base.wrapping_add(at / 8);
        let (steps, ended) = killed_at(&dir.0, seed, at, how);
        // Opening has to find all, once after the kill and once after it was opened.
        for round in 0..2 {
            let context = format!("KVIK_SEED={base} killed at {at} in the way {how}, opening {round}");
            let index = Index::all();
            let log = Log::open(&dir.0, workload::options(), index.clone()).unwrap();
            let checked = workload::check(&log, &index, &steps, &context);
            (total.found, total.needed) = (total.found + checked.found, total.needed + checked.needed);
            let usage = log.usage();
            assert!(usage.bytes <= usage.capacity, "{context}: {usage:?}");
            drop(log);
        }
        dropped |= steps.iter().any(|step| matches!(step, Step::Drops(_)));
        if ended {
            assert!(dropped, "no room was ever made");
            return (at - 1, total);
        }
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
            let (kills, checked) = run.join().unwrap();
            println!(
                "{kills} kills at an operation, {way}: {} blocks found, {} of them had to be",
                checked.found, checked.needed
            );
            assert!(kills > 50 && checked.needed > kills, "too little was done for this to mean anything");
        }
    });
}
