//! Peers and data channels that are dialled.

use super::conns::{Conn, Purpose, Why};
use super::greet::{nonce, send_all};
use super::secure::{Fresh, MAX_UNDER_TLS, Secured};
use super::{Control, MAX_STRANGERS};
use crate::dial::{ATTEMPT, Dial};
use crate::inner::lock;
use kvik_core::{Code, Error, Result, Ticket};
use kvik_host::clock::boottime;
use kvik_host::event::Interest;
use kvik_host::socket::{TcpConn, TcpOptions};
use kvik_proto::{Handshake, Identity, Join, JoinKind};
use kvik_transport::from_host;
use kvik_transport::tcp::Stream;
use kvik_transport::tls::TlsLink;
use std::collections::hash_map::Entry;
use std::net::SocketAddr;
use std::time::Instant;

impl Control {
    /// Sees to it that transfers which wait for a session with this peer get one, or hear why not.
    pub(super) fn dial(&mut self, owner: Identity, ticket: &Ticket) {
        if let Some(session) = self.inner.node(|node, _| node.session_with(&owner)) {
            return self.inner.launch_waiting(session);
        }
        let dial = match Dial::new(ticket, self.inner.host_tag()) {
            Ok(dial) => dial,
            Err(error) => return self.inner.fail_waiting(&owner, &error),
        };
        let mut tables = lock(&self.inner.tables);
        match tables.dials.entry(owner) {
            Entry::Occupied(mut in_flight) => in_flight.get_mut().also(dial),
            Entry::Vacant(place) => {
                place.insert(dial);
                drop(tables);
                self.dial_next(owner, None);
            }
        }
    }

    /// Dials the peers whose turn it is to be dialled again.
    pub(super) fn dial_again(&mut self) {
        while let Some((peer, addresses)) = self.inner.peers.due(boottime()) {
            let mut tables = lock(&self.inner.tables);
            if let Entry::Vacant(place) = tables.dials.entry(peer) {
                place.insert(Dial::in_background(addresses));
                drop(tables);
                self.dial_next(peer, None);
            }
        }
    }

    /// Tries the next address of a peer; the one before failed.
    pub(super) fn dial_next(&mut self, owner: Identity, mut failed: Option<(SocketAddr, Error)>) {
        loop {
            let mut tables = lock(&self.inner.tables);
            let Some(dial) = tables.dials.get_mut(&owner) else { return };
            if let Some((address, error)) = failed.take() {
                dial.failed(address, error);
            }
            let Some(to) = dial.next() else {
                let fresh = dial.for_the_joined();
                let over = match fresh {
                    Some(fresh) => tables.dials.insert(owner, fresh).filter(|_| false),
                    None => tables.dials.remove(&owner),
                };
                drop(tables);
                let Some(over) = over else { continue };
                let error = self.inner.on_not_reached(owner, &over);
                return self.inner.fail_waiting(&owner, &error);
            };
            drop(tables);
            match TcpConn::start_connect(to, &TcpOptions::default()) {
                Ok(conn) => {
                    let (until, why) = (Instant::now() + ATTEMPT, Why::Session(owner));
                    return self.watch(Conn::Dialing { conn, to, why, until }, Interest::WRITE);
                }
                Err(error) => failed = Some((to, Error::new(Code::PeerUnreachable, error.to_string()))),
            }
        }
    }

    pub(super) fn dial_channels(&mut self, session: u64) {
        let address = lock(&self.inner.tables).links.get(&session).and_then(|link| link.address);
        let Some(to) = address else { return };
        for index in 0..self.inner.config.channels {
            match TcpConn::start_connect(to, &TcpOptions::default()) {
                Ok(conn) => {
                    let (until, why) = (Instant::now() + ATTEMPT, Why::Channel { session, index });
                    self.watch(Conn::Dialing { conn, to, why, until }, Interest::WRITE);
                }
                Err(error) => {
                    let text = format!("a data channel could not be opened: {error}");
                    let error = Error::new(Code::PeerLost, text);
                    return self.inner.node(|node, _| node.close_session(session, error));
                }
            }
        }
    }

    /// A connection that was dialled is there, or is not.
    pub(super) fn connected(&mut self, token: u64) -> Result<()> {
        let Some(Conn::Dialing { conn, to, .. }) = self.conns.get(&token) else { return Ok(()) };
        conn.connected(*to).map_err(|error| Error::new(Code::PeerUnreachable, error.to_string()))?;
        let tls = self.inner.tls.clone();
        let link = tls.map(|tls| TlsLink::client(&tls, *to)).transpose()?;
        let Some(Conn::Dialing { conn, to, why, until }) = self.remove(token) else { return Ok(()) };
        let purpose = match why {
            Why::Session(owner) => Purpose::Session(owner, to),
            Why::Channel { session, index } => Purpose::Channel { session, index },
        };
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
                let shake = Box::new(Handshake::listen(self.inner.local(), nonce));
                (Conn::Shaking { conn, shake, input, heard, dialled: None, until }, Ok(()))
            }
            Purpose::Session(owner, to) => {
                let (shake, hello) = Handshake::open(self.inner.local(), nonce, Some(owner));
                let sent = send_all(&mut conn, &hello);
                let (shake, dialled) = (Box::new(shake), Some((owner, to)));
                (Conn::Shaking { conn, shake, input, heard, dialled, until }, sent)
            }
            Purpose::Channel { session, index } => {
                let key = self.inner.node(|node, _| node.established(session).map(|session| session.key));
                let Some(key) = key else { return Ok(()) };
                let join = Join::new(session, index, JoinKind::Data, &key, nonce);
                // It is asked for this very TLS connection.
                let join = conn.binding().map_or(join.clone(), |binding| join.bound(&key, binding));
                let sent = send_all(&mut conn, &join.encode());
                (Conn::Joining { conn, session, input, until }, sent)
            }
        };
        self.watch_sent(conn, sent);
        Ok(())
    }

    /// Waits for the answer to a greeting, if it was sent.
    fn watch_sent(&mut self, conn: Conn, sent: Result<()>) {
        let token = self.token();
        let added = conn.add_to(&self.epoll, token, Interest::READ);
        // What came behind TLS's own handshake wakes nobody any more.
        let waits = matches!(&conn, Conn::Shaking { conn, .. } if conn.has_input());
        self.conns.insert(token, conn);
        if let Err(error) = sent.and(added.map_err(|error| from_host(Code::PeerUnreachable, error))) {
            self.fail(token, error);
        } else if waits {
            self.serve(token, true, false);
        }
    }
}
