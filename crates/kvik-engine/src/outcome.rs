//! How transfers end, and what is reported of them.
//!
//! A transfer that the node knows of ends when the node says so, and no sooner: only then does nothing touch its
//! memory. One that has not begun is ended here, and taken out of the book in the same moment in which it is seen
//! that it has not, so that it cannot begin afterwards.

use crate::config::Preference;
use crate::desk::{Job, Own};
use crate::events::Event;
use crate::shared::{Book, Record, Shared, lock};
use crate::transfer::Report;
use kvik_core::{Code, Error, Result};
use kvik_host::clock::boottime;
use kvik_proto::{Check, Finished};
use kvik_transport::Desk;
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

    /// Lets a transfer under `auto` go over NICs or TCP whose copy within the host turned out to be impossible, and over
    /// TCP one whose owner refused NICs before anything had moved. Others are not concerned: what one region refuses, another may allow.
    fn fall_back(&self, id: u64, finished: &Finished, error: &Error) -> Result<(), Option<Error>> {
        let mut book = lock(&self.book);
        let Book { transfers, links, nic_keys, handles, .. } = &mut *book;
        let record = transfers.get_mut(&id).ok_or(None)?;
        if let Some(stopped) = &record.stopped {
            return Err(Some(stopped.clone()));
        }
        let from = record.transport;
        let refused = from == "local" || (from == self.nic_transport() && finished.first.is_none());
        if record.job.want != Preference::Auto || !refused {
            return Err(None);
        }
        let reaches = |session| links.get(&session).is_some_and(|link| link.nics.is_ok());
        let own = Own::of(&record.job, nic_keys, handles);
        let there = from == "local" && reaches(finished.key.0);
        let nics = there && own.nics.is_none();
        let to = if nics { self.nic_transport() } else { "tcp" };
        let Job { ticket, tag, .. } = &record.job;
        log::info!(transfer = id, grant:% = ticket.grant, peer:% = ticket.engine, request:% = tag; "the transfer goes over {to}: {error}");
        let owner = record.job.owner();
        (record.key, record.fence) = (None, None);
        // It had begun: should its session be gone too, it is lost as any other.
        record.lives = 0;
        match nics {
            // The way that is chosen now says what it passes over.
            true => record.not_local = Some(error.text.clone()),
            false => {
                record.job.want = Preference::Tcp;
                record.passed_over.push(format!("{from}: {}", error.text));
                record.passed_over.extend(own.nics.filter(|_| there).map(|why| format!("nics: {why}")));
            }
        }
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
        let way = self.way(record, finished.as_ref());
        let (bytes, verify, first, extents) = match &finished {
            Some(end) => (end.bytes, end.verify, end.first.unwrap_or(now), end.extents),
            None => (0, Duration::ZERO, now, 0),
        };
        Report {
            bytes,
            extents: if extents == 0 { record.job.extents } else { extents },
            pages: record.job.pages,
            transport: record.transport,
            way,
            checks: checks(record),
            plan: record.plan,
            post: first.saturating_sub(planned),
            wire: now.saturating_sub(first),
            verify,
            total: now.saturating_sub(record.began),
            passed_over: record.passed_over.clone(),
        }
    }

    /// How the bytes went: what was seen, where this side saw it.
    fn way(&self, record: &Record, finished: Option<&Finished>) -> String {
        let session = record.key.map(|(session, _)| session);
        if record.transport == "tcp" {
            let joined = session.and_then(|session| Some(lock(&self.book).links.get(&session)?.channels));
            // None have joined yet where nothing had to move.
            let channels = joined.filter(|joined| *joined > 0).unwrap_or(self.config.channels);
            let tls = if self.tls.is_some() { ", tls" } else { "" };
            let gpu = device_of(record).map(|gpu| format!(", staged for GPU {gpu}")).unwrap_or_default();
            return format!("{channels} channel{}{tls}{gpu}", if channels == 1 { "" } else { "s" });
        }
        if !["local", "self"].contains(&record.transport) {
            return record.way.clone();
        }
        let seen = || {
            let region = finished?.copied_from?;
            self.local_link(session?)?.way_of(region)
        };
        seen().map_or_else(|| record.way.clone(), str::to_owned)
    }
}

/// The GPU that this side's pages lie on.
fn device_of(record: &Record) -> Option<u32> {
    let (memory, _, _) = record.job.memory.as_ref()?;
    memory.device().map(|device| device.ordinal())
}

/// The checks that a transfer which succeeded has passed.
fn checks(record: &Record) -> Vec<&'static str> {
    let mut checks = vec!["grant"];
    if record.job.moves() {
        checks.push("counts");
        if record.transport == "local" {
            checks.push("generation");
        }
        let verify = record.job.verify;
        let of_nics = !["tcp", "local", "self"].contains(&record.transport);
        match if of_nics { verify.of_nics() } else { all_or_none(verify.sums(record.transport == "tcp")) } {
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
