//! Server processes that a schedule kills, stops, and starts again with some disk or none, and what listens where a server
//! might and is none.

use crate::rig::Random;
use kvik_engine::{Config, Engine};
use kvik_store::{LogOptions, Server, StoreOptions};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

/// Servers there are at most.
const MOST: usize = 6;
/// So small that blocks have to go, in memory and on the disk.
const MEMORY: u64 = 1 << 20;
const LOG: u64 = 1 << 20;

/// A server; it is run by schedules.
#[test]
#[ignore = "a part of another test"]
fn member() {
    let Ok(at) = std::env::var("KVIK_MEMBER_AT") else { return };
    let config = Config { listen: vec![at.parse().unwrap()], ..Config::default() };
    let engine = Engine::start(config).unwrap();
    let log = std::env::var_os("KVIK_MEMBER_DISK").map(|disk| {
        let options = LogOptions { segment: Some(128 << 10), ..LogOptions::new(LOG) };
        (PathBuf::from(disk), options)
    });
    let options = StoreOptions { memory: MEMORY, log, ..StoreOptions::default() };
    let server = Server::start(&engine, &options).unwrap();
    println!("\nat {}", engine.addresses()[0]);
    // Until the parent is gone, if it does not kill this before.
    let _ = std::io::stdin().read_line(&mut String::new());
    drop(server);
}

/// A server that runs, or has been stopped.
struct Running {
    child: Child,
    /// Open as long as it runs: after a minute the test that it is in says so, and would end where nobody can read it.
    out: BufReader<ChildStdout>,
    disk: Option<usize>,
    stopped: bool,
}

impl Running {
    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Where a server is, or was.
struct Place {
    address: String,
    running: Option<Running>,
}

/// The servers of a schedule.
pub struct Members {
    places: Vec<Place>,
    disks: Vec<PathBuf>,
    /// Takes connections, and says nothing.
    mute: TcpListener,
    /// Answers whatever it is told with something else.
    other: String,
}

impl Members {
    /// So many, each with a disk or without one.
    pub fn start(folder: &Path, count: usize, random: &mut Random) -> Members {
        let disks = (0..MOST).map(|disk| folder.join(format!("disk-{disk}"))).collect();
        let mute = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut members = Members { places: Vec::new(), disks, mute, other: another_protocol() };
        for _ in 0..count {
            members.joins(random);
        }
        assert_eq!(members.places.len(), count, "a server did not start");
        members
    }

    /// Of all servers, whether they run or not.
    pub fn addresses(&self) -> Vec<String> {
        self.places.iter().map(|place| place.address.clone()).collect()
    }

    /// Lets something happen, to a server or to a client's list; what it was.
    pub fn event(&mut self, list: &Path, random: &mut Random) -> String {
        match random.below(10) {
            0 | 1 => self.dies(random),
            2 => self.stops(random),
            3 => self.goes_on(random),
            4 | 5 => self.comes_back(random),
            6 => self.joins(random),
            _ => None,
        }
        .unwrap_or_else(|| self.lists(list, random))
    }

    /// Everything runs, at the addresses that there are now.
    pub fn heal(&mut self) {
        for place in &mut self.places {
            match &mut place.running {
                Some(running) => {
                    let ended = running.child.try_wait().unwrap();
                    assert!(ended.is_none(), "the server at {} ended by itself: {ended:?}", place.address);
                    running.signal(Signal::CONT);
                }
                none => *none = start(&place.address, None).map(|(running, _)| running),
            }
        }
        // Another process may have taken its address meanwhile.
        self.places.retain(|place| place.running.is_some());
        assert!(!self.places.is_empty());
    }

    /// One of those of which something is so.
    fn one(&mut self, random: &mut Random, so: impl Fn(&Place) -> bool) -> Option<&mut Place> {
        let count = self.places.iter().filter(|place| so(place)).count() as u64;
        let which = (count > 0).then(|| random.below(count))?;
        self.places.iter_mut().filter(|place| so(place)).nth(which as usize)
    }

    fn dies(&mut self, random: &mut Random) -> Option<String> {
        let place = self.one(random, |place| place.running.is_some())?;
        place.running = None;
        Some(format!("{} dies", place.address))
    }

    fn stops(&mut self, random: &mut Random) -> Option<String> {
        let place = self.one(random, |place| place.running.as_ref().is_some_and(|one| !one.stopped))?;
        let running = place.running.as_mut()?;
        running.signal(Signal::STOP);
        running.stopped = true;
        Some(format!("{} stops", place.address))
    }

