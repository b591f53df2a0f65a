//! A server in a process of its own, whose system calls to its disk are meddled with, and a client that asks it.

use crate::rig::*;
use crate::tracer::{Fate, Traced};
use kvik_core::Result;
use kvik_engine::{Config, Engine};
use kvik_store::{Ack, Client, LogOptions, Server, Space, StoreOptions, Stored};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// How long a request may take that has to succeed.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// A small store over a log of so many bytes.
pub fn options(dir: &Path, size: u64) -> StoreOptions {
    let log = LogOptions { segment: Some(128 << 10), ..LogOptions::new(size) };
    StoreOptions { memory: 1 << 20, log: Some((dir.to_owned(), log)), ..StoreOptions::default() }
}

/// The server; it is run by other tests.
#[test]
#[ignore = "a part of other tests"]
fn child() {
    let Some(dir) = std::env::var_os("KVIK_LOG_DIR").map(PathBuf::from) else { return };
    let size = std::env::var("KVIK_LOG_SIZE").unwrap().parse().unwrap();
    let engine = Engine::start(Config::default()).unwrap();
    let server = Server::start(&engine, &options(&dir, size)).unwrap();
    println!("\nat {}", engine.addresses()[0]);
    // Until the parent is done, or gone.
    let _ = std::io::stdin().read_line(&mut String::new());
    drop(server);
}

/// Runs a server on a log, and asks at each of these calls of its what becomes of it. Meanwhile `work` has its address;
/// `None` where it has ended before it said that. The server ends when `work` has.
pub fn meddled<R>(
    (dir, size): (&Path, u64),
    calls: &[libc::c_long],
    decide: impl FnMut(libc::c_long) -> Fate + Send,
    work: impl FnOnce(Option<String>) -> R,
) -> R {
    let (tell, told) = channel();
    std::thread::scope(|scope| {
        let follows = scope.spawn(move || {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["meddled::child", "--exact", "--ignored", "--nocapture"]);
            command.env("KVIK_LOG_DIR", dir).env("KVIK_LOG_SIZE", size.to_string());
            command.stdin(Stdio::piped()).stdout(Stdio::piped());
            let mut traced = Traced::start(&mut command, calls).expect("a process may trace its children");
            tell.send((traced.child.stdin.take(), traced.child.stdout.take())).unwrap();
            traced.run(decide).unwrap();
        });
        let (stdin, stdout) = told.recv().unwrap();
        let mut lines = BufReader::new(stdout.unwrap()).lines().map_while(|line| line.ok());
        let done = work(lines.find_map(|line| Some(line.strip_prefix("at ")?.to_owned())));
        drop(stdin);
        follows.join().unwrap();
        done
    })
}

/// A client, and pages for what it puts and gets.
pub struct Asking {
    pub client: Client,
    pub space: Space,
    /// How long it took to open, with the log if it is embedded.
    pub opened: Duration,
    pages: Pages,
    _engine: Engine,
}

impl Asking {
    pub fn server(address: &str) -> Result<Asking> {
        let engine = Engine::start(Config::default()).unwrap();
        Asking::of(engine, |engine| Client::connect(engine, address, Some(PATIENCE)))
    }

    pub fn embedded(options: &StoreOptions) -> Result<Asking> {
        let engine = Engine::start(Config::default()).unwrap();
        Asking::of(engine, |engine| Client::embedded(engine, options))
    }

    fn of(engine: Engine, open: impl FnOnce(&Engine) -> Result<Client>) -> Result<Asking> {
        let began = Instant::now();
        let client = open(&engine)?;
        let opened = began.elapsed();
        let space = client.open("one", &namespace("tiny"), shape())?;
        let pages = Pages::new(&engine, 64, shape());
        Ok(Asking { client, space, opened, pages, _engine: engine })
    }

    pub fn put(&self, prompt: &[u32], ack: Ack, within: Duration) -> Result<Stored> {
        let keys = keys(&namespace("tiny"), prompt);
        let ids: Vec<u32> = (0..keys.len() as u32).collect();
        keys.iter().zip(&ids).for_each(|(key, page)| self.pages.fill(*page, key));
        self.space.put(None, &keys, &self.pages.set(&ids), ack, Some(within))?.wait(None)
    }

    /// How many blocks of a prompt are there; each of them is compared.
    pub fn get(&self, prompt: &[u32]) -> Result<usize> {
        let keys = keys(&namespace("tiny"), prompt);
        let ids: Vec<u32> = (0..keys.len() as u32).map(|page| page + 20).collect();
        ids.iter().for_each(|page| self.pages.wipe(*page));
        let there = self.space.get(&keys, &self.pages.set(&ids), Some(PATIENCE))?.wait()?;
        (0..there).for_each(|at| assert!(self.pages.holds(ids[at], &keys[at]), "block {at} is another"));
        Ok(there)
    }
}
