//! The frames of an established control connection.
//!
//! A frame is `len u32, kind u16, 0 u16, check u32, sum u64` and then `len` bytes. `check` is the lower half of the
//! XXH3-64 of the fields before it, so that nobody waits for bytes that were never announced; `sum` is the XXH3-64 of
//! what follows: a flipped bit in a page's number would be another page, which every checksum of the content fits.
//! Unknown kinds are a protocol error: a peer sends only what the agreed version has.

use crate::channel::MAX_SUMS;
use crate::nics::{NicAnswer, NicCall, NicKey, Nics, decode_keys, encode_keys};
use crate::pages::{PageList, TravellingView, decode_order, decode_range, encode_range};
use crate::wire::{MAX_TEXT, Reader, Writer};
use kvik_core::{
    CONTENT_DIGEST_BYTES, Class, Code, ContentClaim, Error, GrantId, RegionId, Result, Shape, View, page_sum,
};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Bytes of a notification at most. It shares the control connection with heartbeats and the ends of transfers, which
/// wait for it: so much takes half a millisecond on a link of 1 Gbit/s. What is larger belongs into pages.
pub const MAX_NOTIFICATION: usize = 64 << 10;

/// What a notification is about: 0 for the program's own, others for libraries.
pub type Topic = u8;

/// Bytes of a frame's header.
pub const FRAME_HEADER: usize = 20;
/// A longer frame is refused: room for [`crate::MAX_PAGES`] page ids twice over.
pub const MAX_FRAME: usize = 10 << 20;
/// A handover is not read by more engines than this.
pub const MAX_READERS: u16 = 4096;
/// What each kind of frame is called, from 1 on.
const KINDS: [&str; 18] = [
    "beat",
    "begin",
    "accept",
    "end",
    "ended",
    "open-channels",
    "goodbye",
    "notify",
    "noted",
    "nics",
    "reach",
    "reached",
    "check",
    "checked",
    "accept-staged",
    "lent",
    "used",
    "landed",
];
const DAMAGED: &str = "a frame of the peer was damaged on its way";

/// What a transfer asks of the owner of the grant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Op {
    /// Move the owner's pages to the initiator.
    Read,
    /// Move the initiator's pages to the owner.
    Write,
    /// Confirm the use of the grant without moving anything.
    Confirm,
    /// Give the grant more time.
    Extend,
}

/// How the bytes of a transfer go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Path {
    /// Over the session's channels.
    Channels,
    /// The owner of the destination copies from the other process's memory.
    Memory,
    /// The initiator's NIC moves the bytes into or out of the owner's pages, late and in any order, after the grant
    /// was checked; no code of the owner sees them pass.
    OneSided,
}

/// The pages of the grant that a transfer is about; what is not named is taken from the grant.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Select {
    /// Positions in the order of the grant, counted in the parts that are asked for: part j of so many parts of the
    /// grant's p-th page is at p * parts + j.
    pub positions: Option<PageList>,
    /// Layers of the owner's layout.
    pub layers: Option<Range<u32>>,
    /// Slices of the owner's layout.
    pub slices: Option<Range<u32>>,
    /// In how many parts the owner's pages are seen: a multiple of those of the grant.
    pub parts: Option<u32>,
}

/// Memory that the peer may reach: the source of a transfer over [`Path::Memory`], or what the owner exposes for one
/// over [`Path::OneSided`].
#[derive(Debug, Clone)]
pub struct Source<V = View> {
    /// The region, known to the peer from the local link.
    pub region: RegionId,
    /// What of it, in the order of the stream.
    pub view: V,
    /// The slot of the source's fence table that must keep its generation during the copy.
    pub slot: u32,
    /// That generation.
    pub generation: u64,
    /// Over [`Path::OneSided`]: how each of the owner's NICs knows the region, or the ring in its place.
    pub keys: Arc<[NicKey]>,
}

/// A source on its way: its page list is as short as it came.
pub type TravellingSource = Source<TravellingView>;

