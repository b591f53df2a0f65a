//! What a store answers to whom, wherever the question came from.

use crate::fill::Stored;
use crate::lend::Lent;
use crate::store::{Store, check_keys};
use crate::tenants::Known;
use crate::wire::{Ack, Lending, Put, Request, Response};
use crate::write::Awaited;
use crate::{BlockKey, NamespaceId};
use kvik_core::{Code, Error, GrantId, Result};
use kvik_engine::{Event, Events, TransferOptions};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The longest time for which blocks are lent, and the longest that a put may take.
const LONGEST: Duration = Duration::from_secs(600);

/// See the module's text. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Service {
    store: Store,
    loans: Arc<Loans>,
}

/// What is lent, by grant.
#[derive(Default)]
struct Loans(Mutex<HashMap<GrantId, Lent>>);

impl Loans {
    fn change<T>(&self, change: impl FnOnce(&mut HashMap<GrantId, Lent>) -> T) -> T {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn add(&self, lent: Vec<Lent>) {
        let ids: Vec<GrantId> = lent.iter().map(|lent| lent.grant.id()).collect();
        self.change(|loans| loans.extend(ids.iter().copied().zip(lent)));
        // One that ended before it was entered was told of before.
        let over = self.change(|loans| {
            let over = |id: &GrantId| loans.get(id).is_some_and(Lent::is_over);
            let over: Vec<GrantId> = ids.into_iter().filter(over).collect();
            over.iter().filter_map(|id| loans.remove(id)).collect::<Vec<_>>()
        });
        drop(over);
    }

    fn end(&self, id: &GrantId) {
        drop(self.change(|loans| loans.remove(id)));
    }

    fn sweep(&self) {
        let over = self.change(|loans| loans.extract_if(|_, lent| lent.is_over()).collect::<Vec<_>>());
        drop(over);
    }
}

impl Service {
    pub fn new(store: Store) -> Service {
        Service { store, loans: Arc::default() }
    }

    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Lets go of what is lent as the grants end, until the events are closed.
    pub fn watch(&self, events: &Events) {
        while let Ok(event) = events.next(crate::NOTHING_ELSE) {
            match event {
                Some(Event::GrantEnded(id, _)) => self.loans.end(&id),
                Some(Event::EventsLost(_)) => self.loans.sweep(),
                None if events.is_closed() => return,
                _ => {}
            }
        }
    }

    /// Answers a request; a failure is an answer.
    pub fn answer(&self, request: Request, reply: &dyn Fn(Response)) {
        let failed = |error: Error| Response::Failed(error.code, error.text);
        let response = match request {
            Request::Open { namespace, shape, tenant, model } => {
                self.store.namespace(namespace, &tenant, shape, &model).map(|_| Response::Opened)
            }
            Request::Put(put) => self.put(&put, reply),
            Request::Get { namespace, keys, expiry } => self.get(&namespace, &keys, expiry, reply),
            Request::Contains { namespace, keys } => {
                let here = self.known(&namespace).and_then(|number| self.store.contains(number, &keys));
                here.map(Response::Here)
            }
            Request::Prefetch { namespace, keys } => self.about(&namespace, |number| {
                check_keys(&keys)?;
                let (mut here, until) = (0, Instant::now() + LONGEST);
                while let more @ 1.. = self.store.bring(number, &keys[here..], until)? {
                    here += more;
                }
                Ok(here)
            }),
            Request::Remove { namespace, keys } => {
                self.about(&namespace, |number| self.store.remove(number, &keys))
            }
            Request::Pin { namespace, keys, time } => {
                self.about(&namespace, |number| self.store.keep(number, &keys, time))
            }
            Request::ClearNamespace { namespace } => {
                self.store.clear(|known| known.id == namespace).map(|gone| Response::Done(gone as u64))
            }
            Request::ClearTenant { tenant } => {
                let tenant = self.store.state().tenants.named(&tenant);
                let of_tenant = |known: &Known| Some(known.tenant) == tenant;
                self.store.clear(of_tenant).map(|gone| Response::Done(gone as u64))
            }
            Request::Stat => Ok(Response::Counts(Box::new(self.store.counts()))),
        };
        reply(response.unwrap_or_else(failed));
    }

