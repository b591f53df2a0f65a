//! By what memory came back that somebody still used when its transfer or its grant was over.
//!
//! The steps of reclaiming, from the cheapest on. Which one it took tells an operator what a peer that is slow, stopped
//! or dead costs, and a test that the path which it means to try is the one that was taken.

/// What gave memory back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reclaim {
    /// Threads and NICs of this side let go of it: nobody else touches it.
    Released,
    /// The peer, whose NIC may have used it, said that it has stopped.
    Acknowledged,
    /// The path to the peer was cut, since the peer is gone or does not answer.
    Disconnected,
}

impl Reclaim {
    /// Each of them.
    pub const ALL: [Reclaim; 3] = [Reclaim::Released, Reclaim::Acknowledged, Reclaim::Disconnected];

    /// Its word in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Reclaim::Released => "released",
            Reclaim::Acknowledged => "acknowledged",
            Reclaim::Disconnected => "disconnected",
        }
    }
}

/// How often each step was the one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReclaimCounts {
    /// Of grants that ended while a transfer used their pages: what freed the last of them.
    pub grants: [u64; 3],
    /// Of transfers that this side began and that ended without success.
    pub transfers: [u64; 3],
}
