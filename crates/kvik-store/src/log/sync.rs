//! Making the log durable: one thread syncs for all who wait, and closes the segments that are full.
//!
//! The policy: a sync begins as soon as somebody waits for one, as soon as half of the bound is not durable, and at
//! the latest after [`LogOptions::flush`](super::LogOptions::flush) where nobody waits. Whoever comes while one runs
//! shares the next.

use super::errors;
use super::files::LogFile;
use super::footer::{LISTED, Listed, offset_of};
use super::format::{EDGE, Trailer};
use super::place::position;
use super::state::{Shared, State, Writing, count, file_name};
use crate::tier::Place;
use kvik_core::{PageSum, Result};
use std::io;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A segment that is synced: what was written of it before that counts.
struct Job {
    number: u32,
    file: Arc<dyn LogFile>,
    to: u64,
    bytes: u64,
}

impl Shared {
    /// Waits until these records are durable.
    pub fn durable(&self, places: &[Place], by: Instant) -> Result<()> {
        let mut state = self.state();
        loop {
            let mut waits = false;
            for place in places {
                let (number, offset) = position(*place);
                match state.tracks.get(&number) {
                    // Its segment was durable, and has gone to make room.
                    None => {}
                    Some(track) if track.synced_to > offset => {}
                    Some(track) => match &track.failure {
                        Some(error) => return Err(error.clone()),
                        None => waits = true,
                    },
                }
            }
            if !waits {
                return Ok(());
            }
            if !state.sync_wanted {
                state.sync_wanted = true;
                self.sync_work.notify_one();
            }
            state = self.wait(state, by, "what was stored is still not durable")?;
        }
    }

    /// The thread that syncs, until the log is closed.
    pub fn keep_durable(&self) {
        loop {
            let mut state = self.sync_due();
            let closed = state.closed;
            if closed {
                state.close_head();
            }
            self.sync_all(state);
            self.close_full();
            if closed {
                return;
            }
        }
    }

