//! A KV-cache that outlives the engines which fill it.
//!
//! A store block is identified, not just named: its [`BlockKey`] stands for the tokens up to its end and for
//! everything else that KV depends on ([`Namespace`]). An [`Entry`] says what a block is, besides its bytes: its
//! identity, its shape and the checksums of its parts, which are compared at every crossing. What does not compare is
//! a miss, and counted; it is never served.

#![forbid(unsafe_code)]

mod address;
mod below;
mod bring;
mod chain;
mod choice;
mod client;
mod cluster;
#[cfg(test)]
mod corrupt_tests;
mod counts;
mod crew;
mod early;
mod entry;
mod etcd;
mod far;
mod figures;
mod fill;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod get;
mod histogram;
mod host;
mod identity;
mod index;
mod lend;
mod lending;
mod link;
mod log;
mod metrics;
mod moving;
mod object;
mod opened;
mod placement;
pub mod policy;
mod pulse;
mod put;
mod remote;
mod removing;
pub mod replay;
mod scan;
#[cfg(test)]
mod scan_tests;
mod server;
mod servers;
mod service;
mod share;
mod slab;
mod space;
mod state;
mod store;
mod sums;
mod survey;
#[cfg(test)]
mod survey_tests;
mod sync;
mod tenants;
mod tier;
mod unsaid;
mod windows;
mod wire;
#[cfg(test)]
mod wire_tests;
mod write;

pub use chain::Chain;
pub use choice::{Choice, Reason};
pub use client::Client;
pub use cluster::MemberState;
pub use counts::Counts;
pub use entry::{Entry, Shape};
pub use etcd::{Etcd, Registration};
pub use fill::Stored;
pub use identity::{BlockKey, Namespace, NamespaceId};
pub use log::{Directory, Files, Log, LogFile, LogOptions, Range as MemoryRange};
pub use metrics::METRICS;
pub use moving::{Getting, Putting};
pub use object::{Bucket, ObjectOptions};
pub use server::Server;
pub use servers::Servers;
pub use space::Space;
pub use store::{MAX_KEYS, StoreOptions};
pub use survey::{Amount, Looked, NamespaceSurvey, Segments, ServerSurvey, Survey, SurveyOptions};
pub use tenants::TenantOptions;
pub use tier::{Found, Identity, Place, Tier, TierOwner, Usage};
pub use wire::Ack;

use kvik_core::{Code, Error};

/// How long a thread waits that is woken when there is something, and when it is to end.
const NOTHING_ELSE: std::time::Duration = std::time::Duration::from_secs(24 * 3600);

fn no_memory(error: kvik_host::HostError) -> Error {
    Error::new(Code::MemoryCapReached, format!("the store has no memory for its blocks: {error}"))
}

fn no_thread(error: kvik_host::HostError) -> Error {
    Error::new(Code::InvalidArgument, format!("a thread of the store did not start: {error}"))
}

fn slab_gone() -> Error {
    Error::new(Code::RegionClosed, "the store's memory was given back while blocks of it were in use")
}