impl Source {
    /// The same, to be sent.
    pub fn travelling(&self) -> TravellingSource {
        let Source { region, slot, generation, .. } = *self;
        Source { region, view: TravellingView::of(&self.view), slot, generation, keys: self.keys.clone() }
    }
}

impl TravellingSource {
    /// The source with all its page ids; whoever sent it is charged for [`TravellingView::unfolded`] first.
    ///
    /// # Errors
    /// `ProtocolError` for ids that the layout does not have.
    pub fn unfold(self) -> Result<Source> {
        let Source { region, view, slot, generation, keys } = self;
        Ok(Source { region, view: view.unfold()?, slot, generation, keys })
    }
}

/// Opens a transfer.
#[derive(Debug, Clone)]
pub struct Begin {
    /// Its number, unique in the session: even from the side that opened the session, odd from the other.
    pub transfer: u64,
    /// The grant.
    pub grant: GrantId,
    /// Digest of the layout that the ticket was made for.
    pub layout: [u8; 8],
    /// What the initiator takes the pages to hold, or brings: up to the last page that is named; for `Confirm` and
    /// `Extend` up to the last of the grant.
    pub content: Option<ContentClaim>,
    /// What is asked.
    pub op: Op,
    /// What the transfer is for: whoever moves its bytes goes by it, on either side.
    pub class: Class,
    /// How the bytes are to go.
    pub path: Path,
    /// Whether page checksums travel with the bytes.
    pub sums: bool,
    /// Whether success counts as this engine's use of the grant.
    pub confirm: bool,
    /// How many engines use the grant together, by what the initiator knows: from 1 to [`MAX_READERS`].
    pub readers: u16,
    /// How long the initiator waits; for `Extend` the time that is asked for.
    pub time: Duration,
    /// Bytes under one checksum.
    pub unit: u32,
    /// Bytes of a chunk, a multiple of `unit`.
    pub chunk: u32,
    /// The initiator's side of the stream; none when nothing moves.
    pub shape: Option<Shape>,
    /// The owner's side.
    pub select: Select,
    /// The initiator's memory, for a write over [`Path::Memory`].
    pub source: Option<TravellingSource>,
}

/// A frame of the control connection.
#[derive(Debug, Clone)]
pub enum Frame {
    /// A sign of life.
    Beat,
    /// Opens a transfer.
    Begin(Box<Begin>),
    /// The owner takes part: go on. Carries the owner's memory for a read over [`Path::Memory`], and
    /// for both operations over [`Path::OneSided`].
    Accept {
        /// The transfer.
        transfer: u64,
        /// The owner's memory.
        source: Option<Box<TravellingSource>>,
    },
    /// The sender of this frame takes no further part, and why.
    End {
        /// The transfer.
        transfer: u64,
        /// Success, or what went wrong.
        outcome: Result<()>,
    },
    /// Answer to `End`: this side takes no further part either. Of a transfer over [`Path::OneSided`]: none of its
    /// operations is in flight any more, and none will be.
    Ended {
        /// The transfer.
        transfer: u64,
    },
    /// Asks the side that opened the session to open data channels.
    OpenChannels,
    /// The sender closes the session in order.
    Goodbye,
    /// Something for the peer's program, or for a library of its process.
    Notify {
        /// What it is about; 0 for the program's own.
        topic: Topic,
        /// Its number, from 1 without gaps in each direction of a topic of a session.
        number: u64,
        /// At most [`crate::MAX_NOTIFICATION`] bytes.
        payload: Arc<[u8]>,
    },
    /// The sender's NICs are reached at these addresses from now on.
    Nics(Nics),
    /// A NIC of the sender wants a connection to one of the receiver.
    Reach(NicCall),
    /// Answer to `Reach`.
    Reached(NicAnswer),
    /// Checksums of the sender's side of a part that its NIC has moved: the receiver compares them with its own side.
    Check {
        /// The transfer.
        transfer: u64,
        /// Where the part begins in the stream.
        at: u64,
        /// One for each unit of the part.
        sums: Vec<u64>,
    },
    /// Answer to `Check`: both sides are alike. Where they are not, the transfer ends.
    Checked {
        /// The transfer.
        transfer: u64,
        /// Where the part begins.
        at: u64,
    },
    /// As `Accept` over [`Path::OneSided`], of pages that the owner's NICs do not reach: the keys are those of its ring. From
    /// version 4 on, as the three that follow from it.
    AcceptStaged {
        /// The transfer.
        transfer: u64,
        /// The owner's memory.
        source: Box<TravellingSource>,
    },
    /// A slot of the owner's ring is lent for a chunk: it has the chunk's bytes (a read), or waits for them (a write).
    Lent {
        /// The transfer.
        transfer: u64,
        /// Where the chunk begins in the stream.
        at: u64,
        /// Where the slot begins in the ring.
        place: u64,
    },
    /// The initiator's NIC is through with the slot of a chunk: nothing of it is in flight.
    Used {
        /// The transfer.
        transfer: u64,
        /// Where the chunk begins.
        at: u64,
    },
    /// Of a write: what was in the slot of a chunk is in the owner's pages.
    Landed {
        /// The transfer.
        transfer: u64,
        /// Where the chunk begins.
        at: u64,
    },
    /// All notifications of a topic up to this one were taken.
    Noted {
        /// Which topic.
        topic: Topic,
        /// The number of the latest.
        upto: u64,
    },
}

