//! A server is killed at the system calls by which it changes its disk, while a client puts, gets and removes; then its
//! log is opened again and asked for everything.

use crate::rig::*;
use crate::tracer::Traced;
use kvik_core::Result;
use kvik_engine::{Config, Engine};
use kvik_store::{Ack, Client, LogOptions, Server, Space, StoreOptions};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// Prompts that are put: more than the log has room for.
const PROMPTS: u32 = 40;
/// Of those that were put last, so many are always in the log: it drops from its oldest part on.
const LATE: usize = 4;
/// Asked for after every put, so never dropped.
const FAVOURITE: [u32; 3] = [9001, 9002, 9003];
/// One call in so many is killed at; `KVIK_KILLS=all` kills at each.
const STRIDE: u64 = 7;
const PATIENCE: Duration = Duration::from_secs(20);

fn options(dir: &Path) -> StoreOptions {
    let log = LogOptions { segment: Some(128 << 10), ..LogOptions::new(1 << 20) };
    StoreOptions { memory: 1 << 20, log: Some((dir.to_owned(), log)), ..StoreOptions::default() }
}

/// The server; it is run by the test below.
#[test]
#[ignore = "a part of another test"]
fn child() {
    let Some(dir) = std::env::var_os("KVIK_LOG_DIR").map(PathBuf::from) else { return };
    let engine = Engine::start(Config::default()).unwrap();
    let server = Server::start(&engine, &options(&dir)).unwrap();
    println!("\nat {}", engine.addresses()[0]);
    // Until the parent is done, or gone.
    let _ = std::io::stdin().read_line(&mut String::new());
    drop(server);
}

fn prompt(number: u32) -> [u32; 3] {
    [number, number + 1000, number + 2000]
}

/// What the server has acknowledged.
#[derive(Default)]
struct Ledger {
    favourite: bool,
    durable: Vec<u32>,
    /// Of these no more than the first block may be found.
    removed: Vec<u32>,
    /// A removal that nobody has an answer to.
    doubtful: Option<u32>,
}

struct Asking {
    space: Space,
    pages: Pages,
}

impl Asking {
    fn put(&self, prompt: &[u32]) -> Result<()> {
        let keys = keys(&namespace("tiny"), prompt);
        let ids: Vec<u32> = (0..keys.len() as u32).collect();
        keys.iter().zip(&ids).for_each(|(key, page)| self.pages.fill(*page, key));
        let mut put = self.space.put(None, &keys, &self.pages.set(&ids), Ack::Durable, Some(PATIENCE))?;
        assert_eq!(put.wait(None)?.refused, 0, "{prompt:?}");
        Ok(())
    }

    fn get(&self, prompt: &[u32]) -> Result<usize> {
        let keys = keys(&namespace("tiny"), prompt);
        let ids: Vec<u32> = (0..keys.len() as u32).map(|page| page + 20).collect();
        let there = self.space.get(&keys, &self.pages.set(&ids), Some(PATIENCE))?.wait()?;
        (0..there).for_each(|at| assert!(self.pages.holds(ids[at], &keys[at]), "block {at} is another"));
        Ok(there)
    }

    /// Puts, gets and removes until the server is gone, or nothing is left to do.
    fn work(&self, ledger: &mut Ledger) -> Result<()> {
        self.put(&FAVOURITE)?;
        ledger.favourite = true;
        for number in 0..PROMPTS {
            self.put(&prompt(number))?;
            ledger.durable.push(number);
            assert_eq!(self.get(&FAVOURITE)?, FAVOURITE.len(), "after {number}");
            if number % 5 == 4 {
                let gone = number - 1;
                ledger.durable.retain(|other| *other != gone);
                ledger.doubtful = Some(gone);
                self.space.remove(&keys(&namespace("tiny"), &prompt(gone))[1..])?;
                ledger.removed.push(gone);
                ledger.doubtful = None;
            }
        }
        Ok(())
    }
}

