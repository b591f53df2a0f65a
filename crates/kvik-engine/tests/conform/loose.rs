//! A NIC that will not let go: what a transfer posted, or what peers reach, cannot be closed. Then nothing is called
//! stopped that may go on: transfers end by their deadlines, and pages that may still be touched are nobody's.

use crate::common::*;
use crate::crowds::rests;
use crate::nics::{EFA, Nic, ROCE};
use crate::pair::{OPS, Op, Pair, metric, whole};
use crate::standin::Control;
use kvik_core::{Code, Error};
use kvik_engine::{Region, Verify};
use std::time::Duration;

const PAGE: u64 = 64 << 10;
/// What is awaited in vain takes this long.
const MOMENT: Duration = Duration::from_millis(300);

/// Both ways, each with two engines of its own: their NICs are of no use afterwards.
fn with(nic: &'static Nic, name: &str, check: fn(&Pair, &mut Control, &Nic, Op)) {
    nic.one.place(name, |control| {
        let mut control = control.expect("the stand-in is there");
        for op in OPS {
            let pair = Pair::new(nic.one);
            pair.pass();
            check(&pair, &mut control, nic, op);
            control.say("clear");
        }
    });
}

tests! {
    EFA;
    an_address_that_was_cut_off_is_not_taken_again
    an_operation_that_cannot_be_stopped_is_told_of_in_time_and_keeps_its_pages
    a_peer_that_cannot_be_cut_off_is_not_called_cut_off
    a_peer_whose_session_dies_and_that_cannot_be_cut_off_is_not_called_cut_off
}

mod roce {
    use super::*;
    tests! {
        ROCE;
        an_operation_that_cannot_be_stopped_is_told_of_in_time_and_keeps_its_pages
        a_peer_that_cannot_be_cut_off_is_not_called_cut_off
        a_peer_whose_session_dies_and_that_cannot_be_cut_off_is_not_called_cut_off
    }
}

/// Nobody is told that the pages of a region are free: own operations hold them, or those of a peer.
fn is_held(region: &Region, by: Code) {
    assert_eq!(code(region.close(MOMENT)), by);
}

fn says_what_to_do(error: &Error) {
    assert!(error.text.contains("may touch memory of this process"), "{error}");
    assert!(error.text.contains("restart the process"), "{error}");
}

mod checks {
    use super::*;

    /// By it a peer that was cut off could come in again.
    pub fn an_address_that_was_cut_off_is_not_taken_again(
        pair: &Pair,
        control: &mut Control,
        nic: &Nic,
        op: Op,
    ) {
        let (there, here) = pair.regions(1, PAGE);
        let grant = pair.grant(op, &whole(&there, PAGE));
        control.say("same device=0 count=1");
        control.say(&format!("fail nth=1 {}", nic.silent));
        // The owner cuts off what has failed.
        pair.run(op, &whole(&here, PAGE), &grant, Verify::Off).unwrap();
        let counts = control.counts();
        assert_eq!((counts["same_left"], counts["same"]), (0, 0), "{counts:?}");
    }

    pub fn an_operation_that_cannot_be_stopped_is_told_of_in_time_and_keeps_its_pages(
        pair: &Pair,
        control: &mut Control,
        nic: &Nic,
        op: Op,
    ) {
        let (there, here) = pair.regions(1, PAGE);
        let grant = pair.grant(op, &whole(&there, PAGE));
        // It does not begin before the delay is taken away.
        control.say("delay micros=100000000");
        let stuck = pair.begin(op, &whole(&here, PAGE), &grant, PATIENCE);
        wait_until("it to be in flight", || control.counts()["in_flight"] == 1);
        control.say("busy count=1");
        let began = watch::start();
        stuck.cancel();
        let error = stuck.wait(Some(PATIENCE)).map(drop).unwrap_err();
        assert_eq!(error.code, Code::PagesQuarantined, "{error}");
        assert!(error.text.contains("was cancelled"), "{error}");
        says_what_to_do(&error);
        // The NIC's patience, which the owner asks for too, and as much again for a busy machine.
        assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
        is_held(&here, Code::RegionBusy);
        // The owner has cut its own path: what goes on leads nowhere.
        grant.revoke(PATIENCE).unwrap();
        blank(&there, 0xEE);
        control.say("clear");
        wait_until("it to end", || control.counts()["in_flight"] == 0);
        assert!(bytes(&there).iter().all(|byte| *byte == 0xEE), "bytes came late into pages that were free");
        there.close(PATIENCE).unwrap();
        // Nobody relies on the NIC any more.
        let up = format!("kvik_nic_up{{nic=\"{}\"}}", nic.names[0]);
        wait_until("the NIC to be out of use", || metric(&pair.other, &up) == 0.0);
        let (there, here) = pair.regions(1, PAGE);
        let grant = pair.grant(op, &whole(&there, PAGE));
        let error =
            pair.begin(op, &whole(&here, PAGE), &grant, PATIENCE).wait(Some(PATIENCE)).map(drop).unwrap_err();
        assert_eq!(error.code, Code::PeerLost, "{error}");
        says_what_to_do(&error);
        here.close(PATIENCE).unwrap();
        rests(pair);
    }

    pub fn a_peer_that_cannot_be_cut_off_is_not_called_cut_off(
        pair: &Pair,
        control: &mut Control,
        nic: &Nic,
        op: Op,
    ) {
        let (there, here) = pair.regions(1, PAGE);
        let grant = pair.grant(op, &whole(&there, PAGE));
        let fails = if op == Op::Write { "late count=1" } else { "fail nth=1" };
        control.say(&format!("{fails} {}", nic.silent));
        control.say("busy count=1000");
        let failed = pair.begin(op, &whole(&here, PAGE), &grant, PATIENCE);
        assert_eq!(code(failed.wait(Some(PATIENCE))), Code::PeerLost);
        assert_eq!(code(grant.revoke(MOMENT)), Code::PagesQuarantined);
        control.say("land");
        assert_eq!(control.counts()["landed"], u64::from(op == Op::Write));
        // So it was right not to call them free.
        assert!(op == Op::Read || bytes(&there) == bytes(&here));
        is_held(&there, Code::PagesQuarantined);
        here.close(PATIENCE).unwrap();
        rests(pair);
    }

    /// No operation has failed, so nobody has asked for its path to be cut before.
    pub fn a_peer_whose_session_dies_and_that_cannot_be_cut_off_is_not_called_cut_off(
        pair: &Pair,
        control: &mut Control,
        nic: &Nic,
        op: Op,
    ) {
        let (there, here) = pair.regions(1, PAGE);
        let grant = pair.grant(op, &whole(&there, PAGE));
        // It does not begin before the delay is taken away.
        control.say("delay micros=100000000");
        let stuck = pair.begin(op, &whole(&here, PAGE), &grant, PATIENCE);
        wait_until("it to be in flight", || control.counts()["in_flight"] == 1);
        control.say("busy count=1000");
        stuck.cancel();
        assert_eq!(code(stuck.wait(Some(PATIENCE))), Code::PagesQuarantined);
        let up = format!("kvik_nic_up{{nic=\"{}\"}}", nic.names[0]);
        wait_until("the owner's NIC to be out of use", || metric(&pair.owner, &up) == 0.0);
        assert_eq!(code(grant.revoke(MOMENT)), Code::PagesQuarantined);
        control.say("clear");
        wait_until("it to end", || control.counts()["in_flight"] == 0);
        // So it was right not to call them free.
        assert!(op == Op::Read || bytes(&there) == bytes(&here));
        is_held(&there, Code::PagesQuarantined);
    }
}
