//! The simulator: two to five engines (or 320) on model memory, model networks and clocks of their own, and an
//! adversary who delays, reorders, drops, doubles, cuts, crashes and restarts. All of it is one seed.
//!
//! `KVIK_SEED=n KVIK_SCHEDULES=1 cargo test -p kvik-proto --test sim` runs schedule n again.

mod adversary;
mod channels;
mod claims;
mod coverage;
mod engine;
mod events;
mod executors;
mod link;
mod many;
mod memory;
mod nic;
mod notes;
mod promises;
mod schedule;
mod schedules;
mod world;
