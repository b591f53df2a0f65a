//! Peers and data channels that are dialled.

use super::Control;
use super::conns::{Conn, MAX_STRANGERS};
use super::greet::{nonce, send_all};
use super::secure::MAX_UNDER_TLS;
use crate::commands::{Fresh, Purpose, Secured};
use crate::peers::{ATTEMPT, Dial, Target};
use kvik_core::{Code, Error, Result, Ticket};
use kvik_host::event::Interest;
use kvik_host::socket::{TcpConn, TcpOptions};
use kvik_proto::{Handshake, Identity, Join, JoinKind};
use kvik_transport::from_host;
use kvik_transport::tcp::Stream;
use kvik_transport::tls::TlsLink;
use std::net::SocketAddr;
use std::time::Instant;

impl Control {
    /// Sees to it that transfers which wait for a session with this peer get one, or hear why not.
    pub(super) fn dial(&mut self, owner: Identity, ticket: &Ticket) {
        if let Some(session) = self.inner.base.node(|node, _| node.session_with(&owner)) {
            return self.inner.transfers.launch_waiting(session);
        }
        let dial = match Dial::new(ticket, self.inner.base.setup.host_tag()) {
            Ok(dial) => dial,
            Err(error) => return self.inner.transfers.fail_waiting(&owner, &error),
        };
        if self.inner.peers.dial(owner, dial) {
            self.dial_next(Target::Peer(owner), None);
        }
    }

    /// Dials the peers whose turn it is to be dialled again.
    pub(super) fn dial_again(&mut self) {
        while let Some(peer) = self.inner.peers.dial_again() {
            self.dial_next(Target::Peer(peer), None);
        }
    }

    /// Tries the next address of a dial; the one before failed.
    pub(super) fn dial_next(&mut self, target: Target, mut failed: Option<(SocketAddr, Error)>) {
        while let Some(next) = self.inner.peers.next_address(target, failed.take()) {
            let to = match next {
                Ok(to) => to,
                Err(error) => return self.not_reached(target, &error),
            };
            match TcpConn::start_connect(to, &TcpOptions::default()) {
                Ok(conn) => {
                    let purpose = Purpose::Session(target, to);
                    return self.watch(Conn::Dialing { conn, to, purpose }, Interest::WRITE, Some(ATTEMPT));
                }
                Err(error) => failed = Some((to, Error::new(Code::PeerUnreachable, error.to_string()))),
            }
        }
    }

    /// Transfers that waited for whom was dialled have waited in vain. Who waited to meet somebody was told.
    pub(super) fn not_reached(&self, target: Target, error: &Error) {
        if let Some(owner) = target.peer() {
            self.inner.transfers.fail_waiting(&owner, error);
        }
    }

    pub(super) fn dial_channels(&mut self, session: u64) {
        let Some(Some(to)) = self.inner.peers.address(session) else { return };
        for index in 0..self.inner.base.setup.config.channels {
            match TcpConn::start_connect(to, &TcpOptions::default()) {
                Ok(conn) => {
                    let purpose = Purpose::Channel { session, index };
                    self.watch(Conn::Dialing { conn, to, purpose }, Interest::WRITE, Some(ATTEMPT));
                }
                Err(error) => {
                    let text = format!("a data channel could not be opened: {error}");
                    let error = Error::new(Code::PeerLost, text);
                    return self.inner.base.node(|node, _| node.session(session).close(error));
                }
            }
        }
    }

    /// A connection that was dialled is there, or is not.
    pub(super) fn connected(&mut self, token: u64) -> Result<()> {
        let Some(Conn::Dialing { conn, to, .. }) = self.conns.get(token) else { return Ok(()) };
        conn.connected(*to).map_err(|error| Error::new(Code::PeerUnreachable, error.to_string()))?;
        let tls = self.inner.base.setup.tls.clone();
        let link = tls.map(|tls| TlsLink::client(&tls, *to)).transpose()?;
        let Some(until) = self.conns.until(token) else { return Ok(()) };
        let Some(Conn::Dialing { conn, purpose, .. }) = self.conns.remove(token) else { return Ok(()) };
        match (link, &self.securing) {
            (Some(link), Some(securing)) => {
                securing.take(Fresh { conn: Stream::tls(conn, link), purpose, until });
                Ok(())
            }
            _ => self.greet(Stream::from(conn), purpose, until),
        }
    }

    /// A connection has left the thread for TLS.
    pub(super) fn secured(&mut self, secured: Secured) {
        let Secured { fresh: Fresh { conn, purpose, until }, outcome } = secured;
        if let Err(error) = outcome.and_then(|()| self.greet(conn, purpose, until)) {
            self.not_greeted(purpose, error);
        }
    }

    /// Begins what a connection is for, once it is as it is to be.
    ///
    /// # Errors
    /// This process has no random bytes: nothing has become of the connection.
    pub(super) fn greet(&mut self, mut conn: Stream, purpose: Purpose, until: Instant) -> Result<()> {
        let (nonce, input, heard) = (nonce()?, Vec::new(), false);
        let (conn, sent) = match purpose {
            Purpose::Stranger => {
                let most = if self.securing.is_some() { MAX_UNDER_TLS } else { MAX_STRANGERS };
                self.make_room(most, |conn| matches!(conn, Conn::Shaking { dialled: None, .. }));
                let shake = Box::new(Handshake::listen(self.inner.base.local(), nonce));
                (Conn::Shaking { conn, shake, input, heard, dialled: None }, Ok(()))
            }
            Purpose::Session(target, to) => {
                let (shake, hello) = Handshake::open(self.inner.base.local(), nonce, target.peer());
                let sent = send_all(&mut conn, &hello);
                let (shake, dialled) = (Box::new(shake), Some((target, to)));
                (Conn::Shaking { conn, shake, input, heard, dialled }, sent)
            }
            Purpose::Channel { session, index } => {
                let key =
                    self.inner.base.node(|node, _| node.established(session).map(|session| session.key));
                let Some(key) = key else { return Ok(()) };
                let join = Join::new(session, index, JoinKind::Data, &key, nonce);
                // It is asked for this very TLS connection.
                let join = conn.binding().map_or(join.clone(), |binding| join.bound(&key, binding));
                let sent = send_all(&mut conn, &join.encode());
                (Conn::Joining { conn, session, input }, sent)
            }
        };
        self.watch_sent(conn, until, sent);
        Ok(())
    }

    /// Waits for the answer to a greeting, if it was sent.
    fn watch_sent(&mut self, conn: Conn, until: Instant, sent: Result<()>) {
        // What came behind TLS's own handshake wakes nobody any more.
        let waits = matches!(&conn, Conn::Shaking { conn, .. } if conn.has_input());
        let (token, added) = self.conns.add(conn, Interest::READ, Some(until));
        if let Err(error) = sent.and(added.map_err(|error| from_host(Code::PeerUnreachable, error))) {
            self.fail(token, error);
        } else if waits {
            self.serve(token, true, false);
        }
    }
}
