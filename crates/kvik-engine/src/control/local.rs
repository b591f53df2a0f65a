//! Links to processes on this host: UNIX connections that join a session.

use super::Control;
use super::conns::Conn;
use super::greet::nonce;
use crate::commands::ControlCommand;
use kvik_core::{Code, Error, Result};
use kvik_host::Io;
use kvik_host::event::Interest;
use kvik_host::unix::UnixConn;
use kvik_proto::{Greeting, Handshake, Join, JoinKind, joined, read_joined, refusal};
use kvik_transport::from_host;
use kvik_transport::local::LOCAL_LINK;
use std::time::Duration;

/// How long the control thread waits for room in the queue of the peer's listener.
const CONNECT: Duration = Duration::from_millis(100);

impl Control {
    /// Transfers of the session go without a local link.
    pub(super) fn no_local_link(&mut self, session: u64, error: &Error) {
        if let Some(local) = self.inner.base.transports.local() {
            local.failed(session, error);
        }
        self.inner.transfers.launch_waiting(session);
    }

    pub(super) fn dial_local(&mut self, session: u64, name: &str) {
        let key = self.inner.base.node(|node, _| node.established(session).map(|session| session.key));
        let Some(key) = key else { return };
        let joined = nonce().and_then(|nonce| {
            let fail = |error| from_host(Code::TransportUnavailable, error);
            let conn = UnixConn::connect(name, CONNECT).map_err(fail)?;
            conn.same_user().map_err(fail)?;
            let join = Join::new(session, 0, JoinKind::Local, &key, nonce);
            conn.send_with_fds(&join.encode(), &[]).map_err(fail)?;
            Ok(conn)
        });
        match joined {
            Ok(conn) => {
                self.watch(Conn::LocalJoining { conn, session }, Interest::READ, Some(LOCAL_LINK));
            }
            Err(error) => self.no_local_link(session, &error),
        }
    }

    pub(super) fn local_answer(&mut self, token: u64) -> Result<()> {
        let Some(Conn::LocalJoining { conn, .. }) = self.conns.get(token) else { return Ok(()) };
        let Some(mut answer) = local_message(conn)? else { return Ok(()) };
        read_joined(&mut answer)?;
        if let Some(Conn::LocalJoining { conn, session, .. }) = self.conns.remove(token) {
            self.local_up(conn, session);
        }
        Ok(())
    }

    pub(super) fn local_join(&mut self, token: u64) -> Result<()> {
        let Some(Conn::LocalStranger(conn)) = self.conns.get(token) else { return Ok(()) };
        let Some(mut message) = local_message(conn)? else { return Ok(()) };
        let mut shake = Handshake::listen(self.inner.base.local(), nonce()?);
        let Some(Greeting::Join(join)) = shake.receive(&mut message, &mut Vec::new())? else {
            return Err(Error::new(Code::ProtocolError, "a local connection did not ask to join a session"));
        };
        let admitted = match join.kind {
            JoinKind::Local => self.inner.base.node(|node, now| node.join(&join, now)),
            JoinKind::Data => Err(Error::new(Code::ProtocolError, "a data channel joins over TCP")),
        };
        let answer = admitted.as_ref().map_or_else(refusal, |()| joined());
        conn.send_with_fds(&answer, &[]).map_err(|error| from_host(Code::PeerLost, error))?;
        admitted?;
        if let Some(Conn::LocalStranger(conn)) = self.conns.remove(token) {
            self.local_up(conn, join.session);
        }
        Ok(())
    }

    fn local_up(&mut self, conn: UnixConn, session: u64) {
        let facts =
            self.inner.base.node(|node, _| node.established(session).map(|session| session.facts.clone()));
        let Some(facts) = facts else { return };
        let nonce = match nonce() {
            Ok(nonce) => nonce,
            Err(error) => return self.no_local_link(session, &error),
        };
        let joined =
            self.inner.base.transports.local().and_then(|local| local.join(session, conn, &facts, nonce));
        let Some(link) = joined else { return };
        log::debug!(session = session; "local link is up");
        self.watch(Conn::Local { session, link, behind: false }, Interest::READ, None);
        self.execute(ControlCommand::FlushLocal);
        self.inner.transfers.launch_waiting(session);
    }

    pub(super) fn flush_local(&mut self, token: u64) {
        if let Err(error) = self.conns.flush_local(token) {
            self.fail(token, error);
        }
    }
}

fn local_message(conn: &UnixConn) -> Result<Option<Vec<u8>>> {
    let mut bytes = [0; 4096];
    match conn.recv_with_fds(&mut bytes, 0).map_err(|error| from_host(Code::PeerLost, error))? {
        Io::Done(message) => Ok(Some(bytes[..message.len].to_vec())),
        Io::Blocked => Ok(None),
        Io::Closed => Err(Error::new(Code::PeerLost, "the other side closed the local connection")),
    }
}
