//! Reads and writes over libfabric with nothing around them: what a provider gives to a loop that only fills its
//! queue, walks through the same pages as kvik's side, and asks for completions, on both sides without a pause.

use crate::Result;
use crate::bytes::{check, filled, pages};
use crate::children::{obey, say};
use crate::words::Options;
use kvik_host::fabric::{Completion, Device, Endpoint, Fabric, Posted, Registration, Rma, RmaOp, Slot};
use kvik_host::{HugePages, Memory};
use std::io::stdin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::Instant;

/// The options of both sides, with their defaults.
const OPTIONS: [(&str, &str); 4] = [("provider", "tcp"), ("library", ""), ("depth", "64"), ("buffer", "256")];
/// Their names.
pub const NAMES: [&str; 4] = ["provider", "library", "depth", "buffer"];
/// Polls between two looks at what the starter says.
const POLLS: u32 = 1000;

struct Side {
    memory: Arc<Memory>,
    known: Rc<Registration>,
    endpoint: Endpoint,
    done: Vec<Completion>,
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
        let endpoint = Endpoint::open(&device, options.number("depth")?)?;
        let memory = Arc::new(Memory::shared(options.number::<usize>("buffer")? << 20, HugePages::Auto)?);
        let known = device.register(memory.clone(), true)?;
        Ok(Side { memory, known, endpoint, done: Vec::new() })
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
            ["work"] => work(&mut side, &told)?,
            _ => return Err(format!("{line:?} is no command").into()),
        }
    }
    Ok(())
}

/// Lets the provider work until the starter says something.
fn work(side: &mut Side, told: &Receiver<String>) -> Result<()> {
    say("working")?;
    while matches!(told.try_recv(), Err(TryRecvError::Empty)) {
        for _ in 0..POLLS {
            side.poll()?;
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
        ["turn", op, size, count] => {
            let (count, target) = (count.parse()?, target.as_ref().ok_or("no target was named")?);
            let op = if *op == "read" { RmaOp::Read } else { RmaOp::Write };
            let seconds = turn(&mut side, target, op, size.parse()?, (at, count))?;
            at += count;
            Ok(seconds.to_string())
        }
        other => Err(format!("{other:?} is no command").into()),
    })
}

/// Moves so many pages: the seconds from the first post to the last completion.
fn turn(side: &mut Side, target: &Target, op: RmaOp, size: usize, (at, count): (u64, u64)) -> Result<f64> {
    let ids = pages(at, count, (side.memory.len() / size) as u64);
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
        ended += side.poll()?;
    }
    Ok(began.elapsed().as_secs_f64())
}
