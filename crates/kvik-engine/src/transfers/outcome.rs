//! How transfers end, and what is reported of them.
//!
//! A transfer that the node knows of ends when the node says so, and no sooner: only then does nothing touch its
//! memory. One that has not begun is ended here, and taken out of the table of transfers in the same moment in which it
//! is seen that it has not, so that it cannot begin afterwards.

use super::Transfers;
use super::request::{Listener, TransferEntry, TransferRequest};
use crate::config::Preference;
use crate::events::Event;
use crate::report::Report;
use crate::select::{Reason, Rejected};
use crate::sync::lock;
use kvik_core::{Code, Error, Result};
use kvik_host::clock::boottime;
use kvik_proto::{Check, Finished, Path};
use kvik_transport::TransportId;
use std::ops::Range;
use std::time::Duration;

impl Transfers {
    /// Ends a transfer that has not begun; one that has is the node's to end.
    pub fn give_up(&self, id: u64, error: Error) {
        self.finish_unbegun(id, Err(error));
    }

    pub(super) fn finish_unbegun(&self, id: u64, outcome: Result<()>) {
        let entry = {
            let mut table = lock(&self.table);
            if table.entries.get(&id).is_none_or(|entry| entry.key.is_some()) {
                return;
            }
            table.set_waiting(id, false);
            table.entries.remove(&id)
        };
        if let Some(entry) = entry {
            self.finish(id, entry, None, outcome);
        }
    }

    /// Ends transfers, begun or not.
    pub fn cancel(&self, ids: Range<u64>, error: &Error) {
        self.base.node(|node, _| {
            let mut table = lock(&self.table);
            for id in ids.clone() {
                let Some(entry) = table.entries.get_mut(&id) else { continue };
                // Should the node end it in a way after which it would go over another transport, it does not.
                entry.stopped.get_or_insert_with(|| error.clone());
                if let Some(key) = entry.key {
                    node.cancel(key, error.clone());
                }
            }
        });
        ids.for_each(|id| self.give_up(id, error.clone()));
    }

    /// Ends a transfer that nothing works on any more: the threads of a closed engine have gone.
    pub fn abandon(&self, id: u64, error: Error) {
        let entry = lock(&self.table).entries.remove(&id);
        if let Some(entry) = entry {
            self.finish(id, entry, None, Err(error));
        }
    }

    /// The node says that a transfer has ended.
    pub fn on_finished(&self, finished: Finished) {
        let Some(id) = lock(&self.table).by_key.remove(&finished.key) else { return };
        let mut outcome = finished.outcome.clone();
        if let Err(error) = &mut outcome
            && error.code == Code::TransportUnavailable
        {
            match self.fall_back(id, &finished, error) {
                Ok(()) => return self.launch(id, finished.key.0),
                Err(Some(stopped)) => *error = stopped,
                Err(None) => {}
            }
        }
        let entry = lock(&self.table).entries.remove(&id);
        if let Some(entry) = entry {
            self.finish(id, entry, Some(finished), outcome);
        }
    }

    /// Lets a transfer under `auto` go over the next transport where the one that it took turned out not to serve it,
    /// before anything had moved; after a copy within the host, whose destination is this side's own, in any case.
    /// Other transfers are not concerned: what one region refuses, another may allow.
    fn fall_back(&self, id: u64, finished: &Finished, error: &Error) -> Result<(), Option<Error>> {
        let mut table = lock(&self.table);
        let entry = table.entries.get_mut(&id).ok_or(None)?;
        if let Some(stopped) = &entry.stopped {
            return Err(Some(stopped.clone()));
        }
        let taken = entry.taken.as_ref().filter(|_| entry.request.want == Preference::Auto).ok_or(None)?;
        if taken.path != Path::Memory && finished.first.is_some() {
            return Err(None);
        }
        let from = taken.id;
        let unavailable = taken.rejected.iter().filter(|one| matches!(one.reason, Reason::Unavailable(_)));
        let mut refused: Vec<Rejected> = unavailable.cloned().collect();
        refused.push(Rejected { transport: from, reason: Reason::Unavailable(error.text.as_str().into()) });
        let before = std::mem::replace(&mut entry.refused, refused);
        let Ok(Some(next)) = self.choose(entry, finished.key.0) else {
            entry.refused = before;
            return Err(None);
        };
        let to = next.id;
        let TransferRequest { ticket, tag, .. } = &entry.request;
        log::info!(transfer = id, grant:% = ticket.grant, peer:% = ticket.engine, request:% = tag; "the transfer goes over {to}: {error}");
        let owner = entry.request.owner();
        (entry.key, entry.fence) = (None, None);
        entry.request.forget_sums().map_err(Some)?;
        // It had begun: should its session be gone too, it is lost as any other.
        entry.retries = 0;
        let (peer, reason) = (self.peers.table.who(&owner), error.text.clone());
        self.base.observers.events.publish(Event::TransportChanged { peer, from, to, reason });
        Ok(())
    }

