//! Meeting whoever listens at an address, without a ticket: how a client finds the server of its configuration.
//!
//! Each address is one dial ([`Target::Address`]), which all who ask for it meanwhile share. The handshake proves to both
//! sides what it proves for a ticket, but for who the other one is: that is the answer.

use crate::end::End;
use crate::engine::Engine;
use crate::events::Who;
use crate::peers::Target;
use crate::sync::lock;
use kvik_core::{Code, Error, Result};
use kvik_host::clock::boottime;
use std::io::ErrorKind;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Of one meeting no more addresses are tried, however many a name has.
const MOST: usize = 16;

/// A meeting in progress. Dropping it ends the wait, and not the dial.
pub struct Meeting {
    engine: Engine,
    deadline: Duration,
    state: Mutex<State>,
}

struct State {
    /// Those that were not tried, the next one last.
    left: Vec<SocketAddr>,
    trying: Option<(SocketAddr, Arc<End<Who>>)>,
    failed: Vec<Error>,
}

impl Engine {
    /// Connects to whoever listens at one of the addresses, tried one after the other, and says who that is:
    /// `"store.example:7000"`, or what else resolves to addresses. A session that there is with that engine is used.
    ///
    /// From then on it is a peer as any other that this side has dialled: notify it by its id
    /// ([`To::Peer`](crate::To::Peer)). Lost, it is dialled again; where another start or another engine answers
    /// there, that is `PeerRestarted`: meet again.
    ///
    /// `deadline` (the engine's, if none is given) does not count the time that the system takes to resolve a name.
    ///
    /// # Errors
    /// `InvalidArgument` for no address, a bad deadline, or an address of this engine itself; `PeerUnreachable` when
    /// nobody answers or the name is not known; `PeerNotKvik`, `SecretMismatch`, `SecretRequired`, `TlsRequired`,
    /// `TlsFailed`, `VersionMismatch` when the other side cannot be a peer.
    pub fn meet(&self, addresses: impl ToSocketAddrs, deadline: Option<Duration>) -> Result<Who> {
        let meeting = Meeting::begin(self, addresses, deadline)?;
        loop {
            if let Some(who) = meeting.wait(crate::config::MAX_DEADLINE)? {
                return Ok(who);
            }
        }
    }
}

impl Meeting {
    /// As [`Engine::meet`], for a caller that waits in steps.
    ///
    /// # Errors
    /// What can be seen at once.
    pub fn begin(
        engine: &Engine,
        addresses: impl ToSocketAddrs,
        deadline: Option<Duration>,
    ) -> Result<Meeting> {
        engine.inner().base.setup.check()?;
        let time = engine.inner().base.setup.time(deadline)?;
        let mut left: Vec<SocketAddr> = addresses.to_socket_addrs().map_err(unresolved)?.take(MOST).collect();
        if left.is_empty() {
            return Err(Error::new(Code::InvalidArgument, "there is no address to meet an engine at"));
        }
        left.reverse();
        let state = Mutex::new(State { left, trying: None, failed: Vec::new() });
        Ok(Meeting { engine: engine.clone(), deadline: boottime() + time, state })
    }

    /// Goes on for at most so long; `None` when it must go on after that.
    ///
    /// # Errors
    /// As for [`Engine::meet`].
    pub fn wait(&self, most: Duration) -> Result<Option<Who>> {
        let inner = self.engine.inner();
        let pause = boottime().saturating_add(most);
        loop {
            inner.base.setup.check()?;
            let (at, end) = self.trying()?;
            let left = self.deadline.min(pause).saturating_sub(boottime());
            // How it ended is looked for below, also where it has not.
            drop(end.wait(Some(left), "nobody was met yet"));
            match end.outcome() {
                Some(Ok(who)) => return Ok(Some(who)),
                Some(Err(error)) => self.failed(error),
                None if boottime() < self.deadline => return Ok(None),
                None => return Err(self.late(at)),
            }
        }
    }

    /// The address that is being tried, and where to hear who is there.
    fn trying(&self) -> Result<(SocketAddr, Arc<End<Who>>)> {
        let mut state = lock(&self.state);
        if let Some((at, end)) = &state.trying {
            return Ok((*at, end.clone()));
        }
        match state.left.pop() {
            Some(at) => {
                let end = self.engine.inner().peers.meet(at);
                state.trying = Some((at, end.clone()));
                Ok((at, end))
            }
            None => Err(whole(&state.failed)),
        }
    }

    fn failed(&self, error: Error) {
        let mut state = lock(&self.state);
        if state.trying.take().is_some() {
            state.failed.push(error);
        }
    }

    fn late(&self, at: SocketAddr) -> Error {
        match self.engine.inner().peers.dial_error(&Target::Address(at)) {
            Some(Error { code, text, .. }) => {
                Error::new(code, format!("the deadline passed before an engine was met: {text}"))
            }
            None => Error::new(
                Code::PeerUnreachable,
                format!("the deadline passed before an engine was met at {at}: meet again"),
            ),
        }
    }
}

/// What became of all addresses. One that says more than that nobody answers gives the code.
fn whole(failed: &[Error]) -> Error {
    let telling = failed.iter().rev().find(|error| error.code != Code::PeerUnreachable);
    match (failed, telling.or(failed.last())) {
        ([one], _) => one.clone(),
        (_, Some(error)) => {
            let texts: Vec<&str> = failed.iter().map(|error| &*error.text).collect();
            Error::new(error.code, texts.join("; "))
        }
        (_, None) => Error::new(Code::PeerUnreachable, "no address was tried"),
    }
}

fn unresolved(error: std::io::Error) -> Error {
    match error.kind() {
        ErrorKind::InvalidInput => {
            let text = format!("an engine is met at HOST:PORT, such as \"store.example:7000\": {error}");
            Error::new(Code::InvalidArgument, text)
        }
        _ => Error::new(
            Code::PeerUnreachable,
            format!("the host to meet an engine at is not known ({error}): check its name"),
        ),
    }
}
