//! Runs: contiguous bytes that the kernel reads or writes in place, many to one system call.
//!
//! The data path must neither copy a page nor allocate for one. A [`RunBuffer`] is allocated once a channel;
//! each burst begins a batch in it, pushes runs, and lets the kernel move them:
//!
//! ```
//! use kvik_host::{HugePages, Io, Memory, RunBuffer, SendRun};
//! # let (a, b) = std::os::unix::net::UnixStream::pair()?;
//! let memory = Memory::shared(1 << 16, HugePages::Never)?;
//! let mut buffer = RunBuffer::new(64);
//!
//! let header = [7u8; 16];
//! let mut batch = buffer.begin_send();
//! batch.push(SendRun::from(&header[..]));
//! batch.push(memory.send_run(4096, 8192)?);
//! while !batch.is_empty() {
//!     match batch.send(&a)? {
//!         Io::Done(_) => continue,    // what went has been taken off the front
//!         Io::Blocked => break,       // a non-blocking socket is full: wait for it to be writable
//!         Io::Closed => break,
//!     }
//! }
//! # assert!(batch.is_empty()); drop(b);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A run borrows the memory it lies in, and a batch lives no longer than its runs, so the kernel is never
//! given an address whose memory has gone. Runs to send from and runs to receive into are different types:
//! bytes behind a shared reference, or of a peer, cannot be received into.

use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr;

use rustix::io::{Errno, retry_on_intr};

use crate::error::HostError;

/// The most runs that one system call takes (the kernel's `UIO_MAXIOV`).
pub const MAX_RUNS: usize = 1024;

/// How one attempt at input or output ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Io<T = usize> {
    /// Something moved.
    Done(T),
    /// Nothing can move now; wait for readiness.
    Blocked,
    /// The other end has said, in order, that nothing more comes.
    Closed,
}

impl Io {
    /// How a call on a connection ended that moves bytes.
    pub(crate) fn of(what: &str, moved: Result<usize, Errno>) -> Result<Io, HostError> {
        match moved {
            Ok(moved) => Ok(Io::Done(moved)),
            Err(Errno::AGAIN) => Ok(Io::Blocked),
            Err(error) => Err(HostError::connection(what, error)),
        }
    }
}

/// Bytes to send from.
#[derive(Clone, Copy, Debug)]
pub struct SendRun<'m>(libc::iovec, PhantomData<&'m [u8]>);

/// Bytes to receive into.
#[derive(Debug)]
pub struct RecvRun<'m>(libc::iovec, PhantomData<&'m mut [u8]>);

impl SendRun<'_> {
    /// # Safety
    /// `base` stays mapped and readable for `len` bytes during the lifetime of the run.
    pub(crate) unsafe fn from_raw(base: *mut u8, len: usize) -> Self {
        SendRun(libc::iovec { iov_base: base.cast(), iov_len: len }, PhantomData)
    }
}

impl RecvRun<'_> {
    /// # Safety
    /// `base` stays mapped and writable for `len` bytes during the lifetime of the run, and no other Rust
    /// reference to the bytes is used meanwhile.
    pub(crate) unsafe fn from_raw(base: *mut u8, len: usize) -> Self {
        RecvRun(libc::iovec { iov_base: base.cast(), iov_len: len }, PhantomData)
    }
}

impl<'m> From<&'m [u8]> for SendRun<'m> {
    fn from(bytes: &'m [u8]) -> Self {
        // SAFETY: the run lives no longer than the slice, and is only read from.
        unsafe { SendRun::from_raw(bytes.as_ptr().cast_mut(), bytes.len()) }
    }
}

impl<'m> From<&'m mut [u8]> for RecvRun<'m> {
    fn from(bytes: &'m mut [u8]) -> Self {
        // SAFETY: the run holds the exclusive borrow of the slice.
        unsafe { RecvRun::from_raw(bytes.as_mut_ptr(), bytes.len()) }
    }
}

/// Room for the runs of one batch, allocated once.
#[derive(Debug)]
pub struct RunBuffer {
    slots: Vec<libc::iovec>,
    capacity: usize,
}

