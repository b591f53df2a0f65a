//! What is counted is what happened: by tenant and tier, by cause, and in histograms.

use crate::rig::{BLOCK, Pages, Rig, get, keys, namespace, put, shape};
use kvik_store::policy::PolicyKind;
use kvik_store::{LogOptions, METRICS, Namespace, StoreOptions, TenantOptions};
use std::time::{Duration, Instant};

const MEMORY: u64 = 1 << 20;

/// The value of a series as it is written; 0 where it is not there.
fn value(rig: &Rig, series: &str) -> u64 {
    let text = rig.client.metrics().unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    line.map_or(0, |value| value.parse().unwrap())
}

/// Waits until a series has a value: what was read is noted a moment after it was.
fn becomes(rig: &Rig, series: &str, expected: u64) {
    let until = Instant::now() + Duration::from_secs(60);
    while value(rig, series) != expected {
        assert!(Instant::now() < until, "{series} is {} and not {expected}", value(rig, series));
        std::thread::yield_now();
    }
}

fn with_policy(policy: PolicyKind, tenants: Vec<TenantOptions>) -> Rig {
    Rig::with(StoreOptions { memory: MEMORY, policy, tenants, ..StoreOptions::default() })
}

fn prompt(of: u32, blocks: u32) -> Vec<u32> {
    (0..blocks).map(|block| 1000 * of + block).collect()
}

#[test]
fn every_metric_is_there_once_and_in_the_order_of_the_table() {
    let rig = Rig::new(MEMORY);
    let text = rig.client.metrics().unwrap();
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    let named: Vec<String> = types.map(str::to_owned).collect();
    let table: Vec<String> =
        METRICS.iter().map(|metric| format!("{} {}", metric.name, metric.kind.name())).collect();
    assert_eq!(named, table);
    assert!(METRICS.iter().all(|metric| metric.name.starts_with("kvik_store_")));
}

#[test]
fn gets_and_puts_are_counted_for_their_tenant() {
    let rig = Rig::new(MEMORY);
    rig.put(&prompt(1, 6));
    assert_eq!(rig.get(&prompt(1, 8)), 6);
    assert_eq!(rig.get(&prompt(2, 3)), 0);
    let of = |name: &str| value(&rig, &format!("kvik_store_{name}{{tenant=\"one\",tier=\"memory\"}}"));
    assert_eq!((of("lookups_total"), of("hits_total"), of("misses_total")), (11, 6, 5));
    assert_eq!((of("in_bytes_total"), of("out_bytes_total")), (6 * BLOCK, 6 * BLOCK));
    let counts = rig.client.stat().unwrap();
    assert_eq!((counts.hits, counts.misses), (6, 5));
    let took = |op: &str| format!("kvik_store_operation_seconds_count{{op=\"{op}\",tier=\"memory\"}}");
    becomes(&rig, &took("get"), 1);
    assert_eq!((value(&rig, &took("get_first")), value(&rig, &took("put"))), (1, 1));
    assert_eq!(value(&rig, "kvik_store_reuse_gap_seconds_count"), 6);
    assert!(!rig.client.metrics().unwrap().contains("tier=\"log\""), "there is no log");
}

#[test]
fn what_the_log_had_is_told_from_what_memory_had() {
    let folder = std::env::temp_dir().join(format!("kvik-figures-{}", std::process::id()));
    let log = Some((folder.clone(), LogOptions::new(64 << 20)));
    let rig = Rig::with(StoreOptions { memory: MEMORY, log, ..StoreOptions::default() });
    // Four times what memory has room for: the first ones went.
    for of in 0..16 {
        assert_eq!(rig.put(&prompt(of, 20)).refused, 0);
        becomes(&rig, "kvik_store_log_unwritten_blocks_total", 0);
        becomes(
            &rig,
            "kvik_store_in_bytes_total{tenant=\"one\",tier=\"log\"}",
            u64::from(of + 1) * 20 * BLOCK,
        );
    }
    for of in 0..16 {
        assert_eq!(rig.get(&prompt(of, 20)), 20);
    }
    let of =
        |name: &str, tier: &str| value(&rig, &format!("kvik_store_{name}{{tenant=\"one\",tier=\"{tier}\"}}"));
    let (memory, log) = (of("hits_total", "memory"), of("hits_total", "log"));
    assert_eq!(memory + log, 320);
    assert!(log >= 80, "{log} hits of the log");
    assert_eq!(of("lookups_total", "log"), log);
    assert_eq!(of("misses_total", "log"), 0);
    assert_eq!(of("misses_total", "memory"), log);
    let counts = rig.client.stat().unwrap();
    // A block may make room for others of its own request, and be loaded again.
    assert!(counts.loaded >= log, "{} loads for {log} hits", counts.loaded);
    assert_eq!(of("out_bytes_total", "log"), counts.loaded * BLOCK);
    assert_eq!(value(&rig, "kvik_store_operation_seconds_count{op=\"load\",tier=\"log\"}"), counts.loaded);
    let evicted: u64 = PolicyKind::FIXED
        .iter()
        .map(|kind| value(&rig, &format!("kvik_store_evicted_blocks_total{{policy=\"{}\"}}", kind.name())))
        .sum();
    assert_eq!((evicted, value(&rig, "kvik_store_evicted_idle_seconds_count")), (counts.evicted, evicted));
    assert!(value(&rig, "kvik_store_log_segments") > 0);
    drop(rig);
    std::fs::remove_dir_all(folder).unwrap();
}

