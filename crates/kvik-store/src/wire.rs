//! What a client and a server of the store say to each other, in notifications of the two engines.
//!
//! ```text
//! message = version u8, kind u8, number u64, fields        a request's number comes back in its answers
//! ```
//!
//! All integers are little-endian. A list begins with its length, which is compared with a bound before anything is
//! kept; what is left over, or missing, is an error. Nothing here allocates more than the message is long.

use crate::{BlockKey, Counts, MAX_KEYS, NamespaceId, Shape, Stored};
use kvik_core::{Code, Error, GrantId, Result, Ticket};
use kvik_engine::Topic;
use std::time::Duration;

pub(crate) mod scan;

use scan::{Description, Page, Scan};

/// The version of these messages. Another kind of request needs no other one: who does not know it says so by its number.
const VERSION: u8 = 2;
/// The topics of notifications that carry them.
pub(crate) const REQUESTS: Topic = 1;
pub(crate) const RESPONSES: Topic = 2;
/// What a client waits for an answer, unless it says something else.
pub(crate) const DEADLINE: Duration = Duration::from_secs(5);
/// The longest text.
const MAX_TEXT: usize = 1024;
/// The longest part of figures.
const MAX_PART: usize = 32 << 10;
/// The groups of one answer, at most: their tickets have to fit a notification.
pub(crate) const MAX_GROUPS: usize = 128;

/// When a put is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Ack {
    /// When the store has taken it up: the pages must stay as they are until the put has ended.
    Accepted,
    /// When the blocks are in the store's memory, summed.
    #[default]
    Stored,
    /// When the blocks are on the disk, and would be found after a loss of power.
    Durable,
}

/// What a client asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Request {
    /// Say what a namespace is, before anything else is asked about it.
    Open {
        namespace: NamespaceId,
        shape: Shape,
        tenant: String,
        model: String,
    },
    Put(Put),
    Get(Get),
    Contains {
        namespace: NamespaceId,
        keys: Vec<BlockKey>,
    },
    /// Bring these blocks into memory.
    Prefetch {
        namespace: NamespaceId,
        keys: Vec<BlockKey>,
    },
    Remove {
        namespace: NamespaceId,
        keys: Vec<BlockKey>,
    },
    /// Keep these blocks for so long; no time at all lets go of them.
    Pin {
        namespace: NamespaceId,
        keys: Vec<BlockKey>,
        time: Duration,
    },
    /// Take out all blocks of a namespace.
    ClearNamespace {
        namespace: NamespaceId,
    },
    /// Take out all blocks of a tenant.
    ClearTenant {
        tenant: String,
    },
    Stat,
    /// All figures, as text.
    Metrics,
    /// What the store is, and what its blocks are of, from this number of a namespace on.
    Describe {
        from: u16,
    },
    /// A page of all its blocks.
    Scan(Scan),
}

impl Request {
    /// The namespace that has to be open for it.
    pub fn namespace(&self) -> Option<&NamespaceId> {
        match self {
            Request::Put(Put { namespace, .. })
            | Request::Get(Get { namespace, .. })
            | Request::Contains { namespace, .. }
            | Request::Prefetch { namespace, .. }
            | Request::Remove { namespace, .. }
            | Request::Pin { namespace, .. } => Some(namespace),
            _ => None,
        }
    }
}

/// Blocks that a client brings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Put {
    pub namespace: NamespaceId,
    /// The block before the first one.
    pub parent: Option<BlockKey>,
    pub keys: Vec<BlockKey>,
    /// A grant over their pages, one for each key.
    pub ticket: Ticket,
    pub ack: Ack,
    /// How long it may take.
    pub deadline: Duration,
}

/// Blocks that are to be lent, as far as they are here without a gap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Get {
    pub namespace: NamespaceId,
    pub keys: Vec<BlockKey>,
    pub expiry: Duration,
    /// The client reads the first block before it has heard of it.
    pub ahead: Option<Ahead>,
}

