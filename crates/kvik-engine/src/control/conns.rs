//! What a connection of the control thread can be, and how each kind is served and leaves.
//!
//! A descriptor is deleted from the epoll set before it is closed or handed to a data thread: whoever else holds
//! it, a data thread or a forked child, would otherwise keep its events coming here.

use super::Control;
use crate::output::ControlConn;
use kvik_core::{Code, Error};
use kvik_host::HostError;
use kvik_host::event::{Epoll, Interest};
use kvik_host::socket::{TcpConn, TcpListener};
use kvik_host::unix::{UnixConn, UnixListener};
use kvik_proto::{Handshake, Identity};
use kvik_transport::from_host;
use kvik_transport::local::LocalLink;
use kvik_transport::tcp::Stream;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

pub(super) enum Conn {
    Listener {
        listener: TcpListener,
        /// Not in the epoll set until then: the process has no descriptor for a newcomer.
        paused_until: Option<Instant>,
    },
    Unix {
        listener: UnixListener,
        paused_until: Option<Instant>,
    },
    Dialing {
        conn: TcpConn,
        to: SocketAddr,
        why: Why,
        until: Instant,
    },
    Shaking {
        conn: Stream,
        shake: Box<Handshake>,
        input: Vec<u8>,
        /// The other side has said something.
        heard: bool,
        dialled: Option<(Identity, SocketAddr)>,
        until: Instant,
    },
    Joining {
        conn: Stream,
        session: u64,
        input: Vec<u8>,
        until: Instant,
    },
    Control {
        session: u64,
        conn: Arc<ControlConn>,
    },
    LocalJoining {
        conn: UnixConn,
        session: u64,
        until: Instant,
    },
    LocalStranger {
        conn: UnixConn,
        until: Instant,
    },
    Local {
        session: u64,
        link: Arc<LocalLink>,
    },
}

/// What a TCP connection in the making is for.
#[derive(Clone, Copy)]
pub(super) enum Why {
    Session(Identity),
    Channel { session: u64, index: u16 },
}

/// What a connection over TCP is for.
#[derive(Clone, Copy)]
pub(crate) enum Purpose {
    /// Whoever it is came by itself.
    Stranger,
    /// A session with a peer, which is dialled there.
    Session(Identity, SocketAddr),
    /// A data channel of a session.
    Channel { session: u64, index: u16 },
}

impl Purpose {
    pub fn is_stranger(&self) -> bool {
        matches!(self, Purpose::Stranger)
    }
}

impl Conn {
    /// When something must have happened with it.
    pub fn until(&self) -> Option<Instant> {
        match self {
            Conn::Dialing { until, .. }
            | Conn::Shaking { until, .. }
            | Conn::Joining { until, .. }
            | Conn::LocalJoining { until, .. }
            | Conn::LocalStranger { until, .. } => Some(*until),
            Conn::Listener { paused_until, .. } | Conn::Unix { paused_until, .. } => *paused_until,
            Conn::Control { .. } | Conn::Local { .. } => None,
        }
    }

    pub fn add_to(&self, epoll: &Epoll, token: u64, interest: Interest) -> Result<(), HostError> {
        match self {
            Conn::Listener { listener, .. } => epoll.add(listener, token, interest),
            Conn::Unix { listener, .. } => epoll.add(listener, token, interest),
            Conn::Dialing { conn, .. } => epoll.add(conn, token, interest),
            Conn::Shaking { conn, .. } | Conn::Joining { conn, .. } => epoll.add(conn, token, interest),
            Conn::Control { conn, .. } => epoll.add(&conn.conn, token, interest),
            Conn::LocalJoining { conn, .. } | Conn::LocalStranger { conn, .. } => {
                epoll.add(conn, token, interest)
            }
            Conn::Local { link, .. } => epoll.add(&**link, token, interest),
        }
    }

    fn delete_from(&self, epoll: &Epoll) -> Result<(), HostError> {
        match self {
            Conn::Listener { listener, .. } => epoll.delete(listener),
            Conn::Unix { listener, .. } => epoll.delete(listener),
            Conn::Dialing { conn, .. } => epoll.delete(conn),
            Conn::Shaking { conn, .. } | Conn::Joining { conn, .. } => epoll.delete(conn),
            Conn::Control { conn, .. } => epoll.delete(&conn.conn),
            Conn::LocalJoining { conn, .. } | Conn::LocalStranger { conn, .. } => epoll.delete(conn),
            Conn::Local { link, .. } => epoll.delete(&**link),
        }
    }

