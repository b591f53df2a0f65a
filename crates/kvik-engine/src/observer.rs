//! The seam for programs that watch an engine from the same process. Recordings and `kvik stat` are built on it, in
//! `kvik-observe`; the engine knows none of them.

use crate::config::Preference;
use crate::engine::Engine;
use crate::inner::{Inner, TransferEntry};
use crate::metrics::op_name;
use crate::transfer::Report;
use kvik_core::{Class, Code, EngineId, Error, Result, View};
use kvik_host::thread::ThreadOptions;
use kvik_proto::{Path, Select};
use kvik_transport::TransportId;
use std::sync::{Arc, Weak};
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

/// An engine that is not kept running by this.
#[derive(Clone)]
pub struct WeakEngine(Weak<Inner>);

impl WeakEngine {
    /// As [`Engine::metrics`]; `None` when the engine is gone.
    pub fn metrics(&self) -> Option<String> {
        Some(self.0.upgrade()?.metrics_text())
    }
}

impl Engine {
    /// Lets `observer` see this engine until it is closed.
    ///
    /// # Errors
    /// `EngineClosed`, or `InvalidArgument` when it has an observer.
    pub fn observe(&self, observer: Arc<dyn Observer>) -> Result<()> {
        self.inner().check()?;
        self.inner().observer.set(observer).map_err(|_| {
            Error::new(Code::InvalidArgument, "the engine has an observer already; it takes one")
        })
    }

    /// The engine, without keeping it running.
    pub fn downgrade(&self) -> WeakEngine {
        WeakEngine(Arc::downgrade(self.inner()))
    }

    /// Where its threads run, for others that belong to it; their CPU time is counted with theirs.
    pub fn thread_options(&self) -> ThreadOptions {
        self.inner().thread_options()
    }

    /// The transport that transfers take unless they ask for another one.
    pub fn transport(&self) -> Preference {
        self.inner().config.transport
    }
}

impl Inner {
    /// The observer hears of a transfer that has ended, if it wants to.
    pub fn tell_observer(&self, entry: &TransferEntry, bytes: u64, outcome: &Result<Report>) {
        if let Some(observer) = self.observer.get().filter(|observer| observer.records())
            && let Some(ended) = ended(entry, bytes, outcome)
        {
            observer.transfer_ended(ended);
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