/// A grant that a client asks for under an id of its own. It begins to read by that at once: the request waits at the
/// store's engine for the grant, and so nobody waits for the way of a ticket to the client and back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ahead {
    pub grant: GrantId,
    /// The layout of the pages, as the client takes it to be: where it is another one, the grant has another id.
    pub layout: [u8; 8],
}

/// What a server answers. A put is answered twice where it was accepted first; a get, and what asks for figures, in
/// parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Response {
    Opened,
    Accepted,
    Stored(Stored),
    Lent(Lending),
    /// Of each key whether its block is here.
    Here(Vec<bool>),
    /// So many blocks.
    Done(u64),
    Counts(Box<Counts>),
    Metrics(MetricsPart),
    Described(Description),
    Scanned(Page),
    Failed(Code, String),
}

/// Blocks that may be read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Lending {
    /// Of each block the group that it is in, and its checksum.
    pub blocks: Vec<(u16, u64)>,
    /// The grant of each group, whose positions are its blocks in their order.
    pub tickets: Vec<Ticket>,
    /// Another part follows.
    pub more: bool,
}

/// Some lines of a store's figures.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct MetricsPart {
    pub text: String,
    /// Another part follows.
    pub more: bool,
}

impl MetricsPart {
    /// Whole lines of a text, as many at once as a message takes; those of the longest names are shorter than one.
    pub fn divide(text: &str) -> Vec<MetricsPart> {
        let mut parts: Vec<MetricsPart> = Vec::new();
        for line in text.split_inclusive('\n') {
            match parts.last_mut() {
                Some(part) if part.text.len() + line.len() <= MAX_PART => part.text.push_str(line),
                last => {
                    last.into_iter().for_each(|part| part.more = true);
                    parts.push(MetricsPart { text: line.to_owned(), more: false });
                }
            }
        }
        parts
    }
}

struct Writer(Vec<u8>);

impl Writer {
    fn new(kind: u8, number: u64) -> Writer {
        let mut bytes = Vec::with_capacity(64);
        bytes.extend_from_slice(&[VERSION, kind]);
        bytes.extend_from_slice(&number.to_le_bytes());
        Writer(bytes)
    }
    fn bytes(&mut self, bytes: &[u8]) -> &mut Writer {
        self.0.extend_from_slice(bytes);
        self
    }
    fn u16(&mut self, value: u16) -> &mut Writer {
        self.bytes(&value.to_le_bytes())
    }
    fn u32(&mut self, value: u32) -> &mut Writer {
        self.bytes(&value.to_le_bytes())
    }
    fn u64(&mut self, value: u64) -> &mut Writer {
        self.bytes(&value.to_le_bytes())
    }
    fn time(&mut self, time: Duration) -> &mut Writer {
        self.u64(u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
    }
    fn text(&mut self, text: &str) -> &mut Writer {
        self.text_upto(text, MAX_TEXT)
    }
    fn text_upto(&mut self, text: &str, most: usize) -> &mut Writer {
        let mut end = text.len().min(most);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        self.u16(end as u16).bytes(&text.as_bytes()[..end])
    }
    fn keys(&mut self, keys: &[BlockKey]) -> &mut Writer {
        self.u16(keys.len().min(MAX_KEYS) as u16);
        for key in keys.iter().take(MAX_KEYS) {
            self.bytes(&key.0);
        }
        self
    }
}

struct Reader<'a>(&'a [u8]);

fn wrong(what: &str) -> Error {
    Error::new(Code::ProtocolError, format!("a message of the store is not one: {what}"))
}

