//! A get, on the store's side: what is in memory is lent, then what lies below is brought back, window by window, and
//! lent.
//!
//! The first block goes alone, at once, and where it can by the thread that brings the request ([`Lender::first`]), so
//! that no other one has to wake before it is read: granting all blocks takes several times as long.

use crate::BlockKey;
use crate::figures::{Where, Whole};
use crate::index::Life;
use crate::lend::Loan;
use crate::service::{Service, answered_by, longest};
use crate::state::State;
use crate::store::{Store, check_keys};
use crate::tenants::Held;
use crate::wire::{self, Response};
use kvik_core::Result;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Blocks by the tier that they came from.
type CameUp = [usize; Where::ALL.len()];

/// How far a get was answered.
pub(crate) enum Rest {
    /// This is its last answer.
    Answered(Response),
    /// The next block is in the object store only.
    Far(Box<Lender>),
}

/// A get that is being answered.
pub(crate) struct Lender {
    service: Service,
    get: wire::Get,
    expiry: Duration,
    until: Instant,
    tally: Tally,
    /// Blocks that were lent, and how many of the next ones came from each tier below for it.
    lent: usize,
    came_up: CameUp,
    /// What was lent first and could not be sent at once.
    unsent: Option<Response>,
    /// Nothing is left but that.
    over: bool,
}

/// What a get has found so far. It is counted at the end, however that comes, at once: so shares of it fit together.
struct Tally {
    store: Store,
    /// None as long as it is not known: then nothing was found.
    namespace: Option<Held>,
    came: Instant,
    whole: Arc<Whole>,
    hits: [u64; Where::ALL.len()],
    misses: u64,
    counted: bool,
}

impl Tally {
    /// So many blocks are lent, of which some came from tiers below for it.
    fn lent(&mut self, blocks: usize, came_up: &mut CameUp) {
        let mut left = blocks;
        let first = self.hits.iter().all(|hits| *hits == 0);
        let mut furthest = Where::Memory;
        for tier in [Where::Log, Where::Object] {
            let from = came_up[tier as usize].min(left);
            came_up[tier as usize] -= from;
            left -= from;
            self.hits[tier as usize] += from as u64;
            if from > 0 {
                furthest = tier;
            }
        }
        self.hits[Where::Memory as usize] += left as u64;
        self.whole.note_tier(furthest);
        if first && blocks > 0 {
            self.store.latencies().first[furthest as usize].add(self.came.elapsed());
        }
    }

    fn count(&mut self, state: &mut State) {
        let Some(namespace) = self.namespace.as_ref().map(Held::number).filter(|_| !self.counted) else {
            return;
        };
        self.counted = true;
        let bytes = state.tenants.shape(namespace).bytes();
        state.counts.misses += self.misses;
        let of = state.figures_of(namespace);
        let found: u64 = self.hits.iter().sum();
        of.asked += found + self.misses;
        of.hits.iter_mut().zip(self.hits).for_each(|(all, hits)| *all += hits);
        of.bytes_out[Where::Memory as usize] += found * bytes;
    }
}

impl Drop for Tally {
    fn drop(&mut self) {
        if self.hits == [0; Where::ALL.len()] {
            self.whole.discount();
        }
        if !self.counted {
            let store = self.store.clone();
            self.count(&mut store.state());
        }
    }
}

impl Lender {
    /// Of a request that came at a time.
    pub fn new(service: &Service, get: wire::Get, came: Instant) -> Lender {
        let (service, store, expiry) = (service.clone(), service.store().clone(), longest(get.expiry));
        let whole = Arc::new(Whole::new(store.latencies().clone(), came));
        let tally = Tally {
            store,
            namespace: None,
            came,
            whole,
            hits: Default::default(),
            misses: 0,
            counted: false,
        };
        let until = answered_by(expiry);
        Lender {
            service,
            get,
            expiry,
            until,
            tally,
            lent: 0,
            came_up: [0; Where::ALL.len()],
            unsent: None,
            over: false,
        }
    }

