//! The end of an engine: everybody hears of it, its threads end, and it is bounded.

use crate::commands::ControlCommand;
use crate::config::MAX_DEADLINE;
use crate::end::End;
use crate::grant::describe;
use crate::inner::Inner;
use crate::sync::lock;
use kvik_core::{Code, Error, Result};
use kvik_host::thread::{ThreadOptions, spawn_named};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a dropped engine takes to close at most.
const DROP_LIMIT: Duration = Duration::from_secs(5);
/// How long a closing engine waits for whoever is just handling one of its events.
const LAST_EVENT: Duration = Duration::from_secs(1);
/// How long a closing engine waits for its peers' last answers.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// What keeps an engine running. The last one that is dropped closes it.
pub(crate) struct Handle {
    pub inner: Arc<Inner>,
    pub control: Arc<Mutex<Option<JoinHandle<()>>>>,
    /// The end of its threads, for everyone who closes it.
    pub ended: Arc<End<()>>,
}

impl Handle {
    /// See [`Engine::close`](crate::Engine::close).
    pub fn close(&self, timeout: Duration) -> Result<()> {
        let (inner, base) = (&self.inner, &self.inner.base);
        if base.setup.check_fork().is_err() {
            return Ok(());
        }
        let began = Instant::now();
        let limit = began + timeout.clamp(LAST_WORDS, MAX_DEADLINE);
        if !base.setup.set_closed() {
            // Memory that a thread still has in use is no more the caller's for its having been closed before.
            return self.wait_for_threads(limit);
        }
        let until = began + timeout.min(LAST_WORDS);
        // What was confirmed a moment ago reaches its owner before the connection goes.
        inner.transfers.open().into_iter().for_each(|id| inner.transfers.cancel(id..id + 1, &closed()));
        base.node(|node, _| node.grants().end_all());
        while Instant::now() < until && !base.node(|node, _| node.is_quiet()) {
            base.progress.wait(Duration::from_millis(2));
        }
        base.node(|node, _| node.goodbye());
        for session in base.node(|node, _| node.sessions()) {
            // Another thread may have taken it on to send what waits there, and not have begun.
            inner.conns.flush(session, base);
            base.node(|node, _| node.session(session).close(closed()));
        }
        base.commands.tell(ControlCommand::Stop);
        inner.peers.close(&closed());
        self.end_threads();
        let ended = self.wait_for_threads(limit);
        base.observers.notices.moved.note();
        base.observers.inboxes.close();
        base.observers.events.close(Instant::now() + timeout.min(LAST_EVENT));
        ended
    }

    /// Has the engine's threads end, and whoever waits for that told.
    fn end_threads(&self) {
        let (inner, control, ended) = (self.inner.clone(), self.control.clone(), self.ended.clone());
        let waits =
            spawn_named("kvik-end", &ThreadOptions::default(), move || join_all(&inner, &control, &ended));
        if let Err(error) = waits {
            log::warn!("closing without a limit, since no thread can be started: {error}");
            join_all(&self.inner, &self.control, &self.ended);
        }
    }

    /// Waits for the engine's threads; one that has memory in use and does not come back is left behind, with what
    /// it holds.
    fn wait_for_threads(&self, until: Instant) -> Result<()> {
        let left = until.saturating_duration_since(Instant::now());
        if self.ended.wait(Some(left), "").is_ok() {
            return Ok(());
        }
        let stuck = stuck(&self.inner);
        let text = stuck.as_deref().unwrap_or("they have no memory in use");
        log::warn!(engine:% = self.inner.base.setup.id(); "the engine's threads have not ended: {text}");
        stuck.map_or(Ok(()), |text| Err(Error::new(Code::PagesQuarantined, text)))
    }
}

/// Closes an engine whose control thread cannot go on, from that thread: nobody would send heartbeats any more, hear of
/// peers that die, or look at deadlines.
pub(crate) fn give_up(handle: &Weak<Handle>, why: &str) {
    let Some(handle) = handle.upgrade() else { return };
    log::error!(engine:% = handle.inner.base.setup.id(); "{why}; the engine closes: start another one");
    // It does not wait for itself.
    drop(lock(&handle.control).take());
    if let Err(error) = handle.close(DROP_LIMIT) {
        log::warn!("{error}");
    }
}

/// Waits for the engine's threads, and ends what only they could have ended.
fn join_all(inner: &Arc<Inner>, control: &Mutex<Option<JoinHandle<()>>>, ended: &End<()>) {
    inner.base.transports.all().iter().rev().for_each(|transport| transport.stop());
    inner.streams.stop();
    if let Some(thread) = lock(control).take()
        && thread.join().is_err()
    {
        log::error!("the control thread panicked");
    }
    inner.transfers.open().into_iter().for_each(|id| inner.transfers.abandon(id, closed()));
    inner.grants.let_go();
    if let Some(observer) = inner.base.observers.program() {
        observer.engine_closed();
    }
    log::info!(engine:% = inner.base.setup.id(); "engine closed");
    ended.set(Ok(()));
}

/// What threads that have not ended have in flight.
fn stuck(inner: &Inner) -> Option<String> {
    let (flows, holdings) = inner.base.node(|node, _| (node.open_flows(), node.holdings()));
    if flows == 0 && holdings.is_empty() {
        return None;
    }
    let granted: Vec<String> = holdings.iter().map(describe).collect();
    let granted = if granted.is_empty() { String::new() } else { format!(": {}", granted.join("; ")) };
    Some(format!(
        "the engine was closed, but {flows} transfer(s) still have memory in use{granted}; do not use or free pages \
         of unfinished transfers and grants until `wait` on them returns"
    ))
}

/// What whoever still uses a closed engine is told.
pub(crate) fn closed() -> Error {
    Error::new(Code::EngineClosed, "the engine was closed under the transfer; start another one")
}

impl Drop for Handle {
    fn drop(&mut self) {
        // Who has closed it was told what it left.
        if !self.inner.base.setup.is_closed()
            && let Err(error) = self.close(DROP_LIMIT)
        {
            log::warn!("an engine was dropped: {error}");
        }
    }
}