impl Frame {
    /// Appends the frame.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        let mut w = Writer(std::mem::take(out));
        w.bytes(&[0; FRAME_HEADER]);
        match self {
            Frame::Beat | Frame::OpenChannels | Frame::Goodbye => {}
            Frame::Begin(begin) => encode_begin(begin, &mut w),
            Frame::Accept { transfer, source } => {
                w.u64(*transfer).option(source.as_deref(), encode_source);
            }
            Frame::End { transfer, outcome } => {
                w.u64(*transfer);
                match outcome {
                    Ok(()) => w.u16(0),
                    Err(error) => w.u16(error.code as u16).text(&error.text, MAX_TEXT),
                };
            }
            Frame::Ended { transfer } => {
                w.u64(*transfer);
            }
            Frame::Notify { topic, number, payload } => {
                w.u8(*topic).u64(*number).u32(payload.len() as u32).bytes(payload);
            }
            Frame::Noted { topic, upto } => {
                w.u8(*topic).u64(*upto);
            }
            Frame::Nics(nics) => nics.encode(&mut w),
            Frame::Reach(call) => call.encode(&mut w),
            Frame::Reached(answer) => answer.encode(&mut w),
            Frame::Check { transfer, at, sums } => {
                w.u64(*transfer).u64(*at).u32(sums.len() as u32);
                for sum in sums {
                    w.u64(*sum);
                }
            }
            Frame::AcceptStaged { transfer, source } => {
                w.u64(*transfer).option(Some(&**source), encode_source);
            }
            Frame::Lent { transfer, at, place } => {
                w.u64(*transfer).u64(*at).u64(*place);
            }
            Frame::Checked { transfer, at }
            | Frame::Used { transfer, at }
            | Frame::Landed { transfer, at } => {
                w.u64(*transfer).u64(*at);
            }
        }
        *out = w.0;
        let header = frame_header(self.kind(), &out[start + FRAME_HEADER..]);
        out[start..start + FRAME_HEADER].copy_from_slice(&header);
    }

    /// Takes a whole frame off the front of `input`: the frame and the bytes it took, or `None` when more must come.
    ///
    /// # Errors
    /// `ProtocolError` for anything that is not a frame of this version.
    pub fn decode(input: &[u8]) -> Result<Option<(Frame, usize)>> {
        let Some((header, rest)) = input.split_first_chunk::<FRAME_HEADER>() else { return Ok(None) };
        let wrong = |why: String| Err(Error::new(Code::ProtocolError, why));
        if header[8..12] != check(header) {
            return wrong(format!("{DAMAGED} (its header's checksum does not fit); the session is closed"));
        }
        let len = u32::from_le_bytes([header[0], header[1], header[2], header[3]]) as usize;
        if len > MAX_FRAME {
            return wrong(format!("the peer announced a frame of {len} bytes"));
        }
        let Some(body) = rest.get(..len) else { return Ok(None) };
        if header[12..] != page_sum(body).to_le_bytes() {
            return wrong(format!("{DAMAGED} (its checksum does not fit); the session is closed"));
        }
        let frame = decode_body(u16::from_le_bytes([header[4], header[5]]), body)?;
        Ok(Some((frame, FRAME_HEADER + len)))
    }

    fn kind(&self) -> u16 {
        match self {
            Frame::Beat => 1,
            Frame::Begin(_) => 2,
            Frame::Accept { .. } => 3,
            Frame::End { .. } => 4,
            Frame::Ended { .. } => 5,
            Frame::OpenChannels => 6,
            Frame::Goodbye => 7,
            Frame::Notify { .. } => 8,
            Frame::Noted { .. } => 9,
            Frame::Nics(_) => 10,
            Frame::Reach(_) => 11,
            Frame::Reached(_) => 12,
            Frame::Check { .. } => 13,
            Frame::Checked { .. } => 14,
            Frame::AcceptStaged { .. } => 15,
            Frame::Lent { .. } => 16,
            Frame::Used { .. } => 17,
            Frame::Landed { .. } => 18,
        }
    }
}

