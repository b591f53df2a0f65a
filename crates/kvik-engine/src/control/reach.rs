//! Peers and data channels that are dialled.

use super::Control;
use super::conns::{Conn, Why};
use super::greet::{nonce, send_all};
use crate::dial::{ATTEMPT, Dial};
use crate::shared::lock;
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
        if let Some(session) = self.shared.node(|node, _| node.session_with(&owner)) {
            return self.shared.launch_waiting(session);
        }
        let dial = match Dial::new(ticket, self.shared.host_tag()) {
            Ok(dial) => dial,
            Err(error) => return self.shared.fail_waiting(&owner, &error),
        };
        let mut book = lock(&self.shared.book);
        match book.dials.entry(owner) {
            Entry::Occupied(mut under_way) => under_way.get_mut().also(dial),
            Entry::Vacant(place) => {
                place.insert(dial);
                drop(book);
                self.dial_next(owner, None);
            }
        }
    }

    /// Dials the peers whose turn it is to be dialled again.
    pub(super) fn dial_again(&mut self) {
        while let Some((peer, addresses)) = self.shared.roster.due(boottime()) {
            let mut book = lock(&self.shared.book);
            if let Entry::Vacant(place) = book.dials.entry(peer) {
                place.insert(Dial::in_background(addresses));
                drop(book);
                self.dial_next(peer, None);
            }
        }
    }

    /// Tries the next address of a peer; the one before failed.
    pub(super) fn dial_next(&mut self, owner: Identity, mut failed: Option<(SocketAddr, Error)>) {
        loop {
            let mut book = lock(&self.shared.book);
            let Some(dial) = book.dials.get_mut(&owner) else { return };
            if let Some((address, error)) = failed.take() {
                dial.failed(address, error);
            }
            let Some(to) = dial.next() else {
                let fresh = dial.for_the_joined();
                let over = match fresh {
                    Some(fresh) => book.dials.insert(owner, fresh).filter(|_| false),
                    None => book.dials.remove(&owner),
                };
                drop(book);
                let Some(over) = over else { continue };
                let error = self.shared.on_not_reached(owner, &over);
                return self.shared.fail_waiting(&owner, &error);
            };
            drop(book);
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
        let address = lock(&self.shared.book).links.get(&session).and_then(|link| link.address);
        let Some(to) = address else { return };
        for index in 0..self.shared.config.channels {
            match TcpConn::start_connect(to, &TcpOptions::default()) {
                Ok(conn) => {
                    let (until, why) = (Instant::now() + ATTEMPT, Why::Channel { session, index });
                    self.watch(Conn::Dialing { conn, to, why, until }, Interest::WRITE);
                }
                Err(error) => {
                    let text = format!("a data channel could not be opened: {error}");
                    let error = Error::new(Code::PeerLost, text);
                    return self.shared.node(|node, _| node.close_session(session, error));
                }
            }
        }
    }

    /// A connection that was dialled is there, or is not.
    pub(super) fn connected(&mut self, token: u64) -> Result<()> {
        let Some(Conn::Dialing { conn, to, .. }) = self.conns.get(&token) else { return Ok(()) };
        conn.connected(*to).map_err(|error| Error::new(Code::PeerUnreachable, error.to_string()))?;
        let nonce = nonce()?;
        let link = self.shared.tls.as_ref().map(|tls| TlsLink::client(tls, *to)).transpose()?;
        let Some(Conn::Dialing { conn, to, why, until }) = self.remove(token) else { return Ok(()) };
        let mut conn = match link {
            None => Stream::from(conn),
            Some(link) => Stream::tls(conn, link),
        };
        match why {
            Why::Session(owner) => {
                let (shake, hello) = Handshake::open(self.shared.local(), nonce, Some(owner));
                let sent = send_all(&mut conn, &hello);
                let (shake, dialled) = (Box::new(shake), Some((owner, to)));
                let input = Vec::new();
                let conn = Conn::Shaking { conn, shake, input, heard: false, dialled, until };
                self.watch_sent(conn, sent);
            }
            Why::Channel { session, index } => {
                let key = self.shared.node(|node, _| node.established(session).map(|session| session.key));
                let Some(key) = key else { return Ok(()) };
                let join = Join::new(session, index, JoinKind::Data, &key, nonce);
                let (ask, sent) = match self.shared.tls {
                    None => (None, send_all(&mut conn, &join.encode())),
                    // It is asked for this very TLS connection, once that is up.
                    Some(_) => (Some((join, key)), conn.flush().map(drop)),
                };
                self.watch_sent(Conn::Joining { conn, ask, session, input: Vec::new(), until }, sent);
            }
        }
        Ok(())
    }

    /// Waits for the answer to a greeting, if it was sent.
    fn watch_sent(&mut self, conn: Conn, sent: Result<()>) {
        let token = self.token();
        let added = conn.add_to(&self.epoll, token, Interest::READ);
        self.conns.insert(token, conn);
        if let Err(error) = sent.and(added.map_err(|error| from_host(Code::PeerUnreachable, error))) {
            self.fail(token, error);
        }
    }
}
