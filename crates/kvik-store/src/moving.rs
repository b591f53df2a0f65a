//! Puts and gets that were begun, of one store or of several.

use crate::Stored;
use crate::cluster::{Gathering, Scattering};
use crate::get::Reading;
use crate::put::Writing;
use kvik_core::{Code, Result};
use std::time::Duration;

/// A get that was begun: blocks come in their order.
pub struct Getting(Get);

// One store is the common case, and costs no allocation more.
#[expect(clippy::large_enum_variant, reason = "the large variant is the common one")]
enum Get {
    One(Reading),
    Many(Box<Gathering>),
}

impl Getting {
    pub(crate) fn one(reading: Reading) -> Getting {
        Getting(Get::One(reading))
    }

    pub(crate) fn many(gathering: Gathering) -> Getting {
        Getting(Get::Many(Box::new(gathering)))
    }

    /// Waits for more blocks, with `None` as long as the deadline takes: how many are there now and verified, from the
    /// first key on; none when no more come. Of several servers, one that has gone, or does not answer in time, is as
    /// if it had nothing.
    ///
    /// # Errors
    /// What the store says, `StoreUnavailable`, what a transfer can say; `WaitTimeout` when `timeout` passes first.
    /// `ChecksumMismatch` for a block that is not what was stored. Blocks that were verified before are good. But for
    /// `WaitTimeout` it has ended then: nothing lands in the caller's pages any more.
    pub fn next(&mut self, timeout: Option<Duration>) -> Result<Option<usize>> {
        let next = match &mut self.0 {
            Get::One(reading) => reading.next(timeout),
            Get::Many(gathering) => gathering.next(timeout),
        };
        if next.as_ref().is_err_and(|error| error.code != Code::WaitTimeout) {
            self.cancel();
        }
        next
    }

    /// Waits for all of them; how many there are, verified, from the first key on.
    ///
    /// # Errors
    /// As for [`Getting::next`].
    pub fn wait(mut self) -> Result<usize> {
        while self.next(None)?.is_some() {}
        Ok(self.verified())
    }

    /// Ends it: when this returns, nothing lands in the caller's pages any more, and what was lent for it is given back.
    pub fn cancel(&mut self) {
        match &mut self.0 {
            Get::One(reading) => reading.cancel(),
            Get::Many(gathering) => gathering.cancel(),
        }
    }

    /// How many blocks are there and verified, from the first key on.
    pub fn verified(&self) -> usize {
        match &self.0 {
            Get::One(reading) => reading.verified(),
            Get::Many(gathering) => gathering.verified(),
        }
    }
}

/// A put that was begun. Dropped, it ends: what was not stored by then is not.
pub struct Putting(Put);

enum Put {
    One(Writing),
    Many(Scattering),
}

impl Putting {
    pub(crate) fn one(writing: Writing) -> Putting {
        Putting(Put::One(writing))
    }

    pub(crate) fn many(scattering: Scattering) -> Putting {
        Putting(Put::Many(scattering))
    }

    /// Waits for the acknowledgement that was asked for; with `None` as long as the deadline takes. Gives nothing where
    /// the store has taken the put up, and nothing is stored yet.
    ///
    /// # Errors
    /// As for [`Putting::wait`].
    pub fn acknowledged(&mut self, timeout: Option<Duration>) -> Result<Option<Stored>> {
        match &mut self.0 {
            Put::One(writing) => writing.acknowledged(timeout),
            Put::Many(scattering) => scattering.acknowledged(timeout),
        }
    }

    /// Waits for its end, after which the pages are the caller's again; with `None` as long as the deadline takes. Of several
    /// servers the blocks of those that have gone, or do not answer in time, count as refused; of several copies, those
    /// of the first that was made.
    ///
    /// # Errors
    /// What the store says, `StoreUnavailable`, what a transfer can say; `WaitTimeout` when `timeout` passes first.
    /// `PagesQuarantined` where the store may still read the pages: the text says until when.
    pub fn wait(&mut self, timeout: Option<Duration>) -> Result<Stored> {
        match &mut self.0 {
            Put::One(writing) => writing.wait(timeout),
            Put::Many(scattering) => scattering.wait(timeout),
        }
    }

    /// Ends it: when this returns, the pages are the caller's again, unless the log says that the store still reads.
    pub fn cancel(&mut self) {
        match &mut self.0 {
            Put::One(writing) => writing.cancel(),
            Put::Many(scattering) => scattering.cancel(),
        }
    }
}
