//! Handshakes, and channels that join a session.

use super::Control;
use super::conns::{Conn, hung_up, unreachable};
use crate::peers::Target;
use kvik_core::{Code, Error, Result};
use kvik_host::{Io, identity};
use kvik_proto::{Greeting, Join, JoinKind, joined, read_joined, refusal};
use kvik_transport::from_host;
use kvik_transport::tcp::Stream;
use kvik_transport::tls::began_with_tls;

/// Bytes of an answer that welcomes a channel.
const WELCOME: usize = 8;

impl Control {
    /// Something has come on a connection whose handshake is not over.
    pub(super) fn shake(&mut self, token: u64) -> Result<()> {
        let Some(Conn::Shaking { conn, shake, input, heard, dialled, .. }) = self.conns.get_mut(token) else {
            return Ok(());
        };
        let mut bytes = [0; 4096];
        match conn.recv(&mut bytes).map_err(unreachable)? {
            Io::Done(len) => input.extend_from_slice(&bytes[..len]),
            Io::Blocked => return Ok(()),
            Io::Closed => return Err(hung_up(*heard || conn.has_heard())),
        }
        if let Some(binding) = conn.binding() {
            shake.bind(binding);
        } else if dialled.is_none() && !*heard && began_with_tls(input) {
            let error = Error::new(
                Code::TlsRequired,
                "who connects uses TLS, and this engine has none: set `tls` (KVIK_TLS)",
            );
            return send_all(conn, &refusal(&error)).and(Err(error));
        }
        let mut output = Vec::new();
        let mut result = shake.receive(input, &mut output);
        *heard = true;
        let named = dialled.and_then(|(target, _)| target.peer());
        let claimed = match &result {
            Ok(Some(Greeting::Control(claim))) => Some(claim.peer),
            Ok(None) => shake.answered(),
            _ => None,
        };
        // Who was dialled by name is where its ticket says; whoever else it is has only said so.
        if let (None, Some(peer)) = (named, claimed)
            && let Err(error) = self.inner.conns.check_claim(peer.engine, &self.inner.peers, conn)
        {
            output = refusal(&error);
            result = Err(error);
        }
        // One that was dialled by its address may be a peer: its session does, and it is not greeted to the end.
        if let (Ok(None), Some((target @ Target::Address(_), _)), Some(peer)) = (&result, *dialled, claimed)
            && self.inner.base.node(|node, _| node.session_with(&peer)).is_some()
        {
            self.leave(token);
            self.inner.peers.met(&target, &peer);
            return Ok(());
        }
        let sent = send_all(conn, &output);
        let Some(greeting) = result? else { return sent };
        sent?;
        let Some(Conn::Shaking { conn, input, dialled, .. }) = self.conns.remove(token) else {
            return Ok(());
        };
        match greeting {
            Greeting::Control(established) => self.start_session(established, conn, dialled, &input),
            Greeting::Join(join) => self.join(&join, conn),
        }
        Ok(())
    }

    /// Ends a handshake that is not needed.
    fn leave(&mut self, token: u64) {
        let Some(Conn::Shaking { mut conn, .. }) = self.conns.remove(token) else { return };
        let why =
            Error::new(Code::Cancelled, "the two engines are connected already; that connection is used");
        // It is ended whether the other side hears why or not.
        let _ = send_all(&mut conn, &refusal(&why));
        if let Err(error) = conn.cut() {
            log::debug!("a connection could not be cut: {error}");
        }
    }

    /// A connection asks to be a data channel of a session.
    fn join(&mut self, join: &Join, mut conn: Stream) {
        let admitted = match join.kind {
            JoinKind::Data => self.inner.base.node(|node, now| node.join(join, now)),
            JoinKind::Local => {
                Err(Error::new(Code::ProtocolError, "a local link joins over the UNIX socket"))
            }
        };
        let admitted = admitted.and_then(|()| self.inner.peers.charge_channel(join.session));
        let answer = admitted.as_ref().map_or_else(refusal, |()| joined());
        match send_all(&mut conn, &answer).and(admitted) {
            Ok(()) => self.add_channel(join.session, conn),
            Err(error) => {
                self.inner.base.observers.metrics.handshake_refused(error.code);
                log::info!("a channel did not join its session: {error}");
            }
        }
    }

    /// The answer to this side's wish to join.
    pub(super) fn join_answer(&mut self, token: u64) -> Result<()> {
        let Some(Conn::Joining { conn, input, session, .. }) = self.conns.get_mut(token) else {
            return Ok(());
        };
        let session = *session;
        let mut bytes = [0; WELCOME];
        // Only the answer is taken: what follows it is for the data threads.
        let want = WELCOME.saturating_sub(input.len()).max(1);
        match conn.recv(&mut bytes[..want])? {
            Io::Done(len) => input.extend_from_slice(&bytes[..len]),
            Io::Blocked => return Ok(()),
            Io::Closed => {
                return Err(Error::new(Code::PeerLost, "the peer closed a channel that was joining"));
            }
        }
        if read_joined(input)?.is_some() {
            self.inner.peers.charge_channel(session)?;
            if let Some(Conn::Joining { conn, .. }) = self.conns.remove(token) {
                self.add_channel(session, conn);
            }
        }
        Ok(())
    }

    fn add_channel(&mut self, session: u64, conn: Stream) {
        if let Some(tcp) = self.inner.base.transports.tcp() {
            tcp.add(session, conn);
        }
        self.inner.transfers.advance_warm_ups(session);
    }
}

pub(super) fn nonce() -> Result<[u8; 32]> {
    identity::nonce().map_err(|error| from_host(Code::InvalidArgument, error))
}

/// Sends a greeting: a fresh connection has room for it. Under TLS it goes when the connection is up.
pub(super) fn send_all(conn: &mut Stream, mut bytes: &[u8]) -> Result<()> {
    while !bytes.is_empty() {
        match conn.send(bytes).map_err(unreachable)? {
            Io::Done(sent) => bytes = bytes.get(sent..).unwrap_or_default(),
            Io::Blocked | Io::Closed => {
                return Err(Error::new(Code::PeerUnreachable, "the other side does not take a greeting"));
            }
        }
    }
    Ok(())
}
