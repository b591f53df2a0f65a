//! kvik's two sides: the owner, whose pages are granted, and the mover, which reads and writes them.

use crate::Result;
use crate::bytes::{check, filled, pages};
use crate::children::obey;
use crate::words::Options;
use kvik_core::{Layout, Right, Ticket, Use};
use kvik_engine::{
    Config, Engine, GpuMemory, Grant, GrantOptions, NicOptions, PageSet, PairState, Region, Transfer,
    TransferOptions, Verify,
};
use kvik_host::cuda::Cuda;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Grants and transfers live as long as any run.
const LONG: Duration = Duration::from_secs(3600);
/// The options of both, with their defaults. Where `cpu` names a processor, they are started on it.
pub const OPTIONS: [(&str, &str); 9] = [
    ("nics", "libfabric:tcp"),
    ("nic_threads", "4"),
    ("library", ""),
    ("depth", "64"),
    ("buffer", "256"),
    ("verify", "off"),
    ("cpu", ""),
    ("transport", "nics"),
    ("memory", "host"),
];
/// Their names, of what is the same for all transfers of a program that takes them.
pub const NAMES: [&str; 6] = ["nics", "library", "depth", "buffer", "verify", "cpu"];
/// How the threads that drive NICs are called.
const NIC_THREADS: &str = "kvik-nic-";

struct Side {
    engine: Engine,
    region: Region,
    verify: Verify,
    grants: Vec<Grant>,
    tickets: HashMap<String, Ticket>,
    /// The next page of the walk through the buffer.
    at: u64,
}

/// Obeys, as one of the two. Both know all commands; which ones make sense is for the starter.
///
/// # Errors
/// The first command that failed.
pub fn serve(role: &str, options: &[String]) -> Result<()> {
    let options = Options::new(options, &OPTIONS)?;
    let mut nics: NicOptions = options.text("nics").parse()?;
    nics.depth = options.number("depth")?;
    nics.library = Some(options.text("library")).filter(|text| !text.is_empty()).map(Into::into);
    let config = Config {
        transport: options.text("transport").parse()?,
        nics: Some(nics),
        nic_threads: options.number("nic_threads")?,
        name: role.to_owned(),
        ..Config::default()
    };
    let engine = Engine::start(config)?;
    let bytes = options.number::<u64>("buffer")? << 20;
    let region = match options.text("memory") {
        "host" => engine.allocate(bytes)?,
        "gpu" => engine.register(on_gpu(bytes as usize)?)?,
        other => return Err(format!("memory={other:?} is neither host nor gpu").into()),
    };
    let verify = options.text("verify").parse()?;
    let mut side = Side { engine, region, verify, grants: Vec::new(), tickets: HashMap::new(), at: 0 };
    obey(|words| side.obey(words))
}

/// Memory of the first GPU.
fn on_gpu(bytes: usize) -> Result<GpuMemory> {
    Ok(GpuMemory::alloc(&Cuda::get()?.device(0)?, bytes)?)
}

impl Side {
    fn obey(&mut self, words: &[&str]) -> Result<String> {
        match words {
            ["fill", size, seed] => self.fill(size.parse()?, seed.parse()?),
            ["check", size, seed] => self.check(size.parse()?, seed.parse()?),
            ["grant", op, size] => self.grant(op, size.parse()?),
            ["ticket", op, size, ticket] => {
                self.tickets.insert(format!("{op} {size}"), ticket.parse()?);
                Ok(String::new())
            }
            ["explain", op, size] => {
                let began = Instant::now();
                self.engine.explain(self.ticket(op, size)?)?;
                Ok(began.elapsed().as_secs_f64().to_string())
            }
            ["warm", op, size, pairs] => {
                let warmed = self.engine.warm_up(self.ticket(op, size)?, None)?.wait(None)?;
                let made = warmed.pairs.iter().filter(|pair| matches!(pair.state, PairState::Opened)).count();
                match made == pairs.parse::<usize>()? {
                    true => Ok(warmed.took.as_secs_f64().to_string()),
                    false => Err(format!("{pairs} pairs were to be made: {warmed:?}").into()),
                }
            }
            ["how", op, size] => self.how(op, size),
            ["once", op, size, count] => self.once(op, size, count.parse()?),
            ["turn", op, size, count, open, transfers] => {
                self.turn(op, size, (count.parse()?, open.parse()?, transfers.parse()?))
            }
            ["cpu"] => cpu_seconds().map(|[nics, all]| format!("{nics} {all}")),
            other => Err(format!("{other:?} is no command").into()),
        }
    }

    fn fill(&self, size: usize, seed: u64) -> Result<String> {
        for page in 0..self.region.bytes() as usize / size {
            self.region.write_at(page * size, &filled(page, size, seed))?;
        }
        Ok(String::new())
    }

