//! What an engine shows to programs of its own user on its host: a snapshot of its metrics, and recordings of its
//! transfers, over an abstract UNIX socket of its own. `kvik stat` and `kvik trace` ask there.
//!
//! A thread of its own answers (`kvik-stat`), so that neither heartbeats nor data wait for somebody who looks, and so
//! that it answers whatever the program around the engine does. Nobody holds it up: every connection has a time by
//! which it must have asked and taken its answer, and there are at most sixteen of them.
//!
//! A connection asks once. It sends `kvik-stat/1 snapshot` or `kvik-stat/1 trace` as one message, and gets a line of
//! JSON about the engine as the first message. Then come pieces of text until the end: the metrics, or the
//! lines of a recording, which go on until the client sends a second message.
//!
//! - `recording`: where ended transfers wait while somebody records;
//! - `lines`: how they are written;
//! - `observed`: what the thread, the connections and the engine have in common;
//! - `server`, `client`: the socket.

#![forbid(unsafe_code)]

mod client;
mod lines;
mod observed;
mod recording;
mod server;

use kvik_core::{Code, Error, Result};
use kvik_engine::Engine;
use kvik_host::HostError;
use kvik_host::thread::spawn_named;
use kvik_host::unix::UnixListener;
use observed::{Observed, PROTOCOL};
use serde_json::{Value, json};
use std::sync::Arc;

/// Names begin with this; the engine's id follows.
const PREFIX: &str = "kvik-stat-";

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
    let observed = Arc::new(Observed::new(engine.downgrade(), about(engine)).map_err(fail)?);
    let mut server = server::Server::new(observed.clone(), listener).map_err(fail)?;
    engine.observe(observed.clone())?;
    let started = observed.start(|| spawn_named("kvik-stat", &engine.thread_options(), move || server.run()));
    started.map_err(fail)
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