/// How many blocks were refused for a cause.
fn refused(rig: &Rig, cause: &str) -> u64 {
    value(rig, &format!("kvik_store_refused_blocks_total{{cause=\"{cause}\"}}"))
}

#[test]
fn a_block_whose_parent_is_missing_is_refused_for_that() {
    let rig = Rig::new(MEMORY);
    let all = rig.keys(&prompt(1, 5));
    assert_eq!(put(&rig.space, &rig.pages, Some(all[1]), &all[2..]).refused, 3);
    assert_eq!(refused(&rig, "parent_missing"), 3);
    assert_eq!(rig.client.stat().unwrap().refused_orphan, 3);
}

#[test]
fn who_holds_the_memory_is_named() {
    let rig = with_policy(PolicyKind::Lru, Vec::new());
    rig.put(&prompt(1, 60));
    // Nobody reads what is lent here, until the get is over.
    let (lent, wanted) = (rig.keys(&prompt(1, 44)), Pages::new(&rig.engine, 44, shape()));
    let ids: Vec<u32> = (0..44).collect();
    let getting = rig.space.get(&lent, &wanted.set(&ids), Some(Duration::from_secs(60))).unwrap();
    becomes(&rig, "kvik_store_lent_bytes", 44 * BLOCK);
    let stored = rig.put(&prompt(2, 60));
    assert!(stored.refused > 0);
    assert_eq!(refused(&rig, "held_by_readers"), stored.refused);
    assert_eq!(getting.wait().unwrap(), 44);
    rig.space.clear().unwrap();
    rig.becomes_empty();

    rig.put(&prompt(3, 42));
    assert_eq!(rig.space.pin(&rig.keys(&prompt(3, 42)), Duration::from_secs(600)).unwrap(), 42);
    assert_eq!(value(&rig, "kvik_store_pinned_bytes{tenant=\"\"}"), 42 * BLOCK);
    let stored = rig.put(&prompt(4, 60));
    assert!(stored.refused > 0);
    assert_eq!(refused(&rig, "pinned"), stored.refused);
}

#[test]
fn a_tenant_is_refused_for_its_quota() {
    let small = TenantOptions { name: "small".into(), quota: Some(20 * BLOCK), apart: false };
    let rig = with_policy(PolicyKind::Lru, vec![small]);
    let salted = Namespace { salt: b"small".to_vec(), ..namespace("tiny") };
    let space = rig.client.open("small", &salted, shape()).unwrap();
    let all = keys(&salted, &prompt(1, 30));
    assert_eq!(put(&space, &rig.pages, None, &all).refused, 10);
    assert_eq!(refused(&rig, "quota"), 10);
    assert_eq!(value(&rig, "kvik_store_memory_bytes{tenant=\"small\"}"), 20 * BLOCK);
    assert_eq!(value(&rig, "kvik_store_quota_bytes{tenant=\"small\"}"), 20 * BLOCK);
    assert_eq!(value(&rig, "kvik_store_policy{tenant=\"small\",policy=\"lru\"}"), 1);
    // It counts what is there, not what ever was.
    space.clear().unwrap();
    assert_eq!(put(&space, &rig.pages, None, &all[..20]).stored, 20);
    assert_eq!(get(&space, &rig.pages, &all[..20]), 20);
    assert_eq!(value(&rig, "kvik_store_hits_total{tenant=\"small\",tier=\"memory\"}"), 20);
    // Others have what is left.
    assert_eq!(rig.put(&prompt(2, 50)).refused, 0);
}

#[test]
fn a_tenant_that_is_apart_has_regions_of_its_own() {
    for (apart, expected) in [(false, 1), (true, 2)] {
        let bank = TenantOptions { name: "bank".into(), quota: None, apart };
        let rig = with_policy(PolicyKind::Lru, vec![bank]);
        let regions = || {
            let text = rig.engine.metrics();
            let line = text.lines().find_map(|line| line.strip_prefix("kvik_regions "));
            line.unwrap().parse::<u64>().unwrap()
        };
        let before = regions();
        rig.put(&prompt(1, 2));
        let salted = Namespace { salt: b"bank".to_vec(), ..namespace("tiny") };
        let space = rig.client.open("bank", &salted, shape()).unwrap();
        put(&space, &rig.pages, None, &keys(&salted, &prompt(1, 2)));
        assert_eq!(regions() - before, expected);
    }
}
