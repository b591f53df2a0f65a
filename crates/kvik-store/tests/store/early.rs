//! The first block of a get from a server, which is read before the store's answer has come.

use crate::rig::*;
use kvik_engine::{Config, Engine, Preference};
use kvik_store::{BlockKey, Client, Server, Space, StoreOptions};
use std::time::{Duration, Instant};

/// Longer than the test takes, so that nothing ends by itself.
const LONG: Duration = Duration::from_secs(60);

/// A server, and a client with an engine of its own.
struct Served {
    here: Engine,
    client: Client,
    space: Space,
    pages: Pages,
    _server: Server,
    _there: Engine,
}

impl Served {
    fn new(transport: Preference, memory: u64) -> Served {
        let engine = || Engine::start(Config { transport, ..Config::default() }).unwrap();
        let (there, here) = (engine(), engine());
        let server = Server::start(&there, &StoreOptions { memory, ..StoreOptions::default() }).unwrap();
        let client = Client::connect(&here, &there.addresses()[0].to_string(), None).unwrap();
        let space = client.open("one", &namespace("tiny"), shape()).unwrap();
        let pages = Pages::new(&here, 64, shape());
        Served { here, client, space, pages, _server: server, _there: there }
    }

    fn keys(&self, prompt: &[u32]) -> Vec<BlockKey> {
        keys(&namespace("tiny"), prompt)
    }

    fn get(&self, prompt: &[u32]) -> usize {
        get(&self.space, &self.pages, &self.keys(prompt))
    }

    fn count(&self, name: &str) -> u64 {
        self.here.stats().into_iter().find(|(of, _)| *of == name).unwrap().1
    }
}

#[test]
fn what_is_read_ahead_is_the_block_and_is_read_once() {
    for transport in [Preference::Tcp, Preference::Local] {
        let served = Served::new(transport, 16 << 20);
        let prompt: Vec<u32> = (0..20).collect();
        assert_eq!(put(&served.space, &served.pages, None, &served.keys(&prompt)).stored, 20);
        assert_eq!(served.get(&prompt), 20);
        // From now on the store's pages are known. A read that is ended, because another one comes in its place, would
        // have failed. What was lent is given back by transfers, too, which may not have begun.
        becomes(|| served.client.metrics().unwrap().contains("kvik_store_lent_bytes 0\n"));
        becomes(|| served.count("transfers_open") == 0);
        let before = (served.count("transfers_ok"), served.count("transfers_failed"));
        for _ in 0..10 {
            assert_eq!(served.get(&prompt[..1]), 1);
        }
        assert_eq!(
            (served.count("transfers_ok"), served.count("transfers_failed")),
            (before.0 + 10, before.1)
        );
        assert_eq!(served.get(&prompt), 20);
        assert_eq!(served.count("transfers_failed"), before.1);
        becomes(|| served.client.metrics().unwrap().contains("kvik_store_lent_bytes 0\n"));
    }
}

#[test]
fn a_read_of_a_block_that_is_not_there_ends_with_the_answer() {
    let served = Served::new(Preference::Local, 1 << 20);
    assert_eq!(put(&served.space, &served.pages, None, &served.keys(&[1])).stored, 1);
    assert_eq!(served.get(&[1]), 1);
    let begun = Instant::now();
    for round in 0..20 {
        // The first that finds nothing has begun to read; whoever comes behind it has no reason to.
        for failed in [1, 0] {
            let (keys, before) = (served.keys(&[100 + round]), served.count("transfers_failed"));
            let mut getting = served.space.get(&keys, &served.pages.set(&[40]), Some(LONG)).unwrap();
            assert_eq!(getting.next(None).unwrap(), None);
            // Also while there is still a handle of it.
            assert_eq!(served.count("transfers_open"), 0);
            assert_eq!(served.count("transfers_failed") - before, failed);
        }
        assert_eq!(served.get(&[1]), 1);
    }
    assert!(begun.elapsed() < LONG / 2, "{:?}: they have ended by themselves", begun.elapsed());
}

#[test]
fn a_block_in_memory_of_another_layout_is_read_by_its_own_ticket() {
    // Sixteen slabs of six blocks, and what is left is room for two more.
    let served = Served::new(Preference::Local, 16 * 6 * BLOCK + 2 * BLOCK + 4096);
    let prompts = 98;
    for prompt in 0..prompts {
        assert_eq!(put(&served.space, &served.pages, None, &served.keys(&[prompt])).stored, 1);
    }
    for prompt in (0..prompts).chain((0..prompts).rev()) {
        assert_eq!(served.get(&[prompt]), 1, "block {prompt}");
    }
    // The last two lie apart from all others: once there, and once back.
    assert_eq!(served.count("transfers_failed"), 2);
}
