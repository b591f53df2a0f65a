//! The way from a client to its store, which may be in the same process.

use crate::MAX_KEYS;
use crate::host::{Host, Reply};
use crate::remote::{Expected, Remote};
use crate::wire::{Request, Response};
use kvik_core::{Code, EngineId, Error, Incarnation, Result, Ticket};
use kvik_engine::{Engine, TransferOptions};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// Answers to one request, at most: a part for each block, and one before or behind them.
pub(crate) const ANSWERS: usize = MAX_KEYS + 2;

/// Where a client's requests go. Cheap to clone.
#[derive(Clone)]
pub(crate) enum Link {
    /// To a store in this process, of this engine.
    Embedded(Arc<Host>, Engine),
    /// To one that another process serves.
    Remote(Arc<Remote>),
}

/// What comes back for one request.
pub(crate) struct Answers {
    from: Source,
    until: Instant,
}

/// An answer on its way to who asked. What it lends is given back at once where nobody takes it, because who asked has
/// given up: whether it is still to come then, or has come and was not looked at.
pub(crate) struct Answer {
    response: Response,
    engine: Engine,
    /// Whose answer it is.
    from: (EngineId, Incarnation),
}

impl Answer {
    pub fn new(response: Response, engine: &Engine, from: (EngineId, Incarnation)) -> Answer {
        Answer { response, engine: engine.clone(), from }
    }

    /// Takes it, with what it lends.
    pub fn take(mut self) -> Response {
        std::mem::replace(&mut self.response, Response::Accepted)
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        if let Response::Lent(lending) = &self.response {
            // A ticket of another engine is none that the store has lent.
            let own = |ticket: &&Ticket| (ticket.engine, ticket.incarnation) == self.from;
            lending.tickets.iter().filter(own).for_each(|ticket| give_back(ticket, &self.engine));
        }
    }
}

/// Gives a grant of the store back, which nobody waits for: where that fails, the grant ends by its expiry.
pub(crate) fn give_back(ticket: &Ticket, engine: &Engine) {
    if let Err(error) = engine.release(ticket, TransferOptions::default()) {
        log::debug!("blocks of the store are kept until their grant expires: {error}");
    }
}

/// Where answers come from.
enum Source {
    Embedded(Receiver<Answer>),
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
            Link::Embedded(host, engine) => {
                let ((to, from), engine) = (channel(), engine.clone());
                host.submit(engine.id(), request, Box::new(Within { to, engine }))?;
                Ok(Answers { from: Source::Embedded(from), until })
            }
            Link::Remote(remote) => {
                let expected = remote.ask(&request, deadline)?;
                Ok(Answers { from: Source::Remote(expected, remote.clone()), until })
            }
        }
    }
}

/// The way back to who asked in this process.
struct Within {
    to: Sender<Answer>,
    engine: Engine,
}

impl Reply for Within {
    fn send(&self, response: Response) {
        let from = (self.engine.id(), self.engine.incarnation());
        // Nobody reads any more: then nobody needs the answer.
        drop(self.to.send(Answer::new(response, &self.engine, from)));
    }

    fn try_send(&self, response: Response) -> Result<(), Box<Response>> {
        self.send(response);
        Ok(())
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
        match from.recv_timeout(wait).map(Answer::take) {
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

    /// The answer, where it is a number.
    ///
    /// # Errors
    /// As for [`Answers::next`].
    pub fn count(&self) -> Result<u64> {
        match self.next(None)? {
            Response::Done(count) => Ok(count),
            other => Err(unexpected(&other)),
        }
    }

    /// The answer, where it is a text, which comes in parts.
    ///
    /// # Errors
    /// As for [`Answers::next`].
    pub fn text(&self) -> Result<String> {
        let mut text = String::new();
        loop {
            match self.next(None)? {
                Response::Metrics(part) => {
                    text.push_str(&part.text);
                    if !part.more {
                        return Ok(text);
                    }
                }
                other => return Err(unexpected(&other)),
            }
        }
    }

    /// The next answer, where it comes by then. Where it does not, the store counts as one that does not answer.
    ///
    /// # Errors
    /// As for [`Answers::next`], without `WaitTimeout`.
    pub fn next_until(&self, until: Instant) -> Result<Response> {
        match self.next(Some(until.saturating_duration_since(Instant::now()))) {
            Err(error) if error.code == Code::WaitTimeout => Err(self.late()),
            other => other,
        }
    }

    /// It has not answered in its share of the time.
    pub fn late(&self) -> Error {
        self.failed(Code::DeadlineExceeded, "the store did not answer in its share of the time")
    }

    fn failed(&self, code: Code, text: &str) -> Error {
        self.told(Error::new(code, text))
    }

    /// A transfer of what the store has lent has failed: the error for who asked.
    pub fn not_moved(&self, error: Error) -> Error {
        match (error.code, &self.from) {
            (Code::PeerLost | Code::PeerRestarted | Code::PeerUnreachable, _) => self.told(error),
            (Code::TransportUnavailable, Source::Remote(_, remote)) => {
                remote.unless_it_answers(error, self.left())
            }
            _ => error,
        }
    }

    fn told(&self, error: Error) -> Error {
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

pub(crate) fn unexpected(response: &Response) -> Error {
    let text = format!("the store answered something else than it was asked: {response:?}");
    Error::new(Code::ProtocolError, text.chars().take(200).collect::<String>())
}
