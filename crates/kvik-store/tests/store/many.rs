//! A store of several servers: where blocks lie, and what it costs when some of the servers do not answer.

use crate::rig::*;
use crate::watch;
use kvik_core::Code;
use kvik_engine::{Config, Engine};
use kvik_store::{Ack, BlockKey, Chain, Client, Server, Servers, Space, StoreOptions, Stored};
use std::time::{Duration, Instant};

/// Blocks of a prompt: several segments, and a part of one.
const BLOCKS: u32 = 300;

/// A server with an engine of its own.
pub struct Member {
    engine: Engine,
    pub server: Server,
}

impl Member {
    pub fn start() -> Member {
        Member::with(&StoreOptions { memory: 64 << 20, ..StoreOptions::default() })
    }

    pub fn with(options: &StoreOptions) -> Member {
        let engine = Engine::start(Config::default()).unwrap();
        let server = Server::start(&engine, options).unwrap();
        Member { engine, server }
    }

    pub fn address(&self) -> String {
        self.engine.addresses()[0].to_string()
    }

    pub fn blocks(&self) -> u64 {
        self.server.counts().blocks
    }
}

pub fn addresses(members: &[&Member]) -> Vec<String> {
    members.iter().map(|member| member.address()).collect()
}

/// A client of several servers, with pages of its own.
pub struct Asking {
    pub client: Client,
    space: Space,
    pages: Pages,
}

impl Asking {
    pub fn of(servers: &[String], copies: usize) -> Asking {
        Asking::at(&Servers::parse(servers).unwrap(), copies)
    }

    fn at(servers: &Servers, copies: usize) -> Asking {
        let engine = Engine::start(Config::default()).unwrap();
        let client = Client::connect_to(&engine, servers, copies, None).unwrap();
        let space = client.open("one", &namespace("tiny"), shape()).unwrap();
        let pages = Pages::new(&engine, BLOCKS, shape());
        Asking { client, space, pages }
    }

    pub fn put(&self, chain: Chain<'_>, deadline: Option<Duration>) -> kvik_core::Result<Stored> {
        let ids: Vec<u32> = (0..chain.keys().len() as u32).collect();
        chain.keys().iter().zip(&ids).for_each(|(key, page)| self.pages.fill(*page, key));
        self.space.put(chain, &self.pages.set(&ids), Ack::Stored, deadline)?.wait(None)
    }

    /// How many blocks come, each compared: whatever is missing, none is another.
    pub fn get(&self, chain: Chain<'_>, deadline: Option<Duration>) -> kvik_core::Result<usize> {
        let ids: Vec<u32> = (0..chain.keys().len() as u32).collect();
        ids.iter().for_each(|page| self.pages.wipe(*page));
        let mut getting = self.space.get(chain, &self.pages.set(&ids), deadline)?;
        let mut last = 0;
        while let Some(verified) = getting.next(None)? {
            assert!(verified > last, "{verified} after {last}");
            (last..verified)
                .for_each(|at| assert!(self.pages.holds(ids[at], &chain.keys()[at]), "block {at}"));
            last = verified;
        }
        Ok(last)
    }
}

pub fn prompt(first: u32) -> Vec<BlockKey> {
    keys(&namespace("tiny"), &(first..first + BLOCKS).collect::<Vec<u32>>())
}

#[test]
fn a_prompt_lies_on_several_servers_and_is_read_from_anywhere() {
    let members = [Member::start(), Member::start(), Member::start()];
    let all: Vec<&Member> = members.iter().collect();
    let (one, other) = (Asking::of(&addresses(&all), 1), Asking::of(&addresses(&all), 1));
    for first in [0, 1000, 2000, 3000] {
        let keys = prompt(first);
        // In two calls, of which the second one begins amid a segment.
        let (begin, end) = keys.split_at(100);
        assert_eq!(one.put(Chain::from(begin), None).unwrap().stored, 100);
        assert_eq!(one.put(Chain::after(begin, end), None).unwrap().stored, 200);
        assert_eq!(other.get(Chain::from(&keys), None).unwrap(), 300);
        for from in [1, 63, 64, 130, 299] {
            let chain = Chain::after(&keys[..from], &keys[from..]);
            assert_eq!(other.get(chain, None).unwrap(), 300 - from);
            assert!(other.space.contains(chain).unwrap().iter().all(|here| *here));
            assert_eq!(other.space.prefetch(chain).unwrap(), (300 - from) as u64);
            assert_eq!(other.space.pin(chain, Duration::ZERO).unwrap(), (300 - from) as u64);
        }
    }
    let shares: Vec<u64> = members.iter().map(Member::blocks).collect();
    println!("{shares:?}");
    assert_eq!((shares.iter().sum::<u64>(), one.client.stat().unwrap().blocks), (1200, 1200));
    let text = one.client.metrics().unwrap();
    for member in &members {
        assert!(text.contains(&format!("kvik_store_blocks{{member=\"{}\"}}", member.address())), "{text}");
    }
    // What is removed is gone at every server, and what comes after it is not found.
    let keys = prompt(0);
    let removed = one.space.remove(&keys[70..72]).unwrap();
    // Segments that follow one another at one server, and were put together, hang together.
    assert!((58..=230).contains(&removed), "{removed}");
    assert_eq!(other.get(Chain::from(&keys), None).unwrap(), 70);
    assert_eq!(one.space.clear().unwrap(), 1200 - removed);
}

