//! A peer, for whoever asks.

use crate::transports::Transports;
use kvik_core::{EngineId, Incarnation};
use kvik_transport::TransportId;
use std::net::SocketAddr;
use std::time::Duration;

/// How a peer stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PeerState {
    /// It is being reached for the first time.
    Connecting,
    /// There is a session, and the peer is heard.
    Up,
    /// There is a session, and nothing was heard for half of the time after which the peer is dead.
    Suspect,
    /// The session is ending in order: by the peer's goodbye, or because this engine closes.
    Draining,
    /// There is no session any more.
    Dead,
}

impl PeerState {
    /// Every state.
    pub const ALL: [PeerState; 5] =
        [PeerState::Connecting, PeerState::Up, PeerState::Suspect, PeerState::Draining, PeerState::Dead];

    /// The word for it.
    pub fn name(self) -> &'static str {
        match self {
            PeerState::Connecting => "connecting",
            PeerState::Up => "up",
            PeerState::Suspect => "suspect",
            PeerState::Draining => "draining",
            PeerState::Dead => "dead",
        }
    }
}

/// A peer, as it stands now.
#[derive(Debug, Clone)]
pub struct Peer {
    /// Its id.
    pub engine: EngineId,
    /// Its start.
    pub incarnation: Incarnation,
    /// What it calls itself; empty when it does not, or was not met yet.
    pub name: String,
    /// Where this side reached it; none when it came by itself.
    pub address: Option<SocketAddr>,
    /// How it stands.
    pub state: PeerState,
    /// Since something was heard from it; of a dead one, since its session ended. None when it was never met.
    pub silent: Option<Duration>,
    /// What transfers with it can go over.
    pub transports: Vec<TransportId>,
    /// Data channels that have joined.
    pub channels: u16,
    /// Transfers with it that are open, of either side.
    pub transfers: usize,
    /// It was lost, and is dialled again in the background.
    pub reconnecting: bool,
    /// Why it is dead; empty when it is not.
    pub reason: String,
}

impl Peer {
    /// One of its sessions.
    pub(super) fn add(&mut self, over: &Transports, session: u64) {
        self.channels += over.channels(session);
        for transport in over.reaching(session) {
            if !self.transports.contains(&transport) {
                self.transports.push(transport);
            }
        }
    }
}
