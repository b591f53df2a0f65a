//! The peer dies in the middle: a real process, which is this test's own program under another name.

use crate::common::*;
use crate::faulty::Faults;
use crate::pair::{Kind, OPS, Op, options, whole};
use crate::table;
use kvik_core::{Code, Ticket};
use kvik_engine::{TransferOptions, Verify};
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

const ROLE: &str = "KVIK_TEST_CONFORM_PEER";
const PAGES: u32 = 128;
const PAGE: u64 = 64 << 10;

/// Not a test: the peer. It owns pages until its input ends.
#[test]
fn peer() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let (_, kind) = table().into_iter().find(|(name, _)| *name == role).unwrap();
    let engine = kind.engine(&Faults::new(1), None);
    let region = kind.granted_region(&engine, u64::from(PAGES) * PAGE, 1);
    let kept = OPS.map(|op| engine.grant(&whole(&region, PAGE), options(op)).unwrap());
    println!("\npeer: {} {}", kept[0].ticket(), kept[1].ticket());
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}

/// A process that owns pages.
pub struct Owner {
    process: Child,
    /// Open as long as it runs: after a minute its test says so, and would end where nobody can read it.
    _said: BufReader<ChildStdout>,
    /// To read them, and to write them.
    pub tickets: Vec<Ticket>,
}

impl Owner {
    pub fn start(kind: &Kind) -> Owner {
        // What the stand-in is like is said by the variables that this process was given.
        let same = |other: &Kind| Kind { standin: None, ..*other } == Kind { standin: None, ..*kind };
        let (name, _) = table().into_iter().find(|(_, other)| same(other)).unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "death::peer", "--nocapture"]).env(ROLE, name);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let mut said = BufReader::new(process.stdout.take().unwrap());
        let mut told = said.by_ref().lines().map_while(Result::ok).filter_map(|line| {
            Some(line.strip_prefix("peer: ")?.split(' ').map(|text| text.parse().unwrap()).collect())
        });
        let tickets = told.next().expect("the peer's tickets");
        Owner { process, _said: said, tickets }
    }

    /// Bytes of its pages.
    pub fn bytes(&self) -> u64 {
        u64::from(PAGES) * PAGE
    }

    /// It falls silent.
    pub fn stop(&self) {
        let process = rustix::process::Pid::from_child(&self.process);
        rustix::process::kill_process(process, rustix::process::Signal::STOP).unwrap();
        wait_until("each of its threads to stop", || {
            let tasks = std::fs::read_dir(format!("/proc/{}/task", process.as_raw_nonzero())).unwrap();
            let stats = tasks.map(|task| std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap());
            stats.into_iter().all(|stat| stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T')))
        });
    }

    pub fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.kill();
    }
}

pub fn a_killed_peer_ends_the_transfer_and_another_one_serves(kind: &'static Kind) {
    // Who serves itself does not outlive its peer.
    if kind.own() {
        return;
    }
    let ours = Faults::new(1);
    let engine = kind.engine(&ours, None);
    let here = kind.region(&engine, u64::from(PAGES) * PAGE, 9);
    let mut owner = Owner::start(kind);
    for op in OPS {
        let (set, deadline) = (
            whole(&here, PAGE),
            TransferOptions { deadline: Some(PATIENCE), verify: Some(Verify::Full), ..Default::default() },
        );
        let begin = |owner: &Owner| match op {
            Op::Read => engine.read(&set, &owner.tickets[0], None, deadline.clone()).unwrap(),
            Op::Write => engine.write(&set, &owner.tickets[1], None, deadline.clone()).unwrap(),
        };
        let moved = |owner: &Owner| begin(owner).wait(Some(PATIENCE)).unwrap();
        assert_eq!(moved(&owner).transport.name(), kind.transport);
        // Here a read's destination is written, or a write's source sent; within a host the owner does the latter.
        let held = op == Op::Read || kind.transport != "local";
        if held {
            ours.hold_from(ours.given() + 1);
        }
        let transfer = begin(&owner);
        assert!(!held || ours.wait_held(1, PATIENCE));
        owner.kill();
        let killed = watch::start();
        let lost = |(name, count): &(&str, u64)| *name == "sessions_open" && *count == 0;
        wait_until("the death to be noticed", || engine.stats().iter().any(lost));
        // The bound that is promised, and as much again for a machine that is busy with other tests.
        assert!(killed.elapsed() < Duration::from_millis(5000), "noticed after {:?}", killed.elapsed());
        ours.release();
        match transfer.wait(Some(PATIENCE)) {
            Err(error) => assert_eq!(error.code, Code::PeerLost, "{error}"),
            Ok(report) => assert!(!held, "a transfer in flight ended well: {report:?}"),
        }
        here.read_at(0, &mut [0]).unwrap();
        owner = Owner::start(kind);
        moved(&owner);
    }
    here.close(PATIENCE).unwrap();
}
