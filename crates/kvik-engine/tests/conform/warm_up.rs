//! What is warm: the first transfer opens nothing, and whatever cannot be warm is named in time.

use crate::common::*;
use crate::death::Owner;
use crate::faulty::Faults;
use crate::pair::{Kind, OPS, Pair, Standin, metric, whole};
use crate::standin::Control;
use kvik_core::{Code, Right, Use};
use kvik_engine::{
    Config, Engine, GrantOptions, PairState, PeerState, Preference, TransportId, Verify, WarmUpReport,
};
use std::time::{Duration, Instant};

const FOUR: &Kind = &Kind { standin: Some(Standin { devices: 4, ..Standin::NEW }), ..crate::EFA };
const PAGE: u64 = 16 << 10;

/// What must not rise any more: connections of NICs, sessions, data channels.
fn opened(engine: &Engine) -> [u64; 3] {
    let stats = engine.stats();
    let sessions = stats.iter().find(|(name, _)| *name == "sessions_opened").unwrap().1;
    let channels = engine.peers().iter().map(|peer| u64::from(peer.channels)).sum();
    [metric(engine, "kvik_nic_connections_opened_total") as u64, sessions, channels]
}

fn states(warmed: &WarmUpReport) -> Vec<&'static str> {
    warmed.pairs.iter().map(|pair| pair.state.name()).collect()
}

/// That all of it was there.
fn is_idle(warmed: &WarmUpReport) {
    assert!(warmed.did_nothing(), "{warmed:?}");
    assert!(warmed.pairs.iter().all(|pair| matches!(pair.state, PairState::AlreadyOpen)), "{warmed:?}");
}

pub fn what_is_warmed_up_is_opened_once_and_by_no_transfer(kind: &'static Kind) {
    let pair = Pair::new(kind);
    let (there, here) = pair.regions(64, PAGE);
    for op in OPS {
        let right = if op == crate::pair::Op::Read { Right::Read } else { Right::Write };
        let options = GrantOptions { right, uses: Use::Once(1), ..GrantOptions::default() };
        let once = pair.owner.grant(&whole(&there, PAGE), options).unwrap();
        let first = pair.other.warm_up(once.ticket(), None).unwrap().wait(Some(PATIENCE)).unwrap();
        let name = if kind.own() { "self" } else { kind.transport };
        assert_eq!(names(&first.transports), [name], "{first:?}");
        match (op, kind.own()) {
            (crate::pair::Op::Read, false) => {
                assert!(first.connected && names(&first.made) == [name], "{first:?}");
                assert!(states(&first).iter().all(|state| *state == "opened"), "{first:?}");
                assert_eq!(first.pairs.is_empty(), !kind.one_sided(), "{first:?}");
                assert_eq!(first.channels, if kind.transport == "tcp" { 4 } else { 0 }, "{first:?}");
            }
            _ => is_idle(&first),
        }
        let before = opened(&pair.other);
        assert_eq!(before[0], first.pairs.len() as u64, "each NIC has opened one connection");
        is_idle(&pair.other.warm_up(once.ticket(), Some(PATIENCE)).unwrap().wait(None).unwrap());
        // The grant was not used, and what moves now finds all of it open.
        pair.run(op, &whole(&here, PAGE), &once, Verify::Full).unwrap();
        (0..4).for_each(|_| pair.pass());
        assert_eq!(opened(&pair.other), before, "{op:?}");
        // Nor is a grant needed that lives.
        is_idle(&pair.other.warm_up(once.ticket(), None).unwrap().wait(None).unwrap());
    }
}

pub fn several_at_a_time_beside_transfers_share_the_work(kind: &'static Kind) {
    let pair = Pair::new(kind);
    let (there, _) = pair.regions(4, PAGE);
    let grant = pair.grant(crate::pair::Op::Read, &whole(&there, PAGE));
    std::thread::scope(|scope| {
        for turn in 0..6 {
            let (pair, grant) = (&pair, &grant);
            scope.spawn(move || match turn {
                0 | 1 => pair.pass(),
                _ => {
                    let warmed =
                        pair.other.warm_up(grant.ticket(), None).unwrap().wait(Some(PATIENCE)).unwrap();
                    assert_eq!(warmed.failed().count(), 0, "{warmed:?}");
                }
            });
        }
    });
    let warmed = pair.other.warm_up(grant.ticket(), None).unwrap().wait(Some(PATIENCE)).unwrap();
    is_idle(&warmed);
    let counted = opened(&pair.other);
    assert_eq!(counted[0], warmed.pairs.len() as u64, "each NIC has opened one connection");
    assert_eq!(counted[1], u64::from(!kind.own()), "{counted:?}");
}

