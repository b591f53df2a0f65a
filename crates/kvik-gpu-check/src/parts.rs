//! The parts that are checked, one function each.

use crate::pattern::{bytes, compare, shuffled};
use crate::{by_kernel, peer};
use kvik_host::HostError;
use kvik_host::cuda::{Cuda, Device, GpuMemory, Kind, Pinned, Stream};
use kvik_host::device::{CallerStream, Device as _};
use kvik_host::event::{Epoll, EventFd, Events, Interest, wait_ready};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

/// What came of a part.
pub enum Outcome {
    /// As it should be, and what else is to be said.
    Good(String),
    /// It is not to be had here, and why; kvik goes other ways then.
    Not(String),
    /// Not as it should be.
    Wrong(String),
}

type Part = fn(&Device) -> Outcome;

/// All parts, in the order in which one needs what the other shows.
pub const PARTS: [(&str, Part); 13] = [
    ("addresses are told apart", |device| outcome(addresses(device))),
    ("blocking copies", |device| outcome(blocking(device))),
    ("scattered pages to the host and back", |device| outcome(scattered(device))),
    ("rows at equal distances", |device| outcome(rows(device))),
    ("copies within the device", |device| outcome(within(device))),
    ("pieces by the kernel, to the host and back", by_kernel::host),
    ("pieces by the kernel, within the device", by_kernel::within),
    ("copies to another device", across),
    ("a descriptor tells of the end", |device| outcome(told(device))),
    ("copies behind the default stream", |device| outcome(behind(device))),
    ("a mark in another stream", |device| outcome(ordered(device))),
    ("another process reads it", exported),
    ("dma-bufs, and writes of NICs", dmabuf),
];

/// Bytes of the memory that most parts use, at an odd place of an allocation.
const LEN: usize = 3 << 20;
const PAGE: usize = 16 << 10;
/// No copy of this size takes so long, on any machine.
pub const LIMIT: Duration = Duration::from_secs(30);

/// An error as a text: kvik's own, or a word of ours.
pub type Checked<T = ()> = Result<T, String>;

pub fn outcome(checked: Checked) -> Outcome {
    match checked {
        Ok(()) => Outcome::Good(String::new()),
        Err(why) => Outcome::Wrong(why),
    }
}

pub fn text(error: HostError) -> String {
    error.to_string()
}

pub fn memory(device: &Device, len: usize) -> Checked<Arc<GpuMemory>> {
    GpuMemory::alloc(device, len).map(Arc::new).map_err(text)
}

pub fn pinned(device: &Device, len: usize) -> Checked<Arc<Pinned>> {
    Pinned::new(device, len).map(Arc::new).map_err(text)
}

/// Waits until all that was enqueued is done.
pub fn finish(stream: &mut Stream) -> Checked {
    let mut mark = stream.mark().map_err(text)?;
    mark.wait(stream, LIMIT).map_err(text)
}

pub fn is(pinned: &Pinned, at: usize, want: &[u8]) -> Checked {
    let mut have = vec![0; want.len()];
    pinned.memory().copy_out(at, &mut have).map_err(text)?;
    compare(&have, want)
}

pub fn ensure(is: bool, what: &str) -> Checked {
    if is { Ok(()) } else { Err(what.into()) }
}

fn addresses(device: &Device) -> Checked {
    let (memory, staging, heap) = (memory(device, LEN)?, pinned(device, PAGE)?, vec![0u8; PAGE]);
    let place =
        Cuda::locate(memory.addr() + LEN - 1).map_err(text)?.ok_or("a device's memory is not known")?;
    let fits = place.base <= memory.addr() && place.base + place.len >= memory.addr() + LEN;
    ensure(place.kind == Kind::Device && place.device == device.ordinal() && fits, &format!("{place:?}"))?;
    let place = Cuda::locate(staging.memory().addr()).map_err(text)?.ok_or("locked memory is not known")?;
    ensure(place.kind == Kind::Pinned, &format!("{place:?}"))?;
    let place = Cuda::locate(heap.as_ptr() as usize).map_err(text)?;
    ensure(place.is_none(), &format!("ordinary memory is {place:?}"))
}

fn blocking(device: &Device) -> Checked {
    let (memory, want) = (memory(device, LEN)?, bytes(1, 0, LEN - 77));
    memory.copy_in(77, &want).map_err(text)?;
    let mut have = vec![0; want.len()];
    memory.copy_out(77, &mut have).map_err(text)?;
    compare(&have, &want)
}

