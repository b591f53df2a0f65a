//! Two engines over one transport, with faults between each and its transport.

use crate::common::{PATIENCE, Random};
use crate::cuda;
use crate::faulty::Faults;
use crate::plugins;
use crate::standin::{self, Control};
use crate::wire::Wire;
use kvik_core::{Error, Layout, Right, Use};
use kvik_engine::{
    Config, Engine, GpuMemory, Grant, GrantOptions, Memory, NicOptions, PageSet, Preference, Region, Report,
};
use kvik_engine::{Transfer, TransferOptions, Verify};
use std::any::Any;
use std::ptr::NonNull;
use std::sync::{Arc, Once};
use std::time::Duration;

/// Which memory the regions are of.
#[derive(Clone, Copy, PartialEq)]
pub enum Memories {
    Shared,
    Foreign,
    /// Of a GPU: the stand-in's.
    Gpu,
}

/// A line of the table.
#[derive(Clone, Copy, PartialEq)]
pub struct Kind {
    /// What reports call it.
    pub transport: &'static str,
    /// What reports call its mechanism, in part.
    pub mechanism: &'static str,
    pub memory: Memories,
    /// The memory that is granted, where it is another.
    pub granted: Option<Memories>,
    /// Work requests come late at random, and so in another sequence.
    pub late: bool,
    /// Bytes go through a proxy that divides and delays them at random.
    pub wire: bool,
    /// The NICs that both have; empty for none.
    pub nics: &'static str,
    /// The file of the library that speaks to them, where the usual places are not meant.
    pub library: Option<&'static str>,
    /// The GPU's memory is not for the NICs: it has no dma-bufs, so that its pages go through rings.
    pub staged: bool,
    /// The sample of a plug-in is that library.
    pub sample: bool,
    /// A stand-in takes a library's place: in a process of its own, since a process has each library once.
    pub standin: Option<Standin>,
}

/// What the stand-in for a GPU's driver is told to make no dma-bufs.
pub const NO_DMABUF: &str = "attribute id=124 value=0";

/// What a stand-in stands for.
#[derive(Clone, Copy, PartialEq)]
pub struct Standin {
    pub library: standin::Standin,
    pub devices: u32,
    /// Threads that drive them.
    pub threads: u16,
    pub depth: u32,
    /// verbs: runs of memory that an operation takes.
    pub pieces: u32,
    /// libfabric: endpoints of one device in one process reach each other without the device.
    pub software: bool,
}

impl Standin {
    pub const NEW: Standin = Standin {
        library: standin::Standin::Fabric,
        devices: 2,
        threads: 1,
        depth: 256,
        pieces: 16,
        software: false,
    };
}

/// How the bytes go, as the initiator sees it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Op {
    Read,
    Write,
}

pub const OPS: [Op; 2] = [Op::Read, Op::Write];

impl Kind {
    pub const NEW: Kind = Kind {
        transport: "",
        mechanism: "",
        memory: Memories::Shared,
        granted: None,
        late: false,
        wire: false,
        nics: "",
        library: None,
        staged: false,
        sample: false,
        standin: None,
    };

    /// Runs a check where its transport is there. `name` is the whole name of the test.
    pub fn place(&self, name: &str, check: impl FnOnce(Option<Control>)) {
        if self.has_gpu() {
            let test = name.split_once("::").map_or(name, |(_, name)| name);
            let faults = if self.staged { &[("KVIK_STANDIN_CUDA_FAULTS", NO_DMABUF)][..] } else { &[] };
            return cuda::alone(test, faults, |_| self.place_nics(name, check));
        }
        self.place_nics(name, check);
    }

    fn place_nics(&self, name: &str, check: impl FnOnce(Option<Control>)) {
        let Some(of) = &self.standin else { return check(None) };
        let loopback = if of.software { "software" } else { "device" };
        let [devices, depth, pieces] = [of.devices, of.depth, of.pieces].map(|number| number.to_string());
        let settings = [
            ("KVIK_STANDIN_LOOPBACK", loopback),
            ("KVIK_STANDIN_DEVICES", &devices),
            ("KVIK_STANDIN_DEPTH", &depth),
            ("KVIK_STANDIN_PIECES", &pieces),
        ];
        // Without the crate's name, as the test harness has it.
        let name = name.split_once("::").map_or(name, |(_, name)| name);
        of.library.alone(name, &settings, |control| check(Some(control)));
    }

    /// Owner and initiator are one engine.
    pub fn own(&self) -> bool {
        self.transport == "self"
    }

