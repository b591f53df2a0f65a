//! A batch: blocks that become one object, in the format of a segment of the log.
//!
//! ```text
//! object = header, blocks and removals..., what their namespaces mean..., footer, trailer
//! ```
//!
//! It is a closed segment of [`crate::log`] but for one thing: what namespaces mean comes last, and first in the footer.
//! So the end of an object tells all that is in it, and no block is read to find the others.

use crate::log::footer::{LISTED, Listed, Lister, MAX_NAMESPACES, listed};
use crate::log::format::{EDGE, HEAD, Head, Seed, Trailer, What, header, start};
use crate::log::place::{UNIT, place, position};
use crate::tier::{Identity, Place};
use crate::unsaid::Removed;
use crate::{Entry, NamespaceId};
use kvik_core::{Code, Error, Result, page_sum};
use kvik_host::Memory;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

/// A batch that is being filled.
pub(super) struct Batch {
    pub number: u32,
    pub seed: Seed,
    pub bytes: Vec<u8>,
    /// Blocks in it.
    pub blocks: u32,
    /// Removals in it.
    pub removals: u32,
    /// Objects whose removals it has taken over.
    pub instead_of: Vec<u32>,
    /// When the first record came.
    pub since: Instant,
    listed: Vec<Listed>,
    /// In the order of their numbers.
    namespaces: Vec<NamespaceId>,
    numbers: HashMap<NamespaceId, u32>,
}

impl Batch {
    pub fn new(number: u32, seed: Seed, size: u64) -> Batch {
        let mut bytes = Vec::with_capacity(size as usize + (64 << 10));
        bytes.extend_from_slice(&header(number, &seed));
        Batch {
            number,
            seed,
            bytes,
            blocks: 0,
            removals: 0,
            instead_of: Vec::new(),
            since: Instant::now(),
            listed: Vec::new(),
            namespaces: Vec::new(),
            numbers: HashMap::new(),
        }
    }

    /// Whether another namespace can be named in it.
    pub fn takes(&self, namespace: &NamespaceId) -> bool {
        self.numbers.contains_key(namespace) || self.namespaces.len() < MAX_NAMESPACES
    }

    /// Takes a block, whose bytes are copied.
    ///
    /// # Errors
    /// `InvalidArgument` for a range outside of `memory`.
    pub fn add(&mut self, entry: &Entry, memory: &Memory, offset: usize) -> Result<Place> {
        let number = *self.numbers.entry(entry.namespace).or_insert_with(|| {
            self.namespaces.push(entry.namespace);
            self.namespaces.len() as u32 - 1
        });
        let (what, body) = (What::Block(Identity::from(entry)), entry.shape.bytes());
        let before = self.bytes.len();
        let (place, at) = self.head(what, body, &entry.sums);
        self.bytes.resize(at + body as usize, 0);
        if let Err(error) = memory.copy_out(offset, &mut self.bytes[at..]) {
            self.bytes.truncate(before);
            return Err(Error::new(Code::InvalidArgument, error.to_string()));
        }
        self.listed.push(listed(offset_of(place), &what, number));
        self.blocks += 1;
        Ok(place)
    }

    /// Takes a removal.
    pub fn remove(&mut self, what: Removed) -> Place {
        let what = match what {
            Removed::Block(key) => What::Removed(key),
            Removed::Namespace(id) => What::NamespaceRemoved(id),
        };
        let (place, _) = self.head(what, 0, &[]);
        self.listed.push(listed(offset_of(place), &what, 0));
        self.removals += 1;
        place
    }

    /// Writes a record's head at the end: its place, and where its body begins.
    fn head(&mut self, what: What, body: u64, sums: &[u64]) -> (Place, usize) {
        let offset = start(self.bytes.len() as u64, body);
        let place = place(self.number, offset);
        let head = Head { what, place, body, sums: sums.into() };
        let at = offset as usize + head.len();
        self.bytes.resize(at, 0);
        head.write(&self.seed, &mut self.bytes[offset as usize..]);
        (place, at)
    }

