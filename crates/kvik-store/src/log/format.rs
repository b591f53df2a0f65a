//! What the bytes of a segment mean. All numbers are little-endian.
//!
//! ```text
//! segment  = header (64) records... zeros [footer, trailer (64)]
//! header   = "KVIKLOG\0" version(4) sum32(4) number(4) 0(4) seed(16) 0(16) sum(8)
//! record   = "KREC" kind(1) flags(1) head length / 8(2) place(8) body length(8)
//!            layers(4) slices(4) run bytes(8) key(32) parent(32) namespace(32) sum(8)
//!            sums of the body(8 each) zeros, body
//! footer   = 88 bytes for each record, in the order of their places
//! trailer  = "KVIKEND\0" version(4) sum32(4) number(4) records(4) seed(16) footer offset(8) footer sum(8) sum(8)
//! ```
//!
//! The first 16 bytes of a segment are the same in every version of the format, so that a newer one is known as such.
//! A record begins at a multiple of 64 bytes; where it has at least 64 KiB in whole pages, itself and its body begin at
//! a multiple of 4096, so that it can go past the page cache.
//!
//! The sum of a record's head covers a random number of its segment, the seed, which never leaves the machine. So
//! nobody who has blocks stored can put something into them that would pass for a record, whatever a crash has left
//! around it; nor does a record of another segment, which has another seed, or of another place, which it states.

use super::footer::LISTED;
use super::place::{UNIT, place};
use crate::tier::{Identity, Place};
use crate::{BlockKey, NamespaceId, Shape};
use kvik_core::{PageSum, page_sum};

/// The version of this format.
pub(crate) const VERSION: u32 = 1;
/// Bytes of a segment's header, and of its trailer.
pub(crate) const EDGE: u64 = 64;
/// Bytes of a record's head without the sums of its body.
pub(crate) const HEAD: usize = 144;
/// The longest head: that of a block with the most sums, rounded up to a page.
pub(crate) const MAX_HEAD: usize = 36 << 10;
/// The longest description of a namespace.
pub(crate) const MAX_MEANING: usize = 64 << 10;
/// What a record begins with.
pub(crate) const RECORD: [u8; 4] = *b"KREC";

const HEADER: [u8; 8] = *b"KVIKLOG\0";
const TRAILER: [u8; 8] = *b"KVIKEND\0";
/// Where the sum of a head is.
const SUM: usize = 136;
/// Bodies from here on are aligned to pages, where they are whole pages.
const ALIGNED: u64 = 64 << 10;
const PAGE: u64 = 4096;

/// A random number that makes the records of a segment its own.
pub(crate) type Seed = [u8; 16];

/// The number at `at`; `bytes` is long enough.
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// As [`u32_at`], of 8 bytes.
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

/// As [`u32_at`], of 32 bytes.
pub(crate) fn bytes_at(bytes: &[u8], at: usize) -> [u8; 32] {
    let mut out = [0; 32];
    out.copy_from_slice(&bytes[at..at + 32]);
    out
}

/// What the first bytes of a file say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Header {
    /// A segment of this version, with its number.
    Segment(u32, Seed),
    /// A segment of a newer version.
    Newer(u32),
    /// Nothing was written: a segment that was being made.
    Blank,
    /// Something else, or a segment whose header is damaged.
    Foreign,
}

fn preamble(magic: [u8; 8]) -> [u8; EDGE as usize] {
    let mut edge = [0; EDGE as usize];
    edge[..8].copy_from_slice(&magic);
    edge[8..12].copy_from_slice(&VERSION.to_le_bytes());
    let sum = page_sum(&edge[..12]) as u32;
    edge[12..16].copy_from_slice(&sum.to_le_bytes());
    edge
}

fn close(mut edge: [u8; EDGE as usize]) -> [u8; EDGE as usize] {
    let sum = page_sum(&edge[..56]);
    edge[56..].copy_from_slice(&sum.to_le_bytes());
    edge
}

fn is_closed(edge: &[u8]) -> bool {
    edge.len() == EDGE as usize && u64_at(edge, 56) == page_sum(&edge[..56])
}

fn seed_at(edge: &[u8], at: usize) -> Seed {
    let mut seed = [0; 16];
    seed.copy_from_slice(&edge[at..at + 16]);
    seed
}

