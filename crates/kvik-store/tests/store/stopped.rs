//! A disk that stops answering, and goes on later: a server of NFS that is started again, say.

use crate::many::{self, Member};
use crate::meddled::*;
use crate::rig::*;
use crate::tracer::{CHANGES, Fate};
use crate::watch;
use kvik_core::Code;
use kvik_store::{Ack, Chain};
use rustix::process::Signal;
use std::cell::RefCell;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// So large that nothing has to go.
const LOG: u64 = 16 << 20;
/// Twice as many blocks as the memory holds.
const PROMPTS: u32 = 60;
/// Within that a disk gives everything again: a server of NFS first lets those come back who had something open.
const AGAIN: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_secs(3);

/// Memory goes on, whatever the disk does.
fn in_memory(asking: &Asking) {
    let stored = soon(|| asking.put(&prompt(9999), Ack::Stored, PATIENCE)).unwrap();
    assert_eq!((stored.stored + stored.known, asking.there(9999)), (3, 3));
}

/// Who asks has an answer in time while the disk has stopped, and memory goes on; afterwards everything is there. How
/// many prompts were missed meanwhile.
fn through_a_stop(asking: &Asking, dir: &Path, stop: impl FnOnce(), go_on: impl FnOnce()) -> usize {
    for number in 0..PROMPTS {
        asking.durable(number).unwrap();
    }
    stop();
    let began = watch::start();
    let late = asking.put(&prompt(100), Ack::Durable, SHORT).expect_err("the disk has stopped");
    println!("{:?} after {:?}", late, began.elapsed());
    assert!(began.elapsed() < 2 * SHORT, "it took {:?}", began.elapsed());
    assert!(matches!(late.code, Code::DeadlineExceeded | Code::StorageFailed), "{late:?}");
    assert!(late.text.contains(dir.to_str().unwrap()), "{late:?}");
    in_memory(asking);
    // What has to come from the disk is a miss, and keeps nobody.
    let missed: Vec<u32> = (0..PROMPTS).filter(|number| asking.there(*number) < 3).collect();
    in_memory(asking);
    // Put again, it is taken into memory, also where its reads hang.
    for number in missed.iter().take(3) {
        soon(|| asking.put(&prompt(*number), Ack::Stored, PATIENCE)).unwrap();
        assert_eq!(asking.there(*number), 3, "prompt {number} was put again");
    }
    let removed = soon(|| asking.space.remove(&keys(&namespace("tiny"), &prompt(0))));
    in_memory(asking);
    go_on();
    let until = Instant::now() + AGAIN;
    while let Err(error) = asking.put(&prompt(100), Ack::Durable, PATIENCE) {
        assert!(Instant::now() < until, "{error:?}");
    }
    println!("durable again {:?} after that", AGAIN - until.saturating_duration_since(Instant::now()));
    if removed.is_err() {
        becomes(|| asking.space.remove(&keys(&namespace("tiny"), &prompt(0))).is_ok());
    }
    for number in 1..PROMPTS {
        becomes(|| asking.there(number) == 3);
    }
    missed.len()
}

fn check_again(dir: &Path) {
    let asking = Asking::embedded(&options(dir, LOG)).unwrap();
    let removed = asking.space.contains(&keys(&namespace("tiny"), &prompt(0))).unwrap();
    assert_eq!(removed, [false; 3], "its removal was confirmed");
    for number in (1..PROMPTS).chain([100]) {
        assert_eq!(asking.there(number), 3, "prompt {number} was durable");
    }
}

