//! Memory of other processes: how it is read, and what happens where it cannot be.

use crate::common::*;
use crate::deaths::Child;
use kvik_core::Code;
use kvik_engine::{Engine, Event, Memory, Preference, Region, Report, TransferOptions, TransportId, Verify};
use std::ptr::NonNull;

/// A region of ordinary memory, which no other process can map.
pub fn foreign(engine: &Engine, count: u32, seed: u8) -> Region {
    let mut buffer = vec![0u8; count as usize * PAGE as usize].into_boxed_slice();
    let start = NonNull::new(buffer.as_mut_ptr()).unwrap();
    // SAFETY: the box keeps the memory where it is until the region drops it, and nobody else looks into it.
    let memory = unsafe { Memory::foreign(start, buffer.len(), Box::new(buffer)) };
    let region = engine.register(memory).unwrap();
    fill(&region, seed);
    region
}

fn mechanism(report: &Report) -> (&str, &str) {
    (report.transport.name(), &report.mechanism)
}

#[test]
fn foreign_memory_is_read_through_the_kernel() {
    for verify in [Verify::Off, Verify::Full] {
        let options = TransferOptions { verify: Some(verify), ..TransferOptions::default() };
        let (owner, other) = (engine(Preference::Local), engine(Preference::Local));
        let (there, here) = (foreign(&owner, 100, 1), foreign(&other, 100, 2));
        let grant = owner.grant(&all(&there), many()).unwrap();
        let report = read_with(&other, &all(&here), grant.ticket(), options.clone()).unwrap();
        assert_eq!(mechanism(&report), ("local", "process_vm_readv"));
        assert_eq!(report.checks.contains(&"page_checksum"), verify == Verify::Full);
        assert!(bytes(&there) == bytes(&here));
        fill(&here, 7);
        let grant = owner.grant(&all(&there), to_write()).unwrap();
        let report = other.write(&all(&here), grant.ticket(), None, options).unwrap().wait(None).unwrap();
        assert_eq!(mechanism(&report), ("local", "process_vm_readv"));
        assert!(bytes(&there) == bytes(&here));
    }
}

#[test]
fn shared_memory_is_read_by_its_mapping() {
    let (owner, reader) = (engine(Preference::Local), engine(Preference::Local));
    let (there, here) = (region(&owner, 10, 1), foreign(&reader, 10, 2));
    let grant = owner.grant(&all(&there), many()).unwrap();
    let report = read(&reader, &all(&here), grant.ticket()).unwrap();
    assert_eq!(mechanism(&report), ("local", "memfd"));
    assert_eq!(report.checks, ["grant", "counts", "generation"]);
    let told = reader.explain(grant.ticket()).unwrap();
    assert_eq!(told.transport.name(), "local");
    assert_eq!(reasons(&told.rejected_transports), ["tcp: transport \"local\" was asked for"]);
    // The read before was measured.
    assert!(told.estimate.is_some_and(|estimate| estimate.samples == 1), "{told:?}");
    assert!(told.probes.iter().any(|(name, ..)| name == "memfd_sealing"));
    assert!(!told.probes.iter().any(|(name, ..)| name == "memlock"), "memlock is of no concern");
}

#[test]
fn tcp_tells_its_channels_and_a_peer_without_the_local_transport_is_told_of() {
    let (owner, reader) = (engine(Preference::Tcp), engine(Preference::Auto));
    let (there, here) = (region(&owner, 300, 1), region(&reader, 300, 2));
    let grant = owner.grant(&all(&there), many()).unwrap();
    let report = read(&reader, &all(&here), grant.ticket()).unwrap();
    assert_eq!(report.transport.name(), "tcp");
    assert!(
        report.mechanism.ends_with(" channels") || report.mechanism == "1 channel",
        "{}",
        report.mechanism
    );
    assert_eq!(reasons(&report.rejected_transports), ["local: the peer uses tcp only"]);
    assert_eq!(report.checks, ["grant", "counts", "page_checksum"]);
    let only = TransferOptions { transport: Some(Preference::Local), ..TransferOptions::default() };
    let error = read_with(&reader, &all(&here), grant.ticket(), only).unwrap_err();
    assert_eq!(error.code, Code::TransportUnavailable);
    assert!(error.text.contains("the peer uses tcp only"), "{error}");
}

#[test]
fn memory_that_turns_out_to_be_unreadable_goes_over_tcp_under_auto_only() {
    // In a PID namespace of its own, the peer's process number means nothing here, and ours nothing there.
    let Some(child) = Child::start_in_pid_namespace() else {
        return println!("not run: this user may not make a PID namespace");
    };
    let reader = engine(Preference::Auto);
    let here = foreign(&reader, child.pages(), 9);
    let only = TransferOptions { transport: Some(Preference::Local), ..TransferOptions::default() };
    let error = read_with(&reader, &all(&here), child.foreign(), only.clone()).unwrap_err();
    assert_eq!(error.code, Code::TransportUnavailable);
    assert!(error.text.contains("PID namespace"), "{error}");
    let events = reader.events().unwrap();
    let report = read(&reader, &all(&here), child.foreign()).unwrap();
    assert_eq!(report.transport.name(), "tcp");
    let told = events.next(PATIENCE).unwrap();
    let Some(Event::TransportChanged { from: TransportId::Local, to: TransportId::Tcp, reason, .. }) = told
    else {
        panic!("{told:?}")
    };
    assert!(reason.contains("PID namespace"), "{reason}");
    assert!(
        rejected(&report.rejected_transports).starts_with("local: ") && report.rejected_transports.len() == 1,
        "{report:?}"
    );
    child.check(&here);
    // The other way, the child is the one who cannot read.
    let set = pages(&here, &[0, 1, 2]);
    let report = reader.write(&set, child.writable(), Some([0, 1, 2].into()), TransferOptions::default());
    assert_eq!(report.unwrap().wait(Some(PATIENCE)).unwrap().transport.name(), "tcp");
    // What can be mapped still is.
    let shared = reader.allocate(u64::from(child.pages()) * PAGE).unwrap();
    let report = read_with(&reader, &all(&shared), child.readable(), only).unwrap();
    assert_eq!(mechanism(&report), ("local", "memfd"));
    child.check(&shared);
}

#[test]
fn a_region_that_is_dropped_under_its_transfer_stays_until_the_end() {
    for transport in [Preference::Local, Preference::Tcp] {
        let (owner, other) = (engine(transport), engine(transport));
        let there = owner.allocate(64 << 20).unwrap();
        let grant = owner.grant(&all(&there), to_write()).unwrap();
        let transfer = {
            let here = other.allocate(64 << 20).unwrap();
            blank(&here, 0x77);
            other.write(&all(&here), grant.ticket(), None, TransferOptions::default()).unwrap()
        };
        transfer.wait(Some(PATIENCE)).unwrap();
        assert_eq!((byte(&there, 0), byte(&there, (64 << 20) - 1)), (0x77, 0x77));
    }
}