impl<'a> Reader<'a> {
    fn bytes(&mut self, count: usize) -> Result<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(count).ok_or_else(|| wrong("it ends too soon"))?;
        self.0 = rest;
        Ok(bytes)
    }
    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let (bytes, rest) = self.0.split_first_chunk().ok_or_else(|| wrong("it ends too soon"))?;
        self.0 = rest;
        Ok(*bytes)
    }
    fn u8(&mut self) -> Result<u8> {
        Ok(u8::from_le_bytes(self.array()?))
    }
    fn u16(&mut self) -> Result<u16> {
        Ok(u16::from_le_bytes(self.array()?))
    }
    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }
    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }
    fn flag(&mut self) -> Result<bool> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(wrong("a flag is neither 0 nor 1")),
        }
    }
    fn time(&mut self) -> Result<Duration> {
        Ok(Duration::from_millis(self.u64()?))
    }
    /// The length of a list of elements of `each` bytes at least.
    fn count(&mut self, most: usize, each: usize) -> Result<usize> {
        let count = usize::from(self.u16()?);
        match count <= most && count * each <= self.0.len() {
            true => Ok(count),
            false => Err(wrong("a list is longer than its bound, or than the message")),
        }
    }
    fn text(&mut self) -> Result<String> {
        self.text_upto(MAX_TEXT)
    }
    fn text_upto(&mut self, most: usize) -> Result<String> {
        let count = self.count(most, 1)?;
        let text = std::str::from_utf8(self.bytes(count)?).map_err(|_| wrong("a text is not UTF-8"))?;
        Ok(text.to_owned())
    }
    fn keys(&mut self) -> Result<Vec<BlockKey>> {
        let count = self.count(MAX_KEYS, 32)?;
        (0..count).map(|_| self.array().map(BlockKey)).collect()
    }
    fn ticket(&mut self) -> Result<Ticket> {
        self.text()?.parse()
    }
    fn namespace(&mut self) -> Result<NamespaceId> {
        self.array().map(NamespaceId)
    }
}

/// Takes a message apart: kind, number, and what follows.
fn open(message: &[u8]) -> Result<(u8, u64, Reader<'_>)> {
    let mut reader = Reader(message);
    match reader.u8()? {
        VERSION => Ok((reader.u8()?, reader.u64()?, reader)),
        other => {
            let text = format!(
                "it is of version {other}, and this kvik speaks {VERSION}: use the same on both sides"
            );
            Err(wrong(&text))
        }
    }
}

fn whole<T>(reader: &Reader<'_>, value: T) -> Result<T> {
    match reader.0.is_empty() {
        true => Ok(value),
        false => Err(wrong("something follows its end")),
    }
}

impl Request {
    pub fn encode(&self, number: u64) -> Vec<u8> {
        let about = |kind: u8, namespace: &NamespaceId| {
            let mut writer = Writer::new(kind, number);
            writer.bytes(&namespace.0);
            writer
        };
        let keyed = |kind: u8, namespace: &NamespaceId, keys: &[BlockKey]| {
            let mut writer = about(kind, namespace);
            writer.keys(keys);
            writer
        };
        let mut writer;
        match self {
            Request::Open { namespace, shape, tenant, model } => {
                writer = about(1, namespace);
                writer
                    .u32(shape.layers())
                    .u32(shape.slices())
                    .u64(shape.run_bytes())
                    .text(tenant)
                    .text(model);
            }
            Request::Put(put) => {
                writer = about(2, &put.namespace);
                put.write(&mut writer);
            }
            Request::Get(Get { namespace, keys, expiry, ahead }) => {
                writer = about(3, namespace);
                writer.bytes(&[u8::from(ahead.is_some())]);
                if let Some(Ahead { grant, layout }) = ahead {
                    writer.bytes(&grant.0).bytes(layout);
                }
                writer.time(*expiry).keys(keys);
            }
            Request::Contains { namespace, keys } => writer = keyed(4, namespace, keys),
            Request::Prefetch { namespace, keys } => writer = keyed(5, namespace, keys),
            Request::Remove { namespace, keys } => writer = keyed(6, namespace, keys),
            Request::Pin { namespace, keys, time } => {
                writer = about(7, namespace);
                writer.time(*time).keys(keys);
            }
            Request::ClearNamespace { namespace } => writer = about(8, namespace),
            Request::ClearTenant { tenant } => {
                writer = Writer::new(9, number);
                writer.text(tenant);
            }
            Request::Stat => writer = Writer::new(10, number),
            Request::Metrics => writer = Writer::new(11, number),
            Request::Describe { from } => {
                writer = Writer::new(12, number);
                writer.u16(*from);
            }
            Request::Scan(scan) => {
                writer = Writer::new(13, number);
                scan.write(&mut writer);
            }
        }
        writer.0
    }

