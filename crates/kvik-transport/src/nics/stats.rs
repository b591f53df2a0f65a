//! What a NIC has done.

use kvik_proto::Op;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Counts of one NIC, which only rise, and what it has now.
#[derive(Debug)]
pub struct NicStats {
    name: String,
    read: AtomicU64,
    written: AtomicU64,
    failed: AtomicU64,
    connections: AtomicU64,
    open: AtomicU64,
    up: AtomicBool,
}

impl NicStats {
    pub(super) fn new(name: String) -> NicStats {
        let count = AtomicU64::default;
        NicStats {
            name,
            read: count(),
            written: count(),
            failed: count(),
            connections: count(),
            open: count(),
            up: AtomicBool::new(true),
        }
    }

    /// The device.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Bytes that it has brought from peers.
    pub fn read(&self) -> u64 {
        self.read.load(Ordering::Relaxed)
    }

    /// Bytes that it has put into peers' memory.
    pub fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    /// Operations that failed.
    pub fn failed(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }

    /// Connections to peers' NICs that it has opened.
    pub fn connections(&self) -> u64 {
        self.connections.load(Ordering::Relaxed)
    }

    /// Those of them that are open.
    pub fn open_connections(&self) -> u64 {
        self.open.load(Ordering::Relaxed)
    }

    /// Whether it can be used now.
    pub fn is_up(&self) -> bool {
        self.up.load(Ordering::Relaxed)
    }

    pub(super) fn moved(&self, op: Op, bytes: u64) {
        let count = if op == Op::Read { &self.read } else { &self.written };
        count.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn operation_failed(&self) {
        self.failed.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn connection_opened(&self) {
        self.connections.fetch_add(1, Ordering::Relaxed);
        self.open.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn connection_closed(&self) {
        self.open.fetch_sub(1, Ordering::Relaxed);
    }

    pub(super) fn set_up(&self, up: bool) {
        self.up.store(up, Ordering::Relaxed);
    }
}