/// The header of a frame of this kind with this body.
#[doc(hidden)] // for tests that send what no engine sends
pub fn frame_header(kind: u16, body: &[u8]) -> [u8; FRAME_HEADER] {
    let mut header = [0; FRAME_HEADER];
    header[..4].copy_from_slice(&(body.len() as u32).to_le_bytes());
    header[4..6].copy_from_slice(&kind.to_le_bytes());
    let check = check(&header);
    header[8..12].copy_from_slice(&check);
    header[12..].copy_from_slice(&page_sum(body).to_le_bytes());
    header
}

fn check(header: &[u8; FRAME_HEADER]) -> [u8; 4] {
    (page_sum(&header[..8]) as u32).to_le_bytes()
}

fn decode_body(kind: u16, body: &[u8]) -> Result<Frame> {
    let Some(what) = usize::from(kind).checked_sub(1).and_then(|at| KINDS.get(at)) else {
        let text = format!("the peer sent a frame of unknown kind {kind}");
        return Err(Error::new(Code::ProtocolError, text));
    };
    let mut r = Reader::new(body, what);
    let frame = match kind {
        1 => Frame::Beat,
        2 => Frame::Begin(Box::new(decode_begin(&mut r)?)),
        3 => Frame::Accept { transfer: r.u64()?, source: r.option(decode_source)?.map(Box::new) },
        4 => {
            let transfer = r.u64()?;
            let outcome = match r.u16()? {
                0 => Ok(()),
                code => Err(Error::new(Code::from_wire(code), r.text(MAX_TEXT)?)),
            };
            Frame::End { transfer, outcome }
        }
        5 => Frame::Ended { transfer: r.u64()? },
        6 => Frame::OpenChannels,
        8 => Frame::Notify { topic: r.u8()?, number: r.u64()?, payload: decode_payload(&mut r)? },
        9 => Frame::Noted { topic: r.u8()?, upto: r.u64()? },
        10 => Frame::Nics(Nics::decode(&mut r)?),
        11 => Frame::Reach(NicCall::decode(&mut r)?),
        12 => Frame::Reached(NicAnswer::decode(&mut r)?),
        13 => Frame::Check { transfer: r.u64()?, at: r.u64()?, sums: decode_sums(&mut r)? },
        14 => Frame::Checked { transfer: r.u64()?, at: r.u64()? },
        15 => {
            let (transfer, source) = (r.u64()?, r.option(decode_source)?);
            let source = source.ok_or_else(|| r.wrong("it names no memory"))?;
            Frame::AcceptStaged { transfer, source: Box::new(source) }
        }
        16 => Frame::Lent { transfer: r.u64()?, at: r.u64()?, place: r.u64()? },
        17 => Frame::Used { transfer: r.u64()?, at: r.u64()? },
        18 => Frame::Landed { transfer: r.u64()?, at: r.u64()? },
        _ => Frame::Goodbye,
    };
    r.end()?;
    Ok(frame)
}