/// How many calls the server made, and what it had acknowledged when it was killed at one of them.
fn killed_at(dir: &Path, at: u64) -> (u64, Ledger) {
    let mut ledger = Ledger::default();
    let (tell, told) = channel();
    let calls = std::thread::scope(|scope| {
        let follows = scope.spawn(move || {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["crash::child", "--exact", "--ignored", "--nocapture"]).env("KVIK_LOG_DIR", dir);
            command.stdin(Stdio::piped()).stdout(Stdio::piped());
            let mut traced = Traced::start(&mut command).expect("a process may trace its children");
            tell.send((traced.child.stdin.take(), traced.child.stdout.take())).unwrap();
            traced.run(at).unwrap()
        });
        let (stdin, stdout) = told.recv().unwrap();
        let mut lines = BufReader::new(stdout.unwrap()).lines().map_while(|line| line.ok());
        let address = lines.find_map(|line| Some(line.strip_prefix("at ")?.to_owned()));
        if let Some(address) = address {
            let engine = Engine::start(Config::default()).unwrap();
            let worked = Client::connect(&engine, &address, Some(PATIENCE)).and_then(|client| {
                let space = client.open("one", &namespace("tiny"), shape())?;
                Asking { space, pages: Pages::new(&engine, 64, shape()) }.work(&mut ledger)
            });
            assert!(worked.is_ok() || at < u64::MAX, "{worked:?}");
        }
        drop(stdin);
        follows.join().unwrap()
    });
    (calls, ledger)
}

/// Opens the log again and asks for everything: the seconds to open it, and how many blocks had to be there.
fn check(dir: &Path, ledger: &Ledger, context: &str) -> (Duration, u64) {
    let engine = Engine::start(Config::default()).unwrap();
    let begun = Instant::now();
    let client =
        Client::embedded(&engine, &options(dir)).unwrap_or_else(|error| panic!("{context}: {error}"));
    let opened = begun.elapsed();
    let space = client.open("one", &namespace("tiny"), shape()).unwrap();
    let asking = Asking { space, pages: Pages::new(&engine, 64, shape()) };
    // Each block that comes is compared.
    let found = |prompt: &[u32]| asking.get(prompt).unwrap_or_else(|error| panic!("{context}: {error}"));
    let favourite = found(&FAVOURITE);
    assert!(favourite == 3 || !ledger.favourite, "{context}: of the favourite {favourite} blocks are there");
    let late = ledger.durable.iter().rev().take(LATE);
    let mut needed = 3 * u64::from(ledger.favourite);
    for number in late.filter(|number| ledger.doubtful != Some(**number)) {
        assert_eq!(found(&prompt(*number)), 3, "{context}: prompt {number} was durable");
        needed += 3;
    }
    for number in (0..PROMPTS).filter(|number| !ledger.durable.contains(number)) {
        let there = found(&prompt(number));
        assert!(there < 2 || !ledger.removed.contains(&number), "{context}: prompt {number} was removed");
    }
    assert_eq!(client.stat().unwrap().corrupt, 0, "{context}");
    (opened, needed)
}

#[test]
fn a_server_may_be_killed_at_any_write() {
    let seed = Random::new().next();
    let stride = if std::env::var_os("KVIK_KILLS").is_some_and(|all| all == "all") { 1 } else { STRIDE };
    let folder =
        |at: u64| std::env::temp_dir().join(format!("kvik-server-crash-{}-{at}", std::process::id()));
    let whole = folder(0);
    let (all, ledger) = killed_at(&whole, u64::MAX);
    assert!(ledger.removed.len() == 8 && all > 150, "{all} calls: too few for this to mean anything");
    std::fs::remove_dir_all(&whole).unwrap();
    let (mut kills, mut needed, mut slowest) = (0, 0, Duration::ZERO);
    for at in (1..=all).filter(|at| at % stride == seed % stride) {
        let dir = folder(at);
        let (calls, ledger) = killed_at(&dir, at);
        let context = format!("KVIK_SEED={seed} killed at call {at} of {all}");
        let (opened, had_to_be) = check(&dir, &ledger, &context);
        (kills, needed, slowest) = (kills + u64::from(calls == at), needed + had_to_be, slowest.max(opened));
        std::fs::remove_dir_all(&dir).unwrap();
    }
    println!("{kills} kills at {all} calls: {needed} blocks had to be there, opened in {slowest:?} at most");
    assert!(kills > all / stride / 2 && needed > kills, "the server was seldom killed");
}
