//! Bytes that are on the wire when their write is told of as failed: who posted them cannot stop them any more,
//! and the owner's pages are its own again only when they cannot land.
//!
//! The stand-in keeps such bytes until a test says that they land. Reads have none: an operation that has
//! ended writes nothing into the memory of who posted it.

use crate::common::*;
use crate::nics::{EFA, Nic, ROCE};
use crate::pair::{Op, Pair, options, whole};
use crate::standin::Control;
use kvik_core::Code;
use kvik_engine::{Grant, Region, Transfer, Verify};
use std::time::Duration;

const PAGE: u64 = 64 << 10;

macro_rules! late {
    ($(fn $name:ident($pair:ident, $control:ident, $nic:ident) over $kind:ident $check:block)*) => {
        mod checks {
            use super::*;
            $(pub fn $name($nic: &'static Nic, name: &str) {
                let check = |$pair: &Pair, mut $control: Control| $check;
                $nic.$kind.place(name, |control| {
                    let pair = Pair::new($nic.$kind);
                    pair.pass();
                    check(&pair, control.expect("the stand-in is there"));
                    pair.pass();
                });
            })*
        }
        $(#[test]
        fn $name() {
            checks::$name(EFA, concat!(module_path!(), "::", stringify!($name)));
        })*
        mod roce {
            use super::*;
            $(#[test]
            fn $name() {
                checks::$name(ROCE, concat!(module_path!(), "::", stringify!($name)));
            })*
        }
    };
}

/// The grant ends, and the pages are the owner's; then whatever can land does.
fn nothing_lands_after_the_end(control: &mut Control, there: &Region, grant: &Grant) {
    grant.revoke(PATIENCE).unwrap();
    blank(there, 0xEE);
    control.say("land");
    assert!(bytes(there).iter().all(|byte| *byte == 0xEE), "bytes came late into pages of another grant");
    assert_eq!(control.counts()["landed"], 0);
}

/// The owner's NIC is in the middle of a transfer, and cuts nothing until it is released. What the transfer is of is
/// to be kept as long.
fn owner_is_busy(pair: &Pair) -> (Transfer, impl Sized) {
    let (mine, theirs) = pair.regions(1, PAGE);
    let other = pair.other.grant(&whole(&theirs, PAGE), options(Op::Read)).unwrap();
    pair.theirs.hold_from(pair.theirs.given());
    let busy = pair.owner.read(&whole(&mine, PAGE), other.ticket(), None, within(PATIENCE)).unwrap();
    assert!(pair.theirs.wait_held(1, PATIENCE), "the owner's NIC is not busy");
    (busy, (mine, theirs, other))
}

late! {
    fn what_was_posted_again_is_not_written_over(pair, control, nic) over one {
        let (there, here) = pair.regions(64, PAGE);
        let grant = pair.grant(Op::Write, &whole(&there, PAGE));
        control.say(&format!("late count={} {}", nic.failures, nic.silent));
        pair.run(Op::Write, &whole(&here, PAGE), &grant, Verify::Off).unwrap();
        assert!(bytes(&there) == bytes(&here));
        assert!(control.counts()["failed"] >= nic.failures);
        nothing_lands_after_the_end(&mut control, &there, &grant);
    }
    fn what_another_nic_has_moved_is_not_written_over(pair, control, nic) over two {
        let (there, here) = pair.regions(128, PAGE);
        let grant = pair.grant(Op::Write, &whole(&there, PAGE));
        control.say(&format!("late device=0 count=1000000 {}", nic.silent));
        // Each of the two NICs has a part in flight before either goes on.
        pair.ours.hold_from(pair.ours.given());
        let transfer = pair.begin(Op::Write, &whole(&here, PAGE), &grant, PATIENCE);
        assert!(pair.ours.wait_held(2, PATIENCE), "only one NIC takes part");
        pair.ours.release();
        transfer.wait(Some(PATIENCE)).unwrap();
        assert!(bytes(&there) == bytes(&here));
        assert!(control.counts()["failed"] > 0);
        nothing_lands_after_the_end(&mut control, &there, &grant);
        control.say("clear");
    }
    fn a_cancelled_write_that_failed_ends_when_the_owner_has_cut_it_off(pair, control, nic) over one {
        let (there, here) = pair.regions(1, PAGE);
        let grant = pair.grant(Op::Write, &whole(&there, PAGE));
        let (busy, _kept) = owner_is_busy(pair);
        // Its write begins long after the transfer was cancelled: at once when the delay is taken away.
        control.say("delay micros=100000000");
        control.say(&format!("late count=1 {}", nic.silent));
        let transfer = pair.begin(Op::Write, &whole(&here, PAGE), &grant, PATIENCE);
        wait_until("the write to be in flight", || control.counts()["in_flight"] == 1);
        transfer.cancel();
        control.say("clear");
        assert_eq!(code(transfer.wait(Some(PATIENCE))), Code::Cancelled);
        assert_eq!(code(grant.revoke(Duration::from_millis(80))), Code::PagesQuarantined);
        pair.theirs.release();
        nothing_lands_after_the_end(&mut control, &there, &grant);
        assert_eq!(code(busy.wait(Some(PATIENCE))), Code::PeerLost);
    }
    fn a_cancelled_read_lands_nothing_once_its_end_is_told(pair, control, nic) over one {
        let (there, here) = pair.regions(1, PAGE);
        let grant = pair.grant(Op::Read, &whole(&there, PAGE));
        let (busy, _kept) = owner_is_busy(pair);
        control.say("delay micros=100000000");
        let transfer = pair.begin(Op::Read, &whole(&here, PAGE), &grant, PATIENCE);
        wait_until("the read to be in flight", || control.counts()["in_flight"] == 1);
        transfer.cancel();
        assert_eq!(code(transfer.wait(Some(PATIENCE))), Code::Cancelled);
        blank(&here, 0xEE);
        // What is still in flight goes on, to its end.
        control.say("clear");
        wait_until("nothing to be in flight", || control.counts()["in_flight"] == 0);
        assert!(bytes(&here).iter().all(|byte| *byte == 0xEE), "bytes came late into pages whose transfer was over");
        pair.theirs.release();
        assert_eq!(code(busy.wait(Some(PATIENCE))), Code::PeerLost);
    }
}

/// Nor is what was posted from a ring.
mod staged {
    use super::checks;
    use crate::nics::staged::{EFA, ROCE};
    #[test]
    fn what_was_posted_again_is_not_written_over() {
        let name = concat!(module_path!(), "::what_was_posted_again_is_not_written_over");
        checks::what_was_posted_again_is_not_written_over(EFA, name);
    }
    #[test]
    fn what_was_posted_again_is_not_written_over_on_roce() {
        let name = concat!(module_path!(), "::what_was_posted_again_is_not_written_over_on_roce");
        checks::what_was_posted_again_is_not_written_over(ROCE, name);
    }
}
