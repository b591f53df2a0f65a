//! What a NIC's connections have to do with each other: those of one peer, and those of several.

use crate::common::*;
use crate::faulty::Faults;
use crate::nics::{EFA, beside, scattered};
use crate::pair::{Kind, OPS, Op, Pair, Standin, options, whole};
use kvik_core::Code;
use kvik_engine::{Engine, Region, Transfer};

const PAGE: u64 = 16 << 10;
const THREE: &Kind = &Kind { standin: Some(Standin { devices: 3, ..Standin::NEW }), ..crate::EFA };

/// Its engine answers for a NIC that moves nothing.
#[test]
fn a_nic_of_the_peer_that_answers_in_vain_is_passed_over_for_its_next_one() {
    const HERE: &Kind = &Kind { nics: "efa:rdmap0s0-rdm", ..*THREE };
    const THERE: &Kind = &Kind { nics: "efa:rdmap1s0-rdm,rdmap2s0-rdm", ..*THREE };
    let name = "a_nic_of_the_peer_that_answers_in_vain_is_passed_over_for_its_next_one";
    THREE.place(&format!("{}::{name}", module_path!()), |control| {
        let mut control = control.expect("the stand-in is there");
        for op in OPS {
            let mut pair = Pair::new(HERE);
            pair.owner = THERE.engine(&pair.theirs, None);
            // The first one, from the beginning; and then the one that was taken in its place.
            control.say("down device=1");
            scattered(&pair, op).unwrap();
            control.say("clear");
            control.say("down device=2");
            scattered(&pair, op).unwrap();
            control.say("clear");
        }
    });
}

/// What is stopped for one peer takes along what is in flight to all: that says nothing of theirs.
#[test]
fn stopping_what_is_stuck_for_others_costs_a_transfer_time_only() {
    let name = "stopping_what_is_stuck_for_others_costs_a_transfer_time_only";
    EFA.one.place(&format!("{}::{name}", module_path!()), |control| {
        let (pair, mut control) = (Pair::new(EFA.one), control.expect("the stand-in is there"));
        let others = [3, 4].map(|seed| EFA.one.engine(&Faults::new(seed), None));
        for op in OPS {
            pair.pass();
            others.iter().for_each(|other| beside(&pair, other, op));
            control.say("stick count=1000");
            let (there, here) = pair.regions(1, PAGE);
            let grant = pair.grant(op, &whole(&there, PAGE));
            let transfer = pair.begin(op, &whole(&here, PAGE), &grant, PATIENCE);
            for (number, other) in others.iter().enumerate() {
                let (stuck, _granted) = begin(&pair, other, op);
                wait_until("both to be stuck", || control.counts()["stuck"] == 2 || transfer.is_done());
                if number == 1 {
                    // What is posted from now on ends.
                    control.say("clear");
                }
                stuck.cancel();
                assert_eq!(code(stuck.wait(Some(PATIENCE))), Code::Cancelled);
            }
            transfer.wait(Some(PATIENCE)).unwrap();
            assert!(bytes(&there) == bytes(&here), "{op:?}");
        }
    });
}

/// A transfer of a page with this owner, and the region that is granted for it.
fn begin(pair: &Pair, owner: &Engine, op: Op) -> (Transfer, Region) {
    let there = pair.kind.granted_region(owner, PAGE, 1);
    let here = pair.kind.region(&pair.other, PAGE, 0x5A);
    let grant = owner.grant(&whole(&there, PAGE), options(op)).unwrap();
    (pair.begin(op, &whole(&here, PAGE), &grant, PATIENCE), there)
}
