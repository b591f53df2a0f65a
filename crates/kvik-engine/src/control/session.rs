//! Sessions: their control connections, and what their peers make this process hold.

use super::Control;
use super::conns::Conn;
use crate::dial::Dial;
use crate::inner::{Link, lock};
use crate::output::{ControlConn, closed_by_peer};
use kvik_core::{Error, Result};
use kvik_host::Io;
use kvik_host::event::Interest;
use kvik_proto::{Established, Identity};
use kvik_transport::tcp::Stream;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Control {
    /// A handshake has ended well.
    pub(super) fn start_session(
        &mut self,
        established: Established,
        conn: Stream,
        dialled: Option<(Identity, SocketAddr)>,
        early: &[u8],
    ) {
        let (session, opener) = (established.session, established.opener);
        let (peer, facts) = (established.peer, established.facts.clone());
        let kept = self.inner.session_bytes();
        let lease = match self.inner.budget.take(kept, "a session") {
            Ok(lease) => lease,
            Err(error) => {
                log::warn!("a session was refused: {error}");
                self.inner.metrics.handshake_refused(error.code);
                if let Some((owner, at)) = dialled {
                    let mut dial = lock(&self.inner.tables)
                        .dials
                        .remove(&owner)
                        .unwrap_or_else(|| Dial::again(vec![at]));
                    dial.failed(at, error);
                    let error = self.inner.on_not_reached(owner, &dial);
                    self.inner.fail_waiting(&owner, &error);
                }
                return;
            }
        };
        self.inner.transports().iter().for_each(|one| one.add_session(session, &facts));
        let own = self.inner.local.identity.engine;
        log::info!(engine:% = own, peer:% = peer.engine; "session {session} begun with {:?}", facts.name);
        let conn = Arc::new(ControlConn::new(conn));
        lock(&self.inner.conns).insert(session, conn.clone());
        let dial;
        {
            let mut tables = lock(&self.inner.tables);
            let address = dialled.map(|(_, address)| address);
            tables.links.insert(session, Link { peer, address, warm: false, lease, kept });
            dial = dialled.and_then(|(owner, _)| tables.dials.remove(&owner));
        }
        self.inner.counters.sessions_opened.fetch_add(1, Ordering::Relaxed);
        self.inner.metrics.session_begun(peer.engine, &facts.name);
        let at = dialled.map(|(_, at)| (at, dial.map_or_else(|| vec![at], |dial| dial.known().to_vec())));
        self.inner.node(|node, now| {
            // In one step with it: whoever hears that the peer is up sees it among the peers, and never after its end.
            let lives = lock(&self.inner.lives);
            node.add_session(established, now);
            self.inner.on_peer_come(session, peer, &facts.name, at);
            drop(lives);
            if self.inner.reaches_by_rma(session) {
                node.add_one_sided(session);
                // What the greeting said may be old by now.
                node.tell_nics_to(session, self.inner.local().facts.nics);
            }
            if !early.is_empty() {
                node.receive(session, early, now);
            }
        });
        self.watch(Conn::Control { session, conn }, Interest::READ);
        // Data channels are opened by the first transfer that goes over them.
        if opener && self.inner.transports.get().is_some_and(|all| all.local.is_opening(session)) {
            self.dial_local(session, &facts.local_name);
        }
        self.inner.warm_up_again(session);
        self.inner.launch_waiting(session);
        self.inner.notes.note_move();
    }

    /// A connection of a session broke. What the peer has said before counts, and may be its goodbye: connections
    /// are looked after by several threads, and the end of one is no sign that another has been read to its end. What
    /// is still on its way has a moment to come.
    pub(super) fn end_session(&mut self, session: u64, error: Error) {
        let control = self.conns.values().find_map(|conn| match conn {
            Conn::Control { session: of, conn } if *of == session => Some(conn.clone()),
            _ => None,
        });
        let over = control.is_none_or(|conn| self.read_control(session, &conn).is_err());
        self.inner.node(|node, now| match over {
            true => node.close_session(session, error),
            false => node.channel_lost(session, error, now),
        });
    }

    /// Frames have come.
    pub(super) fn read_control(&mut self, session: u64, conn: &ControlConn) -> Result<()> {
        let mut turns = 0..16;
        // What waits under TLS is taken in any case: no event would tell of it.
        while turns.next().is_some() || conn.has_input() {
            match conn.recv(&mut self.buffer)? {
                Io::Done(len) => {
                    let held = self.inner.node(|node, now| {
                        node.receive(session, &self.buffer[..len], now);
                        node.held_for(session)
                    });
                    self.inner.charge_peer(session, held + conn.held())?;
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