    /// A request, and its number.
    ///
    /// # Errors
    /// `ProtocolError`, with the number where that could be read.
    pub fn decode(message: &[u8]) -> Result<(u64, Request), (Option<u64>, Error)> {
        let (kind, number, mut reader) = open(message).map_err(|error| (None, error))?;
        let request = Request::fields(kind, &mut reader).and_then(|request| whole(&reader, request));
        request.map(|request| (number, request)).map_err(|error| (Some(number), error))
    }

    fn fields(kind: u8, r: &mut Reader<'_>) -> Result<Request> {
        Ok(match kind {
            1 => Request::Open {
                namespace: r.namespace()?,
                shape: Shape::new(r.u32()?, r.u32()?, r.u64()?)?,
                tenant: r.text()?,
                model: r.text()?,
            },
            2 => {
                let namespace = r.namespace()?;
                let parent = if r.flag()? { Some(BlockKey(r.array()?)) } else { None };
                let ack = match r.u8()? {
                    0 => Ack::Accepted,
                    1 => Ack::Stored,
                    2 => Ack::Durable,
                    _ => return Err(wrong("it wants an acknowledgement that there is not")),
                };
                let deadline = r.time()?;
                Request::Put(Put { namespace, parent, ack, deadline, ticket: r.ticket()?, keys: r.keys()? })
            }
            3 => {
                let namespace = r.namespace()?;
                let ahead = match r.flag()? {
                    true => Some(Ahead { grant: GrantId(r.array()?), layout: r.array()? }),
                    false => None,
                };
                Request::Get(Get { namespace, expiry: r.time()?, keys: r.keys()?, ahead })
            }
            4 => Request::Contains { namespace: r.namespace()?, keys: r.keys()? },
            5 => Request::Prefetch { namespace: r.namespace()?, keys: r.keys()? },
            6 => Request::Remove { namespace: r.namespace()?, keys: r.keys()? },
            7 => Request::Pin { namespace: r.namespace()?, time: r.time()?, keys: r.keys()? },
            8 => Request::ClearNamespace { namespace: r.namespace()? },
            9 => Request::ClearTenant { tenant: r.text()? },
            10 => Request::Stat,
            11 => Request::Metrics,
            12 => Request::Describe { from: r.u16()? },
            13 => Request::Scan(Scan::read(r)?),
            _ => return Err(wrong("it asks for something that there is not")),
        })
    }
}

impl Put {
    fn write(&self, writer: &mut Writer) {
        writer.bytes(&[u8::from(self.parent.is_some())]);
        if let Some(parent) = &self.parent {
            writer.bytes(&parent.0);
        }
        writer.bytes(&[self.ack as u8]).time(self.deadline).text(&self.ticket.to_string()).keys(&self.keys);
    }
}

impl Response {
    /// Whether nothing more answers the same request.
    pub fn is_last(&self) -> bool {
        !matches!(
            self,
            Response::Accepted
                | Response::Lent(Lending { more: true, .. })
                | Response::Metrics(MetricsPart { more: true, .. })
        )
    }

