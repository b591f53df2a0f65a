//! The prefill/decode HTTP router of kvik.
//!
//! A client speaks the OpenAI completions API to the router as if it were one engine. Behind it, one engine
//! computes the KV-cache of the prompt (prefill) and another generates the answer from it (decode). The router
//! itself moves no KV: it sends two requests that refer to the same KV, and the decode engine pulls.
//!
//! The way of a request, which is also the order to read the code in:
//!
//! 1. [`server`] accepts the connection, [`service`] finds the handler.
//! 2. [`exchange`] is one client's request from its first byte to its last. It is also the guard that notices a
//!    client that leaves, and that gives back KV which no decode engine will ever fetch.
//! 3. [`body`] turns the client's body into the one for prefill and the one for decode, changing single keys
//!    and leaving every other byte alone.
//! 4. [`handover`] runs the two steps, one after the other, [`stream`] both at once; [`pool`] picks engines; [`upstream`] sends, and says what
//!    came of it.
//! 5. [`relay`] passes the answer on, chunk by chunk, and [`timing`] says where the time went; [`note`] is what decode
//!    says of the KV, and [`stream_end`] what became of a stream.
//!
//! What the router promises: the decode engine sees the client's body plus `kv_transfer_params` and nothing
//! else; a prompt whose KV cannot be handed over is recomputed by the decode engine, and counted; a client that
//! leaves takes its engine request with it; everything has a bound.
#![forbid(unsafe_code)]

mod body;
mod collect;
mod config;
mod connector;
mod exchange;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod handover;
mod headers;
mod health;
mod memory;
mod metrics;
mod note;
mod pool;
mod relay;
mod release;
mod reply;
mod running;
mod server;
mod service;
mod shared;
mod stream;
mod stream_end;
mod timing;
mod upstream;

pub use config::{EngineUrl, RouterConfig, RouterError};
pub use running::RunningRouter;
