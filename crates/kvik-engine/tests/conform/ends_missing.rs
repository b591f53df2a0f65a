//! A NIC that makes no connection any more, as one that has as many queue pairs as it can have, and one that has failed
//! for good. Others have its work, also what it had in flight: its peer cuts that all the same.

use crate::nics::{self, interrupted, scattered, up};
use crate::pair::{OPS, Pair, metric};
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