    /// Whole, as it is stored. `meaning` says what namespaces mean.
    pub fn finish(mut self, meaning: impl Fn(&NamespaceId) -> Option<Arc<[u8]>>) -> Finished {
        let records = std::mem::take(&mut self.listed);
        for (number, id) in std::mem::take(&mut self.namespaces).into_iter().enumerate() {
            // One that was removed since has no block that counts.
            let meaning = meaning(&id).unwrap_or_default();
            let (place, _) = self.head(What::Namespace(id), meaning.len() as u64, &[page_sum(&meaning)]);
            self.bytes.extend_from_slice(&meaning);
            self.listed.push(listed(offset_of(place), &What::Namespace(id), number as u32));
        }
        self.listed.extend(records);
        let footer: Vec<u8> = self.listed.concat();
        let end = self.bytes.len().next_multiple_of(UNIT as usize);
        self.bytes.resize(end, 0);
        let trailer = Trailer {
            number: self.number,
            seed: self.seed,
            records: self.listed.len() as u32,
            footer: end as u64,
            sum: page_sum(&footer),
        };
        self.bytes.extend_from_slice(&footer);
        self.bytes.extend_from_slice(&trailer.to_bytes());
        let Batch { number, seed, blocks, removals, instead_of, bytes, .. } = self;
        Finished { number, seed, blocks, removals, instead_of, bytes: bytes.into() }
    }
}

/// A batch that is whole.
#[derive(Debug, Clone)]
pub(super) struct Finished {
    pub number: u32,
    pub seed: Seed,
    pub blocks: u32,
    pub removals: u32,
    pub instead_of: Vec<u32>,
    pub bytes: bytes::Bytes,
}

fn offset_of(place: Place) -> u64 {
    position(place).1
}

/// What the end of an object says.
pub(super) struct Contents {
    pub seed: Seed,
    /// What namespaces mean.
    pub namespaces: Vec<(NamespaceId, Vec<u8>)>,
    /// Blocks and removals, in their order.
    pub records: Vec<(Place, What)>,
}

