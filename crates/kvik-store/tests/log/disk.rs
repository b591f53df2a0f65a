//! A disk in memory that writes down every operation, so that what a loss of power leaves can be made up afterwards;
//! and files that do as they are told: fail, or end the process.

use crate::blocks::Rng;
use kvik_store::{Files, LogFile, MemoryRange};
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

/// What survives of a write as a whole, or not at all.
const SECTOR: u64 = 512;

/// Something that was done to a disk.
#[derive(Debug, Clone)]
pub enum Op {
    Create(String, usize),
    Remove(String),
    SyncNames,
    Size(usize, u64),
    Write(usize, u64, Arc<[u8]>),
    Sync(usize),
    /// Something that the workload knows by now.
    Mark(u64),
}

/// Names, and the bytes of files by number.
#[derive(Debug, Clone, Default)]
pub struct Contents {
    pub names: BTreeMap<String, usize>,
    pub files: Vec<Vec<u8>>,
}

impl Contents {
    fn apply(&mut self, op: &Op) {
        match op {
            Op::Create(name, file) => {
                self.names.insert(name.clone(), *file);
                self.files.resize(self.files.len().max(file + 1), Vec::new());
            }
            Op::Remove(name) => drop(self.names.remove(name)),
            Op::Size(file, bytes) => self.file(*file).resize(*bytes as usize, 0),
            Op::Write(file, at, bytes) => {
                let (from, to) = (*at as usize, *at as usize + bytes.len());
                let file = self.file(*file);
                file.resize(file.len().max(to), 0);
                file[from..to].copy_from_slice(bytes);
            }
            Op::SyncNames | Op::Sync(_) | Op::Mark(_) => {}
        }
    }

    /// The bytes of a file.
    pub fn named(&mut self, name: &str) -> &mut Vec<u8> {
        let file = self.names[name];
        self.file(file)
    }

    fn file(&mut self, file: usize) -> &mut Vec<u8> {
        self.files.resize(self.files.len().max(file + 1), Vec::new());
        &mut self.files[file]
    }
}

#[derive(Default)]
struct Inner {
    now: Contents,
    begun: Contents,
    ops: Vec<Op>,
}

/// A disk in memory. Clones are the same disk.
#[derive(Clone, Default)]
pub struct Disk(Arc<Mutex<Inner>>);

impl Disk {
    /// A disk that holds this.
    pub fn holding(contents: Contents) -> Disk {
        let inner = Inner { begun: contents.clone(), now: contents, ops: Vec::new() };
        Disk(Arc::new(Mutex::new(inner)))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap()
    }

    fn do_it(&self, op: Op) {
        let mut inner = self.lock();
        inner.now.apply(&op);
        inner.ops.push(op);
    }

    /// Writes down that the workload knows something.
    pub fn mark(&self, what: u64) {
        self.do_it(Op::Mark(what));
    }

    /// What it held at first, and all that was done to it.
    pub fn history(&self) -> (Contents, Vec<Op>) {
        let inner = self.lock();
        (inner.begun.clone(), inner.ops.clone())
    }

    /// What it holds.
    pub fn contents(&self) -> Contents {
        self.lock().now.clone()
    }
}

