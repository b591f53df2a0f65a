//! A peer that comes back again and again, each time as another: nothing of the earlier ones stays.

use crate::common::*;
use crate::death::Owner;
use crate::faulty::Faults;
use crate::pair::{Kind, OPS, Op, metric, whole};
use crate::standin::Control;
use kvik_core::Code;
use kvik_engine::{Engine, Region, TransferOptions};
use std::collections::HashMap;
use std::time::Instant;

/// How often. Resident memory is compared from the half on: the first ones fill caches.
const TIMES: u32 = 40;
/// What may stay resident for other reasons than a peer: allocators keep pages.
const SLACK: u64 = 8 << 20;
/// Has the C library give back what is freed: an endpoint of libfabric has buffers of tens of MB, and comes and goes.
const GIVE_BACK: [(&str, &str); 2] = [("MALLOC_TRIM_THRESHOLD_", "0"), ("MALLOC_MMAP_THRESHOLD_", "32768")];
/// Set in a process that has nothing else to do, so that its memory is this test's.
const ALONE: &str = "KVIK_TEST_RESTARTS_ALONE";

/// What an engine holds of its peers.
#[derive(Debug, PartialEq)]
struct Held {
    /// Ways to NICs of peers, which are their slots; and, where the device says it, all that it knows of users.
    connections: u64,
    device: Vec<(&'static str, u64)>,
    descriptors: usize,
    sessions: u64,
}

fn held(engine: &Engine, control: Option<&mut Control>) -> Held {
    let counts = control.map_or_else(HashMap::new, Control::counts);
    let names = ["users", "endpoints", "regions", "slots"];
    let device = names.into_iter().filter_map(|name| Some((name, *counts.get(name)?)));
    let sessions = engine.stats().iter().find(|(name, _)| *name == "sessions_open").unwrap().1;
    Held {
        connections: metric(engine, "kvik_nic_connections_open") as u64,
        device: device.collect(),
        descriptors: std::fs::read_dir("/proc/self/fd").unwrap().count(),
        sessions,
    }
}

/// `KVIK_RESTARTS` says how often, if not 40 times.
fn nothing_of_peers_that_came_and_went_stays(kind: &'static Kind, mut control: Option<Control>) {
    let times = std::env::var("KVIK_RESTARTS").map_or(TIMES, |text| text.parse().unwrap());
    let engine = kind.engine(&Faults::new(1), None);
    let here = kind.region(&engine, 128 << 16, 9);
    let before = held(&engine, control.as_mut());
    let (mut refused, mut weights) = (0, Weights::default());
    for time in 0..times {
        let mut owner = Owner::start(kind);
        // Peers are also met by warm-ups, and both ways of dying come to both.
        if time % 4 < 2 {
            let warmed = engine.warm_up(&owner.tickets[0], Some(PATIENCE)).unwrap().wait(None);
            refused += u32::from(!warmed.is_ok_and(|warmed| warmed.failed().next().is_none()));
        }
        if time % 2 == 0 {
            refused += moves(kind, &engine, &here, &owner);
            owner.kill();
        } else {
            dies(&engine, &here, &mut owner, control.as_mut());
        }
        let until = Instant::now() + PATIENCE;
        // The page that is kept for probes is one more region from the first warm-up on. Where operations had to be
        // stopped, the endpoint that was closed for it is opened again when the next peer is to be reached.
        let stopped = time % 2 == 1;
        let known = |a: &(&str, u64), b: &(&str, u64)| match a.0 {
            "regions" => a.1 == b.1 || a.1 == b.1 + 1,
            "endpoints" => a.1 == b.1 || (stopped && a.1 + 1 == b.1),
            _ => a == b,
        };
        let same = |after: &Held| {
            let device = after.device.iter().zip(&before.device).all(|(a, b)| known(a, b));
            // One more is the page.
            let descriptors = after.descriptors <= before.descriptors + 2;
            device && descriptors && after.connections == before.connections && after.sessions == 0
        };
        let after = loop {
            let after = held(&engine, control.as_mut());
            match same(&after) {
                true => break after,
                false => assert!(Instant::now() < until, "after peer {time}: {after:?}, before: {before:?}"),
            }
        };
        weights.note(time, times, refused, &after);
    }
    assert_eq!(refused, 0, "a peer that had just come was refused");
    weights.check();
}

/// What it weighed, in the course of the restarts.
#[derive(Default)]
struct Weights {
    heaviest: u64,
    /// Resident bytes and descriptors, early and late.
    compared: Vec<(u64, usize)>,
}

impl Weights {
    /// Prints where it began, is half done and ends, and wherever it became heavier by much.
    fn note(&mut self, time: u32, times: u32, refused: u32, after: &Held) {
        let (weight, half) = (resident(), (times / 2).max(1));
        if [0, half].contains(&time) || time + 1 == times || weight > self.heaviest + SLACK {
            println!("{} restarts: {refused} refused, {} KiB resident, {after:?}", time + 1, weight >> 10);
        }
        self.heaviest = self.heaviest.max(weight);
        if time == half || time + 1 == times {
            self.compared.push((weight, after.descriptors));
        }
    }

