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
        let left = self.answers.left();
        let wait = timeout.map_or(left, |timeout| timeout.min(left));
        let goes_on = || Error::new(Code::WaitTimeout, "the put goes on: wait again");
        match self.stored.clone() {
            // The store gives the grant back by itself, right after it has stored.
            Some(Ok(stored)) if self.grant.wait(wait).is_some() => Ok(stored),
            Some(Ok(_)) if wait < left => Err(goes_on()),
            stored => {
                self.grant.revoke(DEADLINE)?;
                stored.unwrap_or_else(|| Err(goes_on()))
            }
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::remote::Remote;
    use crate::wire::{REQUESTS, RESPONSES};
    use kvik_core::Layout;
    use kvik_engine::{Config, Inbox, Who};
    use std::sync::Arc;
    use std::sync::mpsc::channel;

    #[test]
    fn a_put_that_is_stored_and_not_given_back_goes_on_at_the_timeout() {
        let start = || Engine::start(Config::default()).unwrap();
        let ((here, there), (to, asked)) = ((start(), start()), channel());
        let take = move |who: &Who, message: &[u8]| {
            let _ = to.send((who.engine, Request::decode(message).unwrap().0));
        };
        let inbox = Inbox::handing(&there, REQUESTS, take).unwrap();
        let (address, from) = (there.addresses()[0].to_string(), there.clone());
        // What listens there says that all is stored, and reads nothing.
        let saying = std::thread::spawn(move || {
            for (who, number) in asked {
                let said = Response::Stored(Stored::default()).encode(number);
                from.notify_on(RESPONSES, who, &said, None).unwrap();
            }
        });
        let link = Link::Remote(Remote::connect(&here, &address, Duration::from_secs(60)).unwrap());
        let region = here.allocate(4096).unwrap();
        let layout = Arc::new(Layout::contiguous(1, 4096).unwrap());
        let pages = PageSet::new(&region, layout, [0].into(), None, None).unwrap();
        let (namespace, keys) = (NamespaceId([1; 32]), [BlockKey([2; 32])]);
        let given = Given { namespace, parent: None, keys: &keys, pages: &pages, ack: Ack::Stored };
        let mut writing = Writing::begin_at((&here, &link), given, DEADLINE).unwrap();
        assert!(writing.acknowledged(None).unwrap().is_some());
        let waited = writing.wait(Some(Duration::ZERO)).map_err(|error| error.code);
        assert_eq!(waited, Err(Code::WaitTimeout), "it was waited for until the deadline");
        inbox.close();
        drop((writing, link, inbox, there));
        saying.join().unwrap();
    }
}