    fn check(&self, size: usize, seed: u64) -> Result<String> {
        let read = |at, into: &mut [u8]| Ok(self.region.read_at(at, into)?);
        check(self.region.bytes() as usize, size, seed, read)?;
        Ok(String::new())
    }

    fn set(&self, size: u64, ids: Vec<u32>) -> Result<PageSet> {
        let layout = Layout::contiguous((self.region.bytes() / size) as u32, size)?;
        Ok(PageSet::new(&self.region, Arc::new(layout), ids.into(), None, None)?)
    }

    fn grant(&mut self, op: &str, size: u64) -> Result<String> {
        let right = if op == "read" { Right::Read } else { Right::Write };
        let all = self.set(size, (0..(self.region.bytes() / size) as u32).collect())?;
        let options = GrantOptions {
            right,
            uses: Use::Many,
            expiry: LONG,
            max_expiry: LONG,
            ..GrantOptions::default()
        };
        let grant = self.engine.grant(&all, options)?;
        let ticket = grant.ticket().to_string();
        self.grants.push(grant);
        Ok(ticket)
    }

    fn ticket(&self, op: &str, size: &str) -> Result<&Ticket> {
        let ticket = self.tickets.get(&format!("{op} {size}"));
        ticket.ok_or_else(|| format!("there is no ticket to {op} pages of {size} bytes").into())
    }

    /// Begins a transfer of the next pages; here and there they have the same ids.
    fn begin(&mut self, op: &str, size: &str, count: u64) -> Result<Transfer> {
        let bytes: u64 = size.parse()?;
        let all = self.region.bytes() / bytes;
        let ids = pages(self.at, count, all);
        self.at += count;
        let (set, remote) = (self.set(bytes, ids.clone())?, Some(ids.into()));
        let options =
            TransferOptions { deadline: Some(LONG), verify: Some(self.verify), ..TransferOptions::default() };
        let ticket = self.ticket(op, size)?;
        Ok(match op {
            "read" => self.engine.read(&set, ticket, remote, options)?,
            _ => self.engine.write(&set, ticket, remote, options)?,
        })
    }

    /// One transfer: seconds in all, until the first byte could move, and from there on.
    fn once(&mut self, op: &str, size: &str, count: u64) -> Result<String> {
        let began = Instant::now();
        let report = self.begin(op, size, count)?.wait(None)?;
        let all = began.elapsed().as_secs_f64();
        Ok(format!("{all} {} {}", report.post.as_secs_f64(), report.wire.as_secs_f64()))
    }

    /// How one page went.
    fn how(&mut self, op: &str, size: &str) -> Result<String> {
        let report = self.begin(op, size, 1)?.wait(None)?;
        Ok(format!("{}: {}", report.transport, report.mechanism))
    }

    /// Transfers of so many pages one after the other, some of them open at a time: the seconds that they
    /// took.
    fn turn(&mut self, op: &str, size: &str, (count, open, transfers): (u64, usize, u64)) -> Result<String> {
        let (mut in_flight, mut extents) = (VecDeque::new(), 0);
        let began = Instant::now();
        for _ in 0..transfers {
            if in_flight.len() >= open.max(1) {
                extents += ended(in_flight.pop_front())?;
            }
            in_flight.push_back(self.begin(op, size, count)?);
        }
        while !in_flight.is_empty() {
            extents += ended(in_flight.pop_front())?;
        }
        let seconds = began.elapsed().as_secs_f64();
        // Each page is an extent of its own, or the figures would be of something else.
        match extents == count * transfers {
            true => Ok(seconds.to_string()),
            false => Err(format!("{} pages were moved as {extents} extents", count * transfers).into()),
        }
    }
}

/// Time that this process's threads of NICs have run, and all of its threads, as the scheduler counts it.
fn cpu_seconds() -> Result<[f64; 2]> {
    let mut seconds = [0.0; 2];
    for task in std::fs::read_dir("/proc/self/task")? {
        let folder = task?.path();
        let name = std::fs::read_to_string(folder.join("comm"))?;
        let counted = std::fs::read_to_string(folder.join("schedstat"))?;
        let nanoseconds: f64 = counted.split_whitespace().next().ok_or("an empty schedstat")?.parse()?;
        seconds[1] += nanoseconds / 1e9;
        if name.starts_with(NIC_THREADS) {
            seconds[0] += nanoseconds / 1e9;
        }
    }
    Ok(seconds)
}

/// The extents of a transfer that has ended well.
fn ended(transfer: Option<Transfer>) -> Result<u64> {
    Ok(transfer.map(|transfer| transfer.wait(None)).transpose()?.map_or(0, |report| report.extents))
}
