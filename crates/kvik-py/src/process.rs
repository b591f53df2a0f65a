//! What this process keeps for Python beside the objects: the engines that are open, log records on their
//! way, and references to Python objects that wait to be given up.
//!
//! The threads that move data never take the GIL, or one slow Python function would stop heartbeats. So what
//! they have for Python they put into the [`Inbox`], and the Python thread `kvik-log` collects it.
//!
//! A forked child starts with an empty [`Process`]: the parent's may be locked by a thread that the child
//! does not have. It is left as it is, never freed.

use kvik_engine::Engine;
use kvik_host::thread::lock;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;
use std::collections::BTreeMap;
use std::process;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// More log records than this are not kept until Python takes them; further ones are counted and dropped.
const MOST_RECORDS: usize = 4096;

/// The state of one process.
pub struct Process {
    pid: u32,
    /// What waits for Python.
    pub inbox: Inbox,
    engines: Mutex<Vec<Engine>>,
}

static CURRENT: AtomicPtr<Process> = AtomicPtr::new(ptr::null_mut());

/// The state of this process, made at first use and again in a forked child.
pub fn current() -> &'static Process {
    let pid = process::id();
    loop {
        let known = CURRENT.load(Ordering::Acquire);
        // SAFETY: a pointer that was stored here came from `Box::into_raw` below and is never freed.
        if let Some(state) = unsafe { known.as_ref() }
            && state.pid == pid
        {
            return state;
        }
        let fresh =
            Box::into_raw(Box::new(Process { pid, inbox: Inbox::default(), engines: Mutex::default() }));
        if CURRENT.compare_exchange(known, fresh, Ordering::AcqRel, Ordering::Acquire).is_err() {
            // SAFETY: another thread was faster, so `fresh` was seen by nobody else.
            drop(unsafe { Box::from_raw(fresh) });
        }
    }
}

impl Process {
    /// Remembers an engine, so that the end of the interpreter closes it.
    pub fn opened(&self, engine: &Engine) {
        lock(&self.engines).push(engine.clone());
    }

    /// Forgets an engine that was closed. One that was started at its addresses since has its id, and stays.
    pub fn closed(&self, engine: &Engine) {
        let start = |engine: &Engine| (engine.id(), engine.incarnation());
        let closed = start(engine);
        lock(&self.engines).retain(|other| start(other) != closed);
    }

    /// Closes all engines at once, so that together they take no longer than one.
    pub fn close_all(&self, timeout: Duration) {
        let engines = std::mem::take(&mut *lock(&self.engines));
        std::thread::scope(|scope| {
            for engine in &engines {
                let close = || {
                    if let Err(error) = engine.close(timeout) {
                        log::warn!(target: "kvik.engine", "closing {} at exit: {error}", engine.id());
                    }
                };
                if std::thread::Builder::new().name("kvik-close".into()).spawn_scoped(scope, close).is_err() {
                    close();
                }
            }
        });
    }
}

/// A Python object whose memory is registered.
pub enum Export {
    /// The export of its buffer.
    Buffer(PyUntypedBuffer),
    /// A tensor, which has no exports: a reference keeps it alive.
    Object(Py<PyAny>),
}

impl Export {
    /// Gives it up, with the GIL.
    pub fn give_up(self, py: Python<'_>) {
        match self {
            Export::Buffer(buffer) => buffer.release(py),
            Export::Object(object) => drop(object.into_bound(py)),
        }
    }
}

/// One log record, in the order of `kvik._logs._emit`'s arguments: level, logger, text, when it was made in seconds since
/// 1970, thread, file, line, and the ids that it names.
pub type Record = (u8, String, String, f64, String, &'static str, u32, BTreeMap<&'static str, String>);

/// What waits for Python.
#[derive(Default)]
pub struct Inbox {
    state: Mutex<State>,
    arrived: Condvar,
    handled: Condvar,
}

#[derive(Default)]
struct State {
    records: Vec<Record>,
    held: Vec<Export>,
    /// Records dropped since it was last reported.
    dropped: u64,
    /// Records that ever came in, that were taken out, and that Python is done with.
    came: u64,
    taken: u64,
    done: u64,
    stopping: bool,
}

impl Inbox {
    /// Hands over a log record, or counts it as dropped if Python does not keep up.
    pub fn put_record(&self, record: Record) {
        let mut state = lock(&self.state);
        if state.records.len() >= MOST_RECORDS {
            state.dropped += 1;
            return;
        }
        state.records.push(record);
        state.came += 1;
        drop(state);
        self.arrived.notify_one();
    }

    /// Hands over a reference to a Python object that is to be given up.
    pub fn put_held(&self, held: Export) {
        lock(&self.state).held.push(held);
        self.arrived.notify_one();
    }

    /// Gives up the references that wait. One at a time and with the GIL held throughout, so that when this
    /// returns none is left, not even in the hands of another thread.
    pub fn give_up_held(&self, py: Python<'_>) {
        loop {
            let Some(held) = lock(&self.state).held.pop() else { return };
            held.give_up(py);
        }
    }

    /// Waits until something is there: log records, oldest first, and how many were dropped before them. `None` once
    /// [`Inbox::stop`] was called and nothing is left.
    ///
    /// The call also says that the batch before has been dealt with.
    pub fn next(&self) -> Option<(Vec<Record>, u64)> {
        let mut state = lock(&self.state);
        state.done = state.taken;
        self.handled.notify_all();
        while state.records.is_empty() && state.held.is_empty() && state.dropped == 0 {
            if state.stopping {
                return None;
            }
            state = self.arrived.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.taken = state.came;
        Some((std::mem::take(&mut state.records), std::mem::take(&mut state.dropped)))
    }

    /// Waits until Python is done with every record that is there now; false at the timeout.
    pub fn flush(&self, timeout: Duration) -> bool {
        let state = lock(&self.state);
        let target = state.came;
        let timeout = timeout.min(Duration::from_secs(3600));
        let waited = self.handled.wait_timeout_while(state, timeout, |state| state.done < target);
        waited.unwrap_or_else(PoisonError::into_inner).0.done >= target
    }

    /// Lets [`Inbox::next`] end when it has handed out what is there; `false` takes that back.
    pub fn stop(&self, stopping: bool) {
        lock(&self.state).stopping = stopping;
        self.arrived.notify_all();
    }
}
