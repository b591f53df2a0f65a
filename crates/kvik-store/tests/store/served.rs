//! A store behind an engine of its own: what its clients see when it does not answer.

use crate::rig::*;
use crate::watch;
use kvik_core::Code;
use kvik_engine::{Config, Engine};
use kvik_store::{Client, Server, StoreOptions};
use std::time::Duration;

#[test]
fn a_store_that_stops_answering_costs_one_deadline() {
    let (there, here) =
        (Engine::start(Config::default()).unwrap(), Engine::start(Config::default()).unwrap());
    let server = Server::start(&there, &StoreOptions { memory: 1 << 20, ..StoreOptions::default() }).unwrap();
    let client = Client::connect(&here, &there.addresses()[0].to_string(), None).unwrap();
    let namespace = namespace("tiny");
    let (space, pages) = (client.open("one", &namespace, shape()).unwrap(), Pages::new(&here, 64, shape()));
    let all = keys(&namespace, &[1, 2, 3]);
    assert_eq!(put(&space, &pages, None, &all).stored, 3);
    assert_eq!(get(&space, &pages, &all), 3);
    // Its engine goes on: requests arrive, and nobody answers them.
    server.stop();
    let deadline = Duration::from_millis(500);
    let ask = || {
        let begun = watch::start();
        let answer = space.get(&all, &pages.set(&[0, 1, 2]), Some(deadline)).and_then(|get| get.wait());
        (answer.unwrap_err().code, begun.elapsed())
    };
    assert_eq!(ask().0, Code::StoreUnavailable);
    for _ in 0..20 {
        let (code, took) = ask();
        assert_eq!(code, Code::StoreUnavailable);
        assert!(took < deadline / 2, "it took {took:?} to hear that it is down");
    }
}