macro_rules! warm {
    ($(fn $name:ident($control:ident, $kind:ident) $check:block)*) => {
        $(#[test]
        fn $name() {
            FOUR.place(concat!(module_path!(), "::", stringify!($name)), |control| {
                let ($kind, mut $control) = (FOUR, control.expect("the stand-in is there"));
                $check
            });
        })*
    };
}

/// A pair and its owner's ticket.
fn met(kind: &'static Kind) -> (Pair, kvik_core::Ticket) {
    let pair = Pair::new(kind);
    let layout = kvik_core::Layout::contiguous(4, PAGE).unwrap();
    let ticket = pair.owner.ticket_template(&layout).unwrap();
    (pair, ticket)
}

/// None where more than the one that is stuck had not come to anything in time.
fn opened_but_one(control: &mut Control, warmed: kvik_core::Result<WarmUpReport>) -> Option<WarmUpReport> {
    let warmed = warmed.ok().filter(|warmed| warmed.failed().count() <= 1);
    if warmed.is_none() {
        control.say("clear");
    }
    warmed
}

/// Waits until a NIC that was left alone for a while is warm as well.
fn warm_at_last(pair: &Pair, ticket: &kvik_core::Ticket) {
    wait_until("every pair to be warm", || {
        let warmed = pair.other.warm_up(ticket, Some(PATIENCE)).unwrap().wait(Some(PATIENCE)).unwrap();
        warmed.failed().next().is_none()
    });
    is_idle(&pair.other.warm_up(ticket, None).unwrap().wait(None).unwrap());
}

