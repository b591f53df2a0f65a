//! Handovers go before bulk, and peers share: by the order in which work is given out, not by any clock.
//!
//! Whoever gives out the work is held until all transfers wait; what happens then is the order of the queues.

use crate::common::{PATIENCE, wait_until};
use crate::faulty::Faults;
use crate::pair::{Kind, OPS, Op, Pair, metric, whole};
use crate::{EFA, ROCE, Standin, VERBS};
use kvik_core::Class;
use kvik_engine::{Engine, Grant, PageSet, Region, Transfer, TransferOptions, Verify};
use std::sync::Arc;

const PAGE: u64 = 64 << 10;
const MIB: u32 = (1 << 20) / PAGE as u32;

fn of(class: Class) -> TransferOptions {
    let (deadline, verify) = (Some(PATIENCE), Some(Verify::Off));
    TransferOptions { class, deadline, verify, ..Default::default() }
}

/// The faults of the side that gives out chunks: who sends them, copies them, or posts them.
fn claimer(pair: &Pair, op: Op) -> &Arc<Faults> {
    match (pair.kind.transport, op) {
        ("tcp", Op::Read) => &pair.theirs,
        ("tcp", Op::Write) => &pair.ours,
        _ => pair.mover(op),
    }
}

/// Page sets of both sides, of so many MiB.
struct Sets {
    mine: PageSet,
    grant: Grant,
    _regions: (Region, Region),
}

fn sets(pair: &Pair, op: Op, mib: u32) -> Sets {
    let (there, here) = pair.regions(mib * MIB, PAGE);
    let (mine, grant) = (whole(&here, PAGE), pair.grant(op, &whole(&there, PAGE)));
    Sets { mine, grant, _regions: (there, here) }
}

/// One small transfer takes the way first, so that all is open, and one more is held in it.
fn hold(pair: &Pair, op: Op) -> (Transfer, Sets) {
    let small = sets(pair, op, 1);
    pair.begin_with(op, &small.mine, &small.grant, of(Class::Handover)).wait(Some(PATIENCE)).unwrap();
    let faults = claimer(pair, op);
    faults.hold_from(faults.given());
    let held = pair.begin_with(op, &small.mine, &small.grant, of(Class::Bulk));
    assert!(faults.wait_held(1, PATIENCE), "nothing was ever in flight");
    (held, small)
}

fn end(transfers: impl IntoIterator<Item = Transfer>) {
    for transfer in transfers {
        transfer.wait(Some(PATIENCE)).unwrap();
    }
}

/// How many chunks that are `others` were given out before the last that is `these`, and how many there are of each.
fn before(
    order: &[(u64, Class)],
    others: impl Fn(&(u64, Class)) -> bool,
    these: impl Fn(&(u64, Class)) -> bool,
) -> (usize, usize) {
    let last = order.iter().rposition(these).unwrap();
    let count = |order: &[(u64, Class)]| order.iter().filter(|one| others(one)).count();
    (count(&order[..last]), count(order))
}

fn is(class: Class) -> impl Fn(&(u64, Class)) -> bool {
    move |(_, of)| *of == class
}

/// That no more than one in `parts` of `what` went before, in one of a few rounds: a channel whose thread gets no core for a
/// while gives out its chunks when it does, whatever class the other channels are at by then.
fn in_order(what: &str, parts: usize, mut round: impl FnMut() -> (usize, usize)) {
    let mut rounds = Vec::new();
    while rounds.len() < 5 {
        let (before, all) = round();
        rounds.push((before, all));
        if before * parts <= all {
            return;
        }
    }
    panic!("{what} that went before, and all of them: {rounds:?}");
}

/// Sixteen transfers of bulk wait already when a handover comes that is as large as all of them.
pub fn a_handover_goes_before_the_bulk_that_came_first(kind: &'static Kind) {
    for op in OPS {
        in_order(&format!("{op:?}: chunks of bulk"), 3, || handover_behind_bulk(kind, op));
    }
}

/// Chunks of bulk that went before it, and all of them.
fn handover_behind_bulk(kind: &'static Kind, op: Op) -> (usize, usize) {
    let pair = Pair::new(kind);
    let (small, large) = (sets(&pair, op, 2), sets(&pair, op, 32));
    let (held, _small) = hold(&pair, op);
    let begin = |sets: &Sets, class| pair.begin_with(op, &sets.mine, &sets.grant, of(class));
    let bulk: Vec<Transfer> = (0..16).map(|_| begin(&small, Class::Bulk)).collect();
    let handover = begin(&large, Class::Handover);
    // A question has its answer: the owner has all requests.
    pair.other.extend(large.grant.ticket(), PATIENCE, of(Class::Handover)).unwrap().wait(None).unwrap();
    claimer(&pair, op).release();
    end(bulk.into_iter().chain([handover, held]));
    for (class, bytes) in [(Class::Handover, 33u64 << 20), (Class::Bulk, 33 << 20)] {
        for engine in [&pair.owner, &pair.other] {
            // The owner may hear last that all is through.
            wait_until("all to be counted", || bytes_of(engine, class) >= bytes as f64);
            assert_eq!(bytes_of(engine, class), bytes as f64, "{op:?}: counted as {class}");
        }
    }
    before(&claimer(&pair, op).order(), is(Class::Bulk), is(Class::Handover))
}

