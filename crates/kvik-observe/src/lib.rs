//! What an engine shows to programs of its own user on its host: a snapshot of its metrics, and recordings of its
//! transfers, over an abstract UNIX socket of its own. `kvik stat` and `kvik trace` ask there.
//!
//! A thread of its own answers (`kvik-stat`), so that neither heartbeats nor data wait for somebody who looks, and so
//! that it answers whatever the program around the engine does. Nobody holds it up: every connection has a time by
//! which it must have asked and taken its answer, and there are at most [`MOST_CLIENTS`](server) of them.
//!
//! A connection asks once. It sends `kvik-stat/1 snapshot` or `kvik-stat/1 trace` as one message, and gets a line of
//! JSON about the engine as the first message. Then come pieces of text until the end: the metrics, or the
//! [lines of a recording](lines), which go on until the client sends a second message.
//!
//! - [`recording`]: where ended transfers wait while somebody records;
//! - [`lines`]: how they are written;
//! - [`server`], [`client`]: the socket.

#![forbid(unsafe_code)]

mod client;
mod lines;
mod recording;
mod server;

use kvik_core::{Code, Error, Result};
use kvik_engine::{Ended, Engine, Observer, WeakEngine};
use kvik_host::HostError;
use kvik_host::clock::boottime;
use kvik_host::event::EventFd;
use kvik_host::thread::spawn_named;
use kvik_host::unix::UnixListener;
use recording::Recording;
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Names begin with this; the engine's id follows.
const PREFIX: &str = "kvik-stat-";
/// Version of the requests and answers.
const PROTOCOL: &str = "kvik-stat/1";

/// Shows an engine until it is closed: to be called once, right after its start. It does not keep the engine running.
///
/// # Errors
/// `InvalidArgument` when the engine is observed already, or when the socket or the thread cannot be had; the engine
/// works all the same.
pub fn observe(engine: &Engine) -> Result<()> {
    let fail = |error: HostError| {
        Error::new(
            Code::InvalidArgument,
            format!("kvik stat and kvik trace cannot look at this engine: {error}"),
        )
    };
    let listener = UnixListener::bind(&format!("{PREFIX}{}", engine.id())).map_err(fail)?;
    let shown = Arc::new(Shown {
        engine: engine.downgrade(),
        about: about(engine),
        began: boottime(),
        recording: Recording::default(),
        waker: EventFd::new().map_err(fail)?,
        stopping: AtomicBool::new(false),
        thread: Mutex::default(),
    });
    let mut server = server::Server::new(shown.clone(), listener).map_err(fail)?;
    // Before the thread: an engine that is closed meanwhile finds what it has to stop.
    let mut thread = lock(&shown.thread);
    engine.observe(shown.clone())?;
    *thread = Some(spawn_named("kvik-stat", &engine.thread_options(), move || server.run()).map_err(fail)?);
    Ok(())
}

/// What the thread, the connections and the engine's end have in common.
struct Shown {
    engine: WeakEngine,
    about: Value,
    began: Duration,
    recording: Recording,
    waker: EventFd,
    stopping: AtomicBool,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Shown {
    /// The line about the engine that comes first.
    fn about(&self) -> Vec<u8> {
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

impl Observer for Shown {
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

fn about(engine: &Engine) -> Value {
    let addresses: Vec<String> = engine.addresses().iter().map(ToString::to_string).collect();
    json!({
        "protocol": PROTOCOL,
        "engine": engine.id().to_string(),
        "name": engine.name(),
        "pid": std::process::id(),
        "version": env!("CARGO_PKG_VERSION"),
        "transport": engine.transport().name(),
        "addresses": addresses,
    })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
