//! One side of one transfer.
//!
//! Invariants:
//! - a work request pins its flow from issue to done; a flow concludes only at zero pins, so once a transfer is
//!   reported to have ended, nothing in this process touches its memory;
//! - after `stop` is set no work request is issued, and executors see the flag before their next copy;
//! - every chunk is issued at most once on each side;
//! - a flow whose pages the peer's NIC can reach ([`Work::Expose`]) concludes only when the peer has answered that
//!   nothing of it is in flight any more, or when the path was cut: zero pins say nothing about it.

use crate::checks::{AT_ONCE, Checks};
use crate::chunking::Chunking;
use crate::frame::{Op, Path, Source};
use crate::lending::{Borrowing, Lending};
use crate::{FlowKey, MAX_SUMS, OWN_SESSION};
use kvik_core::{Class, Code, EngineId, Error, GrantId, Result, View};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// What this process does with its memory for the transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    /// Nothing: it waits for the other side.
    Wait,
    /// Sends chunks over channels.
    Send,
    /// Places chunks that come over channels.
    Place,
    /// Copies from the other side's memory.
    Copy,
    /// Has its NIC move chunks to or from the memory that the owner exposes.
    Post,
    /// Exposes its pages to the peer's NIC.
    Expose(Reach),
}

/// Whether the peer's NIC can still reach exposed pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach {
    /// It may, as long as it likes.
    Open,
    /// It may, but was told to stop; the answer has not come.
    StopRequested,
    /// It cannot: the peer has no operation in flight any more, or the path was cut.
    Over,
}

/// Which side of the transfer this is.
#[derive(Debug, Clone)]
pub(crate) enum Role {
    /// It began the transfer.
    Initiator,
    /// It owns the grant.
    Owner { grant: GrantId, reader: EngineId },
    /// Both: a transfer within the engine, whose source is another view here.
    Both { grant: GrantId },
    /// Owner of a grant that it does not know yet; the request waits for it.
    Parked { grant: GrantId },
}

pub(crate) struct Flow<R> {
    pub key: FlowKey,
    pub role: Role,
    pub op: Op,
    pub class: Class,
    pub path: Path,
    pub confirm: bool,
    pub memory: Option<(R, Arc<View>)>,
    pub source: Option<CopyFrom<R>>,
    pub chunking: Chunking,
    pub work: Work,
    pub next: u64,
    /// Chunks that were claimed and given back.
    pub back: Vec<u64>,
    pub done: u64,
    pub seen: Vec<u64>,
    pub pins: u32,
    /// Pins of work requests that a NIC has.
    pub posted: u32,
    pub deadline: Duration,
    pub stop: Option<Error>,
    pub stop_flag: Arc<AtomicBool>,
    /// The peer has sent its `End`.
    pub peer_ended: bool,
    /// And called the transfer a success: the flow concludes as one as soon as its pins are gone.
    pub peer_done: bool,
    /// This side has sent its `End` ahead of the conclusion, so that the peer may answer it.
    pub end_sent: bool,
    /// Bytes that this flow holds because the peer asked for them.
    pub held: usize,
    /// Fence slot of this side's source memory, raised when the flow concludes.
    pub slot: Option<u32>,
    pub first: Option<Duration>,
    pub extents: u64,
    pub verify: Duration,
    /// Comparisons of what a NIC has moved.
    pub checks: Checks,
    /// Where no NIC reaches the owner's pages: the slots of its ring, as the owner has them, and as the initiator has.
    pub lending: Option<Lending<R>>,
    pub borrowing: Option<Borrowing>,
    /// Its end was reported ahead of its conclusion: a work request of it cannot be left yet.
    pub reported: bool,
    /// The peer's `End` was answered ahead of it.
    pub answered: bool,
}

/// Where a copy takes its bytes from.
#[derive(Debug, Clone)]
pub enum CopyFrom<R> {
    /// Another process's memory, over the local link.
    Peer(Arc<Source>),
    /// Memory of this process.
    Own(R, Arc<View>),
}

impl<R> Flow<R> {
    /// Of which only is known what is asked for, how, and what for.
    pub fn new(key: FlowKey, role: Role, (op, path, class): (Op, Path, Class)) -> Flow<R> {
        Flow {
            key,
            role,
            op,
            class,
            path,
            confirm: false,
            memory: None,
            source: None,
            chunking: Chunking::NOTHING,
            work: Work::Wait,
            next: 0,
            back: Vec::new(),
            done: 0,
            seen: Vec::new(),
            pins: 0,
            posted: 0,
            deadline: Duration::ZERO,
            stop: None,
            stop_flag: Arc::default(),
            peer_ended: false,
            peer_done: false,
            end_sent: false,
            held: 0,
            slot: None,
            first: None,
            extents: 0,
            verify: Duration::ZERO,
            checks: Checks::default(),
            lending: None,
            borrowing: None,
            reported: false,
            answered: false,
        }
    }

    /// Whether it is of a transfer within the engine.
    pub fn is_own(&self) -> bool {
        self.key.0 == OWN_SESSION
    }

    /// No work request is issued any more; executors are told. False when that was so before.
    pub fn set_stop(&mut self, error: Error) -> bool {
        if self.stop.is_some() {
            return false;
        }
        self.stop = Some(error);
        self.stop_flag.store(true, Ordering::Release);
        true
    }

