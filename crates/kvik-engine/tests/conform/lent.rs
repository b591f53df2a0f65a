//! Pages of an owner's GPU that NICs do not reach, and that go through slots of a ring which the owner lends: what a stalled
//! GPU, a stuck NIC, a peer that dies and the end of a transfer do to it. On the other side the pages lie on the host, or on
//! such a GPU too.
//!
//! Each test has a process of its own, with the stand-ins for the driver and for the NICs.

use crate::common::*;
use crate::cuda;
use crate::faulty::Faults;
use crate::gpus::{Stalled, stalls};
use crate::pair::{Kind, Memories, OPS, Op, Pair, Standin, metric, options, whole};
use crate::standin::Control;
use kvik_core::Code;
use kvik_engine::{Config, TransferOptions, Verify};
use std::time::Duration;

const ROCE: Standin = Standin { devices: 1, ..crate::ROCE };
const FABRIC: Standin = Standin { devices: 1, ..Standin::NEW };
const PAGES: u32 = 64;
const PAGE: u64 = 64 << 10;
/// Bytes that fill the slots of the owner's ring.
const RING: u64 = 8 << 20;

macro_rules! lent {
    (@ $module:ident $kind:expr, $($name:ident)*) => {
        mod $module {
            use super::*;
            static KIND: Kind = $kind;
            $(#[test]
            fn $name() {
                with(&KIND, concat!(module_path!(), "::", stringify!($name)), checks::$name);
            })*
        }
    };
    (@@ $($name:ident)*) => {
        lent!(@ verbs Kind { transport: "verbs", nics: "verbs", standin: Some(ROCE), ..crate::STAGED_OWNER }, $($name)*);
        lent!(@ verbs_both Kind { transport: "verbs", nics: "verbs", standin: Some(ROCE), ..crate::STAGED_BOTH }, $($name)*);
        lent!(@ efa Kind { transport: "libfabric", nics: "efa", standin: Some(FABRIC), ..crate::STAGED_OWNER }, $($name)*);
        lent!(@ efa_both Kind { transport: "libfabric", nics: "efa", standin: Some(FABRIC), ..crate::STAGED_BOTH }, $($name)*);
    };
    ($(fn $name:ident($pair:ident, $gpu:ident, $nic:ident) $check:block)*) => {
        mod checks {
            use super::*;
            $(#[allow(unused_mut, unused_variables)]
            pub fn $name($pair: &Pair, $gpu: cuda::Control, mut $nic: Control) $check)*
        }
        lent!(@@ $($name)*);
    };
}

fn with(kind: &'static Kind, name: &str, check: fn(&Pair, cuda::Control, Control)) {
    kind.place(name, |nic| {
        let pair = Pair::new(kind);
        pair.pass();
        check(&pair, cuda::Control, nic.expect("the stand-in is there"));
    });
}

/// The GPU that both sides' pages lie on stands still: which of them has a copy in flight depends on the direction.
fn stalls_both(pair: &Pair, gpu: cuda::Control) {
    for op in OPS {
        let Stalled { there, here, grant, error } = Stalled::new(pair, gpu, op);
        gpu.say("release");
        let expected = if op == Op::Read { Code::DeadlineExceeded } else { Code::PagesQuarantined };
        assert_eq!(error.code, expected, "{op:?}: {error}");
        grant.revoke(PATIENCE).unwrap();
        here.close(PATIENCE).unwrap();
        blank(&there, 0xEE);
        pair.pass();
        assert!(bytes(&there).iter().all(|byte| *byte == 0xEE), "{op:?}: a copy came late");
    }
}

fn sessions(pair: &Pair) -> f64 {
    metric(&pair.owner, "kvik_sessions_opened_total")
}

