//! Writing records to the head, from the caller's thread.
//!
//! Room is taken under the lock, and the bytes are written without it: as many writes are on their way to the disk as
//! callers write at the same time.

use super::errors;
use super::files::Range;
use super::footer::listed;
use super::format::{Head, What};
use super::place::place;
use super::state::{Shared, State, Track, Writing, count};
use crate::NamespaceId;
use crate::tier::Place;
use kvik_core::{Code, Error, Result, page_sum};
use std::sync::Arc;
use std::sync::MutexGuard;
use std::time::Instant;

/// The body of a record.
#[derive(Clone, Copy)]
pub(super) enum Body<'a> {
    None,
    Bytes(&'a [u8]),
    Memory(Range<'a>),
}

impl Body<'_> {
    fn len(&self) -> u64 {
        match self {
            Body::None => 0,
            Body::Bytes(bytes) => bytes.len() as u64,
            Body::Memory((_, _, len)) => *len as u64,
        }
    }
}

/// On whose behalf a record is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum For {
    /// The owner, who waits until the log is ready.
    Owner,
    /// Making room: it takes from what is kept back for it, and writes nothing that is void meanwhile.
    Room,
}

/// A record to write.
pub(super) struct Record<'a> {
    pub what: What,
    pub sums: &'a [u64],
    pub body: Body<'a>,
}

/// Room that was taken for a record.
struct Taken {
    segment: u32,
    offset: u64,
    seed: super::format::Seed,
    file: Arc<dyn super::files::LogFile>,
    /// The number of its namespace.
    namespace: u32,
}

enum Room {
    Taken(Taken),
    /// The head does not say yet what the block's namespace means.
    Unnamed(NamespaceId),
    /// The block was removed or stored again while it was copied.
    Void,
}

impl Shared {
    /// Writes a record, and what its namespace means before it where the segment does not have that yet. `None` for a
    /// copy of a block that is void meanwhile.
    pub fn append(&self, record: &Record<'_>, whose: For, by: Instant) -> Result<Option<Place>> {
        loop {
            match self.take(record, whose, by)? {
                Room::Void => return Ok(None),
                Room::Taken(taken) => return self.write(record, taken).map(Some),
                Room::Unnamed(id) => {
                    let Some(meaning) = self.meaning(&id) else {
                        let text = format!(
                            "namespace {id} was not declared: say what it means before its first block"
                        );
                        return Err(Error::new(Code::InvalidArgument, text));
                    };
                    let (what, body) = (What::Namespace(id), Body::Bytes(&meaning));
                    self.append(&Record { what, sums: &[page_sum(&meaning)], body }, whose, by)?;
                }
            }
        }
    }

    /// What a namespace means.
    pub fn meaning(&self, id: &NamespaceId) -> Option<Arc<[u8]>> {
        self.meanings.lock().unwrap_or_else(std::sync::PoisonError::into_inner).get(id).cloned()
    }

    fn take(&self, record: &Record<'_>, whose: For, by: Instant) -> Result<Room> {
        let (body, sums) = (record.body.len(), record.sums.len());
        let mut state = self.state();
        let failures = state.room_failures.0;
        loop {
            if state.closed {
                return Err(errors::closed());
            }
            if whose == For::Room && state.watch.as_ref().is_some_and(|watch| watch.void) {
                return Ok(Room::Void);
            }
            let unsynced = state.unsynced();
            if whose == For::Owner && unsynced > 0 && unsynced + body > self.options.unsynced {
                state.sync_wanted = true;
                self.sync_work.notify_one();
                state = self.wait(state, by, "what was stored before is still not durable")?;
                continue;
            }
            if whose == For::Owner && state.head.as_ref().is_some_and(|head| head.kept_back) {
                state = self.wait_for_room(state, by, failures)?;
                continue;
            }
            if let Some(head) = &mut state.head {
                if let Some(room) = take_from(head, &record.what, body, sums) {
                    self.taken(&mut state, record, whose, &room);
                    return Ok(room);
                }
                state.close_head();
                self.sync_work.notify_one();
            }
            state = self.next_head(state, whose, by, failures)?;
        }
    }

    /// What else changes with the room that was taken.
    fn taken(&self, state: &mut State, record: &Record<'_>, whose: For, room: &Room) {
        let Room::Taken(taken) = room else { return };
        // Half of what may wait is made durable while the other half is written: a disk is idle between syncs otherwise.
        let waits = state.head.as_ref().map_or(0, |head| head.unsynced);
        if whose == For::Owner && waits >= self.options.unsynced / 2 && !state.sync_wanted {
            state.sync_wanted = true;
            self.sync_work.notify_one();
        }
        if state.dirty_since.is_none() {
            // The thread that syncs learns that the time begins to run.
            state.dirty_since = Some(Instant::now());
            self.sync_work.notify_one();
        }
        if let Some(watch) = state.watch.as_mut().filter(|_| whose == For::Owner) {
            watch.void |= match &record.what {
                What::Block(identity) => identity.key == watch.key,
                What::Removed(key) => *key == watch.key,
                What::NamespaceRemoved(id) => *id == watch.namespace,
                What::Namespace(_) => false,
            };
        }
        if let (What::NamespaceRemoved(id), Some(head)) = (&record.what, &mut state.head) {
            head.namespaces.remove(id);
            head.voided.insert(*id, taken.offset);
        }
    }

