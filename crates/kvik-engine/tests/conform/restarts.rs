//! A peer that comes back again and again, each time as another: nothing of the earlier ones stays.

use crate::common::*;
use crate::death::Owner;
use crate::pair::{Kind, Op, whole};
use crate::standin::Control;
use kvik_core::Code;
use kvik_engine::{Engine, Region, TransferOptions};
use kvik_transport::faulty::Faults;
use std::collections::HashMap;
use std::time::Instant;

/// How often, and where resident memory is compared from: the first ones fill caches.
const TIMES: u32 = 40;
/// What may stay resident for other reasons than a peer: allocators keep pages.
const SLACK: u64 = 8 << 20;

/// `KVIK_RESTARTS` says how often, if not 40 times.
pub fn nothing_of_peers_that_came_and_went_stays(kind: &'static Kind, control: Option<Control>) {
    let mut control = control.expect("only the stand-in counts");
    let times = std::env::var("KVIK_RESTARTS").map_or(TIMES, |text| text.parse().unwrap());
    let engine = kind.engine(&Faults::new(1), None);
    let here = kind.region(&engine, 128 << 16, 9);
    let before = control.counts();
    let mut weights = Vec::new();
    for time in 0..times {
        let mut owner = Owner::start(kind);
        if time % 2 == 0 {
            moves(&engine, &here, &owner);
            owner.kill();
        } else {
            // It dies with operations on their way to it.
            control.say("delay micros=20000");
            let transfer = begin(&engine, &here, &owner, Op::Write);
            wait_until("operations to be under way", || control.counts()["in_hand"] > 0);
            owner.kill();
            control.say("clear");
            code(transfer.wait(Some(PATIENCE)));
        }
        wait_until("the death to be noticed", || {
            engine.stats().iter().any(|(name, count)| *name == "sessions_open" && *count == 0)
        });
        let (until, names) = (Instant::now() + PATIENCE, ["users", "endpoints", "regions", "slots"]);
        let gone = |after: &HashMap<String, u64>| names.iter().all(|name| after[*name] == before[*name]);
        loop {
            let after = control.counts();
            match gone(&after) {
                true => break,
                false => assert!(Instant::now() < until, "after peer {time}: {after:?}, before: {before:?}"),
            }
        }
        if time == times / 4 || time + 1 == times {
            weights.push(resident());
        }
    }
    let (early, late) = (weights[0], weights[1]);
    println!("{times} restarts: {} KiB resident early, {} KiB late", early >> 10, late >> 10);
    assert!(late < early + SLACK, "{early} bytes resident early, {late} late");
}

/// Peers that fall silent while operations are on their way to them, which end just after the session has.
fn nothing_of_silent_peers_stays(kind: &'static Kind, control: Option<Control>) {
    let mut control = control.expect("only the stand-in counts");
    let engine = kind.engine(&Faults::new(1), None);
    let here = kind.region(&engine, 128 << 16, 9);
    for _ in 0..4 {
        let owner = Owner::start(kind);
        // An operation has 128 pieces, one after the other, and one operation is under way at a time: more than a second
        // for each transfer, so one is under way when the session ends.
        control.say("delay micros=1000");
        let transfers = [(); 8].map(|()| begin(&engine, &here, &owner, Op::Write));
        wait_until("operations to be under way", || control.counts()["in_hand"] > 0);
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

fn moves(engine: &Engine, here: &Region, owner: &Owner) {
    for op in crate::pair::OPS {
        let report = begin(engine, here, owner, op).wait(Some(PATIENCE)).unwrap();
        assert_eq!((report.transport, report.way.as_str()), ("libfabric", "efa"));
    }
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
