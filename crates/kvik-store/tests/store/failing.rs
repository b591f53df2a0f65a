//! The disk of a whole server fails: system calls by which it writes, syncs and reads its log give errors, while a client
//! puts and gets.

use crate::meddled::*;
use crate::rig::*;
use crate::tracer::Fate;
use kvik_core::{Code, Error, Result};
use kvik_store::{Ack, Stored};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// So large that nothing has to go, though each sync that fails costs a segment.
const LOG: u64 = 64 << 20;
const SYNCS: &[libc::c_long] = &[libc::SYS_fdatasync, libc::SYS_fsync];
const WRITES: &[libc::c_long] = &[libc::SYS_pwritev];
const READS: &[libc::c_long] = &[libc::SYS_preadv];
const CALLS: [libc::c_long; 4] = [libc::SYS_fdatasync, libc::SYS_fsync, libc::SYS_pwritev, libc::SYS_preadv];
/// A server that hangs is found out, and one that is only slow is not.
const SOON: Duration = Duration::from_secs(10);

/// What the disk refuses.
#[derive(Default)]
struct Disk(Mutex<Trouble>);

#[derive(Default)]
struct Trouble {
    calls: &'static [libc::c_long],
    error: i32,
    /// Of so many calls one fails, by chance.
    one_in: u64,
    random: Random,
    failed: u64,
    killed: bool,
}

impl Disk {
    fn fails(&self, calls: &'static [libc::c_long], error: i32, one_in: u64) {
        let mut trouble = self.0.lock().unwrap();
        (trouble.calls, trouble.error, trouble.one_in) = (calls, error, one_in);
    }

    fn is_well(&self) {
        self.fails(&[], 0, 1);
    }

    /// The server does not survive its next call.
    fn is_gone(&self) {
        self.0.lock().unwrap().killed = true;
    }

    /// How many calls have failed.
    fn failed(&self) -> u64 {
        self.0.lock().unwrap().failed
    }

    fn fate(&self, call: libc::c_long) -> Fate {
        let mut trouble = self.0.lock().unwrap();
        if trouble.killed {
            return Fate::Killed;
        }
        let one_in = trouble.one_in;
        if !trouble.calls.contains(&call) || trouble.random.below(one_in) > 0 {
            return Fate::Goes;
        }
        trouble.failed += 1;
        Fate::Fails(trouble.error)
    }
}

fn prompt(number: u32) -> [u32; 3] {
    [number, number + 1000, number + 2000]
}

/// Everything that asks here has an answer soon, whatever that is.
fn soon<R>(ask: impl FnOnce() -> R) -> R {
    let began = Instant::now();
    let answer = ask();
    assert!(began.elapsed() < SOON, "it took {:?}", began.elapsed());
    answer
}

impl Asking {
    fn durable(&self, number: u32) -> Result<Stored> {
        soon(|| self.put(&prompt(number), Ack::Durable, PATIENCE))
    }

    fn there(&self, number: u32) -> usize {
        soon(|| self.get(&prompt(number))).unwrap()
    }

    /// What was refused is taken as soon as the disk is well, and is written again for that.
    fn becomes_durable(&self, number: u32) {
        // Threads of the log may still be busy with what has failed.
        becomes(|| match self.durable(number) {
            Ok(stored) => stored.stored + stored.known == 3,
            Err(_) => false,
        });
    }

    /// How many operations of the log the store says have failed.
    fn failures(&self) -> u64 {
        let metrics = self.client.metrics().unwrap();
        let line = metrics.lines().find(|line| line.starts_with("kvik_store_log_failures_total"));
        line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).expect("a counter")
    }

    /// The disk refuses what a durable put takes: that one fails by name, and everything in memory goes on.
    fn refused(&self, disk: &Disk, (calls, error): (&'static [libc::c_long], i32), code: Code, first: u32) {
        let (before, known) = (disk.failed(), self.failures());
        disk.fails(calls, error, 1);
        let refused: Error = self.durable(first).expect_err("the disk refuses");
        assert!(refused.code == code && refused.text.contains("kvik-store-failing"), "{refused:?}");
        // Once more: what was refused is not taken for durable now.
        let again = self.durable(first).expect_err("the disk refuses");
        assert_eq!(again.code, code, "{again:?}");
        let stored = soon(|| self.put(&prompt(first + 1), Ack::Stored, PATIENCE)).unwrap();
        assert_eq!((stored.stored, self.there(first), self.there(first + 1)), (3, 3, 3));
        assert!(disk.failed() > before && self.failures() > known, "nothing has failed");
        disk.is_well();
        self.becomes_durable(first);
    }
}

