//! Strangers that come: over TCP, and over the UNIX socket.

use super::Control;
use super::conns::{Conn, MAX_STRANGERS};
use super::greet::send_all;
use crate::commands::{Fresh, Purpose};
use crate::peers::ATTEMPT;
use kvik_core::{Code, Error, Result};
use kvik_host::event::Interest;
use kvik_host::socket::TcpConn;
use kvik_proto::refusal;
use kvik_transport::from_host;
use kvik_transport::local::LOCAL_LINK;
use kvik_transport::tcp::Stream;
use kvik_transport::tls::TlsLink;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Connections that are accepted in one go.
const IN_ONE_GO: usize = 64;
/// How long a listener rests that could not accept: a process without a free descriptor would else do nothing but
/// try again.
const REST: Duration = Duration::from_millis(100);

impl Control {
    pub(super) fn accept(&mut self, token: u64) {
        for _ in 0..IN_ONE_GO {
            let Some(Conn::Listener(listener)) = self.conns.get(token) else { return };
            let welcomed = match listener.accept() {
                Ok(Some((conn, from))) => self.welcome(conn, from),
                Ok(None) => return,
                Err(error) => Err(from_host(Code::PeerLost, error)),
            };
            if let Err(error) = welcomed {
                log::warn!("a connection could not be accepted: {error}");
                return self.conns.pause(token, Instant::now() + REST);
            }
        }
    }

    fn welcome(&mut self, conn: TcpConn, from: SocketAddr) -> Result<()> {
        let until = Instant::now() + ATTEMPT;
        match (&self.inner.base.setup.tls, &self.securing) {
            (Some(tls), Some(securing)) => {
                let conn = Stream::tls(conn, TlsLink::server(tls, from)?);
                securing.take(Fresh { conn, purpose: Purpose::Stranger, until });
                Ok(())
            }
            _ => self.greet(Stream::from(conn), Purpose::Stranger, until),
        }
    }

    pub(super) fn accept_local(&mut self, token: u64) {
        for _ in 0..IN_ONE_GO {
            let Some(Conn::Unix(listener)) = self.conns.get(token) else { return };
            let conn = match listener.accept() {
                Ok(Some(conn)) => conn,
                Ok(None) => return,
                Err(error) => {
                    log::warn!("a local connection could not be accepted: {error}");
                    return self.conns.pause(token, Instant::now() + REST);
                }
            };
            if let Err(error) = conn.same_user() {
                log::warn!("a local connection was refused: {error}");
                continue;
            }
            self.make_room(MAX_STRANGERS, |conn| matches!(conn, Conn::LocalStranger(_)));
            self.watch(Conn::LocalStranger(conn), Interest::READ, Some(LOCAL_LINK));
        }
    }

    /// Cuts the oldest stranger of a kind where there are as many as may be.
    pub(super) fn make_room(&mut self, most: usize, kind: impl Fn(&Conn) -> bool) {
        let Some(oldest) = self.conns.too_many(most, kind) else { return };
        let text =
            format!("more than {most} connections to this engine have not said who they are; try again");
        let error = Error::new(Code::MemoryCapReached, text);
        if let Some(Conn::Shaking { conn, .. }) = self.conns.get_mut(oldest) {
            // It is cut whether it hears why or not.
            let _ = send_all(conn, &refusal(&error));
        }
        self.fail(oldest, error);
    }
}
