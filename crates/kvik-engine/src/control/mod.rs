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

use crate::shared::{Shared, lock};
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
pub(crate) enum Ask {
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

const BELL: u64 = 0;

/// Connections whose handshake is not over. A newcomer takes the place of the one that has been one for longest: an
/// honest handshake takes a moment, so many that say nothing do not keep it out.
const MAX_STRANGERS: usize = 256;

pub(crate) struct Control {
    shared: Arc<Shared>,
    epoll: Epoll,
    conns: HashMap<u64, Conn>,
    next: u64,
    buffer: Vec<u8>,
    /// Of an engine with TLS.
    securing: Option<Securing>,
}

impl Control {
    pub fn new(
        shared: Arc<Shared>,
        listeners: Vec<TcpListener>,
        unix: Option<UnixListener>,
        options: &ThreadOptions,
    ) -> Result<Control> {
        let fail = |error| from_host(Code::InvalidArgument, error);
        let securing = Securing::start(&shared, options)?;
        let epoll = Epoll::new().map_err(fail)?;
        epoll.add(&shared.bell, BELL, Interest::READ).map_err(fail)?;
        let (conns, buffer) = (HashMap::new(), vec![0; 64 << 10]);
        let mut control = Control { shared, epoll, conns, next: BELL + 1, buffer, securing };
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
            let nap = self.shared.sleep_until(|| self.next_deadline());
            if let Err(error) = self.epoll.wait(&mut events, nap) {
                log::error!("the control thread cannot wait for its connections and ends: {error}");
                return self.cut_all();
            }
            for event in events.iter() {
                if event.token == BELL {
                    drop(self.shared.bell.drain());
                } else {
                    self.serve(event.token, event.readable, event.writable);
                }
            }
            for ask in self.shared.take_asks() {
                if matches!(ask, Ask::Stop) {
                    return self.cut_all();
                }
                self.obey(ask);
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

    fn obey(&mut self, ask: Ask) {
        match ask {
            Ask::Dial(owner, ticket) => self.dial(owner, &ticket),
            Ask::OpenChannels(session) => self.dial_channels(session),
            Ask::WantWrite(session) => self.set_interest(session, Interest::BOTH),
            Ask::Broken(session, error) => self.end_session(session, error),
            Ask::Forget(session) => self.forget(session),
            Ask::Secured(secured) => self.secured(*secured),
            Ask::FlushLocal => {
                let local = |conn: &Conn| matches!(conn, Conn::Local { .. });
                self.tokens(local).into_iter().for_each(|token| self.flush_local(token));
            }
            Ask::Stop => {}
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
        let book = lock(&self.shared.book);
        let links = self.shared.transports.get().and_then(|all| all.local.next_expiry());
        let soonest = conns.chain(links).min().map(|until| boot + until.saturating_duration_since(now));
        let waiting = book.waiting.iter().filter_map(|id| Some(book.transfers.get(id)?.job.deadline)).min();
        drop(book);
        let told = self.shared.roster.next_redial().into_iter().chain(self.shared.next_quarantine());
        soonest.into_iter().chain(waiting).chain(told).min()
    }

    fn pass_time(&mut self) {
        let now = Instant::now();
        for token in self.tokens(|conn| conn.until().is_some_and(|at| at <= now)) {
            self.late(token);
        }
        let links = self.shared.transports.get().map(|all| all.local.expire(now)).unwrap_or_default();
        let waited: Vec<_> = {
            let (book, boot) = (lock(&self.shared.book), boottime());
            let late = |id: &u64| book.transfers.get(id).filter(|record| record.job.deadline <= boot);
            book.waiting.iter().filter_map(|id| Some((*id, late(id)?.job.owner()))).collect()
        };
        links.into_iter().for_each(|session| self.shared.launch_waiting(session));
        for (id, owner) in waited {
            if self.shared.warm_is_late(id) {
                continue;
            }
            let error = self.shared.why_waited(&owner);
            self.shared.give_up(id, error);
        }
        self.shared.node(|node, now| node.tick(now));
        self.shared.tell_quarantine(boottime());
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