    pub fn encode(&self, number: u64) -> Vec<u8> {
        let mut writer;
        match self {
            Response::Opened => writer = Writer::new(65, number),
            Response::Accepted => writer = Writer::new(66, number),
            Response::Stored(Stored { stored, known, refused }) => {
                writer = Writer::new(67, number);
                writer.u64(*stored).u64(*known).u64(*refused);
            }
            Response::Lent(lent) => {
                writer = Writer::new(68, number);
                writer.bytes(&[u8::from(lent.more)]).u16(lent.tickets.len() as u16);
                for ticket in &lent.tickets {
                    writer.text(&ticket.to_string());
                }
                writer.u16(lent.blocks.len() as u16);
                for (group, sum) in &lent.blocks {
                    writer.u16(*group).u64(*sum);
                }
            }
            Response::Here(here) => {
                writer = Writer::new(69, number);
                writer.u16(here.len() as u16);
                for here in here {
                    writer.bytes(&[u8::from(*here)]);
                }
            }
            Response::Done(count) => {
                writer = Writer::new(70, number);
                writer.u64(*count);
            }
            Response::Counts(counts) => {
                writer = Writer::new(71, number);
                let values = counts.values();
                writer.u16(values.len() as u16);
                for (name, value) in values {
                    writer.text(name).u64(value);
                }
            }
            Response::Metrics(part) => {
                writer = Writer::new(73, number);
                writer.bytes(&[u8::from(part.more)]).text_upto(&part.text, MAX_PART);
            }
            Response::Described(described) => {
                writer = Writer::new(74, number);
                described.write(&mut writer);
            }
            Response::Scanned(page) => {
                writer = Writer::new(75, number);
                page.write(&mut writer);
            }
            Response::Failed(code, text) => {
                writer = Writer::new(72, number);
                writer.u16(*code as u16).text(text);
            }
        }
        writer.0
    }

    /// A response, and the number of what it answers.
    ///
    /// # Errors
    /// `ProtocolError`.
    pub fn decode(message: &[u8]) -> Result<(u64, Response)> {
        let (kind, number, mut r) = open(message)?;
        let response = match kind {
            65 => Response::Opened,
            66 => Response::Accepted,
            67 => Response::Stored(Stored { stored: r.u64()?, known: r.u64()?, refused: r.u64()? }),
            68 => Response::Lent(Lending::decode(&mut r)?),
            69 => {
                let count = r.count(MAX_KEYS, 1)?;
                Response::Here((0..count).map(|_| r.flag()).collect::<Result<_>>()?)
            }
            70 => Response::Done(r.u64()?),
            71 => {
                let mut counts = Counts::default();
                for _ in 0..r.count(1024, 10)? {
                    let name = r.text()?;
                    counts.set(&name, r.u64()?);
                }
                Response::Counts(Box::new(counts))
            }
            72 => Response::Failed(Code::from_wire(r.u16()?), r.text()?),
            73 => Response::Metrics(MetricsPart { more: r.flag()?, text: r.text_upto(MAX_PART)? }),
            74 => Response::Described(Description::read(&mut r)?),
            75 => Response::Scanned(Page::read(&mut r)?),
            _ => return Err(wrong("it answers something that there is not")),
        };
        Ok((number, whole(&r, response)?))
    }
}

impl Lending {
    fn decode(r: &mut Reader<'_>) -> Result<Lending> {
        let more = r.flag()?;
        let count = r.count(MAX_GROUPS, 2)?;
        let tickets: Vec<Ticket> = (0..count).map(|_| r.ticket()).collect::<Result<_>>()?;
        let blocks = r.count(MAX_KEYS, 10)?;
        let block = |_| {
            let (group, sum) = (r.u16()?, r.u64()?);
            match usize::from(group) < tickets.len() {
                true => Ok((group, sum)),
                false => Err(wrong("a block is in a group that has no ticket")),
            }
        };
        let blocks = (0..blocks).map(block).collect::<Result<_>>()?;
        Ok(Lending { blocks, tickets, more })
    }
}
