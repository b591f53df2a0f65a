//! Waiting: an epoll set, an eventfd to end a wait from another thread, and a bounded wait for one descriptor.
//!
//! Idle threads sleep in [`Epoll::wait`] and nothing spins. A descriptor must be deleted from the set before it is
//! closed; a forked child that still holds it would otherwise keep its events coming.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, eventfd, poll};
use rustix::io::{Errno, retry_on_intr};

use crate::error::HostError;

/// What to wait for on a descriptor; it is told of again until it is dealt with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Interest {
    /// Bytes, connections, or an end to read.
    pub readable: bool,
    /// Room to write.
    pub writable: bool,
}

impl Interest {
    /// Reading.
    pub const READ: Interest = Interest { readable: true, writable: false };
    /// Writing.
    pub const WRITE: Interest = Interest { readable: false, writable: true };
    /// Both.
    pub const BOTH: Interest = Interest { readable: true, writable: true };

    fn flags(self) -> epoll::EventFlags {
        let mut flags = epoll::EventFlags::empty();
        // The end of the other side's sending is asked for with reading only: somebody who does not read would be
        // woken by it again and again.
        flags.set(epoll::EventFlags::IN | epoll::EventFlags::RDHUP, self.readable);
        flags.set(epoll::EventFlags::OUT, self.writable);
        flags
    }
}

/// What happened on a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// The number it was added with.
    pub token: u64,
    /// Reading will not block (it may give the end or an error).
    pub readable: bool,
    /// Writing will not block (it may give an error).
    pub writable: bool,
    /// The connection is broken, or the other end has closed it or its writing half.
    pub closed: bool,
}

/// A set of descriptors to wait for.
#[derive(Debug)]
pub struct Epoll {
    fd: OwnedFd,
}

/// Room for the events of one wait, allocated once.
pub struct Events {
    raw: Vec<epoll::Event>,
}

impl Events {
    /// Room for `capacity` events, at least one.
    pub fn new(capacity: usize) -> Events {
        Events { raw: Vec::with_capacity(capacity.max(1)) }
    }

    /// The events of the last wait.
    pub fn iter(&self) -> impl Iterator<Item = Event> + '_ {
        use epoll::EventFlags as F;
        self.raw.iter().map(|event| {
            let flags = event.flags;
            Event {
                token: event.data.u64(),
                readable: flags.intersects(F::IN | F::RDHUP | F::HUP | F::ERR),
                writable: flags.intersects(F::OUT | F::HUP | F::ERR),
                closed: flags.intersects(F::RDHUP | F::HUP | F::ERR),
            }
        })
    }

    /// How many events the last wait gave.
    pub fn len(&self) -> usize {
        self.raw.len()
    }

    /// Whether the last wait gave none.
    pub fn is_empty(&self) -> bool {
        self.raw.is_empty()
    }
}

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl Epoll {
    /// An empty set.
    pub fn new() -> Result<Epoll, HostError> {
        let fd = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(|e| HostError::os("creating an epoll set (too many open files? raise ulimit -n)", e))?;
        Ok(Epoll { fd })
    }

    /// Adds a descriptor; its events carry `token`.
    pub fn add(&self, fd: impl AsFd, token: u64, interest: Interest) -> Result<(), HostError> {
        epoll::add(&self.fd, fd, epoll::EventData::new_u64(token), interest.flags())
            .map_err(|e| HostError::os("adding a descriptor to an epoll set", e))
    }

    /// Changes what is waited for.
    pub fn modify(&self, fd: impl AsFd, token: u64, interest: Interest) -> Result<(), HostError> {
        epoll::modify(&self.fd, fd, epoll::EventData::new_u64(token), interest.flags())
            .map_err(|e| HostError::os("changing a descriptor of an epoll set", e))
    }

    /// Takes a descriptor out, before it is closed.
    pub fn delete(&self, fd: impl AsFd) -> Result<(), HostError> {
        epoll::delete(&self.fd, fd).map_err(|e| HostError::os("taking a descriptor out of an epoll set", e))
    }

    /// Waits at most `timeout` and fills `events`, with none if the time ran out or a signal came.
    pub fn wait(&self, events: &mut Events, timeout: Duration) -> Result<(), HostError> {
        events.raw.clear();
        // The kernel is asked in milliseconds. Rounding up keeps a wait for a deadline from ending just before it
        // and being asked for again, over and over.
        let timeout = milliseconds(timeout);
        match epoll::wait(&self.fd, spare_capacity(&mut events.raw), Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(e) => Err(HostError::os("waiting on an epoll set", e)),
        }
    }
}

/// Waits until `fd` is ready for one of `interest`, broken, or closed by the other end; `false` if `timeout` ran
/// out. For the few places that have a thread to spare for one descriptor.
pub fn wait_ready(fd: impl AsFd, interest: Interest, timeout: Duration) -> Result<bool, HostError> {
    let mut flags = PollFlags::empty();
    flags.set(PollFlags::IN, interest.readable);
    flags.set(PollFlags::OUT, interest.writable);
    let begun = Instant::now();
    loop {
        let left = milliseconds(timeout.saturating_sub(begun.elapsed()));
        match poll(&mut [PollFd::new(&fd, flags)], Some(&left)) {
            Ok(ready) => return Ok(ready > 0),
            Err(Errno::INTR) => continue,
            Err(e) => return Err(HostError::os("waiting for a descriptor", e)),
        }
    }
}

/// Rounded up to a millisecond, and at most about 24 days, the kernel's own limit.
fn milliseconds(timeout: Duration) -> Timespec {
    let millis = timeout.as_nanos().div_ceil(1_000_000).min(i32::MAX as u128) as i64;
    Timespec { tv_sec: millis / 1000, tv_nsec: (millis % 1000) * 1_000_000 }
}

impl AsFd for Epoll {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A flag that a waiting thread can be woken by.
#[derive(Debug)]
pub struct EventFd {
    fd: OwnedFd,
}

impl EventFd {
    /// A flag that is down.
    pub fn new() -> Result<EventFd, HostError> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| HostError::os("creating an eventfd (too many open files? raise ulimit -n)", e))?;
        Ok(EventFd { fd })
    }

    /// Raises the flag: its descriptor becomes readable. Never blocks.
    pub fn signal(&self) -> Result<(), HostError> {
        match retry_on_intr(|| rustix::io::write(&self.fd, &1u64.to_ne_bytes())) {
            // A counter that is full is a flag that is up.
            Ok(_) | Err(Errno::AGAIN) => Ok(()),
            Err(e) => Err(HostError::os("signalling an eventfd", e)),
        }
    }

    /// Lowers the flag, and says whether it was up.
    pub fn drain(&self) -> Result<bool, HostError> {
        let mut count = [0u8; 8];
        match retry_on_intr(|| rustix::io::read(&self.fd, &mut count[..])) {
            Ok(_) => Ok(true),
            Err(Errno::AGAIN) => Ok(false),
            Err(e) => Err(HostError::os("draining an eventfd", e)),
        }
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
