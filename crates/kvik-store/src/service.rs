//! What a store answers to whom, wherever the question came from.

use crate::figures::{Where, Whole};
use crate::fill::Stored;
use crate::lend::Lent;
use crate::lending::{Lender, Rest};
use crate::store::{Store, check_keys};
use crate::tenants::Held;
use crate::wire::scan::{Description, Page};
use crate::wire::{Ack, DEADLINE, MetricsPart, Put, Request, Response};
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

/// How long what a client has so much time for may take, so that it hears of what is late within its time, and does not
/// take the store for gone.
pub(crate) fn answered_within(time: Duration) -> Duration {
    time - (time / 8).min(Duration::from_millis(500))
}

/// The same from now on.
pub(crate) fn answered_by(time: Duration) -> Instant {
    Instant::now() + answered_within(time)
}

/// So much of what a client asks for as it is given.
pub(crate) fn longest(time: Duration) -> Duration {
    time.min(LONGEST)
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
            Request::Get(get) => {
                if let Some(mut left) = self.lend(Lender::new(self, get, came), true, reply) {
                    reply(left.miss());
                }
                return;
            }
            Request::Contains { namespace, keys } => {
                let here =
                    self.known(&namespace).and_then(|known| self.store.contains(known.number(), &keys));
                here.map(Response::Here)
            }
            Request::Prefetch { namespace, keys } => self.about(&namespace, |number| {
                check_keys(&keys)?;
                // A client waits for no answer longer; what is there by then is one.
                let (mut here, until) = (0, came + answered_within(DEADLINE));
                while let (more @ 1.., _) = self.store.bring_any(number, &keys[here..], until)? {
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
                self.store.clear(|known, _| known.id == namespace).map(|gone| Response::Done(gone as u64))
            }
            Request::ClearTenant { tenant } => {
                // Its number may become another one's meanwhile.
                self.store.clear(|_, name| name == tenant).map(|gone| Response::Done(gone as u64))
            }
            Request::Stat => Ok(Response::Counts(Box::new(self.store.counts()))),
            Request::Metrics => Ok(self.metrics(reply)),
            Request::Describe { from } => Ok(Response::Described(Description::of(&self.store, from))),
            Request::Scan(scan) => Ok(Response::Scanned(Page::of(&self.store, &scan))),
        };
        reply(response.unwrap_or_else(|error| self.failed(error)));
    }

    /// Answers a get with what it was not answered with before. Gives it back where the next block is in the object store
    /// only, which a thread that is `far` waits for.
    pub fn lend(&self, get: Lender, far: bool, reply: &dyn Fn(Response)) -> Option<Box<Lender>> {
        match get.rest(far, reply) {
            Ok(Rest::Answered(response)) => reply(response),
            Ok(Rest::Far(left)) => return Some(left),
            Err(error) => reply(self.failed(error)),
        }
        None
    }

    /// Whether a request may wait for the object store.
    pub fn waits_far(&self, request: &Request) -> bool {
        use Request::{ClearNamespace, ClearTenant, Open, Prefetch, Remove};
        self.store.far().is_some()
            && match request {
                Prefetch { .. } | Remove { .. } | ClearNamespace { .. } | ClearTenant { .. } => true,
                // Others may have to be forgotten for it.
                Open { namespace, .. } => self.store.state().tenants.is_full_for(namespace),
                _ => false,
            }
    }

    /// Blocks are lent for a get.
    pub fn add_loans(&self, lent: Vec<Lent>, whole: &Arc<Whole>) {
        self.loans.add(lent, whole);
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

    /// A namespace that was opened.
    pub fn known(&self, id: &NamespaceId) -> Result<Held> {
        self.store.state().tenants.hold(id).ok_or_else(|| {
            let text =
                format!("namespace {id} is not known here, or was forgotten for others: open it first");
            Error::new(Code::NamespaceUnknown, text)
        })
    }

    fn about(&self, namespace: &NamespaceId, f: impl FnOnce(u16) -> Result<usize>) -> Result<Response> {
        let known = self.known(namespace)?;
        f(known.number()).map(|count| Response::Done(count as u64))
    }

    fn write_far_soon(&self, namespace: u16, keys: &[BlockKey]) {
        self.store.far().iter().for_each(|far| far.write_soon(&self.store, namespace, keys));
    }

    fn put(&self, put: &Put, came: Instant, reply: &dyn Fn(Response)) -> Result<Response> {
        let known = self.known(&put.namespace)?;
        let namespace = known.number();
        let time = longest(put.deadline);
        let until = came + answered_within(time);
        let durable = put.ack == Ack::Durable;
        let awaited = Awaited::new(until);
        if durable && self.store.below().is_none() {
            self.store.make_durable(namespace, &[], &awaited)?;
        }
        let reserved = self.store.reserve(namespace, put.parent, &put.keys, durable)?;
        if put.ack == Ack::Accepted {
            reply(Response::Accepted);
        }
        // The first blocks are on their way to the disk while the next ones come.
        let pulled = reserved.pull(&put.ticket, until, |blocks| {
            if durable {
                self.store.write_now(&awaited, blocks);
            }
        });
        // Also what has come before the rest has failed.
        if !durable {
            self.store.write_soon(namespace, &put.keys);
        }
        self.write_far_soon(namespace, &put.keys);
        let stored = pulled?;
        // The client's pages are its own again with the end of its grant, which need not be waited for here.
        let options = TransferOptions { deadline: Some(time), ..TransferOptions::default() };
        if let Err(error) = self.store.engine().release(&put.ticket, options) {
            log::debug!("a put's grant could not be given back: {error}");
        }
        if !durable {
            if stored.stored > 0 {
                self.store.latencies().put[Where::Memory as usize].add(came.elapsed());
            }
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
}
