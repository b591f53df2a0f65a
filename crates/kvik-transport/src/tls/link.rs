//! One TLS connection: records between a socket and whoever reads and writes its plain bytes.
//!
//! Nothing here blocks, and nothing here grows beyond a bound. What came from the socket and is not decrypted yet
//! waits in a stage of fixed size, which is filled again only when it is empty; of what is decrypted at most a record
//! waits, and of what is encrypted at most [`OUT`] bytes. Registered memory is copied to and from, never borrowed:
//! what the kernel gets is a copy, so a work request that is left is left for good, as on a plain connection.
//!
//! A connection's end is told by kvik's frames or is a loss: an end without TLS's own word for it is no more and no
//! less than that, so nothing is gained by cutting a connection short.

use super::{Tls, failed};
use crate::from_host;
use kvik_core::{Code, Error, Result};
use kvik_host::socket::TcpConn;
use kvik_host::{Io, RecvBatch, SendBatch};
use kvik_proto::{Binding, read_joined, refusal};
use rustls::pki_types::{IpAddr, ServerName};
use rustls::{ClientConnection, Connection, ServerConnection};
use std::io::{BufRead, ErrorKind, IoSlice, Write};
use std::net::SocketAddr;

/// Plain bytes that are encrypted before the socket has taken those before them.
pub(super) const OUT: usize = 64 << 10;
/// The stage while a connection says who it is, and of a control connection.
const STAGE: usize = 16 << 10;
/// The stage of a data channel.
const DATA_STAGE: usize = 64 << 10;
/// What rustls holds for a connection at most: a flight of the handshake while it lasts, then a record that comes, one
/// that is decrypted, and its own state.
const RUSTLS: usize = 64 << 10;
/// Bytes of exported keying material are asked for under this name.
const EXPORT: &[u8] = b"EXPORTER-kvik-v1-channel-binding";
/// The first byte of a connection that begins with a TLS handshake, or with TLS's refusal of one.
const HANDSHAKE: u8 = 0x16;
const ALERT: u8 = 0x15;

/// What a control connection under TLS holds at most.
pub const TLS_CONTROL_BYTES: u64 = (OUT + STAGE + RUSTLS) as u64;
/// What a data channel under TLS holds at most.
pub const TLS_DATA_BYTES: u64 = (OUT + DATA_STAGE + RUSTLS) as u64;

/// Whether the first bytes of a connection are those of TLS.
pub fn began_with_tls(first: &[u8]) -> bool {
    first.first() == Some(&HANDSHAKE)
}

/// One side of a TLS connection. The socket is given with every call.
pub struct TlsLink {
    tls: Connection,
    /// The other side's address, for people.
    peer: SocketAddr,
    /// Came from the socket: `stage[from..to]` is not decrypted yet.
    stage: Vec<u8>,
    from: usize,
    to: usize,
    /// Something has come.
    heard: bool,
    /// Decrypted bytes may wait.
    plain: bool,
}

impl TlsLink {
    /// The side of who connected, to `peer`. Its greeting goes out by [`TlsLink::flush`].
    ///
    /// # Errors
    /// None that a peer can cause.
    pub fn client(tls: &Tls, peer: SocketAddr) -> Result<TlsLink> {
        // Names are not looked at: see the module's text.
        let name = ServerName::IpAddress(IpAddr::from(peer.ip()));
        let client = ClientConnection::new(tls.client.clone(), name);
        Ok(TlsLink::new(client.map_err(|error| failed(peer, &error))?.into(), peer))
    }

    /// The side of who accepted, from `peer`.
    ///
    /// # Errors
    /// None that a peer can cause.
    pub fn server(tls: &Tls, peer: SocketAddr) -> Result<TlsLink> {
        let server = ServerConnection::new(tls.server.clone());
        Ok(TlsLink::new(server.map_err(|error| failed(peer, &error))?.into(), peer))
    }

    fn new(mut tls: Connection, peer: SocketAddr) -> TlsLink {
        tls.set_buffer_limit(Some(OUT));
        TlsLink { tls, peer, stage: vec![0; STAGE], from: 0, to: 0, heard: false, plain: false }
    }

    /// Makes it ready to carry data: larger reads of the socket.
    pub fn for_data(&mut self) {
        self.stage.resize(DATA_STAGE, 0);
    }

    /// Whether the handshake is still in progress. The side that connected is through before the other has seen its
    /// certificate.
    pub fn is_shaking(&self) -> bool {
        self.tls.is_handshaking()
    }

    /// Whether the other side has said anything.
    pub fn has_heard(&self) -> bool {
        self.heard
    }

    /// What ties kvik's handshake to this connection; none before TLS's own is over.
    pub fn binding(&self) -> Option<Binding> {
        self.tls.export_keying_material([0; 32], EXPORT, None).ok()
    }

