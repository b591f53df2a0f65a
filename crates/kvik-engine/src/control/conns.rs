//! What a connection of the control thread can be, and what wakes the thread for it.
//!
//! A descriptor is deleted from the epoll set before it is closed or handed to a data thread: whoever else holds
//! it, a data thread or a forked child, would otherwise keep its events coming here.
//!
//! The thread looks at a connection when the epoll set names it, its time is over or its session asks; never at all of
//! them.

use crate::commands::Purpose;
use crate::output::ControlConn;
use crate::peers::Target;
use kvik_core::{Code, Error, Result};
use kvik_host::HostError;
use kvik_host::event::{Epoll, EventFd, Events, Interest};
use kvik_host::socket::{TcpConn, TcpListener};
use kvik_host::unix::{UnixConn, UnixListener};
use kvik_proto::Handshake;
use kvik_transport::from_host;
use kvik_transport::local::LocalLink;
use kvik_transport::tcp::Stream;
use std::collections::{BTreeSet, HashMap};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Connections whose handshake is not over. A newcomer takes the place of the one that has been one for longest: an
/// honest handshake takes a moment, so many that say nothing do not keep it out.
pub(super) const MAX_STRANGERS: usize = 256;

/// What is no connection, but wakes the thread.
pub(super) const WAKER: u64 = 0;

pub(super) enum Conn {
    Listener(TcpListener),
    Unix(UnixListener),
    Dialing {
        conn: TcpConn,
        to: SocketAddr,
        purpose: Purpose,
    },
    Shaking {
        conn: Stream,
        shake: Box<Handshake>,
        input: Vec<u8>,
        /// The other side has said something.
        heard: bool,
        dialled: Option<(Target, SocketAddr)>,
    },
    Joining {
        conn: Stream,
        session: u64,
        input: Vec<u8>,
    },
    Control {
        session: u64,
        conn: Arc<ControlConn>,
    },
    LocalJoining {
        conn: UnixConn,
        session: u64,
    },
    LocalStranger(UnixConn),
    Local {
        session: u64,
        link: Arc<LocalLink>,
        /// It waits for room.
        behind: bool,
    },
}

impl Conn {
    /// The session that it belongs to.
    fn session(&self) -> Option<u64> {
        match self {
            Conn::Control { session, .. }
            | Conn::Joining { session, .. }
            | Conn::LocalJoining { session, .. }
            | Conn::Local { session, .. }
            | Conn::Dialing { purpose: Purpose::Channel { session, .. }, .. } => Some(*session),
            _ => None,
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Conn::Listener(listener) => listener.as_fd(),
            Conn::Unix(listener) => listener.as_fd(),
            Conn::Dialing { conn, .. } => conn.as_fd(),
            Conn::Shaking { conn, .. } | Conn::Joining { conn, .. } => conn.as_fd(),
            Conn::Control { conn, .. } => conn.conn.as_fd(),
            Conn::LocalJoining { conn, .. } | Conn::LocalStranger(conn) => conn.as_fd(),
            Conn::Local { link, .. } => link.as_fd(),
        }
    }

    /// Ends it for every process that holds its descriptor.
    pub fn cut(&self) {
        let cut = match self {
            Conn::Listener(listener) => listener.stop(),
            Conn::Dialing { conn, .. } => conn.shutdown_both(),
            Conn::Shaking { conn, .. } | Conn::Joining { conn, .. } => return note(conn.cut()),
            Conn::Control { conn, .. } => conn.conn.shutdown_both(),
            Conn::Local { link, .. } => {
                link.cut();
                Ok(())
            }
            Conn::Unix(_) | Conn::LocalJoining { .. } | Conn::LocalStranger(_) => Ok(()),
        };
        note(cut);
    }
}

fn note<E: std::fmt::Display>(cut: Result<(), E>) {
    if let Err(error) = cut {
        log::debug!("a connection could not be cut: {error}");
    }
}

/// The connections, by tokens that are used once.
pub(super) struct Conns {
    epoll: Epoll,
    /// With when something must have happened: to a listener that is paused, when it is in the epoll set again.
    all: HashMap<u64, (Conn, Option<Instant>)>,
    last: u64,
    /// Those with such a time, by it.
    due: BTreeSet<(Instant, u64)>,
    /// Those of sessions.
    of: BTreeSet<(u64, u64)>,
    /// Those to processes on this host.
    local: BTreeSet<u64>,
}

impl Conns {
    pub fn new(waker: &EventFd) -> Result<Conns> {
        let fail = |error| from_host(Code::InvalidArgument, error);
        let epoll = Epoll::new().map_err(fail)?;
        epoll.add(waker, WAKER, Interest::READ).map_err(fail)?;
        let (all, due) = (HashMap::new(), BTreeSet::new());
        Ok(Conns { epoll, all, last: WAKER, due, of: BTreeSet::new(), local: BTreeSet::new() })
    }

    /// Waits until one of them has something.
    pub fn wait(&self, events: &mut Events, most: Duration) -> Result<(), HostError> {
        self.epoll.wait(events, most)
    }