// SAFETY: addresses left over from an ended batch are never used: every batch begins by clearing them.
unsafe impl Send for RunBuffer {}
// SAFETY: through a shared reference nothing of it can be reached.
unsafe impl Sync for RunBuffer {}

impl RunBuffer {
    /// Room for `capacity` runs, at least 1 and at most [`MAX_RUNS`].
    pub fn new(capacity: usize) -> RunBuffer {
        let capacity = capacity.clamp(1, MAX_RUNS);
        RunBuffer { slots: Vec::with_capacity(capacity), capacity }
    }

    /// An empty batch to send.
    pub fn begin_send<'m>(&mut self) -> SendBatch<'_, 'm> {
        SendBatch { queue: self.begin(), lives: PhantomData }
    }

    /// An empty batch to receive.
    pub fn begin_recv<'m>(&mut self) -> RecvBatch<'_, 'm> {
        RecvBatch { queue: self.begin(), lives: PhantomData }
    }

    /// An empty batch of addresses in another process.
    pub fn begin_remote(&mut self) -> RemoteBatch<'_> {
        RemoteBatch { queue: self.begin() }
    }

    fn begin(&mut self) -> Queue<'_> {
        self.slots.clear();
        Queue { slots: &mut self.slots, capacity: self.capacity, first: 0, bytes: 0 }
    }
}

/// The runs of a batch that have not moved yet: `slots[first..]`, `bytes` in sum.
#[derive(Debug)]
pub(crate) struct Queue<'b> {
    slots: &'b mut Vec<libc::iovec>,
    capacity: usize,
    first: usize,
    bytes: usize,
}

impl Queue<'_> {
    /// Takes a run unless the buffer is full or the sum would overflow. An empty run takes no room.
    fn push(&mut self, run: libc::iovec) -> bool {
        let Some(bytes) = self.bytes.checked_add(run.iov_len) else { return false };
        if run.iov_len == 0 {
            return true;
        }
        if self.slots.len() == self.capacity {
            return false;
        }
        self.slots.push(run);
        self.bytes = bytes;
        true
    }

    /// Takes `moved` bytes off the front.
    pub(crate) fn advance(&mut self, moved: usize) {
        let mut left = moved.min(self.bytes);
        self.bytes -= left;
        while let Some(run) = self.slots.get_mut(self.first) {
            if left < run.iov_len {
                run.iov_base = run.iov_base.cast::<u8>().wrapping_add(left).cast();
                run.iov_len -= left;
                return;
            }
            left -= run.iov_len;
            self.first += 1;
        }
    }

    pub(crate) fn pending(&self) -> &[libc::iovec] {
        self.slots.get(self.first..).unwrap_or_default()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// A message header over the pending runs, for one call of `sendmsg` or `recvmsg`.
    fn header(&mut self) -> libc::msghdr {
        // SAFETY: all-zero is a valid `msghdr`: no name, no runs, no control data.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        let pending = self.slots.get_mut(self.first..).unwrap_or_default();
        header.msg_iov = pending.as_mut_ptr();
        header.msg_iovlen = pending.len() as _;
        header
    }
}

/// Runs to send, in order.
#[derive(Debug)]
pub struct SendBatch<'b, 'm> {
    pub(crate) queue: Queue<'b>,
    lives: PhantomData<&'m [u8]>,
}

/// Runs to receive into, in order.
#[derive(Debug)]
pub struct RecvBatch<'b, 'm> {
    pub(crate) queue: Queue<'b>,
    lives: PhantomData<&'m mut [u8]>,
}

/// Runs in the address space of another process, in order. They are numbers here, and checked by the kernel.
#[derive(Debug)]
pub struct RemoteBatch<'b> {
    pub(crate) queue: Queue<'b>,
}

