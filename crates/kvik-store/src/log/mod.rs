//! The log tier: append-only segments in a directory.
//!
//! ```text
//! store:  room in the head (lock) -> write (no lock, the caller's thread) -> sync (one thread, for all who wait)
//! load:   segment of the place -> read head and body at once -> compare identity, and the sum of every part
//! room:   oldest segment -> copy what its owner keeps to the head -> sync -> tell the owner -> remove the segment
//! open:   footers, or all bytes of segments without one -> every record to the owner, in the order of writing
//! ```
//!
//! Reading order: `format` (what the bytes mean), `state` (the invariants), `append` and `sync`, `load`, `room`, `open`.
//! `files` is the seam below which tests fail, kill and lose power.
//!
//! How it moves bytes was chosen by measurement (`fio` 3.33 and `examples/log_io.rs`; a virtual disk with ext4, Linux
//! 6.18, two cores; MiB/s, medians):
//!
//! | sequential write, sync every 64 MiB | 256 KiB | 1 MiB |
//! |---|---|---|
//! | `pwrite`, page cache | 540 | 440 |
//! | `pwrite`, `O_DIRECT`, one thread | 1460 | 2440 |
//! | io_uring, `O_DIRECT`, 4 in flight | 1550 | 2220 |
//! | io_uring, page cache, 4 in flight | 1840 | 2140 |
//!
//! | random read, nothing cached | 256 KiB | 1 MiB |
//! |---|---|---|
//! | `pread`, page cache | 990 | 1270 |
//! | `pread`, `O_DIRECT`, one thread | 1050 | 1060 |
//! | io_uring, `O_DIRECT`, 8 in flight | 1520 | 1830 |
//!
//! So blocks of 64 KiB and more in whole pages go past the page cache, straight from and to registered memory. Filling
//! the cache costs a core 85 to 90 % of its time and three quarters of the disk; through it io_uring is fast only because
//! threads of the kernel copy on the other core. io_uring past the cache gives as much as so many threads that call
//! `pwritev`, which a store has anyway; its ring would be a second way to hold memory of the caller, with every question
//! of deadlines and of ends that brings, for nothing. Small records go through the page cache, where a write of 300 bytes
//! costs no input or output of its own.
//!
//! The log beside `fio` (`O_DIRECT`, io_uring, a new file; the same directory, block size, depth and bytes between syncs;
//! in turn, medians of 3, both at real-time priority because the machine was busy; MiB/s):
//!
//! | block, depth | write: `fio` | log | random read: `fio` | log |
//! |---|---|---|---|---|
//! | 256 KiB, 1 | 1172 | 1081 | 885 | 818 |
//! | 256 KiB, 4 | 1154 | 2190 | 1151 | 991 |
//! | 1 MiB, 1 | 2007 | 2138 | 1087 | 829 |
//! | 1 MiB, 4 | 1943 | 2432 | 1021 | 1058 |
//!
//! Ten million records of 64 bytes (3.3 GB of files) open in 4.3 s from a cold cache, in 1.9 s from a warm one. Not done:
//! to write over the files of segments that went. It would save the filesystem the conversion of unwritten extents, which
//! is half of the time of a small write here (`fio` at 256 KiB over an old file: 2600 MiB/s).

mod append;
mod errors;
mod files;
pub(crate) mod footer;
pub(crate) mod format;
mod handles;
pub(crate) mod load;
mod open;
mod options;
pub(crate) mod place;
mod records;
mod room;
mod state;
mod sync;

pub use files::{Directory, Files, LogFile, Range};
pub use options::LogOptions;

use crate::tier::{Identity, Place, Tier, TierOwner, Usage};
use crate::{BlockKey, Entry, NamespaceId};
use append::{Body, For, Record};
use format::{EDGE, MAX_MEANING, What, head_len};
use kvik_core::{Code, Error, Result};
use kvik_host::thread::{ThreadOptions, spawn_named};
use kvik_host::{ForkGuard, HostError, Memory};
use state::{Shared, State};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Bytes of what namespaces mean that a log keeps in memory.
const MAX_MEANINGS: usize = 64 << 20;
/// Namespaces that a log keeps in memory.
const MAX_NAMESPACES: usize = 1 << 16;