    pub fn preference(&self) -> Preference {
        match self.transport {
            "tcp" => Preference::Tcp,
            "local" => Preference::Local,
            _ if self.one_sided() => Preference::Nics,
            _ => Preference::Auto,
        }
    }

    pub fn nics(&self) -> Option<NicOptions> {
        let nics = self.one_sided().then(|| self.nics.parse().unwrap())?;
        let library = match self.library {
            Some(file) => Some(file.into()),
            None if self.sample => Some(plugins::sample()),
            None => self.standin.map(|of| of.library.library()),
        };
        Some(NicOptions { library, ..nics })
    }

    /// The NIC of who began a transfer moves its bytes, both ways.
    pub fn one_sided(&self) -> bool {
        !self.nics.is_empty()
    }

    /// Pages of either side lie on a GPU.
    pub fn has_gpu(&self) -> bool {
        self.memory == Memories::Gpu || self.granted == Some(Memories::Gpu)
    }

    /// An engine whose work requests go through the faults.
    pub fn engine(&self, faults: &Arc<Faults>, wire: Option<&Wire>) -> Engine {
        let advertise = wire.map(|wire| wire.address().to_string()).into_iter().collect();
        self.engine_with(faults, Config { advertise, ..Config::default() })
    }

    /// One with options of its own.
    pub fn engine_with(&self, faults: &Arc<Faults>, config: Config) -> Engine {
        let (transport, between, nics) = (self.preference(), Some(faults.between()), self.nics());
        let nic_threads = self.standin.map_or(config.nic_threads, |of| of.threads);
        Engine::start(Config { transport, between, nics, nic_threads, ..config }).unwrap()
    }

    /// A region that its engine uses with tickets of others.
    pub fn region(&self, engine: &Engine, bytes: u64, seed: u8) -> Region {
        of(self.memory, engine, bytes, seed)
    }

    /// A region that its engine grants.
    pub fn granted_region(&self, engine: &Engine, bytes: u64, seed: u8) -> Region {
        of(self.granted.unwrap_or(self.memory), engine, bytes, seed)
    }
}

fn of(memory: Memories, engine: &Engine, bytes: u64, seed: u8) -> Region {
    let region = match memory {
        Memories::Shared => engine.allocate(bytes).unwrap(),
        Memories::Foreign => engine.register(foreign(bytes, |buffer| Box::new(buffer))).unwrap(),
        Memories::Gpu => engine.register(gpu(bytes, Box::new(()))).unwrap(),
    };
    crate::common::fill(&region, seed);
    region
}

