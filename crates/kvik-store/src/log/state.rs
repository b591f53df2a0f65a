//! What the threads of a log share.
//!
//! Invariants:
//! * Segments are numbered in the order in which they are begun, and records lie in a segment in the order in which
//!   their room was taken. So the order of places is the order of writing, and the last word on a key is the one with
//!   the highest place.
//! * One segment is written to at a time, the head. A removal is written after all that it removes, and a copy of a
//!   block that was removed or stored again meanwhile is not written any more ([`Watch`]); before that its owner
//!   does not want it.
//! * Segments go from the oldest on, and no one goes before the one before it is durably gone. So a removal is there for
//!   as long as anything that it removes.
//! * A segment is used once itself and its name are durable. A record counts as durable when a sync that began after
//!   it was written has succeeded. A segment whose sync failed is never written to, or synced, again.

use super::errors;
use super::files::{Files, LogFile};
use super::footer::{LISTED, Listed, MAX_NAMESPACES};
use super::format::{EDGE, Seed, head_len, start};
use super::handles::Handles;
use super::options::LogOptions;
use crate::tier::{Place, TierOwner};
use crate::{BlockKey, NamespaceId};
use kvik_core::{Error, Result};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// A segment that is written to.
pub(super) struct Writing {
    pub number: u32,
    pub seed: Seed,
    pub file: Arc<dyn LogFile>,
    pub size: u64,
    /// Where the next record may begin.
    pub next: u64,
    /// Where records begin that are being written.
    pub flights: BTreeSet<u64>,
    /// What its footer will say, in the order in which writes ended.
    pub listed: Vec<Listed>,
    /// Records that have room, with those in flight.
    pub records: u64,
    /// The numbers of the namespaces whose meaning is written.
    pub namespaces: HashMap<NamespaceId, u32>,
    /// Where the last removal of a namespace is: what was written of it before has no number.
    pub voided: HashMap<NamespaceId, u64>,
    /// The number of the next namespace.
    pub named: u32,
    /// Bytes that no sync was begun for.
    pub unsynced: u64,
    /// It is for copies alone, until the segment has gone that they are from.
    pub kept_back: bool,
}

impl Writing {
    pub fn new(number: u32, seed: Seed, file: Arc<dyn LogFile>, size: u64) -> Writing {
        Writing {
            number,
            seed,
            file,
            size,
            next: EDGE,
            flights: BTreeSet::new(),
            listed: Vec::new(),
            records: 0,
            namespaces: HashMap::new(),
            voided: HashMap::new(),
            named: 0,
            unsynced: 0,
            kept_back: false,
        }
    }

    /// Takes room for a record with such a body, and says where it begins; `None` where it must go to another segment.
    pub fn take(&mut self, body: u64, sums: usize) -> Option<u64> {
        let at = start(self.next, body);
        let end = at + head_len(body, sums) as u64 + body;
        if end + (self.records + 1) * LISTED as u64 + EDGE > self.size
            || self.named as usize >= MAX_NAMESPACES
        {
            return None;
        }
        self.unsynced += end - self.next;
        self.next = end;
        self.records += 1;
        self.flights.insert(at);
        Some(at)
    }
}

/// A segment, in whatever state.
#[derive(Debug)]
pub(super) struct Track {
    pub seed: Seed,
    pub size: u64,
    /// What lies before here is durable.
    pub synced_to: u64,
    /// Why what lies behind will not be.
    pub failure: Option<Error>,
    /// Nothing is written to it any more.
    pub settled: bool,
    /// Loads that read it now.
    pub readers: usize,
    /// Nothing in it counts any more: no load begins, and it is removed when no one reads it.
    pub going: bool,
}

impl Track {
    /// A segment that is whole, and durable.
    pub fn settled(seed: Seed, size: u64) -> Track {
        Track { seed, size, synced_to: u64::MAX, failure: None, settled: true, readers: 0, going: false }
    }
}

/// A block that is being copied to make room: whether it was removed, or stored again, meanwhile.
#[derive(Debug)]
pub(super) struct Watch {
    pub key: BlockKey,
    pub namespace: NamespaceId,
    pub void: bool,
}

