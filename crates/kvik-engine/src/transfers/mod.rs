//! The transfers that this side began.
//!
//! - [`request`]: what a transfer is to do, and how far it is;
//! - [`launch`]: where transfers wait, and over what they go;
//! - [`warming`]: those that only make ready;
//! - [`outcome`]: how they end, and what is reported of them;
//! - [`joint`]: those that end as one.

pub(crate) mod joint;
mod launch;
mod outcome;
pub(crate) mod request;
mod warming;

use crate::base::Base;
use crate::peers::{Peers, Target};
use crate::sync::lock;
use kvik_core::{Code, Error, RegionId, Result};
use kvik_host::clock::boottime;
use kvik_proto::{FlowKey, Identity};
use request::TransferEntry;
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// See the module's text.
pub(crate) struct Transfers {
    base: Arc<Base>,
    peers: Arc<Peers>,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    entries: HashMap<u64, TransferEntry>,
    by_key: HashMap<FlowKey, u64>,
    /// Those that wait for a session, for something of one, or for a stream of a device, by their deadlines.
    waiting: BTreeSet<(Duration, u64)>,
    last: u64,
}

impl Table {
    fn set_waiting(&mut self, id: u64, waits: bool) {
        let Some(entry) = self.entries.get(&id) else { return };
        let key = (entry.request.deadline, id);
        // What has begun is the protocol's to end.
        match waits && entry.key.is_none() {
            true => drop(self.waiting.insert(key)),
            false => drop(self.waiting.remove(&key)),
        }
    }

    fn waiting_for(&self, owner: &Identity) -> Vec<u64> {
        let of_peer = |id: &u64| {
            self.entries.get(id).is_some_and(|entry| !entry.after_stream && entry.request.owner() == *owner)
        };
        self.waiting.iter().map(|(_, id)| *id).filter(of_peer).collect()
    }
}

impl Transfers {
    pub fn new(base: Arc<Base>, peers: Arc<Peers>) -> Transfers {
        Transfers { base, peers, table: Mutex::default() }
    }

    /// # Errors
    /// `EngineForked`.
    pub fn check_fork(&self) -> Result<()> {
        self.base.setup.check_fork()
    }

    /// Takes transfers in, and says their numbers before anybody else finds them. Their memory is in use from now on.
    pub fn add(
        &self,
        entries: impl IntoIterator<Item = TransferEntry>,
        numbered: impl FnOnce(Range<u64>),
    ) -> Range<u64> {
        let mut table = lock(&self.table);
        let first = table.last + 1;
        for entry in entries {
            table.last += 1;
            let id = table.last;
            table.entries.insert(id, entry);
        }
        let ids = first..table.last + 1;
        numbered(ids.clone());
        ids
    }

    /// Those that have not ended.
    pub fn open(&self) -> Vec<u64> {
        lock(&self.table).entries.keys().copied().collect()
    }

    /// How many have not ended.
    pub fn count(&self) -> usize {
        lock(&self.table).entries.len()
    }

    /// Those that use a region, in words.
    pub fn using(&self, region: RegionId) -> Vec<String> {
        let table = lock(&self.table);
        let uses = table.entries.values().map(|entry| &entry.request);
        let uses = uses.filter(|request| request.memory.as_ref().is_some_and(|(_, id, _)| *id == region));
        uses.map(|request| {
            format!("with engine {} over grant {}", request.ticket.engine, request.ticket.grant)
        })
        .collect()
    }

    /// When the next one has waited in vain.
    pub fn next_deadline(&self) -> Option<Duration> {
        lock(&self.table).waiting.first().map(|(deadline, _)| *deadline)
    }

    /// Ends those that have waited until their deadlines.
    pub fn end_late(&self) {
        let now = boottime();
        let late: Vec<(u64, Option<Identity>)> = {
            let table = lock(&self.table);
            let owner = |id| table.entries.get(id).map(|e| (!e.after_stream).then(|| e.request.owner()));
            let late = table.waiting.iter().take_while(|(deadline, _)| *deadline <= now);
            late.filter_map(|(_, id)| Some((*id, owner(id)?))).collect()
        };
        for (id, owner) in late {
            if !self.warm_up_is_late(id) {
                self.give_up(id, owner.map_or_else(stream_is_late, |owner| self.why_waited(&owner)));
            }
        }
    }

    /// Why a transfer that waited for a session until its deadline did so.
    fn why_waited(&self, owner: &Identity) -> Error {
        match self.peers.dial_error(&Target::Peer(*owner)) {
            Some(Error { code, text, .. }) => {
                Error::new(code, format!("the deadline passed before the peer answered: {text}"))
            }
            None => Error::new(
                Code::DeadlineExceeded,
                format!("the deadline passed before the transfer with engine {} could begin", owner.engine),
            ),
        }
    }
}

/// Why a transfer that waited for a stream of its device until its deadline did so.
fn stream_is_late() -> Error {
    let text = "the deadline passed before the stream that the transfer comes behind had done its work: look at what the \
                device runs, or give the transfer a longer deadline";
    Error::new(Code::DeadlineExceeded, text)
}
