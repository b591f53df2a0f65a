//! The owner's NIC moves: it has cut off others, whose sessions are over.

use crate::host::{Kind, PATIENCE, Pair, bytes, memory, view};
use crate::standin::{Control, Standin};
use crate::{OPS, PAGE, SIZE};
use kvik_transport::Transport;
use std::time::Instant;

/// Waits until an operation is stuck, and so many have failed before.
fn stuck(control: &mut Control, failed: u64) {
    let until = Instant::now() + PATIENCE;
    loop {
        let counts = control.counts();
        if (counts["stuck"], counts["failed"]) == (1, failed) {
            return;
        }
        assert!(Instant::now() < until, "no operation is stuck: {counts:?}");
    }
}

#[test]
fn a_transfer_outlives_any_number_of_moves_of_its_owners_nic() {
    let name = "moves::a_transfer_outlives_any_number_of_moves_of_its_owners_nic";
    let devices = [("KVIK_STANDIN_DEVICES", "1"), ("KVIK_STANDIN_LOOPBACK", "device")];
    Standin::Fabric.alone(name, &devices, |mut control| {
        for (op, right) in OPS {
            let pair = Pair::new(Kind::Efa);
            let (there, here) = (memory(SIZE, 1), memory(SIZE, 2));
            let (theirs, ours) = (pair.owner.register(1, &there), pair.other.register(1, &here));
            let view = [&there, &here].map(|memory| view(memory, PAGE, &[0]));
            let (grant, _slot) = pair.owner.grant(right, (theirs, &there), &view[0]);
            let failed = control.counts()["failed"];
            control.say("stick count=4");
            let (key, _fence) = pair.other.begin(op, grant, (ours, &here), &view[1]);
            for other in 0..4 {
                stuck(&mut control, failed + other);
                pair.owner.rma.get().unwrap().fence(1000 + other);
            }
            pair.other.finished(key).outcome.unwrap();
            assert!(bytes(&there)[..PAGE as usize] == bytes(&here)[..PAGE as usize], "{op:?}");
        }
    });
}
