//! NICs by a plug-in, from the engine's side: what it says when there is none, and what peers need to have.
//! That it moves pages as every transport does is in `conform`; what a plug-in may get wrong, in kvik-host's
//! tests.

#[path = "engine/common.rs"]
#[allow(dead_code)]
mod common;
#[path = "../../../tests/plugin/built.rs"]
mod plugins;

use common::{PATIENCE, all, bytes, many, region, within};
use kvik_core::Code;
use kvik_engine::{Config, Engine, NicOptions, Preference, TransferOptions};
use std::path::PathBuf;
use std::time::{Duration, Instant};

fn start(nics: &str, library: Option<PathBuf>) -> Result<Engine, kvik_core::Error> {
    let nics = NicOptions { library, ..nics.parse().unwrap() };
    Engine::start(Config { transport: Preference::Auto, nics: Some(nics), ..Config::default() })
}

fn refused(nics: &str, library: Option<PathBuf>, code: Code, words: &[&str]) {
    let error = start(nics, library).map(drop).unwrap_err();
    assert_eq!(error.code, code, "{error}");
    words.iter().for_each(|word| assert!(error.text.contains(word), "{word:?} is not in: {error}"));
}

#[test]
fn an_engine_does_not_start_without_the_plug_in_that_it_was_told_of() {
    let gone = Code::TransportUnavailable;
    refused("plugin", None, Code::InvalidArgument, &["nic_library", "KVIK_NIC_LIBRARY"]);
    refused("plugin", Some("/no/such/plugin.so".into()), gone, &["/no/such/plugin.so", "nic_library"]);
    refused("plugin", Some(plugins::other()), gone, &["is no plug-in"]);
    refused("plugin", Some(plugins::broken("version")), gone, &["versions 7 to 9", "kvik 1 to 1"]);
    refused("plugin", Some(plugins::broken("table")), gone, &["its table has"]);
    refused("plugin", Some(plugins::broken("device")), gone, &["no UTF-8"]);
    refused("plugin", Some(plugins::broken("long")), gone, &["an address of 513 bytes"]);
    refused("plugin", Some(plugins::broken("none")), gone, &["the plug-in broken", "has no NIC here"]);
    let words = ["\"npu7\"", "sample0", "sample1", "plugin:npu7"];
    refused("plugin:npu7", Some(plugins::sample()), gone, &words);
}

#[test]
fn some_devices_are_taken_and_reports_name_the_plug_in() {
    let owner = start("plugin:sample1", Some(plugins::sample())).unwrap();
    let other = start("plugin", Some(plugins::sample())).unwrap();
    let names = |engine: &Engine| {
        let text = engine.metrics();
        let up = text.lines().filter(|line| line.starts_with("kvik_nic_up{") && line.ends_with(" 1"));
        up.map(|line| line.split('"').nth(1).unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(names(&owner), ["sample1"]);
    assert_eq!(names(&other), ["sample0", "sample1"]);
    let (there, here) = (region(&owner, 8, 1), region(&other, 8, 99));
    let grant = owner.grant(&all(&there), many()).unwrap();
    let options = TransferOptions { transport: Some(Preference::Nics), ..within(PATIENCE) };
    let report =
        other.read(&all(&here), grant.ticket(), None, options).unwrap().wait(Some(PATIENCE)).unwrap();
    assert_eq!((report.transport.name(), report.mechanism.as_str()), ("plugin", "sample"));
    assert_eq!(report.checks, ["grant", "counts", "page_sample"]);
    assert_eq!(bytes(&here), bytes(&there));
}

#[test]
fn plug_ins_of_other_names_do_not_reach_each_other() {
    let owner = start("plugin", Some(plugins::broken("nothing"))).unwrap();
    let other = start("plugin", Some(plugins::sample())).unwrap();
    let (there, here) = (region(&owner, 8, 1), region(&other, 8, 99));
    let grant = owner.grant(&all(&there), many()).unwrap();
    let options = TransferOptions { transport: Some(Preference::Nics), ..within(PATIENCE) };
    let error =
        other.read(&all(&here), grant.ticket(), None, options).unwrap().wait(Some(PATIENCE)).unwrap_err();
    assert_eq!(error.code, Code::TransportUnavailable);
    for word in ["plugin:broken", "plugin:sample"] {
        assert!(error.text.contains(word), "{error}");
    }
}

/// What it has told of before counts, so that nothing of it is cut off and ends twice.
#[test]
fn a_plug_in_that_breaks_its_word_is_heard_as_far_as_it_makes_sense() {
    let [owner, other] = [(); 2].map(|()| start("plugin:n0", Some(plugins::broken("again"))).unwrap());
    let (there, here) = (region(&owner, 1, 1), region(&other, 1, 99));
    let grant = owner.grant(&all(&there), many()).unwrap();
    let options = TransferOptions { transport: Some(Preference::Nics), ..within(PATIENCE) };
    let read = other.read(&all(&here), grant.ticket(), None, options).unwrap();
    let error = read.wait(Some(PATIENCE)).unwrap_err();
    assert_eq!(error.code, Code::PeerLost, "{error}");
    assert!(error.text.contains("which is not in flight"), "{error}");
    here.close(PATIENCE).unwrap();
    [owner, other].iter().for_each(|engine| engine.close(PATIENCE).unwrap());
}

/// It is polled as one without a descriptor, and so not at all while nothing is in flight.
#[test]
fn a_plug_in_that_never_lets_its_thread_sleep_costs_nothing_where_nothing_moves() {
    let engine = start("plugin:n0", Some(plugins::broken("awake"))).unwrap();
    let used = || {
        let text = engine.metrics();
        let threads = text.lines().filter(|line| line.starts_with("kvik_thread_cpu_seconds_total{"));
        threads.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum::<f64>()
    };
    let (before, began) = (used(), Instant::now());
    std::thread::sleep(Duration::from_millis(600));
    let (spent, slept) = (used() - before, began.elapsed().as_secs_f64());
    assert!(spent < 0.05 * slept, "{spent:.3} s of CPU time in {slept:.1} s in which nothing moved");
}
