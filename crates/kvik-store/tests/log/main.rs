//! The log tier: what it keeps, and what crashes, damage and failing disks do to it.

mod basics;
mod blocks;
mod crash;
mod damage;
mod disk;
mod faults;
mod owner;
mod power;
mod processes;
mod room;
mod unreadable;
mod workload;
