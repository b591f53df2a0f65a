//! One engine, as its thread, the connections and its end see it.

use crate::recording::Recording;
use kvik_engine::{Ended, Observer, WeakEngine};
use kvik_host::HostError;
use kvik_host::clock::boottime;
use kvik_host::event::EventFd;
use kvik_host::thread::lock;
use serde_json::Value;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Version of the requests and answers.
pub(crate) const PROTOCOL: &str = "kvik-stat/1";

/// What the thread, the connections and the engine's end have in common.
pub(crate) struct Observed {
    pub engine: WeakEngine,
    about: Value,
    began: Duration,
    pub recording: Recording,
    pub waker: EventFd,
    stopping: AtomicBool,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Observed {
    pub fn new(engine: WeakEngine, about: Value) -> Result<Observed, HostError> {
        Ok(Observed {
            engine,
            about,
            began: boottime(),
            recording: Recording::default(),
            waker: EventFd::new()?,
            stopping: AtomicBool::new(false),
            thread: Mutex::default(),
        })
    }

    /// Keeps the thread, for the engine's end: one that comes meanwhile waits for it.
    pub fn start(&self, spawn: impl FnOnce() -> Result<JoinHandle<()>, HostError>) -> Result<(), HostError> {
        let mut thread = lock(&self.thread);
        *thread = Some(spawn()?);
        Ok(())
    }

    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// The line about the engine that comes first.
    pub fn about(&self) -> Vec<u8> {
        let mut about = self.about.clone();
        about["uptime_s"] = boottime().saturating_sub(self.began).as_secs_f64().into();
        about.to_string().into_bytes()
    }

    fn wake(&self) {
        if let Err(error) = self.waker.signal() {
            log::error!("the thread that shows an engine cannot be woken: {error}");
        }
    }
}

impl Observer for Observed {
    fn records(&self) -> bool {
        self.recording.is_on()
    }

    fn transfer_ended(&self, ended: Ended) {
        if self.recording.put(ended) {
            self.wake();
        }
    }

    fn transfers_dropped(&self) -> u64 {
        self.recording.dropped()
    }

    /// Ends a recording with its last line, and the thread.
    fn engine_closed(&self) {
        self.stopping.store(true, Ordering::Release);
        self.wake();
        if let Some(thread) = lock(&self.thread).take()
            && thread.join().is_err()
        {
            log::error!("the thread that shows an engine panicked");
        }
    }
}
