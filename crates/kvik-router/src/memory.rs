//! The memory that clients' bodies may take, over all requests.
//!
//! `max_body` bounds one body, `max_inflight` the requests: the product of the two is more than a machine has. A body
//! takes its memory as it arrives, not as its length is announced, and keeps it for as long as any body made from it is
//! kept: also by work that outlives the request. Nobody waits for memory: who gets none is turned away.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// How often a body is held at once: as it came, and as each of the two engines gets it.
pub(crate) const COPIES: usize = 3;

/// Memory is counted in these, since a semaphore gives at most 2^32 at a time.
const UNIT: usize = 1 << 10;

/// What there is for all bodies.
pub(crate) struct BodyMemory(Arc<Semaphore>);

impl BodyMemory {
    pub(crate) fn new(bytes: usize) -> Self {
        Self(Arc::new(Semaphore::new(bytes.div_ceil(UNIT))))
    }

    /// The share of a body of which nothing has come.
    pub(crate) fn begin(&self) -> Share {
        Share { all: self.0.clone(), taken: None }
    }
}

/// The memory of one body and of those made from it, given back when it is dropped.
pub(crate) struct Share {
    all: Arc<Semaphore>,
    taken: Option<OwnedSemaphorePermit>,
}

impl Share {
    /// Takes what a body of this length needs; false where there is not as much.
    pub(crate) fn grow(&mut self, length: usize) -> bool {
        let needed = length.saturating_mul(COPIES).div_ceil(UNIT);
        let has = self.taken.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        let Ok(more) = u32::try_from(needed.saturating_sub(has)) else { return false };
        let Ok(more) = self.all.clone().try_acquire_many_owned(more) else { return false };
        match &mut self.taken {
            Some(taken) => taken.merge(more),
            None => self.taken = Some(more),
        }
        true
    }
}
