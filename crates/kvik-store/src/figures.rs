//! What a store counts for those who watch it: by tenant, by tier, by cause.
//!
//! All of it but [`Latencies`] is changed under the lock of the store's state, where the blocks are looked at anyway. So
//! what is read at one time fits together.

use crate::histogram::Histogram;
use crate::policy::PolicyKind;
use kvik_core::Code;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Where a block lay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Where {
    Memory,
    Log,
    Object,
}

impl Where {
    pub const ALL: [Where; 3] = [Where::Memory, Where::Log, Where::Object];

    pub fn name(self) -> &'static str {
        match self {
            Where::Memory => "memory",
            Where::Log => "log",
            Where::Object => "object",
        }
    }
}

/// Why a block of a put was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cause {
    /// The block before the first one is not here.
    ParentMissing,
    /// All that its tenant may have is in use, or less than the block.
    Quota,
    /// It is not worth another one's place, so far.
    NotAdmitted,
    /// Nothing can go, and much of it is being read.
    HeldByReaders,
    /// Nothing can go, and much of it was asked to stay.
    Pinned,
    /// Nothing can go: it is on its way, or has others behind it. Or its removal is still being said, or it is larger than
    /// the memory.
    InUse,
    /// Its bytes did not come.
    Lost,
}

impl Cause {
    pub const ALL: [Cause; 7] = [
        Cause::ParentMissing,
        Cause::Quota,
        Cause::NotAdmitted,
        Cause::HeldByReaders,
        Cause::Pinned,
        Cause::InUse,
        Cause::Lost,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Cause::ParentMissing => "parent_missing",
            Cause::Quota => "quota",
            Cause::NotAdmitted => "not_admitted",
            Cause::HeldByReaders => "held_by_readers",
            Cause::Pinned => "pinned",
            Cause::InUse => "in_use",
            Cause::Lost => "lost",
        }
    }
}

/// What was done for a tenant, or for all that share a series. Arrays are by [`Where`].
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct OfTenant {
    /// Blocks that gets asked for, up to the first one that was not here, and those behind it.
    pub asked: u64,
    pub hits: [u64; Where::ALL.len()],
    pub bytes_in: [u64; Where::ALL.len()],
    pub bytes_out: [u64; Where::ALL.len()],
}

/// See the module's text.
pub(crate) struct Figures {
    tenants: Vec<OfTenant>,
    refused: [u64; Cause::ALL.len()],
    failed: BTreeMap<&'static str, u64>,
    evicted: [u64; PolicyKind::FIXED.len()],
    /// Loads and puts of somebody else that were waited for, or left to him.
    pub waits: u64,
    /// Between a block's put or last use and its next one.
    pub reuse_gap: Histogram,
    /// Between an evicted block's put or last use and its eviction.
    pub idle: Histogram,
}

impl Figures {
    pub fn new() -> Figures {
        Figures {
            tenants: Vec::new(),
            refused: Default::default(),
            failed: BTreeMap::new(),
            evicted: Default::default(),
            waits: 0,
            reuse_gap: Histogram::of_ages(),
            idle: Histogram::of_ages(),
        }
    }

    /// Of the tenants of a series, see [`crate::tenants::Tenants::series`].
    pub fn of(&mut self, series: u16) -> &mut OfTenant {
        let at = usize::from(series);
        if self.tenants.len() <= at {
            self.tenants.resize(at + 1, OfTenant::default());
        }
        &mut self.tenants[at]
    }

    /// All series, by their numbers; one that nothing was done for may be missing at the end.
    pub fn tenants(&self) -> &[OfTenant] {
        &self.tenants
    }

    pub fn refuse(&mut self, cause: Cause, blocks: u64) {
        self.refused[cause as usize] += blocks;
    }

    pub fn refused(&self, cause: Cause) -> u64 {
        self.refused[cause as usize]
    }

    /// A request was answered with an error.
    pub fn fail(&mut self, code: Code) {
        *self.failed.entry(code.name()).or_default() += 1;
    }

    /// Requests that were answered with an error, by its code.
    pub fn failed(&self) -> &BTreeMap<&'static str, u64> {
        &self.failed
    }

    /// A copy in memory made room, as this policy wanted, so long after its last use.
    pub fn evict(&mut self, policy: &str, idle: Duration) {
        let at = PolicyKind::FIXED.iter().position(|kind| kind.name() == policy);
        at.iter().for_each(|at| self.evicted[*at] += 1);
        self.idle.add(idle);
    }

    /// Copies in memory that made room, by the policy that wanted it.
    pub fn evicted(&self) -> impl Iterator<Item = (PolicyKind, u64)> + '_ {
        PolicyKind::FIXED.into_iter().zip(self.evicted)
    }
}

/// How long operations take, from when a request came.
pub(crate) struct Latencies {
    /// Until a get's first block may be read, by where that lay.
    pub first: [Histogram; Where::ALL.len()],
    /// Until the client has read all that a get found, by the furthest tier that one of them came from.
    pub get: [Histogram; Where::ALL.len()],
    /// Until a put's blocks are in memory, or on the disk.
    pub put: [Histogram; Where::ALL.len()],
    /// Of one block from the log into memory, without waiting for others.
    pub load: Histogram,
    /// Of one request to the object store, for blocks that lie together there.
    pub fetch: Histogram,
}

impl Latencies {
    pub fn new() -> Latencies {
        let pair = || Where::ALL.map(|_| Histogram::of_latencies());
        Latencies {
            first: pair(),
            get: pair(),
            put: pair(),
            load: Histogram::of_latencies(),
            fetch: Histogram::of_latencies(),
        }
    }

    /// Every histogram with the operation and the tier that it is of.
    pub fn all(&self) -> impl Iterator<Item = (&'static str, Where, &Histogram)> {
        let by_tier = [("get_first", &self.first), ("get", &self.get), ("put", &self.put)];
        let pairs = by_tier.into_iter().flat_map(|(op, pair)| {
            Where::ALL.into_iter().zip(pair).map(move |(tier, histogram)| (op, tier, histogram))
        });
        pairs.chain([("load", Where::Log, &self.load), ("load", Where::Object, &self.fetch)])
    }
}

/// One get, until the client has read the last block that it found: whoever lends blocks of it has a reference.
pub(crate) struct Whole {
    latencies: Arc<Latencies>,
    began: Instant,
    /// The furthest tier that a block of it came from.
    from: AtomicUsize,
    /// It found something, and all of it was read.
    counts: AtomicBool,
}

impl Whole {
    pub fn new(latencies: Arc<Latencies>, began: Instant) -> Whole {
        Whole {
            latencies,
            began,
            from: AtomicUsize::new(Where::Memory as usize),
            counts: AtomicBool::new(true),
        }
    }

    /// A block of it came from this tier.
    pub fn note_tier(&self, tier: Where) {
        self.from.fetch_max(tier as usize, Ordering::Relaxed);
    }

    /// It found nothing, failed, or was not read to its end: what it took means nothing.
    pub fn discount(&self) {
        self.counts.store(false, Ordering::Relaxed);
    }
}

impl Drop for Whole {
    fn drop(&mut self) {
        if self.counts.load(Ordering::Relaxed) {
            let tier = self.from.load(Ordering::Relaxed);
            self.latencies.get[tier].add(self.began.elapsed());
        }
    }
}