/// Every page there is, in an order that is drawn; then back into the pages of other numbers.
fn scattered(device: &Device) -> Checked {
    let (memory, staging) = (memory(device, LEN)?, pinned(device, LEN)?);
    let want = bytes(2, 0, LEN);
    memory.copy_in(0, &want).map_err(text)?;
    let order = shuffled(2, LEN / PAGE);
    let pieces: Vec<(usize, usize)> = order.iter().map(|page| (page * PAGE, PAGE)).collect();
    let mut stream = Stream::new(device).map_err(text)?;
    stream.gather(&staging, 0, &memory, &pieces).map_err(text)?;
    finish(&mut stream)?;
    for (at, page) in order.iter().enumerate() {
        is(&staging, at * PAGE, &want[page * PAGE..(page + 1) * PAGE])?;
    }
    let back: Vec<(usize, usize)> = pieces.iter().rev().copied().collect();
    stream.scatter(&memory, &back, &staging, 0).map_err(text)?;
    finish(&mut stream)?;
    let mut have = vec![0; LEN];
    memory.copy_out(0, &mut have).map_err(text)?;
    for (from, to) in order.iter().zip(order.iter().rev()) {
        compare(&have[to * PAGE..(to + 1) * PAGE], &want[from * PAGE..(from + 1) * PAGE])?;
    }
    Ok(())
}

/// Pieces that the driver copies by rows, and what lies between them.
fn rows(device: &Device) -> Checked {
    let (memory, staging) = (memory(device, LEN)?, pinned(device, LEN)?);
    let (before, fresh) = (bytes(3, 0, LEN), bytes(4, 0, LEN));
    memory.copy_in(0, &before).map_err(text)?;
    let (len, stride) = (PAGE - 100, 3 * PAGE + 20);
    let pieces: Vec<(usize, usize)> = (0..LEN / stride).map(|row| (row * stride + 12, len)).collect();
    let mut stream = Stream::new(device).map_err(text)?;
    stream.gather(&staging, 8, &memory, &pieces).map_err(text)?;
    finish(&mut stream)?;
    for (row, (offset, _)) in pieces.iter().enumerate() {
        is(&staging, 8 + row * len, &before[*offset..offset + len])?;
    }
    staging.memory().copy_in(0, &fresh).map_err(text)?;
    stream.scatter(&memory, &pieces, &staging, 8).map_err(text)?;
    finish(&mut stream)?;
    let mut want = before;
    for (row, (offset, _)) in pieces.iter().enumerate() {
        want[*offset..offset + len].copy_from_slice(&fresh[8 + row * len..8 + (row + 1) * len]);
    }
    let mut have = vec![0; LEN];
    memory.copy_out(0, &mut have).map_err(text)?;
    compare(&have, &want)
}

fn within(device: &Device) -> Checked {
    moved(&memory(device, LEN)?, &memory(device, LEN)?)
}

fn across(device: &Device) -> Outcome {
    let (cuda, own) = (device.cuda(), device.ordinal());
    let Some(other) = (0..cuda.devices()).find(|ordinal| *ordinal != own) else {
        return Outcome::Not("there is no other one".into());
    };
    let both = || {
        let there = cuda.device(other).map_err(text)?;
        moved(&memory(&there, LEN)?, &memory(device, LEN)?)
    };
    outcome(both())
}

/// Copies all of one memory but an edge into another, where the rest stays.
fn moved(into: &Arc<GpuMemory>, from: &Arc<GpuMemory>) -> Checked {
    let (want, rest) = (bytes(5, 0, LEN), bytes(6, 0, LEN));
    from.copy_in(0, &want).map_err(text)?;
    into.copy_in(0, &rest).map_err(text)?;
    let mut stream = Stream::new(from.device()).map_err(text)?;
    stream.between(into, from, &[(500, 1000, LEN - 2000)]).map_err(text)?;
    finish(&mut stream)?;
    let mut have = vec![0; LEN];
    into.copy_out(0, &mut have).map_err(text)?;
    compare(&have[500..LEN - 1500], &want[1000..LEN - 1000])?;
    compare(&have[..500], &rest[..500])?;
    compare(&have[LEN - 1500..], &rest[LEN - 1500..])
}