/// The header of a segment.
pub(crate) fn header(number: u32, seed: &Seed) -> [u8; EDGE as usize] {
    let mut edge = preamble(HEADER);
    edge[16..20].copy_from_slice(&number.to_le_bytes());
    edge[24..40].copy_from_slice(seed);
    close(edge)
}

/// Reads the first bytes of a file, of which there may be less than a header has.
pub(crate) fn read_header(edge: &[u8]) -> Header {
    if edge.iter().all(|byte| *byte == 0) {
        return Header::Blank;
    }
    if edge.len() < 16 || edge[..8] != HEADER || u32_at(edge, 12) != page_sum(&edge[..12]) as u32 {
        return Header::Foreign;
    }
    match u32_at(edge, 8) {
        newer if newer > VERSION => Header::Newer(newer),
        VERSION if is_closed(edge) => Header::Segment(u32_at(edge, 16), seed_at(edge, 24)),
        _ => Header::Foreign,
    }
}

/// What the end of a whole segment says of its footer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Trailer {
    pub number: u32,
    pub seed: Seed,
    /// Records that the footer lists.
    pub records: u32,
    /// Where the footer begins.
    pub footer: u64,
    /// Its sum.
    pub sum: u64,
}

impl Trailer {
    pub fn to_bytes(self) -> [u8; EDGE as usize] {
        let mut edge = preamble(TRAILER);
        edge[16..20].copy_from_slice(&self.number.to_le_bytes());
        edge[20..24].copy_from_slice(&self.records.to_le_bytes());
        edge[24..40].copy_from_slice(&self.seed);
        edge[40..48].copy_from_slice(&self.footer.to_le_bytes());
        edge[48..56].copy_from_slice(&self.sum.to_le_bytes());
        close(edge)
    }

    /// Reads the last bytes of a file of `len` bytes; `None` where they are no trailer of this version.
    pub fn read(edge: &[u8], len: u64) -> Option<Trailer> {
        if !is_closed(edge) || edge[..16] != preamble(TRAILER)[..16] {
            return None;
        }
        let trailer = Trailer {
            number: u32_at(edge, 16),
            seed: seed_at(edge, 24),
            records: u32_at(edge, 20),
            footer: u64_at(edge, 40),
            sum: u64_at(edge, 48),
        };
        let bytes = u64::from(trailer.records) * LISTED as u64;
        (trailer.footer >= EDGE && trailer.footer.checked_add(bytes + EDGE) == Some(len)).then_some(trailer)
    }
}

/// What a record is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum What {
    /// A block; its body is the block's bytes.
    Block(Identity),
    /// What a namespace means; its body says it.
    Namespace(NamespaceId),
    /// Blocks of this key in records before this one are void.
    Removed(BlockKey),
    /// Records of this namespace before this one are void.
    NamespaceRemoved(NamespaceId),
}

impl What {
    /// The number of its kind.
    pub fn kind(&self) -> u8 {
        match self {
            What::Block(_) => 1,
            What::Namespace(_) => 2,
            What::Removed(_) => 3,
            What::NamespaceRemoved(_) => 4,
        }
    }
}

/// Whether a body of so many bytes begins at a page, with its record.
pub(crate) fn is_aligned(body: u64) -> bool {
    body >= ALIGNED && body.is_multiple_of(PAGE)
}

/// Bytes of the head of a record whose body has so many bytes and sums.
pub(crate) fn head_len(body: u64, sums: usize) -> usize {
    let len = HEAD + 8 * sums;
    if is_aligned(body) { len.next_multiple_of(PAGE as usize) } else { len }
}

/// The first offset from `offset` on at which a record with such a body begins.
pub(crate) fn start(offset: u64, body: u64) -> u64 {
    offset.next_multiple_of(if is_aligned(body) { PAGE } else { UNIT })
}

/// A record's head, as it lies before its body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Head {
    pub what: What,
    pub place: Place,
    /// Bytes of the body.
    pub body: u64,
    /// The body's sums: a block's as its entry has them, else one over all of it.
    pub sums: Box<[u64]>,
}

impl Head {
    /// Bytes of the head.
    pub fn len(&self) -> usize {
        head_len(self.body, self.sums.len())
    }

