//! Who hears what happens: users of events and notifications, counts, and a program that watches.

use crate::end::End;
use crate::events::EventBus;
use crate::inbox::Inboxes;
use crate::metrics::{Metrics, op_name};
use crate::report::Report;
use crate::sync::{Progress, lock};
use crate::transfers::request::TransferEntry;
use kvik_core::{Class, Code, EngineId, Error, Result, View};
use kvik_proto::{Path, Select, Topic};
use kvik_transport::TransportId;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

/// Sees the ends of an engine's transfers, and its own. It is called by the engine's threads: it must not wait.
pub trait Observer: Send + Sync + 'static {
    /// Whether ends of transfers are wanted now; asked once a transfer.
    fn records(&self) -> bool;
    /// A transfer of this engine that was to move pages has ended.
    fn transfer_ended(&self, ended: Ended);
    /// Ends of transfers that it had no room for, since the engine's start.
    fn transfers_dropped(&self) -> u64;
    /// The engine is closed and its other threads have ended: the last call. It may wait for a moment.
    fn engine_closed(&self);
}

/// A transfer that has ended, with references to its page sets.
pub struct Ended {
    /// When it began, since boot.
    pub began: Duration,
    /// What the caller called: `read` or `write`.
    pub op: &'static str,
    /// What it was for.
    pub class: Class,
    /// Whose grant it used.
    pub owner: EngineId,
    /// Digest of the owner's layout.
    pub layout_there: [u8; 8],
    /// This side's memory was allocated by kvik: processes on this host can map it.
    pub shared_memory: bool,
    /// This side's pages.
    pub view: View,
    /// What was asked of the owner.
    pub select: Select,
    /// Over what it went; none when it ended before that was known.
    pub transport: Option<TransportId>,
    /// Whether page checksums travelled with the bytes.
    pub sums: bool,
    /// How it ended.
    pub outcome: Result<Report>,
    /// Bytes that were moved, also by one that failed.
    pub bytes: u64,
}

/// See the module's text.
pub(crate) struct Observers {
    pub events: EventBus,
    pub inboxes: Inboxes,
    pub notices: Notices,
    pub metrics: Metrics,
    pub counters: Counters,
    program: OnceLock<Arc<dyn Observer>>,
}

/// What has happened since the start.
#[derive(Default)]
pub(crate) struct Counters {
    pub transfers_ok: AtomicU64,
    pub transfers_failed: AtomicU64,
    pub bytes_moved: AtomicU64,
    pub grants_given: AtomicU64,
    pub sessions_opened: AtomicU64,
    pub sessions_lost: AtomicU64,
}

/// By session, topic and number.
type Ends = HashMap<(u64, Topic, u64), Arc<End<()>>>;

/// Notifications to peers: the ends of those that are in a window.
#[derive(Default)]
pub(crate) struct Notices {
    ends: Mutex<Ends>,
    /// Whenever a window may have got room, or a session came or went.
    pub moved: Progress,
}

impl Notices {
    /// Sends a notification by `send`, which gives its number. Its end finds it, however soon that comes.
    pub fn begin(
        &self,
        session: u64,
        topic: Topic,
        end: Arc<End<()>>,
        send: impl FnOnce() -> Result<u64>,
    ) -> Result<()> {
        let mut ends = lock(&self.ends);
        ends.insert((session, topic, send()?), end);
        Ok(())
    }

    pub fn ended(&self, session: u64, topic: Topic, number: u64, outcome: Result<()>) {
        let end = lock(&self.ends).remove(&(session, topic, number));
        if let Some(end) = end {
            end.set(outcome);
        }
    }
}

impl Observers {
    pub fn new() -> Observers {
        Observers {
            events: EventBus::default(),
            inboxes: Inboxes::default(),
            notices: Notices::default(),
            metrics: Metrics::new(),
            counters: Counters::default(),
            program: OnceLock::new(),
        }
    }

    /// # Errors
    /// `InvalidArgument` when there is a program that watches.
    pub fn add(&self, program: Arc<dyn Observer>) -> Result<()> {
        self.program.set(program).map_err(|_| {
            Error::new(Code::InvalidArgument, "the engine has an observer already; it takes one")
        })
    }

    pub fn program(&self) -> Option<&dyn Observer> {
        self.program.get().map(|program| &**program)
    }

    /// A transfer of this side has ended.
    pub fn transfer_ended(&self, entry: &TransferEntry, bytes: u64, outcome: &Result<Report>) {
        self.metrics.transfer_ended(entry, bytes, outcome);
        if let Some(program) = self.program().filter(|program| program.records())
            && let Some(ended) = ended(entry, bytes, outcome)
        {
            program.transfer_ended(ended);
        }
        match outcome {
            Ok(report) => {
                self.counters.transfers_ok.fetch_add(1, Ordering::Relaxed);
                self.counters.bytes_moved.fetch_add(report.bytes, Ordering::Relaxed);
            }
            Err(_) => drop(self.counters.transfers_failed.fetch_add(1, Ordering::Relaxed)),
        }
    }
}

/// What there is to say of a transfer; nothing of one that was to move nothing.
fn ended(entry: &TransferEntry, bytes: u64, outcome: &Result<Report>) -> Option<Ended> {
    let (op, (memory, _, view)) = (entry.request.op?, entry.request.memory.as_ref()?);
    let taken = entry.taken.as_ref();
    Some(Ended {
        began: entry.began,
        op: op_name(op),
        class: entry.request.class,
        owner: entry.request.ticket.engine,
        layout_there: entry.request.ticket.layout,
        shared_memory: memory.fd().is_some(),
        view: view.clone(),
        select: entry.request.select.clone(),
        transport: taken.map(|taken| taken.id),
        sums: entry.request.verify.sums(taken.is_some_and(|taken| taken.path == Path::Channels)),
        outcome: outcome.clone(),
        bytes,
    })
}