/// What the lock of a log is over.
#[derive(Default)]
pub(super) struct State {
    /// Every segment that is there, except the spare one.
    pub tracks: BTreeMap<u32, Track>,
    pub head: Option<Writing>,
    /// Segments that are full, and wait for their last sync and their footer.
    pub closing: Vec<Writing>,
    /// The next head, ready.
    pub spare: Option<Writing>,
    pub next_number: u32,
    /// Bytes of all files.
    pub bytes: u64,
    /// Bytes that the sync that runs now is for.
    pub syncing: u64,
    pub sync_wanted: bool,
    /// When the first of what nobody waits for was written.
    pub dirty_since: Option<Instant>,
    /// Somebody waits for a spare segment.
    pub room_wanted: bool,
    /// How often no room was found, and why the last time.
    pub room_failures: (u64, Option<Error>),
    pub watch: Option<Watch>,
    pub closed: bool,
}

impl State {
    /// The segment of this number, if it is written to.
    pub fn writing(&mut self, number: u32) -> Option<&mut Writing> {
        self.head.iter_mut().chain(&mut self.closing).find(|writing| writing.number == number)
    }

    /// Bytes that have room and are not durable yet. Nobody keeps count of them: what is given up in any way is not
    /// among them any more.
    pub fn unsynced(&self) -> u64 {
        self.syncing + self.head.iter().chain(&self.closing).map(|writing| writing.unsynced).sum::<u64>()
    }

    /// Full, or to be closed for another reason: nothing more goes to the head.
    pub fn close_head(&mut self) {
        self.closing.extend(self.head.take());
        self.sync_wanted = true;
    }

    /// Nothing of a segment that is not durable yet will be.
    pub fn fail(&mut self, number: u32, error: &Error) {
        if self.head.as_ref().is_some_and(|head| head.number == number) {
            self.head = None;
        }
        self.closing.retain(|writing| writing.number != number);
        if let Some(track) = self.tracks.get_mut(&number) {
            track.failure = Some(error.clone());
            track.settled = true;
        }
    }
}

/// What was counted since the log was opened.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub stored: AtomicU64,
    pub loaded: AtomicU64,
    pub copied: AtomicU64,
    pub dropped: AtomicU64,
    pub syncs: AtomicU64,
    pub quarantined: AtomicU64,
    pub failures: AtomicU64,
}

/// A log, as its threads see it.
pub(super) struct Shared {
    pub files: Box<dyn Files>,
    pub handles: Handles,
    pub owner: Arc<dyn TierOwner>,
    pub options: LogOptions,
    pub segment_bytes: u64,
    pub state: Mutex<State>,
    /// For the thread that syncs.
    pub sync_work: Condvar,
    /// For the thread that makes room.
    pub room_work: Condvar,
    /// For everybody else: something was written, synced, read, or there is room.
    pub progress: Condvar,
    /// What namespaces mean.
    pub meanings: Mutex<HashMap<NamespaceId, Arc<[u8]>>>,
    /// Records that are not served again.
    pub quarantine: Mutex<HashSet<Place>>,
    pub counters: Counters,
}

impl Shared {
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for progress until `by`.
    ///
    /// # Errors
    /// `DeadlineExceeded` with this text, `StorageFailed` where the log is closed.
    pub fn wait<'a>(
        &self,
        state: MutexGuard<'a, State>,
        by: Instant,
        what: &str,
    ) -> Result<MutexGuard<'a, State>> {
        if state.closed {
            return Err(errors::closed());
        }
        let left = by.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(errors::late(what, &self.files.name()));
        }
        Ok(self.progress.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0)
    }

    /// A failure of the disk, counted.
    pub fn failed(&self, what: &str, segment: u32, error: &std::io::Error) -> Error {
        count(&self.counters.failures, 1);
        errors::disk(&format!("{what} segment {segment} of the log in {}", self.files.name()), error)
    }
}

/// Adds to a counter, which orders nothing.
pub(super) fn count(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, std::sync::atomic::Ordering::Relaxed);
}

/// The name of a segment's file.
pub(super) fn file_name(number: u32) -> String {
    format!("{number:010}.kvik")
}

/// The number in the name of a segment's file.
pub(super) fn number_in(name: &str) -> Option<u32> {
    let number = name.strip_suffix(".kvik")?.parse().ok()?;
    (file_name(number) == name).then_some(number)
}
