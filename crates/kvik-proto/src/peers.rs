//! How the sessions stand, for those who watch them.

use crate::handshake::Identity;
use std::time::Duration;

/// One session, as it stands now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionState {
    /// Its number.
    pub session: u64,
    /// With whom.
    pub peer: Identity,
    /// How long ago something was heard from the peer.
    pub silent: Duration,
    /// Nothing was heard for half of the time after which the peer is dead.
    pub suspect: bool,
    /// This side has said goodbye.
    pub leaving: bool,
    /// Transfers in it that are open, of either side.
    pub transfers: usize,
}
