//! A server in a process of its own, whose system calls to its disk are meddled with, and a client that asks it.

use crate::rig::*;
use crate::tracer::{Fate, Traced};
use crate::watch;
use kvik_core::Result;
use kvik_engine::{Config, Engine};
use kvik_store::{Ack, Client, LogOptions, Server, Space, StoreOptions, Stored};
use rustix::process::{Pid, Signal};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// How long a request may take that has to succeed.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub const SYNCS: &[libc::c_long] = &[libc::SYS_fdatasync, libc::SYS_fsync];
pub const WRITES: &[libc::c_long] = &[libc::SYS_pwritev];
pub const READS: &[libc::c_long] = &[libc::SYS_preadv];
pub const CALLS: [libc::c_long; 4] =
    [libc::SYS_fdatasync, libc::SYS_fsync, libc::SYS_pwritev, libc::SYS_preadv];
/// A server that hangs is found out, and one that is only slow is not.
pub const SOON: Duration = Duration::from_secs(10);

pub fn prompt(number: u32) -> [u32; 3] {
    [number, number + 1000, number + 2000]
}

/// Everything that asks here has an answer soon, whatever that is.
pub fn soon<R>(ask: impl FnOnce() -> R) -> R {
    let began = watch::start();
    let answer = ask();
    assert!(began.elapsed() < SOON, "it took {:?}", began.elapsed());
    answer
}

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

/// A server that runs.
pub struct Serving {
    pub address: String,
    pub pid: Pid,
}

/// Runs a server on a log, and asks at each of these calls of its what becomes of it, while `work` asks the server;
/// `None` where it has ended before it said its address. The server ends when `work` has.
pub fn meddled<R>(
    (dir, size): (&Path, u64),
    calls: &[libc::c_long],
    decide: impl FnMut(libc::c_long) -> Fate + Send,
    work: impl FnOnce(Option<Serving>) -> R,
) -> R {
    let (tell, told) = channel();
    std::thread::scope(|scope| {
        let follows = scope.spawn(move || {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["meddled::child", "--exact", "--ignored", "--nocapture"]);
            command.env("KVIK_LOG_DIR", dir).env("KVIK_LOG_SIZE", size.to_string());
            command.stdin(Stdio::piped()).stdout(Stdio::piped());
            let mut traced = Traced::start(&mut command, calls).expect("a process may trace its children");
            let pid = Pid::from_child(&traced.child);
            tell.send((pid, traced.child.stdin.take(), traced.child.stdout.take())).unwrap();
            traced.run(decide).unwrap();
        });
        let (pid, stdin, stdout) = told.recv().unwrap();
        let mut lines = BufReader::new(stdout.unwrap()).lines().map_while(|line| line.ok());
        let address = lines.find_map(|line| Some(line.strip_prefix("at ")?.to_owned()));
        // One that stands still would not end by itself.
        let _ended = EndedIfItPanics(pid);
        let done = work(address.map(|address| Serving { address, pid }));
        drop(stdin);
        follows.join().unwrap();
        done
    })
}

struct EndedIfItPanics(Pid);

impl Drop for EndedIfItPanics {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let _ = rustix::process::kill_process(self.0, Signal::KILL);
        }
    }
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
        self.space.put(&keys, &self.pages.set(&ids), ack, Some(within))?.wait(None)
    }

    pub fn durable(&self, number: u32) -> Result<Stored> {
        soon(|| self.put(&prompt(number), Ack::Durable, PATIENCE))
    }

    pub fn there(&self, number: u32) -> usize {
        soon(|| self.get(&prompt(number))).unwrap()
    }

    /// What was refused is taken as soon as the disk is well, and is written again for that.
    pub fn becomes_durable(&self, number: u32) {
        // Threads of the log may still be busy with what has failed.
        becomes(|| match self.durable(number) {
            Ok(stored) => stored.stored + stored.known == 3,
            Err(_) => false,
        });
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

/// What the disk refuses.
#[derive(Default)]
pub struct Disk(pub Mutex<Trouble>);

#[derive(Default)]
pub struct Trouble {
    calls: &'static [libc::c_long],
    error: i32,
    stopped: &'static [libc::c_long],
    /// Of so many calls one fails, by chance.
    one_in: u64,
    pub random: Random,
    failed: u64,
    waited: u64,
    killed: bool,
}

impl Disk {
    pub fn fails(&self, calls: &'static [libc::c_long], error: i32, one_in: u64) {
        let mut trouble = self.0.lock().unwrap();
        (trouble.calls, trouble.error, trouble.one_in) = (calls, error, one_in);
    }

    pub fn is_well(&self) {
        self.fails(&[], 0, 1);
    }

    /// Calls are not made before the disk is well.
    pub fn stops(&self, calls: &'static [libc::c_long]) {
        self.0.lock().unwrap().stopped = calls;
    }

    /// The server does not survive its next call.
    pub fn is_gone(&self) {
        self.0.lock().unwrap().killed = true;
    }

    /// How many calls have failed.
    pub fn failed(&self) -> u64 {
        self.0.lock().unwrap().failed
    }

    /// How often a call was to wait.
    pub fn waited(&self) -> u64 {
        self.0.lock().unwrap().waited
    }

    pub fn fate(&self, call: libc::c_long) -> Fate {
        let mut trouble = self.0.lock().unwrap();
        if trouble.killed {
            return Fate::Killed;
        }
        if trouble.stopped.contains(&call) {
            trouble.waited += 1;
            return Fate::Waits;
        }
        let one_in = trouble.one_in;
        if !trouble.calls.contains(&call) || trouble.random.below(one_in) > 0 {
            return Fate::Goes;
        }
        trouble.failed += 1;
        Fate::Fails(trouble.error)
    }
}