fn told(device: &Device) -> Checked {
    let (memory, staging, want) = (memory(device, LEN)?, pinned(device, LEN)?, bytes(7, 0, LEN));
    memory.copy_in(0, &want).map_err(text)?;
    let (epoll, flag) = (Epoll::new().map_err(text)?, Arc::new(EventFd::new().map_err(text)?));
    let mut events = Events::new(1);
    epoll.add(&*flag, 1, Interest::READ).map_err(text)?;
    let mut stream = Stream::new(device).map_err(text)?;
    stream.gather(&staging, 0, &memory, &[(0, LEN)]).map_err(text)?;
    let mut mark = stream.mark().map_err(text)?;
    stream.tell(&flag).map_err(text)?;
    epoll.wait(&mut events, LIMIT).map_err(text)?;
    ensure(!events.is_empty(), "the descriptor says nothing")?;
    ensure(mark.is_done().map_err(text)?, "the descriptor tells before the mark is done")?;
    is(&staging, 0, &want)
}

fn behind(device: &Device) -> Checked {
    let (memory, staging) = (memory(device, LEN)?, pinned(device, LEN)?);
    let mut stream = Stream::new(device).map_err(text)?;
    for round in 0..8 {
        let want = bytes(8 + round, 0, LEN);
        memory.copy_in(0, &want).map_err(text)?;
        stream.after_default().map_err(text)?;
        stream.gather(&staging, 0, &memory, &[(0, LEN)]).map_err(text)?;
        finish(&mut stream)?;
        is(&staging, 0, &want)?;
    }
    Ok(())
}

/// What waits for a stream of a program's sees all that this was given before, and hears of it.
fn ordered(device: &Device) -> Checked {
    let (first, second, staging) = (memory(device, LEN)?, memory(device, LEN)?, pinned(device, LEN)?);
    let flag = Arc::new(EventFd::new().map_err(text)?);
    let mut own = device.stream(1).map_err(text)?;
    let mut program = Stream::new(device).map_err(text)?;
    for round in 0..2 {
        let want = bytes(30 + round, 0, LEN);
        first.copy_in(0, &want).map_err(text)?;
        for _ in 0..40 {
            program.between(&second, &first, &[(0, 0, LEN)]).map_err(text)?;
            program.between(&first, &second, &[(0, 0, LEN)]).map_err(text)?;
        }
        program.gather(&staging, 0, &second, &[(0, LEN)]).map_err(text)?;
        let mut last = program.mark().map_err(text)?;
        // SAFETY: a stream that is there for longer than the call.
        let callers = unsafe { CallerStream::new(program.handle()) };
        let mut mark = own.mark_of(callers, &flag).map_err(text)?;
        let heard = wait_ready(&*flag, Interest::READ, LIMIT).map_err(text)?;
        ensure(heard, "the mark is never told of")?;
        flag.drain().map_err(text)?;
        ensure(mark.is_reached().map_err(text)?, "what tells of the mark comes before it is reached")?;
        ensure(last.is_done().map_err(text)?, "the mark is reached before the stream is")?;
        is(&staging, 0, &want)?;
    }
    Ok(())
}

fn exported(device: &Device) -> Outcome {
    let memory = match memory(device, LEN) {
        Ok(memory) => memory,
        Err(why) => return Outcome::Wrong(why),
    };
    if let Err(why) = memory.copy_in(0, &bytes(peer::SEED, 0, LEN)) {
        return Outcome::Wrong(why.to_string());
    }
    match memory.export() {
        Ok(handle) => outcome(peer::start(&handle)),
        Err(why) => Outcome::Not(why.to_string()),
    }
}

fn dmabuf(device: &Device) -> Outcome {
    let checked = || -> Checked<Outcome> {
        let memory = memory(device, LEN)?;
        let flushed = match memory.flush_writes() {
            Ok(()) => "writes of NICs are seen in order".to_string(),
            Err(why) => why.to_string(),
        };
        if !device.has_dmabuf() {
            let why = memory.dmabuf().err().map(text).ok_or("exported though the device says it cannot")?;
            return Ok(Outcome::Not(format!("{why}; {flushed}")));
        }
        let dmabuf = match memory.dmabuf() {
            Ok(dmabuf) => dmabuf,
            Err(why) => return Ok(Outcome::Not(format!("{why}; {flushed}"))),
        };
        let size =
            rustix::fs::seek(dmabuf.fd.as_fd(), rustix::fs::SeekFrom::End(0)).map_err(|e| e.to_string())?;
        ensure(size >= dmabuf.offset + LEN as u64, &format!("it has {size} bytes at {}", dmabuf.offset))?;
        let ordered = if dmabuf.ordered { "blocking copies finish first" } else { "copies are not ordered" };
        Ok(Outcome::Good(format!("exported, {ordered}; {flushed}")))
    };
    checked().unwrap_or_else(Outcome::Wrong)
}
