//! A put, on the client's side.

use crate::Stored;
use crate::client::{DEADLINE, unexpected};
use crate::link::Answers;
use crate::wire::{Ack, Response};
use kvik_core::{Code, Error, Result};
use kvik_engine::Grant;
use std::time::Duration;

/// A put that was begun. Dropped, it ends: what was not stored by then is not.
pub struct Putting {
    answers: Answers,
    grant: Grant,
    ack: Ack,
    stored: Option<Result<Stored>>,
}

impl Putting {
    pub(crate) fn new(answers: Answers, grant: Grant, ack: Ack) -> Putting {
        Putting { answers, grant, ack, stored: None }
    }

    /// Waits for the acknowledgement that was asked for; with `None` as long as the deadline takes. Gives nothing where
    /// the store has taken the put up, and nothing is stored yet.
    ///
    /// # Errors
    /// What the store says, `StoreUnavailable`, what a transfer can say; `WaitTimeout` when `timeout` passes first.
    pub fn acknowledged(&mut self, timeout: Option<Duration>) -> Result<Option<Stored>> {
        if self.stored.is_none() {
            match self.answers.next(timeout) {
                Ok(Response::Accepted) if self.ack == Ack::Accepted => return Ok(None),
                Ok(Response::Accepted) => return self.acknowledged(timeout),
                Ok(Response::Stored(stored)) => self.stored = Some(Ok(stored)),
                Ok(other) => self.stored = Some(Err(unexpected(&other))),
                Err(error) if error.code == Code::WaitTimeout => return Err(error),
                Err(error) => self.stored = Some(Err(error)),
            }
        }
        self.stored.clone().transpose()
    }

    /// Waits for its end, after which the pages are the caller's again; with `None` as long as the deadline takes.
    ///
    /// # Errors
    /// What the store says, `StoreUnavailable`, what a transfer can say; `WaitTimeout` when `timeout` passes first.
    /// `PagesQuarantined` where the store may still read the pages: the text says until when.
    pub fn wait(&mut self, timeout: Option<Duration>) -> Result<Stored> {
        while self.stored.is_none() {
            self.acknowledged(timeout)?;
        }
        // The store gives the grant back by itself, right after it has stored.
        if !matches!(self.stored, Some(Ok(_))) || self.grant.wait(self.answers.left()).is_none() {
            self.grant.revoke(DEADLINE)?;
        }
        self.stored
            .clone()
            .unwrap_or_else(|| Err(Error::new(Code::WaitTimeout, "the put goes on: wait again")))
    }
}

impl Putting {
    /// Ends it: when this returns, the pages are the caller's again, unless the log says that the store still reads.
    pub fn cancel(&mut self) {
        if let Err(error) = self.grant.revoke(DEADLINE) {
            log::warn!("a put that was given up: {error}");
        }
    }
}

impl Drop for Putting {
    fn drop(&mut self) {
        self.cancel();
    }
}