    fn check(&self) {
        let [(early, first), (late, last)] = self.compared[..] else { panic!("too few restarts to compare") };
        assert!(late < early + SLACK, "{early} bytes resident early, {late} late");
        assert!(last <= first + 4, "{first} descriptors early, {last} late");
    }
}

/// It dies with operations on their way to it.
fn dies(engine: &Engine, here: &Region, owner: &mut Owner, control: Option<&mut Control>) {
    let Some(control) = control else {
        let transfer = begin(engine, here, owner, Op::Write);
        owner.kill();
        // It may have been faster.
        let _ = transfer.wait(Some(PATIENCE));
        return;
    };
    control.say("delay micros=20000");
    let transfer = begin(engine, here, owner, Op::Write);
    wait_until("operations to be in flight", || control.counts()["in_flight"] > 0);
    owner.kill();
    control.say("clear");
    code(transfer.wait(Some(PATIENCE)));
}

/// Peers that fall silent while operations are on their way to them, which end just after the session has.
fn nothing_of_silent_peers_stays(kind: &'static Kind, control: Option<Control>) {
    let mut control = control.expect("only the stand-in counts");
    let engine = kind.engine(&Faults::new(1), None);
    let here = kind.region(&engine, 128 << 16, 9);
    for _ in 0..4 {
        let owner = Owner::start(kind);
        // An operation has 128 pieces, one after the other, and one operation is in flight at a time: more than a
        // second for each transfer, so one is in flight when the session ends.
        control.say("delay micros=1000");
        let transfers = [(); 8].map(|()| begin(&engine, &here, &owner, Op::Write));
        wait_until("operations to be in flight", || control.counts()["in_flight"] > 0);
        owner.stop();
        let ended = transfers.map(|transfer| transfer.wait(Some(PATIENCE)));
        let lost = ended.into_iter().filter_map(Result::err);
        assert!(lost.map(|error| assert_eq!(error.code, Code::PeerLost, "{error}")).count() > 0);
        control.say("clear");
        wait_until("the peer's slot to be free", || control.counts()["slots"] == 0);
    }
}

#[test]
fn silent_peers() {
    const KIND: &Kind = &Kind {
        standin: Some(crate::pair::Standin { devices: 1, depth: 1, ..crate::pair::Standin::NEW }),
        ..crate::EFA
    };
    KIND.place(concat!(module_path!(), "::silent_peers"), |control| {
        nothing_of_silent_peers_stays(KIND, control)
    });
}

fn begin(engine: &Engine, here: &Region, owner: &Owner, op: Op) -> kvik_engine::Transfer {
    let verify = Some(kvik_engine::Verify::Off);
    let options = TransferOptions { deadline: Some(PATIENCE), verify, ..Default::default() };
    match op {
        Op::Read => engine.read(&whole(here, 64 << 10), &owner.tickets[0], None, options).unwrap(),
        Op::Write => engine.write(&whole(here, 64 << 10), &owner.tickets[1], None, options).unwrap(),
    }
}

/// How many of both transfers were refused.
fn moves(kind: &Kind, engine: &Engine, here: &Region, owner: &Owner) -> u32 {
    let refused = OPS.map(|op| match begin(engine, here, owner, op).wait(Some(PATIENCE)) {
        Ok(report) => {
            assert_eq!((report.transport.name(), report.mechanism.as_str()), ("libfabric", kind.mechanism));
            0
        }
        Err(error) => {
            println!("refused: {error}");
            1
        }
    });
    refused.iter().sum()
}

fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

#[test]
fn forty_restarts() {
    const KIND: &Kind = &Kind {
        standin: Some(crate::pair::Standin { devices: 1, ..crate::pair::Standin::NEW }),
        ..crate::EFA
    };
    let name = concat!(module_path!(), "::forty_restarts");
    KIND.place(name, |control| nothing_of_peers_that_came_and_went_stays(KIND, control));
}

#[test]
fn forty_restarts_over_a_real_provider() {
    const KIND: &Kind =
        &Kind { transport: "libfabric", mechanism: "tcp", nics: "libfabric:tcp", ..Kind::NEW };
    if std::env::var_os(ALONE).is_some() {
        return nothing_of_peers_that_came_and_went_stays(KIND, None);
    }
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "restarts::forty_restarts_over_a_real_provider", "--nocapture"]);
    command.env(ALONE, "1").envs(GIVE_BACK);
    let output = command.output().unwrap();
    println!("{}", String::from_utf8_lossy(&[output.stdout.as_slice(), &output.stderr].concat()));
    assert!(output.status.success());
}