/// Blocks on a disk, found again after a restart. Dropping it makes durable what is not yet, and gives up the directory.
pub struct Log {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    fork: ForkGuard,
}

impl std::fmt::Debug for Log {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Log({})", self.shared.files.name())
    }
}

fn host(error: HostError) -> Error {
    Error::new(Code::StorageFailed, error.to_string())
}

impl Log {
    /// Opens the log in a directory, which is made if need be, and tells `owner` all that it holds before this returns.
    /// A directory that this process may only read is opened for reading: [`Tier::store`] and the like are refused.
    ///
    /// # Errors
    /// `InvalidArgument` for options that contradict themselves; `StorageFailed` where another process has the log
    /// open (the text has its process id), where a newer version of kvik wrote it, or where the disk refuses.
    pub fn open(dir: &Path, options: LogOptions, owner: Arc<dyn TierOwner>) -> Result<Log> {
        options.segment_bytes()?;
        let files = Directory::open(dir)
            .map_err(|error| errors::disk(&format!("opening the log in {}", dir.display()), &error))?;
        Log::open_on(Box::new(files), options, owner)
    }

    /// As [`Log::open`], on files of another kind.
    ///
    /// # Errors
    /// As for [`Log::open`].
    pub fn open_on(files: Box<dyn Files>, options: LogOptions, owner: Arc<dyn TierOwner>) -> Result<Log> {
        let segment_bytes = options.segment_bytes()?;
        let fork = ForkGuard::new().map_err(host)?;
        let opened = open::open(&*files, &*owner)?;
        let shared = Arc::new(Shared {
            files,
            handles: Default::default(),
            owner,
            options,
            segment_bytes,
            state: opened.state.into(),
            sync_work: Default::default(),
            room_work: Default::default(),
            progress: Default::default(),
            meanings: opened.meanings.into(),
            quarantine: Default::default(),
            counters: Default::default(),
        });
        state::count(&shared.counters.quarantined, opened.damaged);
        let mut log = Log { shared, threads: Vec::new(), fork };
        if !log.read_only() {
            let (options, shared) = (ThreadOptions::default(), log.shared.clone());
            let room = spawn_named("kvik-log-room", &options, move || shared.keep_room());
            log.threads.push(room.map_err(host)?);
            let shared = log.shared.clone();
            let sync = spawn_named("kvik-log-sync", &options, move || shared.keep_durable());
            log.threads.push(sync.map_err(host)?);
        }
        Ok(log)
    }

    /// Where it is, for texts.
    pub fn name(&self) -> String {
        self.shared.files.name()
    }

    /// Whether the log may only be read.
    pub fn read_only(&self) -> bool {
        self.shared.files.read_only()
    }

    /// The shared part, if it can be written to.
    fn writable(&self) -> Result<&Shared> {
        if self.fork.is_child() {
            let text = "the log belongs to the parent of this forked process: open another in the child";
            return Err(Error::new(Code::EngineForked, text));
        }
        if self.read_only() {
            return Err(errors::read_only(&self.shared.files.name()));
        }
        Ok(&self.shared)
    }

    fn remove_what(&self, what: What, within: Duration) -> Result<Place> {
        let record = Record { what, sums: &[], body: Body::None };
        let place = self.writable()?.append(&record, For::Owner, Instant::now() + within)?;
        place.ok_or_else(errors::closed)
    }
}

fn check(entry: &Entry, memory: &Memory, offset: usize) -> Result<()> {
    let shape = &entry.shape;
    if entry.sums.len() != shape.sums() {
        let text = format!("a block of this shape has {} checksums, not {}", shape.sums(), entry.sums.len());
        return Err(Error::new(Code::InvalidArgument, text));
    }
    check_range(shape.bytes(), memory, offset)
}

fn check_range(bytes: u64, memory: &Memory, offset: usize) -> Result<()> {
    let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
    memory.check(offset, bytes).map_err(|error| Error::new(Code::InvalidArgument, error.to_string()))
}

