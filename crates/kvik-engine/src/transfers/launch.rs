//! Where transfers wait, and over what they go.

use super::Transfers;
use super::request::{Taken, TransferEntry, TransferRequest};
use crate::commands::ControlCommand;
use crate::config::Preference;
use crate::select::{Selection, select};
use crate::sync::lock;
use kvik_core::{Code, Error, Result};
use kvik_proto::{Identity, Op, Path};
use kvik_transport::{Estimate, Request, from_host};

impl Transfers {
    /// A transfer waits, until its deadline.
    pub fn wait(&self, id: u64) {
        let mut table = lock(&self.table);
        let Some(deadline) = table.entries.get(&id).map(|entry| entry.request.deadline) else { return };
        table.set_waiting(id, true);
        drop(table);
        self.base.commands.wake_by(deadline);
    }

    /// A transfer begins: whatever it waited for at first is there.
    pub fn set_out(&self, id: u64) {
        let own = {
            let mut table = lock(&self.table);
            let Some(entry) = table.entries.get_mut(&id) else { return };
            entry.after_stream = false;
            let own = entry.request.ticket.engine == self.base.setup.id();
            table.set_waiting(id, false);
            own
        };
        match own {
            true => self.begin(id, None, Taken::own()),
            false => self.take_up(id),
        }
    }

    /// Takes up a transfer whose owner is a peer: launches it, or lets it wait for a session.
    pub fn take_up(&self, id: u64) {
        let owner = match lock(&self.table).entries.get(&id) {
            Some(entry) => entry.request.owner(),
            None => return,
        };
        match self.base.node(|node, _| node.session_with(&owner)) {
            Some(session) => self.launch(id, session),
            None => self.wait_for_session(id, owner),
        }
    }

    fn wait_for_session(&self, id: u64, owner: Identity) {
        if let Err(error) = self.peers.table.check(&owner) {
            return self.give_up(id, error);
        }
        let mut table = lock(&self.table);
        let Some(entry) = table.entries.get(&id) else { return };
        let (ticket, deadline) = (entry.request.ticket.clone(), entry.request.deadline);
        table.set_waiting(id, true);
        drop(table);
        self.base.commands.tell(ControlCommand::Dial(owner, ticket));
        self.base.commands.wake_by(deadline);
    }

    /// Begins a transfer on a session, over the transport that is selected for it.
    pub fn launch(&self, id: u64, session: u64) {
        let mut table = lock(&self.table);
        let Some(entry) =
            table.entries.get_mut(&id).filter(|entry| entry.key.is_none() && !entry.after_stream)
        else {
            return;
        };
        let chosen = self.choose(entry, session);
        // Under the lock: whoever ends the session looks for those that wait afterwards. And after the choice: of a session
        // that has gone meanwhile, no transport has more to say than that.
        if !self.peers.has(session) {
            drop(table);
            return self.lost_before(id, Error::new(
                Code::PeerLost,
                "the connection to the peer broke before the transfer could go on; a new transfer connects again",
            ));
        }
        let deadline = entry.request.deadline;
        let taken = match chosen {
            Ok(Some(taken)) => taken,
            Ok(None) => {
                table.set_waiting(id, true);
                drop(table);
                return self.base.commands.wake_by(deadline);
            }
            Err(error) => {
                drop(table);
                return self.give_up(id, error);
            }
        };
        if let Some(warm) = entry.request.warm.clone() {
            entry.taken = Some(taken);
            table.set_waiting(id, true);
            drop(table);
            self.base.commands.wake_by(deadline);
            return self.continue_warm_up(id, session, &warm, deadline);
        }
        let moves = entry.request.moves();
        drop(table);
        // What moves nothing, such as a question for the transport, needs nothing opened.
        if let Some(by) = taken.by.as_ref().filter(|_| moves) {
            by.open(session);
        }
        self.begin(id, Some(session), taken);
    }

    /// How long so many bytes would take on a session, by what was measured on it, over the transport that would be
    /// taken; none where nothing was measured, or that is not known yet.
    pub fn estimate(&self, session: u64, want: Preference, bytes: u64) -> Option<Estimate> {
        let request = Request { session, op: None, memory: None, bytes };
        let transports = self.base.transports.all().iter();
        let answers = transports.map(|transport| (transport.id(), transport.answer(&request)));
        match select(want, &[], answers) {
            Selection::Taken { estimate, .. } => estimate,
            Selection::Wait | Selection::None(_) => None,
        }
    }

    /// The transport that a transfer takes; none while one that is preferred is still opening.
    pub(super) fn choose(&self, entry: &TransferEntry, session: u64) -> Result<Option<Taken>> {
        let transports = self.base.transports.all();
        let request = entry.request.request(session);
        let answers = transports.iter().map(|transport| (transport.id(), transport.answer(&request)));
        match select(entry.request.want, &entry.refused, answers) {
            Selection::Taken { place, estimate, rejected } => {
                let by = &transports[place];
                let (id, path, by) = (by.id(), by.path(), Some(by.clone()));
                Ok(Some(Taken { id, path, by, session, estimate, rejected }))
            }
            Selection::Wait => Ok(None),
            Selection::None(error) => Err(error),
        }
    }

