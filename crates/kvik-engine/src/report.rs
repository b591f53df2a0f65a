//! What can be chosen for a transfer, and what it reports.

use crate::config::{Preference, Verify};
use crate::select::Rejected;
use kvik_core::{Class, Content, PageSums};
use kvik_host::device::CallerStream;
use kvik_transport::{Estimate, TransportId};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// What can be chosen for one transfer; what is not chosen is the engine's, or the grant's.
#[derive(Debug, Clone, Default)]
pub struct TransferOptions {
    /// When it must have ended, from now.
    pub deadline: Option<Duration>,
    /// What it is for: handovers, the default, go before bulk, which keeps a tenth while both wait.
    pub class: Class,
    /// Over which transport.
    pub transport: Option<Preference>,
    /// With which checks.
    pub verify: Option<Verify>,
    /// Whether success counts as this engine's use of a `once` grant; true unless told. False for all but the last
    /// part of a transfer in parts.
    pub confirm: Option<bool>,
    /// Layers of the owner's layout, of those that are granted.
    pub remote_layers: Option<Range<u32>>,
    /// Slices of the owner's layout, of those that are granted.
    pub remote_slices: Option<Range<u32>>,
    /// In how many parts the owner's pages are seen, a multiple of those of the grant: positions count such parts, see
    /// [`PageSet::of_parts`](crate::PageSet::of_parts). Default: as the grant was given.
    pub remote_parts: Option<u32>,
    /// What the grant's pages are taken to hold, or are written to hold. A grant that says what its pages hold demands
    /// it, and any other refuses it. It has a link for each page of the grant up to the last that is named, or more;
    /// where no positions are named it is that of the whole grant. A release or an extension states the whole grant's.
    pub content: Option<Content>,
    /// How many engines use the grant together, this one included: a `once` grant is consumed when so many, or as
    /// many as the owner said where that is more, have confirmed. From 1 to 4096; the largest that any of them
    /// declares is what counts. Default: 1.
    pub readers: Option<u16>,
    /// Of a read: checksums of this side's pages are wanted, of so many layers of a page each. Threads that place bytes
    /// sum them while they have them in their cache; see [`Report::sums`].
    pub sums: Option<u32>,
    /// A stream of the device that this side's pages lie on: nothing of them is read or written before it has done what
    /// it was given up to this call. The deadline counts from the call. Default: none, the pages are free.
    pub after: Option<CallerStream>,
    /// A request id for this side's log lines; it is never sent.
    pub tag: String,
}

/// What several reads that succeeded as one did.
#[derive(Debug, Clone)]
pub struct JointReport {
    /// Bytes that all of them moved.
    pub bytes: u64,
    /// All of it, from call to the end of the last.
    pub total: Duration,
    /// Of each, in the order of the call. Their times count from the call, and planning one takes until those before it
    /// are planned.
    pub reads: Arc<[Report]>,
}

/// What a transfer that succeeded did.
#[derive(Debug, Clone)]
pub struct Report {
    /// Bytes that were moved.
    pub bytes: u64,
    /// Contiguous runs of memory that they took, neighbours merged: on both sides where this side copied, else on
    /// this side.
    pub extents: u64,
    /// Pages of this side's page set, or parts of pages.
    pub pages: u64,
    /// What moved them.
    pub transport: TransportId,
    /// How, in more detail: `"4 channels"`, `"4 channels, staged for GPU 0"`, `"memfd"`, `"process_vm_readv"`,
    /// `"cuda_ipc"`, `"copy"`.
    pub mechanism: String,
    /// The checks that ran.
    pub checks: Vec<&'static str>,
    /// Time to plan it.
    pub plan: Duration,
    /// Time from there until the first byte could move: connecting, asking the owner.
    pub post: Duration,
    /// Time from the first byte until the end.
    pub wire: Duration,
    /// Time spent on checksums on this side, summed over threads; part of `wire`.
    pub verify: Duration,
    /// All of it, from call to end.
    pub total: Duration,
    /// How long it was expected to take on that transport, by what was measured with this peer before.
    pub estimate: Option<Estimate>,
    /// The checksums that [`TransferOptions::sums`] asks for, as far as the transport has made them; see
    /// [`PageSet::sums_after`](crate::PageSet::sums_after).
    pub sums: Option<Arc<PageSums>>,
    /// The other transports of the engine, each with the reason why it was not taken.
    pub rejected_transports: Vec<Rejected>,
}
