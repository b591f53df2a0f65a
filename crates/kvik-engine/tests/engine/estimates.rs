//! Estimates: from what was measured on the present connection, with what is open there, and without a word to the peer.

use crate::common::*;
use kvik_core::{Code, GrantId, Layout, Ticket};
use kvik_engine::{Engine, Estimate, Preference};
use std::time::Duration;

fn estimate(engine: &Engine, ticket: &Ticket, bytes: u64) -> Option<Estimate> {
    engine.estimate(ticket, bytes).unwrap()
}

/// What the parts of an estimate come to, in seconds.
fn sum(estimate: &Estimate, bytes: u64) -> f64 {
    estimate.start.as_secs_f64() + (bytes + estimate.queued) as f64 / estimate.bytes_per_second
}

#[test]
fn what_was_measured_is_told_without_traffic_and_nothing_else_is() {
    for transport in [Preference::Tcp, Preference::Local] {
        let (owner, reader) = (engine(transport), engine(transport));
        let (there, here) = (region(&owner, 64, 1), region(&reader, 64, 2));
        let grant = owner.grant(&all(&there), many()).unwrap();
        let ticket = grant.ticket();
        // Nobody was met, and nobody is.
        assert_eq!(estimate(&reader, ticket, 1 << 20), None);
        assert!(reader.peers().is_empty());
        // There is a connection, and nothing has moved on it.
        assert_eq!(reader.explain(ticket).unwrap().estimate, None);
        assert_eq!(estimate(&reader, ticket, 1 << 20), None);
        for count in [1u32, 64, 2, 48, 4, 32] {
            let ids: Vec<u32> = (0..count).collect();
            let read = reader.read(&pages(&here, &ids), ticket, Some(ids.into()), within(PATIENCE)).unwrap();
            read.wait(Some(PATIENCE)).unwrap();
        }
        let [small, large] = [1u64 << 20, 1 << 30].map(|bytes| {
            let told = estimate(&reader, ticket, bytes).unwrap();
            assert_eq!((told.samples, told.queued), (6, 0));
            assert!(told.bytes_per_second > 0.0);
            let exact = sum(&told, bytes);
            assert!((told.total.as_secs_f64() - exact).abs() < 1e-6 * exact.max(1.0), "{told:?}");
            told
        });
        assert!(small.total < large.total && small.start == large.start);
        let smallest = reader.explain(ticket).unwrap().estimate.unwrap();
        assert_eq!((smallest.total, smallest.start), (small.start, small.start));
        // Any ticket of the owner does. The owner itself has measured nothing, and of oneself nothing is measured.
        let any = owner.ticket_template(&Layout::contiguous(1, 64).unwrap()).unwrap();
        assert_eq!(estimate(&reader, &any, 1 << 20), Some(small));
        assert_eq!(reader.estimate(owner.id(), 1 << 20).unwrap(), Some(small));
        assert_eq!(reader.estimate(reader.id(), 1 << 20).unwrap(), None);
        let back = reader.ticket_template(&Layout::contiguous(1, 64).unwrap()).unwrap();
        assert_eq!(estimate(&owner, &back, 1 << 20), None);
        read(&owner, &all(&region(&owner, 64, 3)), ticket).unwrap();
        assert_eq!(estimate(&owner, ticket, 1 << 20), None);
        // With the connection goes what was measured on it.
        owner.close(PATIENCE).unwrap();
        wait_until("the end of the connection", || estimate(&reader, ticket, 1).is_none());
        reader.close(PATIENCE).unwrap();
        assert_eq!(code(reader.estimate(ticket, 1)), Code::EngineClosed);
    }
}

#[test]
fn what_is_open_with_the_peer_goes_first() {
    let (owner, reader) = (engine(Preference::Tcp), engine(Preference::Tcp));
    let (there, here) = (region(&owner, 64, 1), region(&reader, 64, 2));
    let grant = owner.grant(&all(&there), many()).unwrap();
    read(&reader, &all(&here), grant.ticket()).unwrap();
    let alone = estimate(&reader, grant.ticket(), 1 << 20).unwrap();
    // Reads of grants that are not given yet wait, within their deadlines.
    let layout = Layout::contiguous(64, PAGE).unwrap();
    let wait = |count: u32| {
        let early = owner.ticket_template(&layout).unwrap();
        let early = early.with_grant(GrantId::random().unwrap(), Duration::from_secs(60));
        let ids: Vec<u32> = (0..count).collect();
        reader.read(&pages(&here, &ids), &early, Some(ids.into()), within(PATIENCE)).unwrap()
    };
    let open = [wait(16), wait(3)];
    let behind = estimate(&reader, grant.ticket(), 1 << 20).unwrap();
    assert_eq!(behind.queued, 19 * PAGE);
    let (more, expected) =
        ((behind.total - alone.total).as_secs_f64(), behind.queued as f64 / behind.bytes_per_second);
    assert!((more - expected).abs() < 1e-6, "{more} s more, not {expected} s");
    open.iter().for_each(|one| one.cancel());
    wait_until("their ends", || estimate(&reader, grant.ticket(), 1 << 20) == Some(alone));
}