    /// A fence slot, where the peer copies from this side's memory.
    fn fence_of(&self, entry: &mut TransferEntry, taken: &Taken) -> Result<Option<(u32, u64)>> {
        if (taken.path, entry.request.op) != (Path::Memory, Some(Op::Write)) || taken.by.is_none() {
            return Ok(None);
        }
        let slot = self.base.fence.slot().map_err(|error| from_host(Code::MemoryCapReached, error))?;
        let generation = slot.generation().map_err(|error| from_host(Code::ProtocolError, error))?;
        let index = slot.index();
        entry.fence = Some(slot);
        Ok(Some((index, generation)))
    }

    /// Begins a launched transfer, unless it was cancelled or begun meanwhile: what it has taken is its own only then.
    /// Without a session its owner is this engine.
    fn begin(&self, id: u64, session: Option<u64>, taken: Taken) {
        let began: Result<(), Option<Error>> = self.base.node(|node, now| {
            let mut table = lock(&self.table);
            let free = |entry: &&mut TransferEntry| entry.key.is_none() && entry.stopped.is_none();
            let Some(entry) = table.entries.get_mut(&id).filter(free) else { return Ok(()) };
            let channels = if session.is_some() { self.base.setup.config.channels } else { 1 };
            let (path, fence) = (taken.path, self.fence_of(entry, &taken).map_err(Some)?);
            entry.taken = Some(taken);
            let Some(open) = entry.request.open(path, channels, fence) else { return Err(None) };
            let key = match session {
                Some(session) => node.session(session).begin(open, now).map_err(Some)?,
                None => node.begin_own(open, now).map_err(Some)?,
            };
            (entry.key, entry.begun) = (Some(key), now);
            let TransferRequest { ticket, tag, .. } = &entry.request;
            log::debug!(engine:% = self.base.setup.id(), transfer = id, grant:% = ticket.grant, peer:% = ticket.engine, request:% = tag; "transfer begun");
            table.set_waiting(id, false);
            table.by_key.insert(key, id);
            Ok(())
        });
        match began {
            Ok(()) => {}
            // Only the route was asked for.
            Err(None) => self.finish_unbegun(id, Ok(())),
            Err(Some(error)) if error.code == Code::PeerLost => self.lost_before(id, error),
            Err(Some(error)) => self.give_up(id, error),
        }
    }

    /// The session broke before a transfer began on it: it waits for another one, a few times.
    fn lost_before(&self, id: u64, error: Error) {
        let again = {
            let mut table = lock(&self.table);
            let Some(entry) = table.entries.get_mut(&id) else { return };
            let again = entry.retries > 0;
            entry.retries = entry.retries.saturating_sub(1);
            again.then(|| entry.request.owner())
        };
        match again {
            Some(owner) => self.wait_for_session(id, owner),
            None => self.give_up(id, error),
        }
    }

    /// Transfers that waited for this session, or for its local link, go on.
    pub fn launch_waiting(&self, session: u64) {
        let Some(peer) = self.base.node(|node, _| node.established(session).map(|session| session.peer))
        else {
            return;
        };
        let ids = lock(&self.table).waiting_for(&peer);
        ids.into_iter().for_each(|id| self.launch(id, session));
    }

    /// Transfers that wait for a session with this peer have waited in vain, unless the peer has come by itself.
    pub fn fail_waiting(&self, owner: &Identity, error: &Error) {
        if let Some(session) = self.base.node(|node, _| node.session_with(owner)) {
            return self.launch_waiting(session);
        }
        let ids = lock(&self.table).waiting_for(owner);
        ids.into_iter().for_each(|id| self.give_up(id, error.clone()));
    }

    /// A session with this peer broke: transfers that waited for something of it wait for another one.
    pub fn wait_again(&self, owner: &Identity, error: &Error) {
        let (mut over, mut ticket) = (Vec::new(), None);
        {
            let mut table = lock(&self.table);
            if self.peers.is_dialled(owner) {
                return;
            }
            for id in table.waiting_for(owner) {
                match table.entries.get_mut(&id).map(|entry| (entry.retries, entry)) {
                    Some((0, _)) => over.push(id),
                    Some((_, entry)) => {
                        entry.retries -= 1;
                        ticket = Some(entry.request.ticket.clone());
                    }
                    None => {}
                }
            }
        }
        over.into_iter().for_each(|id| self.give_up(id, error.clone()));
        if let Some(ticket) = ticket {
            self.base.commands.tell(ControlCommand::Dial(*owner, ticket));
        }
    }
}

#[cfg(test)]
#[path = "../../tests/unit/launch.rs"]
mod tests;
