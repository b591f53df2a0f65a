//! Strangers that come: over TCP, and over the UNIX socket.

use super::Control;
use super::conns::Conn;
use super::greet::{nonce, send_all};
use super::local::LOCAL_LINK;
use crate::dial::ATTEMPT;
use kvik_core::{Code, Error, Result};
use kvik_host::event::Interest;
use kvik_host::socket::TcpConn;
use kvik_proto::{Handshake, refusal};
use kvik_transport::from_host;
use kvik_transport::tcp::Stream;
use kvik_transport::tls::TlsLink;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Connections whose handshake is not over; more are refused.
const MAX_STRANGERS: usize = 256;
/// Connections that are accepted in one go.
const IN_ONE_GO: usize = 64;
/// How long a listener rests that could not accept: a process without a free descriptor would else do nothing but
/// try again.
const REST: Duration = Duration::from_millis(100);

impl Control {
    pub(super) fn accept(&mut self, token: u64) {
        for _ in 0..IN_ONE_GO {
            let Some(Conn::Listener { listener, .. }) = self.conns.get(&token) else { return };
            let welcomed = match listener.accept() {
                Ok(Some((conn, from))) => self.welcome(conn, from),
                Ok(None) => return,
                Err(error) => Err(from_host(Code::PeerLost, error)),
            };
            if let Err(error) = welcomed {
                log::warn!("a connection could not be accepted: {error}");
                return self.rest(token);
            }
        }
    }

    fn welcome(&mut self, conn: TcpConn, from: SocketAddr) -> Result<()> {
        let stranger = |conn: &Conn| matches!(conn, Conn::Shaking { dialled: None, .. });
        if self.tokens(stranger).len() >= MAX_STRANGERS {
            let text = format!(
                "more than {MAX_STRANGERS} connections to this engine have not said who they are; try again"
            );
            log::warn!("a connection was refused: {text}");
            self.shared.metrics.handshake_refused(Code::MemoryCapReached);
            return send_all(&mut conn.into(), &refusal(&Error::new(Code::MemoryCapReached, text)));
        }
        let conn = match &self.shared.tls {
            None => Stream::from(conn),
            Some(tls) => {
                let link = TlsLink::server(tls, from)?;
                Stream::tls(conn, link)
            }
        };
        let shake = Box::new(Handshake::listen(self.shared.local.clone(), nonce()?));
        let until = Instant::now() + ATTEMPT;
        let input = Vec::new();
        let conn = Conn::Shaking { conn, shake, input, heard: false, dialled: None, until };
        self.watch(conn, Interest::READ);
        Ok(())
    }

    pub(super) fn accept_local(&mut self, token: u64) {
        for _ in 0..IN_ONE_GO {
            let Some(Conn::Unix { listener, .. }) = self.conns.get(&token) else { return };
            let conn = match listener.accept() {
                Ok(Some(conn)) => conn,
                Ok(None) => return,
                Err(error) => {
                    log::warn!("a local connection could not be accepted: {error}");
                    return self.rest(token);
                }
            };
            if let Err(error) = conn.same_user() {
                log::warn!("a local connection was refused: {error}");
                continue;
            }
            if self.tokens(|conn| matches!(conn, Conn::LocalStranger { .. })).len() >= MAX_STRANGERS {
                log::warn!("a local connection was refused: {MAX_STRANGERS} have not said who they are");
                continue;
            }
            let until = Instant::now() + LOCAL_LINK;
            self.watch(Conn::LocalStranger { conn, until }, Interest::READ);
        }
    }

    /// A listener is left alone for a moment.
    fn rest(&mut self, token: u64) {
        let Some(mut conn) = self.remove(token) else { return };
        if let Conn::Listener { paused_until, .. } | Conn::Unix { paused_until, .. } = &mut conn {
            *paused_until = Some(Instant::now() + REST);
        }
        self.conns.insert(token, conn);
    }

    pub(super) fn listen_again(&mut self, token: u64) {
        let Some(conn) = self.conns.get_mut(&token) else { return };
        if let Conn::Listener { paused_until, .. } | Conn::Unix { paused_until, .. } = conn {
            *paused_until = None;
        }
        if let Err(error) = conn.add_to(&self.epoll, token, Interest::READ) {
            self.fail(token, from_host(Code::PeerLost, error));
        }
    }
}
