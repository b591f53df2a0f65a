//! A put, on the client's side.

use crate::link::{Answers, Link, of_the_call, unexpected};
use crate::wire::{Ack, DEADLINE, Put, Request, Response};
use crate::{BlockKey, NamespaceId, Stored};
use kvik_core::{Code, Error, Result, Right, Use};
use kvik_engine::{Engine, Grant, GrantOptions, PageSet};
use std::time::Duration;

/// A put to one store that was begun. Dropped, it ends: what was not stored by then is not.
pub(crate) struct Writing {
    answers: Answers,
    grant: Grant,
    ack: Ack,
    stored: Option<Result<Stored>>,
}

/// Blocks that are put behind `parent`, and their pages.
#[derive(Clone, Copy)]
pub(crate) struct Given<'a> {
    pub namespace: NamespaceId,
    pub parent: Option<BlockKey>,
    pub keys: &'a [BlockKey],
    pub pages: &'a PageSet,
    pub ack: Ack,
}

impl Writing {
    /// Asks one store to take blocks.
    ///
    /// # Errors
    /// The pages cannot be granted, or the request could not be sent.
    pub fn begin_at(
        (engine, link): (&Engine, &Link),
        given: Given<'_>,
        deadline: Duration,
    ) -> Result<Writing> {
        let Given { namespace, parent, keys, pages, ack } = given;
        let options = GrantOptions {
            right: Right::Read,
            uses: Use::Once(1),
            expiry: deadline,
            max_expiry: deadline,
            ..GrantOptions::default()
        };
        let grant = engine.grant(pages, options)?;
        let ticket = grant.ticket().clone();
        let put = Put { namespace, parent, keys: keys.to_vec(), ticket, ack, deadline };
        let answers = link.ask(Request::Put(put), deadline)?;
        Ok(Writing { answers, grant, ack, stored: None })
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
                Err(error) => self.stored = Some(Err(of_the_call(error))),
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

impl Writing {
    /// Ends it: when this returns, the pages are the caller's again, unless the log says that the store still reads.
    pub fn cancel(&mut self) {
        if let Err(error) = self.grant.revoke(DEADLINE) {
            log::warn!("a put that was given up: {error}");
        }
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        self.cancel();
    }
}
