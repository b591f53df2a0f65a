//! A NIC that makes no connection any more, as one that has as many queue pairs as it can have, and one that has failed
//! for good, or whose thread has. Others have its work, also what it had in flight: its peer cuts that all the same.

use crate::common::*;
use crate::faulty::Faults;
use crate::nics::{self, interrupted, scattered, up};
use crate::pair::{OPS, Op, Pair, metric, options, whole};
use crate::standin::Control;
use kvik_core::Code;

const FULL: &str = "full device=0 count=1000";

#[test]
fn a_nic_that_makes_no_connection_leaves_its_work_to_the_other_one() {
    let name = "a_nic_that_makes_no_connection_leaves_its_work_to_the_other_one";
    let nic = nics::ROCE;
    nic.two.place(&format!("{}::{name}", module_path!()), |control| {
        control.expect("the stand-in is there").say(FULL);
        let pair = Pair::new(nic.two);
        pair.pass();
        let moved = nic.names.map(|name| format!("kvik_nic_bytes_total{{nic=\"{name}\""));
        let moved = moved.map(|name| metric(&pair.other, &name));
        assert!(moved[0] == 0.0 && moved[1] > 0.0, "{moved:?}");
    });
}

#[test]
fn what_a_nic_had_in_flight_that_fails_for_good_goes_by_the_other_one() {
    let name = "what_a_nic_had_in_flight_that_fails_for_good_goes_by_the_other_one";
    let nic = nics::ROCE;
    nic.two.place(&format!("{}::{name}", module_path!()), |control| {
        let mut control = control.expect("the stand-in is there");
        for op in OPS {
            let pair = Pair::new(nic.two);
            pair.pass();
            interrupted(&pair, &mut control, op, &[FULL, "fatal device=0"]).unwrap();
            assert_eq!(up(&pair.other, nic), [0.0, 1.0], "{op:?}");
            control.say("clear");
        }
    });
}

#[test]
fn the_only_nic_ends_transfers_by_its_name_when_it_makes_no_connection() {
    let name = "the_only_nic_ends_transfers_by_its_name_when_it_makes_no_connection";
    let nic = nics::ROCE;
    nic.one.place(&format!("{}::{name}", module_path!()), |control| {
        control.expect("the stand-in is there").say(FULL);
        let pair = Pair::new(nic.one);
        for op in OPS {
            let error = scattered(&pair, op).unwrap_err();
            let words = ["NIC 0 (roce0)", "making a queue pair of device roce0", "Cannot allocate memory"];
            assert!(
                error.code == Code::PeerLost && words.iter().all(|word| error.text.contains(word)),
                "{error}"
            );
        }
    });
}

/// A transfer of twice as much as NICs have in flight at a time, in the middle of which the thread of one panics: it asks
/// for more work. Nothing of it holds either region afterwards.
fn panicked(pair: &Pair, control: &mut Control, op: Op) -> kvik_core::Result<()> {
    const PAGE: u64 = 64 << 10;
    let (there, here) = pair.regions(512, PAGE);
    let grant = pair.grant(op, &whole(&there, PAGE));
    control.say("delay micros=30000");
    let transfer = pair.begin(op, &whole(&here, PAGE), &grant, PATIENCE);
    wait_until("operations to be in flight", || control.counts()["in_flight"] > 0);
    pair.ours.panic_next();
    control.say("clear");
    let ended = transfer.wait(Some(PATIENCE));
    assert!(ended.is_err() || bytes(&there) == bytes(&here), "{op:?}: wrong bytes were let through");
    grant.revoke(PATIENCE).unwrap();
    there.close(PATIENCE).unwrap();
    here.close(PATIENCE).unwrap();
    ended.map(drop)
}

#[test]
fn a_nic_whose_thread_panics_leaves_its_work_to_the_other_one() {
    let name = "a_nic_whose_thread_panics_leaves_its_work_to_the_other_one";
    let nic = nics::EFA;
    nic.two.place(&format!("{}::{name}", module_path!()), |control| {
        let mut control = control.expect("the stand-in is there");
        for (kind, op) in [nic.two, nic.shared].into_iter().flat_map(|kind| OPS.map(|op| (kind, op))) {
            let pair = Pair::new(kind);
            pair.pass();
            panicked(&pair, &mut control, op).unwrap();
            assert_eq!(up(&pair.other, nic).iter().sum::<f64>(), 1.0, "{op:?}");
            pair.pass();
            pair.other.close(PATIENCE).unwrap();
        }
    });
}

#[test]
fn the_only_nic_ends_transfers_by_its_name_when_its_thread_panics() {
    let name = "the_only_nic_ends_transfers_by_its_name_when_its_thread_panics";
    let nic = nics::EFA;
    nic.one.place(&format!("{}::{name}", module_path!()), |control| {
        let mut control = control.expect("the stand-in is there");
        for op in OPS {
            let pair = Pair::new(nic.one);
            pair.pass();
            let in_flight = panicked(&pair, &mut control, op).unwrap_err();
            for error in [in_flight, scattered(&pair, op).unwrap_err()] {
                assert_eq!(error.code, Code::PeerLost, "{op:?}: {error}");
                let words = [nic.names[0], "its thread panicked", "restart the process"];
                assert!(words.iter().all(|word| error.text.contains(word)), "{op:?}: {error}");
            }
            assert_eq!(up(&pair.other, nic), [0.0; 2], "{op:?}");
            pair.other.close(PATIENCE).unwrap();
        }
    });
}

/// Of some kinds of NIC the owner's has a part in what its peers post: who waits for that waits for a NIC that does
/// nothing more.
#[test]
fn what_peers_have_in_flight_to_a_nic_that_is_out_of_use_ends_by_its_reason() {
    let name = "what_peers_have_in_flight_to_a_nic_that_is_out_of_use_ends_by_its_reason";
    let nic = nics::EFA;
    nic.one.place(&format!("{}::{name}", module_path!()), |control| {
        let mut control = control.expect("the stand-in is there");
        for op in OPS {
            let pair = Pair::new(nic.one);
            pair.pass();
            let (there, here) = pair.regions(1, 64 << 10);
            let grant = pair.grant(op, &whole(&there, 64 << 10));
            control.say("stick count=1");
            let transfer = pair.begin(op, &whole(&here, 64 << 10), &grant, PATIENCE);
            wait_until("the operation to be stuck", || control.counts()["stuck"] == 1);
            // The owner's NIC panics over a transfer of its own with somebody else.
            let third = nic.one.engine(&Faults::new(3), None);
            let (far, near) = (nic.one.granted_region(&third, 4096, 1), nic.one.region(&pair.owner, 4096, 2));
            let granted = third.grant(&whole(&far, 4096), options(Op::Read)).unwrap();
            pair.theirs.panic_next();
            let own = pair.owner.read(&whole(&near, 4096), granted.ticket(), None, within(PATIENCE)).unwrap();
            assert_eq!(code(own.wait(Some(PATIENCE))), Code::PeerLost);
            let error = transfer.wait(Some(PATIENCE)).unwrap_err();
            assert!(error.code == Code::PeerLost && error.text.contains("its thread panicked"), "{error}");
            assert_eq!(control.counts()["stuck"], 0, "{op:?}");
        }
    });
}
