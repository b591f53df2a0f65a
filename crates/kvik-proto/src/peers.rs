//! How the sessions stand, for those who watch them.

use crate::handshake::Identity;
use crate::node::{Event, Node};
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

impl<R: Clone> Node<R> {
    /// Every session, as it stands now.
    pub fn session_states(&self, now: Duration) -> Vec<SessionState> {
        let state = |(id, session): (&u64, &crate::session::Session)| SessionState {
            session: *id,
            peer: session.established.peer,
            silent: now.saturating_sub(session.last_in),
            suspect: session.suspect,
            leaving: session.leaving,
            transfers: self.transfers_in(*id),
        };
        self.sessions.iter().map(state).collect()
    }

    /// Transfers of a session that are open, which may outlive it for as long as it takes to stop them.
    pub fn transfers_in(&self, session: u64) -> usize {
        self.flows.range((session, 0)..=(session, u64::MAX)).count()
    }

    /// Something has come from the peer of a session: it lives.
    pub(crate) fn heard(&mut self, id: u64, now: Duration) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        session.last_in = now;
        if std::mem::take(&mut session.suspect) {
            self.events.push_back(Event::Heard(id));
        }
    }
}
