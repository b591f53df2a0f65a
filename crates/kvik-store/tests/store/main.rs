//! A store within a process: what goes in comes out, or nothing does.

mod blocks;
mod crash;
mod crowd;
mod durable;
mod eviction;
mod identity;
mod replayed;
mod rig;
mod tracer;