    /// Waits until a sync is due.
    fn sync_due(&self) -> MutexGuard<'_, State> {
        let mut state = self.state();
        loop {
            let left = state.dirty_since.map(|since| self.options.flush.saturating_sub(since.elapsed()));
            if state.closed || state.sync_wanted || left.is_some_and(|left| left.is_zero()) {
                return state;
            }
            let left = left.unwrap_or(Duration::from_secs(3600));
            state = self.sync_work.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn sync_all(&self, mut state: MutexGuard<'_, State>) {
        (state.sync_wanted, state.dirty_since) = (false, None);
        let mut jobs = Vec::new();
        let State { closing, head, .. } = &mut *state;
        for writing in closing.iter_mut().chain(head) {
            let bytes = std::mem::take(&mut writing.unsynced);
            let (number, file, to) = (writing.number, writing.file.clone(), writing.next);
            jobs.push(Job { number, file, to, bytes });
        }
        state.syncing = jobs.iter().map(|job| job.bytes).sum();
        // What has room is being written; a sync that began before its end would not count for it.
        while jobs.iter().any(|job| {
            state
                .writing(job.number)
                .and_then(|writing| writing.flights.first())
                .is_some_and(|at| *at < job.to)
        }) {
            state = self.progress.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        // What could not be written may have given its room back: whatever takes it from now on is for the next sync.
        for job in &mut jobs {
            if let Some(writing) = state.writing(job.number) {
                job.to = job.to.min(writing.next);
            }
        }
        // Of what could not be written nothing is left to sync.
        jobs.retain(|job| state.tracks.get(&job.number).is_some_and(|track| track.synced_to < job.to));
        state.syncing = jobs.iter().map(|job| job.bytes).sum();
        self.progress.notify_all();
        drop(state);
        for job in jobs {
            let synced = job.file.sync().map_err(|error| self.failed("syncing", job.number, &error));
            let mut state = self.state();
            state.syncing = state.syncing.saturating_sub(job.bytes);
            match synced {
                Ok(()) => {
                    count(&self.counters.syncs, 1);
                    if let Some(track) = state.tracks.get_mut(&job.number) {
                        track.synced_to = job.to;
                    }
                }
                Err(error) => {
                    log::warn!(
                        "{}: what was stored since the last sync does not count as durable",
                        error.text
                    );
                    state.fail(job.number, &error);
                }
            }
            self.progress.notify_all();
        }
    }

    /// Writes the footers of the segments that are full and durable.
    fn close_full(&self) {
        let full = {
            let mut state = self.state();
            let State { closing, tracks, .. } = &mut *state;
            let durable = |writing: &mut Writing| {
                let synced_to = tracks.get(&writing.number).map_or(0, |track| track.synced_to);
                writing.flights.is_empty() && (writing.records == 0 || synced_to >= writing.next)
            };
            closing.extract_if(.., durable).collect::<Vec<_>>()
        };
        for writing in full {
            let (number, was) = (writing.number, writing.size);
            let size = if writing.listed.is_empty() {
                // Of a file that is open NFS keeps the room.
                self.handles.close(number);
                drop(writing);
                self.files.remove(&file_name(number)).map(|()| None)
            } else {
                close(writing).map(Some)
            };
            let size = size.unwrap_or_else(|error| {
                // It is looked through the next time.
                let error = self.failed("closing", number, &error);
                log::warn!("{}", error.text);
                Some(was)
            });
            self.closed_one(number, was, size);
        }
    }

    fn closed_one(&self, number: u32, was: u64, size: Option<u64>) {
        let mut state = self.state();
        state.bytes = state.bytes.saturating_sub(was - size.unwrap_or(0).min(was));
        match (size, state.tracks.get_mut(&number)) {
            (Some(size), Some(track)) => (track.settled, track.size) = (true, size),
            _ => {
                state.tracks.remove(&number);
                self.handles.close(number);
            }
        }
        self.progress.notify_all();
        self.room_work.notify_one();
    }

    /// The log may not be used any more; what is open of it is closed by whoever is told.
    pub fn close(&self) {
        self.state().closed = true;
        for waiting in [&self.sync_work, &self.room_work, &self.progress] {
            waiting.notify_all();
        }
    }
}

/// Writes a segment's footer, and gives back what it does not need. Says how long it is now.
fn close(writing: Writing) -> io::Result<u64> {
    let Writing { number, seed, file, next, listed, size, .. } = writing;
    write_footer(&*file, (number, seed), (next, size), listed)
}

/// As [`close`], of a segment whose records end at `end` and that has `size` bytes.
pub(super) fn write_footer(
    file: &dyn LogFile,
    (number, seed): (u32, super::format::Seed),
    (end, size): (u64, u64),
    mut listed: Vec<Listed>,
) -> io::Result<u64> {
    let wrong = |_| io::Error::from(io::ErrorKind::FileTooLarge);
    let records = u32::try_from(listed.len()).map_err(wrong)?;
    listed.sort_unstable_by_key(offset_of);
    let footer = (listed.len() * LISTED) as u64;
    let len = (end + footer + EDGE).next_multiple_of(4096);
    if len < size {
        file.truncate(len)?;
    } else if len > size {
        // A segment that was looked through may have no room for it.
        return Ok(size);
    }
    let mut sum = PageSum::default();
    listed.iter().for_each(|record| sum.update(record));
    let at = len - EDGE - footer;
    let trailer = Trailer { number, seed, records, footer: at, sum: sum.finish() };
    let mut bytes = listed.concat();
    bytes.extend(trailer.to_bytes());
    file.write(at, &bytes, None)?;
    file.sync()?;
    Ok(len)
}

impl Drop for super::Log {
    fn drop(&mut self) {
        if self.fork.is_child() {
            return;
        }
        self.shared.close();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                log::error!("{}", errors::closed().text);
            }
        }
    }
}
