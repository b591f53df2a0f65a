//! One connection between two engines, with its channels: bytes that come in pieces, late, or not at all.

use crate::channels::Channels;
use crate::engine::Process;
use crate::notes::Lines;
use kvik_proto::{ChunkHeader, Handshake};
use std::collections::VecDeque;
use std::rc::Rc;

/// A chunk on its way.
#[derive(Clone)]
pub struct Chunk {
    pub header: ChunkHeader,
    pub payload: Vec<u8>,
    pub sums: Vec<u64>,
    pub status: u64,
    /// When it was sent, counted in chunks of its session.
    pub turn: u64,
}

/// One session's connections. Direction and side 0 are the opener's.
pub struct Link {
    pub session: Option<u64>,
    pub ends: [usize; 2],
    /// The processes that shook hands: a restarted one is another.
    pub processes: [Rc<Process>; 2],
    pub shake: [Option<Handshake>; 2],
    pub greeting: [Vec<u8>; 2],
    pub control: [VecDeque<u8>; 2],
    pub channels: Channels,
    pub frames: [Frames; 2],
    /// What each end has notified the other of.
    pub notes: [Lines; 2],
    /// Which ends have cut it.
    pub closed: [bool; 2],
    /// Which ends have died.
    pub gone: [bool; 2],
    /// Nothing arrives any more in this direction, and nobody is told.
    pub lost: [bool; 2],
    /// The next chunk that somebody reads has a flipped bit.
    pub flips: bool,
    /// Nothing arrives for a while.
    pub stalled: bool,
    /// It has a one-sided link beside its channels.
    pub one_sided: bool,
    /// Which ends have closed their endpoint of it.
    pub fenced: [bool; 2],
    /// The faults that have struck it or its engines.
    pub faults: u32,
}

impl Link {
    pub fn side(&self, engine: usize) -> usize {
        usize::from(self.ends[0] != engine)
    }
}

/// Of a frame so many bytes are kept: a topic and a number.
pub const START: usize = 9;

/// Finds out which frames have arrived, by their headers and what they begin with.
#[derive(Default)]
pub struct Frames {
    header: Vec<u8>,
    start: [u8; START],
    len: usize,
    seen: usize,
}

impl Frames {
    /// The kinds of frames that these bytes complete, each with what it begins with.
    pub fn feed(&mut self, mut bytes: &[u8], kinds: &mut Vec<(u16, [u8; START])>) {
        while !bytes.is_empty() {
            if self.header.len() < kvik_proto::FRAME_HEADER {
                self.header.push(bytes[0]);
                bytes = &bytes[1..];
                if self.header.len() == kvik_proto::FRAME_HEADER {
                    let len = [self.header[0], self.header[1], self.header[2], self.header[3]];
                    (self.len, self.seen) = (u32::from_le_bytes(len) as usize, 0);
                }
            } else {
                let take = (self.len - self.seen).min(bytes.len());
                for (place, byte) in self.start.iter_mut().skip(self.seen).zip(&bytes[..take]) {
                    *place = *byte;
                }
                self.seen += take;
                bytes = &bytes[take..];
            }
            if self.header.len() == kvik_proto::FRAME_HEADER && self.seen == self.len {
                let kind = u16::from_le_bytes([self.header[4], self.header[5]]);
                kinds.push((kind, self.start));
                self.header.clear();
            }
        }
    }
}
