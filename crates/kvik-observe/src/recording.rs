//! A recording of which pages the engine's transfers moved: ids and sizes, no data, no secrets, no addresses.
//!
//! Off, it costs one load of an atomic a transfer. On, the end of a transfer puts its page sets (by reference) into
//! a bounded queue; the thread `kvik-stat` turns them into [`lines`](crate::lines) for whoever reads the recording.
//! What comes when the queue is full is dropped and counted, and the recording says how much it lacks.

use kvik_engine::Ended;
use kvik_host::clock::boottime;
use kvik_host::thread::lock;
use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Transfers that may wait to be written.
const MOST_ENTRIES: usize = 4096;
/// Page ids of both sides together that may wait to be written: 8 MiB.
const MOST_IDS: u64 = 2 << 20;

/// Where ended transfers wait while somebody records.
#[derive(Default)]
pub(crate) struct Recording {
    on: AtomicBool,
    queue: Mutex<Queue>,
    dropped: AtomicU64,
}

#[derive(Default)]
struct Queue {
    entries: VecDeque<Ended>,
    ids: u64,
    since: Duration,
    dropped: u64,
}

impl Recording {
    /// Begins a recording: of the transfers that begin from now on. Gives the time that counts as its start.
    pub fn start(&self) -> Duration {
        let since = boottime();
        *lock(&self.queue) = Queue { since, ..Queue::default() };
        self.on.store(true, Ordering::Release);
        since
    }

    /// Ends the recording; what waits can still be taken.
    pub fn stop(&self) {
        self.on.store(false, Ordering::Release);
    }

    /// Whether somebody records.
    pub fn is_on(&self) -> bool {
        self.on.load(Ordering::Acquire)
    }

    /// Transfers that recordings have lost since the engine's start.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// The next transfer, and how many were dropped since the last call.
    pub fn take(&self) -> (Option<Ended>, u64) {
        let mut queue = lock(&self.queue);
        let ended = queue.entries.pop_front();
        queue.ids -= ended.as_ref().map_or(0, ids);
        (ended, std::mem::take(&mut queue.dropped))
    }

    /// Keeps a transfer or counts it as dropped: whether it is news to somebody who had taken everything.
    pub fn put(&self, ended: Ended) -> bool {
        let mut queue = lock(&self.queue);
        if !self.is_on() || ended.began < queue.since {
            return false;
        }
        let more = ids(&ended);
        if queue.entries.len() >= MOST_ENTRIES || queue.ids + more > MOST_IDS {
            queue.dropped += 1;
            self.dropped.fetch_add(1, Ordering::Relaxed);
            return false;
        }
        queue.ids += more;
        queue.entries.push_back(ended);
        queue.entries.len() == 1
    }
}

/// Page ids of both sides.
fn ids(ended: &Ended) -> u64 {
    ended.view.pages().len() as u64 + ended.select.positions.as_ref().map_or(0, |named| named.count())
}
