//! Copies that are in flight, and how to know that they have ended.

use super::abi::{self, Addr, Code, Handle};
use super::device::{Current, Event, InUse, Inner};
use super::piece::{Direction, Piece};
use super::rows::Rows;
use super::small::{Call, Small, Way};
use super::{CudaError, Device, GpuMemory, Kind, Pinned};
use crate::device::CallerStream;
use crate::error::HostError;
use crate::event::{EventFd, Interest, wait_ready};
use std::ffi::c_void;
use std::fmt;
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often a wait looks by itself whether its mark is done or lost: nothing but a guard, the driver tells.
const LOOK: Duration = Duration::from_millis(50);

/// How long a wait asks the driver again and again before it asks to be told. What threads wait for is mostly a copy of some
/// hundred KiB, which takes less than it takes a thread of the driver's to say so: compared copies of 16 KiB pages within an
/// H200 ran at 3.3 GB/s so, at 2.6 without it, and no faster with four times as long.
const SOON: Duration = Duration::from_micros(100);

/// Copies that one thread of kvik has in flight on one device, in order. It waits for no other stream.
pub struct Stream {
    device: Device,
    stream: Handle,
    /// What copies since the last mark use, each once.
    held: Vec<InUse>,
    /// Pieces that are no rows, and how they go.
    small: Small,
    /// For waits of this stream's own, made at the first.
    flag: Option<Arc<EventFd>>,
}

// SAFETY: the driver's functions on a stream may be called by any thread.
unsafe impl Send for Stream {}

/// A place in a stream: done when all copies before it are.
///
/// It holds what those copies use, and lets go of it when it is seen to be done.
pub struct Mark {
    device: Device,
    event: Event,
    held: Vec<InUse>,
    done: bool,
    /// The stream tells when it gets here.
    asked: bool,
}