warm! {
    fn a_nic_that_reaches_nothing_is_named_and_the_others_are_warmed_up(control, kind) {
        let (pair, ticket) = met(kind);
        control.say("down device=1");
        let began = watch::start();
        let warmed = pair.other.warm_up(&ticket, Some(PATIENCE)).unwrap().wait(Some(PATIENCE)).unwrap();
        assert_eq!(states(&warmed), ["opened", "failed", "opened", "opened"], "{warmed:?}");
        assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
        let bad = &warmed.pairs[1];
        let PairState::Failed(why) = &bad.state else { unreachable!() };
        assert!(bad.nic.contains("rdmap1") && why.text.contains("rdmap1"), "{bad:?}");
        // The others take its work, over the connections that they have.
        pair.pass();
        control.say("clear");
        warm_at_last(&pair, &ticket);
        pair.pass();
    }
    fn nics_that_are_more_here_than_there_share_those_there(control, kind) {
        // One by the kernel's name, as who reads that says it.
        const TWO: &Kind = &Kind { nics: "efa:rdmap0s0-rdm,rdmap1s0", ..*FOUR };
        let (mut pair, _) = met(kind);
        pair.owner = TWO.engine(&pair.theirs, None);
        let layout = kvik_core::Layout::contiguous(4, PAGE).unwrap();
        let tickets = [&pair.owner, &pair.other].map(|engine| engine.ticket_template(&layout).unwrap());
        // Both at once: each opens its own connections.
        let warming = [
            pair.other.warm_up(&tickets[0], Some(PATIENCE)).unwrap(),
            pair.owner.warm_up(&tickets[1], Some(PATIENCE)).unwrap(),
        ];
        let [more, fewer] = warming.map(|warming| warming.wait(Some(PATIENCE)).unwrap());
        let there = |warmed: &WarmUpReport| warmed.pairs.iter().map(|pair| pair.peer_nic).collect::<Vec<_>>();
        assert_eq!((there(&more), states(&more)), (vec![0, 1, 0, 1], vec!["opened"; 4]), "{more:?}");
        assert_eq!((there(&fewer), states(&fewer)), (vec![0, 1], vec!["opened"; 2]), "{fewer:?}");
        // Two that connect at once have two sessions for a while: what transfers take by now is warm as well.
        for (engine, ticket) in [(&pair.other, &tickets[0]), (&pair.owner, &tickets[1])] {
            let again = engine.warm_up(ticket, Some(PATIENCE)).unwrap().wait(Some(PATIENCE)).unwrap();
            assert_eq!(again.failed().count(), 0, "{again:?}");
        }
        let before = opened(&pair.other);
        assert!([4, 8].contains(&before[0]), "{before:?}");
        pair.pass();
        assert_eq!(opened(&pair.other), before);
        assert_eq!(control.counts()["stuck"], 0);
    }
    fn probes_that_fail_are_mended_as_operations_are(control, kind) {
        let (pair, ticket) = met(kind);
        control.say("fail device=1 nth=1 status=13");
        let warmed = pair.other.warm_up(&ticket, Some(PATIENCE)).unwrap().wait(Some(PATIENCE)).unwrap();
        assert_eq!(states(&warmed), ["opened"; 4], "{warmed:?}");
        // One of them was opened again.
        assert_eq!(opened(&pair.other)[0], 5);
        control.say("again count=50");
        let (again, other) = met(kind);
        let warmed = again.other.warm_up(&other, Some(PATIENCE)).unwrap().wait(Some(PATIENCE)).unwrap();
        assert_eq!(states(&warmed), ["opened"; 4], "{warmed:?}");
    }
    fn a_probe_that_is_not_heard_of_ends_the_warm_up_by_its_timeout(control, kind) {
        let (pair, warmed) = in_time(Duration::from_secs(1), |limit| {
            let (pair, ticket) = met(kind);
            control.say("stick device=2 count=1");
            let (began, busy) = (Instant::now(), watch::start());
            let warmed = pair.other.warm_up(&ticket, Some(limit)).unwrap().wait(None);
            assert!(began.elapsed() >= limit && busy.elapsed() < 2 * limit, "{:?}", began.elapsed());
            opened_but_one(&mut control, warmed).map(|warmed| (pair, warmed))
        });
        let bad = warmed.failed().next().unwrap();
        let PairState::Failed(why) = &bad.state else { unreachable!() };
        assert_eq!(why.code, Code::DeadlineExceeded, "{why}");
        assert!(why.text.contains(&bad.nic), "{why}");
        // It holds nothing up, and goes with its session.
        pair.pass();
        assert_eq!(control.counts()["stuck"], 1);
        pair.owner.close(PATIENCE).unwrap();
        wait_until("the probe to be stopped", || control.counts()["stuck"] == 0);
        wait_until("the peer's slots to be free", || control.counts()["slots"] == 0);
    }
    fn a_peer_that_dies_in_the_middle_ends_it(control, kind) {
        let engine = kind.engine(&Faults::new(1), None);
        let mut owner = Owner::start(kind);
        control.say("stick count=64");
        let warming = engine.warm_up(&owner.tickets[0], Some(PATIENCE)).unwrap();
        wait_until("probes to be in flight", || control.counts()["stuck"] == 4);
        assert!(!warming.is_done());
        let began = watch::start();
        owner.kill();
        let error = warming.wait(Some(PATIENCE)).map(drop).unwrap_err();
        assert!([Code::PeerUnreachable, Code::PeerLost].contains(&error.code), "{error}");
        assert!(error.text.contains(&owner.tickets[0].engine.to_string()), "{error}");
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
        control.say("clear");
        wait_until("the peer's slots to be free", || control.counts()["slots"] == 0);
        let other = Owner::start(kind);
        let warmed = engine.warm_up(&other.tickets[0], Some(PATIENCE)).unwrap().wait(None).unwrap();
        assert_eq!(states(&warmed), ["opened"; 4], "{warmed:?}");
    }
    fn a_probe_to_a_peer_that_has_fallen_silent_is_stopped_with_its_session(control, kind) {
        let (engine, owner, warmed) = in_time(Duration::from_secs(1), |limit| {
            let (engine, owner) = (kind.engine(&Faults::new(1), None), Owner::start(kind));
            control.say("stick device=0 count=1");
            let warmed = engine.warm_up(&owner.tickets[0], Some(limit)).unwrap().wait(None);
            opened_but_one(&mut control, warmed).map(|warmed| (engine, owner, warmed))
        });
        assert_eq!(states(&warmed), ["failed", "opened", "opened", "opened"], "{warmed:?}");
        owner.stop();
        // The peer's own endpoints stay as they are: this side alone stops what it has posted.
        wait_until("the session to end", || metric(&engine, "kvik_sessions_open") == 0.0);
        wait_until("the probe to be stopped", || control.counts()["stuck"] == 0);
        wait_until("the peer's slots to be free", || control.counts()["slots"] == 0);
        assert_eq!(metric(&engine, "kvik_nic_connections_open"), 0.0);
    }
    fn a_peer_that_is_stopped_bounds_it(control, kind) {
        let limit = Duration::from_secs(1);
        let within = |began: watch::Watch| {
            assert!(began.elapsed() < 2 * limit, "{:?}", began.elapsed());
        };
        // One that was never met, and one with which there is a session.
        let owner = Owner::start(kind);
        let engine = kind.engine(&Faults::new(1), None);
        owner.stop();
        let began = watch::start();
        let error = engine.warm_up(&owner.tickets[0], Some(limit)).unwrap().wait(None).unwrap_err();
        within(began);
        assert_eq!(error.code, Code::PeerUnreachable, "{error}");
        drop(owner);
        let owner = Owner::start(kind);
        engine.explain(&owner.tickets[0]).unwrap();
        owner.stop();
        let began = watch::start();
        let warmed = engine.warm_up(&owner.tickets[0], Some(limit)).unwrap().wait(None).unwrap();
        within(began);
        assert_eq!(states(&warmed), ["failed"; 4], "{warmed:?}");
        assert!(warmed.transports.is_empty() && !warmed.did_nothing(), "{warmed:?}");
        assert_eq!(control.counts()["stuck"], 0);
    }
}

