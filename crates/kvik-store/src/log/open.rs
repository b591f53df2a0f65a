//! Opening a log: finding what it holds.
//!
//! Everything is looked at before anything is changed, so that a log of a newer version stays as it is. Segments with a
//! footer tell what they hold at once. Those without are looked through; where the log may be written to they get their
//! footer then. What a crash has left of a segment that was being made is removed: nothing in it can count.

use super::errors;
use super::files::{Files, LogFile};
use super::footer::Listed;
use super::format::{EDGE, Header, Seed, Trailer, VERSION, What, read_header};
use super::place::place;
use super::records::{Scanned, Segment};
use super::state::{State, Track, file_name, number_in};
use super::sync::write_footer;
use crate::NamespaceId;
use crate::tier::{Found, TierOwner};
use kvik_core::{Code, Error, Result};
use std::collections::HashMap;
use std::io;
use std::sync::Arc;

/// What was found.
pub(super) struct Opened {
    pub state: State,
    pub meanings: HashMap<NamespaceId, Arc<[u8]>>,
    /// Records and segments that were damaged.
    pub damaged: u64,
}

/// A segment that can be used.
struct Usable {
    number: u32,
    size: u64,
    seed: Seed,
    trailer: Option<Trailer>,
}

enum Kind {
    Usable(Usable),
    /// It holds nothing.
    Blank,
    Foreign,
}

pub(super) fn open(files: &dyn Files, owner: &dyn TierOwner) -> Result<Opened> {
    let name = files.name();
    let failed = |what: &str| {
        let what = format!("{what} of the log in {name}");
        move |error: io::Error| errors::disk(&what, &error)
    };
    let mut numbers: Vec<(u32, u64)> = files
        .list()
        .map_err(failed("listing the segments"))?
        .into_iter()
        .filter_map(|(name, size)| Some((number_in(&name)?, size)))
        .collect();
    numbers.sort_unstable();
    let mut kinds = Vec::new();
    for (number, size) in &numbers {
        let file = files.open(&file_name(*number)).map_err(failed("opening a segment"))?;
        kinds.push(look(&name, &*file, *number, *size)?);
    }
    let mut opened = Opened { state: State::default(), meanings: HashMap::new(), damaged: 0 };
    opened.state.next_number = numbers.last().map_or(0, |(number, _)| number.saturating_add(1));
    opened.state.bytes = numbers.iter().map(|(_, size)| size).sum();
    for (kind, (number, size)) in kinds.into_iter().zip(numbers) {
        match kind {
            Kind::Usable(segment) => opened.take(files, owner, segment)?,
            Kind::Blank if files.read_only() => {}
            Kind::Blank => {
                files.remove(&file_name(number)).map_err(failed("removing an empty segment"))?;
                opened.state.bytes -= size;
            }
            Kind::Foreign => {
                opened.damaged += 1;
                log::warn!(
                    "{} in {name} is no segment of this log, or its header is damaged: it is left as it is; remove it if \
                     nobody misses it",
                    file_name(number)
                );
            }
        }
    }
    if !files.read_only() {
        files.sync().map_err(failed("syncing the directory"))?;
    }
    Ok(opened)
}

/// What a file is. One that cannot be read is as good as foreign.
fn look(name: &str, file: &dyn LogFile, number: u32, size: u64) -> Result<Kind> {
    let segment = Segment { file, number, size };
    let read = segment.first().and_then(|first| Ok((read_header(&first), segment.trailer()?)));
    let (header, trailer) = match read {
        Ok(read) => read,
        Err(error) => {
            log::warn!("{}", errors::disk(&format!("reading {} in {name}", file_name(number)), &error).text);
            return Ok(Kind::Foreign);
        }
    };
    let usable = |seed, trailer| Kind::Usable(Usable { number, size, seed, trailer });
    Ok(match (header, trailer) {
        (Header::Newer(version), _) => {
            let text = format!(
                "segment {number} of the log in {name} has version {version} of the format, and this kvik knows up to \
                 {VERSION}: use a newer kvik, or another directory. Nothing was changed"
            );
            return Err(Error::new(Code::StorageFailed, text));
        }
        (Header::Segment(own, seed), trailer) if own == number => {
            usable(seed, trailer.filter(|trailer| trailer.seed == seed))
        }
        // Its end says who it is.
        (Header::Foreign | Header::Blank, Some(trailer)) => usable(trailer.seed, Some(trailer)),
        (Header::Blank, None) => Kind::Blank,
        _ => Kind::Foreign,
    })
}

