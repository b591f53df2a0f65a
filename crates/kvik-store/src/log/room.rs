//! Making room: one thread keeps the next segment ready, and empties the oldest one where there is no room for it.
//!
//! The oldest segment goes, and not the emptiest. What is in it that its owner wants is copied to the head, and is
//! durable there before the segment goes; so a block that is wanted goes round, and one that nobody asked for in a whole
//! round is dropped. The order is what makes removals simple: what a removal in the oldest segment removes can only have
//! lain in segments that are gone, so it goes with its segment and is never copied. To empty another one first, every
//! removal would have to be copied until everything that it removes is known to be gone.
//!
//! One segment's bytes are kept back for the copies, which need no more: they are some of what one segment held. Until
//! the old one has gone, nothing else is written there.

use super::append::{Body, For, Record};
use super::format::{Seed, What, header};
use super::place::{place, position};
use super::records::Segment;
use super::state::{Shared, State, Watch, Writing, count, file_name};
use crate::tier::{Identity, Place};
use kvik_core::{Code, Error, Result};
use kvik_host::{HugePages, Memory};
use std::collections::HashSet;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long the copies may take to become durable.
const COPY_LIMIT: Duration = Duration::from_secs(60);
/// Blocks that are copied before they are made durable.
const BATCH: usize = 4096;
/// A log in which everything is to be kept is not looked through again for so long.
const FULL_FOR: Duration = Duration::from_secs(1);
/// How often at least is tried what cannot be read, before it is given up.
const TIMES: u32 = 3;

/// What the thread remembers.
#[derive(Default)]
struct Keeper {
    /// Where blocks lie while they are copied.
    buffer: Option<Memory>,
    full_until: Option<Instant>,
    unreadable: Option<Unreadable>,
}

/// A segment that could not be read, or not all of it.
struct Unreadable {
    number: u32,
    times: u32,
    since: Instant,
    /// Blocks of it that could not be read and that their owner keeps: that it does is asked once.
    kept: HashSet<Place>,
}

impl Keeper {
    /// A segment could not be read, or this block of it. Whether that is given up.
    fn gives_up(&mut self, number: u32, block: Option<Place>, after: Duration) -> bool {
        let same = self.unreadable.take().filter(|other| other.number == number);
        let new = || Unreadable { number, times: 0, since: Instant::now(), kept: HashSet::new() };
        let unreadable = self.unreadable.insert(same.unwrap_or_else(new));
        unreadable.times += 1;
        unreadable.kept.extend(block);
        unreadable.times >= TIMES && unreadable.since.elapsed() >= after
    }

    fn is_kept(&self, block: Place) -> bool {
        self.unreadable.as_ref().is_some_and(|unreadable| unreadable.kept.contains(&block))
    }
}

/// Why a block was not copied.
enum Uncopied {
    /// It cannot be read.
    Unreadable(Error),
    Other(Error),
}

/// Blocks that were copied and are not durable yet.
#[derive(Default)]
struct Copies {
    moved: Vec<(Identity, Place, Place)>,
    bytes: u64,
}

