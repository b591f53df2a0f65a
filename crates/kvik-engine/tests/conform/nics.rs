//! What goes wrong in a NIC: a transfer ends well all the same, or with an error that says why, and the next one works.

use crate::common::*;
use crate::pair::{Kind, OPS, Op, Pair, Standin, whole};
use crate::standin::Control;
use kvik_core::Code;
use kvik_engine::Verify;
use std::time::{Duration, Instant};

const KIND: &Kind = &Kind { standin: Some(Standin { devices: 1, ..Standin::NEW }), ..crate::EFA };
const PAGE: u64 = 16 << 10;
const PAGES: u32 = 256;

/// Runs with two engines that have moved something already.
fn with(name: &str, check: fn(&Pair, Control)) {
    KIND.place(name, |control| {
        let pair = Pair::new(KIND);
        pair.pass();
        check(&pair, control.expect("the stand-in is there"));
        pair.pass();
    });
}

/// Every other page of the one region to or from the same pages of the other.
fn scattered(pair: &Pair, op: Op) -> Result<(), kvik_core::Error> {
    let (there, here) = pair.regions(PAGES, PAGE);
    let ids: Vec<u32> = (0..PAGES).step_by(2).collect();
    let grant = pair.grant(op, &paged(&there, &ids, PAGE));
    let mine = paged(&here, &ids, PAGE);
    let ended = pair.begin(op, &mine, &grant, Duration::from_secs(3)).wait(Some(PATIENCE));
    if ended.is_ok() {
        let (from, to) = if op == Op::Read { (&there, &here) } else { (&here, &there) };
        check(from, &ids, to, &ids);
    }
    ended.map(drop)
}

macro_rules! nics {
    ($($name:ident: $check:expr;)*) => {
        $(#[test]
        fn $name() {
            with(concat!(module_path!(), "::", stringify!($name)), $check);
        })*
    };
}

nics! {
    a_storm_of_refusals_costs_time_only: |pair, mut control| {
        for op in OPS {
            control.say("again count=2000");
            scattered(pair, op).unwrap();
        }
    };
    an_operation_that_fails_is_posted_again_on_a_way_that_is_free_of_it: |pair, mut control| {
        for op in OPS {
            control.say("fail nth=9 status=13");
            scattered(pair, op).unwrap();
        }
    };
    operations_that_fail_and_fail_end_their_transfer_with_the_nics_reason: |pair, mut control| {
        for op in OPS {
            control.say("fail one_in=1 status=13");
            let error = scattered(pair, op).unwrap_err();
            assert_eq!(error.code, Code::PeerLost, "{error}");
            assert!(error.text.contains("does not answer"), "{error}");
            control.say("clear");
            scattered(pair, op).unwrap();
        }
    };
    failures_at_random_let_no_wrong_bytes_through: |pair, mut control| {
        control.say("fail one_in=200");
        let ended: Vec<bool> = (0..12).map(|turn| scattered(pair, OPS[turn % 2]).is_ok()).collect();
        println!("{ended:?}");
        assert!(ended.contains(&true), "none of them was mended");
        control.say("clear");
        OPS.into_iter().for_each(|op| scattered(pair, op).unwrap());
    };
    a_device_that_goes_down_fails_transfers_and_serves_when_it_is_up: |pair, mut control| {
        for op in OPS {
            control.say("delay micros=3000");
            let (there, here) = pair.regions(64, 64 << 10);
            let grant = pair.grant(op, &whole(&there, 64 << 10));
            let transfer = pair.begin(op, &whole(&here, 64 << 10), &grant, PATIENCE);
            wait_until("operations to be under way", || control.counts()["in_hand"] > 0);
            control.say("down");
            let error = transfer.wait(Some(PATIENCE)).map(drop).unwrap_err();
            assert!(error.text.contains("device is down") || error.text.contains("Network is down"), "{error}");
            let error = scattered(pair, op).unwrap_err();
            assert!(error.text.contains("Network is down"), "{error}");
            control.say("clear");
            scattered(pair, op).unwrap();
        }
    };
    an_operation_that_never_ends_ends_with_its_transfer: |pair, mut control| {
        for op in OPS {
            control.say("stick count=1");
            let began = Instant::now();
            let error = scattered(pair, op).unwrap_err();
            assert_eq!(error.code, Code::DeadlineExceeded, "{error}");
            // The deadline, the patience with what is under way, and as much again for a busy machine.
            assert!(began.elapsed() < Duration::from_secs(6), "{:?}", began.elapsed());
            // Its endpoint was closed: the device has nothing of it any more.
            assert_eq!(control.counts()["stuck"], 0);
            pair.regions(4, PAGE).0.close(PATIENCE).unwrap();
            scattered(pair, op).unwrap();
        }
    };
    a_stuck_operation_costs_other_transfers_nothing: |pair, mut control| {
        control.say("stick count=1");
        let (there, here) = pair.regions(64, PAGE);
        let grant = pair.grant(Op::Read, &whole(&there, PAGE));
        let stuck = pair.begin(Op::Read, &whole(&here, PAGE), &grant, Duration::from_secs(1));
        wait_until("it to be stuck", || control.counts()["stuck"] == 1);
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
    };
}