#[test]
fn a_disk_that_stops_answering_keeps_nobody() {
    let (folder, disk) = (Folder::new("stopped"), Disk::default());
    let mut calls = CHANGES.to_vec();
    calls.push(libc::SYS_preadv);
    let stopped: &[libc::c_long] = calls.clone().leak();
    disk.is_well();
    let missed = meddled(
        (&folder.0, LOG),
        &calls,
        |call| disk.fate(call),
        |server| {
            let server = server.expect("a server");
            let asking = Asking::server(&server.address).unwrap();
            let go_on = || {
                disk.stops(&[]);
                // Its threads are asked again when any of them stops, for a signal that nobody minds.
                rustix::process::kill_process(server.pid, Signal::URG).unwrap();
            };
            through_a_stop(&asking, &folder.0, || disk.stops(stopped), go_on)
        },
    );
    assert!(missed >= 10, "{missed} prompts were not in memory");
    check_again(&folder.0);
}

#[test]
fn a_prefetch_from_a_slow_disk_is_answered_in_time() {
    const BLOCKS: u32 = 60;
    let (folder, slow) = (Folder::new("slow"), AtomicBool::new(false));
    let prompt: Vec<u32> = (0..BLOCKS).collect();
    let asking = Asking::embedded(&options(&folder.0, LOG)).unwrap();
    assert_eq!(asking.put(&prompt, Ack::Durable, PATIENCE).unwrap().stored, u64::from(BLOCKS));
    drop(asking);
    let takes_its_time = |_| {
        if slow.load(Ordering::Relaxed) {
            // One block after the other, which all of them take twice a client's patience for.
            std::thread::sleep(Duration::from_millis(200));
        }
        Fate::Goes
    };
    meddled((&folder.0, LOG), READS, takes_its_time, |server| {
        let asking = Asking::server(&server.expect("a server").address).unwrap();
        slow.store(true, Ordering::Relaxed);
        let began = Instant::now();
        let there = asking.space.prefetch(&keys(&namespace("tiny"), &prompt)).unwrap();
        println!("{there} of {BLOCKS} blocks after {:?}", began.elapsed());
        assert!(there > 0 && there < u64::from(BLOCKS), "{there}");
        assert!(asking.client.members()[0].up);
        slow.store(false, Ordering::Relaxed);
        assert_eq!(asking.there(9999), 0);
    });
}

#[test]
fn a_copy_on_a_slow_disk_is_not_taken_for_gone() {
    const BLOCKS: u32 = 20;
    let (folder, slow) = (Folder::new("slow-copy"), AtomicBool::new(false));
    // Which of the two servers is asked first is another one for each.
    let prompts: Vec<Vec<u32>> = (0..6).map(|first| (first * 100..first * 100 + BLOCKS).collect()).collect();
    let asking = Asking::embedded(&options(&folder.0, LOG)).unwrap();
    for prompt in &prompts {
        assert_eq!(asking.put(prompt, Ack::Durable, PATIENCE).unwrap().stored, u64::from(BLOCKS));
    }
    drop(asking);
    let takes_its_time = |_| {
        if slow.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(200));
        }
        Fate::Goes
    };
    meddled((&folder.0, LOG), READS, takes_its_time, |server| {
        let other = Member::start();
        let servers = [server.expect("a server").address, other.address()];
        let asking = many::Asking::of(&servers, 2);
        slow.store(true, Ordering::Relaxed);
        for prompt in &prompts {
            let keys = keys(&namespace("tiny"), prompt);
            let there = asking.get(Chain::from(&keys), Some(Duration::from_secs(2)));
            println!("{there:?} {:?}", asking.client.members());
        }
        assert!(asking.client.members().iter().all(|member| member.up), "{:?}", asking.client.members());
        slow.store(false, Ordering::Relaxed);
        // It has been asked whether it answers, and has.
        asking.client.stat().unwrap();
        assert!(asking.client.members().iter().all(|member| member.up), "{:?}", asking.client.members());
    });
}

/// A shell that does something to the disk. It was there before any file on that disk was open: a process that starts
/// another one has its files closed in that, which NFS answers when all of their bytes are on the server.
struct Shell(Child);

