//! An order that a NIC has in hand.

use crate::local::stopped;
use crate::{Desk, Held, finish};
use kvik_core::{Code, Error, Extent, Extents, Result};
use kvik_proto::{Op, Order, OrderKind, OrderOutcome, Source};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long an operation that failed waits for news of the peer's addresses.
const DOUBT: Duration = Duration::from_millis(500);

pub(crate) struct Active {
    pub order: Order<Held>,
    pub op: Op,
    pub source: Arc<Source>,
    /// Position in the stream up to which operations were posted.
    at: u64,
    /// Operations under way.
    pub out: u32,
    extents: u64,
    error: Option<Error>,
    /// An operation failed, perhaps because the peer has other addresses now.
    doubt: Option<(Error, Instant)>,
    /// When it was first seen to have to stop.
    left_since: Option<Instant>,
}

impl Active {
    /// # Errors
    /// It is no order for a NIC.
    pub fn new(order: Order<Held>) -> Result<Active, Box<Order<Held>>> {
        let OrderKind::Post(op, source) = &order.kind else { return Err(Box::new(order)) };
        let (op, source, at) = (*op, source.clone(), order.part.start);
        Ok(Active { order, op, source, at, out: 0, extents: 0, error: None, doubt: None, left_since: None })
    }

    /// What is posted next, `longest` bytes at most: the offsets in the peer's region (left) and here (right).
    pub fn next(&self, longest: u64) -> Option<Extent> {
        if self.is_left() || self.doubt.is_some() || self.at >= self.order.part.end {
            return None;
        }
        let mut extents = Extents::new(&self.source.view, &self.order.view, self.at..self.order.part.end);
        extents.next().map(|extent| Extent { len: extent.len.min(longest), ..extent })
    }

    /// An operation of `len` bytes was posted.
    pub fn posted(&mut self, len: u64) {
        self.at += len;
        self.out += 1;
        self.extents += 1;
    }

    /// An operation has ended.
    pub fn ended(&mut self, result: Result<()>) {
        self.out -= 1;
        if let Err(error) = result {
            self.doubt.get_or_insert((error, Instant::now()));
        }
    }

    pub fn fail(&mut self, error: Error) {
        self.error.get_or_insert(error);
    }

    /// Nothing more is posted for it.
    fn is_left(&self) -> bool {
        self.error.is_some() || stopped(&self.order.stop)
    }

    /// Whether it waits in vain for so long for operations to end.
    pub fn is_stuck(&mut self, patience: Duration) -> bool {
        if self.out == 0 || !(self.is_left() || self.doubt.is_some()) {
            return false;
        }
        self.left_since.get_or_insert_with(Instant::now).elapsed() > patience
    }

    /// Whether nothing of it is under way, and nothing more will be.
    pub fn is_over(&self) -> bool {
        let settled = match &self.doubt {
            Some((_, since)) => since.elapsed() >= DOUBT,
            None => self.at >= self.order.part.end,
        };
        self.out == 0 && (self.is_left() || settled)
    }

    /// The endpoint was closed under its operations: true when it begins again, which does no harm, since each byte
    /// is written as before.
    pub fn begin_again(&mut self) -> bool {
        if std::mem::take(&mut self.out) == 0 {
            return !self.is_over();
        }
        if self.is_left() {
            let text = "operations of the NIC did not end when the transfer did; its endpoint was closed";
            self.fail(Error::new(Code::PeerLost, text));
            return false;
        }
        self.restart();
        true
    }

    /// What failed may have failed because of the peer's old addresses: true when it begins again.
    pub fn try_again(&mut self) -> bool {
        let again = self.doubt.is_some() && self.out == 0 && !self.is_left();
        if again {
            self.restart();
        }
        again
    }

    fn restart(&mut self) {
        (self.at, self.extents, self.doubt, self.left_since) = (self.order.part.start, 0, None, None);
    }

    /// Reports it.
    pub fn report(self, desk: &dyn Desk) {
        let all = self.at >= self.order.part.end;
        let outcome = match self.error.or(self.doubt.map(|(error, _)| error)) {
            Some(error) => OrderOutcome::Failed(error),
            None if all => OrderOutcome::Done { extents: self.extents, verify: Duration::ZERO },
            None => OrderOutcome::Void,
        };
        finish(desk, self.order, outcome);
    }
}
