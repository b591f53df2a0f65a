//! Several processes: what a device goes on with when they stop, and what ends with them.

use super::over;
use crate::peer::{Peer, bytes, hex, is_peer};
use crate::{LEN, Side, connect, devices, wait, watch};
use kvik_host::verbs::{Posted, RmaOp};
use rustix::process::Signal;
use std::time::Duration;

const DEPTH: usize = 16;

/// Not a test: another process, which does what its input says.
#[test]
fn peer() {
    if !is_peer() {
        return;
    }
    let mut side = Side::on(&devices().1, 3, DEPTH);
    let address = hex(&side.queue.address().encode());
    println!("\npeer: {address} {} {}", side.known.base(), side.known.rkey());
    for line in std::io::stdin().lines().map_while(Result::ok) {
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["connect", address] => connect(&mut side, &bytes(address)),
            ["write", base, key] => {
                let there = (base.parse().unwrap(), key.parse().unwrap());
                assert_eq!(side.gather_to(RmaOp::Write, there, 0, LEN, 0), Posted::Yes);
                side.queue.flush().unwrap();
            }
            ["landed"] => {
                println!("peer: {}", side.landed(1));
                continue;
            }
            _ => panic!("{line:?}"),
        }
        println!("peer: done");
    }
}

/// A side, connected with a peer.
fn with_peer() -> (Side, Peer) {
    let mut side = Side::on(&devices().0, 1, DEPTH);
    let mut peer = Peer::start("over::processes::peer");
    assert_eq!(peer.ask(&format!("connect {}", hex(&side.queue.address().encode()))), "done");
    let told = bytes(&peer.told[0]);
    connect(&mut side, &told);
    (side, peer)
}

fn writes_into(peer: &mut Peer, side: &Side) {
    assert_eq!(peer.ask(&format!("write {} {}", side.known.base(), side.known.rkey())), "done");
}

fn write(side: &mut Side, peer: &Peer, token: u64) {
    let there = (peer.told[1].parse().unwrap(), peer.told[2].parse().unwrap());
    assert_eq!(side.gather_to(RmaOp::Write, there, 0, LEN, token), Posted::Yes);
    side.queue.flush().unwrap();
}

/// Each piece of 16 KiB waits, until [`AT_ONCE`]: the whole takes seconds.
const SLOWLY: &str = "delay micros=10000";
const AT_ONCE: &str = "delay micros=0";

over! {
    fn what_a_stopped_process_has_posted_goes_on(control) {
        let (side, mut peer) = with_peer();
        control.say(SLOWLY);
        writes_into(&mut peer, &side);
        peer.stop();
        let at_stop = side.landed(3);
        control.say(AT_ONCE);
        wait("the rest", || side.landed(3) == LEN);
        assert!(at_stop < LEN);
        peer.signal(Signal::CONT);
    }
    fn what_goes_to_a_stopped_process_lands(_control) {
        let (mut side, mut peer) = with_peer();
        peer.stop();
        write(&mut side, &peer, 0);
        side.until_ended(1);
        assert!(side.ended()[0].1.is_ok(), "{:?}", side.done);
        peer.signal(Signal::CONT);
        assert_eq!(peer.ask("landed"), LEN.to_string());
    }
    fn what_a_killed_process_had_ends_with_it(control) {
        let before = control.counts();
        let (mut side, mut peer) = with_peer();
        let mine = control.counts();
        control.say(SLOWLY);
        writes_into(&mut peer, &side);
        write(&mut side, &peer, 5);
        wait("the first piece", || side.landed(3) > 0);
        peer.kill();
        wait("its end", || control.counts()["queues"] < mine["queues"]);
        let (landed, began) = (side.landed(3), watch::start());
        control.say("clear");
        side.until_ended(1);
        let error = side.ended()[0].1.clone().unwrap_err();
        assert!(error.to_string().contains("did not answer"), "{error}");
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
        assert!(landed < LEN && side.landed(3) == landed);
        side.until("drained", |side| side.queue.is_drained());
        let after = control.counts();
        assert_eq!((after["queues"], after["in_flight"]), (before["queues"] + 1, 0), "{after:?}");
        assert_eq!(after["contexts"] + 1, mine["contexts"], "{after:?}");
    }
}
