//! The power fails: what was written since the last sync is there in part, in any order, or not at all.

use crate::blocks::{Rng, seed};
use crate::disk::{Contents, Disk, Op, after_power_loss};
use crate::owner::Index;
use crate::workload::{self, Checked, Journal, Step};
use kvik_store::Log;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

/// Steps, each written down among the operations of the disk when it is added.
struct Marks {
    disk: Disk,
    steps: Mutex<Vec<Step>>,
}

impl Journal for Marks {
    fn add(&self, step: Step) -> u64 {
        let mut steps = self.steps.lock().unwrap();
        steps.push(step);
        let number = steps.len() as u64 - 1;
        self.disk.mark(number);
        number
    }
}

/// Runs a workload on what is there, on top of what was known before.
fn run(contents: Contents, known: &[Step], rng: &Rng, steps: u64, version: u64) -> (Vec<Op>, Vec<Step>) {
    let disk = Disk::holding(contents);
    let marks = Arc::new(Marks { disk: disk.clone(), steps: Mutex::new(known.to_vec()) });
    let index = workload::index(marks.clone());
    let log = Log::open_on(Box::new(disk.clone()), workload::options(), index.clone()).unwrap();
    workload::run(&log, &index, &*marks, rng.clone(), (steps, version)).unwrap();
    assert_eq!(log.usage_failures(), 0);
    drop(log);
    let steps = marks.steps.lock().unwrap().clone();
    let (begun, ops) = disk.history();
    if begun.names.is_empty() {
        one_goes_for_good_before_the_next(&ops);
    }
    (ops, steps)
}

/// A removal in one segment may be all that voids a block in the one before: so that one goes first, for good.
fn one_goes_for_good_before_the_next(ops: &[Op]) {
    let (mut names, mut written) = (BTreeMap::new(), BTreeSet::new());
    let mut going = false;
    for op in ops {
        match op {
            Op::Create(name, file) => {
                names.insert(name.clone(), *file);
            }
            Op::Write(file, at, _) if *at >= 64 => {
                written.insert(*file);
            }
            Op::Remove(name) if written.contains(&names[name]) => {
                assert!(!going, "{name} goes before it is durable that the one before it has gone");
                going = true;
            }
            Op::SyncNames => going = false,
            _ => {}
        }
    }
}

trait Failures {
    fn usage_failures(&self) -> u64;
}

impl Failures for Log {
    fn usage_failures(&self) -> u64 {
        kvik_store::Tier::usage(self).failures
    }
}

/// What the workload knew when this much was done to the disk.
fn known<'a>(ops: &[Op], steps: &'a [Step], before: usize) -> &'a [Step] {
    let last =
        ops.iter().rev().find_map(|op| if let Op::Mark(n) = op { Some(*n as usize + 1) } else { None });
    &steps[..last.unwrap_or(before)]
}

/// Opens what is left, and checks it. Gives what opening did to it.
fn open_and_check(left: &Contents, steps: &[Step], context: &str) -> (Checked, Vec<Op>) {
    let disk = Disk::holding(left.clone());
    let index = Index::all();
    let log = Log::open_on(Box::new(disk.clone()), workload::options(), index.clone()).unwrap();
    let checked = workload::check(&log, &index, steps, context);
    drop(log);
    (checked, disk.history().1)
}

#[test]
fn power_may_fail_at_any_time() {
    let base = seed();
    let rounds = std::env::var("KVIK_POWER_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(24);
    let (mut schedules, mut checked) = (0u64, Checked::default());
    let mut add = |more: Checked| {
        schedules += 1;
        checked.found += more.found;
        checked.needed += more.needed;
    };
    for round in 0..rounds {
        let mut rng = Rng(base.wrapping_add(round));
        let (ops, steps) = run(Contents::default(), &[], &rng, 150, 1);
        for schedule in 0..60 {
            let context = format!("KVIK_SEED={base} round {round} schedule {schedule}");
            let cut = rng.below(ops.len() as u64 + 1) as usize;
            let left = after_power_loss(&Contents::default(), &ops[..cut], &mut rng);
            let before = known(&ops[..cut], &steps, 0);
            let (found, opening) = open_and_check(&left, before, &context);
            add(found);
            match schedule % 6 {
                // It fails again while the log is opened.
                0 => {
                    let cut = rng.below(opening.len() as u64 + 1) as usize;
                    let left = after_power_loss(&left, &opening[..cut], &mut rng);
                    add(open_and_check(&left, before, &format!("{context}, again")).0);
                }
                // And work goes on, and it fails once more.
                1 => {
                    let (more, all) = run(left.clone(), before, &rng, 60, 10_000);
                    let cut = rng.below(more.len() as u64 + 1) as usize;
                    let again = after_power_loss(&left, &more[..cut], &mut rng);
                    let after = known(&more[..cut], &all, before.len());
                    add(open_and_check(&again, after, &format!("{context}, later")).0);
                }
                _ => {}
            }
        }
    }
    println!(
        "{schedules} losses of power: {} blocks found, {} of them had to be",
        checked.found, checked.needed
    );
    assert!(checked.needed > schedules, "the workload kept too little for this to mean anything");
}