    fn finish(&self, id: u64, entry: TransferEntry, finished: Option<Finished>, outcome: Result<()>) {
        let bytes = finished.as_ref().map_or(0, |finished| finished.bytes);
        let TransferRequest { ticket, tag, .. } = &entry.request;
        let outcome = match outcome {
            Ok(()) => Ok(self.report(&entry, finished)),
            Err(error) => Err(error.about_peer(ticket.engine).about_grant(ticket.grant)),
        };
        let own = self.base.setup.id();
        match &outcome {
            Ok(report) => {
                log::debug!(engine:% = own, transfer = id, grant:% = ticket.grant, peer:% = ticket.engine, request:% = tag; "transfer done: {} bytes over {}", report.bytes, report.transport);
            }
            Err(error) => {
                log::info!(engine:% = own, transfer = id, grant:% = ticket.grant, peer:% = ticket.engine, request:% = tag; "transfer failed: {error}");
            }
        }
        self.base.observers.transfer_ended(&entry, bytes, &outcome);
        let (listener, owner) = (entry.listener.clone(), entry.request.ticket.engine);
        // The memory that the record holds is let go of before anybody hears of the end.
        drop(entry);
        match listener {
            Listener::Caller(end) => end.set(outcome),
            Listener::Joint(joint) => {
                if let Some(error) = joint.ended(id, owner, outcome) {
                    self.cancel(joint.ids(), &error);
                }
            }
        }
        self.base.progress.note();
    }

    fn report(&self, entry: &TransferEntry, finished: Option<Finished>) -> Report {
        let now = boottime();
        let planned = entry.began + entry.plan;
        let (bytes, verify, first, extents) = match &finished {
            Some(end) => (end.bytes, end.verify, end.first.unwrap_or(now), end.extents),
            None => (0, Duration::ZERO, now, 0),
        };
        let taken = entry.taken.as_ref();
        if let Some(taken) = taken.filter(|_| bytes > 0)
            && let Some(by) = &taken.by
        {
            by.measured(taken.session, bytes, now.saturating_sub(entry.begun));
        }
        Report {
            bytes,
            extents: if extents == 0 { entry.request.extents } else { extents },
            pages: entry.request.pages,
            // Nothing ends well before it was known how it goes.
            transport: taken.map_or(TransportId::Own, |taken| taken.id),
            mechanism: taken
                .map_or_else(String::new, |taken| taken.mechanism(&entry.request, finished.as_ref())),
            checks: checks(entry),
            plan: entry.plan,
            post: first.saturating_sub(planned),
            wire: now.saturating_sub(first),
            verify,
            total: now.saturating_sub(entry.began),
            estimate: taken.and_then(|taken| taken.estimate),
            sums: entry.request.memory.as_ref().and_then(|(_, _, view)| view.sums().cloned()),
            rejected_transports: taken.map_or_else(Vec::new, |taken| taken.rejected.clone()),
        }
    }
}

/// The checks that a transfer which succeeded has passed.
fn checks(entry: &TransferEntry) -> Vec<&'static str> {
    let mut checks = vec!["grant"];
    if let Some(taken) = entry.taken.as_ref().filter(|_| entry.request.moves()) {
        checks.push("counts");
        // The peer raises the fence, or sees this side's raised.
        if taken.path == Path::Memory && taken.by.is_some() {
            checks.push("generation");
        }
        let verify = entry.request.verify;
        let check = match taken.path {
            Path::OneSided => verify.of_nics(),
            path => all_or_none(verify.sums(path == Path::Channels)),
        };
        match check {
            Check::All => checks.push("page_checksum"),
            Check::Sample => checks.push("page_sample"),
            Check::No => {}
        }
    }
    checks
}

fn all_or_none(sums: bool) -> Check {
    if sums { Check::All } else { Check::No }
}
