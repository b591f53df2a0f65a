//! The control thread: it listens, connects, shakes hands, reads control frames and lets time pass.
//!
//! It never moves payload, so that heartbeats and deadlines do not wait for data.

use crate::dial::{ATTEMPT, Dial};
use crate::shared::{Channels, ControlConn, Link, MemoryPath, Shared, lock};
use kvik_core::{Code, Error, Result, Ticket};
use kvik_host::clock::boottime;
use kvik_host::event::{Epoll, Events, Interest};
use kvik_host::socket::{TcpConn, TcpListener, TcpOptions};
use kvik_host::unix::{UnixConn, UnixListener};
use kvik_host::{HostFacts, Io, identity};
use kvik_proto::{
    Established, Facts, Greeting, Handshake, Identity, Join, JoinKind, joined, read_joined, refusal,
};
use kvik_transport::from_host;
use kvik_transport::local::LocalLink;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// What the control thread is told.
pub(crate) enum Ask {
    /// Reach a peer.
    Dial(Identity, Arc<Ticket>),
    /// Open the data channels of a session that this side opened.
    OpenChannels(u64),
    /// Tell when the control connection of the session has room.
    WantWrite(u64),
    /// A session is over.
    Forget(u64),
    /// Regions were shown or taken back.
    FlushLocal,
    /// End.
    Stop,
}

/// Connections whose handshake is not over; more are refused.
const MAX_STRANGERS: usize = 256;
/// How long a local link may take to come up before transfers go without it.
const LOCAL_LINK: Duration = Duration::from_secs(1);
/// What a session is charged for its buffers.
const SESSION_BYTES: u64 = 128 << 10;
const BELL: u64 = 0;

