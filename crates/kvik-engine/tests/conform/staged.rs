//! Pages of a GPU that the NICs do not reach, and that go through a ring of theirs: what a stalled GPU, a stuck NIC and
//! the end of a transfer do to it.
//!
//! Each test has a process of its own, with the stand-ins for the driver and for the NICs.

use crate::common::*;
use crate::cuda;
use crate::death::Owner;
use crate::faulty::Faults;
use crate::gpus::stalls;
use crate::pair::{Kind, OPS, Op, Pair, Standin, metric, options, whole};
use crate::standin::Control;
use kvik_core::Code;
use kvik_engine::{TransferOptions, Verify};
use std::time::Duration;

const ROCE: &Kind = &Kind { standin: Some(Standin { devices: 1, ..crate::ROCE }), ..crate::STAGED_VERBS };
const EFA: &Kind = &Kind { standin: Some(Standin { devices: 1, ..Standin::NEW }), ..crate::STAGED_EFA };
const PAGES: u32 = 64;
const PAGE: u64 = 64 << 10;
/// Slots that one peer may have of a ring, and bytes of a slot.
const SHARE: u64 = 8;
const SLOT: u64 = 256 << 10;

macro_rules! staged {
    ($(fn $name:ident($pair:ident, $gpu:ident, $nic:ident) $check:block)*) => {
        mod checks {
            use super::*;
            $(#[allow(unused_mut, unused_variables)]
            pub fn $name($pair: &Pair, $gpu: cuda::Control, mut $nic: Control) $check)*
        }
        $(#[test]
        fn $name() {
            with(ROCE, concat!(module_path!(), "::", stringify!($name)), checks::$name);
        })*
        mod efa {
            use super::*;
            $(#[test]
            fn $name() {
                with(EFA, concat!(module_path!(), "::", stringify!($name)), checks::$name);
            })*
        }
    };
}

fn with(kind: &'static Kind, name: &str, check: fn(&Pair, cuda::Control, Control)) {
    kind.place(name, |nic| {
        let pair = Pair::new(kind);
        pair.pass();
        check(&pair, cuda::Control, nic.expect("the stand-in is there"));
    });
}

fn sessions(pair: &Pair) -> f64 {
    metric(&pair.owner, "kvik_sessions_opened_total")
}

