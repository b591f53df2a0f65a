//! The control thread: it listens, connects, shakes hands, reads control frames and lets time pass.
//!
//! It never moves payload, so that heartbeats and deadlines do not wait for data. This file is its loop; what it
//! does with the connections is told in the order of their lives:
//!
//! - [`conns`]: what a connection can be, and how it leaves;
//! - [`accept`]: strangers that come;
//! - [`reach`]: peers and channels that are dialled;
//! - [`secure`]: TLS handshakes, on a thread of their own;
//! - [`greet`]: handshakes and joins;
//! - [`session`]: control connections, and what their peers make this process hold;
//! - [`local`]: links to processes on this host.

mod accept;
mod conns;
mod greet;
mod local;
mod reach;
mod secure;
mod session;

use crate::inner::{Inner, lock};
use conns::{Conn, Why};
use kvik_core::{Code, Error, Result, Ticket};
use kvik_host::clock::boottime;
use kvik_host::event::{Epoll, Events, Interest};
use kvik_host::socket::TcpListener;
use kvik_host::thread::{ThreadOptions, be_prompt};
use kvik_host::unix::UnixListener;
use kvik_proto::Identity;
use kvik_transport::from_host;
use secure::Securing;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What the control thread is told.
pub(crate) enum ControlCommand {
    /// Reach a peer.
    Dial(Identity, Arc<Ticket>),
    /// Open the data channels of a session that this side opened.
    OpenChannels(u64),
    /// Tell when the control connection of the session has room.
    WantWrite(u64),
    /// A connection of the session broke.
    Broken(u64, Error),
    /// A session is over.
    Forget(u64),
    /// A connection is under TLS, or will never be.
    Secured(Box<secure::Secured>),
    /// Regions were shown or taken back.
    FlushLocal,
    /// End.
    Stop,
}

const WAKER: u64 = 0;

/// Connections whose handshake is not over. A newcomer takes the place of the one that has been one for longest: an
/// honest handshake takes a moment, so many that say nothing do not keep it out.
const MAX_STRANGERS: usize = 256;

pub(crate) struct Control {
    inner: Arc<Inner>,
    epoll: Epoll,
    conns: HashMap<u64, Conn>,
    next: u64,
    buffer: Vec<u8>,
    /// Of an engine with TLS.
    securing: Option<Securing>,
}

impl Control {
    pub fn new(
        inner: Arc<Inner>,
        listeners: Vec<TcpListener>,
        unix: Option<UnixListener>,
        options: &ThreadOptions,
    ) -> Result<Control> {
        let fail = |error| from_host(Code::InvalidArgument, error);
        let securing = Securing::start(&inner, options)?;
        let epoll = Epoll::new().map_err(fail)?;
        epoll.add(&inner.waker, WAKER, Interest::READ).map_err(fail)?;
        let (conns, buffer) = (HashMap::new(), vec![0; 64 << 10]);
        let mut control = Control { inner, epoll, conns, next: WAKER + 1, buffer, securing };
        let listeners = listeners.into_iter().map(|listener| Conn::Listener { listener, paused_until: None });
        let unix = unix.map(|listener| Conn::Unix { listener, paused_until: None });
        for conn in listeners.chain(unix) {
            let token = control.token();
            conn.add_to(&control.epoll, token, Interest::READ).map_err(fail)?;
            control.conns.insert(token, conn);
        }
        Ok(control)
    }

