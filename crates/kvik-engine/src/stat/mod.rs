//! What an engine shows to programs of its own user on its host: a snapshot of its metrics, and recordings of its
//! transfers, over an abstract UNIX socket of its own.
//!
//! A thread of its own answers (`kvik-stat`), so that neither heartbeats nor data wait for somebody who looks, and so
//! that it answers whatever the program around the engine does. Nobody holds it up: every connection has a time by
//! which it must have asked and taken its answer, and there are at most [`MOST_CLIENTS`](server) of them.
//!
//! A connection asks once. It sends `kvik-stat/1 snapshot` or `kvik-stat/1 trace` as one message, and gets a line of
//! JSON about the engine as the first message. Then come pieces of text until the end: the metrics, or the
//! [lines of a recording](crate::trace), which go on until the client sends a second message.

mod client;
mod server;

use crate::shared::{Shared, lock};
use crate::trace::Tracer;
use kvik_core::{Code, Result};
use kvik_host::clock::boottime;
use kvik_host::event::EventFd;
use kvik_host::thread::{ThreadOptions, spawn_named};
use kvik_host::unix::UnixListener;
use kvik_transport::from_host;
use serde_json::json;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// Names begin with this; the engine's id follows.
const PREFIX: &str = "kvik-stat-";
/// Version of the requests and answers.
const PROTOCOL: &str = "kvik-stat/1";

/// What the thread and the rest of the engine share.
pub(crate) struct StatDesk {
    pub tracer: Tracer,
    pub bell: EventFd,
    stopping: AtomicBool,
    thread: Mutex<Option<JoinHandle<()>>>,
    began: Duration,
}

impl StatDesk {
    pub fn new() -> Result<StatDesk> {
        Ok(StatDesk {
            tracer: Tracer::new(),
            bell: EventFd::new().map_err(|error| from_host(Code::InvalidArgument, error))?,
            stopping: AtomicBool::new(false),
            thread: Mutex::default(),
            began: boottime(),
        })
    }
}

impl Shared {
    /// Begins to answer. An engine that cannot works all the same, and says so.
    pub fn start_stat(self: &Arc<Shared>, options: &ThreadOptions) {
        let name = format!("{PREFIX}{}", self.local.identity.engine);
        let started = UnixListener::bind(&name).and_then(|listener| {
            let mut server = server::Server::new(self.clone(), listener)?;
            spawn_named("kvik-stat", options, move || server.run())
        });
        match started {
            Ok(thread) => *lock(&self.stat.thread) = Some(thread),
            Err(error) => log::warn!("kvik stat and kvik trace cannot look at this engine: {error}"),
        }
    }

    /// Ends a recording with its last line, and the thread.
    pub fn stop_stat(&self) {
        self.stat.stopping.store(true, Ordering::Release);
        if let Err(error) = self.stat.bell.signal() {
            log::error!("the thread that shows an engine cannot be woken: {error}");
        }
        if let Some(thread) = lock(&self.stat.thread).take()
            && thread.join().is_err()
        {
            log::error!("the thread that shows an engine panicked");
        }
    }

    /// The line about the engine that comes first.
    fn about(&self) -> Vec<u8> {
        let addresses = self.addresses.get().map_or(&[][..], Vec::as_slice);
        let addresses: Vec<String> = addresses.iter().map(ToString::to_string).collect();
        let about = json!({
            "protocol": PROTOCOL,
            "engine": self.local.identity.engine.to_string(),
            "name": self.config.name,
            "pid": std::process::id(),
            "version": env!("CARGO_PKG_VERSION"),
            "transport": self.config.transport.name(),
            "addresses": addresses,
            "uptime_s": boottime().saturating_sub(self.stat.began).as_secs_f64(),
        });
        about.to_string().into_bytes()
    }
}