    /// The next chunk to send or copy.
    pub fn claim(&mut self) -> Option<Range<u64>> {
        if self.stop.is_some() {
            return None;
        }
        let index = match self.back.pop() {
            Some(index) => index,
            None if self.next < self.chunking.chunks() => {
                self.next += 1;
                self.next - 1
            }
            None => return None,
        };
        self.pins += 1;
        Some(self.chunking.part(index))
    }

    /// Whether [`Flow::claim`] would give another chunk.
    pub fn has_more(&self) -> bool {
        self.stop.is_none() && (!self.back.is_empty() || self.next < self.chunking.chunks())
    }

    /// Bytes of the chunk that [`Flow::claim`] would give.
    pub fn ahead(&self) -> u64 {
        let part = self.chunking.part(self.next.min(self.chunking.chunks()));
        part.end.saturating_sub(part.start)
    }

    /// Takes a chunk that arrived: its part of the stream.
    ///
    /// # Errors
    /// `ProtocolError` for a chunk that does not fit the cut, or that came before.
    pub fn arrive(&mut self, position: u64, len: u32, sums: u32) -> Result<Range<u64>> {
        let transfer = self.key.1;
        let wrong = |why: &str| {
            let text = format!("the peer sent a chunk at {position} of transfer {transfer}: {why}");
            Error::new(Code::ProtocolError, text)
        };
        let index = position / self.chunking.chunk;
        if !position.is_multiple_of(self.chunking.chunk) || index >= self.chunking.chunks() {
            return Err(wrong("no chunk lies there"));
        }
        let part = self.chunking.part(index);
        if part.end - part.start != u64::from(len) || self.chunking.sums_of(&part) != sums {
            return Err(wrong("it has another length or other checksums than agreed"));
        }
        if !self.note_chunk(position) {
            return Err(wrong("it came before"));
        }
        self.pins += 1;
        Ok(part)
    }

    /// Takes note of a chunk of the peer's: false for none, and for one that was noted before.
    pub fn note_chunk(&mut self, position: u64) -> bool {
        let index = position / self.chunking.chunk;
        if !position.is_multiple_of(self.chunking.chunk) || index >= self.chunking.chunks() {
            return false;
        }
        let (word, bit) = ((index / 64) as usize, 1 << (index % 64));
        match self.seen.get_mut(word) {
            Some(seen) if *seen & bit == 0 => *seen |= bit,
            _ => return false,
        }
        true
    }

    /// Whether the peer can know that the transfer is a success.
    pub fn can_be_done(&self) -> bool {
        let all_sent = self.work == Work::Send && self.next >= self.chunking.chunks();
        // Only the initiator's completions tell when all is in place, unless this side copies too.
        if let Work::Expose(_) = self.work {
            return self.lending.is_none() || self.done == self.chunking.chunks();
        }
        let peer_copies = self.work == Work::Wait && self.path == Path::Memory;
        match (&self.role, self.op) {
            (Role::Owner { .. }, Op::Read) | (Role::Initiator, Op::Write) => all_sent || peer_copies,
            (Role::Initiator, Op::Confirm | Op::Extend) => true,
            _ => false,
        }
    }

    /// Whether the peer may have read all of it without this side's knowledge: a flow that was stopped takes no note of
    /// the slots that the peer is through with. A write's bytes this side has placed itself.
    pub fn was_read_unheard(&self) -> bool {
        self.stop.is_some() && self.lending.is_some() && self.op == Op::Read
    }

    /// The peer has no operation in flight on this side's pages any more, or cannot have any.
    pub fn close_reach(&mut self) {
        if let Work::Expose(reach) = &mut self.work {
            *reach = Reach::Over;
        }
    }

    /// Whether something can still touch this side's memory for the transfer: a work request of this process, or the
    /// peer's NIC.
    pub fn is_touched(&self) -> bool {
        self.pins > 0 || matches!(self.work, Work::Expose(Reach::Open | Reach::StopRequested))
    }

    /// Whether it is a NIC that can touch the memory of either side.
    pub fn is_in_flight(&self) -> bool {
        match self.work {
            Work::Post => self.posted > 0,
            Work::Expose(reach) => reach != Reach::Over,
            _ => false,
        }
    }

    /// All chunks are done, and what was to be compared is alike.
    pub fn is_complete(&self) -> bool {
        self.done == self.chunking.chunks() && self.checks.are_done()
    }

    /// Bytes of the chunks that are done, for reports of what was reached.
    pub fn bytes_done(&self) -> u64 {
        (self.done * self.chunking.chunk).min(self.chunking.bytes)
    }
}

impl<R> Flow<R> {
    /// The next part of this side to sum.
    pub fn claim_sums(&mut self) -> Option<Range<u64>> {
        if self.stop.is_some() {
            return None;
        }
        let part = self.checks.claim()?;
        self.pins += 1;
        Some(part)
    }

    /// Bytes that a peer's comparisons take here at most.
    pub fn held_by_checks(chunking: &Chunking) -> usize {
        AT_ONCE * (chunking.chunk.div_ceil(chunking.unit) as usize).min(MAX_SUMS as usize) * size_of::<u64>()
    }
}