impl Shell {
    fn start() -> Shell {
        let each = "while read -r line; do eval \"$line\" && echo done || exit; done";
        let mut shell = Command::new("sh");
        shell.args(["-c", each]).stdin(Stdio::piped()).stdout(Stdio::piped());
        Shell(shell.spawn().unwrap())
    }

    /// Runs a command that the environment has by this name.
    fn run(&mut self, name: &str) {
        let command = std::env::var(name).expect("a command");
        writeln!(self.0.stdin.as_mut().unwrap(), "{command}").unwrap();
        let mut answer = [0; 5];
        self.0.stdout.as_mut().unwrap().read_exact(&mut answer).expect("a command that succeeds");
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        drop(self.0.wait());
    }
}

#[test]
#[ignore = "takes a disk below TMPDIR that commands stop and start: see tests/rdma/nfs.py"]
fn a_disk_that_a_command_stops_keeps_nobody() {
    let shell = RefCell::new(Shell::start());
    let folder = Folder::new("commanded");
    let asking = Asking::embedded(&options(&folder.0, LOG)).unwrap();
    let shell = &shell;
    let has = |name| move || shell.borrow_mut().run(name);
    through_a_stop(&asking, &folder.0, has("KVIK_DISK_STOPS"), has("KVIK_DISK_GOES_ON"));
    drop(asking);
    check_again(&folder.0);
}

#[test]
#[ignore = "takes a disk below TMPDIR of a few MiB: see tests/rdma/nfs.py"]
fn a_disk_that_is_full_keeps_what_it_has() {
    let folder = Folder::new("full");
    let asking = Asking::embedded(&options(&folder.0, LOG)).unwrap();
    let mut durable = Vec::new();
    let full = (0..1000).find_map(|number| match asking.durable(number) {
        Ok(_) => {
            durable.push(number);
            None
        }
        Err(error) => Some(error),
    });
    let full = full.expect("a disk that is full");
    println!("after {} prompts: {full}", durable.len());
    assert!(full.code == Code::StorageFull && full.text.contains(folder.0.to_str().unwrap()), "{full:?}");
    in_memory(&asking);
    drop(asking);
    let asking = Asking::embedded(&options(&folder.0, LOG)).unwrap();
    assert!(durable.len() > 10);
    durable.iter().for_each(|number| assert_eq!(asking.there(*number), 3, "prompt {number} was durable"));
}

#[test]
#[ignore = "takes a disk below TMPDIR that commands make read-only: see tests/rdma/nfs.py"]
fn a_disk_that_becomes_read_only_is_read() {
    let mut shell = Shell::start();
    let folder = Folder::new("read-only");
    let open = || Asking::embedded(&options(&folder.0, LOG));
    let refused = |asking: &Asking, number| {
        let error = asking.durable(number).expect_err("nothing can be written");
        assert!(error.code == Code::StorageFailed, "{error:?}");
        assert!(error.text.contains(folder.0.to_str().unwrap()), "{error:?}");
        println!("{error}");
        in_memory(asking);
    };
    let asking = open().unwrap();
    (0..4).for_each(|number| assert_eq!(asking.durable(number).unwrap().stored, 3));
    shell.run("KVIK_DISK_READ_ONLY");
    refused(&asking, 10);
    drop(asking);
    // Until this machine asks again, it remembers that the directory could be written to.
    let mut reading = None;
    becomes(|| {
        reading = open().ok();
        reading.is_some()
    });
    let asking = reading.expect("a log that is read");
    (0..4).for_each(|number| assert_eq!(asking.there(number), 3, "prompt {number} was durable"));
    refused(&asking, 11);
    drop(asking);
    shell.run("KVIK_DISK_WRITABLE");
    // The same again.
    becomes(|| open().is_ok_and(|asking| asking.durable(12).is_ok()));
    let asking = open().unwrap();
    (0..4).chain([12]).for_each(|number| assert_eq!(asking.there(number), 3, "prompt {number} was durable"));
}