staged! {
    fn a_stalled_gpu_ends_its_transfers_by_the_deadline_and_costs_no_session(pair, gpu, nic) {
        let before = sessions(pair);
        stalls(pair, gpu);
        assert_eq!(sessions(pair), before, "the session with the peer was cut for a GPU of this side");
    }
    fn an_owner_that_takes_its_pages_back_waits_for_no_gpu_of_the_peer_s(pair, gpu, nic) {
        let before = sessions(pair);
        for (op, copy) in [(Op::Read, "cuMemcpyHtoDAsync_v2"), (Op::Write, "cuMemcpyDtoHAsync_v2")] {
            let (there, here) = pair.regions(PAGES, PAGE);
            let grant = pair.grant(op, &whole(&there, PAGE));
            gpu.say("stall");
            let copies = gpu.count(copy);
            let transfer = pair.begin(op, &whole(&here, PAGE), &grant, PATIENCE);
            wait_until("a copy to be begun", || gpu.count(copy) > copies);
            grant.revoke(PATIENCE).unwrap();
            there.close(PATIENCE).unwrap();
            let error = transfer.wait(Some(PATIENCE)).unwrap_err();
            assert_eq!(error.code, Code::PagesQuarantined, "{error}");
            assert_eq!(code(here.close(Duration::ZERO)), Code::RegionBusy);
            gpu.say("release");
            here.close(PATIENCE).unwrap();
        }
        assert_eq!(sessions(pair), before, "the session with the peer was cut for a GPU of this side");
    }
    fn a_read_is_done_only_when_the_gpu_has_its_bytes(pair, gpu, nic) {
        gpu.say("delay micros=20000");
        for _ in 0..4 {
            let (there, here) = pair.regions(PAGES, PAGE);
            let grant = pair.grant(Op::Read, &whole(&there, PAGE));
            pair.run(Op::Read, &whole(&here, PAGE), &grant, Verify::Off).unwrap();
            assert!(gpu.peek(here.addr(), here.bytes() as usize) == bytes(&there), "done, and not there");
        }
    }
    fn a_slot_is_sent_only_when_the_gpu_has_filled_it(pair, gpu, nic) {
        // Slots hold what went before, which is what a NIC sends that does not wait.
        gpu.say("delay micros=20000");
        for seed in 0..4 {
            let (there, here) = pair.regions(PAGES, PAGE);
            fill(&here, seed);
            let grant = pair.grant(Op::Write, &whole(&there, PAGE));
            pair.run(Op::Write, &whole(&here, PAGE), &grant, Verify::Off).unwrap();
            assert!(bytes(&there) == bytes(&here), "bytes were sent that the GPU had not brought");
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
        for (op, grant) in &grants {
            pair.run(*op, &whole(&here, PAGE), grant, Verify::Full).unwrap();
            assert!(bytes(&there) == bytes(&here), "{op:?}");
        }
    }
    fn a_peer_that_is_stuck_keeps_its_share_of_the_slots_and_no_more(pair, gpu, nic) {
        let third = pair.kind.engine(&Faults::new(3), None);
        for op in OPS {
            // Of what is on one queue pair nothing passes the first one that is stuck.
            let stuck = if pair.kind.transport == "verbs" { 1 } else { SHARE };
            nic.say(&format!("stick count={stuck}"));
            let (there, here) = pair.regions(128, PAGE);
            let grant = pair.grant(op, &whole(&there, PAGE));
            let transfer = pair.begin(op, &whole(&here, PAGE), &grant, PATIENCE);
            wait_until("its share to be in flight", || nic.counts()["in_flight"] == SHARE);
            let far = pair.kind.granted_region(&third, SHARE * SLOT, 1);
            let near = pair.kind.region(&pair.other, SHARE * SLOT, 0x5A);
            let other = third.grant(&whole(&far, PAGE), options(op)).unwrap();
            for _ in 0..3 {
                pair.run(op, &whole(&near, PAGE), &other, Verify::Off).unwrap();
                assert!(bytes(&far) == bytes(&near), "{op:?}");
            }
            assert!(!transfer.is_done());
            transfer.cancel();
            assert_eq!(code(transfer.wait(Some(PATIENCE))), Code::Cancelled);
        }
    }
    fn a_gpu_that_fails_fails_its_transfers_and_costs_no_session(pair, gpu, nic) {
        let before = sessions(pair);
        let (there, here) = pair.regions(PAGES, PAGE);
        let grant = pair.grant(Op::Write, &whole(&there, PAGE));
        gpu.say("stall");
        let copies = gpu.count("cuMemcpyDtoHAsync_v2");
        let failed = pair.begin(Op::Write, &whole(&here, PAGE), &grant, PATIENCE);
        wait_until("a copy to be begun", || gpu.count("cuMemcpyDtoHAsync_v2") > copies);
        gpu.say("poison device=0 code=719");
        let error = failed.wait(Some(PATIENCE)).unwrap_err();
        assert_eq!(error.code, Code::DeviceFailed, "{error}");
        here.close(PATIENCE).unwrap();
        // Other memory goes over the NIC as before, to the same peer.
        let host = pair.other.allocate(there.bytes()).unwrap();
        let write = pair.begin(Op::Write, &whole(&host, PAGE), &grant, PATIENCE);
        assert_eq!(write.wait(Some(PATIENCE)).unwrap().transport.name(), pair.kind.transport);
        assert_eq!(sessions(pair), before, "the session with the peer was cut for a GPU of this side");
    }
    fn a_stalled_gpu_keeps_no_engine_from_closing(pair, gpu, nic) {
        let (there, here) = pair.regions(PAGES, PAGE);
        let grant = pair.grant(Op::Write, &whole(&there, PAGE));
        gpu.say("stall");
        let copies = gpu.count("cuMemcpyDtoHAsync_v2");
        let transfer = pair.begin(Op::Write, &whole(&here, PAGE), &grant, PATIENCE);
        wait_until("a copy to be begun", || gpu.count("cuMemcpyDtoHAsync_v2") > copies);
        let began = watch::start();
        assert_eq!(code(pair.other.close(Duration::from_millis(700))), Code::PagesQuarantined);
        assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
        gpu.say("release");
        // Who waits is told of the GPU after a second, if that comes first.
        let ended = code(transfer.wait(Some(PATIENCE)));
        assert!([Code::EngineClosed, Code::PagesQuarantined].contains(&ended), "{ended:?}");
        here.close(PATIENCE).unwrap();
        wait_until("the ring to be freed", || gpu.count("pinned") == 0 && gpu.count("streams") == 0);
    }
    fn a_stalled_gpu_keeps_nobody_waiting_for_a_transfer_whose_peer_has_died(pair, gpu, nic) {
        let kind = pair.kind;
        for (op, copy) in [(Op::Read, "cuMemcpyHtoDAsync_v2"), (Op::Write, "cuMemcpyDtoHAsync_v2")] {
            let mut owner = Owner::start(kind);
            let engine = kind.engine(&Faults::new(3), None);
            let here = kind.region(&engine, owner.bytes(), 9);
            gpu.say("stall");
            let copies = gpu.count(copy);
            let (set, options) = (whole(&here, PAGE), TransferOptions { verify: Some(Verify::Off), ..within(PATIENCE) });
            let transfer = match op {
                Op::Read => engine.read(&set, &owner.tickets[0], None, options),
                Op::Write => engine.write(&set, &owner.tickets[1], None, options),
            }.unwrap();
            wait_until("a copy to be begun", || gpu.count(copy) > copies);
            owner.kill();
            let ended = transfer.wait(Some(PATIENCE)).unwrap_err();
            assert_eq!(ended.code, Code::PagesQuarantined, "{op:?}: {ended}");
            assert_eq!(code(here.close(Duration::ZERO)), Code::RegionBusy);
            gpu.say("release");
            here.close(PATIENCE).unwrap();
        }
    }
}

/// Two NICs, of which one leaves the peer to the other while the GPU has something of what it had: nothing of that is on
/// the wire, so no session need end for it.
#[test]
fn a_stalled_gpu_costs_no_session_where_a_nic_leaves_the_peer_to_another_one() {
    const KIND: &Kind = &Kind { standin: Some(crate::ROCE), ..crate::STAGED_VERBS };
    let name = "a_stalled_gpu_costs_no_session_where_a_nic_leaves_the_peer_to_another_one";
    with(KIND, &format!("{}::{name}", module_path!()), |pair, gpu, mut nic| {
        let before = sessions(pair);
        // More than both rings have for one peer, a page to a slot.
        let (there, here) = pair.regions(4 * SHARE as u32, SLOT);
        let grant = pair.grant(Op::Read, &whole(&there, SLOT));
        let transfer = in_time(Duration::from_secs(3), |deadline| {
            gpu.say("stall");
            let copies = gpu.count("cuMemcpyHtoDAsync_v2");
            let transfer = pair.begin(Op::Read, &whole(&here, SLOT), &grant, deadline);
            let begun = || gpu.count("cuMemcpyHtoDAsync_v2") - copies == 2 * SHARE as i64;
            wait_until("copies from both rings", || begun() || transfer.is_done());
            if transfer.is_done() {
                gpu.say("release");
                return None;
            }
            Some(transfer)
        });
        nic.say("down device=0");
        let error = transfer.wait(Some(PATIENCE)).unwrap_err();
        assert_eq!(error.code, Code::PagesQuarantined, "{error}");
        gpu.say("release");
        here.close(PATIENCE).unwrap();
        nic.say("clear");
        pair.pass();
        assert_eq!(sessions(pair), before, "the session with the peer was cut for a GPU of this side");
    });
}