fn bytes_of(engine: &Engine, class: Class) -> f64 {
    let name = "kvik_transfer_bytes_total";
    let directions = ["in", "out"].into_iter();
    let roles = directions.flat_map(|way| ["initiator", "owner"].map(|role| (way, role)));
    let series = |(way, role)| format!("{name}{{role=\"{role}\",direction=\"{way}\",class=\"{class}\"");
    roles.map(|of| metric(engine, &series(of))).sum()
}

/// Sixteen large handovers saturate, and one transfer of bulk comes last.
pub fn bulk_is_not_starved(kind: &'static Kind) {
    for op in OPS {
        // A ninth of the bytes is 4 MiB after 36 of 132.
        in_order(&format!("{op:?}: chunks of handovers"), 2, || bulk_behind_handovers(kind, op));
    }
}

/// Chunks of handovers that went before it, and all of them.
fn bulk_behind_handovers(kind: &'static Kind, op: Op) -> (usize, usize) {
    let pair = Pair::new(kind);
    let (large, small) = (sets(&pair, op, 8), sets(&pair, op, 4));
    let (held, _small) = hold(&pair, op);
    let begin = |sets: &Sets, class| pair.begin_with(op, &sets.mine, &sets.grant, of(class));
    let handovers: Vec<Transfer> = (0..16).map(|_| begin(&large, Class::Handover)).collect();
    let bulk = begin(&small, Class::Bulk);
    pair.other.extend(small.grant.ticket(), PATIENCE, of(Class::Handover)).unwrap().wait(None).unwrap();
    claimer(&pair, op).release();
    end(handovers.into_iter().chain([bulk, held]));
    before(&claimer(&pair, op).order(), is(Class::Handover), is(Class::Bulk))
}

/// Two peers read from one owner, one of them with four times as many transfers open.
pub fn peers_share(kind: &'static Kind) {
    // The one with less has had its 32 MiB when the other one has had as much, of 128.
    in_order("chunks of the one with more", 2, || one_with_more(kind));
}

/// Chunks of the one with more that went before the last of the other one, and all of them.
fn one_with_more(kind: &'static Kind) -> (usize, usize) {
    let pair = Pair::new(kind);
    let third = kind.engine(&Faults::new(7), None);
    let region = kind.region(&third, u64::from(4 * MIB) * PAGE, 9);
    let (first, second) = (sets(&pair, Op::Read, 4), whole(&region, PAGE));
    let read =
        |who: &Engine, set: &PageSet| who.read(set, first.grant.ticket(), None, of(Class::Handover)).unwrap();
    end([read(&third, &second)]);
    let session = claimer(&pair, Op::Read).order()[0].0;
    let (held, _small) = hold(&pair, Op::Read);
    let many: Vec<Transfer> = (0..32).map(|_| read(&pair.other, &first.mine)).collect();
    let few: Vec<Transfer> = (0..8).map(|_| read(&third, &second)).collect();
    for who in [&pair.other, &third] {
        who.extend(first.grant.ticket(), PATIENCE, of(Class::Handover)).unwrap().wait(None).unwrap();
    }
    claimer(&pair, Op::Read).release();
    end(few.into_iter().chain(many).chain([held]));
    let order = claimer(&pair, Op::Read).order();
    before(&order, |(of, _)| *of != session, |(of, _)| *of == session)
}

macro_rules! over {
    ($($name:ident: $kind:expr, [$($check:ident)*];)*) => {
        $(mod $name {
            use super::*;
            static KIND: Kind = $kind;
            $(#[test]
            fn $check() {
                KIND.place(concat!(module_path!(), "::", stringify!($check)), |_| super::$check(&KIND));
            })*
        })*
    };
}

over! {
    tcp: Kind { transport: "tcp", mechanism: "channel", ..Kind::NEW },
        [a_handover_goes_before_the_bulk_that_came_first bulk_is_not_starved peers_share];
    memfd: Kind { transport: "local", mechanism: "memfd", ..Kind::NEW },
        [a_handover_goes_before_the_bulk_that_came_first bulk_is_not_starved];
    libfabric_standin: Kind { standin: Some(Standin::NEW), ..EFA },
        [a_handover_goes_before_the_bulk_that_came_first bulk_is_not_starved];
    verbs_standin: Kind { standin: Some(ROCE), ..VERBS },
        [a_handover_goes_before_the_bulk_that_came_first bulk_is_not_starved];
    plugin: Kind { transport: "plugin", mechanism: "sample", nics: "plugin", sample: true, ..Kind::NEW },
        [a_handover_goes_before_the_bulk_that_came_first bulk_is_not_starved];
}
