//! libfabric, from the engine's side: what it says when it cannot be used, and what it does beside other transports.
//! That it moves pages as every transport does is in `conform`.

#[path = "engine/common.rs"]
#[allow(dead_code)]
mod common;

use common::{PATIENCE, all, bytes, code, many, reasons, region, rejected, wait_until, within};
use kvik_core::Code;
use kvik_engine::{Config, Engine, Preference, TransferOptions, Verify};

fn start(transport: Preference, provider: Option<&str>) -> Result<Engine, kvik_core::Error> {
    Engine::start(Config { transport, nics: provider.map(|text| text.parse().unwrap()), ..Config::default() })
}

fn engine(transport: Preference) -> Engine {
    start(transport, Some("libfabric:tcp")).unwrap()
}

fn why<T: std::fmt::Debug>(result: Result<T, kvik_core::Error>, words: &[&str]) {
    let error = result.unwrap_err();
    assert_eq!(error.code, Code::TransportUnavailable, "{error}");
    words.iter().for_each(|word| assert!(error.text.contains(word), "{word:?} is not in: {error}"));
}

#[test]
fn a_provider_that_is_not_here_is_an_error_and_nothing_else_is_taken() {
    why(start(Preference::Auto, Some("efa")).map(drop), &["\"efa\"", "libfabric.so", "fi_info -p efa"]);
    why(start(Preference::Nics, Some("libfabric:no-such-provider")).map(drop), &["no-such-provider"]);
    why(start(Preference::Auto, Some("libfabric:shm")).map(drop), &["shm", "local"]);
}

#[test]
fn who_asks_for_nics_names_them() {
    let error = start(Preference::Nics, None).map(drop).unwrap_err();
    assert_eq!(error.code, Code::InvalidArgument);
    assert!(error.text.contains("KVIK_NICS"), "{error}");
}

#[test]
fn checks_are_named_and_auto_takes_nics() {
    let (owner, other) = (engine(Preference::Tcp), engine(Preference::Tcp));
    let (there, here) = (region(&owner, 8, 1), region(&other, 8, 99));
    let grant = owner.grant(&all(&there), many()).unwrap();
    let run = |transport, verify| {
        let options =
            TransferOptions { transport: Some(transport), verify: Some(verify), ..within(PATIENCE) };
        other.read(&all(&here), grant.ticket(), None, options).unwrap().wait(Some(PATIENCE))
    };
    for (verify, checks) in [
        (Verify::Auto, &["grant", "counts", "page_sample"][..]),
        (Verify::Sample, &["grant", "counts", "page_sample"]),
        (Verify::Full, &["grant", "counts", "page_checksum"]),
        (Verify::Off, &["grant", "counts"]),
    ] {
        let report = run(Preference::Nics, verify).unwrap();
        assert_eq!((report.transport.name(), report.mechanism.as_str()), ("libfabric", "tcp"));
        assert_eq!(report.checks, checks);
        assert_eq!(bytes(&here), bytes(&there));
    }
    let counted = |engine: &Engine| {
        let text = engine.metrics();
        let mut rows = text.lines().filter(|line| line.starts_with("kvik_transfers_total{"));
        rows.any(|row| row.contains("transport=\"libfabric\"") && row.ends_with(" 4"))
    };
    // An owner answers first and counts afterwards.
    wait_until("the count of both", || counted(&owner) && counted(&other));
    // The engines told each other of no shared memory, so `auto` takes the NICs.
    let report = run(Preference::Auto, Verify::Full).unwrap();
    assert_eq!(report.transport.name(), "libfabric");
    assert!(rejected(&report.rejected_transports).starts_with("local: "), "{report:?}");
}

#[test]
fn a_peer_without_nics_is_named_and_auto_goes_over_tcp() {
    let owner = Engine::start(Config { transport: Preference::Tcp, ..Config::default() }).unwrap();
    let other = engine(Preference::Auto);
    let (there, here) = (region(&owner, 8, 1), region(&other, 8, 99));
    let grant = owner.grant(&all(&there), many()).unwrap();
    let with = |transport| TransferOptions { transport: Some(transport), ..within(PATIENCE) };
    let run = |transport| {
        other.read(&all(&here), grant.ticket(), None, with(transport)).unwrap().wait(Some(PATIENCE))
    };
    why(run(Preference::Nics), &["the peer has no NICs", "KVIK_NICS"]);
    let report = run(Preference::Auto).unwrap();
    assert_eq!(report.transport.name(), "tcp");
    // Each transport that was not taken has its reason, in reports and before any transfer.
    let told = other.explain(grant.ticket()).unwrap();
    for why in [reasons(&report.rejected_transports), reasons(&told.rejected_transports)] {
        assert_eq!(why.len(), 2, "{why:?}");
        assert_eq!(why[0], "local: the peer uses tcp only");
        assert!(why[1].starts_with("libfabric: the peer has no NICs"), "{why:?}");
    }
    // Nor can it reach back.
    let back = other.grant(&all(&here), many()).unwrap();
    let read = owner.read(&all(&there), back.ticket(), None, with(Preference::Nics)).unwrap();
    assert_eq!(code(read.wait(Some(PATIENCE))), Code::TransportUnavailable);
}