lent! {
    fn a_stalled_gpu_ends_its_transfers_by_the_deadline_and_costs_no_session(pair, gpu, nic) {
        let before = sessions(pair);
        match pair.kind.memory {
            Memories::Gpu => stalls_both(pair, gpu),
            _ => stalls(pair, gpu),
        }
        assert_eq!(sessions(pair), before, "the session was cut for a GPU");
    }
    fn a_write_is_done_only_when_the_owners_gpu_has_its_bytes(pair, gpu, nic) {
        gpu.say("delay micros=20000");
        for seed in 0..3 {
            let (there, here) = pair.regions(PAGES, PAGE);
            fill(&here, seed);
            let grant = pair.grant(Op::Write, &whole(&there, PAGE));
            pair.run(Op::Write, &whole(&here, PAGE), &grant, Verify::Off).unwrap();
            assert!(gpu.peek(there.addr(), there.bytes() as usize) == bytes(&here), "done, and not there");
        }
    }
    fn a_slot_is_lent_only_when_the_gpu_has_filled_it(pair, gpu, nic) {
        // Slots hold what went before, which is what a NIC reads that is told of them too early.
        gpu.say("delay micros=20000");
        for seed in 0..3 {
            let (there, here) = pair.regions(PAGES, PAGE);
            fill(&there, seed);
            let grant = pair.grant(Op::Read, &whole(&there, PAGE));
            pair.run(Op::Read, &whole(&here, PAGE), &grant, Verify::Off).unwrap();
            assert!(bytes(&there) == bytes(&here), "bytes were read that the GPU had not brought");
        }
    }
    fn slots_come_back_whatever_ends_their_transfers(pair, gpu, nic) {
        let (there, here) = pair.regions(PAGES, PAGE);
        let grants = OPS.map(|op| (op, pair.grant(op, &whole(&there, PAGE))));
        for round in 0..24 {
            let (op, grant) = &grants[round % 2];
            nic.say("delay micros=2000");
            gpu.say(if round % 4 < 2 { "delay micros=2000" } else { "delay micros=20" });
            let deadline = if round % 3 == 0 { Duration::from_millis(30) } else { PATIENCE };
            let transfer = pair.begin(*op, &whole(&here, PAGE), grant, deadline);
            wait_until("it to be in flight", || transfer.is_done() || nic.counts()["in_flight"] > 0);
            if round % 3 == 1 {
                transfer.cancel();
            }
            let ended = transfer.wait(Some(PATIENCE)).map(drop);
            let known = [Code::Cancelled, Code::DeadlineExceeded];
            assert!(ended.as_ref().is_ok_and(|()| bytes(&there) == bytes(&here))
                || ended.is_err_and(|error| known.contains(&error.code)));
        }
        nic.say("clear");
        gpu.say("clear");
        // More than the ring has, so that a slot which is missing is missed.
        let (there, here) = pair.regions((3 * RING / PAGE) as u32, PAGE);
        for op in OPS {
            let grant = pair.grant(op, &whole(&there, PAGE));
            pair.run(op, &whole(&here, PAGE), &grant, Verify::Full).unwrap();
            assert!(bytes(&there) == bytes(&here), "{op:?}");
        }
    }
    fn a_gpu_that_no_nic_may_write_has_nothing_to_flush(pair, gpu, nic) {
        // Most desktop boards.
        for id in [116, 117, 118] {
            gpu.say(&format!("attribute id={id} value=0"));
        }
        let (there, here) = pair.regions(PAGES, PAGE);
        for op in OPS {
            let grant = pair.grant(op, &whole(&there, PAGE));
            pair.run(op, &whole(&here, PAGE), &grant, Verify::Full).unwrap();
            assert!(bytes(&there) == bytes(&here), "{op:?}");
        }
    }
    fn operations_that_fail_are_posted_again_into_the_same_slots(pair, gpu, nic) {
        for op in OPS {
            let (there, here) = pair.regions(PAGES, PAGE);
            let grant = pair.grant(op, &whole(&there, PAGE));
            for _ in 0..4 {
                nic.say("fail nth=3");
                pair.run(op, &whole(&here, PAGE), &grant, Verify::Full).unwrap();
                assert!(bytes(&there) == bytes(&here), "{op:?}");
            }
        }
    }
    fn a_peer_that_is_stuck_keeps_its_share_of_the_slots_and_no_more(pair, gpu, nic) {
        let third = pair.kind.engine(&Faults::new(3), None);
        for op in OPS {
            // Of what is on one queue pair nothing passes the first one that is stuck.
            nic.say(if pair.kind.transport == "verbs" { "stick count=1" } else { "stick count=8" });
            let (there, here) = pair.regions((2 * RING / PAGE) as u32, PAGE);
            let grant = pair.grant(op, &whole(&there, PAGE));
            let transfer = pair.begin(op, &whole(&here, PAGE), &grant, PATIENCE);
            wait_until("it to be in flight", || nic.counts()["in_flight"] > 0);
            let near = pair.kind.region(&third, RING, 0x5A);
            let far = pair.kind.granted_region(&pair.owner, RING, 1);
            let other = pair.grant(op, &whole(&far, PAGE));
            for _ in 0..3 {
                let options = TransferOptions { verify: Some(Verify::Off), ..within(PATIENCE) };
                let moved = match op {
                    Op::Read => third.read(&whole(&near, PAGE), other.ticket(), None, options),
                    Op::Write => third.write(&whole(&near, PAGE), other.ticket(), None, options),
                };
                moved.unwrap().wait(Some(PATIENCE)).unwrap();
                assert!(bytes(&far) == bytes(&near), "{op:?}");
            }
            assert!(!transfer.is_done());
            transfer.cancel();
            assert_eq!(code(transfer.wait(Some(PATIENCE))), Code::Cancelled);
            nic.say("clear");
        }
    }
    fn a_stalled_gpu_holds_up_nothing_that_others_have_to_copy_or_sum(pair, gpu, nic) {
        for op in OPS {
            let (there, here) = pair.regions((RING / PAGE) as u32, PAGE);
            let grant = pair.grant(op, &whole(&there, PAGE));
            let copies = || gpu.count("cuMemcpyDtoHAsync_v2") + gpu.count("cuMemcpyHtoDAsync_v2");
            let before = copies();
            gpu.say("stall");
            let transfer = pair.begin(op, &whole(&here, PAGE), &grant, PATIENCE);
            wait_until("copies into all of its slots", || copies() >= before + 8);
            let [far, near] = [&pair.owner, &pair.other].map(|engine| engine.allocate(RING).unwrap());
            let other = pair.grant(op, &whole(&far, PAGE));
            let options = TransferOptions { verify: Some(Verify::Full), ..within(PATIENCE) };
            let began = watch::start();
            pair.begin_with(op, &whole(&near, PAGE), &other, options).wait(Some(PATIENCE)).unwrap();
            assert!(bytes(&far) == bytes(&near) && !transfer.is_done(), "{op:?}");
            assert!(began.elapsed() < Duration::from_secs(3), "{op:?}: {:?}", began.elapsed());
            gpu.say("release");
            transfer.wait(Some(PATIENCE)).unwrap();
            assert!(bytes(&there) == bytes(&here), "{op:?}");
        }
    }
    fn a_gpu_that_fails_fails_its_transfers_and_costs_no_session(pair, gpu, nic) {
        let before = sessions(pair);
        let (there, here) = pair.regions(PAGES, PAGE);
        let grant = pair.grant(Op::Read, &whole(&there, PAGE));
        gpu.say("stall");
        let copies = gpu.count("cuMemcpyDtoHAsync_v2");
        let failed = pair.begin(Op::Read, &whole(&here, PAGE), &grant, PATIENCE);
        wait_until("a copy to be begun", || gpu.count("cuMemcpyDtoHAsync_v2") > copies);
        gpu.say("poison device=0 code=719");
        let error = failed.wait(Some(PATIENCE)).unwrap_err();
        assert_eq!(error.code, Code::DeviceFailed, "{error}");
        there.close(PATIENCE).unwrap();
        // Other memory goes over the NICs as before, to the same peer.
        let [far, near] = [&pair.owner, &pair.other].map(|engine| engine.allocate(RING).unwrap());
        let grant = pair.grant(Op::Read, &whole(&far, PAGE));
        let read = pair.begin(Op::Read, &whole(&near, PAGE), &grant, PATIENCE);
        assert_eq!(read.wait(Some(PATIENCE)).unwrap().transport.name(), pair.kind.transport);
        assert!(bytes(&far) == bytes(&near));
        assert_eq!(sessions(pair), before, "the session was cut for a GPU");
    }
    fn a_gpu_that_fails_under_copies_that_were_put_aside_lends_no_slot_for_them(pair, gpu, nic) {
        // With one thread that copies, it has put them all aside once it has summed for another transfer.
        let owner = pair.kind.engine_with(&Faults::new(3), Config { io_threads: 1, ..Config::default() });
        let [far, near] = [&owner, &pair.other].map(|engine| engine.allocate(RING).unwrap());
        let there = pair.kind.granted_region(&owner, RING / 2, 1);
        let here = pair.kind.region(&pair.other, RING / 2, 0x5A);
        let [beside, grant] = [&far, &there].map(|of| owner.grant(&whole(of, PAGE), options(Op::Read)).unwrap());
        let read = |into, ticket, verify| {
            let options = TransferOptions { verify: Some(verify), ..within(PATIENCE) };
            pair.other.read(&whole(into, PAGE), ticket, None, options).unwrap()
        };
        let copies = gpu.count("cuMemcpyDtoHAsync_v2");
        gpu.say("stall");
        let failed = read(&here, grant.ticket(), Verify::Off);
        wait_until("a copy of each chunk", || gpu.count("cuMemcpyDtoHAsync_v2") >= copies + 8);
        read(&near, beside.ticket(), Verify::Full).wait(Some(PATIENCE)).unwrap();
        gpu.say("poison device=0 code=719");
        assert_eq!(code(failed.wait(Some(PATIENCE))), Code::DeviceFailed);
    }
    fn a_stalled_gpu_keeps_no_owner_from_closing(pair, gpu, nic) {
        let (there, here) = pair.regions(PAGES, PAGE);
        let grant = pair.grant(Op::Read, &whole(&there, PAGE));
        gpu.say("stall");
        let copies = gpu.count("cuMemcpyDtoHAsync_v2");
        let transfer = pair.begin(Op::Read, &whole(&here, PAGE), &grant, PATIENCE);
        wait_until("a copy to be begun", || gpu.count("cuMemcpyDtoHAsync_v2") > copies);
        let began = watch::start();
        assert_eq!(code(pair.owner.close(Duration::from_millis(700))), Code::PagesQuarantined);
        assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
        gpu.say("release");
        assert!([Code::RegionClosed, Code::PeerLost].contains(&code(transfer.wait(Some(PATIENCE)))));
        there.close(PATIENCE).unwrap();
    }
}