/// What a loss of power after `ops` leaves of a disk. Since the last sync of a file each sector of each write to it is
/// there or not, each change of its length is there or not, and all in any order; since the last sync of the directory
/// each name that came or went did so or not, in any order.
pub fn after_power_loss(begun: &Contents, ops: &[Op], rng: &mut Rng) -> Contents {
    let mut left = begun.clone();
    let mut names: Vec<&Op> = Vec::new();
    let mut files: BTreeMap<usize, Vec<&Op>> = BTreeMap::new();
    for op in ops {
        match op {
            Op::Create(..) | Op::Remove(_) => names.push(op),
            Op::SyncNames => names.drain(..).for_each(|op| left.apply(op)),
            Op::Size(file, _) | Op::Write(file, ..) => files.entry(*file).or_default().push(op),
            Op::Sync(file) => {
                files.remove(file).into_iter().flatten().for_each(|op| left.apply(op));
            }
            Op::Mark(_) => {}
        }
    }
    // How much is lost differs from one loss to the next: nothing, some, all.
    let kept = rng.below(5);
    let keep = |rng: &mut Rng| rng.below(4) < kept;
    shuffle(&mut names, rng);
    for op in names {
        if keep(rng) {
            left.apply(op);
        }
    }
    for (_, mut pending) in files {
        shuffle(&mut pending, rng);
        for op in pending {
            match op {
                Op::Write(file, at, bytes) => {
                    for (from, part) in sectors(*at, bytes) {
                        if keep(rng) {
                            left.apply(&Op::Write(*file, from, part.into()));
                        }
                    }
                }
                op if keep(rng) => left.apply(op),
                _ => {}
            }
        }
    }
    left
}

fn shuffle<T>(list: &mut [T], rng: &mut Rng) {
    // Half of all losses keep the order.
    if rng.below(2) == 0 {
        for at in (1..list.len()).rev() {
            list.swap(at, rng.below(at as u64 + 1) as usize);
        }
    }
}

fn sectors(at: u64, bytes: &[u8]) -> Vec<(u64, &[u8])> {
    let (mut from, mut rest, mut parts) = (at, bytes, Vec::new());
    while !rest.is_empty() {
        let len = ((SECTOR - from % SECTOR) as usize).min(rest.len());
        parts.push((from, &rest[..len]));
        (from, rest) = (from + len as u64, &rest[len..]);
    }
    parts
}

struct OnDisk {
    disk: Disk,
    file: usize,
}

impl Files for Disk {
    fn name(&self) -> String {
        "a disk in memory".into()
    }

    fn read_only(&self) -> bool {
        false
    }

