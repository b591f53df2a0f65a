//! Reads and writes over libfabric with nothing around them: what a provider gives to a loop that only fills
//! its queue, walks through the same pages as kvik's side, and asks for completions.
//!
//! There are two of it: one asks on both sides without a pause, and one sleeps on the queue's descriptor when
//! there is nothing. Which one is faster depends on how many processors are free; the faster one is the
//! limit.

use crate::Result;
use crate::bytes::{check, filled, pages};
use crate::children::{obey, say};
use crate::words::Options;
use kvik_host::event::{Epoll, Events};
use kvik_host::fabric::{Device, Endpoint, Fabric, FabricError, Posted, Registration, Rma, RmaOp, Slot};
use kvik_host::rma::Completion;
use kvik_host::{HugePages, Memory};
use std::io::stdin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

/// The options of both sides, with their defaults.
const OPTIONS: [(&str, &str); 4] = [("provider", "tcp"), ("library", ""), ("depth", "64"), ("buffer", "256")];
/// Their names.
pub const NAMES: [&str; 4] = ["provider", "library", "depth", "buffer"];
/// Whether the loops sleep when there is nothing.
pub const MODES: [&str; 2] = ["spin", "sleep"];
/// Polls between two looks at what the starter says.
const POLLS: u32 = 1000;
/// How long a loop that sleeps does so at most: the starter's words wake nobody.
const GLANCE: Duration = Duration::from_millis(5);

struct Side {
    memory: Arc<Memory>,
    known: Rc<Registration>,
    endpoint: Endpoint,
    epoll: Rc<Epoll>,
    events: Events,
    /// Whether the provider has a descriptor to sleep on.
    sleeps: bool,
    done: Vec<Completion<FabricError>>,
}

impl Side {
    fn open(options: &[String]) -> Result<Side> {
        let options = Options::new(options, &OPTIONS)?;
        let library = Some(options.text("library")).filter(|text| !text.is_empty());
        let fabric = Fabric::load(library.map(std::path::Path::new))?;
        // Of loopback where the provider has a choice, as for engines that listen there.
        let provider = options.text("provider");
        let nics = fabric.nics(provider, Some("127.0.0.1"))?;
        let nic = nics.into_iter().next().ok_or_else(|| format!("libfabric has no NIC of {provider}"))?;
        let device = Device::open(&Arc::new(nic))?;
        let mut endpoint = Endpoint::open(&device, options.number("depth")?)?;
        let epoll = Rc::new(Epoll::new()?);
        let sleeps = endpoint.watch(&epoll, 0)?;
        let memory = Arc::new(Memory::shared(options.number::<usize>("buffer")? << 20, HugePages::Auto)?);
        let known = device.register(memory.clone(), true)?;
        let events = Events::new(1);
        Ok(Side { memory, known, endpoint, epoll, events, sleeps, done: Vec::new() })
    }

    fn fill(&self, size: usize, seed: u64) -> Result<String> {
        for page in 0..self.memory.len() / size {
            self.memory.copy_in(page * size, &filled(page, size, seed))?;
        }
        Ok(String::new())
    }

    fn check(&self, size: usize, seed: u64) -> Result<String> {
        check(self.memory.len(), size, seed, |at, into| Ok(self.memory.copy_out(at, into)?))?;
        Ok(String::new())
    }

    fn poll(&mut self) -> Result<usize> {
        self.endpoint.poll(&mut self.done)?;
        let ended = self.done.len();
        for completion in self.done.drain(..) {
            completion.result?;
        }
        Ok(ended)
    }

    /// Sleeps until something has come, where the provider can tell.
    fn rest(&mut self) -> Result<()> {
        if self.sleeps && self.endpoint.may_wait() {
            self.epoll.wait(&mut self.events, GLANCE)?;
        }
        Ok(())
    }
}

/// Serves as the target, from its address to the end of its starter.
///
/// # Errors
/// libfabric's.
pub fn target(options: &[String]) -> Result<()> {
    let mut side = Side::open(options)?;
    let (tell, told) = channel();
    std::thread::spawn(move || {
        stdin().lines().map_while(|line| line.ok()).try_for_each(|line| tell.send(line))
    });
    while let Ok(line) = told.recv() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["who"] => {
                let address: String =
                    side.endpoint.address()?.iter().map(|byte| format!("{byte:02x}")).collect();
                say(&format!("{address} {} {}", side.known.base(), side.known.key()))?;
            }
            ["fill", size, seed] => say(&side.fill(size.parse()?, seed.parse()?)?)?,
            ["check", size, seed] => say(&side.check(size.parse()?, seed.parse()?)?)?,
            ["work", mode] => work(&mut side, &told, mode == "sleep")?,
            _ => return Err(format!("{line:?} is no command").into()),
        }
    }
    Ok(())
}

/// Lets the provider work until the starter says something.
fn work(side: &mut Side, told: &Receiver<String>, sleeps: bool) -> Result<()> {
    say("working")?;
    while matches!(told.try_recv(), Err(TryRecvError::Empty)) {
        for _ in 0..if sleeps { 1 } else { POLLS } {
            side.poll()?;
        }
        if sleeps {
            side.rest()?;
        }
    }
    say("resting")
}

/// Where the target's bytes are.
struct Target {
    slot: Slot,
    base: u64,
    key: u64,
}

/// Obeys as the side that posts.
///
/// # Errors
/// The first command that failed.
pub fn mover(options: &[String]) -> Result<()> {
    let (mut side, mut target, mut at) = (Side::open(options)?, None, 0);
    obey(|words| match words {
        ["target", address, base, key] => {
            let byte = |place: usize| u8::from_str_radix(address.get(place..place + 2).unwrap_or(""), 16);
            let address: std::result::Result<Vec<u8>, _> = (0..address.len()).step_by(2).map(byte).collect();
            let slot = side.endpoint.add_peer(&address?)?;
            target = Some(Target { slot, base: base.parse()?, key: key.parse()? });
            Ok(String::new())
        }
        ["fill", size, seed] => side.fill(size.parse()?, seed.parse()?),
        ["check", size, seed] => side.check(size.parse()?, seed.parse()?),
        ["turn", mode, op, size, count] => {
            let (count, target) = (count.parse()?, target.as_ref().ok_or("no target was named")?);
            let op = if *op == "read" { RmaOp::Read } else { RmaOp::Write };
            let ids = pages(at, count, (side.memory.len() / size.parse::<usize>()?) as u64);
            let seconds = turn(&mut side, target, op, (size.parse()?, &ids), *mode == "sleep")?;
            at += count;
            Ok(seconds.to_string())
        }
        other => Err(format!("{other:?} is no command").into()),
    })
}

/// Moves pages: the seconds from the first post to the last completion.
fn turn(
    side: &mut Side,
    target: &Target,
    op: RmaOp,
    (size, ids): (usize, &[u32]),
    sleeps: bool,
) -> Result<f64> {
    let memory = side.known.clone();
    let began = Instant::now();
    let (mut next, mut ended) = (0, 0);
    while ended < ids.len() {
        while let Some(id) = ids.get(next) {
            let offset = *id as usize * size;
            let remote = target.base.wrapping_add(offset as u64);
            let (peer, key) = (target.slot, target.key);
            let order = Rma { op, memory: &memory, offset, len: size, peer, remote, key, token: 0 };
            if side.endpoint.post(&order)? == Posted::Full {
                break;
            }
            next += 1;
        }
        match side.poll()? {
            0 if sleeps => side.rest()?,
            some => ended += some,
        }
    }
    Ok(began.elapsed().as_secs_f64())
}
