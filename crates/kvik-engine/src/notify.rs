//! Notifications to peers.
//!
//! The caller waits until its notification is in the peer's window: so there is no queue here that could grow, and
//! notifications of one thread go in the order of its calls. What comes of it appears in the [`Notice`].

use crate::config::MAX_DEADLINE;
use crate::end::End;
use crate::engine::Engine;
use crate::inner::Inner;
use crate::report::TransferOptions;
use crate::sync::lock;
use crate::transfer::Transfer;
use kvik_core::{Code, EngineId, Error, Result, Ticket};
use kvik_host::clock::boottime;
use kvik_proto::{Identity, Topic, check_payload};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Whom to notify.
#[derive(Debug, Clone)]
pub enum To {
    /// The engine that gave this ticket; it is connected to if that is not done yet.
    Ticket(Arc<Ticket>),
    /// An engine that this one is connected to, or connects to again.
    Peer(EngineId),
    /// An engine that this one is connected to: without a connection, `PeerLost` at once.
    Connected(EngineId),
}

impl From<&Ticket> for To {
    fn from(ticket: &Ticket) -> To {
        To::Ticket(Arc::new(ticket.clone()))
    }
}

impl From<EngineId> for To {
    fn from(peer: EngineId) -> To {
        To::Peer(peer)
    }
}

/// A notification that was sent.
#[derive(Clone)]
pub struct Notice {
    inner: Arc<Inner>,
    end: Arc<End<()>>,
}

impl Notice {
    /// Whether its end is known.
    pub fn is_done(&self) -> bool {
        self.end.is_there()
    }

    /// Its end, if that is known.
    pub fn result(&self) -> Option<Result<()>> {
        self.end.outcome()
    }

    /// Waits until the peer's program, or its library, has taken it; with `None` as long as its deadline takes.
    ///
    /// # Errors
    /// `DeadlineExceeded` when it was not taken by its deadline, `PeerLost` when the session ended first: it may have
    /// been taken all the same. `WaitTimeout` when `timeout` passes first.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<()> {
        self.inner.base.setup.check_fork()?;
        self.end.wait(timeout, "the notification was not taken yet; it has until its deadline: wait again")
    }

    /// A descriptor that becomes readable at its end, for event loops.
    ///
    /// # Errors
    /// `InvalidArgument` when the process has too many descriptors.
    pub fn done_fd(&self) -> Result<OwnedFd> {
        self.inner.base.setup.check_fork()?;
        self.end.fd()
    }
}

/// A notification that waits for its place in the peer's window.
pub struct Notifying {
    engine: Engine,
    topic: Topic,
    to: To,
    payload: Arc<[u8]>,
    deadline: Duration,
    /// Where the peer is being connected to.
    connecting: Mutex<Option<Transfer>>,
}

impl Engine {
    /// Sends `payload` (at most 64 KiB) to the program of a peer, which finds it among its events. Returns when it
    /// is on its way; the deadline (the engine's, if none is given) is for that and for the peer's program to take it.
    ///
    /// Notifications of one thread to one peer come in their order, each exactly once while the session lives, and
    /// at most once when it ends meanwhile.
    ///
    /// # Errors
    /// `NotificationsFull` when the peer has not taken what was sent before by the deadline; `InvalidArgument` for
    /// more than 64 KiB, a bad deadline or this engine itself; `PeerUnreachable`, `PeerRestarted` and what else
    /// connecting can say.
    pub fn notify(&self, to: impl Into<To>, payload: &[u8], deadline: Option<Duration>) -> Result<Notice> {
        self.notify_on(0, to, payload, deadline)
    }

    /// As [`Engine::notify`], of a topic: for a library of the peer's process, which has an
    /// [`inbox`](Engine::inbox) for it. Where nobody has, the notification is acknowledged and dropped there.
    ///
    /// Each topic has an order and a window of its own: what is not taken of one holds up no other one.
    ///
    /// # Errors
    /// As for [`Engine::notify`].
    pub fn notify_on(
        &self,
        topic: Topic,
        to: impl Into<To>,
        payload: &[u8],
        deadline: Option<Duration>,
    ) -> Result<Notice> {
        let notifying = Notifying::begin(self, topic, to, payload, deadline)?;
        loop {
            if let Some(notice) = notifying.wait(MAX_DEADLINE)? {
                return Ok(notice);
            }
        }
    }
}

