//! The requests of one queue pair: gathered, posted in chains, and returned in the order in which they came.
//!
//! Few requests ask the device for a completion; one that comes tells of all before it. A request that fails,
//! and those after it, have completions of their own whether they asked or not. So once a queue pair is in
//! its error state, one more request is posted, which asks: when it comes back, all before it have ended.

use super::abi::ibv_send_wr__bindgen_ty_2__bindgen_ty_1 as Remote;
use super::abi::{self, ibv_qp, ibv_qp_attr, ibv_send_wr, ibv_sge};
use super::registration::Registration;
use super::{Posted, RmaOp, Verbs, VerbsError, number};
use crate::HostError;
use std::collections::VecDeque;
use std::ffi::c_int;
use std::ptr::{self, NonNull};
use std::rc::Rc;
use std::sync::Arc;

/// A queue pair of a device; no later one has the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct QueueId(pub(super) u32);

/// Something has come back from a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Completion {
    /// A request has ended: its memory is not touched any more by it.
    Request {
        /// Where it was posted.
        queue: QueueId,
        /// As it was posted.
        token: u64,
        /// Whether the bytes were moved.
        result: Result<(), RequestError>,
    },
    /// A queue pair that has failed has no request in flight any more, and touches no memory: see
    /// [`super::Queue::is_drained`].
    Drained {
        /// Which.
        queue: QueueId,
    },
}

/// Why a request did not move its bytes, or may not have moved them.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("RDMA {op} of {len} bytes at {remote:#x} of the peer, by {place}: {text}")]
pub struct RequestError {
    /// `read` or `write`.
    pub op: &'static str,
    /// Bytes of the request.
    pub len: u64,
    /// Where they lie there.
    pub remote: u64,
    /// The device and the port.
    pub place: String,
    /// The status of the completion, by the library's numbers (`enum ibv_wc_status`).
    pub status: i32,
    /// The device's own number for it.
    pub vendor: u32,
    /// The status in words, and what it means.
    pub text: String,
}

impl RequestError {
    /// Whether it never had its turn, since the queue pair had failed: what failed is another, or the peer,
    /// or was [`super::Queue::fail`].
    pub fn is_flushed(&self) -> bool {
        self.status == abi::IBV_WC_WR_FLUSH_ERR as i32
    }
}

/// A run of bytes of this process.
#[derive(Clone, Copy)]
pub struct Piece<'a> {
    /// Memory that the device knows.
    pub memory: &'a Rc<Registration>,
    /// The first byte in it.
    pub offset: usize,
    /// Bytes, at least one.
    pub len: usize,
}

/// One request: pieces of this process to or from one run of bytes at the peer.
#[derive(Clone, Copy)]
pub struct Rma<'a> {
    /// The direction.
    pub op: RmaOp,
    /// The bytes here, in the order in which they lie there; at most [`super::Queue::max_pieces`].
    pub pieces: &'a [Piece<'a>],
    /// Where the run begins there: the peer's [`Registration::base`] and an offset.
    pub remote: u64,
    /// The peer's [`Registration::rkey`].
    pub rkey: u32,
    /// Given back with the completion.
    pub token: u64,
}

/// A request that has not come back.
#[derive(Debug, Clone, Copy)]
pub(super) struct Request {
    pub token: u64,
    pub op: RmaOp,
    pub len: u64,
    pub remote: u64,
    /// How many of the kept registrations are its.
    kept: usize,
}

/// How far a queue pair has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stage {
    Open,
    Connected,
    /// In its error state; requests have not all come back.
    Failing,
    Drained,
}

/// What the lower half of a request's number says; its upper half is the queue pair's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Request(u32),
    Last,
}

/// Numbers of requests count in 24 bits, which is more than a send queue holds.
const COUNT: u32 = (1 << 24) - 1;
const LAST: u32 = 1 << 25;

pub(super) struct Ring {
    pub id: QueueId,
    pub qp: NonNull<ibv_qp>,
    pub verbs: Arc<Verbs>,
    /// The device and port, for errors.
    pub place: String,
    pub depth: usize,
    pub max_pieces: usize,
    pub longest: u64,
    pub stage: Stage,
    /// Why it could not be taken to its error state.
    pub fault: Option<VerbsError>,
    /// Posted ones, then gathered ones.
    requests: VecDeque<Request>,
    /// Known to the device until their requests have come back.
    kept: VecDeque<Rc<Registration>>,
    posted: usize,
    /// The number of the first of `requests`.
    first: u32,
    gathered: Vec<ibv_send_wr>,
    pieces: Vec<ibv_sge>,
    /// Requests since one that asks for a completion.
    quiet: usize,
}

impl Ring {
    pub fn new(
        id: u32,
        qp: NonNull<ibv_qp>,
        (verbs, place): (&Arc<Verbs>, String),
        (depth, max_pieces): (usize, usize),
        longest: u64,
    ) -> Ring {
        Ring {
            id: QueueId(id),
            qp,
            verbs: verbs.clone(),
            place,
            depth,
            max_pieces,
            longest,
            stage: Stage::Open,
            fault: None,
            requests: VecDeque::with_capacity(depth),
            kept: VecDeque::with_capacity(depth),
            posted: 0,
            first: 0,
            gathered: Vec::with_capacity(depth),
            pieces: Vec::with_capacity(depth),
            quiet: 0,
        }
    }