fn encode_begin(begin: &Begin, w: &mut Writer) {
    w.u64(begin.transfer).bytes(&begin.grant.0).bytes(&begin.layout);
    w.option(begin.content.as_ref(), |claim, w| {
        w.bytes(claim);
    });
    // Each by its place among those that `decode_begin` names.
    w.u8(begin.op as u8).u8(begin.path as u8).u8(begin.class as u8);
    w.u8(begin.sums.into()).u8(begin.confirm.into()).u16(begin.readers);
    w.u32(u32::try_from(begin.time.as_millis()).unwrap_or(u32::MAX)).u32(begin.unit).u32(begin.chunk);
    w.option(begin.shape.as_ref(), |shape, w| {
        w.u32(shape.layers).u32(shape.pages).u64(shape.row_bytes).u64(shape.run_bytes);
        w.u8(shape.order as u8);
    });
    let Select { positions, layers, slices, parts } = &begin.select;
    w.option(positions.as_ref(), PageList::encode);
    w.option(layers.as_ref(), encode_range).option(slices.as_ref(), encode_range);
    w.option(parts.as_ref(), |parts, w| {
        w.u32(*parts);
    });
    w.option(begin.source.as_ref(), encode_source);
}

fn decode_begin(r: &mut Reader) -> Result<Begin> {
    let (transfer, grant, layout) = (r.u64()?, GrantId(r.array()?), r.array()?);
    let content = r.option(Reader::array::<CONTENT_DIGEST_BYTES>)?;
    let op = r.one_of(&[Op::Read, Op::Write, Op::Confirm, Op::Extend], "its operation is unknown")?;
    let path = r.one_of(&[Path::Channels, Path::Memory, Path::OneSided], "its path is unknown")?;
    let class = r.one_of(&Class::ALL, "its class is unknown")?;
    let (sums, confirm, readers) = (r.bool()?, r.bool()?, r.u16()?);
    if readers == 0 || readers > MAX_READERS {
        return Err(r.wrong("it is of more readers than a handover has, or of none"));
    }
    let time = Duration::from_millis(r.u32()?.into());
    let (unit, chunk) = (r.u32()?, r.u32()?);
    let shape = r.option(|r| {
        let (layers, pages, row_bytes, run_bytes) = (r.u32()?, r.u32()?, r.u64()?, r.u64()?);
        Ok(Shape { layers, pages, row_bytes, run_bytes, order: decode_order(r)? })
    })?;
    let (positions, layers) = (r.option(PageList::decode)?, r.option(decode_range)?);
    let (slices, parts) = (r.option(decode_range)?, r.option(Reader::u32)?);
    let source = r.option(decode_source)?;
    let select = Select { positions, layers, slices, parts };
    Ok(Begin {
        transfer,
        grant,
        layout,
        content,
        op,
        class,
        path,
        sums,
        confirm,
        readers,
        time,
        unit,
        chunk,
        shape,
        select,
        source,
    })
}

fn decode_sums(r: &mut Reader) -> Result<Vec<u64>> {
    match r.count(size_of::<u64>())? {
        count if count <= MAX_SUMS as usize => (0..count).map(|_| r.u64()).collect(),
        _ => Err(r.wrong("it has more checksums than a chunk has")),
    }
}

fn decode_payload(r: &mut Reader) -> Result<Arc<[u8]>> {
    match r.count(1)? {
        len if len <= MAX_NOTIFICATION => Ok(r.take(len)?.into()),
        _ => Err(r.wrong("it is longer than a notification may be")),
    }
}

fn encode_source(source: &TravellingSource, w: &mut Writer) {
    w.u32(source.region.0).u32(source.slot).u64(source.generation);
    encode_keys(&source.keys, w);
    source.view.encode(w);
}

fn decode_source(r: &mut Reader) -> Result<TravellingSource> {
    let (region, slot, generation) = (RegionId(r.u32()?), r.u32()?, r.u64()?);
    let keys = decode_keys(r)?.into();
    Ok(Source { region, slot, generation, keys, view: TravellingView::decode(r)? })
}