impl Stream {
    /// A stream on a device.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(device: &Device) -> Result<Stream, HostError> {
        let current = device.0.enter()?;
        let mut stream = ptr::null_mut();
        // SAFETY: the device's context is current; written if it returns 0, and destroyed once.
        let code = unsafe { (device.cuda().table().stream_create)(&mut stream, abi::STREAM_NON_BLOCKING) };
        device.0.check(code, || "making a stream".into())?;
        drop(current);
        device.settle();
        Ok(Stream { device: device.clone(), stream, held: Vec::new(), small: Small::default(), flag: None })
    }

    /// Its device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The driver's handle, until this is dropped.
    pub fn handle(&self) -> usize {
        self.stream as usize
    }

    /// What copies pieces that lie at no equal distances: for measurements, which compare. Without it, what is faster.
    pub fn copy_by(&mut self, way: Way) {
        self.small.way = way;
    }

    /// Enqueues copies of pieces (offset and bytes) of a device's memory, one behind the other into the host's from
    /// `at` on. All of them, or none if one is out of bounds. The bytes count when a mark behind them is done.
    ///
    /// # Errors
    /// Out of bounds, or the driver's; then some may be in flight, which the next mark is behind.
    pub fn gather(
        &mut self,
        into: &Arc<Pinned>,
        at: usize,
        memory: &Arc<GpuMemory>,
        pieces: &[(usize, usize)],
    ) -> Result<(), HostError> {
        let total = self.check(memory, pieces)?;
        let place = into.at(at, total)?;
        self.hold_both(memory, into);
        self.enqueue(memory, pieces, place, Direction::ToHost)
    }

    /// Enqueues copies of what lies in the host's memory from `at` on into pieces (offset and bytes) of a device's.
    /// All of them, or none if one is out of bounds. The pieces do not overlap: they are copied in no order. Neither side
    /// may be touched until a mark behind them is done.
    ///
    /// # Errors
    /// As for [`Stream::gather`], or a peer's memory.
    pub fn scatter(
        &mut self,
        memory: &Arc<GpuMemory>,
        pieces: &[(usize, usize)],
        from: &Arc<Pinned>,
        at: usize,
    ) -> Result<(), HostError> {
        memory.writable_at(0, 0)?;
        let total = self.check(memory, pieces)?;
        let place = from.at(at, total)?;
        self.hold_both(memory, from);
        self.enqueue(memory, pieces, place, Direction::ToDevice)
    }

    /// Checks the pieces of a copy; how many bytes they are.
    fn check(&self, memory: &GpuMemory, pieces: &[(usize, usize)]) -> Result<usize, HostError> {
        if !memory.device().is(&self.device) {
            let (there, here) = (memory.device().ordinal(), self.device.ordinal());
            let text = format!("the memory lies on device {there}, and the stream is one of device {here}");
            return Err(CudaError::own("enqueueing a copy", text).into());
        }
        let mut total = 0usize;
        for (offset, len) in pieces {
            memory.check(*offset, *len)?;
            total = total.saturating_add(*len);
        }
        Ok(total)
    }

    /// Hands the driver one copy for each run of pieces that lie at equal distances; the rest goes by the kernel or in batches.
    fn enqueue(
        &mut self,
        memory: &GpuMemory,
        pieces: &[(usize, usize)],
        place: *mut c_void,
        direction: Direction,
    ) -> Result<(), HostError> {
        let device = &self.device.0;
        let current = &device.enter()?;
        let (stream, reached) = (self.stream, is_reached(memory));
        let call = Call { device: &self.device, current, direction, stream, reached };
        let (mut left, mut packed) = (pieces, 0);
        let mut code = abi::SUCCESS;
        while let Some((rows, rest)) = Rows::first(left, memory.addr() as Addr, packed, device.pitch) {
            packed += rows.len * rows.count;
            left = rest;
            // SAFETY: all pieces lie in memory that was checked, and is held until the copies have ended; the host's
            // is page-locked.
            code = unsafe {
                if rows.count > 1 {
                    rows.enqueue(device.cuda.table(), place, direction, self.stream)
                } else {
                    let host = rows.place(place) as Addr;
                    let (to, from) =
                        if direction == Direction::ToHost { (host, rows.at) } else { (rows.at, host) };
                    self.small.push(Piece::new(to, from, rows.len), &call, &mut self.held)
                }
            };
            if code != abi::SUCCESS {
                break;
            }
        }
        // SAFETY: as above. After a failure too, so that nothing is left; the first failure is what is told.
        let last = unsafe { self.small.flush(&call, &mut self.held) };
        code = if code == abi::SUCCESS { last } else { code };
        device.check(code, || {
            let (count, at) = (pieces.len(), memory.addr());
            let direction = if direction == Direction::ToHost { "from" } else { "to" };
            format!("enqueueing copies of {count} pieces {direction} the memory at {at:#x}")
        })?;
        Ok(())
    }

    /// Enqueues copies of pieces between two memories of devices, of this one, of two, or of a peer's: where to, where
    /// from, and bytes. All of them, or none if one is out of bounds. Those that are written do not overlap: they are
    /// copied in no order.
    ///
    /// # Errors
    /// As for [`Stream::gather`], or a peer's memory to write to.
    pub fn between(
        &mut self,
        into: &Arc<GpuMemory>,
        from: &Arc<GpuMemory>,
        pieces: &[(usize, usize, usize)],
    ) -> Result<(), HostError> {
        for (at, offset, len) in pieces {
            into.writable_at(*at, *len)?;
            from.check(*offset, *len)?;
        }
        self.hold(into.clone());
        self.hold(from.clone());
        let device = &self.device.0;
        let current = &device.enter()?;
        let (there, here) = (&into.device.0, &from.device.0);
        let within = there.context == here.context;
        let (stream, direction) = (self.stream, Direction::Within);
        // A kernel of one device reaches no other.
        let reached = there.context == device.context && is_reached(into) && is_reached(from);
        let call = Call { device: &self.device, current, direction, stream, reached };
        let mut code = abi::SUCCESS;
        for (at, offset, len) in pieces.iter().filter(|(.., len)| *len > 0) {
            let (to, source) = (into.writable_at(*at, *len)?, from.at(*offset, *len)?);
            // SAFETY: both ranges lie in memory that is held until the copy has ended, of these contexts.
            code = unsafe {
                if !within {
                    let across = device.cuda.table().across_async;
                    across(to, there.context, source, here.context, *len, self.stream)
                } else {
                    self.small.push(Piece::new(to, source, *len), &call, &mut self.held)
                }
            };
            if code != abi::SUCCESS {
                break;
            }
        }
        // SAFETY: as above.
        let last = unsafe { self.small.flush(&call, &mut self.held) };
        code = if code == abi::SUCCESS { last } else { code };
        device.check(code, || {
            let (count, from, to) = (pieces.len(), from.addr(), into.addr());
            format!("enqueueing copies of {count} pieces from the memory at {from:#x} to that at {to:#x}")
        })?;
        Ok(())
    }

    /// Marks this place.
    ///
    /// # Errors
    /// The driver's; what copies use stays held.
    pub fn mark(&mut self) -> Result<Mark, HostError> {
        self.device.settle();
        let device = self.device.0.clone();
        let event =
            device.enter().and_then(|current| self.record(&device, &current)).inspect_err(|error| {
                if is_over(error) {
                    self.held.clear();
                }
            })?;
        let held = std::mem::take(&mut self.held);
        Ok(Mark { device: self.device.clone(), event, held, done: false, asked: false })
    }

    fn record(&self, device: &Inner, current: &Current<'_>) -> Result<Event, HostError> {
        let event = device.event(current)?;
        // SAFETY: an event and a stream of the current context.
        let code = unsafe { (device.cuda.table().event_record)(event.0, self.stream) };
        if let Err(error) = device.check(code, || "marking a place in a stream".into()) {
            device.give_back(event);
            return Err(error.into());
        }
        Ok(event)
    }

    /// Raises the flag when the stream gets here, or fails before: enqueued behind a mark, it tells that the mark has
    /// something to say. A thread of the driver does it; nobody waits.
    ///
    /// # Errors
    /// The driver's.
    pub fn tell(&mut self, flag: &Arc<EventFd>) -> Result<(), HostError> {
        let device = &self.device.0;
        let _current = device.enter()?;
        let given = Arc::into_raw(flag.clone()).cast_mut().cast::<c_void>();
        // SAFETY: the driver calls `raise` once if this returns 0, and never if not; the flag is given to it.
        let code = unsafe { (device.cuda.table().stream_callback)(self.stream, raise, given, 0) };
        if code != abi::SUCCESS {
            // SAFETY: given to nobody.
            drop(unsafe { Arc::from_raw(given.cast::<EventFd>()) });
        }
        device.check(code, || "asking a stream to tell".into())?;
        Ok(())
    }

    /// What is enqueued from here on comes behind all that the legacy default stream has been given so far (which
    /// waits for all blocking streams in turn): PyTorch's stream, unless the caller has chosen another one.
    ///
    /// # Errors
    /// The driver's.
    pub fn after_default(&mut self) -> Result<(), HostError> {
        // SAFETY: the null stream is always there.
        unsafe { self.after_stream(0) }
    }

    /// What is enqueued from here on comes behind all that this stream has been given so far: a `CUstream` of the
    /// caller's (`torch.cuda.current_stream().cuda_stream`).
    ///
    /// # Errors
    /// The driver's: the stream may be another device's.
    ///
    /// # Safety
    /// It is a stream that is not destroyed.
    pub unsafe fn after_stream(&mut self, stream: usize) -> Result<(), HostError> {
        // SAFETY: the caller's promise.
        self.mark_of(unsafe { CallerStream::new(stream) }).map(|_| ())
    }

    /// Marks the place that this stream of the caller's is at, which what is enqueued here from now on comes behind.
    ///
    /// # Errors
    /// The driver's: the stream may be another device's.
    pub fn mark_of(&mut self, stream: CallerStream) -> Result<Mark, HostError> {
        let device = &self.device.0;
        let current = device.enter()?;
        let event = device.event(&current)?;
        let (table, handle) = (device.cuda.table(), stream.handle());
        // SAFETY: an event of the current context, and by the promise of `CallerStream` a stream. What waits for an event
        // waits for what it was recorded for, whatever becomes of it later.
        let code = unsafe {
            match (table.event_record)(event.0, handle as Handle) {
                abi::SUCCESS => (table.stream_wait_event)(self.stream, event.0, 0),
                code => code,
            }
        };
        let mark = Mark { device: self.device.clone(), event, held: Vec::new(), done: false, asked: true };
        device.check(code, || format!("waiting for the stream {handle:#x}"))?;
        Ok(mark)
    }

    fn hold_both(&mut self, memory: &Arc<GpuMemory>, pinned: &Arc<Pinned>) {
        self.hold(memory.clone());
        self.hold(pinned.clone());
    }

    /// Keeps what a copy uses, once.
    fn hold(&mut self, used: InUse) {
        // The last one first: most copies use what the one before does.
        if !self.held.iter().rev().any(|held| Arc::ptr_eq(held, &used)) {
            self.held.push(used);
        }
    }
}