#[test]
fn a_put_is_taken_up_before_it_is_stored() {
    let members = [Member::start(), Member::start()];
    let asking = Asking::of(&addresses(&members.iter().collect::<Vec<_>>()), 2);
    let (keys, ids) = (prompt(0), (0..BLOCKS).collect::<Vec<u32>>());
    keys.iter().zip(&ids).for_each(|(key, page)| asking.pages.fill(*page, key));
    let mut putting = asking.space.put(&keys, &asking.pages.set(&ids), Ack::Accepted, None).unwrap();
    assert_eq!(putting.acknowledged(None).unwrap(), None);
    assert_eq!(putting.wait(None).unwrap().stored, 300);
    // Without a log nothing is durable, which the servers say; it is not their loss.
    let mut refused = asking.space.put(&keys, &asking.pages.set(&ids), Ack::Durable, None).unwrap();
    assert_eq!(refused.wait(None).unwrap_err().code, Code::InvalidArgument);
    assert!(asking.client.members().iter().all(|member| member.up && member.unanswered == 0));
}

#[test]
fn a_copy_answers_for_a_server_that_has_gone() {
    let mut members = vec![Member::start(), Member::start(), Member::start()];
    let asking = Asking::of(&addresses(&members.iter().collect::<Vec<_>>()), 2);
    let keys = prompt(0);
    assert_eq!(asking.put(Chain::from(&keys), None).unwrap().stored, 300);
    assert_eq!(members.iter().map(Member::blocks).sum::<u64>(), 600);
    let gone = members.remove(0);
    gone.engine.close(Duration::from_secs(60)).unwrap();
    drop(gone);
    assert_eq!(asking.get(Chain::from(&keys), None).unwrap(), 300);
    assert!(asking.space.contains(&keys).unwrap().iter().all(|here| *here));
    // What is put meanwhile is taken by the others; a removal that one has not heard of is not all done.
    assert_eq!(asking.put(Chain::from(&prompt(1000)), None).unwrap().refused, 0);
    assert_eq!(asking.space.clear().unwrap_err().code, Code::StoreUnavailable);
    assert_eq!(members.iter().map(Member::blocks).sum::<u64>(), 0);
    let up = asking.client.members().iter().filter(|member| member.up).count();
    assert_eq!(up, 2);
}

#[test]
fn servers_that_do_not_answer_cost_one_deadline_in_all() {
    let members = [Member::start(), Member::start(), Member::start(), Member::start()];
    let asking = Asking::of(&addresses(&members.iter().collect::<Vec<_>>()), 4);
    let keys = prompt(0);
    asking.put(Chain::from(&keys), None).unwrap();
    // Their engines go on: requests arrive, and nobody answers them.
    members.iter().for_each(|member| member.server.stop());
    let (deadline, begun) = (Duration::from_secs(4), watch::start());
    let found = asking.get(Chain::from(&keys), Some(deadline));
    println!("{found:?} after {:?}", begun.elapsed());
    assert!(found.is_ok_and(|found| found == 0) || !asking.client.members().iter().any(|member| member.up));
    // A deadline for each copy would be four of them.
    assert!(begun.elapsed() < 2 * deadline, "it took {:?}", begun.elapsed());
    // Of those that were not given all of the time it shows a little later.
    becomes(|| !asking.client.members().iter().any(|member| member.up));
    let begun = watch::start();
    assert_eq!(asking.get(Chain::from(&keys), Some(deadline)).unwrap_err().code, Code::StoreUnavailable);
    assert!(begun.elapsed() < deadline / 2, "it took {:?} to hear that they are down", begun.elapsed());
}