    /// Writes it to `out`, which has [`Head::len`] bytes, all zero.
    pub fn write(&self, seed: &Seed, out: &mut [u8]) {
        out[..4].copy_from_slice(&RECORD);
        out[4] = self.what.kind();
        let units = (out.len() / 8) as u16;
        out[6..8].copy_from_slice(&units.to_le_bytes());
        out[8..16].copy_from_slice(&self.place.0.to_le_bytes());
        out[16..24].copy_from_slice(&self.body.to_le_bytes());
        match &self.what {
            What::Block(Identity { key, parent, namespace, shape }) => {
                out[5] = u8::from(parent.is_some());
                out[24..28].copy_from_slice(&shape.layers().to_le_bytes());
                out[28..32].copy_from_slice(&shape.slices().to_le_bytes());
                out[32..40].copy_from_slice(&shape.run_bytes().to_le_bytes());
                out[40..72].copy_from_slice(&key.0);
                out[72..104].copy_from_slice(&parent.map_or([0; 32], |parent| parent.0));
                out[104..136].copy_from_slice(&namespace.0);
            }
            What::Removed(key) => out[40..72].copy_from_slice(&key.0),
            What::Namespace(id) | What::NamespaceRemoved(id) => out[104..136].copy_from_slice(&id.0),
        }
        for (sum, at) in self.sums.iter().zip((HEAD..).step_by(8)) {
            out[at..at + 8].copy_from_slice(&sum.to_le_bytes());
        }
        let sum = head_sum(seed, out);
        out[SUM..SUM + 8].copy_from_slice(&sum.to_le_bytes());
    }

    /// The length that the first [`HEAD`] bytes of a record give to its head, if it can be one.
    pub fn stated_len(bytes: &[u8]) -> Option<usize> {
        let len = 8 * usize::from(u16::from_le_bytes([*bytes.get(6)?, *bytes.get(7)?]));
        (bytes[..4] == RECORD && (HEAD..=MAX_HEAD).contains(&len)).then_some(len)
    }

    /// Reads the head of the record at `offset` of a segment; `bytes` is all of it.
    ///
    /// # Errors
    /// What is wrong with it, in words that go after "its".
    pub fn read(bytes: &[u8], seed: &Seed, segment: u32, offset: u64) -> Result<Head, &'static str> {
        if bytes.len() < HEAD || Head::stated_len(bytes) != Some(bytes.len()) {
            return Err("beginning is not that of a record");
        }
        if u64_at(bytes, SUM) != head_sum(seed, bytes) {
            return Err("header does not have the checksum that it states");
        }
        let at = place(segment, offset);
        if u64_at(bytes, 8) != at.0 {
            return Err("header states another place");
        }
        let body = u64_at(bytes, 16);
        let what = read_what(bytes).ok_or("header describes no record that this version knows")?;
        let sums = match &what {
            What::Block(identity) if identity.shape.bytes() == body => identity.shape.sums(),
            What::Namespace(_) if body <= MAX_MEANING as u64 => 1,
            What::Removed(_) | What::NamespaceRemoved(_) if body == 0 => 0,
            _ => return Err("header states a length that is not that of its body"),
        };
        if bytes.len() != head_len(body, sums) {
            return Err("header has another length than it needs");
        }
        let sums = (0..sums).map(|n| u64_at(bytes, HEAD + 8 * n)).collect();
        Ok(Head { what, place: at, body, sums })
    }
}

fn read_what(bytes: &[u8]) -> Option<What> {
    let (key, namespace) = (BlockKey(bytes_at(bytes, 40)), NamespaceId(bytes_at(bytes, 104)));
    Some(match (bytes[4], bytes[5]) {
        (1, flags @ 0..=1) => What::Block(Identity {
            key,
            parent: (flags == 1).then(|| BlockKey(bytes_at(bytes, 72))),
            namespace,
            shape: Shape::new(u32_at(bytes, 24), u32_at(bytes, 28), u64_at(bytes, 32)).ok()?,
        }),
        (2, 0) => What::Namespace(namespace),
        (3, 0) => What::Removed(key),
        (4, 0) => What::NamespaceRemoved(namespace),
        _ => return None,
    })
}

fn head_sum(seed: &Seed, head: &[u8]) -> u64 {
    let mut sum = PageSum::default();
    for part in [&seed[..], &head[..SUM], &head[SUM + 8..]] {
        sum.update(part);
    }
    sum.finish()
}
