//! Control connections' output: any thread may send what waits.
//!
//! Under TLS, who sends and who receives share its state, one short call after the other.

use crate::base::Base;
use crate::commands::ControlCommand;
use crate::peers::Peers;
use crate::sync::lock;
use kvik_core::{Code, EngineId, Error, Result};
use kvik_host::Io;
use kvik_host::socket::TcpConn;
use kvik_transport::from_host;
use kvik_transport::tcp::Stream;
use kvik_transport::tls::TlsLink;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// A buffer that was needed once is not kept beyond this.
const KEPT: usize = 64 << 10;

/// A session's control connection.
pub(crate) struct ControlConn {
    pub conn: TcpConn,
    tls: Option<Mutex<Box<TlsLink>>>,
    out: Mutex<Out>,
}

#[derive(Default)]
struct Out {
    buffer: Vec<u8>,
    sent: usize,
    /// The socket is full, and the control thread waits for room.
    full: bool,
}

impl ControlConn {
    pub fn new(stream: Stream) -> ControlConn {
        let (conn, tls) = stream.into_parts();
        ControlConn { conn, tls: tls.map(Mutex::new), out: Mutex::default() }
    }

    /// Receives what is there.
    pub fn recv(&self, into: &mut [u8]) -> Result<Io> {
        match &self.tls {
            None => self.conn.recv(into).map_err(|error| from_host(Code::PeerLost, error)),
            Some(tls) => lock(tls).recv(&self.conn, into),
        }
    }

    /// Whether something that came waits here, which no event of the socket will tell.
    pub fn has_input(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| lock(tls).has_input())
    }

    /// Whether the peer has come with this certificate.
    fn has_certificate(&self, certificate: &[u8]) -> bool {
        self.tls.as_ref().is_some_and(|tls| lock(tls).certificate() == Some(certificate))
    }

    fn send(&self, bytes: &[u8]) -> Result<Io> {
        match &self.tls {
            None => self.conn.send(bytes).map_err(|error| from_host(Code::PeerLost, error)),
            Some(tls) => lock(tls).send(&self.conn, bytes),
        }
    }

    /// Sends what TLS has taken: true when nothing waits any more.
    fn flush(&self) -> Result<bool> {
        self.tls.as_ref().map_or(Ok(true), |tls| lock(tls).flush(&self.conn))
    }

    /// Sends what waits, as far as the socket takes it.
    fn flush_output(&self, session: u64, base: &Base) -> Result<()> {
        let mut out = lock(&self.out);
        while !out.full {
            let Out { buffer, sent, full } = &mut *out;
            if *sent == buffer.len() {
                buffer.clear();
                buffer.shrink_to(KEPT);
                *sent = 0;
                base.protocol.take_output(session, buffer);
                if buffer.is_empty() && self.flush()? {
                    return Ok(());
                }
            }
            match self.send(&buffer[*sent..])? {
                Io::Done(moved) => *sent += moved,
                Io::Blocked => {
                    *full = true;
                    base.commands.tell(ControlCommand::WantWrite(session));
                }
                Io::Closed => return Err(closed_by_peer()),
            }
        }
        Ok(())
    }

    /// Bytes that are held because the peer has not read them.
    pub fn held(&self) -> u64 {
        lock(&self.out).buffer.capacity() as u64
    }

    /// The socket has room again: the next [`ControlConns::flush`] sends.
    pub fn has_room(&self) {
        lock(&self.out).full = false;
    }
}

/// The control connections of all sessions.
#[derive(Default)]
pub(crate) struct ControlConns {
    conns: Mutex<HashMap<u64, Arc<ControlConn>>>,
}

impl ControlConns {
    pub fn add(&self, session: u64, conn: Arc<ControlConn>) {
        lock(&self.conns).insert(session, conn);
    }

    /// Ends one for every process that holds it.
    pub fn cut(&self, session: u64) {
        if let Some(conn) = lock(&self.conns).remove(&session)
            && let Err(error) = conn.conn.shutdown_both()
        {
            log::debug!("a control connection could not be shut down: {error}");
        }
    }

    /// Whether somebody who has come may be this engine. Under TLS an engine's id is for who came with it first, for as
    /// long as that one is connected, whichever start it calls itself.
    ///
    /// # Errors
    /// `TlsFailed`: an engine with this id is here, under another certificate.
    pub fn check_claim(&self, engine: EngineId, peers: &Peers, conn: &Stream) -> Result<()> {
        let Some(certificate) = conn.certificate() else { return Ok(()) };
        let sessions = peers.sessions_of(engine);
        let conns: Vec<Arc<ControlConn>> = {
            let conns = lock(&self.conns);
            sessions.iter().filter_map(|id| conns.get(id).cloned()).collect()
        };
        match conns.iter().all(|conn| conn.has_certificate(certificate)) {
            true => Ok(()),
            false => Err(Error::new(
                Code::TlsFailed,
                format!(
                    "engine {engine} is connected already, under another certificate: somebody calls itself by \
                     its id, or its certificate is new and its end was not noticed yet"
                ),
            )),
        }
    }

    /// Sends what waits on a session's control connection, as far as the socket takes it.
    pub fn flush(&self, session: u64, base: &Base) {
        let Some(conn) = lock(&self.conns).get(&session).cloned() else { return };
        if let Err(error) = conn.flush_output(session, base) {
            // Nobody tries again until the control thread has ended the session.
            lock(&conn.out).full = true;
            base.commands.tell(ControlCommand::Broken(session, error));
        }
    }
}

/// The error for a control connection that has come to its end.
pub(crate) fn closed_by_peer() -> Error {
    Error::new(
        Code::PeerLost,
        "the peer closed the connection: it ended, or was closed; a new transfer connects again",
    )
}
