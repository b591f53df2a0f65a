//! A thread that makes the page tables of peers' memory before copies need them.
//!
//! A mapping begins without page-table entries, and a copy that meets a page for the first time pays for a fault. This
//! thread walks what a peer has shown, in small steps, and maps what the peer has touched. What it has touched since
//! is found after a copy from the region, as long as some of it was missing: one walk at a time, over the steps that were
//! not there as a whole, and never more than a tenth of the time. After walks that came upon nothing new it is less.
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
/// The pause doubles with each walk that comes upon nothing new, so often at most: to a thousandth of the time.
const DOUBLED: u32 = 7;

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
    walked: Mutex<Walked>,
}

#[derive(Debug, Default)]
struct Walked {
    counted: Option<Counted>,
    /// Not again before that.
    rests_until: Option<Instant>,
    /// Of each step whether all of it was there once: nothing more is to be done for it.
    whole: Vec<bool>,
    /// Walks since the last one after which more steps were whole.
    fruitless: u32,
}

impl Walked {
    /// A walk has ended that took so long, after which more steps were whole, or not.
    fn rest(&mut self, time: Duration, more: bool) {
        self.fruitless = if more { 0 } else { (self.fruitless + 1).min(DOUBLED) };
        let pause = (time * PAUSE).max(LEAST) * (1 << self.fruitless);
        self.rests_until = Some(Instant::now() + pause);
    }
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
        let walked = &mut *lock(&state.walked);
        if walked.rests_until.is_some_and(|until| Instant::now() < until)
            || state.settled.swap(true, Ordering::AcqRel)
        {
            return;
        }
        let bytes = memory.len() as u64;
        if walked.counted.is_none() {
            if self.inner.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes > MOST {
                self.inner.bytes.fetch_sub(bytes, Ordering::Relaxed);
                // Other regions go, and make room: it is looked at again with a later copy.
                walked.rest(Duration::ZERO, false);
                state.settled.store(false, Ordering::Release);
                return;
            }
            walked.counted = Some(Counted(self.inner.bytes.clone(), bytes));
            walked.whole = vec![false; memory.len().div_ceil(PeerMemory::STEP)];
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
        let (began, mut step, mut more) = (Instant::now(), 0, false);
        loop {
            if lock(&self.queue).over {
                return;
            }
            let Some(region) = region.upgrade() else { return };
            let PeerRegion::Mapped(memory, state) = &*region else { return };
            let next = {
                let mut walked = lock(&state.walked);
                let next = walked.whole.iter().skip(step).position(|whole| !whole);
                if next.is_none() && walked.whole.contains(&false) {
                    walked.rest(began.elapsed(), more);
                    state.settled.store(false, Ordering::Release);
                }
                next
            };
            let Some(next) = next else { return };
            step += next;
            match memory.populate(step * PeerMemory::STEP, seen) {
                Ok(whole) => {
                    lock(&state.walked).whole[step] = whole;
                    more |= whole;
                }
                Err(error) => return log::debug!("a peer's memory is mapped as it is used: {error}"),
            }
            step += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvik_host::{HugePages, Memory};

    const STEP: usize = PeerMemory::STEP;

    /// Memory of so many steps, and the same as a peer maps it.
    fn shown(steps: usize) -> (Memory, Arc<PeerRegion>) {
        let owner = Memory::shared(steps * STEP, HugePages::Never).unwrap();
        let fd = owner.fd().unwrap().try_clone_to_owned().unwrap();
        let mapped = PeerMemory::map(fd, steps * STEP).unwrap();
        (owner, Arc::new(PeerRegion::Mapped(mapped, Populated::default())))
    }

    /// One of which nobody but the test walks.
    fn without_thread() -> Populator {
        let inner = Inner { queue: Mutex::default(), wake: Condvar::new(), bytes: Arc::default() };
        Populator { inner: Arc::new(inner), thread: Mutex::default() }
    }

    #[test]
    fn a_region_that_there_was_no_room_for_is_walked_once_there_is() {
        let ((_owner, region), populator) = (shown(1), without_thread());
        let PeerRegion::Mapped(_, state) = &*region else { panic!("it is mapped") };
        let queued = || lock(&populator.inner.queue).regions.len();
        populator.inner.bytes.store(MOST, Ordering::Relaxed);
        populator.look_at(&region);
        assert_eq!((queued(), populator.inner.bytes.load(Ordering::Relaxed)), (0, MOST));
        // Another peer has gone. It is not looked at with each copy, so the pause is over here.
        populator.inner.bytes.store(0, Ordering::Relaxed);
        assert!(lock(&state.walked).rests_until.take().is_some());
        populator.look_at(&region);
        assert_eq!((queued(), populator.inner.bytes.load(Ordering::Relaxed)), (1, STEP as u64));
    }

    #[test]
    fn a_region_is_walked_until_all_of_it_was_there_and_no_step_twice() {
        let ((owner, region), populator) = (shown(3), without_thread());
        let PeerRegion::Mapped(_, state) = &*region else { panic!("it is mapped") };
        let mut seen = Vec::new();
        for (touched, expected) in [(1, [false, true, false]), (0, [true, true, false]), (2, [true; 3])] {
            owner.copy_in(touched * STEP, &vec![7; STEP]).unwrap();
            lock(&state.walked).rests_until = None;
            populator.look_at(&region);
            populator.look_at(&region);
            let queued = lock(&populator.inner.queue).regions.drain(..).collect::<Vec<_>>();
            assert_eq!(queued.len(), 1, "step {touched}: looked at twice, walked once");
            populator.inner.walk(&queued[0], &mut seen);
            assert_eq!(lock(&state.walked).whole, expected);
            // It rests, or is done with.
            populator.look_at(&region);
            assert!(lock(&populator.inner.queue).regions.is_empty());
        }
        lock(&state.walked).rests_until = None;
        populator.look_at(&region);
        assert!(lock(&populator.inner.queue).regions.is_empty(), "all of it was there");
    }

    #[test]
    fn walks_that_find_nothing_new_become_rare() {
        let (mut walked, time) = (Walked::default(), Duration::from_secs(1));
        let mut rest = |more| {
            walked.rest(time, more);
            let pause = walked.rests_until.unwrap() - Instant::now();
            (pause.as_secs_f64() / time.as_secs_f64()).round() as u32
        };
        assert_eq!(rest(true), 9);
        let pauses: Vec<u32> = (0..9).map(|_| rest(false)).collect();
        assert_eq!(pauses, [18, 36, 72, 144, 288, 576, 1152, 1152, 1152]);
        assert_eq!(rest(true), 9);
    }
}