#[test]
fn one_copy_that_does_not_answer_leaves_time_for_the_other() {
    let members = [Member::start(), Member::start(), Member::start()];
    let asking = Asking::of(&addresses(&members.iter().collect::<Vec<_>>()), 2);
    let keys = prompt(0);
    asking.put(Chain::from(&keys), None).unwrap();
    members[1].server.stop();
    let deadline = Duration::from_secs(10);
    assert_eq!(asking.get(Chain::from(&keys), Some(deadline)).unwrap(), 300);
    assert!(asking.space.contains(&keys).unwrap().iter().all(|here| *here));
}

#[test]
fn a_server_owes_nothing_while_nobody_waits_for_it() {
    let members = [Member::start(), Member::start(), Member::start()];
    let asking = Asking::of(&addresses(&members.iter().collect::<Vec<_>>()), 3);
    let keys = prompt(0);
    asking.put(Chain::from(&keys), None).unwrap();
    let ids: Vec<u32> = (0..BLOCKS).collect();
    let deadline = Duration::from_secs(6);
    let getting = (0..5).find_map(|_| {
        let began = Instant::now();
        let mut getting = asking.space.get(&keys, &asking.pages.set(&ids), Some(deadline)).unwrap();
        getting.next(None).unwrap();
        // The caller does something else for longer than one copy of three may take, and leaves time for the rest.
        std::thread::park_timeout(deadline / 2);
        (began.elapsed() < deadline * 2 / 3).then_some(getting)
    });
    assert_eq!(getting.expect("the machine stood still each time").wait().unwrap(), 300);
    assert!(asking.client.members().iter().all(|member| member.up && member.unanswered == 0));
}

#[test]
fn clients_that_know_other_servers_miss_and_read_nothing_else() {
    let members = [Member::start(), Member::start(), Member::start()];
    let all = addresses(&members.iter().collect::<Vec<_>>());
    let (three, two) = (Asking::of(&all, 1), Asking::of(&all[..2], 1));
    let mut found = 0;
    for first in 0..10 {
        let keys = prompt(first * 1000);
        assert_eq!(three.put(Chain::from(&keys), None).unwrap().refused, 0);
        found += two.get(Chain::from(&keys), None).unwrap();
        // It puts what it has not found, and then both find all of it, each where it looks.
        assert_eq!(two.put(Chain::from(&keys), None).unwrap().refused, 0);
        assert_eq!(two.get(Chain::from(&keys), None).unwrap(), 300);
        assert_eq!(three.get(Chain::from(&keys), None).unwrap(), 300);
        three.space.clear().unwrap();
    }
    println!("{found} of 3000 blocks were where the other one looks");
}

#[test]
fn a_server_that_joins_takes_its_share_as_it_is_put() {
    let members = [Member::start(), Member::start(), Member::start()];
    let all = addresses(&members.iter().collect::<Vec<_>>());
    let folder = Folder::new("servers");
    std::fs::create_dir_all(&folder.0).unwrap();
    let list = folder.0.join("list");
    std::fs::write(&list, format!("# of this test\n{}\n{}\n", all[0], all[1])).unwrap();
    let asking = Asking::at(&Servers::File(list.clone()), 1);
    let prompts: Vec<Vec<BlockKey>> = (0..8).map(|first| prompt(first * 1000)).collect();
    for keys in &prompts {
        assert_eq!(asking.put(Chain::from(keys), None).unwrap().refused, 0);
    }
    // A list that cannot be used changes nothing.
    std::fs::write(&list, "nobody\n").unwrap();
    assert_eq!(asking.get(Chain::from(&prompts[0]), None).unwrap(), 300);
    std::fs::write(&list, all.join("\n")).unwrap();
    becomes(|| asking.client.members().iter().filter(|member| member.up).count() == 3);
    let here =
        |keys: &Vec<BlockKey>| asking.space.contains(keys).unwrap().iter().filter(|here| **here).count();
    let stayed: usize = prompts.iter().map(here).sum();
    println!("{stayed} of 2400 blocks are where they were");
    assert_eq!(members[2].blocks(), 0);
    for keys in &prompts {
        let missing = asking.get(Chain::from(keys), None).unwrap();
        let put = asking.put(Chain::from(keys), None).unwrap();
        assert_eq!((put.refused, asking.get(Chain::from(keys), None).unwrap()), (0, 300));
        assert!(missing <= 300);
    }
    // Only what has moved was put again, all of it at who has joined.
    assert_eq!(members[2].blocks() as usize, 2400 - stayed);
    std::fs::write(&list, all[..2].join("\n")).unwrap();
    becomes(|| asking.client.members().len() == 2);
    assert_eq!(asking.get(Chain::from(&prompts[0]), None).unwrap(), 300);
}