impl Opened {
    fn take(&mut self, files: &dyn Files, owner: &dyn TierOwner, usable: Usable) -> Result<()> {
        let Usable { number, size, seed, trailer } = usable;
        let name = files.name();
        let failed = |error| errors::disk(&format!("reading segment {number} of the log in {name}"), &error);
        let file = files.open(&file_name(number)).map_err(failed)?;
        let segment = Segment { file: &*file, number, size };
        let mut track = Track::settled(seed, size);
        let found = match trailer {
            Some(trailer) => segment
                .listed(&trailer, |offset, what| self.found(owner, &segment, &seed, (offset, what)))
                .map(|listed| listed.map(|()| None)),
            None => self.look_through(owner, &segment, &seed).map(|scanned| scanned.map(Some)),
        };
        match found.and_then(|found| found.map_err(io::Error::other)) {
            Ok(None) => {}
            Ok(Some((scanned, listed))) => {
                self.damaged += scanned.damaged;
                if !files.read_only() {
                    match self.close(files, &segment, &seed, scanned, listed) {
                        Ok(Some(size)) => track.size = size,
                        Ok(None) => return Ok(()),
                        // It is looked through again the next time.
                        Err(error) => log::warn!("{}", failed(error).text),
                    }
                }
            }
            Err(error) => {
                self.damaged += 1;
                log::warn!("{}: what it holds is not found", failed(error).text);
            }
        }
        self.state.tracks.insert(number, track);
        Ok(())
    }

    fn look_through(
        &mut self,
        owner: &dyn TierOwner,
        segment: &Segment<'_>,
        seed: &Seed,
    ) -> io::Result<Result<(Scanned, Vec<Listed>)>> {
        let mut all = Vec::new();
        let scanned = segment.scan(seed, |offset, what, listed| {
            all.push(listed);
            self.found(owner, segment, seed, (offset, what))
        });
        Ok(scanned?.map(|scanned| (scanned, all)))
    }

    /// Gives a segment that was looked through its footer; removes it where it holds nothing.
    fn close(
        &mut self,
        files: &dyn Files,
        segment: &Segment<'_>,
        seed: &Seed,
        scanned: Scanned,
        listed: Vec<Listed>,
    ) -> io::Result<Option<u64>> {
        let size = if listed.is_empty() && scanned.damaged == 0 {
            files.remove(&file_name(segment.number))?;
            None
        } else {
            // What was written and never synced is made durable first: the footer vouches for it.
            segment.file.sync()?;
            let edges = (scanned.end.max(EDGE), segment.size);
            Some(write_footer(segment.file, (segment.number, *seed), edges, listed)?)
        };
        self.state.bytes -= segment.size - size.unwrap_or(0);
        Ok(size)
    }

    /// Tells the owner of a record. A block whose namespace has no meaning is nobody's.
    fn found(
        &mut self,
        owner: &dyn TierOwner,
        segment: &Segment<'_>,
        seed: &Seed,
        (offset, what): (u64, What),
    ) -> Result<()> {
        match what {
            What::Block(identity) if self.meanings.contains_key(&identity.namespace) => {
                owner.found(Found::Block(identity, place(segment.number, offset)));
            }
            What::Block(_) => self.damaged += 1,
            What::Namespace(id) => {
                let meaning = segment.meaning(offset, seed);
                let meaning =
                    meaning.map_err(|error| errors::disk("reading what a namespace means", &error))?;
                match meaning {
                    Some(meaning) => {
                        owner.found(Found::Namespace(id, &meaning));
                        self.meanings.insert(id, meaning.into());
                    }
                    None => self.damaged += 1,
                }
            }
            What::Removed(key) => owner.found(Found::Removed(key)),
            What::NamespaceRemoved(id) => {
                owner.found(Found::NamespaceRemoved(id));
                self.meanings.remove(&id);
            }
        }
        Ok(())
    }
}