enum Conn {
    Listener(TcpListener),
    Unix(UnixListener),
    Dialing {
        conn: TcpConn,
        to: SocketAddr,
        why: Why,
        until: Instant,
    },
    Shaking {
        conn: TcpConn,
        shake: Box<Handshake>,
        input: Vec<u8>,
        dialled: Option<(Identity, SocketAddr)>,
        until: Instant,
    },
    Joining {
        conn: TcpConn,
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
enum Why {
    Session(Identity),
    Channel { session: u64, index: u16 },
}

pub(crate) struct Control {
    shared: Arc<Shared>,
    epoll: Epoll,
    conns: HashMap<u64, Conn>,
    next: u64,
    buffer: Vec<u8>,
}

impl Control {
    pub fn new(
        shared: Arc<Shared>,
        listeners: Vec<TcpListener>,
        unix: Option<UnixListener>,
    ) -> Result<Control> {
        let fail = |error| from_host(Code::InvalidArgument, error);
        let epoll = Epoll::new().map_err(fail)?;
        epoll.add(&shared.bell, BELL, Interest::READ).map_err(fail)?;
        let mut control =
            Control { shared, epoll, conns: HashMap::new(), next: BELL + 1, buffer: vec![0; 64 << 10] };
        for listener in listeners {
            let token = control.token();
            control.epoll.add(&listener, token, Interest::READ).map_err(fail)?;
            control.conns.insert(token, Conn::Listener(listener));
        }
        if let Some(unix) = unix {
            let token = control.token();
            control.epoll.add(&unix, token, Interest::READ).map_err(fail)?;
            control.conns.insert(token, Conn::Unix(unix));
        }
        Ok(control)
    }

    fn token(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub fn run(&mut self) {
        let mut events = Events::new(64);
        loop {
            let nap = self.shared.sleep_until(self.next_deadline());
            if let Err(error) = self.epoll.wait(&mut events, nap) {
                log::error!("the control thread cannot wait for its connections and ends: {error}");
                return;
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

    fn cut_all(&mut self) {
        for (_, conn) in self.conns.drain() {
            if let Conn::Control { conn, .. } = conn {
                drop(conn.conn.shutdown_both());
            }
        }
    }

    fn obey(&mut self, ask: Ask) {
        match ask {
            Ask::Dial(owner, ticket) => self.dial(owner, &ticket),
            Ask::OpenChannels(session) => self.dial_channels(session),
            Ask::WantWrite(session) => self.set_interest(session, Interest::BOTH),
            Ask::Forget(session) => {
                let gone = |conn: &Conn| match conn {
                    Conn::Control { session: of, .. }
                    | Conn::Joining { session: of, .. }
                    | Conn::LocalJoining { session: of, .. }
                    | Conn::Local { session: of, .. } => *of == session,
                    Conn::Dialing { why: Why::Channel { session: of, .. }, .. } => *of == session,
                    _ => false,
                };
                self.conns.retain(|_, conn| !gone(conn));
            }
            Ask::FlushLocal => {
                let links: Vec<u64> = self
                    .conns
                    .iter()
                    .filter(|(_, c)| matches!(c, Conn::Local { .. }))
                    .map(|(t, _)| *t)
                    .collect();
                links.into_iter().for_each(|token| self.flush_local(token));
            }
            Ask::Stop => {}
        }
    }

    // ---- time ----

    fn next_deadline(&self) -> Option<Duration> {
        let (now, boot) = (Instant::now(), boottime());
        let conns = self.conns.values().filter_map(Conn::until);
        let book = lock(&self.shared.book);
        let links = book.links.values().filter_map(|link| match link.memory {
            MemoryPath::Making(until) => Some(until),
            _ => None,
        });
        let soonest = conns.chain(links).min().map(|until| boot + until.saturating_duration_since(now));
        let waiting = book.waiting.iter().filter_map(|id| Some(book.transfers.get(id)?.job.deadline)).min();
        match (soonest, waiting) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    fn pass_time(&mut self) {
        let now = Instant::now();
        let late: Vec<u64> = self
            .conns
            .iter()
            .filter(|(_, c)| c.until().is_some_and(|at| at <= now))
            .map(|(t, _)| *t)
            .collect();
        for token in late {
            let text = match self.conns.get(&token) {
                Some(Conn::Dialing { .. }) => "nothing answered in time",
                _ => {
                    "it took the connection, but did not answer kvik's greeting in time: another protocol's port, or a stopped engine"
                }
            };
            self.fail(token, Error::new(Code::PeerUnreachable, text));
        }
        let (links, waited) = {
            let mut book = lock(&self.shared.book);
            let mut links = Vec::new();
            for (session, link) in &mut book.links {
                if matches!(link.memory, MemoryPath::Making(until) if until <= now) {
                    link.memory = MemoryPath::No("the peer did not open its local link in time".into());
                    links.push(*session);
                }
            }
            let late = |id: &u64| book.transfers.get(id).filter(|record| record.job.deadline <= boottime());
            let waited: Vec<_> =
                book.waiting.iter().filter_map(|id| Some((*id, late(id)?.job.owner()))).collect();
            (links, waited)
        };
        links.into_iter().for_each(|session| self.shared.launch_waiting(session));
        for (id, owner) in waited {
            let error = self.shared.why_waited(&owner);
            self.shared.give_up(id, error);
        }
        self.shared.node(|node, now| node.tick(now));
    }

    // ---- connections ----

    fn watch(&mut self, conn: Conn, interest: Interest) {
        let token = self.token();
        let added = match &conn {
            Conn::Dialing { conn, .. } | Conn::Shaking { conn, .. } | Conn::Joining { conn, .. } => {
                self.epoll.add(conn, token, interest)
            }
            Conn::Control { conn, .. } => self.epoll.add(&conn.conn, token, interest),
            Conn::LocalJoining { conn, .. } | Conn::LocalStranger { conn, .. } => {
                self.epoll.add(conn, token, interest)
            }
            Conn::Local { link, .. } => self.epoll.add(&**link, token, interest),
            Conn::Listener(_) | Conn::Unix(_) => Ok(()),
        };
        self.conns.insert(token, conn);
        if let Err(error) = added {
            self.fail(token, from_host(Code::PeerLost, error));
        }
    }

    fn set_interest(&mut self, of: u64, interest: Interest) {
        for (token, conn) in &self.conns {
            if let Conn::Control { session, conn } = conn
                && *session == of
                && let Err(error) = self.epoll.modify(&conn.conn, *token, interest)
            {
                log::debug!("a control connection is gone: {error}");
            }
        }
    }

    fn serve(&mut self, token: u64, readable: bool, writable: bool) {
        let result = match self.conns.get(&token) {
            Some(Conn::Listener(_)) => self.accept(token),
            Some(Conn::Unix(_)) => self.accept_local(token),
            Some(Conn::Dialing { .. }) => self.connected(token),
            Some(Conn::Shaking { .. }) => self.shake(token),
            Some(Conn::Joining { .. }) => self.join_answer(token),
            Some(Conn::Control { session, conn }) => {
                let (session, conn) = (*session, conn.clone());
                if writable {
                    self.set_interest(session, Interest::READ);
                    self.shared.flush(session);
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
    fn fail(&mut self, token: u64, error: Error) {
        let Some(conn) = self.conns.remove(&token) else { return };
        match conn {
            Conn::Dialing { why: Why::Session(owner), to, .. } => self.dial_next(owner, Some((to, error))),
            Conn::Dialing { why: Why::Channel { session, .. }, .. } | Conn::Joining { session, .. } => {
                let text = format!("a data channel could not be opened: {}", error.text);
                self.shared.node(|node, _| node.close_session(session, Error::new(Code::PeerLost, text)));
            }
            Conn::Shaking { dialled: Some((owner, to)), .. } => self.dial_next(owner, Some((to, error))),
            Conn::Shaking { dialled: None, .. } => log::info!("a connection was refused: {error}"),
            Conn::Control { session, .. } => self.shared.node(|node, _| node.close_session(session, error)),
            Conn::LocalJoining { session, .. } => self.no_local_link(session, error),
            Conn::Local { session, link } => {
                link.cut();
                self.no_local_link(session, error);
            }
            Conn::LocalStranger { .. } => log::info!("a local connection was refused: {error}"),
            Conn::Listener(_) | Conn::Unix(_) => log::error!("an engine does not listen any more: {error}"),
        }
    }

    fn accept(&mut self, token: u64) -> Result<()> {
        for _ in 0..64 {
            let Some(Conn::Listener(listener)) = self.conns.get(&token) else { return Ok(()) };
            let accepted = match listener.accept() {
                Ok(accepted) => accepted,
                Err(error) => {
                    log::warn!("a connection could not be accepted: {error}");
                    return Ok(());
                }
            };
            let Some((conn, _)) = accepted else { return Ok(()) };
            let strangers = self
                .conns
                .values()
                .filter(|conn| matches!(conn, Conn::Shaking { dialled: None, .. }))
                .count();
            if strangers >= MAX_STRANGERS {
                log::warn!(
                    "more than {MAX_STRANGERS} connections have not said who they are; one was refused"
                );
                continue;
            }
            let shake = Handshake::listen(self.shared.local.clone(), nonce()?);
            let until = Instant::now() + ATTEMPT;
            self.watch(
                Conn::Shaking { conn, shake: Box::new(shake), input: Vec::new(), dialled: None, until },
                Interest::READ,
            );
        }
        Ok(())
    }

    fn dial(&mut self, owner: Identity, ticket: &Ticket) {
        if let Some(session) = self.shared.node(|node, _| node.session_with(&owner)) {
            return self.shared.launch_waiting(session);
        }
        let dial = match Dial::new(ticket, self.shared.host_tag()) {
            Ok(dial) => dial,
            Err(error) => return self.shared.fail_waiting(&owner, &error),
        };
        let mut book = lock(&self.shared.book);
        if book.dials.contains_key(&owner) {
            return;
        }
        book.dials.insert(owner, dial);
        drop(book);
        self.dial_next(owner, None);
    }

    /// Tries the next address of a peer; the one before failed.
    fn dial_next(&mut self, owner: Identity, mut failed: Option<(SocketAddr, Error)>) {
        loop {
            let mut book = lock(&self.shared.book);
            let Some(dial) = book.dials.get_mut(&owner) else { return };
            if let Some((address, error)) = failed.take() {
                dial.failed(address, error);
            }
            let Some(to) = dial.next() else {
                let error = dial.error(&owner);
                book.dials.remove(&owner);
                drop(book);
                return self.shared.fail_waiting(&owner, &error);
            };
            drop(book);
            match TcpConn::start_connect(to, &TcpOptions::default()) {
                Ok(conn) => {
                    let until = Instant::now() + ATTEMPT;
                    return self
                        .watch(Conn::Dialing { conn, to, why: Why::Session(owner), until }, Interest::WRITE);
                }
                Err(error) => failed = Some((to, Error::new(Code::PeerUnreachable, error.to_string()))),
            }
        }
    }

    fn dial_channels(&mut self, session: u64) {
        let Some(to) = lock(&self.shared.book).links.get(&session).and_then(|link| link.address) else {
            return;
        };
        for index in 0..self.shared.config.channels {
            match TcpConn::start_connect(to, &TcpOptions::default()) {
                Ok(conn) => {
                    let until = Instant::now() + ATTEMPT;
                    self.watch(
                        Conn::Dialing { conn, to, why: Why::Channel { session, index }, until },
                        Interest::WRITE,
                    );
                }
                Err(error) => {
                    let error = from_host(Code::PeerLost, error);
                    return self.shared.node(|node, _| node.close_session(session, error));
                }
            }
        }
    }

    fn connected(&mut self, token: u64) -> Result<()> {
        let Some(Conn::Dialing { conn, to, .. }) = self.conns.get(&token) else { return Ok(()) };
        conn.connected(*to).map_err(|error| Error::new(Code::PeerUnreachable, error.to_string()))?;
        let Some(Conn::Dialing { conn, to, why, until }) = self.conns.remove(&token) else { return Ok(()) };
        let (next, bytes) = match why {
            Why::Session(owner) => {
                let (shake, hello) = Handshake::open(self.shared.local.clone(), nonce()?, Some(owner));
                let dialled = Some((owner, to));
                (Conn::Shaking { conn, shake: Box::new(shake), input: Vec::new(), dialled, until }, hello)
            }
            Why::Channel { session, index } => {
                let key = self.shared.node(|node, _| node.established(session).map(|session| session.key));
                let Some(key) = key else { return Ok(()) };
                let join = Join::new(session, index, JoinKind::Data, &key, nonce()?);
                (Conn::Joining { conn, session, input: Vec::new(), until }, join.encode())
            }
        };
        let sent = match &next {
            Conn::Shaking { conn, .. } | Conn::Joining { conn, .. } => self
                .epoll
                .modify(conn, token, Interest::READ)
                .map_err(|e| from_host(Code::PeerUnreachable, e))
                .and_then(|()| send_all(conn, &bytes)),
            _ => Ok(()),
        };
        self.conns.insert(token, next);
        sent
    }

    fn shake(&mut self, token: u64) -> Result<()> {
        let Some(Conn::Shaking { conn, shake, input, .. }) = self.conns.get_mut(&token) else {
            return Ok(());
        };
        let mut bytes = [0; 4096];
        match conn.recv(&mut bytes).map_err(|error| from_host(Code::PeerUnreachable, error))? {
            Io::Done(len) => input.extend_from_slice(&bytes[..len]),
            Io::Blocked => return Ok(()),
            Io::Closed => {
                return Err(Error::new(
                    Code::PeerNotKvik,
                    "the other side closed the connection without a word of kvik's protocol: check the address and port",
                ));
            }
        }
        let mut output = Vec::new();
        let result = shake.receive(input, &mut output);
        let sent = send_all(conn, &output);
        let Some(greeting) = result? else { return sent };
        sent?;
        let Some(Conn::Shaking { conn, input, dialled, .. }) = self.conns.remove(&token) else {
            return Ok(());
        };
        drop(self.epoll.delete(&conn));
        match greeting {
            Greeting::Control(established) => self.start_session(established, conn, dialled, &input),
            Greeting::Join(join) => {
                let answer = match self.shared.node(|node, now| node.join(&join, now)) {
                    Ok(()) if join.kind == JoinKind::Data => joined(),
                    Ok(()) => {
                        refusal(&Error::new(Code::ProtocolError, "a local link joins over the UNIX socket"))
                    }
                    Err(error) => refusal(&error),
                };
                if let Err(error) = send_all(&conn, &answer) {
                    log::debug!("a channel closed while it joined: {error}");
                } else if answer == joined()
                    && let Some(pools) = self.shared.pools.get()
                {
                    pools.tcp.add(join.session, conn);
                }
            }
        }
        Ok(())
    }

    fn join_answer(&mut self, token: u64) -> Result<()> {
        let Some(Conn::Joining { conn, input, .. }) = self.conns.get_mut(&token) else { return Ok(()) };
        let mut bytes = [0; 256];
        // Only the answer is taken: what follows it is for the data threads.
        let want = 8usize.saturating_sub(input.len()).max(1);
        match conn.recv(&mut bytes[..want]).map_err(|error| from_host(Code::PeerLost, error))? {
            Io::Done(len) => input.extend_from_slice(&bytes[..len]),
            Io::Blocked => return Ok(()),
            Io::Closed => {
                return Err(Error::new(Code::PeerLost, "the peer closed a channel that was joining"));
            }
        }
        if read_joined(input)?.is_some()
            && let Some(Conn::Joining { conn, session, .. }) = self.conns.remove(&token)
            && let Some(pools) = self.shared.pools.get()
        {
            drop(self.epoll.delete(&conn));
            pools.tcp.add(session, conn);
        }
        Ok(())
    }

    fn read_control(&mut self, session: u64, conn: &ControlConn) -> Result<()> {
        for _ in 0..16 {
            match conn.conn.recv(&mut self.buffer).map_err(|error| from_host(Code::PeerLost, error))? {
                Io::Done(len) => {
                    self.shared.node(|node, now| node.receive(session, &self.buffer[..len], now))
                }
                Io::Blocked => return Ok(()),
                Io::Closed => {
                    return Err(Error::new(
                        Code::PeerLost,
                        "the peer closed the connection: it ended, or was closed; a new transfer connects again",
                    ));
                }
            }
        }
        Ok(())
    }

    // ---- sessions ----

    fn start_session(
        &mut self,
        established: Established,
        conn: TcpConn,
        dialled: Option<(Identity, SocketAddr)>,
        early: &[u8],
    ) {
        let (session, opener, facts) = (established.session, established.opener, established.facts.clone());
        let owner = dialled.map(|(owner, _)| owner);
        let lease = match self.shared.budget.take(SESSION_BYTES, "a session") {
            Ok(lease) => lease,
            Err(error) => {
                log::warn!("a session was refused: {error}");
                if let Some(owner) = owner {
                    lock(&self.shared.book).dials.remove(&owner);
                    self.shared.fail_waiting(&owner, &error);
                }
                return;
            }
        };
        let memory = self.memory_path(&facts);
        log::info!(session = session, peer:% = established.peer.engine; "session begun with {:?}", facts.name);
        let conn = Arc::new(ControlConn::new(conn));
        lock(&self.shared.conns).insert(session, conn.clone());
        let making = matches!(memory, MemoryPath::Making(_));
        {
            let mut book = lock(&self.shared.book);
            let address = dialled.map(|(_, address)| address);
            let link = Link { address, channels: Channels::None, memory, _lease: lease };
            book.links.insert(session, link);
            if let Some(owner) = owner {
                book.dials.remove(&owner);
            }
        }
        self.shared.counters.sessions_opened.fetch_add(1, Ordering::Relaxed);
        self.shared.node(|node, now| {
            node.add_session(established, now);
            if !early.is_empty() {
                node.receive(session, early, now);
            }
        });
        self.watch(Conn::Control { session, conn }, Interest::READ);
        match (opener, making) {
            (true, true) => self.dial_local(session, &facts.local_name),
            (true, false) => self.shared.open_channels(session),
            (false, _) => {}
        }
        self.shared.launch_waiting(session);
    }

    fn memory_path(&self, peer: &Facts) -> MemoryPath {
        if self.shared.local.facts.local_name.is_empty() {
            return MemoryPath::No("this engine uses tcp only".into());
        }
        if peer.local_name.is_empty() {
            return MemoryPath::No("the peer uses tcp only".into());
        }
        match self.shared.host.why_not_local(&host_facts(peer)) {
            Some(why) => MemoryPath::No(why.into()),
            None => MemoryPath::Making(Instant::now() + LOCAL_LINK),
        }
    }

    fn no_local_link(&mut self, session: u64, error: Error) {
        if let Some(link) = lock(&self.shared.book).links.get_mut(&session) {
            link.memory = MemoryPath::No(format!("the local link failed: {}", error.text));
        }
        self.shared.launch_waiting(session);
    }

    // ---- local links ----

    fn dial_local(&mut self, session: u64, name: &str) {
        let key = self.shared.node(|node, _| node.established(session).map(|session| session.key));
        let Some(key) = key else { return };
        let joined = nonce().and_then(|nonce| {
            let fail = |error| from_host(Code::TransportUnavailable, error);
            let conn = UnixConn::connect(name, Duration::from_millis(100)).map_err(fail)?;
            conn.same_user().map_err(fail)?;
            let join = Join::new(session, 0, JoinKind::Local, &key, nonce);
            conn.send_with_fds(&join.encode(), &[]).map_err(fail)?;
            Ok(conn)
        });
        match joined {
            Ok(conn) => {
                let until = Instant::now() + LOCAL_LINK;
                self.watch(Conn::LocalJoining { conn, session, until }, Interest::READ);
            }
            Err(error) => self.no_local_link(session, error),
        }
    }

    fn local_answer(&mut self, token: u64) -> Result<()> {
        let Some(Conn::LocalJoining { conn, .. }) = self.conns.get(&token) else { return Ok(()) };
        let Some(mut answer) = local_message(conn)? else { return Ok(()) };
        read_joined(&mut answer)?;
        if let Some(Conn::LocalJoining { conn, session, .. }) = self.conns.remove(&token) {
            drop(self.epoll.delete(&conn));
            self.local_up(conn, session);
        }
        Ok(())
    }

    fn accept_local(&mut self, token: u64) -> Result<()> {
        for _ in 0..64 {
            let Some(Conn::Unix(listener)) = self.conns.get(&token) else { return Ok(()) };
            let Some(conn) = listener.accept().map_err(|error| from_host(Code::PeerLost, error))? else {
                return Ok(());
            };
            if let Err(error) = conn.same_user() {
                log::warn!("a local connection was refused: {error}");
                continue;
            }
            let until = Instant::now() + LOCAL_LINK;
            self.watch(Conn::LocalStranger { conn, until }, Interest::READ);
        }
        Ok(())
    }

    fn local_join(&mut self, token: u64) -> Result<()> {
        let Some(Conn::LocalStranger { conn, .. }) = self.conns.get(&token) else { return Ok(()) };
        let Some(mut message) = local_message(conn)? else { return Ok(()) };
        let mut shake = Handshake::listen(self.shared.local.clone(), nonce()?);
        let Some(Greeting::Join(join)) = shake.receive(&mut message, &mut Vec::new())? else {
            return Err(Error::new(Code::ProtocolError, "a local connection did not ask to join a session"));
        };
        let admitted = match join.kind {
            JoinKind::Local => self.shared.node(|node, now| node.join(&join, now)),
            JoinKind::Data => Err(Error::new(Code::ProtocolError, "a data channel joins over TCP")),
        };
        let answer = admitted.as_ref().map_or_else(refusal, |()| joined());
        conn.send_with_fds(&answer, &[]).map_err(|error| from_host(Code::PeerLost, error))?;
        admitted?;
        if let Some(Conn::LocalStranger { conn, .. }) = self.conns.remove(&token) {
            drop(self.epoll.delete(&conn));
            self.local_up(conn, join.session);
        }
        Ok(())
    }

    fn local_up(&mut self, conn: UnixConn, session: u64) {
        let facts =
            self.shared.node(|node, _| node.established(session).map(|session| session.facts.clone()));
        let Some(facts) = facts else { return };
        let near = self.shared.host.why_not_process_vm(&host_facts(&facts)).is_none();
        let pid = conn.credentials().ok().and_then(|peer| peer.pid).filter(|_| near).unwrap_or(0);
        let nonce = match nonce() {
            Ok(nonce) => nonce,
            Err(error) => return self.no_local_link(session, error),
        };
        let link = Arc::new(LocalLink::new(conn, self.shared.fence.clone(), pid, nonce));
        {
            let mut book = lock(&self.shared.book);
            let Some(state) = book.links.get_mut(&session) else { return };
            state.memory = MemoryPath::Up(link.clone());
            for (id, memory) in &book.regions {
                if let Some(memory) = memory.upgrade() {
                    link.share(*id, &memory);
                }
            }
        }
        log::debug!(session = session; "local link is up");
        self.watch(Conn::Local { session, link }, Interest::READ);
        self.obey(Ask::FlushLocal);
        self.shared.launch_waiting(session);
    }

    fn flush_local(&mut self, token: u64) {
        let Some(Conn::Local { link, .. }) = self.conns.get(&token) else { return };
        let link = link.clone();
        let flushed = link.flush().and_then(|whole| {
            let interest = if whole { Interest::READ } else { Interest::BOTH };
            self.epoll.modify(&*link, token, interest).map_err(|error| from_host(Code::PeerLost, error))
        });
        if let Err(error) = flushed {
            self.fail(token, error);
        }
    }
}

impl Conn {
    fn until(&self) -> Option<Instant> {
        match self {
            Conn::Dialing { until, .. }
            | Conn::Shaking { until, .. }
            | Conn::Joining { until, .. }
            | Conn::LocalJoining { until, .. }
            | Conn::LocalStranger { until, .. } => Some(*until),
            Conn::Listener(_) | Conn::Unix(_) | Conn::Control { .. } | Conn::Local { .. } => None,
        }
    }
}

fn nonce() -> Result<[u8; 32]> {
    identity::nonce().map_err(|error| from_host(Code::InvalidArgument, error))
}

fn host_facts(peer: &Facts) -> HostFacts {
    HostFacts {
        boot_id: peer.boot,
        pid_namespace: peer.pid_namespace,
        user_namespace: peer.user_namespace,
        net_namespace: peer.network_namespace,
        uid: peer.uid,
        pid: peer.pid,
    }
}

/// Sends a greeting: a fresh connection has room for it.
fn send_all(conn: &TcpConn, mut bytes: &[u8]) -> Result<()> {
    while !bytes.is_empty() {
        match conn.send(bytes).map_err(|error| from_host(Code::PeerUnreachable, error))? {
            Io::Done(sent) => bytes = bytes.get(sent..).unwrap_or_default(),
            Io::Blocked | Io::Closed => {
                return Err(Error::new(Code::PeerUnreachable, "the other side does not take a greeting"));
            }
        }
    }
    Ok(())
}

fn local_message(conn: &UnixConn) -> Result<Option<Vec<u8>>> {
    let mut bytes = [0; 4096];
    match conn.recv_with_fds(&mut bytes, 0).map_err(|error| from_host(Code::PeerLost, error))? {
        Io::Done(message) => Ok(Some(bytes[..message.len].to_vec())),
        Io::Blocked => Ok(None),
        Io::Closed => Err(Error::new(Code::PeerLost, "the other side closed the local connection")),
    }
}