impl Notifying {
    /// As [`Engine::notify_on`], for a caller that waits in steps.
    ///
    /// # Errors
    /// What can be seen at once.
    pub fn begin(
        engine: &Engine,
        topic: Topic,
        to: impl Into<To>,
        payload: &[u8],
        deadline: Option<Duration>,
    ) -> Result<Notifying> {
        engine.inner().base.setup.check()?;
        check_payload(payload)?;
        let to = to.into();
        let whom = match &to {
            To::Ticket(ticket) => ticket.engine,
            To::Peer(peer) | To::Connected(peer) => *peer,
        };
        if whom == engine.id() {
            let text = "a notification is for another engine: this one is the caller's own";
            return Err(Error::new(Code::InvalidArgument, text));
        }
        let time = engine.inner().base.setup.time(deadline)?;
        Ok(Notifying {
            engine: engine.clone(),
            topic,
            to,
            payload: payload.into(),
            deadline: boottime() + time,
            connecting: Mutex::default(),
        })
    }

    /// Goes on for at most so long; `None` when it must go on after that.
    ///
    /// # Errors
    /// As for [`Engine::notify`].
    pub fn wait(&self, most: Duration) -> Result<Option<Notice>> {
        let inner = self.engine.inner();
        let pause = boottime().saturating_add(most);
        loop {
            inner.base.setup.check()?;
            let moves = inner.base.observers.notices.moved.count();
            let full = match self.try_now()? {
                Ok(notice) => return Ok(Some(notice)),
                Err(full) => full,
            };
            let now = boottime();
            if now >= self.deadline {
                return Err(full);
            }
            let left = self.deadline.min(pause).saturating_sub(now);
            if left.is_zero() {
                return Ok(None);
            }
            let connecting = lock(&self.connecting).clone();
            if let Some(connecting) = connecting {
                drop(connecting.wait(Some(left)));
                continue;
            }
            inner.base.observers.notices.moved.wait_since(moves, left);
        }
    }

    /// The notice; or, inside, why it is not there yet.
    fn try_now(&self) -> Result<Result<Notice, Error>> {
        let inner = self.engine.inner();
        let peer = match &self.to {
            To::Ticket(ticket) => Identity { engine: ticket.engine, incarnation: ticket.incarnation },
            To::Peer(engine) | To::Connected(engine) => match inner.peers.table.find(engine) {
                Some(peer) => peer,
                None => {
                    let text = format!(
                        "engine {engine} is not connected to this one: meet it at its address, or notify it by one of \
                         its tickets"
                    );
                    return Err(Error::new(Code::PeerUnreachable, text).about_peer(*engine));
                }
            },
        };
        let end = Arc::new(End::default());
        let sent = inner.base.node(|node, _| {
            let session = node.session_with(&peer)?;
            let send = || node.session(session).notify(self.topic, &self.payload, self.deadline);
            Some(inner.base.observers.notices.begin(session, self.topic, end.clone(), send))
        });
        if sent.is_some() {
            *lock(&self.connecting) = None;
        }
        match sent {
            Some(Ok(_)) => Ok(Ok(Notice { inner: inner.clone(), end })),
            Some(Err(error)) if matches!(error.code, Code::NotificationsFull | Code::PeerLost) => {
                Ok(Err(error))
            }
            Some(Err(error)) => Err(error),
            None => self.connect(&peer).map(Err),
        }
    }

    /// Sees to it that there will be a session. Gives what to say should it not come in time.
    fn connect(&self, peer: &Identity) -> Result<Error> {
        let inner = self.engine.inner();
        inner.peers.table.check(peer)?;
        let late =
            || Error::new(Code::PeerUnreachable, format!("engine {} was not reached in time", peer.engine));
        let To::Ticket(ticket) = &self.to else {
            return match matches!(self.to, To::Peer(_)) && inner.peers.table.comes_back(peer) {
                true => Ok(late()),
                false => Err(Error::new(
                    Code::PeerLost,
                    format!(
                        "the connection to engine {} is gone: meet it at its address, or notify it by one of its \
                         tickets",
                        peer.engine
                    ),
                )),
            };
        };
        let mut connecting = lock(&self.connecting);
        if let Some(error) = connecting.as_ref().and_then(Transfer::result) {
            // It was connected to, and lost again: another attempt, until the deadline.
            error?;
            *connecting = None;
        }
        if connecting.is_none() {
            let left = self.deadline.saturating_sub(boottime());
            if left.is_zero() {
                return Ok(late());
            }
            let options = TransferOptions { deadline: Some(left), ..TransferOptions::default() };
            let request = self.engine.request(ticket, &options)?;
            *connecting = Some(self.engine.begin(request, boottime())?);
        }
        Ok(late())
    }
}
