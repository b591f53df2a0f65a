//! Links on which a NIC moves the bytes: what that asks of both sides before memory is its owner's again.
//!
//! The owner's code is not in the path: bytes land late and in any order, after the grant was checked, and may land
//! after the session has died. So its pages are its own again at the first step of reclaiming that succeeds:
//! 1. the initiator has answered. It ends a transfer, or answers an end, only when each of its posted operations
//!    was delivered or never left, and posts nothing for it any more. A device of its own may still have something of the
//!    initiator's pages, which says nothing of the owner's;
//! 2. the path was cut: [`crate::Event::Fence`] asks for it, [`crate::SessionCalls::fenced`] tells that it is done. An
//!    operation that was posted and did not complete can vouch for nothing, not even after the initiator has cut its
//!    own side (what is on the wire still lands): so it ends the session, and with it both sides cut;
//! 3. else they stay in quarantine: the flow stays, and the grant waits for it.

use super::Transfers;
use super::staging::claim_borrowed;
use super::turns::{Claim, Turns};
use super::work::{WorkId, WorkKind, WorkRequest, request};
use crate::connection::Context;
use crate::event::Event;
use crate::flow::{CopyFrom, Reach, Work};
use kvik_core::{Code, Error, Result};

impl<R: Clone> Transfers<R> {
    /// A posted chunk is to be posted by another NIC: nothing of it is in flight any more, on either side.
    pub(super) fn give_back(&mut self, id: WorkId, cx: &mut Context<'_, R>) {
        let Some(flow) = self.flows.get_mut(&id.key.1) else { return };
        match &mut flow.borrowing {
            Some(borrowing) => borrowing.give_back(id.at),
            None => flow.back.push(id.at / flow.chunking.chunk),
        }
        if flow.stop.is_none() {
            self.queue_post(id.key.1, cx);
        }
    }

    /// The next chunk to post on the session's one-sided link. Transfers of a class take turns.
    pub fn next_post(&mut self, claim: Claim, cx: &mut Context<'_, R>) -> Option<WorkRequest<R>> {
        if !cx.is_live() {
            return None;
        }
        for class in Turns::order(&self.turns.posting, claim) {
            while let Some(transfer) = self.turns.posting.pop(class) {
                let Some(flow) = self.flows.get_mut(&transfer) else { continue };
                let Some(CopyFrom::Peer(exposed)) = flow.source.clone() else { continue };
                let claimed = match flow.borrowing {
                    Some(_) => claim_borrowed(flow).map(|(part, place)| (part, Some(place))),
                    None => flow.claim().map(|part| (part, None)),
                };
                let Some((part, place)) = claimed else { continue };
                flow.posted += 1;
                self.turns.posting.push_once(class, transfer);
                self.turns.posting.took(class, part.end - part.start);
                let kind = WorkKind::Post(flow.op, exposed, place);
                return request(flow, part, kind, cx.clock());
            }
        }
        None
    }

    /// No NIC can touch memory for this session any more, which is over.
    pub fn fenced(&mut self, cx: &mut Context<'_, R>) {
        if cx.is_live() {
            return;
        }
        for transfer in self.flows.numbers() {
            if let Some(flow) = self.flows.get_mut(&transfer) {
                flow.close_reach();
            }
            self.settle(transfer, cx);
        }
    }

    /// The transfer has something to post, and takes its turn.
    pub(super) fn queue_post(&mut self, transfer: u64, cx: &mut Context<'_, R>) {
        if let Some(class) = self.flows.class_of(transfer).filter(|_| cx.is_live()) {
            self.turns.posting.push_once(class, transfer);
            cx.tell(Event::Post(self.session));
        }
    }

    /// A flow with a NIC in flight stops. The owner asks the initiator to stop too, and waits no longer than for a peer
    /// that is silent. The initiator's NIC stops at once, and asks the owner's to vouch for that; its user waits for
    /// the end of what is over already, so a quarter of that time has to do.
    pub(super) fn tell_to_stop(&mut self, transfer: u64, cx: &mut Context<'_, R>) {
        let (clock, dead_after) = (cx.clock(), cx.call().timing().dead_after);
        let Some(flow) = self.flows.get_mut(&transfer) else { return };
        let owner = matches!(flow.work, Work::Expose(_));
        let patience = clock + if owner { dead_after } else { dead_after / 4 };
        let Some(error) = flow.stop.clone() else { return };
        let deadline = if flow.deadline > clock { flow.deadline.min(patience) } else { patience };
        if flow.work == Work::Expose(Reach::Open) {
            flow.work = Work::Expose(Reach::StopRequested);
            flow.end_sent = true;
            cx.send_end(transfer, Err(error));
        }
        self.flows.set_deadline(transfer, deadline);
    }

    /// The peer has answered an end: nothing that it posted for the transfer is in flight any more.
    pub fn on_answered(&mut self, transfer: u64, cx: &mut Context<'_, R>) -> Result<()> {
        let Some(flow) = self.flows.get_mut(&transfer) else { return Ok(()) };
        match flow.work {
            Work::Expose(Reach::StopRequested) => {
                flow.close_reach();
                self.settle(transfer, cx);
                Ok(())
            }
            Work::Expose(Reach::Open) => {
                let text = format!("the peer answered an end of transfer {transfer} that was not sent");
                Err(Error::new(Code::ProtocolError, text))
            }
            _ => Ok(()),
        }
    }
}

/// There is no one-sided link, and one was asked for.
pub(super) fn no_one_sided<R: Clone>(cx: &Context<'_, R>) -> Error {
    let text = format!(
        "there is no one-sided link between this engine and {}; use another transport, or \"auto\"",
        cx.peer_text()
    );
    Error::new(Code::TransportUnavailable, text)
}
