//! The peers that have series of their own, and how many of them there are at most.
//!
//! Peers come and go, and a ticket can name any engine, so nothing else bounds their number. One that has a session
//! is kept. Of those without one, the [`MOST_IDLE`] that were heard of last are kept; what was counted for any other
//! goes on under the peer `gone`, so that no total ever falls.

use kvik_core::EngineId;
use std::collections::HashMap;

/// Peers without a session that keep series of their own.
pub(super) const MOST_IDLE: usize = 256;
/// Stands for every peer that was forgotten.
pub(super) const GONE: EngineId = EngineId([0; 16]);

#[derive(Default)]
pub(super) struct Peers {
    known: HashMap<EngineId, Peer>,
    /// How many of them have no session.
    idle: usize,
    /// Rises whenever one is heard of.
    clock: u64,
}

#[derive(Default)]
struct Peer {
    name: String,
    sessions: usize,
    had_session: bool,
    heard: u64,
}

impl Peers {
    /// A peer is counted. Gives another one that must be forgotten for it, if any.
    pub fn hear(&mut self, peer: EngineId) -> Option<EngineId> {
        self.clock += 1;
        let known = self.known.entry(peer).or_insert_with(|| {
            self.idle += 1;
            Peer::default()
        });
        known.heard = self.clock;
        self.forget_one()
    }

    /// A session has begun: whether the peer had one before.
    pub fn begun(&mut self, peer: EngineId, name: &str) -> bool {
        self.clock += 1;
        let known = self.known.entry(peer).or_default();
        if known.sessions == 0 && known.heard > 0 {
            self.idle -= 1;
        }
        known.heard = self.clock;
        known.sessions += 1;
        name.clone_into(&mut known.name);
        std::mem::replace(&mut known.had_session, true)
    }

    /// A session has ended. Gives the peer to forget.
    pub fn ended(&mut self, peer: EngineId) -> Option<EngineId> {
        self.clock += 1;
        let known = self.known.get_mut(&peer).filter(|known| known.sessions > 0)?;
        known.heard = self.clock;
        known.sessions -= 1;
        if known.sessions == 0 {
            self.idle += 1;
        }
        self.forget_one()
    }

    /// What a peer calls itself; empty when it has no name or was not met yet.
    pub fn name(&self, peer: &EngineId) -> &str {
        self.known.get(peer).map_or("", |known| &known.name)
    }

    fn forget_one(&mut self) -> Option<EngineId> {
        if self.idle <= MOST_IDLE {
            return None;
        }
        let idle = self.known.iter().filter(|(_, known)| known.sessions == 0);
        let (oldest, _) = idle.min_by_key(|(_, known)| known.heard)?;
        let oldest = *oldest;
        self.known.remove(&oldest);
        self.idle -= 1;
        Some(oldest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: usize) -> EngineId {
        EngineId((number as u128 + 1).to_le_bytes())
    }

    #[test]
    fn peers_with_a_session_stay_and_the_oldest_others_go() {
        let mut peers = Peers::default();
        assert!(!peers.begun(id(0), "first"));
        for number in 1..=MOST_IDLE {
            assert_eq!(peers.hear(id(number)), None);
        }
        assert_eq!(peers.hear(id(1)), None);
        assert_eq!(peers.hear(id(1000)), Some(id(2)));
        assert_eq!(peers.name(&id(0)), "first");
        assert_eq!(peers.ended(id(0)), Some(id(3)));
        assert!(peers.begun(id(0), "first"));
        assert_eq!(peers.hear(id(1001)), None);
        assert_eq!(peers.hear(id(1002)), Some(id(4)));
        assert_eq!((peers.known.len(), peers.idle), (MOST_IDLE + 1, MOST_IDLE));
    }

    #[test]
    fn sessions_that_end_twice_are_not_counted_twice() {
        let mut peers = Peers::default();
        peers.begun(id(1), "");
        peers.begun(id(1), "");
        peers.ended(id(1));
        assert_eq!(peers.idle, 0);
        peers.ended(id(1));
        peers.ended(id(1));
        assert_eq!(peers.idle, 1);
    }
}
