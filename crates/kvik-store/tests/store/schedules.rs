//! Servers that die, stop, come back with other disks, and join, below clients of which each knows a list of its own: by
//! random schedules, with processes that are really killed.
//!
//! `KVIK_STORE_SCHEDULES=500` runs so many. With `KVIK_SEED` the first one is that of the seed; how threads meet is not
//! repeated by it.

use crate::members::*;
use crate::rig::*;
use crate::watch;
use kvik_core::Code;
use kvik_engine::{Config, Engine, Preference};
use kvik_store::{Ack, BlockKey, Chain, Client, Servers, Shape, Space};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

/// How many there are if nobody says.
const SCHEDULES: u64 = 6;
/// They mostly wait.
const AT_ONCE: u64 = 4;
const EVENTS: u64 = 10;
const CLIENTS: u64 = 2;
/// Of each put and get.
const DEADLINE: Duration = Duration::from_secs(1);
/// For whatever has to come at last.
const LIMIT: Duration = Duration::from_secs(60);
const PROMPTS: u64 = 12;
/// Blocks of a prompt: two segments, and a part of one.
const BLOCKS: u32 = 150;
const MODELS: [&str; 2] = ["tiny", "other"];

fn small() -> Shape {
    Shape::new(2, 1, 512).unwrap()
}

fn prompt(model: usize, number: u64) -> Vec<BlockKey> {
    let first = number as u32 * 1000;
    keys(&namespace(MODELS[model]), &(first..first + BLOCKS).collect::<Vec<u32>>())
}

/// What clients have seen.
#[derive(Default)]
struct Seen {
    calls: u64,
    asked: u64,
    found: u64,
    longest: Duration,
    errors: BTreeMap<&'static str, u64>,
}

impl Seen {
    fn and(&mut self, other: &Seen) {
        self.calls += other.calls;
        self.asked += other.asked;
        self.found += other.found;
        self.longest = self.longest.max(other.longest);
        for (code, count) in &other.errors {
            *self.errors.entry(*code).or_default() += count;
        }
    }
}

/// A client with a list of servers that is its own.
struct Asking {
    context: String,
    client: Client,
    spaces: Vec<Space>,
    pages: Pages,
    seen: Seen,
    engine: Engine,
}

impl Asking {
    fn new(context: &str, list: PathBuf, random: &mut Random) -> Asking {
        let transport = if random.below(2) == 0 { Preference::Auto } else { Preference::Tcp };
        let engine = Engine::start(Config { transport, ..Config::default() }).unwrap();
        let copies = 1 + random.below(3) as usize;
        let servers = Servers::File(list);
        let client = Client::connect_to(&engine, &servers, copies, Some(LIMIT)).unwrap();
        let open = |model: &&str| client.open("one", &namespace(model), small()).unwrap();
        let spaces = MODELS.iter().map(open).collect();
        let pages = Pages::new(&engine, BLOCKS, small());
        let context = format!("{context}, {copies} copies, {transport:?}");
        Asking { context, client, spaces, pages, seen: Seen::default(), engine }
    }

    /// Makes a call. What it says when servers are lost is expected, and everything else is a fault.
    fn call<R>(&mut self, what: &str, call: impl FnOnce(&Asking) -> kvik_core::Result<R>) -> Option<R> {
        let began = watch::start();
        let answer = call(self);
        let took = began.elapsed();
        // A second server that is waited for takes as long again.
        assert!(took < DEADLINE * 3 / 2, "{}: {what} took {took:?}", self.context);
        self.seen.longest = self.seen.longest.max(took);
        self.seen.calls += 1;
        let error = match answer {
            Ok(answer) => return Some(answer),
            Err(error) => error,
        };
        assert!(
            matches!(error.code, Code::StoreUnavailable | Code::DeadlineExceeded),
            "{}: {what}: {error}",
            self.context
        );
        *self.seen.errors.entry(error.code.name()).or_default() += 1;
        None
    }

    fn put(&mut self, model: usize, keys: &[BlockKey], from: usize) -> bool {
        let ids: Vec<u32> = (from as u32..keys.len() as u32).collect();
        ids.iter().for_each(|page| self.pages.fill(*page, &keys[*page as usize]));
        let stored = self.call("a put", |asking| {
            let chain = Chain::after(&keys[..from], &keys[from..]);
            let pages = asking.pages.set(&ids);
            asking.spaces[model].put(chain, &pages, Ack::Stored, Some(DEADLINE))?.wait(None)
        });
        stored.is_some_and(|stored| stored.refused == 0)
    }

    /// How many blocks from `from` to `end` come; each is compared.
    fn get(&mut self, model: usize, keys: &[BlockKey], (from, end): (usize, usize)) -> usize {
        let ids: Vec<u32> = (from as u32..end as u32).collect();
        ids.iter().for_each(|page| self.pages.wipe(*page));
        let there = self.call("a get", |asking| {
            let chain = Chain::after(&keys[..from], &keys[from..end]);
            let pages = asking.pages.set(&ids);
            asking.spaces[model].get(chain, &pages, Some(DEADLINE))?.wait()
        });
        let there = there.unwrap_or(0);
        for page in &ids[..there] {
            assert!(self.pages.holds(*page, &keys[*page as usize]), "{}: block {page}", self.context);
        }
        self.seen.asked += (end - from) as u64;
        self.seen.found += there as u64;
        there
    }

    /// Reads a prompt as a serving engine does, in two calls, and puts what is missing.
    fn serve(&mut self, model: usize, number: u64, amid: usize) -> bool {
        let keys = prompt(model, number);
        let mut there = self.get(model, &keys, (0, amid));
        if there == amid {
            there += self.get(model, &keys, (amid, keys.len()));
        }
        there == keys.len() || self.put(model, &keys, there)
    }