    fn goes_on(&mut self, random: &mut Random) -> Option<String> {
        let place = self.one(random, |place| place.running.as_ref().is_some_and(|one| one.stopped))?;
        let running = place.running.as_mut()?;
        running.signal(Signal::CONT);
        running.stopped = false;
        Some(format!("{} goes on", place.address))
    }

    /// A server is started where one was: with a disk that this or another one had, which may be damaged, or with none.
    fn comes_back(&mut self, random: &mut Random) -> Option<String> {
        let disk = self.free_disk(random);
        let damaged = match disk {
            Some(disk) if random.below(3) == 0 => damage(&self.disks[disk], random),
            _ => false,
        };
        let path = disk.map(|disk| self.disks[disk].clone());
        let place = self.one(random, |place| place.running.is_none())?;
        let told = format!("{} is back with {path:?}, damaged: {damaged}", place.address);
        match start(&place.address, path.clone()) {
            Some((mut running, _)) => {
                running.disk = disk;
                place.running = Some(running);
            }
            // It says why; its operator gives it another disk.
            None => path.iter().for_each(|path| drop(std::fs::remove_dir_all(path))),
        }
        Some(told)
    }

    fn joins(&mut self, random: &mut Random) -> Option<String> {
        if self.places.len() == MOST {
            return None;
        }
        let disk = self.free_disk(random);
        let (mut running, address) = start("127.0.0.1:0", disk.map(|disk| self.disks[disk].clone()))?;
        running.disk = disk;
        let told = format!("{address} joins");
        self.places.push(Place { address, running: Some(running) });
        Some(told)
    }

    /// A disk that no process has, or none.
    fn free_disk(&self, random: &mut Random) -> Option<usize> {
        let taken = |disk: &usize| {
            self.places.iter().any(|place| place.running.as_ref().is_some_and(|one| one.disk == Some(*disk)))
        };
        let free: Vec<usize> = (0..self.disks.len()).filter(|disk| !taken(disk)).collect();
        let which = random.below(2 * free.len().max(1) as u64) as usize;
        free.get(which).copied()
    }

    /// A client's list becomes another: some of the servers, what is none, or nothing that can be read.
    fn lists(&self, list: &Path, random: &mut Random) -> String {
        let mut lines: Vec<String> = self.addresses().into_iter().filter(|_| random.below(4) > 0).collect();
        let strangers =
            [self.mute.local_addr().unwrap().to_string(), self.other.clone(), "nobody".to_owned()];
        lines.extend(strangers.into_iter().filter(|_| random.below(6) == 0));
        for at in (1..lines.len()).rev() {
            lines.swap(at, random.below(at as u64 + 1) as usize);
        }
        write_list(list, &lines);
        format!("a client is told of {lines:?}")
    }
}

/// Replaces a list as a whole, so that nobody reads half of it.
pub fn write_list(list: &Path, lines: &[String]) {
    let next = list.with_extension("next");
    std::fs::write(&next, lines.join("\n")).unwrap();
    std::fs::rename(next, list).unwrap();
}

/// Starts a server; none where it does not come up, and says why.
fn start(at: &str, disk: Option<PathBuf>) -> Option<(Running, String)> {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["members::member", "--exact", "--ignored", "--nocapture"]);
    command.env("KVIK_MEMBER_AT", at).stdin(Stdio::piped()).stdout(Stdio::piped());
    command.envs(disk.map(|disk| ("KVIK_MEMBER_DISK", disk)));
    let mut child = command.spawn().unwrap();
    let out = BufReader::new(child.stdout.take().unwrap());
    let mut running = Running { child, out, disk: None, stopped: false };
    let mut lines = running.out.by_ref().lines().map_while(|line| line.ok());
    let address = lines.find_map(|line| Some(line.strip_prefix("at ")?.to_owned()))?;
    Some((running, address))
}

/// Flips a bit somewhere on a disk; false where there is nothing.
fn damage(disk: &Path, random: &mut Random) -> bool {
    let files: Vec<PathBuf> =
        std::fs::read_dir(disk).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    if files.is_empty() {
        return false;
    }
    let path = &files[random.below(files.len() as u64) as usize];
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    let length = file.metadata().unwrap().len();
    if length == 0 {
        return false;
    }
    let (at, mut byte) = (random.below(length), [0]);
    file.read_exact_at(&mut byte, at).unwrap();
    byte[0] ^= 1 << random.below(8);
    file.write_all_at(&byte, at).unwrap();
    true
}

/// The address of something that speaks another protocol. Its thread ends with the process.
fn another_protocol() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            drop(stream.write_all(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"));
        }
    });
    address
}
