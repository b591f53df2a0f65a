//! What a store answers to whom, wherever the question came from.

use crate::figures::{Where, Whole};
use crate::fill::Stored;
use crate::lend::Lent;
use crate::store::{Store, check_keys};
use crate::tenants::Known;
use crate::wire::{Ack, Lending, MetricsPart, Put, Request, Response};
use crate::write::Awaited;
use crate::{BlockKey, NamespaceId};
use kvik_core::{Code, Error, GrantId, GrantState, Result};
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
struct Loans(Mutex<HashMap<GrantId, Loaned>>);

/// One grant over blocks of a get, and the get.
struct Loaned {
    lent: Lent,
    whole: Arc<Whole>,
}

impl Loaned {
    fn is_over(&self) -> bool {
        self.lent.grant.state() != GrantState::Live
    }
}

impl Drop for Loaned {
    fn drop(&mut self) {
        if self.lent.grant.state() != GrantState::Consumed {
            self.whole.discount();
        }
    }
}

impl Loans {
    fn change<T>(&self, change: impl FnOnce(&mut HashMap<GrantId, Loaned>) -> T) -> T {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn add(&self, lent: Vec<Lent>, whole: &Arc<Whole>) {
        let ids: Vec<GrantId> = lent.iter().map(|lent| lent.grant.id()).collect();
        let loaned = lent.into_iter().map(|lent| Loaned { lent, whole: whole.clone() });
        self.change(|loans| loans.extend(ids.iter().copied().zip(loaned)));
        // One that ended before it was entered was told of before.
        let over = self.change(|loans| {
            let over = |id: &GrantId| loans.get(id).is_some_and(Loaned::is_over);
            let over: Vec<GrantId> = ids.into_iter().filter(over).collect();
            over.iter().filter_map(|id| loans.remove(id)).collect::<Vec<_>>()
        });
        drop(over);
    }

    fn end(&self, id: &GrantId) {
        drop(self.change(|loans| loans.remove(id)));
    }

    fn sweep(&self) {
        let over = self.change(|loans| loans.extract_if(|_, loaned| loaned.is_over()).collect::<Vec<_>>());
        drop(over);
    }
}

/// What a get has found so far. It is counted at the end, however that comes, at once: so shares of it fit together.
struct Tally<'a> {
    store: &'a Store,
    namespace: u16,
    whole: Arc<Whole>,
    hits: [u64; 2],
    misses: u64,
}

impl<'a> Tally<'a> {
    fn new(store: &'a Store, namespace: u16, began: Instant) -> Tally<'a> {
        let whole = Arc::new(Whole::new(store.latencies().clone(), began));
        Tally { store, namespace, whole, hits: [0; 2], misses: 0 }
    }

    /// So many blocks are lent, of which this many came from the log for it.
    fn lent(&mut self, blocks: usize, from_log: usize, began: Instant) {
        let from_log = from_log.min(blocks) as u64;
        if self.hits == [0; 2] && blocks > 0 {
            self.store.latencies().first[usize::from(from_log > 0)].add(began.elapsed());
        }
        self.hits[Where::Memory as usize] += blocks as u64 - from_log;
        self.hits[Where::Log as usize] += from_log;
        if from_log > 0 {
            self.whole.note_log();
        }
    }

    /// It is over, and so many blocks were not there.
    fn missed(&mut self, blocks: usize) {
        self.misses = blocks as u64;
        if self.hits == [0; 2] {
            self.whole.discount();
        }
    }
}

impl Drop for Tally<'_> {
    fn drop(&mut self) {
        let mut state = self.store.state();
        let bytes = state.shape(self.namespace).bytes();
        state.counts.misses += self.misses;
        let of = state.figures_of(self.namespace);
        let found: u64 = self.hits.iter().sum();
        of.asked += found + self.misses;
        of.hits.iter_mut().zip(self.hits).for_each(|(all, hits)| *all += hits);
        of.bytes_out[Where::Memory as usize] += found * bytes;
    }
}

