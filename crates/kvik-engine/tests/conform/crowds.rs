//! Many at once, and none.

use crate::common::*;
use crate::pair::{Kind, OPS, Op, Pair, metric, options, paged_set, whole};
use kvik_engine::{Engine, Grant, Region, Transfer, TransferOptions};
use std::time::{Duration, Instant};

const PAGES: u32 = 600;
const PAGE: u64 = 4096;

struct Side<'a> {
    engine: &'a Engine,
    mine: &'a Region,
    theirs: &'a Region,
    grants: [&'a Grant; 2],
}

/// A transfer that was begun, and the pages that it moves: there and here.
struct Begun<'a> {
    transfer: Transfer,
    op: Op,
    there: (&'a Region, Vec<u32>),
    here: (&'a Region, Vec<u32>),
}

/// Both engines own pages, and each reads and writes the other's, all at the same time.
pub fn many_transfers_both_ways_at_once(kind: &'static Kind) {
    let (pair, mut random) = (Pair::new(kind), Random::new());
    let region = |engine, seed| kind.region(engine, u64::from(PAGES) * PAGE, seed);
    // Of each engine one region that it grants, and one that it uses.
    let to_grant = |engine, seed| kind.granted_region(engine, u64::from(PAGES) * PAGE, seed);
    let granted = [to_grant(&pair.owner, 1), to_grant(&pair.other, 2)];
    let used = [region(&pair.other, 3), region(&pair.owner, 4)];
    let engines = [&pair.owner, &pair.other];
    let all: Vec<u32> = (0..PAGES).collect();
    let grants: Vec<Vec<Grant>> = (0..2)
        .map(|at| {
            let set = paged_set(&granted[at], &all, PAGE);
            OPS.iter().map(|op| engines[at].grant(&set, options(*op)).unwrap()).collect()
        })
        .collect();
    let mut begun = Vec::new();
    let mut free: Vec<(Vec<u32>, Vec<u32>)> =
        (0..2).map(|_| (random.distinct(PAGES, PAGES), random.distinct(PAGES, PAGES))).collect();
    for round in 0..60 {
        let at = round % 2;
        let side = Side {
            engine: engines[1 - at],
            mine: &used[at],
            theirs: &granted[at],
            grants: [&grants[at][0], &grants[at][1]],
        };
        let count = 1 + random.below(19) as usize;
        let left = free[at].0.len().saturating_sub(count);
        let (theirs, mine) = (free[at].0.split_off(left), free[at].1.split_off(left));
        begun.push(begin(&side, OPS[random.below(2) as usize], theirs, mine));
    }
    for one in begun {
        let Begun { transfer, op, there, here } = one;
        let report = transfer.wait(Some(PATIENCE)).unwrap();
        assert_eq!((report.transport.name(), report.bytes), (kind.transport, there.1.len() as u64 * PAGE));
        for (a, b) in there.1.iter().zip(&here.1) {
            assert!(page(there.0, *a) == page(here.0, *b), "{op:?}: page {a} is not page {b}");
        }
    }
}

fn begin<'a>(side: &Side<'a>, op: Op, theirs: Vec<u32>, mine: Vec<u32>) -> Begun<'a> {
    let (set, remote) = (paged_set(side.mine, &mine, PAGE), Some(theirs.as_slice().into()));
    let options = TransferOptions { deadline: Some(PATIENCE), ..Default::default() };
    let transfer = match op {
        Op::Read => side.engine.read(&set, side.grants[0].ticket(), remote, options),
        Op::Write => side.engine.write(&set, side.grants[1].ticket(), remote, options),
    };
    Begun { transfer: transfer.unwrap(), op, there: (side.theirs, theirs), here: (side.mine, mine) }
}

fn page(region: &Region, id: u32) -> Vec<u8> {
    let mut bytes = vec![0; PAGE as usize];
    region.read_at(id as usize * PAGE as usize, &mut bytes).unwrap();
    bytes
}

pub fn nothing_runs_when_nothing_moves(kind: &'static Kind) {
    let pair = Pair::new(kind);
    let (there, _) = pair.regions(1, PAGE);
    let grant = pair.grant(Op::Read, &whole(&there, PAGE));
    pair.other.warm_up(grant.ticket(), None).unwrap().wait(Some(PATIENCE)).unwrap();
    pair.pass();
    // An owner's NIC looks after those who may probe for a second.
    std::thread::sleep(Duration::from_millis(if kind.one_sided() { 1100 } else { 0 }));
    rests(&pair);
}

/// The CPU time of the engines' own threads: whatever else runs here is no part of it.
pub fn rests(pair: &Pair) {
    let used = || {
        let engines = [&pair.owner, &pair.other];
        engines.map(|engine| metric(engine, "kvik_thread_cpu_seconds_total")).iter().sum::<f64>()
    };
    let (before, began) = (used(), Instant::now());
    std::thread::sleep(Duration::from_millis(600));
    let (spent, slept) = (used() - before, began.elapsed().as_secs_f64());
    assert!(spent < 0.05 * slept, "{spent:.3} s of CPU time in {slept:.1} s in which nothing moved");
}

/// What tells of its events and completions is readable for ever then.
#[test]
fn a_device_that_is_unplugged_lets_its_thread_sleep() {
    let (nic, name) = (crate::nics::ROCE, "a_device_that_is_unplugged_lets_its_thread_sleep");
    nic.one.place(&format!("{}::{name}", module_path!()), |control| {
        let pair = Pair::new(nic.one);
        pair.pass();
        control.expect("the stand-in is there").say("gone");
        rests(&pair);
        let up = format!("kvik_nic_up{{nic=\"{}\"}}", nic.names[0]);
        assert_eq!([&pair.owner, &pair.other].map(|engine| metric(engine, &up)), [0.0; 2]);
    });
}
