//! How each kind of connection is served, and leaves.

use super::Control;
use super::conns::Conn;
use crate::commands::Purpose;
use kvik_core::{Code, Error};
use kvik_host::event::Interest;
use kvik_transport::from_host;
use std::time::{Duration, Instant};

impl Control {
    /// Waits for events of a connection, with which something must happen within a time.
    pub(super) fn watch(&mut self, conn: Conn, interest: Interest, within: Option<Duration>) {
        let until = within.map(|within| Instant::now() + within);
        let (token, added) = self.conns.add(conn, interest, until);
        if let Err(error) = added {
            self.fail(token, from_host(Code::PeerLost, error));
        }
    }

    pub(super) fn serve(&mut self, token: u64, readable: bool, writable: bool) {
        let result = match self.conns.get(token) {
            Some(Conn::Listener(_)) => {
                self.accept(token);
                Ok(())
            }
            Some(Conn::Unix(_)) => {
                self.accept_local(token);
                Ok(())
            }
            Some(Conn::Dialing { .. }) => self.connected(token),
            Some(Conn::Shaking { .. }) => self.shake(token),
            Some(Conn::Joining { .. }) => self.join_answer(token),
            Some(Conn::Control { session, conn }) => {
                let (session, conn) = (*session, conn.clone());
                if writable {
                    self.conns.set_interest(session, Interest::READ);
                    conn.has_room();
                    self.inner.conns.flush(session, &self.inner.base);
                }
                if readable { self.read_control(session, &conn) } else { Ok(()) }
            }
            Some(Conn::LocalJoining { .. }) => self.local_answer(token),
            Some(Conn::LocalStranger(_)) => self.local_join(token),
            Some(Conn::Local { link, .. }) => {
                let link = link.clone();
                if writable {
                    self.flush_local(token);
                }
                link.receive()
            }
            None => Ok(()),
        };
        if let Err(error) = result {
            self.fail(token, error);
        }
    }

    /// A connection did not come to what it was for, or broke.
    pub(super) fn fail(&mut self, token: u64, error: Error) {
        let Some(conn) = self.conns.remove(token) else { return };
        conn.cut();
        match conn {
            Conn::Dialing { purpose, .. } => self.not_greeted(purpose, error),
            Conn::Joining { session, .. } => self.not_joined(session, &error),
            Conn::Shaking { dialled: Some((target, to)), .. } => {
                self.not_greeted(Purpose::Session(target, to), error);
            }
            Conn::Shaking { dialled: None, .. } => self.not_greeted(Purpose::Stranger, error),
            Conn::Control { session, .. } => {
                self.inner.base.node(|node, _| node.session(session).close(error))
            }
            Conn::LocalJoining { session, .. } | Conn::Local { session, .. } => {
                self.no_local_link(session, &error)
            }
            Conn::LocalStranger(_) => {
                self.inner.base.observers.metrics.handshake_refused(error.code);
                log::info!("a local connection was refused: {error}");
            }
            Conn::Listener(_) | Conn::Unix(_) => {
                log::error!("an engine does not listen any more: {error}")
            }
        }
    }

    /// Nothing has come of a connection.
    pub(super) fn not_greeted(&mut self, purpose: Purpose, error: Error) {
        match purpose {
            Purpose::Stranger => {
                self.inner.base.observers.metrics.handshake_refused(error.code);
                log::info!("a connection was refused: {error}");
            }
            Purpose::Session(target, to) => self.dial_next(target, Some((to, error))),
            Purpose::Channel { session, .. } => self.not_joined(session, &error),
        }
    }

    fn not_joined(&mut self, session: u64, error: &Error) {
        let text = format!("a data channel could not be opened: {}", error.text);
        self.end_session(session, Error::new(Code::PeerLost, text));
    }
}