    /// Lends the first block, if that is in memory and nobody has to be waited for. Whatever is not done here, and every
    /// error, is left to [`Lender::rest`].
    pub fn first(&mut self) -> Option<Response> {
        let (store, keys) = (self.service.store(), &self.get.keys);
        let mut state = store.try_state()?;
        let held = state.tenants.hold(&self.get.namespace)?;
        let namespace = held.number();
        let here = |key: &BlockKey, lives: &[Life]| {
            let id = state.index.find(namespace, key);
            id.is_some_and(|id| lives.contains(&state.index.node(id).life))
        };
        if !here(keys.first()?, &[Life::Resident]) {
            return None;
        }
        let more = keys.get(1).is_some_and(|key| here(key, &Life::THERE));
        let loan = store.lend(state, namespace, &keys[..1], self.expiry, self.get.ahead.as_ref()).ok()?;
        self.tally.namespace = Some(held);
        let response = self.enter(loan, more);
        if more {
            return Some(response);
        }
        // Whoever hears the end finds it counted.
        self.over = true;
        match self.tally.store.clone().try_state() {
            Some(mut state) => {
                self.tally.count(&mut state);
                Some(response)
            }
            None => {
                self.unsent = Some(response);
                None
            }
        }
    }

    /// Whether all was answered by what [`Lender::first`] gave.
    pub fn is_over(&self) -> bool {
        self.over && self.unsent.is_none()
    }

    /// What [`Lender::first`] gave could not be sent at once.
    pub fn keep(&mut self, unsent: Response) {
        self.unsent = Some(unsent);
    }

    /// The last answer, where no more blocks come.
    pub fn miss(&mut self) -> Response {
        self.tally.misses = (self.get.keys.len() - self.lent) as u64;
        Response::Lent(wire::Lending::default())
    }

    /// Answers with all that is left but the last answer, which it gives: by then it is counted. What is in the object
    /// store only is waited for by a thread that is there for it, which says that it is (`far`).
    ///
    /// # Errors
    /// `NamespaceUnknown`, `InvalidArgument` for no keys or too many; what granting and the log say.
    pub fn rest(mut self, far: bool, reply: &dyn Fn(Response)) -> Result<Rest> {
        match self.unsent.take() {
            Some(last) if self.over => return Ok(Rest::Answered(last)),
            first => first.into_iter().for_each(reply),
        }
        check_keys(&self.get.keys)?;
        let (store, held) = (self.service.store().clone(), self.service.known(&self.get.namespace)?);
        let namespace = held.number();
        self.tally.namespace = Some(held);
        loop {
            let (response, more) = self.next(&store, namespace)?;
            if !more {
                return Ok(Rest::Answered(response));
            }
            if !matches!(&response, Response::Lent(lent) if lent.blocks.is_empty()) {
                reply(response);
            }
            let wanted = &self.get.keys[self.lent..];
            if store.life(namespace, &wanted[0]) != Some(Life::Resident) {
                let only = store.far().filter(|far| far.has_only(&store, namespace, &wanted[0]));
                if only.is_some() && !far {
                    return Ok(Rest::Far(Box::new(self)));
                }
                let (here, came_up) = match only {
                    Some(far) => far.bring(&store, namespace, wanted, self.until)?,
                    None => store.bring(namespace, wanted, self.until)?,
                };
                if here == 0 {
                    return Ok(Rest::Answered(self.miss()));
                }
                self.came_up[if only.is_some() { Where::Object } else { Where::Log } as usize] += came_up;
            }
        }
    }

    /// Lends what is in memory of the blocks that come next: what the client is told, and whether there is more.
    fn next(&mut self, store: &Store, namespace: u16) -> Result<(Response, bool)> {
        let (ahead, upto) = match self.lent {
            0 => (self.get.ahead.as_ref(), 1),
            _ => (None, self.get.keys.len()),
        };
        let keys = &self.get.keys[self.lent..upto];
        let loan = store.lend(store.state(), namespace, keys, self.expiry, ahead)?;
        let behind = self.get.keys.get(self.lent + loan.blocks.len());
        let more = Instant::now() < self.until
            && behind
                .and_then(|key| store.life(namespace, key))
                .is_some_and(|life| Life::THERE.contains(&life));
        Ok((self.enter(loan, more), more))
    }

    /// Blocks are lent: what the client is told of them.
    fn enter(&mut self, loan: Loan, more: bool) -> Response {
        let (count, blocks) = (loan.blocks.len(), loan.blocks);
        let tickets = loan.groups.iter().map(|lent| lent.ticket().clone()).collect();
        self.service.add_loans(loan.groups, &self.tally.whole);
        self.tally.lent(count, &mut self.came_up);
        self.lent += count;
        self.tally.misses = if more { 0 } else { (self.get.keys.len() - self.lent) as u64 };
        Response::Lent(wire::Lending { blocks, tickets, more })
    }
}