    /// The other side's certificate in DER; none before TLS's handshake is over.
    pub fn certificate(&self) -> Option<&[u8]> {
        self.tls.peer_certificates()?.first().map(|own| own.as_ref())
    }

    /// Whether something that came waits here, which no event of the socket will tell.
    pub fn has_input(&self) -> bool {
        self.plain || self.from < self.to
    }

    /// Whether something waits for room in the socket.
    pub fn is_behind(&self) -> bool {
        self.tls.wants_write()
    }

    /// Sends what is encrypted, as far as the socket takes it: true when nothing waits any more.
    ///
    /// # Errors
    /// `PeerLost`.
    pub fn flush(&mut self, conn: &TcpConn) -> Result<bool> {
        while self.tls.wants_write() {
            match self.tls.write_tls(&mut Socket(conn)) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(Error::new(Code::PeerLost, error.to_string())),
            }
        }
        Ok(true)
    }

    /// Takes the handshake as far as what has come allows: `Done` once it is over on this side and all of this side's
    /// part of it is sent. As with [`TlsLink::recv`] the socket is read at most twice.
    ///
    /// # Errors
    /// As [`TlsLink::receive`].
    pub fn shake(&mut self, conn: &TcpConn) -> Result<Io> {
        let mut reads = 0;
        while self.tls.is_handshaking() {
            self.flush(conn)?;
            if let Some(nothing) = self.take_some(conn, &mut reads)? {
                return Ok(nothing);
            }
        }
        Ok(if self.flush(conn)? { Io::Done(0) } else { Io::Blocked })
    }

    /// Takes plain bytes to send. Nothing is taken while earlier ones wait for room in the socket; while the
    /// handshake is in progress they go with its end.
    ///
    /// # Errors
    /// `PeerLost`.
    pub fn send(&mut self, conn: &TcpConn, bytes: &[u8]) -> Result<Io> {
        if !self.flush(conn)? {
            return Ok(Io::Blocked);
        }
        let taken = self.tls.writer().write(bytes);
        let taken = taken.map_err(|error| Error::new(Code::PeerLost, error.to_string()))?;
        self.flush(conn)?;
        Ok(if taken == 0 && !bytes.is_empty() { Io::Blocked } else { Io::Done(taken) })
    }

    /// As [`TlsLink::send`], by way of `scratch`.
    ///
    /// # Errors
    /// `PeerLost`.
    pub fn send_batch(
        &mut self,
        conn: &TcpConn,
        batch: &SendBatch<'_, '_>,
        scratch: &mut [u8],
    ) -> Result<Io> {
        if !self.flush(conn)? {
            return Ok(Io::Blocked);
        }
        let room = scratch.len().min(OUT);
        let copied = batch.copy_out(&mut scratch[..room]);
        self.send(conn, &scratch[..copied])
    }

    /// Receives plain bytes.
    ///
    /// # Errors
    /// As [`TlsLink::receive`].
    pub fn recv(&mut self, conn: &TcpConn, into: &mut [u8]) -> Result<Io> {
        let mut done = 0;
        self.receive(conn, &mut |bytes| {
            let len = bytes.len().min(into.len() - done);
            into[done..done + len].copy_from_slice(&bytes[..len]);
            done += len;
            len
        })
    }

    /// Receives plain bytes to where they belong.
    ///
    /// # Errors
    /// As [`TlsLink::receive`].
    pub fn recv_batch(&mut self, conn: &TcpConn, batch: &mut RecvBatch<'_, '_>) -> Result<Io> {
        self.receive(conn, &mut |bytes| batch.copy_in(bytes))
    }

    /// Hands what has come to `take`, which says how many of the bytes it took, until it is full or nothing more is
    /// there. The socket is read at most twice, so a peer that sends empty records keeps nobody from its turn.
    ///
    /// # Errors
    /// `TlsFailed`, with what the other side is told; `TlsRequired` when it speaks plain kvik; `PeerNotKvik`;
    /// `PeerLost`.
    fn receive(&mut self, conn: &TcpConn, take: &mut dyn FnMut(&[u8]) -> usize) -> Result<Io> {
        let (mut total, mut reads) = (0, 0);
        loop {
            let full = self.take_plain(take, &mut total)?;
            if full {
                return Ok(Io::Done(total));
            }
            if total > 0 && self.from == self.to {
                return Ok(Io::Done(total));
            }
            if let Some(nothing) = self.take_some(conn, &mut reads)? {
                return Ok(nothing);
            }
        }
    }

    /// Gives rustls some of what has come, and reads the socket where that is nothing, twice at most: why there is
    /// nothing more.
    fn take_some(&mut self, conn: &TcpConn, reads: &mut u32) -> Result<Option<Io>> {
        if self.from < self.to {
            self.decrypt(conn)?;
            return Ok(None);
        }
        if *reads == 2 {
            return Ok(Some(Io::Blocked));
        }
        *reads += 1;
        let read = self.fill(conn)?;
        Ok(if matches!(read, Io::Done(_)) { None } else { Some(read) })
    }

    /// Fills the stage, which is empty, from the socket.
    fn fill(&mut self, conn: &TcpConn) -> Result<Io> {
        let read = conn.recv(&mut self.stage).map_err(|error| from_host(Code::PeerLost, error))?;
        if let Io::Done(len) = read {
            (self.from, self.to) = (0, len);
            if !std::mem::replace(&mut self.heard, true) {
                self.check_first(conn)?;
            }
        }
        Ok(read)
    }

    /// Hands decrypted bytes over, and counts them: whether to come back later, because no more are wanted now, or
    /// because the end comes after what was taken.
    fn take_plain(&mut self, take: &mut dyn FnMut(&[u8]) -> usize, total: &mut usize) -> Result<bool> {
        while self.plain {
            let mut reader = self.tls.reader();
            let (taken, all) = match reader.fill_buf() {
                Ok([]) if *total > 0 => return Ok(true),
                Ok([]) => return Err(Error::new(Code::PeerLost, "the peer closed the connection")),
                Ok(bytes) => {
                    let taken = take(bytes);
                    (taken, taken == bytes.len())
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.plain = false;
                    break;
                }
                Err(error) => return Err(Error::new(Code::PeerLost, error.to_string())),
            };
            reader.consume(taken);
            *total += taken;
            if !all {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Gives rustls some of the stage.
    fn decrypt(&mut self, conn: &TcpConn) -> Result<()> {
        let mut staged = &self.stage[self.from..self.to];
        let before = staged.len();
        let read = self.tls.read_tls(&mut staged);
        self.from += before - staged.len();
        let closed = match read {
            // It takes nothing more after the peer's word that it has ended.
            Ok(taken) => taken == 0,
            Err(error) => {
                return Err(Error::new(Code::TlsFailed, format!("TLS with {} failed: {error}", self.peer)));
            }
        };
        let state = self.tls.process_new_packets().map_err(|error| {
            // The other side is told why, if it still listens.
            if let Err(lost) = self.flush(conn) {
                log::debug!("a TLS alert was not sent: {lost}");
            }
            failed(self.peer, &error)
        })?;
        self.plain = state.plaintext_bytes_to_read() > 0 || state.peer_has_closed() || closed;
        self.flush(conn)?;
        Ok(())
    }

    /// What begins in another way than TLS is refused in words that it understands.
    fn check_first(&self, conn: &TcpConn) -> Result<()> {
        match (self.stage.first(), &self.tls) {
            (Some(&(HANDSHAKE | ALERT)), _) | (None, _) => Ok(()),
            (Some(b'k'), Connection::Server(_)) => {
                let text = format!(
                    "the engine at {} takes TLS only, and the one that connects has none: set its `tls` (KVIK_TLS)",
                    conn.local_addr().map_or_else(|_| "its address".into(), |address| address.to_string())
                );
                let error = Error::new(Code::TlsRequired, text);
                if let Err(lost) = conn.send(&refusal(&error)) {
                    log::debug!("a refusal was not sent: {lost}");
                }
                Err(error)
            }
            (Some(b'k'), Connection::Client(_)) => {
                // Nobody vouches for these words, and nothing is done about them but to tell a person.
                let told = read_joined(&mut self.stage[..self.to].to_vec()).err();
                if let Some(full) = told.filter(|told| told.code == Code::MemoryCapReached) {
                    return Err(full);
                }
                let text = format!(
                    "this engine uses TLS, and the one at {} has none: set `tls` (KVIK_TLS) there, or unset it here",
                    self.peer
                );
                Err(Error::new(Code::TlsRequired, text))
            }
            _ => Err(Error::new(
                Code::PeerNotKvik,
                format!("what answers at {} speaks neither TLS nor kvik's protocol", self.peer),
            )),
        }
    }

    /// Says that nothing more comes, if there is room to say it.
    pub fn close(&mut self, conn: &TcpConn) {
        if !self.is_shaking() && !self.is_behind() {
            self.tls.send_close_notify();
            if let Err(error) = self.flush(conn) {
                log::debug!("the end of a TLS connection was not told: {error}");
            }
        }
    }
}

/// A socket as rustls writes to it.
struct Socket<'c>(&'c TcpConn);

impl Write for Socket<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> std::io::Result<usize> {
        match self.0.send_parts(parts) {
            Ok(Io::Done(sent)) => Ok(sent),
            Ok(Io::Blocked) => Err(ErrorKind::WouldBlock.into()),
            Ok(Io::Closed) => Err(ErrorKind::BrokenPipe.into()),
            Err(error) => Err(std::io::Error::other(error.to_string())),
        }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