/// Memory of the first GPU, allocated by somebody as PyTorch is, and freed when the engine lets go of it.
pub fn gpu(bytes: u64, keep: Box<dyn Any + Send + Sync>) -> GpuMemory {
    // Whoever allocates keeps the device's context.
    static APP: Once = Once::new();
    APP.call_once(|| std::mem::forget(cuda::App::on(0)));
    struct Freed(usize, #[allow(dead_code, reason = "held, not read")] Box<dyn Any + Send + Sync>);
    impl Drop for Freed {
        fn drop(&mut self) {
            // A device that has failed has nothing to free.
            let code = cuda::App::on(0).free(self.0);
            assert!([0, 700, 719].contains(&code), "{code}");
        }
    }
    let at = cuda::App::on(0).alloc(bytes as usize);
    // SAFETY: it is freed when the engine drops what keeps it.
    unsafe { GpuMemory::new(at, bytes as usize, Box::new(Freed(at, keep))) }.unwrap()
}

/// Ordinary memory, which no process can map, kept by what `keep` makes of it.
pub fn foreign(bytes: u64, keep: impl FnOnce(Box<[u8]>) -> Box<dyn Any + Send + Sync>) -> Memory {
    let mut buffer = vec![0u8; bytes as usize].into_boxed_slice();
    let start = NonNull::new(buffer.as_mut_ptr()).unwrap();
    let len = buffer.len();
    // SAFETY: the box keeps the memory where it is until the region drops it, and nobody else looks into it.
    unsafe { Memory::foreign(start, len, keep(buffer)) }
}

/// An owner of pages, and who reads or writes them.
pub struct Pair {
    pub kind: &'static Kind,
    pub owner: Engine,
    pub other: Engine,
    /// What goes wrong at the owner, and at the other.
    pub theirs: Arc<Faults>,
    pub ours: Arc<Faults>,
    pub wire: Option<Wire>,
}

impl Pair {
    pub fn new(kind: &'static Kind) -> Pair {
        let mut random = Random::new();
        let mut seed = || u64::from(random.below(u32::MAX));
        let wire = kind.wire.then(|| Wire::start(seed()));
        let (theirs, ours) = (Faults::new(seed()), Faults::new(seed()));
        let owner = kind.engine(&theirs, wire.as_ref());
        if let Some(wire) = &wire {
            wire.lead_to(listening(&owner));
            wire.dawdle();
        }
        let (other, ours) = match kind.own() {
            true => (owner.clone(), theirs.clone()),
            false => (kind.engine(&ours, None), ours),
        };
        if kind.late {
            [&theirs, &ours].into_iter().for_each(|faults| faults.delay(300, Duration::from_millis(2)));
        }
        Pair { kind, owner, other, theirs, ours, wire }
    }

    /// The faults of the side that writes the destination: of who began it, where its NIC does.
    pub fn mover(&self, op: Op) -> &Arc<Faults> {
        if op == Op::Read || self.kind.one_sided() { &self.ours } else { &self.theirs }
    }

    /// A region at the owner, and one at the other, each of so many pages.
    pub fn regions(&self, pages: u32, page: u64) -> (Region, Region) {
        let bytes = u64::from(pages) * page;
        (self.kind.granted_region(&self.owner, bytes, 1), self.kind.region(&self.other, bytes, 0x5A))
    }

    pub fn grant(&self, op: Op, pages: &PageSet) -> Grant {
        self.owner.grant(pages, options(op)).unwrap()
    }

    pub fn begin(&self, op: Op, local: &PageSet, grant: &Grant, deadline: Duration) -> Transfer {
        self.begin_with(op, local, grant, TransferOptions { deadline: Some(deadline), ..Default::default() })
    }

    pub fn begin_with(&self, op: Op, local: &PageSet, grant: &Grant, options: TransferOptions) -> Transfer {
        match op {
            Op::Read => self.other.read(local, grant.ticket(), None, options).unwrap(),
            Op::Write => self.other.write(local, grant.ticket(), None, options).unwrap(),
        }
    }

    /// A whole transfer, over the transport that it is meant to take.
    pub fn run(&self, op: Op, local: &PageSet, grant: &Grant, verify: Verify) -> Result<Report, Error> {
        let options =
            TransferOptions { deadline: Some(PATIENCE), verify: Some(verify), ..Default::default() };
        let report = self.begin_with(op, local, grant, options).wait(Some(PATIENCE))?;
        assert_eq!(report.transport.name(), self.kind.transport);
        assert!(report.mechanism.contains(self.kind.mechanism), "{report:?}");
        Ok(report)
    }

    /// Something moves once more between the two: everything that was in flight before is through then.
    pub fn pass(&self) {
        let (there, here) = self.regions(64, 16 << 10);
        let (theirs, mine) = (whole(&there, 16 << 10), whole(&here, 16 << 10));
        for op in OPS {
            let grant = self.grant(op, &theirs);
            self.run(op, &mine, &grant, Verify::Full).unwrap();
        }
    }
}

impl Drop for Pair {
    /// No thread stays stuck where a check has failed.
    fn drop(&mut self) {
        self.theirs.release();
        self.ours.release();
    }
}

/// Where an engine listens itself, whatever its tickets say.
fn listening(engine: &Engine) -> std::net::SocketAddr {
    engine.listening()[0]
}

pub fn options(op: Op) -> GrantOptions {
    let right = if op == Op::Read { Right::Read } else { Right::Write };
    GrantOptions { right, uses: Use::Many, ..GrantOptions::default() }
}

pub use crate::common::paged as paged_set;

/// All of a region, in pages of this size.
pub fn whole(region: &Region, page: u64) -> PageSet {
    let count = (region.bytes() / page) as u32;
    let layout = Arc::new(Layout::contiguous(count, page).unwrap());
    let ids: Vec<u32> = (0..count).collect();
    PageSet::new(region, layout, ids.into(), None, None).unwrap()
}

/// A value of the engine's metrics, over all labels, or over those that begin as the name goes on.
pub fn metric(engine: &Engine, name: &str) -> f64 {
    let text = engine.metrics();
    let values = text.lines().filter(|line| line.starts_with(name));
    let values = values.filter(|line| matches!(line.as_bytes().get(name.len()), Some(b' ' | b'{' | b',')));
    values.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
}
