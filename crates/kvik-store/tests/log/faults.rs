//! The disk refuses each kind of operation, once or for good.

use crate::blocks::{Block, LONG, Rng, seed, shape};
use crate::disk::{Contents, Disk, Fate, Kind, Meddled, Meddler, after_power_loss};
use crate::owner::Index;
use crate::workload::{self, Journal, Step};
use kvik_core::Code;
use kvik_store::{Log, LogOptions, Tier};
use std::io::ErrorKind;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

#[derive(Default)]
struct Steps(Mutex<Vec<Step>>);

impl Journal for Steps {
    fn add(&self, step: Step) -> u64 {
        let mut steps = self.0.lock().unwrap();
        steps.push(step);
        steps.len() as u64 - 1
    }
}

struct Fault {
    kind: Kind,
    at: u64,
    once: bool,
    torn: bool,
    error: ErrorKind,
}

impl Fault {
    /// Fails the operation of this number and kind; says whether it came to that.
    fn meddler(&self, armed: Arc<AtomicBool>) -> (Meddler, Arc<AtomicU64>) {
        let failed = Arc::new(AtomicU64::new(0));
        let (count, seen) = (failed.clone(), AtomicU64::new(0));
        let Fault { kind, at, once, torn, error } = *self;
        let meddler = move |done: Kind, after: bool| {
            if done != kind || after || !armed.load(Ordering::SeqCst) {
                return Fate::Done;
            }
            let number = seen.fetch_add(1, Ordering::SeqCst) + 1;
            if number == at || (number > at && !once) {
                count.fetch_add(1, Ordering::SeqCst);
                return if torn { Fate::Torn(error) } else { Fate::Fails(error) };
            }
            Fate::Done
        };
        (Arc::new(meddler), failed)
    }
}

/// Runs a workload under a fault. Gives whether the fault came.
fn endure(fault: &Fault, base: u64, context: &str) -> bool {
    let disk = Disk::default();
    let steps = Arc::new(Steps::default());
    let index = workload::index(steps.clone());
    let armed = Arc::new(AtomicBool::new(true));
    let (meddler, failed) = fault.meddler(armed.clone());
    let files = Box::new(Meddled { files: Box::new(disk.clone()), meddler });
    let code = if fault.error == ErrorKind::StorageFull { Code::StorageFull } else { Code::StorageFailed };
    let log = match Log::open_on(files, workload::options(), index.clone()) {
        Ok(log) => log,
        Err(error) => {
            assert!(error.code == code && fault.kind == Kind::SyncNames, "{context}: {error:?}");
            return true;
        }
    };
    for part in 0..4 {
        let run = workload::run(&log, &index, &*steps, Rng(base + part), (40, 1 + 1000 * part));
        if let Err(error) = run {
            // Where the fault keeps room from being made, the log may be full of what is to be kept.
            let full = error.code == Code::StorageFull && error.text.contains("everything in the log");
            assert!(full || error.code == code, "{context}: {error:?}");
            assert!(full || error.text.contains("segment"), "{context}: {error:?}");
        }
    }
    let came = failed.load(Ordering::SeqCst) > 0;
    // The disk is well again, and so is the log.
    armed.store(false, Ordering::SeqCst);
    let until = Instant::now() + LONG;
    for attempt in 0.. {
        match workload::run(&log, &index, &*steps, Rng(base + 9 + attempt), (60, 9000 + 100 * attempt)) {
            Ok(()) => break,
            // A log that was full while the disk failed looks again a second later.
            Err(error) if error.code == Code::StorageFull && Instant::now() < until => {}
            // What was on its way to the disk when that failed takes with it what comes to the same segment.
            Err(error) if error.code == code && attempt == 0 => {}
            Err(error) => panic!("{context}: {error:?}"),
        }
    }
    assert!(!came || log.usage().failures > 0, "{context}: a failure was not counted");
    let known = steps.0.lock().unwrap().clone();
    let (_, ops) = disk.history();
    drop(log);
    // What was acknowledged is there, whatever the disk lost of the rest.
    let mut rng = Rng(base);
    for _ in 0..3 {
        let left = after_power_loss(&Contents::default(), &ops, &mut rng);
        let index = Index::all();
        let log = Log::open_on(Box::new(Disk::holding(left)), workload::options(), index.clone()).unwrap();
        workload::check(&log, &index, &known, context);
    }
    came
}