impl<'m> SendBatch<'_, 'm> {
    /// Appends a run; `false` if the batch is full and the run was not taken.
    #[must_use = "a run that was not taken is not sent"]
    pub fn push(&mut self, run: SendRun<'m>) -> bool {
        self.queue.push(run.0)
    }

    /// Bytes not sent yet.
    pub fn bytes(&self) -> usize {
        self.queue.bytes()
    }

    /// Whether all is sent.
    pub fn is_empty(&self) -> bool {
        self.queue.bytes() == 0
    }

    /// Copies the batch's first bytes, as many as `into` has room for, and says how many. They stay in the batch.
    pub fn copy_out(&self, into: &mut [u8]) -> usize {
        let mut done = 0;
        for run in self.queue.pending() {
            let Some(room) = into.get_mut(done..).filter(|room| !room.is_empty()) else { break };
            let len = run.iov_len.min(room.len());
            // SAFETY: the run's memory is borrowed by this batch and readable for `iov_len` bytes; `room` is a live
            // slice, and by the rule of `Memory` no slice lies in registered memory, so the two do not overlap. Where
            // the run is of a slice, nothing else of it is borrowed mutably while the batch lives.
            unsafe { ptr::copy_nonoverlapping(run.iov_base.cast::<u8>(), room.as_mut_ptr(), len) };
            done += len;
        }
        done
    }

    /// Sends as much as the socket takes in one call, and takes it off the front. Never raises SIGPIPE.
    pub fn send(&mut self, socket: impl AsFd) -> Result<Io, HostError> {
        if self.is_empty() {
            return Ok(Io::Done(0));
        }
        let header = self.queue.header();
        let fd = socket.as_fd().as_raw_fd();
        let sent = retry("sending", || {
            // SAFETY: the header points at runs whose memory is borrowed by this batch for longer than the call.
            unsafe { libc::sendmsg(fd, &header, libc::MSG_NOSIGNAL) }
        })?;
        if let Io::Done(moved) = sent {
            self.queue.advance(moved);
        }
        Ok(sent)
    }
}

impl<'m> RecvBatch<'_, 'm> {
    /// Appends a run; `false` if the batch is full and the run was not taken.
    #[must_use = "a run that was not taken is not received into"]
    pub fn push(&mut self, run: RecvRun<'m>) -> bool {
        self.queue.push(run.0)
    }

    /// Bytes not received yet.
    pub fn bytes(&self) -> usize {
        self.queue.bytes()
    }

    /// Whether all has come.
    pub fn is_empty(&self) -> bool {
        self.queue.bytes() == 0
    }

    /// Places the first of `from`, as many bytes as the batch has room for, takes that room off the front, and says
    /// how many.
    pub fn copy_in(&mut self, from: &[u8]) -> usize {
        let mut done = 0;
        for run in self.queue.pending() {
            let Some(left) = from.get(done..).filter(|left| !left.is_empty()) else { break };
            let len = run.iov_len.min(left.len());
            // SAFETY: the run's memory is borrowed by this batch, exclusively where it is a slice, and writable for
            // `iov_len` bytes; so `from`, another live slice, does not overlap it.
            unsafe { ptr::copy_nonoverlapping(left.as_ptr(), run.iov_base.cast::<u8>(), len) };
            done += len;
        }
        self.queue.advance(done);
        done
    }

    /// Receives as much as is there in one call, and takes it off the front.
    pub fn recv(&mut self, socket: impl AsFd) -> Result<Io, HostError> {
        if self.is_empty() {
            return Ok(Io::Done(0));
        }
        let mut header = self.queue.header();
        let fd = socket.as_fd().as_raw_fd();
        let received = retry("receiving", || {
            // SAFETY: the header points at runs whose memory is borrowed by this batch for longer than the call.
            unsafe { libc::recvmsg(fd, &mut header, 0) }
        })?;
        match received {
            Io::Done(0) => return Ok(Io::Closed),
            Io::Done(moved) => self.queue.advance(moved),
            _ => {}
        }
        Ok(received)
    }
}

