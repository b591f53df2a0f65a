//! What the fuzzers call. Each target takes any bytes, and panics if what they reach breaks a promise.
//!
//! `fuzz/fuzz_targets` links each with libFuzzer and sanitizers; `tests/corpus.rs` runs each over the committed corpus
//! and over seeded mutations of it, with no tool but cargo. A target keeps no state between two calls that would
//! change what the next one does.

mod addresses;
mod channel;
mod counting;
mod feed;
mod frames;
mod greetings;
mod layouts;
mod local;
mod message;
mod node;
mod router;
mod segment;
mod stat;
mod tickets;

pub use counting::most_held;

/// Takes any bytes, and panics if they break a promise.
pub type Target = fn(&[u8]);

/// Every target by name, in the order in which they are run.
pub const TARGETS: &[(&str, Target)] = &[
    ("frame", frames::frame),
    ("node", node::node),
    ("greeting", greetings::greeting),
    ("join", greetings::join),
    ("chunk", channel::chunk),
    ("channel", channel::channel),
    ("ticket", tickets::ticket),
    ("layout", layouts::layout),
    ("local", local::local),
    ("stat", stat::stat),
    ("router", router::router),
    ("address", addresses::address),
    ("segment", segment::segment),
    ("message", message::message),
];

/// Runs a target.
///
/// # Panics
/// When there is no such target, and with what it finds.
pub fn run(name: &str, data: &[u8]) {
    let target = TARGETS.iter().find(|(other, _)| *other == name);
    target.unwrap_or_else(|| panic!("no target {name:?}")).1(data);
}