/// What the driver calls: raises the flag that it was given.
unsafe extern "C" fn raise(_: Handle, _: Code, given: *mut c_void) {
    // SAFETY: from `tell`, for this one call.
    let flag = unsafe { Arc::from_raw(given.cast_const().cast::<EventFd>()) };
    // It can only fail for a descriptor that is none, and nobody is there to be told.
    let _ = flag.signal();
}

/// Whether a kernel of its device reads and writes the memory where it is: what is managed would move.
fn is_reached(memory: &GpuMemory) -> bool {
    memory.place().kind == Kind::Device
}

/// Whether nothing of kvik's is in flight after this error: all is lost, or it is the parent's affair.
fn is_over(error: &HostError) -> bool {
    match error {
        HostError::Cuda(error) => error.is_lost(),
        HostError::Forked { .. } => true,
        _ => false,
    }
}

/// Lets go of what copies use, unless they may be in flight: there is no telling when they end, so it stays for ever.
fn forget_unless_over(held: Vec<InUse>, error: &HostError) {
    if !is_over(error) && !held.is_empty() {
        log::error!("memory of a GPU's copies stays held, since their end cannot be known: {error}");
        std::mem::forget(held);
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let device = self.device.0.clone();
        let held = std::mem::take(&mut self.held);
        self.small.end(&self.device);
        let current = match device.enter() {
            Ok(current) => current,
            Err(error) => return forget_unless_over(held, &error),
        };
        if !held.is_empty() {
            match self.record(&device, &current) {
                Ok(event) => device.leave(event, held),
                Err(error) => forget_unless_over(held, &error),
            }
        }
        // SAFETY: a stream of this context; the driver ends it when what is in it has ended.
        unsafe { (device.cuda.table().stream_destroy)(self.stream) };
    }
}

