//! Engines as their users see them: over real sockets and shared memory, in this process and in others.
//!
//! Everything is bounded, binds loopback only, and prints the seed of what it draws (`KVIK_SEED` repeats it).

mod addresses;
mod caps;
mod common;
mod deaths;
mod estimates;
mod events;
mod grants;
mod handover;
mod inboxes;
mod joint;
mod local;
mod meeting;
mod peers;
mod races;
mod transfers;
mod wire;