    /// Takes one in, with which something must happen by a time, also where it cannot be waited for, which is the error.
    pub fn add(
        &mut self,
        conn: Conn,
        interest: Interest,
        until: Option<Instant>,
    ) -> (u64, Result<(), HostError>) {
        self.last += 1;
        let added = self.epoll.add(conn.fd(), self.last, interest);
        self.put(self.last, conn, until);
        (self.last, added)
    }

    fn put(&mut self, token: u64, conn: Conn, until: Option<Instant>) {
        self.due.extend(until.map(|until| (until, token)));
        self.of.extend(conn.session().map(|session| (session, token)));
        self.local.extend(matches!(conn, Conn::Local { .. }).then_some(token));
        self.all.insert(token, (conn, until));
    }

    /// Takes one out.
    pub fn remove(&mut self, token: u64) -> Option<Conn> {
        let (conn, until) = self.all.remove(&token)?;
        if let Some(until) = until {
            self.due.remove(&(until, token));
        }
        if let Some(session) = conn.session() {
            self.of.remove(&(session, token));
        }
        self.local.remove(&token);
        // A paused listener is not in the set.
        if let Err(error) = self.epoll.delete(conn.fd()) {
            log::debug!("a connection could not be taken out of the epoll set: {error}");
        }
        Some(conn)
    }

    pub fn get(&self, token: u64) -> Option<&Conn> {
        self.all.get(&token).map(|(conn, _)| conn)
    }

    /// When something must have happened with one.
    pub fn until(&self, token: u64) -> Option<Instant> {
        self.all.get(&token)?.1
    }

    /// Not for changing its session.
    pub fn get_mut(&mut self, token: u64) -> Option<&mut Conn> {
        self.all.get_mut(&token).map(|(conn, _)| conn)
    }

    /// Those of a session.
    pub fn of(&self, session: u64) -> Vec<u64> {
        self.of.range((session, 0)..=(session, u64::MAX)).map(|(_, token)| *token).collect()
    }

    /// Those to processes on this host.
    pub fn local(&self) -> Vec<u64> {
        self.local.iter().copied().collect()
    }

    /// The control connection of a session.
    pub fn control(&self, session: u64) -> Option<(u64, &Arc<ControlConn>)> {
        self.of.range((session, 0)..=(session, u64::MAX)).find_map(|(_, token)| match self.get(*token)? {
            Conn::Control { conn, .. } => Some((*token, conn)),
            _ => None,
        })
    }

    /// When the time of the next one is over.
    pub fn next_due(&self) -> Option<Instant> {
        self.due.first().map(|(until, _)| *until)
    }

    /// Those whose time is over.
    pub fn late(&self, now: Instant) -> Vec<u64> {
        self.due.iter().take_while(|(until, _)| *until <= now).map(|(_, token)| *token).collect()
    }

    /// The oldest stranger of a kind, where there are as many as may be.
    pub fn too_many(&self, most: usize, kind: impl Fn(&Conn) -> bool) -> Option<u64> {
        let mut strangers = self.due.iter().filter(|(_, token)| self.get(*token).is_some_and(&kind));
        let oldest = strangers.next()?.1;
        (strangers.count() + 1 >= most).then_some(oldest)
    }

    /// Waits for other events of a session's control connection.
    pub fn set_interest(&self, session: u64, interest: Interest) {
        if let Some((token, conn)) = self.control(session)
            && let Err(error) = self.epoll.modify(&conn.conn, token, interest)
        {
            log::debug!("a control connection is gone: {error}");
        }
    }

    /// Sends what waits on a local link, and waits for room where there is none.
    pub fn flush_local(&mut self, token: u64) -> Result<()> {
        let Some((Conn::Local { link, behind, .. }, _)) = self.all.get_mut(&token) else { return Ok(()) };
        let before = std::mem::replace(behind, !link.flush()?);
        let interest = if *behind { Interest::BOTH } else { Interest::READ };
        match before == *behind {
            true => Ok(()),
            false => {
                let waits = self.epoll.modify(&**link, token, interest);
                waits.map_err(|error| from_host(Code::PeerLost, error))
            }
        }
    }

    /// A listener is left alone until then.
    pub fn pause(&mut self, token: u64, until: Instant) {
        if let Some(conn) = self.remove(token) {
            self.put(token, conn, Some(until));
        }
    }

    /// A listener's pause is over.
    pub fn resume(&mut self, token: u64) -> Result<(), HostError> {
        let Some(conn) = self.remove(token) else { return Ok(()) };
        let added = self.epoll.add(conn.fd(), token, Interest::READ);
        self.put(token, conn, None);
        added
    }

    /// Ends every one for every process that holds it: forked children too.
    pub fn cut_all(&mut self) {
        self.all.drain().for_each(|(_, (conn, _))| conn.cut());
        (self.due, self.of, self.local) = Default::default();
    }
}

/// A connection that breaks before it is one.
pub(super) fn unreachable(error: Error) -> Error {
    let code = if error.code == Code::PeerLost { Code::PeerUnreachable } else { error.code };
    Error::new(code, error.text)
}

pub(super) fn hung_up(heard: bool) -> Error {
    match heard {
        false => Error::new(
            Code::PeerNotKvik,
            "the other side closed the connection without a word of kvik's protocol: check the address and port",
        ),
        true => Error::new(
            Code::PeerUnreachable,
            "the other engine closed the connection during the handshake: it ended, or its log says why",
        ),
    }
}