impl Mark {
    /// Whether all before it has ended. Asks the driver, and does not wait.
    ///
    /// # Errors
    /// The device's context is lost ([`CudaError::is_lost`]): nothing before the mark counts, and nothing of it is
    /// in flight any more. After any other error it may be, and what it uses stays held.
    pub fn is_done(&mut self) -> Result<bool, HostError> {
        if self.done {
            return Ok(true);
        }
        let asked = self.device.0.enter().and_then(|_current| Ok(self.device.0.has_ended(self.event)?));
        match &asked {
            Ok(done) => self.done = *done,
            Err(error) if is_over(error) => self.held.clear(),
            Err(_) => {}
        }
        if self.done {
            self.held.clear();
        }
        asked
    }

    /// Waits until it is done, at most so long. `stream` is the one that it is a place of; what was enqueued there
    /// after it may have to end as well.
    ///
    /// # Errors
    /// [`HostError::TimedOut`]: it is still in flight. As for [`Mark::is_done`].
    pub fn wait(&mut self, stream: &mut Stream, timeout: Duration) -> Result<(), HostError> {
        if self.is_done()? {
            return Ok(());
        }
        let begun = Instant::now();
        while begun.elapsed() < timeout.min(SOON) {
            std::hint::spin_loop();
            if self.is_done()? {
                return Ok(());
            }
        }
        let flag = match &stream.flag {
            Some(flag) => flag.clone(),
            None => stream.flag.insert(Arc::new(EventFd::new()?)).clone(),
        };
        // Once, however often it is waited for: a stream that gets nowhere has little room.
        if !self.asked {
            stream.tell(&flag)?;
            self.asked = true;
        }
        // What it has told before this is what is looked at next.
        flag.drain()?;
        if self.is_done()? {
            return Ok(());
        }
        loop {
            let left = timeout.saturating_sub(begun.elapsed());
            wait_ready(&*flag, Interest::READ, left.min(LOOK))?;
            if self.is_done()? {
                return Ok(());
            }
            if left.is_zero() {
                let what = format!("copies of device {} that are in flight", self.device.ordinal());
                return Err(HostError::TimedOut { what, after: timeout });
            }
            flag.drain()?;
        }
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        match self.is_done() {
            Ok(true) => self.device.0.give_back(self.event),
            Err(error) if is_over(&error) => {}
            // Still in flight, or not known to have ended: the device lets go of it.
            _ => self.device.0.leave(self.event, std::mem::take(&mut self.held)),
        }
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream(device {}, {:?})", self.device.ordinal(), self.stream)
    }
}

impl fmt::Debug for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mark(device {}, done: {})", self.device.ordinal(), self.done)
    }
}