#[test]
fn a_disk_that_fails_takes_nothing_with_it_that_was_acknowledged() {
    let (folder, disk) = (Folder::new("failing"), Disk::default());
    disk.is_well();
    meddled(
        (&folder.0, LOG),
        &CALLS,
        |call| disk.fate(call),
        |address| {
            let asking = Asking::server(&address.expect("a server")).unwrap();
            asking.durable(0).unwrap();
            asking.refused(&disk, (SYNCS, libc::EIO), Code::StorageFailed, 10);
            asking.refused(&disk, (WRITES, libc::EIO), Code::StorageFailed, 20);
            asking.refused(&disk, (WRITES, libc::ENOSPC), Code::StorageFull, 30);
            asking.refused(&disk, (SYNCS, libc::ENOSPC), Code::StorageFull, 40);
            reads_fail(&asking, &disk);
            disk.is_gone();
            assert!(asking.durable(50).is_err());
        },
    );
    let asking = Asking::embedded(&options(&folder.0, LOG)).unwrap();
    for number in [0, 10, 20, 30, 40].into_iter().chain(100..160) {
        assert_eq!(asking.there(number), 3, "prompt {number} was durable");
    }
}

/// A block that the disk does not give is a miss, and no more than that.
fn reads_fail(asking: &Asking, disk: &Disk) {
    // Twice as much as the memory holds.
    for number in 100..160 {
        asking.durable(number).unwrap();
    }
    let known = asking.failures();
    disk.fails(READS, libc::EIO, 1);
    let missed: Vec<u32> = (100..160).filter(|number| asking.there(*number) < 3).collect();
    let stat = asking.client.stat().unwrap();
    println!("{} of 60 prompts were missed", missed.len());
    assert!(missed.len() >= 10 && asking.failures() > known && stat.misses >= missed.len() as u64);
    // It has failed, and was not read as something else.
    assert_eq!(stat.corrupt, 0);
    let stored = soon(|| asking.put(&prompt(200), Ack::Stored, PATIENCE)).unwrap();
    assert_eq!((stored.stored, asking.there(200)), (3, 3));
    disk.is_well();
    missed.iter().for_each(|number| assert_eq!(asking.there(*number), 3, "prompt {number} is there again"));
}

#[test]
fn what_is_durable_stays_whatever_a_disk_refuses_by_chance() {
    let (folder, disk) = (Folder::new("by-chance"), Disk::default());
    let mut random = Random::new();
    disk.0.lock().unwrap().random = Random::with(random.next());
    let (mut durable, mut refused) = (Vec::new(), 0);
    let troubles: [&[libc::c_long]; 4] = [SYNCS, WRITES, READS, &CALLS];
    meddled(
        (&folder.0, LOG),
        &CALLS,
        |call| disk.fate(call),
        |address| {
            let asking = Asking::server(&address.expect("a server")).unwrap();
            for number in 0..80 {
                let error = if random.below(2) == 0 { libc::EIO } else { libc::ENOSPC };
                disk.fails(troubles[random.below(4) as usize], error, 1 + random.below(6));
                match asking.durable(number) {
                    Ok(stored) => {
                        assert_eq!(stored.refused, 0, "prompt {number}");
                        durable.push(number);
                    }
                    Err(error) => {
                        assert!(matches!(error.code, Code::StorageFailed | Code::StorageFull), "{error:?}");
                        refused += 1;
                    }
                }
                // What comes is right, and nothing has to come.
                asking.there(random.below(u64::from(number) + 1) as u32);
            }
            assert_eq!(asking.client.stat().unwrap().corrupt, 0);
            disk.is_gone();
            assert!(asking.durable(9000).is_err());
        },
    );
    println!("{} puts were durable, {refused} were refused; {} calls failed", durable.len(), disk.failed());
    assert!(durable.len() >= 10 && refused >= 10, "too little was done for this to mean anything");
    let asking = Asking::embedded(&options(&folder.0, LOG)).unwrap();
    for number in durable {
        assert_eq!(asking.there(number), 3, "prompt {number} was durable");
    }
}
