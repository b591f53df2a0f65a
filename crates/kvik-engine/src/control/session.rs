//! Sessions: their control connections, and what their peers make this process hold.

use super::Control;
use super::conns::Conn;
use crate::base::Base;
use crate::output::{ControlConn, closed_by_peer};
use crate::peers::Target;
use kvik_core::{Error, Result};
use kvik_host::Io;
use kvik_host::event::Interest;
use kvik_proto::Established;
use kvik_transport::tcp::Stream;
use std::net::SocketAddr;
use std::sync::Arc;

impl Control {
    /// A handshake has ended well.
    pub(super) fn start_session(
        &mut self,
        mut established: Established,
        conn: Stream,
        dialled: Option<(Target, SocketAddr)>,
        early: &[u8],
    ) {
        let (session, opener) = (established.session, established.opener);
        let (peer, facts) = (established.peer, established.facts.clone());
        let Base { setup, transports, observers, .. } = &*self.inner.base;
        let lease = match self.inner.peers.charge_session() {
            Ok(lease) => lease,
            Err(error) => {
                log::warn!("a session was refused: {error}");
                observers.metrics.handshake_refused(error.code);
                if let Some((target, at)) = dialled {
                    let error = self.inner.peers.not_taken_in(target, at, error);
                    self.not_reached(target, &error);
                }
                return;
            }
        };
        transports.all().iter().for_each(|one| one.add_session(session, &facts));
        let rma = transports.rma().filter(|rma| rma.reaches(session));
        established.one_sided = rma.is_some();
        log::info!(engine:% = setup.id(), peer:% = peer.engine; "session {session} begun with {:?}", facts.name);
        let conn = Arc::new(ControlConn::new(conn));
        self.inner.conns.add(session, conn.clone());
        let found = self.inner.peers.begin(session, peer, dialled, lease);
        observers.metrics.session_begun(peer.engine, &facts.name);
        self.inner.base.node(|node, now| {
            let begin = || node.add_session(established, now);
            self.inner.peers.begun(session, peer, &facts.name, found, begin);
            if let Some(rma) = rma {
                // What the greeting said may be old by now.
                node.session(session).tell_nics(rma.nics());
            }
            if !early.is_empty() {
                node.session(session).receive(early, now);
            }
        });
        let waits = conn.has_input();
        self.watch(Conn::Control { session, conn }, Interest::READ, None);
        // Data channels are opened by the first transfer that goes over them.
        let local = self.inner.base.transports.local();
        if opener && local.is_some_and(|local| local.is_opening(session)) {
            self.dial_local(session, &facts.local_name);
        }
        self.inner.transfers.warm_up_again(session);
        self.inner.transfers.launch_waiting(session);
        self.inner.base.observers.notices.moved.note();
        // What came under TLS with the last word of the greeting wakes nobody any more.
        if waits && let Some((token, _)) = self.conns.control(session) {
            self.serve(token, true, false);
        }
    }

    /// A connection of a session broke. What the peer has said before counts, and may be its goodbye: connections
    /// are looked after by several threads, and the end of one is no sign that another has been read to its end. What
    /// is still on its way has a moment to come.
    pub(super) fn end_session(&mut self, session: u64, error: Error) {
        let control = self.conns.control(session).map(|(_, conn)| conn.clone());
        let over = control.is_none_or(|conn| self.read_control(session, &conn).is_err());
        self.inner.base.node(|node, now| match over {
            true => node.session(session).close(error),
            false => node.session(session).channel_lost(error, now),
        });
    }

    /// Frames have come.
    pub(super) fn read_control(&mut self, session: u64, conn: &ControlConn) -> Result<()> {
        let mut turns = 0..16;
        // What waits under TLS is taken in any case: no event would tell of it.
        while turns.next().is_some() || conn.has_input() {
            match conn.recv(&mut self.buffer)? {
                Io::Done(len) => {
                    let held = self.inner.base.node(|node, now| {
                        node.session(session).receive(&self.buffer[..len], now);
                        node.held_for(session)
                    });
                    self.inner.peers.charge_peer(session, held + conn.held())?;
                    // That was all; what comes from now on wakes this thread again.
                    if len < self.buffer.len() {
                        return Ok(());
                    }
                }
                Io::Blocked => return Ok(()),
                Io::Closed => return Err(closed_by_peer()),
            }
        }
        Ok(())
    }
}