    fn token(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub fn run(&mut self) {
        // Heartbeats must not wait for whatever else computes on this machine: a busy peer is not a dead one.
        if let Err(error) = be_prompt() {
            log::debug!("heartbeats are sent at ordinary priority: {error}");
        }
        let mut events = Events::new(64);
        loop {
            let wait = self.inner.sleep_until(|| self.next_deadline());
            if let Err(error) = self.epoll.wait(&mut events, wait) {
                log::error!("the control thread cannot wait for its connections and ends: {error}");
                return self.cut_all();
            }
            for event in events.iter() {
                if event.token == WAKER {
                    drop(self.inner.waker.drain());
                } else {
                    self.serve(event.token, event.readable, event.writable);
                }
            }
            for command in self.inner.take_commands() {
                if matches!(command, ControlCommand::Stop) {
                    return self.cut_all();
                }
                self.execute(command);
            }
            self.pass_time();
        }
    }

    /// Ends every connection for every process that holds it: forked children too.
    fn cut_all(&mut self) {
        for (_, conn) in self.conns.drain() {
            conn.cut();
        }
        self.securing = None;
    }

    fn execute(&mut self, command: ControlCommand) {
        match command {
            ControlCommand::Dial(owner, ticket) => self.dial(owner, &ticket),
            ControlCommand::OpenChannels(session) => self.dial_channels(session),
            ControlCommand::WantWrite(session) => self.set_interest(session, Interest::BOTH),
            ControlCommand::Broken(session, error) => self.end_session(session, error),
            ControlCommand::Forget(session) => self.forget(session),
            ControlCommand::Secured(secured) => self.secured(*secured),
            ControlCommand::FlushLocal => {
                let local = |conn: &Conn| matches!(conn, Conn::Local { .. });
                self.tokens(local).into_iter().for_each(|token| self.flush_local(token));
            }
            ControlCommand::Stop => {}
        }
    }

    fn forget(&mut self, session: u64) {
        let gone = |conn: &Conn| match conn {
            Conn::Control { session: of, .. }
            | Conn::Joining { session: of, .. }
            | Conn::LocalJoining { session: of, .. }
            | Conn::Local { session: of, .. }
            | Conn::Dialing { why: Why::Channel { session: of, .. }, .. } => *of == session,
            _ => false,
        };
        for token in self.tokens(gone) {
            if let Some(conn) = self.remove(token) {
                conn.cut();
            }
        }
    }

    // ---- time ----

    fn next_deadline(&self) -> Option<Duration> {
        let (now, boot) = (Instant::now(), boottime());
        let conns = self.conns.values().filter_map(Conn::until);
        let tables = lock(&self.inner.tables);
        let links = self.inner.transports.get().and_then(|all| all.local.next_expiry());
        let soonest = conns.chain(links).min().map(|until| boot + until.saturating_duration_since(now));
        let waiting =
            tables.waiting.iter().filter_map(|id| Some(tables.transfers.get(id)?.request.deadline)).min();
        drop(tables);
        let told = self.inner.peers.next_redial().into_iter().chain(self.inner.next_quarantine());
        soonest.into_iter().chain(waiting).chain(told).min()
    }

    fn pass_time(&mut self) {
        let now = Instant::now();
        for token in self.tokens(|conn| conn.until().is_some_and(|at| at <= now)) {
            self.late(token);
        }
        let links = self.inner.transports.get().map(|all| all.local.expire(now)).unwrap_or_default();
        let waited: Vec<_> = {
            let (tables, boot) = (lock(&self.inner.tables), boottime());
            let late = |id: &u64| tables.transfers.get(id).filter(|entry| entry.request.deadline <= boot);
            tables.waiting.iter().filter_map(|id| Some((*id, late(id)?.request.owner()))).collect()
        };
        links.into_iter().for_each(|session| self.inner.launch_waiting(session));
        for (id, owner) in waited {
            if self.inner.warm_up_is_late(id) {
                continue;
            }
            let error = self.inner.why_waited(&owner);
            self.inner.give_up(id, error);
        }
        self.inner.node(|node, now| node.tick(now));
        self.inner.tell_quarantine(boottime());
        self.dial_again();
    }

    /// A connection's time is over.
    fn late(&mut self, token: u64) {
        let text = match self.conns.get(&token) {
            Some(Conn::Listener { .. } | Conn::Unix { .. }) => return self.listen_again(token),
            Some(Conn::Dialing { .. }) => "nothing answered in time",
            _ => {
                "it took the connection, but did not answer kvik's greeting in time: another protocol's port, or a stopped engine"
            }
        };
        self.fail(token, Error::new(Code::PeerUnreachable, text));
    }
}
