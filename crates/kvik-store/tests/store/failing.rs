//! The disk of a whole server fails: system calls by which it writes, syncs and reads its log give errors, while a client
//! puts and gets.

use crate::meddled::*;
use crate::rig::*;
use kvik_core::{Code, Error};
use kvik_store::Ack;
use rustix::process::Signal;

/// So large that nothing has to go, though each sync that fails costs a segment.
const LOG: u64 = 64 << 20;

impl Asking {
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
        |server| {
            let asking = Asking::server(&server.expect("a server").address).unwrap();
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

/// Whether the store has some of a prompt's blocks.
fn has(asking: &Asking, number: u32) -> bool {
    asking.space.contains(&keys(&namespace("tiny"), &prompt(number))).unwrap().contains(&true)
}

#[test]
fn a_block_that_was_removed_while_it_was_written_stays_gone() {
    let (folder, disk) = (Folder::new("failing-removed"), Disk::default());
    disk.is_well();
    meddled(
        (&folder.0, LOG),
        &CALLS,
        |call| disk.fate(call),
        |server| {
            let server = server.expect("a server");
            let asking = Asking::server(&server.address).unwrap();
            asking.durable(0).unwrap();
            disk.stops(WRITES);
            soon(|| asking.put(&prompt(1), Ack::Stored, PATIENCE)).unwrap();
            becomes(|| disk.waited() > 0);
            std::thread::scope(|scope| {
                let removing = scope.spawn(|| asking.space.remove(&keys(&namespace("tiny"), &prompt(1))));
                becomes(|| !has(&asking, 1));
                disk.stops(&[]);
                // Its threads are asked again when any of them stops, for a signal that nobody minds.
                rustix::process::kill_process(server.pid, Signal::URG).unwrap();
                assert_eq!(removing.join().unwrap().unwrap(), 3);
            });
            // What was written by then is on the disk.
            asking.durable(2).unwrap();
            disk.is_gone();
            assert!(asking.durable(50).is_err());
        },
    );
    let asking = Asking::embedded(&options(&folder.0, LOG)).unwrap();
    assert_eq!((asking.there(0), has(&asking, 1), asking.there(2)), (3, false, 3));
}

#[test]
fn a_block_that_the_disk_has_failed_to_sync_can_be_removed() {
    let (folder, disk) = (Folder::new("failing-unsynced"), Disk::default());
    disk.is_well();
    meddled(
        (&folder.0, LOG),
        &CALLS,
        |call| disk.fate(call),
        |server| {
            let asking = Asking::server(&server.expect("a server").address).unwrap();
            asking.durable(0).unwrap();
            disk.fails(SYNCS, libc::EIO, 1);
            asking.durable(1).expect_err("the disk refuses");
            disk.is_well();
            asking.becomes_durable(2);
            assert_eq!(asking.space.remove(&keys(&namespace("tiny"), &prompt(1))).unwrap(), 3);
            disk.is_gone();
            assert!(asking.durable(50).is_err());
        },
    );
    let asking = Asking::embedded(&options(&folder.0, LOG)).unwrap();
    assert_eq!((asking.there(0), has(&asking, 1), asking.there(2)), (3, false, 3));
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
    // Put again, it is given from memory.
    for number in &missed[..5] {
        becomes(|| {
            asking.put(&prompt(*number), Ack::Stored, PATIENCE).unwrap();
            asking.there(*number) == 3
        });
    }
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
        |server| {
            let asking = Asking::server(&server.expect("a server").address).unwrap();
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
