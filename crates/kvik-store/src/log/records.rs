//! The records of a segment, found from its footer, or by looking at all of its bytes.
//!
//! A segment that was not closed has no footer: a crash left it, or its disk failed. Then every record is looked for,
//! and taken only with the body that its sums are of. A record that is damaged is passed over, and so is what a write
//! that never ended has left: the search goes on at the next unit. Nothing is allocated by the word of a file.

use super::files::LogFile;
use super::footer::{LISTED, Listed, Lister, MAX_NAMESPACES, listed};
use super::format::{EDGE, HEAD, Head, MAX_HEAD, RECORD, Seed, Trailer, What};
use super::place::{UNIT, next_unit};
use crate::NamespaceId;
use kvik_core::{PageSum, Result};
use std::collections::HashMap;
use std::io;

/// Bytes that are read at once.
const WINDOW: usize = 1 << 20;
/// Footers are read in whole records.
const LISTED_WINDOW: usize = WINDOW / LISTED * LISTED;

/// A segment to look through.
pub(super) struct Segment<'a> {
    pub file: &'a dyn LogFile,
    pub number: u32,
    pub size: u64,
}

/// Reads all of `into`; `false` where the file ends before.
fn read_all(file: &dyn LogFile, offset: u64, into: &mut [u8]) -> io::Result<bool> {
    Ok(file.read(offset, into, None)? == into.len())
}

impl Segment<'_> {
    /// The first bytes, as many as a header has if there are as many.
    pub fn first(&self) -> io::Result<Vec<u8>> {
        let mut edge = vec![0; EDGE as usize];
        let read = self.file.read(0, &mut edge, None)?;
        edge.truncate(read);
        Ok(edge)
    }

    /// The trailer, if there is one of this segment and the footer is what it says.
    pub fn trailer(&self) -> io::Result<Option<Trailer>> {
        let mut edge = [0; EDGE as usize];
        let Some(at) = self.size.checked_sub(EDGE).filter(|at| *at >= EDGE) else { return Ok(None) };
        if !read_all(self.file, at, &mut edge)? {
            return Ok(None);
        }
        let Some(trailer) = Trailer::read(&edge, self.size).filter(|it| it.number == self.number) else {
            return Ok(None);
        };
        let mut sum = PageSum::default();
        let whole = self.read_footer(&trailer, |bytes| {
            sum.update(bytes);
            Ok(true)
        });
        Ok((whole? && sum.finish() == trailer.sum).then_some(trailer))
    }

    fn read_footer(
        &self,
        trailer: &Trailer,
        mut each: impl FnMut(&[u8]) -> io::Result<bool>,
    ) -> io::Result<bool> {
        let (mut at, end) = (trailer.footer, self.size - EDGE);
        let mut window = vec![0; LISTED_WINDOW.min((end - at) as usize)];
        while at < end {
            let part = &mut window[..LISTED_WINDOW.min((end - at) as usize)];
            if !read_all(self.file, at, part)? || !each(part)? {
                return Ok(false);
            }
            at += part.len() as u64;
        }
        Ok(true)
    }

    /// Every record that the footer lists, in the order of their places.
    ///
    /// # Errors
    /// The inner error is that of `each`, which ends it.
    pub fn listed(
        &self,
        trailer: &Trailer,
        mut each: impl FnMut(u64, What) -> Result<()>,
    ) -> io::Result<Result<()>> {
        let (mut lister, mut result) = (Lister::default(), Ok(()));
        self.read_footer(trailer, |bytes| {
            for record in bytes.chunks_exact(LISTED) {
                let Some((offset, what)) = lister.read(record) else {
                    let text = format!("the footer of segment {} lists what is no record", self.number);
                    return Err(io::Error::new(io::ErrorKind::InvalidData, text));
                };
                result = each(offset, what);
                if result.is_err() {
                    return Ok(false);
                }
            }
            Ok(true)
        })?;
        Ok(result)
    }

    /// Every whole record, in the order of their places, with what a footer says of it.
    ///
    /// # Errors
    /// As for [`Segment::listed`].
    pub fn scan(
        &self,
        seed: &Seed,
        mut each: impl FnMut(u64, What, Listed) -> Result<()>,
    ) -> io::Result<Result<Scanned>> {
        let mut window = Window::new(self.file, self.size);
        let (mut at, mut scanned) = (EDGE, Scanned { end: EDGE, damaged: 0 });
        let mut names = Names::default();
        while let Some(head) = window.find(at, seed, self.number)? {
            let (offset, after) = (head.0, head.0 + head.1.len() as u64 + head.1.body);
            let head = head.1;
            if after > self.size || !window.body_is_whole(&head, after - head.body)? {
                scanned.damaged += 1;
            } else {
                match names.number(&head.what) {
                    Some(number) => {
                        let listed = listed(offset, &head.what, number);
                        if let Err(error) = each(offset, head.what, listed) {
                            return Ok(Err(error));
                        }
                    }
                    None => scanned.damaged += 1,
                }
            }
            at = next_unit(after.min(self.size));
            scanned.end = after.min(self.size);
        }
        Ok(Ok(scanned))
    }

    /// What a namespace means, from the record at `offset`; `None` where that is damaged.
    pub fn meaning(&self, offset: u64, seed: &Seed) -> io::Result<Option<Vec<u8>>> {
        let mut head = [0; HEAD + 8];
        if !read_all(self.file, offset, &mut head)? {
            return Ok(None);
        }
        let head = match Head::read(&head, seed, self.number, offset) {
            Ok(head) if matches!(head.what, What::Namespace(_)) => head,
            _ => return Ok(None),
        };
        // At most 64 KiB, which the head is checked for.
        let mut body = vec![0; head.body as usize];
        let whole = read_all(self.file, offset + head.len() as u64, &mut body)?;
        Ok((whole && head.sums[..] == [kvik_core::page_sum(&body)]).then_some(body))
    }
}

