//! Transfers over libfabric, by the providers that need no device.

#[path = "engine/common.rs"]
#[allow(dead_code)]
mod common;

use common::{PATIENCE, all, bytes, fill, within};
use kvik_core::{Right, Use};
use kvik_engine::{Config, Engine, FabricOptions, GrantOptions, Preference, Region};

fn options(provider: &str) -> FabricOptions {
    FabricOptions { provider: provider.into(), library: None, source: None, depth: 128 }
}

fn engine(provider: &str) -> Engine {
    let config =
        Config { transport: Preference::Libfabric, fabric: Some(options(provider)), ..Config::default() };
    Engine::start(config).unwrap()
}

fn region(engine: &Engine, seed: u8) -> Region {
    let region = engine.allocate(64 << 14).unwrap();
    fill(&region, seed);
    region
}

fn many(right: Right) -> GrantOptions {
    GrantOptions { right, uses: Use::Many, ..GrantOptions::default() }
}

#[test]
fn pages_go_both_ways() {
    let (owner, other) = (engine("tcp"), engine("tcp"));
    let (there, here) = (region(&owner, 1), region(&other, 99));
    let read = owner.grant(&all(&there), many(Right::Read)).unwrap();
    let report =
        other.read(&all(&here), read.ticket(), None, within(PATIENCE)).unwrap().wait(Some(PATIENCE)).unwrap();
    assert_eq!((report.transport, report.way.as_str(), report.bytes), ("libfabric", "tcp", 64 << 14));
    assert_eq!(bytes(&here), bytes(&there));
    fill(&here, 7);
    let write = owner.grant(&all(&there), many(Right::Write)).unwrap();
    other.write(&all(&here), write.ticket(), None, within(PATIENCE)).unwrap().wait(Some(PATIENCE)).unwrap();
    assert_eq!(bytes(&there), bytes(&here));
}