    fn list(&self) -> io::Result<Vec<(String, u64)>> {
        let inner = self.lock();
        let size = |file: &usize| inner.now.files[*file].len() as u64;
        Ok(inner.now.names.iter().map(|(name, file)| (name.clone(), size(file))).collect())
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn LogFile>> {
        let file = {
            let inner = self.lock();
            if inner.now.names.contains_key(name) {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            inner.now.files.len()
        };
        self.do_it(Op::Create(name.into(), file));
        Ok(Arc::new(OnDisk { disk: self.clone(), file }))
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn LogFile>> {
        let file = *self.lock().now.names.get(name).ok_or(io::ErrorKind::NotFound)?;
        Ok(Arc::new(OnDisk { disk: self.clone(), file }))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        if !self.lock().now.names.contains_key(name) {
            return Err(io::ErrorKind::NotFound.into());
        }
        self.do_it(Op::Remove(name.into()));
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.do_it(Op::SyncNames);
        Ok(())
    }
}

/// Head and body in one piece.
pub fn joined(head: &[u8], body: Option<MemoryRange<'_>>) -> Vec<u8> {
    let mut bytes = head.to_vec();
    if let Some((memory, at, len)) = body {
        bytes.resize(head.len() + len, 0);
        memory.copy_out(at, &mut bytes[head.len()..]).unwrap();
    }
    bytes
}

impl LogFile for OnDisk {
    fn size(&self) -> io::Result<u64> {
        Ok(self.disk.lock().now.files[self.file].len() as u64)
    }

    fn allocate(&self, bytes: u64) -> io::Result<()> {
        self.disk.do_it(Op::Size(self.file, bytes));
        Ok(())
    }

    fn truncate(&self, bytes: u64) -> io::Result<()> {
        self.allocate(bytes)
    }

    fn write(&self, offset: u64, head: &[u8], body: Option<MemoryRange<'_>>) -> io::Result<()> {
        self.disk.do_it(Op::Write(self.file, offset, joined(head, body).into()));
        Ok(())
    }

    fn read(&self, offset: u64, head: &mut [u8], body: Option<MemoryRange<'_>>) -> io::Result<usize> {
        let inner = self.disk.lock();
        let there = inner.now.files[self.file].get(offset as usize..).unwrap_or_default();
        let first = there.len().min(head.len());
        head[..first].copy_from_slice(&there[..first]);
        let rest = &there[first..];
        let Some((memory, at, len)) = body else { return Ok(first) };
        let len = len.min(rest.len());
        memory.copy_in(at, &rest[..len]).map_err(io::Error::other)?;
        Ok(first + len)
    }

    fn sync(&self) -> io::Result<()> {
        self.disk.do_it(Op::Sync(self.file));
        Ok(())
    }
}

/// The kinds of operations, as somebody sees them who may interfere.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    List,
    Create,
    Open,
    Remove,
    SyncNames,
    Allocate,
    Truncate,
    Write,
    Read,
    Sync,
}

/// What becomes of an operation.
pub enum Fate {
    Done,
    Fails(io::ErrorKind),
    /// It is done in part, if it is a write, and fails.
    Torn(io::ErrorKind),
}

/// Decides on each operation. Called again after it with `true`.
pub type Meddler = Arc<dyn Fn(Kind, bool) -> Fate + Send + Sync>;

/// Files of which somebody decides what becomes of each operation.
pub struct Meddled {
    pub files: Box<dyn Files>,
    pub meddler: Meddler,
}

struct MeddledFile {
    file: Arc<dyn LogFile>,
    meddler: Meddler,
}

fn meddle<T>(meddler: &Meddler, kind: Kind, op: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    match meddler(kind, false) {
        Fate::Done => {}
        Fate::Fails(error) | Fate::Torn(error) => return Err(error.into()),
    }
    let done = op();
    meddler(kind, true);
    done
}

impl Files for Meddled {
    fn name(&self) -> String {
        self.files.name()
    }

    fn read_only(&self) -> bool {
        self.files.read_only()
    }

    fn list(&self) -> io::Result<Vec<(String, u64)>> {
        meddle(&self.meddler, Kind::List, || self.files.list())
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn LogFile>> {
        let file = meddle(&self.meddler, Kind::Create, || self.files.create(name))?;
        Ok(Arc::new(MeddledFile { file, meddler: self.meddler.clone() }))
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn LogFile>> {
        let file = meddle(&self.meddler, Kind::Open, || self.files.open(name))?;
        Ok(Arc::new(MeddledFile { file, meddler: self.meddler.clone() }))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        meddle(&self.meddler, Kind::Remove, || self.files.remove(name))
    }

    fn sync(&self) -> io::Result<()> {
        meddle(&self.meddler, Kind::SyncNames, || self.files.sync())
    }
}

impl LogFile for MeddledFile {
    fn size(&self) -> io::Result<u64> {
        self.file.size()
    }

    fn allocate(&self, bytes: u64) -> io::Result<()> {
        meddle(&self.meddler, Kind::Allocate, || self.file.allocate(bytes))
    }

    fn truncate(&self, bytes: u64) -> io::Result<()> {
        meddle(&self.meddler, Kind::Truncate, || self.file.truncate(bytes))
    }

    fn write(&self, offset: u64, head: &[u8], body: Option<MemoryRange<'_>>) -> io::Result<()> {
        match (self.meddler)(Kind::Write, false) {
            Fate::Done => self.file.write(offset, head, body)?,
            Fate::Fails(error) => return Err(error.into()),
            Fate::Torn(error) => {
                let bytes = joined(head, body);
                self.file.write(offset, &bytes[..bytes.len() / 2], None)?;
                (self.meddler)(Kind::Write, true);
                return Err(error.into());
            }
        }
        (self.meddler)(Kind::Write, true);
        Ok(())
    }

    fn read(&self, offset: u64, head: &mut [u8], body: Option<MemoryRange<'_>>) -> io::Result<usize> {
        meddle(&self.meddler, Kind::Read, || self.file.read(offset, head, body))
    }

    fn sync(&self) -> io::Result<()> {
        meddle(&self.meddler, Kind::Sync, || self.file.sync())
    }
}
