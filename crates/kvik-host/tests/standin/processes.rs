//! Several processes: what a device goes on with when they stop, and what ends with them.

use crate::peer::{Peer, bytes, hex, is_peer};
use crate::side::{LEN, Side, nics, pair, post_all, rma, until, wait};
use crate::standin::{Folder, again};
use crate::{DEVICE, alone};
use kvik_host::fabric::{Endpoint, Posted, Rma, RmaOp};
use kvik_host::{HugePages, Memory};
use rustix::process::{Pid, Signal, kill_process};
use std::sync::Arc;

/// Not a test: another process, which does what its input says.
#[test]
fn peer() {
    if !is_peer() {
        return;
    }
    let mut side = Side::new(&nics()[0], 3, 64);
    let address = side.endpoint.address().unwrap();
    println!("\npeer: {} {} {}", hex(&address), side.known.base(), side.known.key());
    for line in std::io::stdin().lines().map_while(Result::ok) {
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["write", address, base, key] => {
                let slot = side.endpoint.add_peer(&bytes(address)).unwrap();
                let (memory, len) = (&side.known.clone(), LEN);
                let (remote, key) = (base.parse().unwrap(), key.parse().unwrap());
                let order =
                    Rma { op: RmaOp::Write, memory, offset: 0, len, peer: slot, remote, key, token: 0 };
                assert_eq!(side.endpoint.post(&order).unwrap(), Posted::Yes);
                println!("peer: posted");
            }
            ["landed"] => println!("peer: {}", side.landed(1)),
            _ => panic!("{line:?}"),
        }
    }
}

/// It has posted a write of all its memory into the side's.
fn writes_into(peer: &mut Peer, side: &mut Side) {
    let address = hex(&side.endpoint.address().unwrap());
    let line = format!("write {address} {} {}", side.known.base(), side.known.key());
    assert_eq!(peer.ask(&line), "posted");
}

/// Each piece of 8 KiB waits, until [`AT_ONCE`]: the whole takes seconds.
const SLOWLY: &str = "delay micros=20000";
const AT_ONCE: &str = "delay micros=0";

alone!(what_a_stopped_process_has_posted_goes_on, [], |mut control| {
    let mut side = Side::new(&nics()[0], 2, 64);
    let mut peer = Peer::start("processes::peer");
    control.say(SLOWLY);
    writes_into(&mut peer, &mut side);
    peer.stop();
    let at_stop = side.landed(3);
    control.say(AT_ONCE);
    wait("the rest", || side.landed(3) == LEN);
    assert!(at_stop < LEN);
    peer.signal(Signal::CONT);
});

alone!(what_goes_to_a_stopped_process_lands, [], |mut control| {
    let mut side = Side::new(&nics()[0], 1, 64);
    let mut peer = Peer::start("processes::peer");
    peer.stop();
    write(&mut side, &peer, 0);
    until(&mut side, 1);
    assert!(side.done[0].result.is_ok(), "{:?}", side.done);
    assert_eq!(control.counts()["software"], 0);
    peer.signal(Signal::CONT);
    assert_eq!(peer.ask("landed"), LEN.to_string());
});

fn write(side: &mut Side, peer: &Peer, token: u64) {
    let slot = side.endpoint.add_peer(&bytes(&peer.told[0])).unwrap();
    let (remote, key) = (peer.told[1].parse().unwrap(), peer.told[2].parse().unwrap());
    let here = side.known.clone();
    let order = Rma { remote, key, ..rma(RmaOp::Write, (&here, &here), slot, (0, LEN, token)) };
    assert_eq!(side.endpoint.post(&order).unwrap(), Posted::Yes);
}

alone!(what_a_killed_process_had_ends_with_it, [], |mut control| {
    let mut side = Side::new(&nics()[0], 1, 64);
    let before = control.counts();
    let mut peer = Peer::start("processes::peer");
    control.say(SLOWLY);
    writes_into(&mut peer, &mut side);
    write(&mut side, &peer, 5);
    wait("the first piece", || side.landed(3) > 0);
    peer.kill();
    wait("its end", || control.counts()["users"] == before["users"]);
    let landed = side.landed(3);
    until(&mut side, 1);
    let error = side.done[0].result.clone().unwrap_err().to_string();
    assert!(error.contains("closed"), "{error}");
    // Its own is no more either, whatever else goes on.
    control.say("clear");
    let after = control.counts();
    for name in ["users", "endpoints", "regions", "slots", "in_flight"] {
        let mine = u64::from(name == "slots");
        assert_eq!(after[name], before[name] + mine, "{name}: {after:?}");
    }
    assert!(landed < LEN && side.landed(3) == landed);
    write(&mut side, &peer, 6);
    until(&mut side, 2);
    assert!(side.done[1].result.clone().unwrap_err().to_string().contains("no endpoint has this address"));
});

