//! The way from a client to its store, which may be in the same process.

use crate::MAX_KEYS;
use crate::host::{Host, Job};
use crate::remote::{Expected, Remote};
use crate::wire::{Request, Response};
use kvik_core::{Code, EngineId, Error, Result};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// Answers to one request, at most: a part for each block, and one before or behind them.
pub(crate) const ANSWERS: usize = MAX_KEYS + 2;

/// Where a client's requests go.
pub(crate) enum Link {
    /// To a store in this process.
    Embedded(Arc<Host>, EngineId),
    /// To one that another process serves.
    Remote(Arc<Remote>),
}

/// What comes back for one request.
pub(crate) struct Answers {
    from: Source,
    until: Instant,
}

/// Where answers come from.
enum Source {
    Embedded(Receiver<Response>),
    /// With who is told when no answer comes.
    Remote(Expected, Arc<Remote>),
}

impl Link {
    /// Asks; the answers are there by the deadline, or an error is.
    ///
    /// # Errors
    /// The request could not be sent.
    pub fn ask(&self, request: Request, deadline: Duration) -> Result<Answers> {
        let until = Instant::now() + deadline;
        match self {
            Link::Embedded(host, client) => {
                let (to, from) = channel();
                // Nobody reads any more: then nobody needs the answer.
                let reply = Box::new(move |response| drop(to.send(response)));
                host.submit(*client, Job { request, reply })?;
                Ok(Answers { from: Source::Embedded(from), until })
            }
            Link::Remote(remote) => {
                let expected = remote.ask(&request, deadline)?;
                Ok(Answers { from: Source::Remote(expected, remote.clone()), until })
            }
        }
    }
}

impl Answers {
    /// The next answer; with `None` as long as the request's deadline takes.
    ///
    /// # Errors
    /// What the store says went wrong; `StoreUnavailable` where no answer comes. `WaitTimeout` when `timeout` passes first.
    pub fn next(&self, timeout: Option<Duration>) -> Result<Response> {
        let left = self.left();
        let wait = timeout.map_or(left, |timeout| timeout.min(left));
        let from = match &self.from {
            Source::Embedded(from) => from,
            Source::Remote(expected, _) => &expected.from,
        };
        match from.recv_timeout(wait) {
            Ok(Response::Failed(code, text)) => Err(Error::new(code, text)),
            Ok(response) => Ok(response),
            Err(RecvTimeoutError::Timeout) if wait < left => {
                Err(Error::new(Code::WaitTimeout, "the store has not answered yet: wait again"))
            }
            Err(RecvTimeoutError::Timeout) => {
                Err(self.failed(Code::DeadlineExceeded, "the store did not answer by the deadline"))
            }
            Err(RecvTimeoutError::Disconnected) => {
                Err(self.failed(Code::PeerLost, "the store was lost before it answered"))
            }
        }
    }

    fn failed(&self, code: Code, text: &str) -> Error {
        let error = Error::new(code, text);
        match &self.from {
            Source::Remote(_, remote) => remote.failed(error),
            Source::Embedded(_) => error,
        }
    }

    /// How much time is left.
    pub fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }
}