#[test]
fn a_disk_may_refuse_any_operation() {
    let base = seed();
    let kinds = [
        Kind::Create,
        Kind::Remove,
        Kind::SyncNames,
        Kind::Allocate,
        Kind::Truncate,
        Kind::Write,
        Kind::Read,
        Kind::Sync,
    ];
    let mut faults = 0;
    for kind in kinds {
        for (once, torn, error) in [
            (true, false, ErrorKind::StorageFull),
            (true, true, ErrorKind::Other),
            (false, false, ErrorKind::Other),
        ] {
            let mut came = 0;
            for at in [1u64, 2, 3, 4, 5, 6, 7, 9, 12, 17, 24, 40, 70] {
                let context = format!("KVIK_SEED={base} {kind:?} number {at}, once {once}, {error:?}");
                let fault = Fault { kind, at, once, torn, error };
                came += u64::from(endure(&fault, base.wrapping_add(at) >> 1, &context));
            }
            assert!(came > 0, "{kind:?} never failed");
            faults += came;
        }
    }
    println!("{faults} faults endured");
}

/// What could not be written is not waited for: the log goes on as soon as the disk does.
#[test]
fn writes_that_fail_leave_nothing_that_waits_for_a_sync() {
    let failing = Arc::new(AtomicBool::new(false));
    let armed = failing.clone();
    let meddler = move |done: Kind, after: bool| {
        let fails = done == Kind::Write && !after && armed.load(Ordering::SeqCst);
        if fails { Fate::Fails(ErrorKind::StorageFull) } else { Fate::Done }
    };
    let files = Meddled { files: Box::new(Disk::default()), meddler: Arc::new(meddler) };
    let log = Log::open_on(Box::new(files), workload::options(), Index::all()).unwrap();
    // Two of these are more than what may wait to become durable.
    let block = |number| Block::new(number, number, shape(6));
    let place = block(1).store(&log).unwrap();
    log.sync(&[place], LONG).unwrap();
    failing.store(true, Ordering::SeqCst);
    for number in 2..6 {
        let error = block(number).store(&log).unwrap_err();
        assert!(error.code == Code::StorageFull, "{number}: {error:?}");
    }
    failing.store(false, Ordering::SeqCst);
    let place = block(7).store(&log).unwrap();
    log.sync(&[place], LONG).unwrap();
    assert_eq!(log.usage().unsynced, 0);
}

/// What a disk is doing, for a test that decides when it goes on.
#[derive(Default)]
struct Doing {
    /// Writes fail, and a sync stops when it is done.
    armed: bool,
    /// A sync is done and has not said so yet.
    stopped: bool,
    /// Something was written that no sync was begun after.
    dirty: bool,
}

