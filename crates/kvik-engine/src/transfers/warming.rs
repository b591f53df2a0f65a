//! Transfers that only make ready what the next ones would wait for.

use super::Transfers;
use crate::sync::lock;
use crate::warm_up::{State, WarmUpState};
use kvik_core::Result;
use kvik_host::clock::boottime;
use kvik_transport::{Transport, TransportId};
use std::sync::Arc;
use std::time::{Duration, Instant};

impl Transfers {
    /// Goes on with a warm-up: asks for what was not asked for, and ends it when all has come.
    pub(super) fn continue_warm_up(&self, id: u64, session: u64, warm: &WarmUpState, deadline: Duration) {
        // Where both sides connect at once there are two sessions for a while. Transfers take one of them.
        let Some(owner) = self.peers.of(session) else { return };
        let session = self.base.node(|node, _| node.session_with(&owner)).unwrap_or(session);
        if warm.session() != Some(session) && self.begin_warm_up(session, warm) {
            self.open_all(session, Instant::now() + deadline.saturating_sub(boottime()));
        }
        // This side's own connection may still come, and be the one that is taken.
        if warm.joined(self.base.transports.channels(session)) && !self.peers.is_dialled(&owner) {
            self.finish_unbegun(id, Ok(()));
        }
    }

    /// Asks for all that this engine's transport allows on a session.
    fn open_all(&self, session: u64, until: Instant) {
        if self.peers.set_warm(session) {
            let want = self.base.setup.config.transport;
            let allowed = self.base.transports.all().iter().filter(|one| want.allows(one.id()));
            allowed.for_each(|one| one.warm(session, until));
        }
    }

    /// A new session that takes the place of a warm one, which its peer has opened at the same time, is warmed too.
    pub fn warm_up_again(&self, session: u64) {
        if self.peers.is_warm_beside(session) {
            self.open_all(session, Instant::now() + self.base.setup.config.deadline);
        }
    }

    /// Notes what there is to do on a session; false when somebody else has, or it is gone.
    fn begin_warm_up(&self, session: u64, warm: &WarmUpState) -> bool {
        let (config, all) = (&self.base.setup.config, &self.base.transports);
        let Some(address) = self.peers.address(session) else { return false };
        let there = self.base.node(|node, _| {
            node.established(session).map_or(0, |session| session.facts.nics.addresses.len())
        });
        // Who opened the session opens its channels. How many the other one opens is not known here.
        let wanted = if address.is_some() { config.channels } else { 1 };
        let reaching: Vec<TransportId> =
            all.reaching(session).filter(|id| config.transport.allows(*id)).collect();
        let rma = all.rma().filter(|rma| reaching.contains(&rma.id()));
        let names = rma.iter().flat_map(|rma| rma.devices()).map(|nic| nic.name().to_owned());
        let names: Vec<String> = names.collect();
        warm.begin(State {
            session: Some(session),
            local: reaching.contains(&TransportId::Local),
            wanted: reaching.contains(&TransportId::Tcp).then_some(wanted),
            channels: all.channels(session),
            channels_made: !all.tcp().is_some_and(|tcp| tcp.is_asked(session)),
            pairs: vec![None; names.len()],
            there,
            names,
            nics: rma.map(|rma| rma.id()),
        })
    }

    /// A NIC here has opened its connection, or cannot.
    pub fn on_warm_up(&self, session: u64, nic: usize, number: usize, outcome: &Result<bool>) {
        self.warm_ups(session).iter().for_each(|warm| warm.note_pair(session, nic, number, outcome));
        self.advance_warm_ups(session);
    }

    /// Something has come that warm-ups of the session may wait for.
    pub fn advance_warm_ups(&self, session: u64) {
        if !self.warm_ups(session).is_empty() {
            self.launch_waiting(session);
        }
    }

    /// The warm-ups that wait for something of a session.
    fn warm_ups(&self, session: u64) -> Vec<Arc<WarmUpState>> {
        let Some(peer) = self.peers.of(session) else { return Vec::new() };
        let table = lock(&self.table);
        let ids = table.waiting_for(&peer);
        ids.into_iter().filter_map(|id| table.entries.get(&id)?.request.warm.clone()).collect()
    }

    /// Ends a warm-up whose time is over, if this is one that has got as far as a session.
    pub(super) fn warm_up_is_late(&self, id: u64) -> bool {
        let warm = lock(&self.table).entries.get(&id).and_then(|entry| entry.request.warm.clone());
        let Some(warm) = warm.filter(|warm| warm.session().is_some_and(|on| self.peers.has(on))) else {
            return false;
        };
        self.finish_unbegun(id, warm.end_late());
        true
    }
}