    fn some(&mut self, random: &mut Random) {
        let model = random.below(MODELS.len() as u64) as usize;
        let (number, amid) = (random.below(PROMPTS), 1 + random.below(u64::from(BLOCKS) - 1) as usize);
        self.serve(model, number, amid);
        if random.below(8) == 0 {
            // These have the store's own deadline, and say who has not answered.
            let keys = prompt(model, number);
            let first = random.below(u64::from(BLOCKS)) as usize;
            drop(self.spaces[model].remove(&keys[first..]));
        }
    }

    /// When all servers are well and in its list, everything is as it was: nobody starts a client again.
    fn recovers(mut self, servers: usize, told: &[String]) -> Seen {
        let until = Instant::now() + LIMIT;
        let mut fresh = PROMPTS;
        loop {
            let up = self.client.members().iter().filter(|member| member.up).count();
            let keys = prompt(0, fresh);
            let whole = (0, keys.len());
            if up == servers && self.put(0, &keys, 0) && self.get(0, &keys, whole) == keys.len() {
                break;
            }
            let members = self.client.members();
            assert!(Instant::now() < until, "{}: {members:?} after {}", self.context, told.join(", "));
            fresh += 1;
            // Nobody tells a client's user that a server is there.
            std::thread::sleep(Duration::from_millis(20));
        }
        self.engine.close(LIMIT).unwrap();
        self.seen
    }
}

/// How far the clients are.
#[derive(Default)]
struct Progress {
    ended: AtomicBool,
    rounds: Mutex<Vec<u64>>,
    moved: Condvar,
}

impl Progress {
    fn step(&self, client: usize) {
        self.rounds.lock().unwrap()[client] += 1;
        self.moved.notify_all();
    }

    /// Waits until each client has made so many rounds more.
    fn goes_on(&self, rounds: u64) {
        let guard = self.rounds.lock().unwrap();
        let aims: Vec<u64> = guard.iter().map(|done| done + rounds).collect();
        let behind = |done: &mut Vec<u64>| {
            !self.ended.load(Ordering::Relaxed) && done.iter().zip(&aims).any(|(done, aim)| done < aim)
        };
        let (guard, waited) = self.moved.wait_timeout_while(guard, LIMIT, behind).unwrap();
        assert!(!waited.timed_out(), "the clients do not go on: {guard:?}");
    }
}

/// A client that fails ends the schedule.
struct Ends<'a>(&'a Progress);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.ended.store(true, Ordering::Relaxed);
        drop(self.0.rounds.lock());
        self.0.moved.notify_all();
    }
}

fn work(mut asking: Asking, number: usize, mut random: Random, progress: &Progress) -> Asking {
    let _ends = Ends(progress);
    while !progress.ended.load(Ordering::Relaxed) {
        asking.some(&mut random);
        progress.step(number);
    }
    asking
}

/// One schedule.
fn schedule(seed: u64) -> Seen {
    let mut random = Random::with(seed);
    let context = format!("KVIK_SEED={seed}");
    let folder = Folder::new(&format!("schedule-{seed}"));
    std::fs::create_dir_all(&folder.0).unwrap();
    let mut cluster = Members::start(&folder.0, 3 + random.below(2) as usize, &mut random);
    let lists: Vec<PathBuf> = (0..CLIENTS).map(|client| folder.0.join(format!("list-{client}"))).collect();
    lists.iter().for_each(|list| write_list(list, &cluster.addresses()));
    let mut clients: Vec<Asking> =
        lists.iter().map(|list| Asking::new(&context, list.clone(), &mut random)).collect();
    let progress = Progress { rounds: Mutex::new(vec![0; clients.len()]), ..Progress::default() };
    let mut told = Vec::new();
    let clients: Vec<Asking> = std::thread::scope(|scope| {
        let threads: Vec<_> = clients
            .drain(..)
            .enumerate()
            .map(|(number, asking)| {
                let (random, progress) = (Random::with(random.next()), &progress);
                scope.spawn(move || work(asking, number, random, progress))
            })
            .collect();
        // Whatever fails here, the clients end.
        let ends = Ends(&progress);
        for _ in 0..EVENTS {
            let list = &lists[random.below(CLIENTS) as usize];
            told.push(cluster.event(list, &mut random));
            // Some of what happens takes a second until a client knows it.
            progress.goes_on(1 + random.below(60));
        }
        drop(ends);
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    cluster.heal();
    lists.iter().for_each(|list| write_list(list, &cluster.addresses()));
    let mut seen = Seen::default();
    for asking in clients {
        seen.and(&asking.recovers(cluster.addresses().len(), &told));
    }
    println!("{seed}: {} calls, longest {:?}: {}", seen.calls, seen.longest, told.join(", "));
    seen
}

#[test]
fn no_schedule_of_members_gives_wrong_blocks_or_keeps_anybody() {
    let count = std::env::var("KVIK_STORE_SCHEDULES").map_or(SCHEDULES, |count| count.parse().unwrap());
    let first = Random::new().next();
    let (next, seen) = (AtomicU64::new(0), Mutex::new(Seen::default()));
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE.min(count) {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= count {
                        break;
                    }
                    let one = schedule(first.wrapping_add(number));
                    seen.lock().unwrap().and(&one);
                }
            });
        }
    });
    let seen = seen.into_inner().unwrap();
    println!(
        "{count} schedules: {} calls, {} of {} blocks found, 0 wrong, longest {:?} of a deadline of {DEADLINE:?} {:?}",
        seen.calls, seen.found, seen.asked, seen.longest, seen.errors
    );
    assert!(seen.found > 0 && seen.found < seen.asked, "nothing was at stake");
}
