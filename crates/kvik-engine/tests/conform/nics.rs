//! What goes wrong in a NIC: a transfer ends well all the same, or with an error that says why, and the next one works.

use crate::common::*;
use crate::faulty::Faults;
use crate::pair::{Kind, OPS, Op, Pair, Standin, metric, options, whole};
use crate::standin::Control;
use kvik_core::Code;
use kvik_engine::{Config, Engine, Grant, Region, Transfer, TransferOptions, Verify};
use std::time::Duration;

/// A kind of NIC, by its stand-in, and what it says.
pub struct Nic {
    pub one: &'static Kind,
    /// Two NICs, each with a thread of its own.
    pub two: &'static Kind,
    /// Both on one thread.
    pub shared: &'static Kind,
    pub names: [&'static str; 2],
    /// Of an operation that the peer's NIC does not answer.
    pub silent: &'static str,
    says_silent: &'static str,
    says_down: [&'static str; 2],
    says_blind: &'static str,
    /// Operations that may fail, one after the other, before a transfer does.
    pub failures: u64,
    /// Nothing on a connection passes what is stuck there.
    in_order: bool,
}

pub const EFA: &Nic = &Nic {
    one: &Kind { standin: Some(Standin { devices: 1, ..Standin::NEW }), ..crate::EFA },
    two: &Kind { standin: Some(Standin { threads: 2, ..Standin::NEW }), ..crate::EFA },
    shared: &Kind { standin: Some(Standin::NEW), ..crate::EFA },
    names: ["rdmap0s0-rdm", "rdmap1s0-rdm"],
    silent: "status=13",
    says_silent: "does not answer",
    says_down: ["device is down", "Network is down"],
    says_blind: "reading completions",
    failures: 3,
    in_order: false,
};

/// Whatever fails on a queue pair ends it, and what is behind it comes back with it.
pub const ROCE: &Nic = &Nic {
    one: &Kind { standin: Some(Standin { devices: 1, ..crate::ROCE }), ..crate::VERBS },
    two: &Kind { standin: Some(Standin { threads: 2, ..crate::ROCE }), ..crate::VERBS },
    shared: &Kind { standin: Some(crate::ROCE), ..crate::VERBS },
    names: ["roce0", "roce1"],
    silent: "status=12",
    says_silent: "did not answer",
    says_down: ["has lost its link", "has lost its link"],
    says_blind: "taking the completions",
    failures: 1,
    in_order: true,
};

const PAGE: u64 = 16 << 10;
const PAGES: u32 = 256;
/// Bytes of a work request of a large transfer.
const CHUNK: u64 = 512 << 10;
/// Work requests that one peer has in flight on a NIC, at most.
const MOST: u64 = 16;

/// Runs with two engines that have moved something already.
fn with(nic: &'static Nic, name: &str, check: fn(&Pair, Control, &Nic)) {
    nic.one.place(name, |control| {
        let pair = Pair::new(nic.one);
        pair.pass();
        check(&pair, control.expect("the stand-in is there"), nic);
        pair.pass();
    });
}

/// Every other page of the one region to or from the same pages of the other, in as much time as a busy machine needs.
pub fn scattered(pair: &Pair, op: Op) -> Result<(), kvik_core::Error> {
    scattered_within(pair, op, PATIENCE)
}

fn scattered_within(pair: &Pair, op: Op, deadline: Duration) -> Result<(), kvik_core::Error> {
    let (there, here) = pair.regions(PAGES, PAGE);
    let ids: Vec<u32> = (0..PAGES).step_by(2).collect();
    let grant = pair.grant(op, &paged(&there, &ids, PAGE));
    let mine = paged(&here, &ids, PAGE);
    let ended = pair.begin(op, &mine, &grant, deadline).wait(Some(PATIENCE));
    if ended.is_ok() {
        let (from, to) = if op == Op::Read { (&there, &here) } else { (&here, &there) };
        check(from, &ids, to, &ids);
    }
    ended.map(drop)
}

/// A small transfer with another owner goes through.
pub fn beside(pair: &Pair, third: &Engine, op: Op) {
    let there = pair.kind.granted_region(third, 8 * PAGE, 1);
    let here = pair.kind.region(&pair.other, 8 * PAGE, 0x5A);
    let grant = third.grant(&whole(&there, PAGE), options(op)).unwrap();
    pair.run(op, &whole(&here, PAGE), &grant, Verify::Off).unwrap();
    assert!(bytes(&there) == bytes(&here), "{op:?}");
}

macro_rules! checks {
    ($(fn $name:ident($pair:ident, $control:ident, $nic:pat) $check:block)*) => {
        mod checks {
            use super::*;
            $(pub fn $name($pair: &Pair, mut $control: Control, $nic: &Nic) $check)*
        }
    };
}

checks! {
    fn a_storm_of_refusals_costs_time_only(pair, control, _) {
        for op in OPS {
            control.say("again count=2000");
            scattered(pair, op).unwrap();
        }
    }
    fn an_operation_that_fails_is_posted_again_on_a_connection_that_is_free_of_it(pair, control, nic) {
        for op in OPS {
            control.say(&format!("fail nth=9 {}", nic.silent));
            scattered(pair, op).unwrap();
        }
    }
    fn operations_that_fail_and_fail_end_their_transfer_with_the_nics_reason(pair, control, nic) {
        for op in OPS {
            control.say(&format!("fail one_in=1 {}", nic.silent));
            let error = scattered(pair, op).unwrap_err();
            assert_eq!(error.code, Code::PeerLost, "{error}");
            assert!(error.text.contains(nic.says_silent), "{error}");
            control.say("clear");
            scattered(pair, op).unwrap();
        }
    }
    fn failures_at_random_let_no_wrong_bytes_through(pair, control, _) {
        control.say("fail one_in=200");
        let ended: Vec<bool> = (0..12).map(|turn| scattered(pair, OPS[turn % 2]).is_ok()).collect();
        println!("{ended:?}");
        assert!(ended.contains(&true), "none of them was mended");
        control.say("clear");
        OPS.into_iter().for_each(|op| scattered(pair, op).unwrap());
    }
    fn a_device_that_goes_down_fails_transfers_and_serves_when_it_is_up(pair, control, nic) {
        for op in OPS {
            control.say("delay micros=3000");
            let (there, here) = pair.regions(64, 64 << 10);
            let grant = pair.grant(op, &whole(&there, 64 << 10));
            let transfer = pair.begin(op, &whole(&here, 64 << 10), &grant, PATIENCE);
            wait_until("operations to be in flight", || control.counts()["in_flight"] > 0);
            control.say("down");
            let error = transfer.wait(Some(PATIENCE)).map(drop).unwrap_err();
            assert!(nic.says_down.iter().any(|says| error.text.contains(says)), "{error}");
            let error = scattered(pair, op).unwrap_err();
            assert!(error.text.contains(nic.says_down[1]), "{error}");
            control.say("clear");
            wait_until("the NICs to be in use", || [&pair.owner, &pair.other].map(|engine| up(engine, nic)[0]) == [1.0; 2]);
            scattered(pair, op).unwrap();
        }
    }
    fn an_operation_that_never_ends_ends_with_its_transfer(pair, control, _) {
        for op in OPS {
            control.say("stick count=1");
            let began = watch::start();
            let error = scattered_within(pair, op, Duration::from_secs(3)).unwrap_err();
            assert_eq!(error.code, Code::DeadlineExceeded, "{error}");
            // The deadline, the patience with what is in flight, and as much again for a busy machine.
            assert!(began.elapsed() < Duration::from_secs(6), "{:?}", began.elapsed());
            // Its endpoint was closed: the device has nothing of it any more.
            assert_eq!(control.counts()["stuck"], 0);
            control.say("clear"); // What was to be stuck, and came too late.
            pair.regions(4, PAGE).0.close(PATIENCE).unwrap();
            scattered(pair, op).unwrap();
        }
    }
    fn an_operation_that_outlives_its_transfer_is_stopped_long_before_its_session_would_be(pair, control, _) {
        for op in OPS {
            let tries = [(); 3].map(|()| {
                control.say("stick count=1");
                let (there, here) = pair.regions(1, PAGE);
                let grant = pair.grant(op, &whole(&there, PAGE));
                let stuck = pair.begin(op, &whole(&here, PAGE), &grant, PATIENCE);
                wait_until("it to be stuck", || control.counts()["stuck"] == 1);
                let began = watch::start();
                stuck.cancel();
                assert_eq!(code(stuck.wait(Some(PATIENCE))), Code::Cancelled);
                began.elapsed()
            });
            // A session waits for its peer's word on a transfer that was told to stop for a quarter of a silent peer's
            // time. The quickest of several counts, since the machine may be busy.
            let bound = kvik_proto::Timing::default().dead_after / 4;
            assert!(tries.iter().any(|took| *took < bound), "{op:?}: {tries:?}");
        }
    }
    fn an_operation_that_never_ends_beside_one_that_failed_costs_its_transfer_time_only(pair, control, _) {
        for op in OPS {
            control.say("stick count=1");
            control.say("fail nth=9 status=13");
            scattered(pair, op).unwrap();
            assert_eq!(control.counts()["stuck"], 0);
        }
    }
    fn a_stuck_operation_costs_other_transfers_nothing(pair, control, _) {
        let (there, here) = pair.regions(64, PAGE);
        let grant = pair.grant(Op::Read, &whole(&there, PAGE));
        let stuck = in_time(Duration::from_secs(1), |deadline| {
            control.say("clear");
            control.say("stick count=1");
            let stuck = pair.begin(Op::Read, &whole(&here, PAGE), &grant, deadline);
            wait_until("it to be stuck", || control.counts()["stuck"] == 1 || stuck.is_done());
            (!stuck.is_done()).then_some(stuck)
        });
        // Before its deadline, while it is stopped, and after its end.
        std::thread::scope(|scope| {
            let ended = scope.spawn(|| code(stuck.wait(Some(PATIENCE))));
            let mut turns = 0;
            while !ended.is_finished() || turns < 40 {
                scattered(pair, OPS[turns % 2]).unwrap();
                turns += 1;
            }
            assert_eq!(ended.join().unwrap(), Code::DeadlineExceeded);
        });
        let (there, here) = pair.regions(64, PAGE);
        let grant = pair.grant(Op::Write, &whole(&there, PAGE));
        pair.run(Op::Write, &whole(&here, PAGE), &grant, Verify::Off).unwrap();
    }
    fn a_peer_that_keeps_the_nic_busy_takes_turns_with_others(pair, control, nic) {
        let third = pair.kind.engine(&Faults::new(3), None);
        for op in OPS {
            beside(pair, &third, op);
            // A quarter of a second a chunk.
            control.say("delay micros=4000");
            let (there, here) = pair.regions(160, CHUNK);
            let grant = pair.grant(op, &whole(&there, CHUNK));
            let way = if op == Op::Read { "in" } else { "out" };
            let name = format!("kvik_nic_bytes_total{{nic=\"{}\",direction=\"{way}\"}}", nic.names[0]);
            let before = metric(&pair.other, &name);
            let busy = pair.begin(op, &whole(&here, CHUNK), &grant, PATIENCE);
            wait_until("it to move", || metric(&pair.other, &name) > before);
            beside(pair, &third, op);
            let moved = metric(&pair.other, &name) - before;
            control.say("clear");
            busy.wait(Some(PATIENCE)).unwrap();
            // Sessions that go one after the other leave nothing but what is in flight.
            assert!(moved < (there.bytes() / 2) as f64, "{op:?}: {moved} bytes were moved first");
            assert!(bytes(&there) == bytes(&here), "{op:?}");
        }
    }
    fn a_peer_that_is_stuck_leaves_room_for_others(pair, control, nic) {
        let third = pair.kind.engine(&Faults::new(3), None);
        for op in OPS {
            // Of the chunks that one peer may have in flight, all or the first.
            let stuck = if nic.in_order { 1 } else { MOST };
            control.say(&format!("stick count={stuck}"));
            let (there, here) = pair.regions(64, CHUNK);
            let grant = pair.grant(op, &whole(&there, CHUNK));
            let transfer = pair.begin(op, &whole(&here, CHUNK), &grant, PATIENCE);
            wait_until("all of them to be in flight", || {
                let counts = control.counts();
                (counts["stuck"], counts["in_flight"]) == (stuck, MOST)
            });
            (0..3).for_each(|_| beside(pair, &third, op));
            assert!(!transfer.is_done());
            assert_eq!(control.counts()["stuck"], stuck, "{op:?}");
            transfer.cancel();
            assert_eq!(code(transfer.wait(Some(PATIENCE))), Code::Cancelled);
        }
    }
    fn a_post_that_is_refused_ends_its_queue_pair_and_is_posted_again(pair, control, _) {
        for op in OPS {
            control.say("again count=1");
            scattered(pair, op).unwrap();
        }
    }
    fn a_completion_that_never_comes_ends_with_its_transfer(pair, control, _) {
        for op in OPS {
            control.say("lose count=1000");
            let error = scattered_within(pair, op, Duration::from_secs(2)).unwrap_err();
            assert_eq!(error.code, Code::DeadlineExceeded, "{error}");
            control.say("clear");
            scattered(pair, op).unwrap();
        }
    }
}

tests! {
    EFA;
    a_storm_of_refusals_costs_time_only
    an_operation_that_fails_is_posted_again_on_a_connection_that_is_free_of_it
    operations_that_fail_and_fail_end_their_transfer_with_the_nics_reason
    failures_at_random_let_no_wrong_bytes_through
    a_device_that_goes_down_fails_transfers_and_serves_when_it_is_up
    an_operation_that_never_ends_ends_with_its_transfer
    an_operation_that_outlives_its_transfer_is_stopped_long_before_its_session_would_be
    an_operation_that_never_ends_beside_one_that_failed_costs_its_transfer_time_only
    a_stuck_operation_costs_other_transfers_nothing
    a_peer_that_keeps_the_nic_busy_takes_turns_with_others
    a_peer_that_is_stuck_leaves_room_for_others
}

/// The same over verbs. Nothing passes what is stuck on its queue pair, so that is for its own transfer to end.
mod roce {
    use super::*;
    tests! {
        ROCE;
        an_operation_that_fails_is_posted_again_on_a_connection_that_is_free_of_it
        operations_that_fail_and_fail_end_their_transfer_with_the_nics_reason
        failures_at_random_let_no_wrong_bytes_through
        a_device_that_goes_down_fails_transfers_and_serves_when_it_is_up
        an_operation_that_never_ends_ends_with_its_transfer
        an_operation_that_outlives_its_transfer_is_stopped_long_before_its_session_would_be
        a_post_that_is_refused_ends_its_queue_pair_and_is_posted_again
        a_completion_that_never_comes_ends_with_its_transfer
        a_peer_that_keeps_the_nic_busy_takes_turns_with_others
        a_peer_that_is_stuck_leaves_room_for_others
    }

    #[test]
    fn a_nic_whose_completions_cannot_be_read_leaves_its_work_to_the_other_one() {
        let name = "a_nic_whose_completions_cannot_be_read_leaves_its_work_to_the_other_one";
        blind_beside_another(ROCE, &format!("{}::{name}", module_path!()));
    }

    #[test]
    fn a_device_that_has_failed_for_good_does_not_serve_again_when_its_link_does() {
        let name = "a_device_that_has_failed_for_good_does_not_serve_again_when_its_link_does";
        ROCE.one.place(&format!("{}::{name}", module_path!()), |control| {
            let (pair, mut control) = (Pair::new(ROCE.one), control.expect("the stand-in is there"));
            pair.pass();
            ["fatal", "down", "up"].into_iter().for_each(|event| drop(control.say(event)));
            // The NIC has heard of all that when the first of these ends.
            for op in OPS {
                let began = watch::start();
                assert_eq!(code(scattered(&pair, op)), Code::PeerLost);
                assert!(began.elapsed() < Duration::from_secs(2), "{op:?}: {:?}", began.elapsed());
            }
            assert_eq!([&pair.owner, &pair.other].map(|engine| super::up(engine, ROCE)[0]), [0.0; 2]);
        });
    }

    #[test]
    fn the_only_nic_ends_transfers_by_its_name_when_its_completions_cannot_be_read() {
        let name = "the_only_nic_ends_transfers_by_its_name_when_its_completions_cannot_be_read";
        blind_alone(ROCE, &format!("{}::{name}", module_path!()));
    }
}

/// The same where the pages go through rings.
pub mod staged {
    use super::*;
    pub const ROCE: &Nic = &Nic {
        one: &Kind { standin: Some(Standin { devices: 1, ..crate::ROCE }), ..crate::STAGED_VERBS },
        ..*super::ROCE
    };
    pub const EFA: &Nic = &Nic {
        one: &Kind { standin: Some(Standin { devices: 1, ..Standin::NEW }), ..crate::STAGED_EFA },
        // Slots are filled one after the other, so the next one may be posted alone, when the connection has mended: a
        // second failure in a row, before anything has passed, is that of the peer's only NIC.
        failures: 1,
        ..*super::EFA
    };
    mod efa {
        use super::*;
        tests! {
            EFA;
            an_operation_that_fails_is_posted_again_on_a_connection_that_is_free_of_it
            failures_at_random_let_no_wrong_bytes_through
            an_operation_that_never_ends_ends_with_its_transfer
            an_operation_that_never_ends_beside_one_that_failed_costs_its_transfer_time_only
            a_stuck_operation_costs_other_transfers_nothing
        }
    }
    mod roce {
        use super::*;
        tests! {
            ROCE;
            failures_at_random_let_no_wrong_bytes_through
            a_device_that_goes_down_fails_transfers_and_serves_when_it_is_up
            a_completion_that_never_comes_ends_with_its_transfer
        }
    }
}

/// The NICs of an engine that it can use, by its metrics.
pub fn up(engine: &Engine, nic: &Nic) -> [f64; 2] {
    nic.names.map(|name| metric(engine, &format!("kvik_nic_up{{nic=\"{name}\"}}")))
}

/// Of a NIC whose completions cannot be read.
const BLIND: &str = "blind device=0";

/// Begins a transfer, and has these faults befall the first device when operations of each NIC are in flight.
pub fn interrupted(pair: &Pair, control: &mut Control, op: Op, faults: &[&str]) -> kvik_core::Result<()> {
    let nics = u64::from(pair.kind.standin.map_or(0, |standin| standin.devices));
    // One NIC takes no more of them at once, so that the other one has some.
    let enough = (nics - 1) * MOST + 1;
    let (there, here) = pair.regions(((nics + 1) * MOST * CHUNK / 2 / (64 << 10)) as u32, 64 << 10);
    let grant = pair.grant(op, &whole(&there, 64 << 10));
    // Of each piece of 16 KiB: they are long in flight, and go on at once when it is taken away.
    control.say("delay micros=30000");
    let transfer = pair.begin(op, &whole(&here, 64 << 10), &grant, PATIENCE);
    wait_until("operations to be in flight", || control.counts()["in_flight"] >= enough);
    for fault in faults.iter().chain(&["delay micros=0"]) {
        control.say(fault);
    }
    let ended = transfer.wait(Some(PATIENCE));
    assert!(ended.is_err() || bytes(&there) == bytes(&here), "{op:?}: wrong bytes were let through");
    // Neither region is held by what is not heard of.
    grant.revoke(PATIENCE).unwrap();
    there.close(PATIENCE).unwrap();
    here.close(PATIENCE).unwrap();
    ended.map(drop)
}

#[test]
fn a_nic_whose_completions_cannot_be_read_leaves_its_work_to_the_other_one() {
    let name = "a_nic_whose_completions_cannot_be_read_leaves_its_work_to_the_other_one";
    blind_beside_another(EFA, &format!("{}::{name}", module_path!()));
}

fn blind_beside_another(nic: &'static Nic, name: &str) {
    nic.two.place(name, |control| {
        let mut control = control.expect("the stand-in is there");
        for (kind, op) in [nic.two, nic.shared].into_iter().flat_map(|kind| OPS.map(|op| (kind, op))) {
            let pair = Pair::new(kind);
            pair.pass();
            assert_eq!(up(&pair.other, nic), [1.0, 1.0]);
            interrupted(&pair, &mut control, op, &[BLIND]).unwrap();
            assert_eq!(up(&pair.other, nic), [0.0, 1.0], "{op:?}");
            // What comes later goes the same way, also when the queue could be read again: what was lost of it
            // stays lost.
            control.say("clear");
            pair.pass();
            assert_eq!(up(&pair.other, nic), [0.0, 1.0], "{op:?}");
        }
    });
}

/// What a NIC has that nobody reads any more does not wake the thread for ever that it shares.
#[test]
fn a_nic_whose_completions_cannot_be_read_lets_the_thread_sleep_that_it_shares() {
    let name = "a_nic_whose_completions_cannot_be_read_lets_the_thread_sleep_that_it_shares";
    ROCE.shared.place(&format!("{}::{name}", module_path!()), |control| {
        let pair = Pair::new(ROCE.shared);
        pair.pass();
        let mut control = control.expect("the stand-in is there");
        interrupted(&pair, &mut control, Op::Read, &[BLIND]).unwrap();
        // An event of the device, which nobody takes.
        control.say("down device=0");
        pair.pass();
        crate::crowds::rests(&pair);
    });
}

/// None of them is always the first to claim.
#[test]
fn nics_of_one_thread_share_transfers_that_each_could_move_alone() {
    let name = "nics_of_one_thread_share_transfers_that_each_could_move_alone";
    EFA.shared.place(&format!("{}::{name}", module_path!()), |_| {
        let pair = Pair::new(EFA.shared);
        let (there, here) = pair.regions(1, PAGE);
        let grant = pair.grant(Op::Read, &whole(&there, PAGE));
        for _ in 0..32 {
            pair.run(Op::Read, &whole(&here, PAGE), &grant, Verify::Off).unwrap();
        }
        let moved =
            EFA.names.map(|name| metric(&pair.other, &format!("kvik_nic_bytes_total{{nic=\"{name}\"")));
        assert!(
            moved.iter().all(|bytes| *bytes >= 8.0 * PAGE as f64)
                && moved.iter().sum::<f64>() == 32.0 * PAGE as f64,
            "{moved:?}"
        );
    });
}

#[test]
fn the_only_nic_ends_transfers_by_its_name_when_its_completions_cannot_be_read() {
    let name = "the_only_nic_ends_transfers_by_its_name_when_its_completions_cannot_be_read";
    blind_alone(EFA, &format!("{}::{name}", module_path!()));
}

fn blind_alone(nic: &'static Nic, name: &str) {
    nic.one.place(name, |control| {
        let mut control = control.expect("the stand-in is there");
        for op in OPS {
            let pair = Pair::new(nic.one);
            pair.pass();
            let in_flight = interrupted(&pair, &mut control, op, &[BLIND]).unwrap_err();
            let later = scattered(&pair, op).unwrap_err();
            for error in [in_flight, later] {
                assert_eq!(error.code, Code::PeerLost, "{op:?}: {error}");
                let said = [nic.names[0], nic.says_blind].map(|text| error.text.contains(text));
                assert_eq!(said, [true, true], "{op:?}: {error}");
            }
            assert_eq!(up(&pair.other, nic), [0.0, 0.0], "{op:?}");
            control.say("clear");
        }
    });
}

/// Nothing waits for a NIC's thread without end.
#[test]
fn a_nic_that_does_not_answer_is_named_and_takes_the_memory_in_no_more() {
    let name = "a_nic_that_does_not_answer_is_named_and_takes_the_memory_in_no_more";
    EFA.one.place(&format!("{}::{name}", module_path!()), |control| {
        let mut control = control.expect("the stand-in is there");
        let mut pair = Pair::new(EFA.one);
        pair.other =
            EFA.one.engine_with(&pair.ours, Config { deadline: Duration::from_secs(1), ..Config::default() });
        pair.pass();
        let (there, here) = pair.regions(4, PAGE);
        let spare = pair.other.allocate(PAGE).unwrap();
        let grant = pair.grant(Op::Read, &whole(&there, PAGE));
        let known = control.counts()["regions"];
        // Its thread is in the middle of something, and does not come back from it.
        pair.ours.hold_from(pair.ours.given());
        let transfer = pair.begin(Op::Read, &whole(&here, PAGE), &grant, PATIENCE);
        assert!(pair.ours.wait_held(1, PATIENCE));
        let began = watch::start();
        let error = pair.other.allocate(PAGE).map(drop).unwrap_err();
        assert_eq!(error.code, Code::DeadlineExceeded, "{error}");
        assert!(error.text.contains(EFA.names[0]) && error.text.contains("1s"), "{error}");
        // Its deadline, and the second in which the NIC may say that it has let go of it.
        assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
        let began = watch::start();
        let error = spare.close(Duration::from_secs(1)).unwrap_err();
        assert!(error.code == Code::RegionBusy && error.text.contains("a NIC"), "{error}");
        // Another NIC may have let go of it already: what is open is known to all of them.
        assert!(spare.is_closed());
        assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
        pair.ours.release();
        transfer.wait(Some(PATIENCE)).unwrap();
        // It learns of the memory that came too late, and that nobody wants either any more.
        wait_until("the NIC to forget both", || control.counts()["regions"] == known - 1);
        spare.close(PATIENCE).unwrap();
        // And an engine whose NIC does not come back closes in its time.
        pair.ours.hold_from(pair.ours.given());
        let transfer = pair.begin(Op::Read, &whole(&here, PAGE), &grant, PATIENCE);
        assert!(pair.ours.wait_held(1, PATIENCE));
        let began = watch::start();
        assert_eq!(code(pair.other.close(Duration::from_secs(1))), Code::PagesQuarantined);
        assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
        pair.ours.release();
        assert_eq!(code(transfer.wait(Some(PATIENCE))), Code::EngineClosed);
    });
}

/// When an engine has closed, its NICs are gone with all that they knew: no region waits for their word.
#[test]
fn regions_of_an_engine_that_has_closed_wait_for_no_nic() {
    let name = "regions_of_an_engine_that_has_closed_wait_for_no_nic";
    EFA.one.place(&format!("{}::{name}", module_path!()), |_| {
        let pair = Pair::new(EFA.one);
        pair.pass();
        let regions: Vec<_> = (0..8).map(|_| pair.other.allocate(PAGE).unwrap()).collect();
        pair.other.close(PATIENCE).unwrap();
        let began = watch::start();
        regions.iter().for_each(|region| region.close(PATIENCE).unwrap());
        // A second for each of them it was, in which a NIC may say that it has let go.
        assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
    });
}

/// Reads into a region each, which they alone still hold.
fn orphans(pair: &Pair, grant: &Grant, regions: Vec<Region>) -> Vec<Transfer> {
    let options =
        TransferOptions { verify: Some(Verify::Off), deadline: Some(PATIENCE), ..Default::default() };
    let begin = |here: &Region| pair.begin_with(Op::Read, &whole(here, PAGE), grant, options.clone());
    regions.iter().map(begin).collect()
}

/// A NIC's thread ends transfers, and so may be the last to let go of their regions: it cannot wait for its own word.
#[test]
fn regions_that_go_with_their_transfers_wait_for_no_nic() {
    let name = "regions_that_go_with_their_transfers_wait_for_no_nic";
    EFA.one.place(&format!("{}::{name}", module_path!()), |control| {
        let (pair, mut control) = (Pair::new(EFA.one), control.expect("the stand-in is there"));
        pair.pass();
        let there = EFA.one.granted_region(&pair.owner, PAGE, 1);
        let grant = pair.grant(Op::Read, &whole(&there, PAGE));
        let regions = || (0..8).map(|_| pair.other.allocate(PAGE).unwrap()).collect();
        let known = control.counts()["regions"];
        let here = regions();
        pair.ours.hold_from(pair.ours.given());
        let transfers = orphans(&pair, &grant, here);
        assert!(pair.ours.wait_held(1, PATIENCE));
        let began = watch::start();
        pair.ours.release();
        transfers.iter().for_each(|transfer| drop(transfer.wait(Some(PATIENCE)).unwrap()));
        // A second for each of them it was.
        assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
        wait_until("the NIC to forget the regions", || control.counts()["regions"] == known);
        // The same where the end of the engine ends them.
        control.say("stick count=1000");
        let transfers = orphans(&pair, &grant, regions());
        wait_until("them to be stuck", || control.counts()["stuck"] == 8);
        let began = watch::start();
        pair.other.close(PATIENCE).unwrap();
        assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
        transfers.iter().for_each(|one| assert_eq!(code(one.wait(Some(PATIENCE))), Code::EngineClosed));
    });
}
