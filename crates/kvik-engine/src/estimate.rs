//! How long a transfer would take, by what was measured.

use crate::base::Base;
use crate::engine::Engine;
use crate::notify::To;
use kvik_core::Result;
use kvik_proto::Identity;
use kvik_transport::Estimate;

impl Engine {
    /// How long `bytes` with a peer would take from now, over the transport that this engine would take, by what its own
    /// transfers on the present connection have measured: their start, and bytes over their rate. It counts the bytes
    /// that open transfers with that peer, of either side, have still to move, as if they all went first
    /// ([`Estimate::queued`]). It does not count what the peer moves with others, nor transfers that wait for a
    /// connection.
    ///
    /// No network traffic: `None` where there is no connection, where no transfer of this engine has ended well on it,
    /// and for the engine itself. Of a ticket only the owner counts.
    ///
    /// # Errors
    /// `EngineClosed`, `EngineForked`.
    pub fn estimate(&self, peer: impl Into<To>, bytes: u64) -> Result<Option<Estimate>> {
        let Base { setup, .. } = &*self.inner().base;
        setup.check()?;
        let peer = match peer.into() {
            To::Ticket(ticket) => Some(Identity { engine: ticket.engine, incarnation: ticket.incarnation }),
            To::Peer(engine) | To::Connected(engine) => self.inner().peers.table.find(&engine),
        };
        let open = self.inner().base.node(|node, _| {
            let session = node.session_with(&peer?)?;
            Some((session, node.bytes_left(session)))
        });
        Ok(open.and_then(|(session, queued)| {
            let alone = self.inner().transfers.estimate(session, setup.config.transport, bytes)?;
            Some(alone.behind(queued))
        }))
    }
}