    /// The number of a namespace that was opened.
    fn known(&self, id: &NamespaceId) -> Result<u16> {
        self.store.state().tenants.find(id).ok_or_else(|| {
            let text = format!("namespace {id} is not known here: open it first");
            Error::new(Code::NamespaceUnknown, text)
        })
    }

    fn about(&self, namespace: &NamespaceId, f: impl FnOnce(u16) -> Result<usize>) -> Result<Response> {
        f(self.known(namespace)?).map(|count| Response::Done(count as u64))
    }

    fn put(&self, put: &Put, reply: &dyn Fn(Response)) -> Result<Response> {
        let namespace = self.known(&put.namespace)?;
        let time = put.deadline.min(LONGEST);
        let until = Instant::now() + time;
        let durable = put.ack == Ack::Durable;
        let awaited = Awaited::new(until);
        if durable && self.store.below().is_none() {
            self.store.make_durable(namespace, &[], &awaited)?;
        }
        let reserved = self.store.reserve(namespace, put.parent, &put.keys)?;
        if put.ack == Ack::Accepted {
            reply(Response::Accepted);
        }
        // The first blocks are on their way to the disk while the next ones come.
        let stored = reserved.pull(&put.ticket, time, |blocks| {
            if durable {
                self.store.write_now(&awaited, blocks);
            }
        })?;
        // The client's pages are its own again with the end of its grant, which need not be waited for here.
        let options = TransferOptions { deadline: Some(time), ..TransferOptions::default() };
        if let Err(error) = self.store.engine().release(&put.ticket, options) {
            log::debug!("a put's grant could not be given back: {error}");
        }
        if !durable {
            self.store.write_soon(namespace, &put.keys);
            return Ok(Response::Stored(stored));
        }
        let durable = self.store.make_durable(namespace, &put.keys, &awaited)? as u64;
        // What is not on the disk was not taken, as far as who asks for that is concerned.
        let refused = put.keys.len() as u64 - durable;
        let known = stored.known.min(durable);
        Ok(Response::Stored(Stored { stored: durable - known, known, refused }))
    }

    /// Lends what is in memory, then brings back what lies below, window by window, and lends that.
    fn get(
        &self,
        namespace: &NamespaceId,
        keys: &[BlockKey],
        expiry: Duration,
        reply: &dyn Fn(Response),
    ) -> Result<Response> {
        let (namespace, expiry) = (self.known(namespace)?, expiry.min(LONGEST));
        check_keys(keys)?;
        let until = Instant::now() + expiry;
        let mut first = 0;
        loop {
            // The first block alone, so that its use begins early: granting all of them takes several times as long.
            let upto = if first == 0 { 1 } else { keys.len() };
            let loan = self.store.lend(namespace, &keys[first..upto], expiry)?;
            let (count, blocks) = (loan.blocks.len(), loan.blocks);
            let tickets = loan.groups.iter().map(|lent| lent.ticket().clone()).collect();
            self.loans.add(loan.groups);
            first += count;
            let more =
                first < keys.len() && Instant::now() < until && self.store.is_there(namespace, &keys[first]);
            let response = Response::Lent(Lending { blocks, tickets, more });
            if !more {
                self.store.state().counts.misses += (keys.len() - first) as u64;
                return Ok(response);
            }
            if count > 0 {
                reply(response);
            }
            let wanted = &keys[first..];
            if !self.store.is_in_memory(namespace, &wanted[0])
                && self.store.bring(namespace, wanted, until)? == 0
            {
                self.store.state().counts.misses += (keys.len() - first) as u64;
                return Ok(Response::Lent(Lending::default()));
            }
        }
    }
}
