//! The way from a client to its store, which may be in the same process.

use crate::MAX_KEYS;
use crate::host::{Host, Reply};
use crate::opened::Opened;
use crate::remote::{Expected, Remote};
use crate::wire::{Get, Request, Response};
use kvik_core::{Code, EngineId, Error, Incarnation, Result, Ticket};
use kvik_engine::{Engine, TransferOptions};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// Answers to one request, at most: a part for each block, and one before or behind them.
pub(crate) const ANSWERS: usize = MAX_KEYS + 2;

/// A share of a request's time that ends so soon before it is all of it.
const SLACK: Duration = Duration::from_millis(5);

/// Where a client's requests go. Cheap to clone.
#[derive(Clone)]
pub(crate) enum Link {
    /// To a store in this process, of this engine, and what is said to it of namespaces.
    Embedded(Arc<Host>, Engine, Opened),
    /// To one that another process serves.
    Remote(Arc<Remote>),
}

/// What comes back for one request.
pub(crate) struct Answers {
    from: Source,
    until: Instant,
    /// What is asked again where the store has forgotten the namespace for others; none when it has answered otherwise.
    again: Option<Box<(Link, Request)>>,
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
            Link::Embedded(host, engine, _) => {
                let again = request.namespace().map(|_| Box::new((self.clone(), request.clone())));
                let ((to, from), client) = (channel(), (engine.id(), engine.incarnation()));
                host.submit(client, request, Box::new(Within { to, engine: engine.clone() }))?;
                Ok(Answers { from: Source::Embedded(from), until, again })
            }
            Link::Remote(remote) => {
                let expected = remote.ask(&request, deadline)?;
                let again = request.namespace().is_some().then(|| Box::new((self.clone(), request)));
                Ok(Answers { from: Source::Remote(expected, remote.clone()), until, again })
            }
        }
    }

    /// What is said to the store of namespaces.
    pub fn opened(&self) -> &Opened {
        match self {
            Link::Embedded(_, _, opened) => opened,
            Link::Remote(remote) => remote.opened(),
        }
    }

    /// Opens the namespace of a request, and asks for it anew; none where nobody here has opened it.
    ///
    /// # Errors
    /// As for [`Link::ask`]; what the store says against it.
    fn ask_again(&self, mut request: Request, until: Instant) -> Result<Option<Answers>> {
        let left = || until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let Some(open) = request.namespace().and_then(|namespace| self.opened().of(namespace)) else {
            return Ok(None);
        };
        match self.ask(open, left())?.next(None)? {
            Response::Opened => {}
            other => return Err(unexpected(&other)),
        }
        if let Request::Get(Get { ahead, .. }) = &mut request {
            // An id of the client's own counts once.
            *ahead = None;
        }
        let mut answers = self.ask(request, left())?;
        answers.again = None;
        Ok(Some(answers))
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
    pub fn next(&mut self, timeout: Option<Duration>) -> Result<Response> {
        let response = self.receive(timeout)?;
        match (response, self.again.take()) {
            (Response::Failed(Code::NamespaceUnknown, text), Some(again)) => {
                let (link, request) = *again;
                *self =
                    link.ask_again(request, self.until)?.ok_or(Error::new(Code::NamespaceUnknown, text))?;
                self.next(timeout)
            }
            (Response::Failed(code, text), _) => Err(Error::new(code, text)),
            (response, _) => Ok(response),
        }
    }

    fn receive(&self, timeout: Option<Duration>) -> Result<Response> {
        let left = self.left();
        let wait = timeout.map_or(left, |timeout| timeout.min(left));
        let from = match &self.from {
            Source::Embedded(from) => from,
            Source::Remote(expected, _) => &expected.from,
        };
        match from.recv_timeout(wait).map(Answer::take) {
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
    pub fn count(&mut self) -> Result<u64> {
        match self.next(None)? {
            Response::Done(count) => Ok(count),
            other => Err(unexpected(&other)),
        }
    }

    /// The answer, where it is a text, which comes in parts.
    ///
    /// # Errors
    /// As for [`Answers::next`].
    pub fn text(&mut self) -> Result<String> {
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

    /// The next answer, where it comes by then. Where it does not, see [`Answers::late`].
    ///
    /// # Errors
    /// As for [`Answers::next`], without `WaitTimeout`.
    pub fn next_until(&mut self, until: Instant) -> Result<Response> {
        match self.next(Some(until.saturating_duration_since(Instant::now()))) {
            Err(error) if error.code == Code::WaitTimeout => Err(self.late()),
            other => other,
        }
    }

    /// It has not answered in its share of the time. That of a disk is slow, and all of its time was not over: so it only has
    /// to show that it answers at all.
    pub fn late(&self) -> Error {
        let error = Error::new(Code::DeadlineExceeded, "the store did not answer in its share of the time");
        match &self.from {
            Source::Remote(_, remote) if self.left() > SLACK => {
                remote.doubt();
                error
            }
            _ => self.told(error),
        }
    }

    fn failed(&self, code: Code, text: &str) -> Error {
        self.told(Error::new(code, text))
    }

    /// A transfer of what the store has lent has failed: the error for who asked.
    pub fn not_moved(&self, error: Error) -> Error {
        let error = of_the_call(error);
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
            Source::Remote(expected, remote) => remote.failed(expected.start, error),
            Source::Embedded(_) => error,
        }
    }

    /// How much time is left.
    pub fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }
}

/// A put's pages and a get's blocks are granted for as long as the call may take: its caller knows of no grant.
pub(crate) fn of_the_call(error: Error) -> Error {
    match error.code {
        Code::GrantExpired => {
            let text = "blocks were still to be moved at the deadline: give the call more time";
            Error::new(Code::DeadlineExceeded, text)
        }
        _ => error,
    }
}

pub(crate) fn unexpected(response: &Response) -> Error {
    let text = format!("the store answered something else than it was asked: {response:?}");
    Error::new(Code::ProtocolError, text.chars().take(200).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_calls_late_hears_of_the_deadline_and_of_no_grant() {
        let of_the_grant = Error::new(Code::GrantExpired, "grant 12 has ended: ask for a longer expiry");
        let late = of_the_call(of_the_grant);
        assert!(late.code == Code::DeadlineExceeded && !late.text.contains("grant"), "{late}");
        let other = Error::new(Code::StorageFailed, "the disk is gone");
        assert_eq!(of_the_call(other.clone()), other);
    }
}
