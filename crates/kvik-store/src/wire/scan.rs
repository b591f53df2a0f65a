//! What a server says of all the blocks that it has: what they are of, and the blocks themselves, a page at a time.
//!
//! A block is named by the first bytes of its key: enough to tell it from others, and not enough to ask for it. So who
//! looks at a store learns nothing by which it could read what others have put.

use super::{Reader, Writer, wrong};
use crate::placement::Lot;
use crate::{BlockKey, NamespaceId};
use kvik_core::Result;

/// Blocks of a page, and slots of blocks that are looked at for one, at most.
pub(crate) const PAGE: usize = 1024;
/// Namespaces of one part of a description, at most.
pub(crate) const PART: usize = 128;
/// The longest name of a model in a description.
const MAX_MODEL: usize = 128;
/// The longest name of a tenant, and of a version.
const MAX_NAME: usize = 128;
/// The servers that a page says where segments lie among, at most.
pub(crate) const MAX_SERVERS: usize = 1024;
/// The servers that are named of a segment, at most.
pub(crate) const MAX_ORDER: usize = 16;
/// The block is in no segment that is known.
const NO_SEGMENT: u16 = u16::MAX;

/// A block, or a namespace, for who only counts them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(crate) struct ShortKey(pub u64);

fn short(bytes: &[u8; 32]) -> ShortKey {
    let (first, _) = bytes.split_first_chunk().unwrap_or((&[0; 8], &[]));
    ShortKey(u64::from_le_bytes(*first))
}

impl From<&BlockKey> for ShortKey {
    fn from(key: &BlockKey) -> ShortKey {
        short(&key.0)
    }
}

impl From<&NamespaceId> for ShortKey {
    fn from(id: &NamespaceId) -> ShortKey {
        short(&id.0)
    }
}

/// The next page that a client asks for.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Scan {
    /// Where it begins: 0, or what the page before has said.
    pub from: u32,
    /// Only blocks whose short key is a multiple of 2 to this power, below 64: the same ones at every server.
    pub sample: u8,
    /// How many servers are named of each segment.
    pub order: u8,
    /// The servers, in the client's order, as they stand among the weights; none, or one: segments are of no account.
    pub lots: Vec<Lot>,
}

/// Blocks that a server has.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Page {
    pub blocks: Vec<Seen>,
    pub segments: Vec<Segment>,
    /// Where the next page begins; none behind the last one.
    pub next: Option<u32>,
}

/// A block that is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Seen {
    pub key: ShortKey,
    /// The server's number of its namespace.
    pub namespace: u16,
    /// A bit for each tier that it lies in, by the tier's number.
    pub tiers: u8,
    /// Its segment among those of the page; none where that is not known, or of no account.
    pub segment: Option<u16>,
}

/// Where clients look for the blocks of a segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Segment {
    /// Its first block.
    pub head: ShortKey,
    /// The servers of the highest weights, that of the highest first.
    pub order: Vec<u16>,
}

/// What a server is, and what its blocks are of: a part of the namespaces.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Description {
    pub version: String,
    /// Blocks that it knows now.
    pub blocks: u64,
    /// Those from the number on that was asked for.
    pub namespaces: Vec<Described>,
    /// There are others behind them.
    pub more: bool,
}

/// A namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Described {
    pub id: ShortKey,
    pub tenant: String,
    pub model: String,
    pub block_bytes: u64,
}

impl Scan {
    pub(super) fn write(&self, writer: &mut Writer) {
        let lots = &self.lots[..self.lots.len().min(MAX_SERVERS)];
        writer.u32(self.from).bytes(&[self.sample, self.order]).u16(lots.len() as u16);
        for lot in lots {
            writer.bytes(&lot.0);
        }
    }

    pub(super) fn read(r: &mut Reader<'_>) -> Result<Scan> {
        let (from, sample, order) = (r.u32()?, r.u8()?, r.u8()?);
        if sample >= 64 || usize::from(order) > MAX_ORDER {
            return Err(wrong("it asks for a sample, or for servers of a segment, that there is not"));
        }
        let count = r.count(MAX_SERVERS, 32)?;
        let lots = (0..count).map(|_| r.array().map(Lot)).collect::<Result<_>>()?;
        Ok(Scan { from, sample, order, lots })
    }
}

impl Page {
    pub(super) fn write(&self, writer: &mut Writer) {
        writer.bytes(&[u8::from(self.next.is_some())]).u32(self.next.unwrap_or(0));
        writer.u16(self.segments.len() as u16);
        for Segment { head, order } in &self.segments {
            writer.u64(head.0).bytes(&[order.len() as u8]);
            for server in order {
                writer.u16(*server);
            }
        }
        writer.u16(self.blocks.len() as u16);
        for Seen { key, namespace, tiers, segment } in &self.blocks {
            writer.u64(key.0).u16(*namespace).bytes(&[*tiers]).u16(segment.unwrap_or(NO_SEGMENT));
        }
    }

    pub(super) fn read(r: &mut Reader<'_>) -> Result<Page> {
        let next = match (r.flag()?, r.u32()?) {
            (true, next) => Some(next),
            (false, 0) => None,
            (false, _) => return Err(wrong("the last page says where the next one begins")),
        };
        let count = r.count(PAGE, 9)?;
        let segments: Vec<Segment> = (0..count).map(|_| Segment::read(r)).collect::<Result<_>>()?;
        let count = r.count(PAGE, 13)?;
        let block = |_| {
            let (key, namespace, tiers) = (ShortKey(r.u64()?), r.u16()?, r.u8()?);
            let segment = Some(r.u16()?).filter(|segment| *segment != NO_SEGMENT);
            match tiers < 8 && segment.is_none_or(|at| usize::from(at) < segments.len()) {
                true => Ok(Seen { key, namespace, tiers, segment }),
                false => Err(wrong("a block is in a tier, or in a segment, that there is not")),
            }
        };
        let blocks = (0..count).map(block).collect::<Result<_>>()?;
        Ok(Page { blocks, segments, next })
    }
}

impl Segment {
    fn read(r: &mut Reader<'_>) -> Result<Segment> {
        let (head, servers) = (ShortKey(r.u64()?), usize::from(r.u8()?));
        if servers > MAX_ORDER {
            return Err(wrong("a segment has more servers than there may be"));
        }
        let mut order = Vec::with_capacity(servers.min(r.0.len() / 2));
        for _ in 0..servers {
            order.push(r.u16()?);
        }
        Ok(Segment { head, order })
    }
}

impl Description {
    pub(super) fn write(&self, writer: &mut Writer) {
        writer.bytes(&[u8::from(self.more)]).text_upto(&self.version, MAX_NAME).u64(self.blocks);
        writer.u16(self.namespaces.len() as u16);
        for Described { id, tenant, model, block_bytes } in &self.namespaces {
            writer.u64(id.0).u64(*block_bytes).text_upto(tenant, MAX_NAME).text_upto(model, MAX_MODEL);
        }
    }

    pub(super) fn read(r: &mut Reader<'_>) -> Result<Description> {
        let (more, version, blocks) = (r.flag()?, r.text_upto(MAX_NAME)?, r.u64()?);
        let count = r.count(PART, 20)?;
        let namespace = |_| {
            let (id, block_bytes) = (ShortKey(r.u64()?), r.u64()?);
            let (tenant, model) = (r.text_upto(MAX_NAME)?, r.text_upto(MAX_MODEL)?);
            Ok(Described { id, tenant, model, block_bytes })
        };
        let namespaces = (0..count).map(namespace).collect::<Result<_>>()?;
        Ok(Description { version, blocks, namespaces, more })
    }
}
