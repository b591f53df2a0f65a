//! How transfers end, and what is reported of them.
//!
//! A transfer that the node knows of ends when the node says so, and no sooner: only then does nothing touch its
//! memory. One that has not begun is ended here, and taken out of the book in the same moment in which it is seen
//! that it has not, so that it cannot begin afterwards.

use crate::config::Preference;
use crate::desk::Job;
use crate::events::Event;
use crate::select::{Reason, Rejected};
use crate::shared::{Record, Shared, lock};
use crate::transfer::Report;
use kvik_core::{Code, Error, Result};
use kvik_host::clock::boottime;
use kvik_proto::{Check, Finished, Path};
use kvik_transport::TransportId;
use std::time::Duration;

impl Shared {
    /// Ends a transfer that has not begun; one that has is the node's to end.
    pub fn give_up(&self, id: u64, error: Error) {
        self.finish_unbegun(id, Err(error));
    }

    pub(crate) fn finish_unbegun(&self, id: u64, outcome: Result<()>) {
        let record = {
            let mut book = lock(&self.book);
            if book.transfers.get(&id).is_none_or(|record| record.key.is_some()) {
                return;
            }
            book.waiting.remove(&id);
            book.transfers.remove(&id)
        };
        if let Some(record) = record {
            self.finish(id, record, None, outcome);
        }
    }

    /// Ends a transfer, begun or not.
    pub fn cancel(&self, id: u64, error: Error) {
        self.node(|node, _| {
            let mut book = lock(&self.book);
            let Some(record) = book.transfers.get_mut(&id) else { return };
            // Should the node end it in a way after which it would go over another transport, it does not.
            record.stopped.get_or_insert_with(|| error.clone());
            if let Some(key) = record.key {
                node.cancel(key, error.clone());
            }
        });
        self.give_up(id, error);
    }

    /// Ends a transfer that nothing works on any more: the threads of a closed engine have gone.
    pub fn abandon(&self, id: u64, error: Error) {
        let record = lock(&self.book).transfers.remove(&id);
        if let Some(record) = record {
            self.finish(id, record, None, Err(error));
        }
    }

    /// The node says that a transfer has ended.
    pub fn on_finished(&self, finished: Finished) {
        let Some(id) = lock(&self.book).by_key.remove(&finished.key) else { return };
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
        let record = lock(&self.book).transfers.remove(&id);
        if let Some(record) = record {
            self.finish(id, record, Some(finished), outcome);
        }
    }

    /// Lets a transfer under `auto` go over the next transport where the one that it took turned out not to serve it,
    /// before anything had moved; after a copy within the host, whose destination is this side's own, in any case.
    /// Other transfers are not concerned: what one region refuses, another may allow.
    fn fall_back(&self, id: u64, finished: &Finished, error: &Error) -> Result<(), Option<Error>> {
        let mut book = lock(&self.book);
        let record = book.transfers.get_mut(&id).ok_or(None)?;
        if let Some(stopped) = &record.stopped {
            return Err(Some(stopped.clone()));
        }
        let taken = record.taken.as_ref().filter(|_| record.job.want == Preference::Auto).ok_or(None)?;
        if taken.path != Path::Memory && finished.first.is_some() {
            return Err(None);
        }
        let from = taken.id;
        let unavailable = taken.rejected.iter().filter(|one| matches!(one.reason, Reason::Unavailable(_)));
        let mut refused: Vec<Rejected> = unavailable.cloned().collect();
        refused.push(Rejected { transport: from, reason: Reason::Unavailable(error.text.as_str().into()) });
        let before = std::mem::replace(&mut record.refused, refused);
        let Ok(Some(next)) = self.choose(record, finished.key.0) else {
            record.refused = before;
            return Err(None);
        };
        let to = next.id;
        let Job { ticket, tag, .. } = &record.job;
        log::info!(transfer = id, grant:% = ticket.grant, peer:% = ticket.engine, request:% = tag; "the transfer goes over {to}: {error}");
        let owner = record.job.owner();
        (record.key, record.fence) = (None, None);
        // It had begun: should its session be gone too, it is lost as any other.
        record.lives = 0;
        let (peer, reason) = (self.roster.who(&owner), error.text.clone());
        self.hub.say(Event::TransportChanged { peer, from, to, reason });
        Ok(())
    }

    fn finish(&self, id: u64, record: Record, finished: Option<Finished>, outcome: Result<()>) {
        let bytes = finished.as_ref().map_or(0, |finished| finished.bytes);
        let Job { ticket, tag, .. } = &record.job;
        let outcome = match outcome {
            Ok(()) => Ok(self.report(&record, finished)),
            Err(error) => Err(error.about_peer(ticket.engine).about_grant(ticket.grant)),
        };
        let own = self.local.identity.engine;
        match &outcome {
            Ok(report) => {
                log::debug!(engine:% = own, transfer = id, grant:% = ticket.grant, peer:% = ticket.engine, request:% = tag; "transfer done: {} bytes over {}", report.bytes, report.transport);
            }
            Err(error) => {
                log::info!(engine:% = own, transfer = id, grant:% = ticket.grant, peer:% = ticket.engine, request:% = tag; "transfer failed: {error}");
            }
        }
        self.metrics.transfer_ended(&record, bytes, &outcome);
        self.tell_observer(&record, bytes, &outcome);
        let end = record.end.clone();
        // The memory that the record holds is let go of before anybody hears of the end.
        drop(record);
        self.count_end(&outcome);
        end.set(outcome);
        self.note_progress();
    }

    fn report(&self, record: &Record, finished: Option<Finished>) -> Report {
        let now = boottime();
        let planned = record.began + record.plan;
        let (bytes, verify, first, extents) = match &finished {
            Some(end) => (end.bytes, end.verify, end.first.unwrap_or(now), end.extents),
            None => (0, Duration::ZERO, now, 0),
        };
        let taken = record.taken.as_ref();
        // How the bytes went is what was seen, where this side saw it.
        let copied_from = finished.as_ref().and_then(|finished| finished.copied_from);
        if let Some(taken) = taken.filter(|_| bytes > 0)
            && let Some(by) = &taken.by
        {
            by.measured(taken.session, bytes, now.saturating_sub(record.begun));
        }
        Report {
            bytes,
            extents: if extents == 0 { record.job.extents } else { extents },
            pages: record.job.pages,
            // Nothing ends well before it was known how it goes.
            transport: taken.map_or(TransportId::Own, |taken| taken.id),
            way: taken.map_or_else(String::new, |taken| taken.mechanism(&record.job, copied_from)),
            checks: checks(record),
            plan: record.plan,
            post: first.saturating_sub(planned),
            wire: now.saturating_sub(first),
            verify,
            total: now.saturating_sub(record.began),
            estimate: taken.and_then(|taken| taken.estimate),
            passed_over: taken.map_or_else(Vec::new, |taken| taken.rejected.clone()),
        }
    }
}

/// The checks that a transfer which succeeded has passed.
fn checks(record: &Record) -> Vec<&'static str> {
    let mut checks = vec!["grant"];
    if let Some(taken) = record.taken.as_ref().filter(|_| record.job.moves()) {
        checks.push("counts");
        // The peer raises the fence, or sees this side's raised.
        if taken.path == Path::Memory && taken.by.is_some() {
            checks.push("generation");
        }
        let verify = record.job.verify;
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
