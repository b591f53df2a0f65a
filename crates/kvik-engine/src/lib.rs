//! kvik's transfer engine.
//!
//! One [`Engine`] a process. Memory becomes a [`Region`]; a [`PageSet`] names pages of it through a layout; a
//! [`Grant`] lets others read or write them, and its ticket is what they need; [`Engine::read`] and
//! [`Engine::write`] move pages between a page set here and a ticket's pages there, as a [`Transfer`];
//! [`Engine::read_all`] reads from several tickets as one.
//!
//! The path of a page: [`Engine::write`] → [`planner`](crate) (order of the stream, transport) → the protocol's
//! node (grant checked, work requests given) → a transport's threads (bytes moved, checksums compared) → [`Transfer`]
//! (the waiter wakes). All decisions are made by `kvik-proto`; the threads that move bytes ask it once a chunk, never
//! once a page.

#![forbid(unsafe_code)]

mod base;
mod begin;
mod budget;
mod closing;
mod commands;
mod config;
mod control;
mod end;
mod engine;
mod estimate;
mod events;
mod explain;
mod grant;
mod grants;
mod inbox;
mod inner;
mod mark;
mod meet;
mod metrics;
mod notify;
mod observer;
mod observers;
mod output;
mod peers;
mod planner;
mod protocol;
mod reading;
mod region;
mod regions;
mod report;
mod select;
mod setup;
mod stream_order;
mod sync;
mod tag;
mod transfer;
mod transfers;
mod transports;
mod warm_up;

pub use config::{Config, Preference, Verify, parse_listen};
pub use engine::Engine;
pub use events::{Event, Events, Who};
pub use explain::Explanation;
pub use grant::{Grant, GrantOptions};
pub use inbox::{Inbox, Message};
pub use kvik_host::Memory;
pub use kvik_host::cuda::GpuMemory;
pub use kvik_host::device::CallerStream;
pub use kvik_proto::Topic;
pub use kvik_transport::nics::{NicKind, NicOptions};
pub use kvik_transport::tls::TlsFiles;
pub use kvik_transport::{Estimate, RegionMemory, TransportId};
pub use mark::StreamMark;
pub use meet::Meeting;
pub use metrics::{Kind, METRICS, Metric, Text as MetricsText};
pub use notify::{Notice, Notifying, To};
pub use observer::WeakEngine;
pub use observers::{Ended, Observer};
pub use peers::{Peer, PeerState};
pub use reading::{JointRead, Read};
pub use region::{PageSet, Region};
pub use report::{JointReport, Report, TransferOptions};
pub use select::{Reason, Rejected};
pub use transfer::Transfer;
pub use warm_up::{NicPair, PairState, WarmUp, WarmUpReport};
