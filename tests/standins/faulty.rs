//! The fault-injecting transport: it stands between the work and the threads of any other transport.
//!
//! Every work request passes through it, so what it does happens to every transport alike: work requests come late and
//! therefore in another order than other channels' ones, threads are stuck with a work request in flight, a work
//! request is lost or reported as failed, a chunk comes twice, a channel breaks. What is random is drawn from a seed,
//! which the test prints. What happens on a wire (bytes that are changed, lost, repeated) is a proxy's business, beside
//! the tests.
//!
//! [`Faults::stand_before`] puts them before a transport, [`Faults::between`] between an engine and all of its own.
//!
//! Work requests are counted from 0 in the sequence in which they are given, over all threads of the engine.

use kvik_core::{Class, Code, Error, Result};
use kvik_proto::{Batch, ChunkHeader, Claim, WorkId, WorkKind, WorkOutcome, WorkRequest};
use kvik_transport::{Ended, Placement, Queue, RegionMemory, Services, SessionEvents, WorkSource};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What is to go wrong. Everything is off until it is asked for, and can be changed under way.
pub struct Faults {
    seed: u64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    random: u64,
    given: u64,
    order: Vec<(u64, Class)>,
    held: u64,
    hold_from: Option<u64>,
    delays: Option<(u32, Duration)>,
    panics: bool,
    lose_at: Option<u64>,
    lost: Option<WorkId>,
    repeat_at: Option<u64>,
    end_at: Option<(u64, End)>,
    ended: u64,
}

/// How a work request is reported that its thread has executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// It has failed.
    Failed,
    /// It was left, although nobody had asked for it: the transfer never becomes complete.
    Lost,
}

impl State {
    fn below(&mut self, limit: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11) % limit.max(1)
    }

    fn draw_delay(&mut self) -> Option<Duration> {
        let (per_mille, most) = self.delays?;
        let late = self.below(1000) < u64::from(per_mille);
        late.then(|| Duration::from_micros(self.below(most.as_micros() as u64 + 1)))
    }
}

impl Faults {
    /// None yet.
    pub fn new(seed: u64) -> Arc<Faults> {
        let state = State { random: seed | 1, ..State::default() };
        Arc::new(Faults { seed, state: Mutex::new(state), changed: Condvar::new() })
    }

    /// What repeats the same draws.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Services whose work requests pass through these faults.
    pub fn stand_before(self: &Arc<Self>, behind: Services) -> Services {
        let (sessions, rma) = (behind.sessions.clone(), behind.rma.clone());
        let faulty = Arc::new(Faulty { behind, faults: self.clone() });
        Services { work: faulty.clone(), placement: faulty, sessions, rma }
    }

    /// The same for the configuration of an engine.
    pub fn between(self: &Arc<Self>) -> Arc<dyn Fn(Services) -> Services + Send + Sync> {
        let faults = self.clone();
        Arc::new(move |services| faults.stand_before(services))
    }

    /// So many of a thousand work requests come late, by `most` at most.
    pub fn delay(&self, per_mille: u32, most: Duration) {
        lock(&self.state).delays = Some((per_mille, most));
    }

    /// Threads are stuck with every work request from this one on that moves bytes, until [`Faults::release`]. One that
    /// only sums what has come goes on: who ends the transfer elsewhere need not wait for it.
    pub fn hold_from(&self, request: u64) {
        lock(&self.state).hold_from = Some(request);
        // Some that are stuck may have come before it.
        self.changed.notify_all();
    }

    /// Threads go on with what they have in flight.
    pub fn release(&self) {
        lock(&self.state).hold_from = None;
        self.changed.notify_all();
    }

    /// The thread panics that asks for work next.
    pub fn panic_next(&self) {
        lock(&self.state).panics = true;
    }

    fn may_panic(&self) {
        let panics = std::mem::take(&mut lock(&self.state).panics);
        assert!(!panics, "a thread panics: a fault that was injected");
    }

    /// Whether so many threads are stuck, after at most this time.
    pub fn wait_held(&self, count: u64, patience: Duration) -> bool {
        self.wait(patience, |state| state.held >= count)
    }

    /// The session of this work request loses a channel, when it is asked for the work request, and the work
    /// request with it: it is reported as left, however fast the rest of the transfer is.
    pub fn lose_channel_at(&self, request: u64) {
        lock(&self.state).lose_at = Some(request);
    }

    /// The chunk that this work request places is announced once more.
    pub fn repeat_at(&self, request: u64) {
        lock(&self.state).repeat_at = Some(request);
    }

    /// The work request that is reported as this one (from 0) is reported so, whatever became of it.
    pub fn end_at(&self, request: u64, how: End) {
        lock(&self.state).end_at = Some((request, how));
    }

