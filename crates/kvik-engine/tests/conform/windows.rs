//! A peer that takes nothing holds its window, and others go on.

use crate::common::*;
use crate::faulty::Faults;
use crate::pair::{Kind, OPS, Op, metric, options, whole};
use kvik_engine::{Config, Engine, TransferOptions, Verify};
use std::sync::Arc;

const KIND: &Kind = &Kind { transport: "tcp", mechanism: "channel", ..Kind::NEW };
const PAGE: u64 = 64 << 10;
/// 64 MiB: more than the kernel buffers for four connections.
const PAGES: u32 = 1024;
const WINDOW: u64 = 1 << 20;

fn sender(faults: &Arc<Faults>) -> Engine {
    let preference = KIND.preference();
    let config = Config {
        transport: preference,
        window: WINDOW,
        between: Some(faults.between()),
        ..Config::default()
    };
    Engine::start(config).unwrap()
}

#[test]
fn a_peer_that_takes_nothing_holds_its_window_and_others_go_on() {
    for op in OPS {
        let (none, stuck) = (Faults::new(1), Faults::new(2));
        // Whoever sends has the window; the other side's threads take nothing.
        let (owner, other) = match op {
            Op::Read => (sender(&none), KIND.engine(&stuck, None)),
            Op::Write => (KIND.engine(&stuck, None), sender(&none)),
        };
        let from = if op == Op::Read { &owner } else { &other };
        let (there, here) = (region_of(&owner, 1), region_of(&other, 2));
        let grant = owner.grant(&whole(&there, PAGE), options(op)).unwrap();
        stuck.hold_from(0);
        let (set, within) = (
            whole(&here, PAGE),
            TransferOptions { deadline: Some(PATIENCE), verify: Some(Verify::Off), ..Default::default() },
        );
        let transfer = match op {
            Op::Read => other.read(&set, grant.ticket(), None, within.clone()),
            Op::Write => other.write(&set, grant.ticket(), None, within.clone()),
        };
        let transfer = transfer.unwrap();
        assert!(stuck.wait_held(1, PATIENCE));
        let peer = if op == Op::Read { other.id() } else { owner.id() };
        let in_flight = || metric(from, &format!("kvik_in_flight_bytes{{peer=\"{peer}\""));
        wait_until("the channels to be full", || in_flight() > 0.0);
        // Meanwhile an honest peer is served by the same threads.
        let honest = KIND.engine(&Faults::new(3), None);
        let mine = region_of(&honest, 3);
        let third =
            from.grant(&whole(if op == Op::Read { &there } else { &here }, PAGE), options(Op::Read)).unwrap();
        for _ in 0..3 {
            let read = honest.read(&whole(&mine, PAGE), third.ticket(), None, within.clone()).unwrap();
            read.wait(Some(PATIENCE)).unwrap();
            let held = in_flight();
            assert!(held <= WINDOW as f64 && held > 0.0, "{op:?}: {held} bytes in flight");
            assert!(!transfer.is_done());
        }
        assert!(bytes(&mine) == bytes(if op == Op::Read { &there } else { &here }));
        stuck.release();
        assert_eq!(transfer.wait(Some(PATIENCE)).unwrap().bytes, u64::from(PAGES) * PAGE);
        assert!(bytes(&there) == bytes(&here), "{op:?}");
        wait_until("the window to be empty", || in_flight() == 0.0);
    }
}

fn region_of(engine: &Engine, seed: u8) -> kvik_engine::Region {
    let region = engine.allocate(u64::from(PAGES) * PAGE).unwrap();
    blank(&region, seed);
    region
}