/// What is to be known of an object before its contents can be read.
pub(super) enum Read {
    Contents(Contents),
    /// It has to be read from this offset on.
    From(u64),
    /// It is not what kvik has written, for this reason.
    Damaged(&'static str),
}

/// Reads the last bytes of the object of a number, whose size is known.
pub(super) fn read(number: u32, size: u64, tail: &[u8]) -> Read {
    let first = size.saturating_sub(tail.len() as u64);
    let edge = tail.len().checked_sub(EDGE as usize).map(|at| &tail[at..]);
    let Some(trailer) = edge.and_then(|edge| Trailer::read(edge, size)) else {
        return Read::Damaged("its end is none that this version writes");
    };
    if trailer.number != number {
        return Read::Damaged("it is another object");
    }
    if trailer.footer < first {
        return Read::From(trailer.footer);
    }
    let footer = &tail[(trailer.footer - first) as usize..tail.len() - EDGE as usize];
    if page_sum(footer) != trailer.sum {
        return Read::Damaged("its list of records does not have its checksum");
    }
    let mut lister = Lister::default();
    let (mut namespaces, mut records) = (Vec::new(), Vec::new());
    for record in footer.chunks_exact(LISTED) {
        match lister.read(record) {
            // The first one is listed first, and lies before all others.
            Some((offset, What::Namespace(_))) if offset < first => return Read::From(offset),
            Some((offset, What::Namespace(id))) => {
                let record = tail.get((offset - first) as usize..);
                match record.and_then(|record| meaning(record, &trailer, offset, id)) {
                    Some(meaning) => namespaces.push((id, meaning)),
                    None => return Read::Damaged("what a namespace means is not what was written"),
                }
            }
            Some((offset, what)) => records.push((place(number, offset), what)),
            None => return Read::Damaged("its list has what is no record"),
        }
    }
    Read::Contents(Contents { seed: trailer.seed, namespaces, records })
}

/// What a namespace means, from its record at the beginning of `bytes`.
fn meaning(bytes: &[u8], trailer: &Trailer, offset: u64, id: NamespaceId) -> Option<Vec<u8>> {
    let len = Head::stated_len(bytes.get(..HEAD)?)?;
    let head = Head::read(bytes.get(..len)?, &trailer.seed, trailer.number, offset).ok()?;
    let body = bytes.get(len..len + usize::try_from(head.body).ok()?)?;
    (head.what == What::Namespace(id) && head.sums[..] == [page_sum(body)]).then(|| body.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BlockKey, Shape};
    use kvik_host::HugePages;

    /// A batch of `blocks` blocks of two namespaces and a removal, and what it holds.
    fn some(blocks: u8) -> (Finished, Vec<(Place, What)>) {
        let memory = Memory::shared(8192, HugePages::Never).unwrap();
        let mut batch = Batch::new(7, [3; 16], 1 << 20);
        let mut expected = Vec::new();
        for number in 0..blocks {
            let (key, parent) = (BlockKey([number; 32]), (number > 0).then(|| BlockKey([number - 1; 32])));
            let (namespace, shape) = (NamespaceId([number % 2; 32]), Shape::new(1, 1, 4096).unwrap());
            let entry = Entry { key, parent, namespace, shape, sums: [9].into() };
            let place = batch.add(&entry, &memory, 100).unwrap();
            expected.push((place, What::Block(Identity::from(&entry))));
        }
        let key = BlockKey([1; 32]);
        expected.push((batch.remove(Removed::Block(key)), What::Removed(key)));
        assert!(batch.takes(&NamespaceId([0; 32])));
        (batch.finish(|id| Some(id.0[..5].into())), expected)
    }

    #[test]
    fn the_end_of_an_object_tells_what_is_in_it() {
        let (finished, expected) = some(9);
        let (size, all) = (finished.bytes.len() as u64, &finished.bytes);
        assert_eq!((finished.blocks, finished.removals), (9, 1));
        // However little of it is read, it says from where on it has to be.
        for least in [64, 300, 2000, all.len()] {
            let mut tail = &all[all.len() - least..];
            let contents = loop {
                match read(7, size, tail) {
                    Read::From(offset) => {
                        assert!(offset < size - tail.len() as u64, "it gets no further");
                        tail = &all[offset as usize..];
                    }
                    Read::Contents(contents) => break contents,
                    Read::Damaged(why) => panic!("{why}"),
                }
            };
            assert!(tail.len() < 3000 || least == all.len(), "blocks are read for it");
            assert_eq!((contents.seed, &contents.records), ([3; 16], &expected));
            let meanings: Vec<u8> = contents.namespaces.iter().map(|(_, meaning)| meaning[0]).collect();
            assert_eq!(meanings, [0, 1]);
        }
    }

    #[test]
    fn an_end_that_lists_what_lies_behind_it_is_damaged() {
        // Whoever may write to the bucket can make all sums right.
        let (finished, _) = some(1);
        let mut all = finished.bytes.to_vec();
        let (size, edge) = (all.len() as u64, all.len() - EDGE as usize);
        let Some(trailer) = Trailer::read(&all[edge..], size) else { panic!() };
        let footer = trailer.footer as usize;
        all[footer..footer + 4].copy_from_slice(&u32::MAX.to_le_bytes());
        let sum = page_sum(&all[footer..edge]);
        all[edge..].copy_from_slice(&Trailer { sum, ..trailer }.to_bytes());
        assert!(matches!(read(7, size, &all), Read::Damaged(_)));
    }

    #[test]
    fn an_end_with_a_bit_that_flipped_is_damaged() {
        let (finished, _) = some(3);
        let all = finished.bytes.to_vec();
        assert!(matches!(read(8, all.len() as u64, &all), Read::Damaged(_)), "another number");
        let Some(trailer) = Trailer::read(&all[all.len() - 64..], all.len() as u64) else { panic!() };
        for at in trailer.footer as usize..all.len() {
            let mut all = all.clone();
            all[at] ^= 1 << (at % 8);
            assert!(matches!(read(7, all.len() as u64, &all), Read::Damaged(_)), "byte {at}");
        }
    }
}
