//! The protocol in a world without machines: two or three nodes, model memory, pipes, channels and a clock.

mod checks;
mod classes;
mod content;
mod endings;
mod executors;
mod grants;
mod hostile;
mod memory;
mod notes;
mod onesided;
mod parts;
mod readers;
mod rings;
mod sessions;
mod shaking;
mod transfers;
mod windows;
mod world;