impl Shared {
    /// The thread that makes room, until the log is closed.
    pub fn keep_room(&self) {
        let mut keeper = Keeper::default();
        loop {
            {
                let mut state = self.state();
                let wanted = |state: &State| {
                    let ahead = state.head.is_some() && state.room_failures.1.is_none();
                    state.spare.is_none() && (state.room_wanted || ahead)
                };
                while !state.closed && !wanted(&state) {
                    state = self.room_work.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                if state.closed {
                    if let Some(Writing { number, file, .. }) = state.spare.take() {
                        // Of a file that is open NFS keeps the room.
                        drop(file);
                        let _ = self.files.remove(&file_name(number));
                    }
                    return;
                }
            }
            let made = self.make_room(&mut keeper);
            let mut state = self.state();
            state.room_wanted = false;
            match made {
                Ok(spare) => {
                    state.room_failures.1 = None;
                    state.spare = Some(spare);
                }
                Err(error) => {
                    log::warn!("no room in the log in {}: {}", self.files.name(), error.text);
                    state.room_failures = (state.room_failures.0 + 1, Some(error));
                }
            }
            self.progress.notify_all();
        }
    }

    fn make_room(&self, keeper: &mut Keeper) -> Result<Writing> {
        let full = || {
            let text = format!(
                "everything in the log in {} is to be kept, and it has no more than its {} bytes: give it more, or let \
                 it drop something",
                self.files.name(),
                self.options.size
            );
            Error::new(Code::StorageFull, text)
        };
        if keeper.full_until.is_some_and(|until| Instant::now() < until) {
            return Err(full());
        }
        let rounds = self.state().tracks.len();
        for _ in 0..=rounds {
            let state = self.state();
            if state.bytes + 2 * self.segment_bytes <= self.options.size {
                drop(state);
                return self.make_segment();
            }
            let Some(oldest) = self.oldest(state)? else { break };
            let emptied = self.empty(oldest, keeper);
            if emptied.is_ok() {
                // What was kept back for the copies is everybody's now. Before, others would fill it, and each attempt
                // would take another segment.
                self.state().head.iter_mut().for_each(|head| head.kept_back = false);
            }
            self.progress.notify_all();
            emptied?;
        }
        keeper.full_until = Some(Instant::now() + FULL_FOR);
        Err(full())
    }

    /// The oldest segment, once nothing is written to it any more; `None` where it is the head.
    fn oldest(&self, mut state: MutexGuard<'_, State>) -> Result<Option<u32>> {
        let by = Instant::now() + COPY_LIMIT;
        loop {
            let Some((&number, track)) = state.tracks.first_key_value() else { return Ok(None) };
            if track.settled {
                return Ok(Some(number));
            }
            if state.head.as_ref().is_some_and(|head| head.number == number) {
                return Ok(None);
            }
            state.sync_wanted = true;
            self.sync_work.notify_one();
            state = self.wait(state, by, "a full segment is still not durable")?;
        }
    }

    /// Makes the next segment: itself and its name are durable when this returns.
    pub fn make_segment(&self) -> Result<Writing> {
        let (number, size) = {
            let mut state = self.state();
            let number = state.next_number;
            let Some(next) = number.checked_add(1) else {
                let text =
                    "the log has used up the numbers of its segments: begin a new one in another directory";
                return Err(Error::new(Code::StorageFull, text));
            };
            state.next_number = next;
            state.bytes += self.segment_bytes;
            (number, self.segment_bytes)
        };
        self.create(number, size).map_err(|error| {
            let _ = self.files.remove(&file_name(number));
            self.state().bytes -= size;
            self.failed("making", number, &error)
        })
    }

    fn create(&self, number: u32, size: u64) -> io::Result<Writing> {
        let mut seed = Seed::default();
        getrandom::fill(&mut seed).map_err(|error| io::Error::other(error.to_string()))?;
        let file = self.files.create(&file_name(number))?;
        file.allocate(size)?;
        file.write(0, &header(number, &seed), None)?;
        file.sync()?;
        self.files.sync()?;
        Ok(Writing::new(number, seed, file, size))
    }

    /// Copies what is wanted of a segment, and removes it.
    fn empty(&self, number: u32, keeper: &mut Keeper) -> Result<()> {
        let Some((seed, size, going)) =
            self.state().tracks.get(&number).map(|track| (track.seed, track.size, track.going))
        else {
            return Ok(());
        };
        if !going {
            let all_told = match self.copy_wanted((number, seed, size), keeper) {
                Ok(copied) => copied?,
                Err(error) => {
                    let error = self.failed("reading", number, &error);
                    if !keeper.gives_up(number, None, self.options.unreadable) {
                        return Err(error);
                    }
                    log::error!("{}: it is given up, and what it holds is lost", error.text);
                    false
                }
            };
            if !all_told {
                self.owner.gone(place(number, 0), place(number, size));
            }
        }
        self.remove_segment(number)
    }

    /// Copies what is wanted. Whether the owner was told of all blocks of the segment: one without a footer may have
    /// damaged ones, which are passed over.
    fn copy_wanted(
        &self,
        (number, seed, size): (u32, Seed, u64),
        keeper: &mut Keeper,
    ) -> io::Result<Result<bool>> {
        let file = self.handles.get(&*self.files, number)?;
        let segment = Segment { file: &*file, number, size };
        let mut copies = Copies::default();
        let mut each = |offset, what| match what {
            What::Block(identity) => self.copy(&identity, place(number, offset), &mut copies, keeper),
            _ => Ok(()),
        };
        let result = match segment.trailer()? {
            Some(trailer) => segment.listed(&trailer, each).map(|listed| listed.map(|()| true)),
            None => {
                let scanned = segment.scan(&seed, |offset, what, _| each(offset, what));
                scanned.map(|scanned| scanned.map(|_| false))
            }
        };
        // Also where it did not come to the end: their owner does not want these twice.
        let settled = self.settle(&mut copies);
        result.map(|result| result.and_then(|all_told| settled.map(|()| all_told)))
    }

    /// Copies a block to the head, if its owner wants it.
    fn copy(&self, identity: &Identity, from: Place, copies: &mut Copies, keeper: &mut Keeper) -> Result<()> {
        let (key, namespace) = (identity.key, identity.namespace);
        self.state().watch = Some(Watch { key, namespace, void: false });
        let wanted = match keeper.is_kept(from) {
            true => self.owner.knows(identity, from),
            false => self.owner.keep(identity, from),
        };
        let copied = if wanted { self.copy_one(identity, from, keeper) } else { Ok(None) };
        self.state().watch = None;
        let copied = match copied {
            Ok(copied) => copied,
            Err(Uncopied::Other(error)) => return Err(error),
            Err(Uncopied::Unreadable(error))
                if !keeper.gives_up(position(from).0, Some(from), self.options.unreadable) =>
            {
                return Err(error);
            }
            Err(Uncopied::Unreadable(error)) => {
                log::error!("{}: block {key} is given up", error.text);
                None
            }
        };
        match copied {
            Some(to) => {
                copies.moved.push((*identity, from, to));
                copies.bytes += identity.shape.bytes();
            }
            None => {
                // An earlier attempt has copied it, perhaps.
                count(&self.counters.dropped, u64::from(self.owner.knows(identity, from)));
                self.owner.dropped(identity, from);
            }
        }
        if copies.moved.len() >= BATCH || copies.bytes >= self.options.unsynced {
            self.settle(copies)?;
        }
        Ok(())
    }

    /// Where the copy of a block is; `None` where it is damaged, or void meanwhile.
    fn copy_one(
        &self,
        identity: &Identity,
        from: Place,
        keeper: &mut Keeper,
    ) -> Result<Option<Place>, Uncopied> {
        let bytes = identity.shape.bytes() as usize;
        let buffer = match keeper.buffer.take() {
            Some(buffer) if buffer.len() >= bytes => buffer,
            _ => Memory::shared(bytes, HugePages::Never)
                .map_err(|error| Uncopied::Other(Error::new(Code::MemoryCapReached, error.to_string())))?,
        };
        let buffer = keeper.buffer.insert(buffer);
        let range = (&*buffer, 0, bytes);
        let sums = match self.load(from, identity, range) {
            Ok(Some(sums)) => sums,
            Ok(None) => return Ok(None),
            Err(error) if error.code == Code::ChecksumMismatch => {
                // Ever fewer are told of: a disk that decays must not fill the log. All are counted.
                let told = self.counters.quarantined.load(Ordering::Relaxed).is_power_of_two();
                log::log!(if told { log::Level::Warn } else { log::Level::Debug }, "{}", error.text);
                return Ok(None);
            }
            Err(error) if error.code == Code::StorageFailed => return Err(Uncopied::Unreadable(error)),
            Err(error) => return Err(Uncopied::Other(error)),
        };
        let record = Record { what: What::Block(*identity), sums: &sums, body: Body::Memory(range) };
        match self.append(&record, For::Room, Instant::now() + COPY_LIMIT) {
            // Its namespace has no meaning any more: it was removed.
            Err(error) if error.code == Code::InvalidArgument => Ok(None),
            other => other.map_err(Uncopied::Other),
        }
    }

    /// Makes the copies durable, and tells the owner where they are.
    fn settle(&self, copies: &mut Copies) -> Result<()> {
        let places: Vec<Place> = copies.moved.iter().map(|(_, _, to)| *to).collect();
        self.durable(&places, Instant::now() + COPY_LIMIT)?;
        for (identity, from, to) in copies.moved.drain(..) {
            count(&self.counters.copied, identity.shape.bytes());
            self.owner.moved(&identity, from, to);
        }
        copies.bytes = 0;
        Ok(())
    }

    /// Removes the oldest segment when nobody reads it any more. Nothing younger goes before it is durably gone.
    fn remove_segment(&self, number: u32) -> Result<()> {
        let mut state = self.state();
        loop {
            let Some(track) = state.tracks.get_mut(&number) else { return Ok(()) };
            track.going = true;
            if track.readers == 0 {
                break;
            }
            state = self.wait(state, Instant::now() + COPY_LIMIT, "a segment is still being read")?;
        }
        drop(state);
        self.handles.close(number);
        match self.files.remove(&file_name(number)) {
            // The last attempt went so far.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            removed => removed.map_err(|error| self.failed("removing", number, &error))?,
        }
        self.files.sync().map_err(|error| self.failed("removing", number, &error))?;
        let mut state = self.state();
        if let Some(track) = state.tracks.remove(&number) {
            state.bytes = state.bytes.saturating_sub(track.size);
        }
        self.quarantine
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .retain(|damaged| position(*damaged).0 != number);
        Ok(())
    }
}