    /// Work requests that were given.
    pub fn given(&self) -> u64 {
        lock(&self.state).given
    }

    /// Work requests that were reported.
    pub fn ended(&self) -> u64 {
        lock(&self.state).ended
    }

    /// Of those that were given, which session and class each was of, in the order in which they were given.
    pub fn order(&self) -> Vec<(u64, Class)> {
        lock(&self.state).order.clone()
    }

    fn wait(&self, patience: Duration, done: impl Fn(&State) -> bool) -> bool {
        let until = Instant::now() + patience;
        let mut state = lock(&self.state);
        while !done(&state) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// A work request is about to be given: what happens to it and its thread first. Gives its number.
    fn meet(&self, sessions: &dyn SessionEvents, request: &WorkRequest<RegionMemory>) -> u64 {
        let (id, moves) = (request.id, !matches!(request.kind, WorkKind::Sum));
        let session = id.session();
        let mut state = lock(&self.state);
        let number = state.given;
        state.given += 1;
        state.order.push((session, id.class()));
        let delay = state.draw_delay();
        let lost = state.lose_at.take_if(|at| *at == number).is_some();
        if lost {
            state.lost = Some(id);
        }
        if moves && state.hold_from.is_some_and(|from| number >= from) {
            state.held += 1;
            self.changed.notify_all();
            while state.hold_from.is_some_and(|from| number >= from) {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            state.held -= 1;
        }
        drop(state);
        if let Some(delay) = delay {
            std::thread::sleep(delay);
        }
        if lost {
            let text = "a channel broke: a fault that was injected";
            sessions.broken(session, Error::new(Code::PeerLost, text));
        }
        number
    }

    fn repeats(&self, number: u64) -> bool {
        lock(&self.state).repeat_at.take_if(|at| *at == number).is_some()
    }

    fn ends(&self, id: WorkId, outcome: WorkOutcome) -> WorkOutcome {
        let mut state = lock(&self.state);
        if state.lost.take_if(|lost| *lost == id).is_some() {
            return WorkOutcome::Void;
        }
        let number = state.ended;
        state.ended += 1;
        match state.end_at.take_if(|(at, _)| *at == number) {
            Some((_, End::Lost)) => WorkOutcome::Void,
            Some((_, End::Failed)) => {
                let text = "a work request failed: a fault that was injected";
                WorkOutcome::Failed(Error::new(Code::ChecksumMismatch, text))
            }
            None => outcome,
        }
    }
}

/// A panic elsewhere leaves what a lock guards as it is.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Faulty {
    behind: Services,
    faults: Arc<Faults>,
}

impl WorkSource for Faulty {
    fn claim(&self, queue: Queue, claim: Claim) -> Option<WorkRequest<RegionMemory>> {
        self.faults.may_panic();
        let request = self.behind.work.claim(queue, claim)?;
        self.faults.meet(&*self.behind.sessions, &request);
        Some(request)
    }

    fn claim_batch(
        &self,
        queue: Queue,
        claim: Claim,
        most: Batch,
        into: &mut Vec<WorkRequest<RegionMemory>>,
    ) {
        self.faults.may_panic();
        let before = into.len();
        self.behind.work.claim_batch(queue, claim, most, into);
        for request in &into[before..] {
            self.faults.meet(&*self.behind.sessions, request);
        }
    }

    fn done(&self, id: WorkId, outcome: WorkOutcome) {
        let outcome = self.faults.ends(id, outcome);
        self.behind.work.done(id, outcome);
    }

    fn batch_done(&self, ended: &mut Vec<Ended>) {
        for (id, outcome) in &mut *ended {
            let was = std::mem::replace(outcome, WorkOutcome::Void);
            *outcome = self.faults.ends(*id, was);
        }
        self.behind.work.batch_done(ended);
    }

    fn stuck(&self, id: WorkId, error: Error) {
        self.behind.work.stuck(id, error);
    }

    fn landed(&self, id: &mut WorkId) {
        self.behind.work.landed(id);
    }
}

impl Placement for Faulty {
    fn place(&self, session: u64, header: &ChunkHeader) -> Result<Option<WorkRequest<RegionMemory>>> {
        let Some(request) = self.behind.placement.place(session, header)? else { return Ok(None) };
        let number = self.faults.meet(&*self.behind.sessions, &request);
        if self.faults.repeats(number)
            && let Err(error) = self.behind.placement.place(session, header).map(drop)
        {
            let id = request.id;
            drop(request);
            self.behind.work.done(id, WorkOutcome::Void);
            return Err(error);
        }
        Ok(Some(request))
    }
}
