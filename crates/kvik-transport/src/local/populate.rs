//! A thread that makes the page tables of peers' memory before copies need them.
//!
//! A mapping begins without page-table entries, and a copy that meets a page for the first time pays for a fault. This
//! thread walks what a peer has shown, in small steps, and maps what the peer has touched. What it has touched since
//! is found after a copy from the region, as long as some of it was missing: one walk at a time, and never more than a
//! tenth of the time.
//!
//! Page tables are memory of this process that a peer causes: they are made for at most [`MOST`] bytes of all peers'
//! regions together, a 512th of which they take.

use super::PeerRegion;
use crate::basics::lock;
use crate::from_host;
use kvik_core::{Code, Result};
use kvik_host::PeerMemory;
use kvik_host::thread::{ThreadOptions, spawn_named};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Bytes of regions whose page tables are made here.
const MOST: u64 = 64 << 30;
/// The pause after a walk is so many times as long as it, and at least this long.
const PAUSE: u32 = 9;
const LEAST: Duration = Duration::from_millis(5);

/// The thread's other side.
pub struct Populator {
    inner: Arc<Inner>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Inner {
    queue: Mutex<Queue>,
    wake: Condvar,
    bytes: Arc<AtomicU64>,
}

#[derive(Default)]
struct Queue {
    regions: VecDeque<Weak<PeerRegion>>,
    over: bool,
}

/// What is known of one region.
#[derive(Debug, Default)]
pub struct Populated {
    /// It waits for the thread, or there is nothing more to do for it.
    settled: AtomicBool,
    counted: Mutex<Option<Counted>>,
    /// Not before that.
    rests_until: Mutex<Option<Instant>>,
}

/// Bytes of a region that count, until it is gone.
#[derive(Debug)]
struct Counted(Arc<AtomicU64>, u64);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(self.1, Ordering::Relaxed);
    }
}

impl Populator {
    /// Starts the thread, one for all links of an engine. Not when the first region comes: regions come to a thread of
    /// real-time priority, which must not wait for one of ordinary priority to begin.
    ///
    /// # Errors
    /// No thread could be started.
    pub fn start(options: &ThreadOptions) -> Result<Populator> {
        let inner = Inner { queue: Mutex::default(), wake: Condvar::new(), bytes: Arc::default() };
        let inner = Arc::new(inner);
        let looks = inner.clone();
        let thread = spawn_named("kvik-map", options, move || looks.run());
        let thread = thread.map_err(|error| from_host(Code::InvalidArgument, error))?;
        Ok(Populator { inner, thread: Mutex::new(Some(thread)) })
    }

    /// A region was shown, or copied from.
    pub(crate) fn look_at(&self, region: &Arc<PeerRegion>) {
        let PeerRegion::Mapped(memory, state) = &**region else { return };
        if state.settled.load(Ordering::Relaxed) {
            return;
        }
        if lock(&state.rests_until).is_some_and(|until| Instant::now() < until)
            || state.settled.swap(true, Ordering::AcqRel)
        {
            return;
        }
        let bytes = memory.len() as u64;
        let counted = &mut *lock(&state.counted);
        if counted.is_none() {
            if self.inner.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes > MOST {
                self.inner.bytes.fetch_sub(bytes, Ordering::Relaxed);
                return;
            }
            *counted = Some(Counted(self.inner.bytes.clone(), bytes));
        }
        lock(&self.inner.queue).regions.push_back(Arc::downgrade(region));
        self.inner.wake.notify_one();
    }

    /// Ends the thread, after the step that it is at.
    pub fn stop(&self) {
        lock(&self.inner.queue).over = true;
        self.inner.wake.notify_one();
        if lock(&self.thread).take().is_some_and(|thread| thread.join().is_err()) {
            log::error!("the thread that maps peers' memory panicked");
        }
    }
}

impl Drop for Populator {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Inner {
    fn run(&self) {
        let mut seen = Vec::new();
        loop {
            let mut queue = lock(&self.queue);
            let region = loop {
                if queue.over {
                    return;
                }
                match queue.regions.pop_front() {
                    Some(region) => break region,
                    None => queue = self.wake.wait(queue).unwrap_or_else(PoisonError::into_inner),
                }
            };
            drop(queue);
            self.walk(&region, &mut seen);
        }
    }

    /// The region is held for a step at a time, so that one that its peer takes back goes.
    fn walk(&self, region: &Weak<PeerRegion>, seen: &mut Vec<u8>) {
        let (began, mut offset, mut whole) = (Instant::now(), 0, true);
        loop {
            if lock(&self.queue).over {
                return;
            }
            let Some(region) = region.upgrade() else { return };
            let PeerRegion::Mapped(memory, state) = &*region else { return };
            if offset >= memory.len() {
                if !whole {
                    let rest = (began.elapsed() * PAUSE).max(LEAST);
                    *lock(&state.rests_until) = Some(Instant::now() + rest);
                    state.settled.store(false, Ordering::Release);
                }
                return;
            }
            match memory.populate(offset, seen) {
                Ok(all) => whole &= all,
                Err(error) => return log::debug!("a peer's memory is mapped as it is used: {error}"),
            }
            offset += PeerMemory::STEP;
        }
    }
}