/// The process that has the devices.
fn daemon() -> u32 {
    let log = std::path::Path::new(&std::env::var_os(crate::standin::FOLDER).unwrap()).join("log");
    let log = std::fs::read_to_string(log).unwrap();
    log.split("process ").nth(1).unwrap().split(',').next().unwrap().parse().unwrap()
}

// When its last user has gone: whoever runs this waits for that.
alone!(a_daemon_that_stood_still_ends, [DEVICE], |mut control| {
    let daemon = daemon();
    let process = Pid::from_raw(daemon as i32).unwrap();
    let is = |state| std::fs::read_to_string(format!("/proc/{daemon}/stat")).unwrap().contains(state);
    control.counts();
    wait("it to wait", || is(") S "));
    kill_process(process, Signal::STOP).unwrap();
    wait("it to be stopped", || is(") T "));
    kill_process(process, Signal::CONT).unwrap();
});

/// What a process has resident, in bytes, and its open descriptors.
fn weight(process: u32) -> (u64, usize) {
    let statm = std::fs::read_to_string(format!("/proc/{process}/statm")).unwrap();
    let pages: u64 = statm.split(' ').nth(1).unwrap().parse().unwrap();
    (pages * 4096, std::fs::read_dir(format!("/proc/{process}/fd")).unwrap().count())
}

alone!(thousands_of_endpoints_leave_nothing_behind, [DEVICE], |mut control| {
    let daemon = daemon();
    let (mut a, b, slot) = pair(&nics()[0], 64);
    let mut weights = Vec::new();
    for turn in 0..3000 {
        let mut c = Endpoint::open(&b.device, 64).unwrap();
        let peer = a.endpoint.add_peer(&c.address().unwrap()).unwrap();
        let known = b.device.register(b.memory.clone(), true).unwrap();
        // One that ends well, and one that goes with its endpoint.
        post_all(&mut a, &known, peer, RmaOp::Write, [(0, 4096, turn)]);
        until(&mut a, 1);
        assert!(a.done.pop().unwrap().result.is_ok());
        let back = c.add_peer(&a.endpoint.address().unwrap()).unwrap();
        let order = rma(RmaOp::Read, (&b.known, &a.known), back, (0, LEN, 0));
        assert_eq!(c.post(&order).unwrap(), Posted::Yes);
        a.endpoint.remove_peer(peer).unwrap();
        if turn == 300 || turn == 2999 {
            weights.push([weight(std::process::id()), weight(daemon)]);
        }
    }
    let counts = control.counts();
    let expected = [("endpoints", 2), ("regions", 2), ("slots", 1), ("in_flight", 0)];
    expected.iter().for_each(|(name, count)| assert_eq!(counts[*name], *count, "{name}: {counts:?}"));
    for (early, late) in weights[0].iter().zip(&weights[1]) {
        assert!(late.0 < early.0 + (4 << 20) && late.1 <= early.1, "{weights:?}");
    }
    post_all(&mut a, &b.known, slot, RmaOp::Write, [(0, LEN, 0)]);
    until(&mut a, 1);
});

/// Run in a process of its own by the next test.
#[test]
#[ignore = "the next test runs it"]
fn uses_the_device_once() {
    let (mut a, b, slot) = pair(&nics()[0], 64);
    post_all(&mut a, &b.known, slot, RmaOp::Write, [(0, LEN, 0)]);
    until(&mut a, 1);
    assert_eq!(b.landed(1), LEN);
}

#[test]
fn the_library_starts_the_daemon_which_ends_after_its_last_user() {
    let mut folder = Folder::new();
    for times in 1..=2 {
        let output = again("processes::uses_the_device_once", &folder, &[DEVICE]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success() && said.contains("KVIK_STANDIN_SEED="), "{said}");
        folder.ended();
        assert_eq!(folder.log().matches("process ").count(), times);
    }
}

alone!(memory_that_is_gone_costs_nobody_else, [DEVICE], |mut control| {
    let (mut a, b, slot) = pair(&nics()[0], 64);
    control.say(SLOWLY);
    // Nobody else has the memory: it is unmapped with its registration, under an operation that has begun.
    let memory = Arc::new(Memory::shared(LEN, HugePages::Never).unwrap());
    let known = b.device.register(memory, true).unwrap();
    post_all(&mut a, &known, slot, RmaOp::Write, [(0, LEN, 0)]);
    wait("the first piece", || control.counts()["pieces"] > 0);
    drop(known);
    control.say("clear");
    until(&mut a, 1);
    assert!(a.done[0].result.is_ok() && control.counts()["orphans"] > 0);
});
