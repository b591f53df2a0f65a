//! By what memory came back that somebody still used when its transfer or its grant was over.
//!
//! The ladder's rungs, from the cheapest on. Which one it took tells an operator what a peer that is slow, stopped or
//! dead costs, and a test that the path which it means to try is the one that was taken.

use crate::flow::{Flow, Work};

/// What gave memory back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Rung {
    /// Threads and NICs of this side let go of it: nobody else touches it.
    Own,
    /// The peer, whose NIC may have used it, said that it has stopped.
    Answered,
    /// The path to the peer was cut, since the peer is gone or does not answer.
    Cut,
}

impl Rung {
    /// Each of them.
    pub const ALL: [Rung; 3] = [Rung::Own, Rung::Answered, Rung::Cut];

    /// Its word in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Rung::Own => "own",
            Rung::Answered => "answered",
            Rung::Cut => "cut",
        }
    }
}

/// How often each rung was the one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rungs {
    /// Of grants that ended while a transfer used their pages: what freed the last of them.
    pub grants: [u64; 3],
    /// Of transfers that this side began and that ended without success.
    pub transfers: [u64; 3],
}

impl Rung {
    /// By what a flow, which has just concluded, let go of its memory; `live`: its session is not over.
    pub(crate) fn of<R>(flow: &Flow<R>, live: bool) -> Rung {
        if !flow.is_own() && !live {
            return Rung::Cut;
        }
        match flow.work {
            Work::Expose(_) => Rung::Answered,
            Work::Wait | Work::Send | Work::Place | Work::Copy | Work::Post => Rung::Own,
        }
    }
}
