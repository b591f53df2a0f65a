//! A store within a process: what goes in comes out, or nothing does.

mod blocks;
mod bucket;
mod crash;
mod crowd;
mod durable;
mod early;
mod eviction;
mod failing;
mod figures;
mod identity;
mod lent;
mod many;
mod meddled;
mod members;
mod namespaces;
mod objects;
mod replayed;
mod rig;
mod schedules;
mod served;
mod stopped;
mod survey;
mod tracer;
#[path = "../../../../tests/common/watch.rs"]
mod watch;
