//! Reaching a peer: one address of a ticket after the other, or whoever listens at one.

use crate::end::End;
use crate::events::Who;
use kvik_core::{Code, Error, Result, Ticket};
use kvik_proto::Identity;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// How long one address is tried, from connecting to the end of the handshake.
pub(crate) const ATTEMPT: Duration = Duration::from_secs(3);

/// No more addresses of one peer are tried in a row, however many its tickets name.
const MOST: usize = 16;

/// Whom a dial is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Target {
    /// The peer that a ticket or an earlier session names: who else answers is somebody else.
    Peer(Identity),
    /// Whoever listens at this address.
    Address(SocketAddr),
}

impl Target {
    /// Who must answer, where that is known.
    pub fn peer(&self) -> Option<Identity> {
        match self {
            Target::Peer(peer) => Some(*peer),
            Target::Address(_) => None,
        }
    }
}

/// A peer that is being reached.
pub(crate) struct Dial {
    known: Vec<SocketAddr>,
    left: VecDeque<SocketAddr>,
    /// The one that has not answered yet.
    trying: Option<SocketAddr>,
    tried: Vec<String>,
    /// What a handshake said, which tells more than an address that did not answer.
    refused: Option<Error>,
    /// Where somebody else listens instead.
    elsewhere: Vec<(SocketAddr, Error)>,
    /// Nobody waits for it, or nobody did when it began.
    background: bool,
    joined: bool,
    /// Who was met, for those who wait for whoever it is.
    pub met: Arc<End<Who>>,
}

impl Dial {
    /// The addresses of a ticket.
    ///
    /// # Errors
    /// `PeerUnreachable` when the ticket was made on another host and has loopback addresses only.
    pub fn new(ticket: &Ticket, here: kvik_core::HostTag) -> Result<Dial> {
        let mut left: VecDeque<SocketAddr> = ticket.addresses.iter().copied().collect();
        if ticket.host != here {
            left.retain(|address| !address.ip().is_loopback());
        }
        if left.is_empty() {
            let addresses = join(&ticket.addresses);
            return Err(Error::new(
                Code::PeerUnreachable,
                format!(
                    "engine {} gave its address as {addresses}, which only its own host (or network namespace) \
                     reaches: set its `listen` to an address that this host reaches, and a `secret` on both",
                    ticket.engine
                ),
            ));
        }
        let known = left.iter().copied().collect();
        Ok(Dial { known, left, ..Dial::again(Vec::new()) })
    }

    /// The addresses of a peer that was reached before, for nobody in particular.
    pub fn again(known: Vec<SocketAddr>) -> Dial {
        let left = known.iter().copied().collect();
        Dial {
            known,
            left,
            trying: None,
            tried: Vec::new(),
            refused: None,
            elsewhere: Vec::new(),
            background: false,
            joined: false,
            met: Arc::default(),
        }
    }

    /// The same in the background: should somebody come to wait for it, it is not his attempt that fails.
    pub fn in_background(known: Vec<SocketAddr>) -> Dial {
        Dial { background: true, ..Dial::again(known) }
    }

    /// An attempt of his own for whoever has joined one in the background that found nobody.
    pub fn for_the_joined(&self) -> Option<Dial> {
        (self.background && self.joined && self.refused.is_none()).then(|| Dial::again(self.known.clone()))
    }

    /// Every address that it knows.
    pub fn known(&self) -> &[SocketAddr] {
        &self.known
    }

    /// Who was found at an address instead of the peer.
    pub fn found_at(&self, address: &SocketAddr) -> Option<Error> {
        self.elsewhere.iter().find(|(at, _)| at == address).map(|(_, error)| error.clone())
    }

    /// Another ticket of the peer may know other ways to it.
    pub fn also(&mut self, other: Dial) {
        self.joined = true;
        for address in other.left {
            if !self.known.contains(&address) && self.known.len() < MOST {
                self.known.push(address);
                self.left.push_back(address);
            }
        }
    }

    /// The next address.
    pub fn next(&mut self) -> Option<SocketAddr> {
        self.trying = self.left.pop_front();
        self.trying
    }

    /// An address did not work.
    pub fn failed(&mut self, address: SocketAddr, error: Error) {
        self.trying = None;
        self.tried.push(format!("{address}: {error}"));
        if matches!(error.code, Code::TicketForeign | Code::PeerRestarted) {
            self.elsewhere.push((address, error.clone()));
        }
        if error.code != Code::PeerUnreachable {
            self.refused = Some(error);
        }
    }

    fn story(&self) -> String {
        let trying = self.trying.map(|address| format!("{address}: no answer so far"));
        self.tried.iter().cloned().chain(trying).collect::<Vec<_>>().join("; ")
    }

    /// What the dialling came to.
    pub fn error(&self, target: &Target) -> Error {
        match (&self.refused, target) {
            (Some(error), Target::Peer(_)) => error.clone(),
            (Some(Error { code, text, .. }), Target::Address(at)) => {
                Error::new(*code, format!("no engine was met at {at}: {text}"))
            }
            (None, Target::Address(_)) => Error::new(
                Code::PeerUnreachable,
                format!(
                    "no engine was met ({}): is it running, and does its `listen` name an address that this host \
                     reaches?",
                    self.story()
                ),
            ),
            (None, Target::Peer(owner)) => Error::new(
                Code::PeerUnreachable,
                format!(
                    "engine {} cannot be reached from here ({}): is it running, and does its `listen` or `advertise` \
                     name an address that this host reaches?",
                    owner.engine,
                    self.story()
                ),
            ),
        }
    }
}

fn join(addresses: &[SocketAddr]) -> String {
    addresses.iter().map(SocketAddr::to_string).collect::<Vec<_>>().join(", ")
}