/// Until when what a client has so much time for may take, so that it hears of what is late within its time, and does not
/// take the store for gone.
fn answered_by(time: Duration) -> Instant {
    Instant::now() + time - (time / 8).min(Duration::from_millis(500))
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

    /// A request was refused, by this answer.
    pub fn failed(&self, error: Error) -> Response {
        self.store.state().figures.fail(error.code);
        Response::Failed(error.code, error.text)
    }

    /// Answers a request that came at a time; a failure is an answer.
    pub fn answer(&self, request: Request, came: Instant, reply: &dyn Fn(Response)) {
        let response = match request {
            Request::Open { namespace, shape, tenant, model } => {
                self.store.namespace(namespace, &tenant, shape, &model).map(|_| Response::Opened)
            }
            Request::Put(put) => self.put(&put, came, reply),
            Request::Get { namespace, keys, expiry } => self.get(&namespace, &keys, expiry, (came, reply)),
            Request::Contains { namespace, keys } => {
                let here = self.known(&namespace).and_then(|number| self.store.contains(number, &keys));
                here.map(Response::Here)
            }
            Request::Prefetch { namespace, keys } => self.about(&namespace, |number| {
                check_keys(&keys)?;
                let (mut here, until) = (0, Instant::now() + LONGEST);
                while let (more @ 1.., _) = self.store.bring(number, &keys[here..], until)? {
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
            Request::Metrics => Ok(self.metrics(reply)),
        };
        reply(response.unwrap_or_else(|error| self.failed(error)));
    }

    /// Answers with all parts but the last one, which it gives.
    fn metrics(&self, reply: &dyn Fn(Response)) -> Response {
        let mut parts = MetricsPart::divide(&self.store.metrics()).into_iter().peekable();
        loop {
            let part = parts.next().unwrap_or_default();
            if parts.peek().is_none() {
                return Response::Metrics(part);
            }
            reply(Response::Metrics(part));
        }
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

    fn put(&self, put: &Put, came: Instant, reply: &dyn Fn(Response)) -> Result<Response> {
        let namespace = self.known(&put.namespace)?;
        let time = put.deadline.min(LONGEST);
        let until = answered_by(time);
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
            if stored.stored > 0 {
                self.store.latencies().put[Where::Memory as usize].add(came.elapsed());
            }
            self.store.write_soon(namespace, &put.keys);
            return Ok(Response::Stored(stored));
        }
        let durable = self.store.make_durable(namespace, &put.keys, &awaited)? as u64;
        // What is not on the disk was not taken, as far as who asks for that is concerned.
        let refused = put.keys.len() as u64 - durable;
        if durable > 0 {
            self.store.latencies().put[Where::Log as usize].add(came.elapsed());
        }
        let known = stored.known.min(durable);
        Ok(Response::Stored(Stored { stored: durable - known, known, refused }))
    }

    /// Lends what is in memory, then brings back what lies below, window by window, and lends that.
    fn get(
        &self,
        namespace: &NamespaceId,
        keys: &[BlockKey],
        expiry: Duration,
        (came, reply): (Instant, &dyn Fn(Response)),
    ) -> Result<Response> {
        let (namespace, expiry) = (self.known(namespace)?, expiry.min(LONGEST));
        check_keys(keys)?;
        let until = answered_by(expiry);
        let mut tally = Tally::new(&self.store, namespace, came);
        let (mut first, mut from_log) = (0, 0);
        loop {
            // The first block alone, so that its use begins early: granting all of them takes several times as long.
            let upto = if first == 0 { 1 } else { keys.len() };
            let loan = self.store.lend(namespace, &keys[first..upto], expiry)?;
            let (count, blocks) = (loan.blocks.len(), loan.blocks);
            let tickets = loan.groups.iter().map(|lent| lent.ticket().clone()).collect();
            self.loans.add(loan.groups, &tally.whole);
            tally.lent(count, from_log, came);
            from_log = from_log.saturating_sub(count);
            first += count;
            let more =
                first < keys.len() && Instant::now() < until && self.store.is_there(namespace, &keys[first]);
            let response = Response::Lent(Lending { blocks, tickets, more });
            if !more {
                tally.missed(keys.len() - first);
                return Ok(response);
            }
            if count > 0 {
                reply(response);
            }
            let wanted = &keys[first..];
            if !self.store.is_in_memory(namespace, &wanted[0]) {
                let (here, came_up) = self.store.bring(namespace, wanted, until)?;
                if here == 0 {
                    tally.missed(wanted.len());
                    return Ok(Response::Lent(Lending::default()));
                }
                from_log += came_up;
            }
        }
    }
}
