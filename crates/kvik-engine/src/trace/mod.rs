//! A recording of which pages the engine's transfers moved: ids and sizes, no data, no secrets, no addresses.
//!
//! Off, it costs one load of an atomic a transfer. On, the end of a transfer puts its page sets (by reference) into
//! a bounded queue; the thread `kvik-stat` turns them into [`lines`] for whoever reads the recording. What
//! comes when the queue is full is dropped and counted, and the recording says how much it lacks.

mod lines;

use crate::shared::{Record, lock};
use crate::transfer::Report;
use kvik_core::{EngineId, Result, View};
use kvik_host::clock::boottime;
use kvik_host::event::EventFd;
use kvik_proto::{Op, Path, Select};
use kvik_transport::TransportId;
use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

pub(crate) use lines::Writer;

/// Transfers that may wait to be written.
const MOST_ENTRIES: usize = 4096;
/// Page ids of both sides together that may wait to be written: 8 MiB.
const MOST_IDS: u64 = 2 << 20;

/// A transfer that has ended, as it waits to be written.
pub(crate) struct Entry {
    pub began: Duration,
    pub op: Op,
    pub owner: EngineId,
    pub layout_there: [u8; 8],
    pub shared_memory: bool,
    pub view: View,
    pub select: Select,
    pub transport: Option<TransportId>,
    pub sums: bool,
    pub outcome: Result<Report>,
    /// Bytes that were moved, also by one that failed.
    pub bytes: u64,
    ids: u64,
}

/// Where ended transfers wait while somebody records.
pub(crate) struct Tracer {
    on: AtomicBool,
    queue: Mutex<Queue>,
    dropped: AtomicU64,
}

#[derive(Default)]
struct Queue {
    entries: VecDeque<Entry>,
    ids: u64,
    since: Duration,
    dropped: u64,
}

impl Tracer {
    pub fn new() -> Tracer {
        Tracer { on: AtomicBool::new(false), queue: Mutex::default(), dropped: AtomicU64::new(0) }
    }

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

    /// Transfers that recordings have lost since the engine's start.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// The next transfer, and how many were dropped since the last call.
    pub fn take(&self) -> (Option<Entry>, u64) {
        let mut queue = lock(&self.queue);
        let entry = queue.entries.pop_front();
        queue.ids -= entry.as_ref().map_or(0, |entry| entry.ids);
        (entry, std::mem::take(&mut queue.dropped))
    }

    /// A transfer has ended. Rings when there was nothing to take before.
    pub fn ended(&self, record: &Record, bytes: u64, outcome: &Result<Report>, bell: &EventFd) {
        if !self.on.load(Ordering::Acquire) {
            return;
        }
        if let Some(entry) = entry(record, bytes, outcome)
            && self.put(entry)
            && let Err(error) = bell.signal()
        {
            log::error!("the thread that writes a recording cannot be woken: {error}");
        }
    }

    /// Keeps a transfer or counts it as dropped: whether it is news to somebody who had taken everything.
    fn put(&self, entry: Entry) -> bool {
        let mut queue = lock(&self.queue);
        if entry.began < queue.since {
            return false;
        }
        if queue.entries.len() >= MOST_ENTRIES || queue.ids + entry.ids > MOST_IDS {
            queue.dropped += 1;
            self.dropped.fetch_add(1, Ordering::Relaxed);
            return false;
        }
        queue.ids += entry.ids;
        queue.entries.push_back(entry);
        queue.entries.len() == 1
    }
}

/// What is to be written of a transfer; nothing of one that was to move nothing.
fn entry(record: &Record, bytes: u64, outcome: &Result<Report>) -> Option<Entry> {
    let (op, (memory, _, view)) = (record.job.op?, record.job.memory.as_ref()?);
    let (select, taken) = (record.job.select.clone(), record.taken.as_ref());
    let there = select.pages.as_ref().map_or(0, |pages| pages.count());
    Some(Entry {
        began: record.began,
        op,
        owner: record.job.ticket.engine,
        layout_there: record.job.ticket.layout,
        shared_memory: memory.fd().is_some(),
        view: view.clone(),
        ids: view.pages().len() as u64 + there,
        select,
        transport: taken.map(|taken| taken.id),
        sums: record.job.verify.sums(taken.is_some_and(|taken| taken.path == Path::Channels)),
        outcome: outcome.clone(),
        bytes,
    })
}