    /// Makes the spare segment the head; without one, waits until there is.
    fn next_head<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        whose: For,
        by: Instant,
        failures: u64,
    ) -> Result<MutexGuard<'a, State>> {
        if let Some(spare) = state.spare.take() {
            self.begin(&mut state, spare);
            self.room_work.notify_one();
            return Ok(state);
        }
        if whose == For::Room {
            // Called by the thread that makes segments. A crash may have left one more than there would be otherwise.
            if state.bytes > self.options.size {
                let text = format!(
                    "the log in {} has no room for what is to be kept of its oldest segment: let it drop something",
                    self.files.name()
                );
                return Err(Error::new(Code::StorageFull, text));
            }
            drop(state);
            let mut spare = self.make_segment()?;
            spare.kept_back = true;
            let mut state = self.state();
            self.begin(&mut state, spare);
            return Ok(state);
        }
        self.wait_for_room(state, by, failures)
    }

    /// Waits until room was made, unless that has failed since there were so many failures.
    fn wait_for_room<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        by: Instant,
        failures: u64,
    ) -> Result<MutexGuard<'a, State>> {
        if let (count, Some(error)) = &state.room_failures
            && *count > failures
        {
            return Err(error.clone());
        }
        state.room_wanted = true;
        self.room_work.notify_one();
        self.wait(state, by, "no room was made in the log yet")
    }

    fn begin(&self, state: &mut State, spare: Writing) {
        let track = Track { settled: false, synced_to: 0, ..Track::settled(spare.seed, spare.size) };
        self.handles.put(spare.number, spare.file.clone());
        state.tracks.insert(spare.number, track);
        state.head = Some(spare);
        self.progress.notify_all();
    }

    fn write(&self, record: &Record<'_>, taken: Taken) -> Result<Place> {
        let Taken { segment, offset, seed, file, namespace } = taken;
        let at = place(segment, offset);
        let head = Head { what: record.what, place: at, body: record.body.len(), sums: record.sums.into() };
        let bytes = head.len();
        let written = match record.body {
            Body::Bytes(body) => {
                let mut all = vec![0; bytes + body.len()];
                head.write(&seed, &mut all[..bytes]);
                all[bytes..].copy_from_slice(body);
                file.write(offset, &all, None)
            }
            Body::None | Body::Memory(_) => {
                let mut out = PageAligned::zeroed(bytes);
                head.write(&seed, out.bytes());
                let body = if let Body::Memory(range) = record.body { Some(range) } else { None };
                file.write(offset, out.bytes(), body)
            }
        };
        let written = written.map_err(|error| self.failed("writing", segment, &error));
        self.landed(record, (segment, offset, namespace), written)?;
        count(&self.counters.stored, if matches!(record.what, What::Block(_)) { head.body } else { 0 });
        Ok(at)
    }

    /// A write has ended.
    fn landed(
        &self,
        record: &Record<'_>,
        (segment, offset, namespace): (u32, u64, u32),
        written: Result<()>,
    ) -> Result<()> {
        let mut state = self.state();
        let end = match state.writing(segment) {
            Some(writing) => {
                writing.flights.remove(&offset);
                match (&written, &record.what) {
                    (Ok(()), What::Namespace(id)) if writing.voided.get(id).is_none_or(|at| *at < offset) => {
                        writing.namespaces.insert(*id, namespace);
                    }
                    (Ok(()), _) => {}
                    // Nobody took room after it, so the next one may have it; unless what has failed may still come to
                    // the disk, as NFS may have it after a time limit: it would lie over the next one then.
                    (Err(error), _)
                        if error.code == Code::StorageFull
                            && writing.flights.is_empty()
                            && writing.next > offset =>
                    {
                        self.give_back(writing, record, offset);
                    }
                    (Err(_), _) => {}
                }
                if written.is_ok() {
                    writing.listed.push(listed(offset, &record.what, namespace));
                }
                Ok(())
            }
            // Its segment failed meanwhile, with everything that was in flight.
            None => {
                let failure = state.tracks.get(&segment).and_then(|track| track.failure.clone());
                Err(failure.unwrap_or_else(errors::closed))
            }
        };
        self.progress.notify_all();
        written.and(end)
    }

    fn give_back(&self, writing: &mut Writing, record: &Record<'_>, offset: u64) {
        let bytes = super::format::head_len(record.body.len(), record.sums.len()) as u64 + record.body.len();
        if writing.next == offset + bytes {
            writing.next = offset;
            writing.records -= 1;
            // Not among them any more if a sync began meanwhile, which counts what it is for itself.
            writing.unsynced = writing.unsynced.saturating_sub(bytes);
        }
    }
}

fn take_from(head: &mut Writing, what: &What, body: u64, sums: usize) -> Option<Room> {
    let namespace = match what {
        What::Block(identity) => match head.namespaces.get(&identity.namespace) {
            Some(number) => *number,
            None => return Some(Room::Unnamed(identity.namespace)),
        },
        What::Namespace(_) => head.named,
        What::Removed(_) | What::NamespaceRemoved(_) => 0,
    };
    let offset = head.take(body, sums)?;
    head.named += u32::from(matches!(what, What::Namespace(_)));
    let (segment, seed, file) = (head.number, head.seed, head.file.clone());
    Some(Room::Taken(Taken { segment, offset, seed, file, namespace }))
}

/// Bytes at an address from which a disk can read by itself, where they are whole pages.
pub(super) struct PageAligned {
    all: Vec<u8>,
    first: usize,
    len: usize,
}

impl PageAligned {
    pub fn zeroed(len: usize) -> PageAligned {
        let align = if len.is_multiple_of(4096) { 4096 } else { 1 };
        let all = vec![0; len + align - 1];
        let first = all.as_ptr().align_offset(align).min(align - 1);
        PageAligned { all, first, len }
    }

    pub fn bytes(&mut self) -> &mut [u8] {
        &mut self.all[self.first..self.first + self.len]
    }
}
