//! What can happen.

use kvik_core::{EngineId, Error, GrantId, GrantState, Incarnation};
use kvik_transport::TransportId;
use std::fmt;
use std::sync::Arc;

/// A peer, as far as it is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Who {
    /// Its id.
    pub engine: EngineId,
    /// Its start.
    pub incarnation: Incarnation,
    /// What it calls itself; empty when it does not.
    pub name: String,
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name.is_empty() {
            true => write!(f, "engine {}", self.engine),
            false => write!(f, "engine {} ({})", self.engine, self.name),
        }
    }
}

/// What happened.
#[derive(Debug, Clone)]
pub enum Event {
    /// There is a session with the peer, or it was heard again after it was suspect; with the reason.
    PeerUp(Who, &'static str),
    /// Nothing was heard from the peer for half of the time after which it is dead.
    PeerSuspect(Who),
    /// The last session with the peer has ended, and why.
    PeerLost(Who, Error),
    /// Another engine listens where this peer was reached: it was started anew, and its tickets are void.
    PeerRestarted(Who, Error),
    /// A grant has ended: its pages are the owner's again.
    GrantEnded(GrantId, GrantState),
    /// A grant is over, and so many of its pages may still be touched by a transfer.
    PagesQuarantined(GrantId, u64),
    /// So many pages that were said to be in quarantine are the owner's again.
    PagesReturned(GrantId, u64),
    /// A transfer with this peer goes over another transport than was chosen first.
    TransportChanged {
        /// With whom.
        peer: Who,
        /// What was chosen.
        from: TransportId,
        /// What is used.
        to: TransportId,
        /// Why.
        reason: String,
    },
    /// A notification of this peer.
    Notification(Who, Arc<[u8]>),
    /// So many events before this one were dropped, because they were not taken.
    EventsLost(u64),
}

impl Event {
    /// The word for it.
    pub fn name(&self) -> &'static str {
        match self {
            Event::PeerUp(..) => "peer_up",
            Event::PeerSuspect(_) => "peer_suspect",
            Event::PeerLost(..) => "peer_lost",
            Event::PeerRestarted(..) => "peer_restarted",
            Event::GrantEnded(..) => "grant_ended",
            Event::PagesQuarantined(..) => "pages_quarantined",
            Event::PagesReturned(..) => "pages_returned",
            Event::TransportChanged { .. } => "transport_changed",
            Event::Notification(..) => "notification",
            Event::EventsLost(_) => "events_lost",
        }
    }
}