impl Tier for Log {
    fn declare(&self, namespace: NamespaceId, meaning: &[u8]) -> Result<()> {
        if meaning.len() > MAX_MEANING {
            let text =
                format!("what a namespace means takes {MAX_MEANING} bytes at most, not {}", meaning.len());
            return Err(Error::new(Code::InvalidArgument, text));
        }
        let mut meanings = self.shared.meanings.lock().unwrap_or_else(PoisonError::into_inner);
        if meanings.contains_key(&namespace) {
            return Ok(());
        }
        let bytes: usize = meanings.values().map(|meaning| meaning.len()).sum();
        if meanings.len() >= MAX_NAMESPACES || bytes + meaning.len() > MAX_MEANINGS {
            let text = format!(
                "a log keeps in memory what {MAX_NAMESPACES} namespaces mean, in {MAX_MEANINGS} bytes: remove some that \
                 are not used any more"
            );
            return Err(Error::new(Code::MemoryCapReached, text));
        }
        meanings.insert(namespace, meaning.into());
        Ok(())
    }

    fn store(&self, entry: &Entry, memory: &Memory, offset: usize, within: Duration) -> Result<Place> {
        let shared = self.writable()?;
        check(entry, memory, offset)?;
        let body = entry.shape.bytes();
        let meaning = shared.meaning(&entry.namespace).map_or(0, |meaning| meaning.len() as u64);
        // With what its namespace means before it, both in the footer, and where each may have to begin.
        let room = head_len(body, entry.sums.len()) as u64 + body + meaning + 3 * 4096 + 2 * EDGE;
        if room > shared.segment_bytes {
            let text = format!(
                "a block of {body} bytes does not fit into a segment of {}: give the log larger segments, or a larger \
                 size",
                shared.segment_bytes
            );
            return Err(Error::new(Code::InvalidArgument, text));
        }
        let what = What::Block(Identity::from(entry));
        let range = (memory, offset, body as usize);
        let record = Record { what, sums: &entry.sums, body: Body::Memory(range) };
        shared.append(&record, For::Owner, Instant::now() + within)?.ok_or_else(errors::closed)
    }

    fn sync(&self, places: &[Place], within: Duration) -> Result<()> {
        self.writable()?.durable(places, Instant::now() + within)
    }

    fn load(
        &self,
        place: Place,
        expected: &Identity,
        into: &Memory,
        offset: usize,
    ) -> Result<Option<Box<[u64]>>> {
        check_range(expected.shape.bytes(), into, offset)?;
        let bytes = expected.shape.bytes();
        let loaded = self.shared.load(place, expected, (into, offset, bytes as usize))?;
        state::count(&self.shared.counters.loaded, if loaded.is_some() { bytes } else { 0 });
        Ok(loaded)
    }

    fn remove(&self, key: &BlockKey, within: Duration) -> Result<Place> {
        self.remove_what(What::Removed(*key), within)
    }

    fn remove_namespace(&self, namespace: &NamespaceId, within: Duration) -> Result<Place> {
        self.writable()?.meanings.lock().unwrap_or_else(PoisonError::into_inner).remove(namespace);
        self.remove_what(What::NamespaceRemoved(*namespace), within)
    }

    fn never_again(&self) -> Option<Error> {
        self.read_only().then(|| errors::read_only(&self.name()))
    }

    fn usage(&self) -> Usage {
        let Shared { options, counters, .. } = &*self.shared;
        let (bytes, unsynced, segments) = {
            let state = self.shared.state();
            let State { bytes, tracks, spare, .. } = &*state;
            (*bytes, state.unsynced(), (tracks.len() + usize::from(spare.is_some())) as u64)
        };
        let read = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        Usage {
            capacity: options.size,
            bytes,
            segments,
            unsynced,
            stored: read(&counters.stored),
            loaded: read(&counters.loaded),
            copied: read(&counters.copied),
            dropped: read(&counters.dropped),
            syncs: read(&counters.syncs),
            quarantined: read(&counters.quarantined),
            failures: read(&counters.failures),
        }
    }
}
