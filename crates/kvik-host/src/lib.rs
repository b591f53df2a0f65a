//! The machine: everything that kvik asks of the kernel, behind safe types.
//!
//! This crate is the only home of raw system calls and of `unsafe`. The crates above it see memory that is
//! bounds-checked, descriptors that close themselves and never leak into a child program, threads that take
//! no signals, and errors that say what happened and what to do.
//!
//! Reading order:
//!
//! * memory: [`memory`] (registered memory of this process), [`peer_memory`] (a peer's, mapped read-only),
//!   [`runs`] (contiguous runs of it, handed to the kernel), [`process_vm`] (reading a peer that shares no
//!   mapping), [`fence`] (the shared table that says whether what was read still counted);
//! * descriptors: [`socket`] (TCP), [`unix`] (messages with descriptors on one host), [`event`] (epoll, eventfd),
//!   [`file`](mod@file) (files, straight from and to registered memory);
//! * the host's own libraries, loaded at run time: [`library`], [`fabric`] (libfabric), [`verbs`] (libibverbs),
//!   [`plugin`] (whatever speaks the C interface of `include/kvik/nic.h`), [`cuda`] (memory of GPUs), which transports
//!   see as one kind of [`device`];
//! * the process: [`thread`](mod@thread), [`cpu`], [`fork`], [`clock`], [`descriptors`];
//! * facts: [`identity`] (is a peer on this host), [`addr`] (interfaces), [`huge_pages`], [`probe`] (what works
//!   here, in words).
//!
//! Registered memory is never a Rust slice. Other threads, other processes and the kernel change it at any
//! time, so it is a pointer and a length, with functions that copy.

pub mod addr;
pub mod clock;
pub mod cpu;
pub mod cuda;
pub mod descriptors;
pub mod device;
pub mod event;
pub mod fabric;
pub mod fence;
pub mod file;
pub mod fork;
pub mod huge_pages;
pub mod identity;
pub mod library;
pub mod memory;
pub mod peer_memory;
pub mod plugin;
pub mod probe;
pub mod process_vm;
pub mod rma;
pub mod runs;
pub mod socket;
pub mod thread;
pub mod unix;
pub mod verbs;

mod error;
mod mapping;
mod sealed;
mod sum;

pub use error::HostError;
pub use fence::{FenceSlot, FenceTable, PeerFence};
pub use fork::ForkGuard;
pub use huge_pages::HugePages;
pub use identity::HostFacts;
pub use memory::{Memory, PageInfo};
pub use peer_memory::PeerMemory;
pub use probe::{Probe, Probes};
pub use process_vm::ProcessMemory;
pub use runs::{Io, RecvBatch, RecvRun, RemoteBatch, RunBuffer, SendBatch, SendRun};