impl RemoteBatch<'_> {
    /// Appends `len` bytes at `addr`; `false` if the batch is full, or no process can have them.
    #[must_use = "a run that was not taken is not read"]
    pub fn push(&mut self, addr: u64, len: usize) -> bool {
        let Ok(base) = usize::try_from(addr) else { return false };
        if base.checked_add(len).is_none() {
            return false;
        }
        self.queue.push(libc::iovec { iov_base: std::ptr::without_provenance_mut(base), iov_len: len })
    }

    /// Bytes not read yet.
    pub fn bytes(&self) -> usize {
        self.queue.bytes()
    }
}

/// Calls until not interrupted. A blocking socket whose timeout ran out also gives [`Io::Blocked`], because the kernel
/// does not tell the two apart.
fn retry(what: &str, mut call: impl FnMut() -> isize) -> Result<Io, HostError> {
    let moved = retry_on_intr(|| {
        // Negative only after a failure, which the kernel has said more of.
        usize::try_from(call())
            .map_err(|_| Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO))
    });
    Io::of(what, moved)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advance_splits_a_run_and_drops_whole_ones() {
        let bytes = [0u8; 100];
        let mut buffer = RunBuffer::new(4);
        let mut batch = buffer.begin_send();
        assert!(batch.push(SendRun::from(&bytes[..10])));
        assert!(batch.push(SendRun::from(&bytes[10..10])), "an empty run takes no room");
        assert!(batch.push(SendRun::from(&bytes[10..100])));
        batch.queue.advance(15);
        assert_eq!(batch.bytes(), 85);
        let pending = batch.queue.pending();
        assert_eq!((pending.len(), pending[0].iov_len), (1, 85));
        assert_eq!(pending[0].iov_base as usize, bytes.as_ptr() as usize + 15);
        batch.queue.advance(1000);
        assert!(batch.is_empty() && batch.queue.pending().is_empty());
    }

    #[test]
    fn batches_copy_out_of_and_into_their_runs() {
        let (a, b): (Vec<u8>, Vec<u8>) = ((0..10).collect(), (10..30).collect());
        let mut buffer = RunBuffer::new(4);
        let mut batch = buffer.begin_send();
        assert!(batch.push(SendRun::from(&a[..])) && batch.push(SendRun::from(&b[..])));
        for room in [0, 5, 10, 17, 30, 40] {
            let mut into = vec![255; room];
            let copied = batch.copy_out(&mut into);
            assert_eq!((copied, batch.bytes()), (room.min(30), 30));
            assert!(into[..copied].iter().copied().eq(0..copied as u8));
            assert!(into[copied..].iter().all(|byte| *byte == 255));
        }

        let from: Vec<u8> = (0..40).collect();
        let (mut x, mut y) = ([0u8; 7], [0u8; 11]);
        let mut batch = buffer.begin_recv();
        assert!(batch.push(RecvRun::from(&mut x[..])) && batch.push(RecvRun::from(&mut y[..])));
        assert_eq!((batch.copy_in(&[]), batch.copy_in(&from[..3]), batch.bytes()), (0, 3, 15));
        assert_eq!((batch.copy_in(&from[3..9]), batch.copy_in(&from[9..]), batch.copy_in(&from)), (6, 9, 0));
        assert!(batch.is_empty());
        assert!(x.iter().chain(&y).copied().eq(0..18));
    }

    #[test]
    fn a_full_batch_takes_no_more_and_never_allocates() {
        let bytes = [0u8; 1];
        let mut buffer = RunBuffer::new(2);
        let room = buffer.slots.capacity();
        for _ in 0..3 {
            let mut batch = buffer.begin_send();
            assert!(batch.push(SendRun::from(&bytes[..])) && batch.push(SendRun::from(&bytes[..])));
            assert!(!batch.push(SendRun::from(&bytes[..])));
            assert_eq!(batch.bytes(), 2);
        }
        assert_eq!(buffer.slots.capacity(), room);
    }

    #[test]
    fn remote_runs_beyond_the_address_space_are_refused() {
        let mut buffer = RunBuffer::new(2);
        let mut batch = buffer.begin_remote();
        assert!(!batch.push(u64::MAX, 2));
        assert!(batch.push(4096, 2));
        assert_eq!(batch.bytes(), 2);
    }
}