/// How a search ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Scanned {
    /// Where the last record ends.
    pub end: u64,
    /// Records that are not whole.
    pub damaged: u64,
}

/// The numbers of the namespaces that were found.
#[derive(Default)]
struct Names {
    numbers: HashMap<NamespaceId, u32>,
    next: u32,
}

impl Names {
    /// The number of a record's namespace; `None` for a block whose namespace has no meaning here.
    fn number(&mut self, what: &What) -> Option<u32> {
        match what {
            What::Block(identity) => self.numbers.get(&identity.namespace).copied(),
            What::Namespace(_) if self.next as usize >= MAX_NAMESPACES => None,
            What::Namespace(id) => {
                self.numbers.insert(*id, self.next);
                self.next += 1;
                Some(self.next - 1)
            }
            What::Removed(_) => Some(0),
            What::NamespaceRemoved(id) => {
                self.numbers.remove(id);
                Some(0)
            }
        }
    }
}

/// A part of a file in memory, which moves forward.
struct Window<'a> {
    file: &'a dyn LogFile,
    size: u64,
    bytes: Vec<u8>,
    at: u64,
    len: usize,
}

impl<'a> Window<'a> {
    fn new(file: &'a dyn LogFile, size: u64) -> Window<'a> {
        let bytes = vec![0; (WINDOW as u64).min(size) as usize];
        Window { file, size, bytes, at: 0, len: 0 }
    }

    /// The bytes from `offset` on: at least `least` of them, or as many as there are in the file.
    fn from(&mut self, offset: u64, least: usize) -> io::Result<&[u8]> {
        let there = |window: &Self| (window.at + window.len as u64).saturating_sub(offset);
        let least = (least as u64).min(self.size.saturating_sub(offset));
        if offset < self.at || there(self) < least {
            let wanted = (WINDOW as u64).min(self.size.saturating_sub(offset)) as usize;
            (self.at, self.len) = (offset, 0);
            self.len = self.file.read(offset, &mut self.bytes[..wanted], None)?;
        }
        let first = (offset - self.at) as usize;
        Ok(self.bytes.get(first..self.len).unwrap_or_default())
    }

    /// The first head of a record from `at` on, with its offset.
    fn find(&mut self, mut at: u64, seed: &Seed, segment: u32) -> io::Result<Option<(u64, Head)>> {
        loop {
            let bytes = self.from(at, HEAD)?;
            if bytes.len() < HEAD {
                return Ok(None);
            }
            let units = bytes.chunks(UNIT as usize);
            let Some(unit) = units.clone().position(|unit| unit.starts_with(&RECORD)) else {
                at += units.len() as u64 * UNIT;
                continue;
            };
            at += unit as u64 * UNIT;
            let bytes = self.from(at, MAX_HEAD)?;
            let head = Head::stated_len(bytes).and_then(|len| bytes.get(..len));
            if let Some(Ok(head)) = head.map(|head| Head::read(head, seed, segment, at)) {
                return Ok(Some((at, head)));
            }
            at += UNIT;
        }
    }

    /// Whether the body at `at` is the one that a head's sums are of.
    fn body_is_whole(&mut self, head: &Head, at: u64) -> io::Result<bool> {
        let part = match &head.what {
            What::Block(identity) => u64::from(identity.shape.summed_layers()) * identity.shape.layer_bytes(),
            _ => head.body.max(1),
        };
        let (mut at, end) = (at, at + head.body);
        let mut sum = PageSum::default();
        for expected in &head.sums {
            let stop = (at + part).min(end);
            while at < stop {
                let bytes = self.from(at, 1)?;
                if bytes.is_empty() {
                    return Ok(false);
                }
                let len = ((stop - at) as usize).min(bytes.len());
                sum.update(&bytes[..len]);
                at += len as u64;
            }
            if sum.finish() != *expected {
                return Ok(false);
            }
        }
        Ok(at == end)
    }
}