    /// The queue pair that a request's number names.
    pub fn id_of(wr_id: u64) -> u32 {
        (wr_id >> 32) as u32
    }

    pub fn kind_of(wr_id: u64) -> Kind {
        match wr_id as u32 {
            LAST => Kind::Last,
            count => Kind::Request(count & COUNT),
        }
    }

    fn number(&self, low: u32) -> u64 {
        u64::from(self.id.0) << 32 | u64::from(low)
    }

    /// Requests that may still be gathered.
    pub fn room(&self) -> usize {
        self.depth - self.requests.len()
    }

    /// Requests that have not come back.
    pub fn in_flight(&self) -> usize {
        self.requests.len()
    }

    /// Of those, the ones that the device does not have yet.
    pub fn waiting(&self) -> usize {
        self.gathered.len()
    }

    /// Gathers a request.
    pub fn gather(&mut self, rma: &Rma<'_>) -> Result<Posted, HostError> {
        let len = self.check(rma)?;
        if self.room() == 0 {
            return Ok(Posted::Full);
        }
        let begin = self.pieces.len();
        for piece in rma.pieces {
            match piece.memory.at(piece.offset, piece.len, rma.op) {
                Ok(addr) => {
                    // Of at most `longest` bytes together, which is an u32.
                    let (length, lkey) = (piece.len as u32, piece.memory.lkey());
                    self.pieces.push(ibv_sge { addr, length, lkey });
                }
                Err(error) => {
                    self.pieces.truncate(begin);
                    return Err(error);
                }
            }
        }
        let before = self.kept.len();
        for (index, piece) in rma.pieces.iter().enumerate() {
            // Pieces mostly lie in the same memory.
            if index == 0 || !Rc::ptr_eq(piece.memory, rma.pieces[index - 1].memory) {
                self.kept.push_back(piece.memory.clone());
            }
        }
        let kept = self.kept.len() - before;
        let count = self.first.wrapping_add(self.requests.len() as u32) & COUNT;
        self.gathered.push(ibv_send_wr {
            wr_id: self.number(count),
            num_sge: rma.pieces.len() as c_int,
            opcode: match rma.op {
                RmaOp::Read => abi::IBV_WR_RDMA_READ,
                RmaOp::Write => abi::IBV_WR_RDMA_WRITE,
            },
            wr: abi::ibv_send_wr__bindgen_ty_2 { rdma: Remote { remote_addr: rma.remote, rkey: rma.rkey } },
            ..ibv_send_wr::default()
        });
        self.requests.push_back(Request { token: rma.token, op: rma.op, len, remote: rma.remote, kept });
        Ok(Posted::Yes)
    }

    /// The bytes of a request that may be posted.
    fn check(&self, rma: &Rma<'_>) -> Result<u64, HostError> {
        let no = |text: String| Err(HostError::InvalidArgument(text));
        match self.stage {
            Stage::Open => return no("a request for a queue pair that is not connected".into()),
            Stage::Connected => {}
            Stage::Failing | Stage::Drained => {
                let text = "it has failed, and takes no more requests; open a new one";
                return Err(
                    VerbsError::own(format!("posting to a queue pair of {}", self.place), text).into()
                );
            }
        }
        let len = rma.pieces.iter().fold(0u64, |sum, piece| sum.saturating_add(piece.len as u64));
        if len > self.longest || rma.remote.checked_add(len).is_none() {
            let (at, longest) = (rma.remote, self.longest);
            return no(format!(
                "a request of {len} bytes at {at:#x} where the device takes {longest} at most"
            ));
        }
        Ok(len)
    }

    /// Posts what was gathered, as one chain. If the device refuses, the queue pair is failed, and all
    /// requests come back.
    pub fn flush(&mut self) -> Result<(), VerbsError> {
        if self.gathered.is_empty() || self.stage != Stage::Connected {
            return Ok(());
        }
        let first = self.link();
        let mut refused = ptr::null_mut();
        // SAFETY: an open queue pair; the chain and its pieces lie in two vectors that are not changed during
        // the call, which copies them. The bytes lie in memory that the device knows until the request has
        // come back. No more requests are outstanding than the send queue holds.
        let code = unsafe {
            let qp = self.qp.as_ptr();
            ((*(*qp).context).ops.post_send)(qp, first, &mut refused)
        };
        let failed = number(code).err();
        let taken = match failed {
            None => self.gathered.len(),
            Some(_) => {
                let at = refused as usize;
                let is_refused = |wr: &ibv_send_wr| ptr::from_ref(wr) as usize == at;
                // Where the driver does not say, the device may have any of them: all come back in the end.
                self.gathered.iter().position(is_refused).unwrap_or(self.gathered.len())
            }
        };
        self.posted += taken;
        self.gathered.clear();
        self.pieces.clear();
        let Some(code) = failed else { return Ok(()) };
        self.fail_and_remember();
        Err(VerbsError::os(format!("posting to a queue pair of {}", self.place), code))
    }