/// Room that a failed write gave back may be taken while a sync runs that was begun for the failed one: that sync says
/// nothing of what has the room now.
#[test]
fn room_that_was_given_back_during_a_sync_is_not_durable_with_it() {
    let (mut came, mut rounds) = (0, 0);
    while came < 3 {
        rounds += 1;
        assert!(rounds < 500, "no sync ran while a block took the room that another had given back");
        let shared = Arc::new((Mutex::new(Doing::default()), Condvar::new()));
        let told = shared.clone();
        let meddler: Meddler = Arc::new(move |kind, after| {
            let mut doing = told.0.lock().unwrap();
            match (kind, after) {
                (Kind::Write, false) if doing.armed => {
                    // Time for the sync to begin that was asked for when this took its room.
                    drop(told.1.wait_timeout(doing, Duration::from_millis(3)).unwrap());
                    return Fate::Fails(ErrorKind::StorageFull);
                }
                (Kind::Write, true) => doing.dirty = true,
                (Kind::Sync, false) => doing.dirty = false,
                (Kind::Sync, true) if doing.armed || doing.stopped => {
                    doing.stopped = true;
                    told.1.notify_all();
                    let stopped = told.1.wait_timeout_while(doing, LONG, |doing| doing.stopped).unwrap();
                    assert!(!stopped.1.timed_out(), "nobody lets the sync go on");
                }
                _ => {}
            }
            Fate::Done
        });
        let files = Meddled { files: Box::new(Disk::default()), meddler };
        let log = Log::open_on(Box::new(files), workload::options(), Index::all()).unwrap();
        let block = |number| Block::new(number, number, shape(6));
        let (doing, changed) = &*shared;
        // The namespace is written, with a block that is not durable: half of what may wait asks for a sync.
        let small = |number| Block::new(number, 2, shape(1));
        small(1).store(&log).unwrap();
        doing.lock().unwrap().armed = true;
        let error = block(2).store(&log).unwrap_err();
        assert!(error.code == Code::StorageFull, "{error:?}");
        let held = doing.lock().unwrap();
        let (mut held, _) =
            changed.wait_timeout_while(held, Duration::from_millis(30), |doing| !doing.stopped).unwrap();
        held.armed = false;
        let during = held.stopped;
        drop(held);
        let place = small(3).store(&log).unwrap();
        doing.lock().unwrap().stopped = false;
        changed.notify_all();
        log.sync(&[place], LONG).unwrap();
        assert!(!doing.lock().unwrap().dirty, "a block is called durable that no sync was begun after");
        came += u64::from(during);
    }
}

/// A disk that stops answering: who stores more than the bound is told by the deadline, and nothing piles up.
#[test]
fn a_disk_that_hangs_costs_a_deadline_and_bounded_memory() {
    let gate = Arc::new((Mutex::new(false), Condvar::new()));
    let (held, hanging) = (gate.clone(), Arc::new(AtomicBool::new(false)));
    let hangs = hanging.clone();
    let meddler: Meddler = Arc::new(move |kind, after| {
        if kind == Kind::Sync && !after && hangs.load(Ordering::SeqCst) {
            let open = held.0.lock().unwrap();
            drop(held.1.wait_while(open, |open| !*open).unwrap());
        }
        Fate::Done
    });
    let files = Box::new(Meddled { files: Box::new(Disk::default()), meddler });
    let options = LogOptions { unsynced: 20_000, ..workload::options() };
    let log = Log::open_on(files, options, Index::all()).unwrap();
    let block = |number| crate::blocks::Block::new(number, 0, crate::blocks::shape(3));
    let first = block(0).store(&log).unwrap();
    log.sync(&[first], LONG).unwrap();
    hanging.store(true, Ordering::SeqCst);
    let place = block(1).store(&log).unwrap();
    let error = log.sync(&[place], Duration::from_millis(30)).unwrap_err();
    assert!(error.code == Code::DeadlineExceeded, "{error:?}");
    let memory = kvik_host::Memory::shared(1 << 16, kvik_host::HugePages::Never).unwrap();
    let refused = (2..).find_map(|number| {
        assert!(log.usage().unsynced <= 20_000 + 16_384, "more than the bound waits");
        log.store(&block(number).entry(), &memory, 0, Duration::from_millis(30)).err()
    });
    let error = refused.unwrap();
    assert!(error.code == Code::DeadlineExceeded && error.text.contains("still not durable"), "{error:?}");
    // What was stored is served meanwhile.
    let bytes = crate::blocks::load(&log, place, &block(1).identity()).unwrap().unwrap();
    assert!(bytes == block(1).bytes());
    *gate.0.lock().unwrap() = true;
    gate.1.notify_all();
    log.sync(&[place], LONG).unwrap();
}
