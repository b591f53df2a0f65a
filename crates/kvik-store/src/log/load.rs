//! Reading a block and comparing all that is known of it.

use super::append::PageAligned;
use super::files::Range;
use super::format::{Head, What, head_len};
use super::place::position;
use super::state::{Shared, count};
use crate::Shape;
use crate::tier::{Identity, Place};
use kvik_core::{Code, Error, PageSum, Result};
use kvik_host::{HostError, Memory};
use std::sync::PoisonError;

/// Records that are remembered as damaged. Beyond that they are found out again each time.
const QUARANTINED: usize = 1 << 16;

/// A segment that is read, and stays for as long.
struct Reading<'a> {
    shared: &'a Shared,
    number: u32,
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        if let Some(track) = state.tracks.get_mut(&self.number) {
            track.readers -= 1;
            if track.going && track.readers == 0 {
                self.shared.progress.notify_all();
            }
        }
    }
}

impl Shared {
    /// Reads the block at `place` to `into`, whose length is that of the block; `None` where its segment has gone.
    pub fn load(&self, place: Place, expected: &Identity, into: Range<'_>) -> Result<Option<Box<[u64]>>> {
        let (number, offset) = position(place);
        let seed = {
            let mut state = self.state();
            let Some(track) = state.tracks.get_mut(&number).filter(|track| !track.going) else {
                return Ok(None);
            };
            track.readers += 1;
            track.seed
        };
        let _reading = Reading { shared: self, number };
        if self.quarantine.lock().unwrap_or_else(PoisonError::into_inner).contains(&place) {
            return Err(self.mismatch(place, "it was found damaged before"));
        }
        let failed = |error| self.failed("reading", number, &error);
        let file = self.handles.get(&*self.files, number).map_err(failed)?;
        let mut head = PageAligned::zeroed(head_len(expected.shape.bytes(), expected.shape.sums()));
        let whole = head.bytes().len() + into.2;
        let read = file.read(offset, head.bytes(), Some(into)).map_err(failed)?;
        if read < whole {
            return Err(self.damaged(place, &format!("its segment ends after {read} of its {whole} bytes")));
        }
        let head = Head::read(head.bytes(), &seed, number, offset);
        let head = head.map_err(|what| self.damaged(place, &format!("its {what}")))?;
        if let Some(what) = difference(&head.what, expected) {
            return Err(self.damaged(place, &what));
        }
        match compare(into, &expected.shape, &head.sums) {
            Ok(None) => Ok(Some(head.sums)),
            Ok(Some(part)) => {
                let text = format!("part {part} of {} does not have its checksum", head.sums.len());
                Err(self.damaged(place, &text))
            }
            Err(error) => Err(Error::new(Code::InvalidArgument, error.to_string())),
        }
    }

    /// A record that is not what it should be is not read again.
    fn damaged(&self, place: Place, what: &str) -> Error {
        count(&self.counters.quarantined, 1);
        let mut quarantine = self.quarantine.lock().unwrap_or_else(PoisonError::into_inner);
        if quarantine.len() < QUARANTINED {
            quarantine.insert(place);
        }
        self.mismatch(place, what)
    }

    fn mismatch(&self, place: Place, what: &str) -> Error {
        let (number, offset) = position(place);
        let name = self.files.name();
        let text = format!(
            "the record at byte {offset} of segment {number} of the log in {name} is not the block that was stored: \
             {what}. It is a miss; where there are more, look at the disk's health"
        );
        Error::new(Code::ChecksumMismatch, text)
    }
}

/// How what was found differs from what is expected.
pub(crate) fn difference(found: &What, expected: &Identity) -> Option<String> {
    let What::Block(found) = found else { return Some("it is no block".into()) };
    let parent = |identity: &Identity| match identity.parent {
        Some(parent) => format!("has the parent {parent}"),
        None => "has no parent".into(),
    };
    if found.key != expected.key {
        Some(format!("it has the key {}, not {}", found.key, expected.key))
    } else if found.namespace != expected.namespace {
        Some(format!("it is of namespace {}, not {}", found.namespace, expected.namespace))
    } else if found.parent != expected.parent {
        Some(format!("it {}, where the expected one {}", parent(found), parent(expected)))
    } else if found.shape != expected.shape {
        Some(format!("it has the shape {:?}, not {:?}", found.shape, expected.shape))
    } else {
        None
    }
}

/// The first part of a block that does not have its sum.
pub(crate) fn compare(
    (memory, at, len): (&Memory, usize, usize),
    shape: &Shape,
    sums: &[u64],
) -> Result<Option<usize>, HostError> {
    let part = shape.summed_layers() as usize * shape.layer_bytes() as usize;
    let mut scratch = Vec::new();
    for (number, expected) in sums.iter().enumerate() {
        let from = number * part;
        let bytes = part.min(len - from);
        let sum = match memory.sum([(at + from, bytes)].into_iter(), None)? {
            Some(sum) => sum,
            None => {
                scratch.resize(16 << 10, 0);
                let mut sum = PageSum::default();
                memory.for_each_chunk(at + from, bytes, &mut scratch, |bytes| sum.update(bytes))?;
                sum.finish()
            }
        };
        if sum != *expected {
            return Ok(Some(number));
        }
    }
    Ok(None)
}