    /// Makes a chain of what was gathered, of which the last and every so many ask for a completion.
    fn link(&mut self) -> *mut ibv_send_wr {
        let every = (self.depth / 4).clamp(1, 32);
        let (first, mut piece) = (self.gathered.as_mut_ptr(), self.pieces.as_mut_ptr());
        let last = self.gathered.len() - 1;
        for index in 0..=last {
            self.quiet += 1;
            let ask = index == last || self.quiet >= every;
            if ask {
                self.quiet = 0;
            }
            // SAFETY: an element of the vector, to which there is no other reference meanwhile.
            let wr = unsafe { &mut *first.add(index) };
            wr.send_flags = if ask { abi::IBV_SEND_SIGNALED } else { 0 };
            wr.sg_list = piece;
            piece = piece.wrapping_add(wr.num_sge as usize);
            wr.next = if index == last { ptr::null_mut() } else { first.wrapping_add(index + 1) };
        }
        first
    }

    /// Takes the queue pair to its error state: the peer reaches nothing through it any more, and what it had
    /// in flight comes back.
    pub fn fail(&mut self) -> Result<(), VerbsError> {
        self.fail_and_remember();
        self.fault.clone().map_or(Ok(()), Err)
    }

    pub fn fail_and_remember(&mut self) {
        if self.stage >= Stage::Failing {
            return;
        }
        let was = std::mem::replace(&mut self.stage, Stage::Failing);
        self.gathered.clear();
        self.pieces.clear();
        self.fault = match self.to_error() {
            Ok(()) if was == Stage::Open => {
                self.stage = Stage::Drained;
                None
            }
            Ok(()) => self.post_last().err(),
            Err(error) => Some(error),
        };
    }

    fn to_error(&self) -> Result<(), VerbsError> {
        let mut attr = ibv_qp_attr { qp_state: abi::IBV_QPS_ERR, ..ibv_qp_attr::default() };
        let mask = abi::IBV_QP_STATE as c_int;
        // SAFETY: an open queue pair, and attributes of which the state alone is read.
        let code = unsafe { (self.verbs.table.modify_qp)(self.qp.as_ptr(), &mut attr, mask) };
        let Err(code) = number(code) else { return Ok(()) };
        if self.is_in_error() {
            return Ok(());
        }
        let what = format!("taking a queue pair of {} to its error state", self.place);
        Err(VerbsError::os(what, code).hint("only its end stops it"))
    }

    /// What the device says.
    fn is_in_error(&self) -> bool {
        let mut attr = ibv_qp_attr::default();
        let (mut init, mask) = (abi::ibv_qp_init_attr::default(), abi::IBV_QP_STATE as c_int);
        // SAFETY: an open queue pair, and two structures that the call fills.
        let code = unsafe { (self.verbs.table.query_qp)(self.qp.as_ptr(), &mut attr, mask, &mut init) };
        code == 0 && attr.qp_state == abi::IBV_QPS_ERR
    }

    /// The request that comes back after all others.
    fn post_last(&mut self) -> Result<(), VerbsError> {
        let mut wr = ibv_send_wr {
            wr_id: self.number(LAST),
            opcode: abi::IBV_WR_RDMA_WRITE,
            send_flags: abi::IBV_SEND_SIGNALED,
            ..ibv_send_wr::default()
        };
        let (qp, mut refused) = (self.qp.as_ptr(), ptr::null_mut());
        // SAFETY: as in `flush`; one place of the send queue is kept for it, and it has no bytes.
        let code = unsafe { ((*(*qp).context).ops.post_send)(qp, &mut wr, &mut refused) };
        number(code).map_err(|code| {
            let what = format!("asking a queue pair of {} to say when it has drained", self.place);
            VerbsError::os(what, code).hint("only its end stops it")
        })
    }

    /// How many requests are before the one of this number; none where the device does not have such a one.
    pub fn position(&self, count: u32) -> Option<usize> {
        let ahead = (count.wrapping_sub(self.first) & COUNT) as usize;
        (ahead < self.posted).then_some(ahead)
    }

    /// Takes the first request: the device is done with it.
    pub fn pop(&mut self) -> Option<Request> {
        let request = self.requests.pop_front()?;
        self.first = self.first.wrapping_add(1) & COUNT;
        self.posted = self.posted.saturating_sub(1);
        self.kept.drain(..request.kept);
        Some(request)
    }

    /// Numbers the next request so.
    #[cfg(test)]
    pub fn begin_at(&mut self, count: u32) {
        self.first = count;
    }

    /// The device may use the memory of its requests for ever: nothing else may.
    pub fn abandon(&mut self) {
        self.kept.drain(..).for_each(std::mem::forget);
        self.requests.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_requests_say_whose_and_which() {
        let id = 0xFFFF_FFFFu32;
        let number = |low: u32| u64::from(id) << 32 | u64::from(low);
        for (low, kind) in [(0, Kind::Request(0)), (COUNT, Kind::Request(COUNT)), (LAST, Kind::Last)] {
            assert_eq!((Ring::id_of(number(low)), Ring::kind_of(number(low))), (id, kind));
        }
    }
}
