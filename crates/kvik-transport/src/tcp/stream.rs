//! A TCP connection as it is used: plain, or under TLS.
//!
//! Plain, every call is one call of the kernel, from and to registered memory. Under TLS the same calls go through
//! [`TlsLink`]: then bytes can wait here that no event of the socket tells of, in both directions, and whoever serves
//! the stream asks for them with [`Stream::has_input`] and [`Stream::is_behind`].

use crate::from_host;
use crate::tls::TlsLink;
use kvik_core::{Code, Error, Result};
use kvik_host::socket::TcpConn;
use kvik_host::{Io, RecvBatch, SendBatch};
use kvik_proto::Binding;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

/// Who asks for memory here.
pub(super) const CHANNEL: &str = "a TCP channel";

/// How long nobody may acknowledge what a channel sends. A firewall that forgets idle connections, or a path of which
/// a part has died, can swallow a channel while the session's control connection lives: without an end of their own,
/// such channels would cost every transfer its deadline. It is longer than the pauses of a crowded link.
const UNHEARD: Duration = Duration::from_secs(10);

/// See the module's text.
pub struct Stream {
    conn: TcpConn,
    tls: Option<Box<TlsLink>>,
}

impl From<TcpConn> for Stream {
    fn from(conn: TcpConn) -> Stream {
        Stream { conn, tls: None }
    }
}

impl Stream {
    /// A connection under TLS.
    pub fn tls(conn: TcpConn, link: TlsLink) -> Stream {
        Stream { conn, tls: Some(Box::new(link)) }
    }

    /// The connection, and its TLS if it has any.
    pub fn into_parts(self) -> (TcpConn, Option<Box<TlsLink>>) {
        (self.conn, self.tls)
    }

    /// Makes it ready to carry data.
    pub(crate) fn for_data(&mut self) -> Result<()> {
        self.conn.give_up_after(UNHEARD).map_err(lost)?;
        if let Some(tls) = &mut self.tls {
            tls.for_data();
        }
        Ok(())
    }

    /// Takes the handshake of TLS as far as what has come allows: `Done` once it is over, and at once without TLS.
    ///
    /// # Errors
    /// Why TLS with the other side failed, or `PeerLost`.
    pub fn shake(&mut self) -> Result<Io> {
        self.tls.as_mut().map_or(Ok(Io::Done(0)), |tls| tls.shake(&self.conn))
    }

    /// What ties kvik's handshake to this connection, under TLS.
    pub fn binding(&self) -> Option<Binding> {
        self.tls.as_ref().and_then(|tls| tls.binding())
    }

    /// The other side's certificate in DER, under TLS.
    pub fn certificate(&self) -> Option<&[u8]> {
        self.tls.as_ref()?.certificate()
    }

    /// Whether the other side has said something in TLS.
    pub fn has_heard(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.has_heard())
    }

    /// Whether something that came waits here.
    pub fn has_input(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.has_input())
    }

    /// Whether something that was taken waits for room in the socket.
    pub fn is_behind(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.is_behind())
    }

    /// Sends what was taken before: true when nothing waits any more.
    pub fn flush(&mut self) -> Result<bool> {
        self.tls.as_mut().map_or(Ok(true), |tls| tls.flush(&self.conn))
    }

    /// Takes some of the bytes.
    pub fn send(&mut self, bytes: &[u8]) -> Result<Io> {
        match &mut self.tls {
            None => self.conn.send(bytes).map_err(lost),
            Some(tls) => tls.send(&self.conn, bytes),
        }
    }

    /// Receives what is there.
    pub fn recv(&mut self, into: &mut [u8]) -> Result<Io> {
        match &mut self.tls {
            None => self.conn.recv(into).map_err(lost),
            Some(tls) => tls.recv(&self.conn, into),
        }
    }

    /// Takes some of the batch's bytes. `scratch` is used under TLS only.
    pub(crate) fn send_batch(&mut self, batch: &mut SendBatch<'_, '_>, scratch: &mut [u8]) -> Result<Io> {
        match &mut self.tls {
            None => batch.send(&self.conn).map_err(lost),
            Some(tls) => tls.send_batch(&self.conn, batch, scratch),
        }
    }

    /// Receives what is there into the batch.
    pub(crate) fn recv_batch(&mut self, batch: &mut RecvBatch<'_, '_>) -> Result<Io> {
        match &mut self.tls {
            None => batch.recv(&self.conn).map_err(lost),
            Some(tls) => tls.recv_batch(&self.conn, batch),
        }
    }

    /// Ends both directions now, for every process that holds the socket.
    pub fn cut(&self) -> Result<()> {
        self.conn.shutdown_both().map_err(lost)
    }

    /// As [`Stream::cut`], with TLS's word for the end before it where that costs no wait.
    pub(crate) fn close(&mut self) -> Result<()> {
        if let Some(tls) = &mut self.tls {
            tls.close(&self.conn);
        }
        self.cut()
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.conn.as_fd()
    }
}

fn lost(error: kvik_host::HostError) -> Error {
    from_host(Code::PeerLost, error)
}