    /// Ends it for every process that holds its descriptor.
    pub fn cut(&self) {
        let cut = match self {
            Conn::Listener { listener, .. } => listener.stop(),
            Conn::Dialing { conn, .. } => conn.shutdown_both(),
            Conn::Shaking { conn, .. } | Conn::Joining { conn, .. } => return note(conn.cut()),
            Conn::Control { conn, .. } => conn.conn.shutdown_both(),
            Conn::Local { link, .. } => {
                link.cut();
                Ok(())
            }
            Conn::Unix { .. } | Conn::LocalJoining { .. } | Conn::LocalStranger { .. } => Ok(()),
        };
        note(cut);
    }
}

fn note<E: std::fmt::Display>(cut: Result<(), E>) {
    if let Err(error) = cut {
        log::debug!("a connection could not be cut: {error}");
    }
}

impl Control {
    pub(super) fn tokens(&self, which: impl Fn(&Conn) -> bool) -> Vec<u64> {
        self.conns.iter().filter(|(_, conn)| which(conn)).map(|(token, _)| *token).collect()
    }

    pub(super) fn watch(&mut self, conn: Conn, interest: Interest) {
        let token = self.token();
        let added = conn.add_to(&self.epoll, token, interest);
        self.conns.insert(token, conn);
        if let Err(error) = added {
            self.fail(token, from_host(Code::PeerLost, error));
        }
    }

    /// Takes a connection out of the epoll set and the map.
    pub(super) fn remove(&mut self, token: u64) -> Option<Conn> {
        let conn = self.conns.remove(&token)?;
        // A paused listener is not in the set.
        if let Err(error) = conn.delete_from(&self.epoll) {
            log::debug!("a connection could not be taken out of the epoll set: {error}");
        }
        Some(conn)
    }

    pub(super) fn set_interest(&mut self, of: u64, interest: Interest) {
        for (token, conn) in &self.conns {
            if let Conn::Control { session, conn } = conn
                && *session == of
                && let Err(error) = self.epoll.modify(&conn.conn, *token, interest)
            {
                log::debug!("a control connection is gone: {error}");
            }
        }
    }

    pub(super) fn serve(&mut self, token: u64, readable: bool, writable: bool) {
        let result = match self.conns.get(&token) {
            Some(Conn::Listener { .. }) => {
                self.accept(token);
                Ok(())
            }
            Some(Conn::Unix { .. }) => {
                self.accept_local(token);
                Ok(())
            }
            Some(Conn::Dialing { .. }) => self.connected(token),
            Some(Conn::Shaking { .. }) => self.shake(token),
            Some(Conn::Joining { .. }) => self.join_answer(token),
            Some(Conn::Control { session, conn }) => {
                let (session, conn) = (*session, conn.clone());
                if writable {
                    self.set_interest(session, Interest::READ);
                    conn.has_room();
                    self.inner.flush(session);
                }
                if readable { self.read_control(session, &conn) } else { Ok(()) }
            }
            Some(Conn::LocalJoining { .. }) => self.local_answer(token),
            Some(Conn::LocalStranger { .. }) => self.local_join(token),
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
        let Some(conn) = self.remove(token) else { return };
        conn.cut();
        match conn {
            Conn::Dialing { why: Why::Session(owner), to, .. } => {
                self.not_greeted(Purpose::Session(owner, to), error);
            }
            Conn::Dialing { why: Why::Channel { session, index }, .. } => {
                self.not_greeted(Purpose::Channel { session, index }, error);
            }
            Conn::Joining { session, .. } => self.not_joined(session, &error),
            Conn::Shaking { dialled: Some((owner, to)), .. } => {
                self.not_greeted(Purpose::Session(owner, to), error);
            }
            Conn::Shaking { dialled: None, .. } => self.not_greeted(Purpose::Stranger, error),
            Conn::Control { session, .. } => self.inner.node(|node, _| node.close_session(session, error)),
            Conn::LocalJoining { session, .. } | Conn::Local { session, .. } => {
                self.no_local_link(session, &error)
            }
            Conn::LocalStranger { .. } => {
                self.inner.metrics.handshake_refused(error.code);
                log::info!("a local connection was refused: {error}");
            }
            Conn::Listener { .. } | Conn::Unix { .. } => {
                log::error!("an engine does not listen any more: {error}")
            }
        }
    }

    /// Nothing has come of a connection.
    pub(super) fn not_greeted(&mut self, purpose: Purpose, error: Error) {
        match purpose {
            Purpose::Stranger => {
                self.inner.metrics.handshake_refused(error.code);
                log::info!("a connection was refused: {error}");
            }
            Purpose::Session(owner, to) => self.dial_next(owner, Some((to, error))),
            Purpose::Channel { session, .. } => self.not_joined(session, &error),
        }
    }

    fn not_joined(&mut self, session: u64, error: &Error) {
        let text = format!("a data channel could not be opened: {}", error.text);
        self.end_session(session, Error::new(Code::PeerLost, text));
    }
}