#[test]
fn a_ticket_of_an_earlier_start_and_one_of_nobody_are_refused() {
    let engine = |port: u16| {
        // Where no other test listens, so that the port stays free.
        let listen = vec![([127, 0, 0, 4], port).into()];
        Engine::start(Config { transport: Preference::Tcp, listen, ..Config::default() }).unwrap()
    };
    let layout = kvik_core::Layout::contiguous(4, PAGE).unwrap();
    let (here, first) = (engine(0), engine(0));
    let port = first.listening()[0].port();
    let old = first.ticket_template(&layout).unwrap();
    first.close(PATIENCE).unwrap();
    let gone = here.warm_up(&old, Some(PATIENCE)).unwrap();
    assert_eq!(code(gone.wait(Some(PATIENCE))), Code::PeerUnreachable);
    let second = engine(port);
    let refused = here.warm_up(&old, Some(PATIENCE)).unwrap();
    assert_eq!(code(refused.wait(Some(PATIENCE))), Code::PeerRestarted);
    let fresh = second.ticket_template(&layout).unwrap();
    assert_eq!(code(here.warm_up(&fresh, Some(Duration::ZERO)).map(drop)), Code::InvalidArgument);
    // Who did not open the session has its channels opened by the other side.
    let back = here.ticket_template(&layout).unwrap();
    here.explain(&fresh).unwrap();
    // Its opener knows of it first.
    wait_until("the session", || second.peers().iter().any(|peer| peer.state == PeerState::Up));
    let warmed = second.warm_up(&back, None).unwrap().wait(Some(PATIENCE)).unwrap();
    assert!(!warmed.connected && warmed.channels > 0 && warmed.made == [TransportId::Tcp], "{warmed:?}");
    here.close(PATIENCE).unwrap();
    assert_eq!(code(here.warm_up(&fresh, None).map(drop)), Code::EngineClosed);
}

fn names(transports: &[TransportId]) -> Vec<&'static str> {
    transports.iter().map(|transport| transport.name()).collect()
}

#[test]
fn both_sides_at_once_meet_in_one_session() {
    for _ in 0..8 {
        let pair = Pair::new(&Kind { transport: "tcp", mechanism: "channel", ..Kind::NEW });
        let layout = kvik_core::Layout::contiguous(4, PAGE).unwrap();
        let tickets = [&pair.owner, &pair.other].map(|engine| engine.ticket_template(&layout).unwrap());
        let warming = [
            pair.other.warm_up(&tickets[0], Some(PATIENCE)).unwrap(),
            pair.owner.warm_up(&tickets[1], Some(PATIENCE)).unwrap(),
        ];
        for warming in warming {
            let warmed = warming.wait(Some(PATIENCE)).unwrap();
            assert_eq!(warmed.transports, [TransportId::Tcp], "{warmed:?}");
        }
        pair.pass();
    }
}
