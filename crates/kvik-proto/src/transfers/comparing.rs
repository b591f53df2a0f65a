//! Checksums of what a NIC has moved.
//!
//! No code sees the bytes pass. So the initiator sums its own side of a part when its NIC has called it delivered, the
//! owner sums its side of the same part, compares, and answers. The transfer is a success when every answer is there.
//! On both sides the grant still stands meanwhile: nothing else may change the pages.

use super::Transfers;
use super::work::{WorkId, name_peer};
use crate::checks::first_difference;
use crate::connection::Context;
use crate::flow::{Flow, Role, Work};
use crate::frame::Frame;
use kvik_core::{Code, Error, Result};

impl<R: Clone> Transfers<R> {
    /// The flow has something to sum, or to copy to or from a ring, and takes its turn.
    pub(super) fn queue_sums(&mut self, transfer: u64, cx: &mut Context<'_, R>) {
        let Some(flow) = self.flows.get_mut(&transfer).filter(|flow| flow.stop.is_none()) else { return };
        if !std::mem::replace(&mut flow.checks.queued, true) {
            self.turns.copying.push(flow.class, transfer);
        }
        let class = flow.class;
        self.want_copy(class, cx);
    }

    /// A part was summed here. The initiator asks the owner, the owner compares.
    pub(super) fn on_summed(&mut self, id: WorkId, sums: Vec<u64>, cx: &mut Context<'_, R>) {
        let transfer = id.key.1;
        let Some(flow) = self.flows.get_mut(&transfer) else { return };
        let Some((part, theirs)) = flow.checks.summed(id.at).filter(|_| flow.stop.is_none()) else { return };
        let at = part.start;
        if matches!(flow.role, Role::Initiator) {
            flow.checks.ask(at);
            return cx.send(&Frame::Check { transfer, at, sums });
        }
        match first_difference(&part, flow.chunking.unit, &sums, &theirs) {
            None => cx.send(&Frame::Checked { transfer, at }),
            Some(position) => {
                let error = name_peer(flow.is_own(), mismatch(flow, position), cx);
                self.stop(transfer, error, cx);
            }
        }
    }

    /// The initiator has summed its side of a part that its NIC has moved.
    pub fn on_check(
        &mut self,
        transfer: u64,
        at: u64,
        sums: Vec<u64>,
        cx: &mut Context<'_, R>,
    ) -> Result<()> {
        let Some(flow) = self.flows.get_mut(&transfer) else { return Ok(()) };
        let chunking = &flow.chunking;
        let end = (at.saturating_add(chunking.unit.saturating_mul(sums.len() as u64))).min(chunking.bytes);
        let fits = matches!(flow.work, Work::Expose(_))
            && at.is_multiple_of(chunking.unit)
            && at < end
            && end - at <= chunking.chunk
            && sums.len() as u64 == (end - at).div_ceil(chunking.unit);
        let checks = &mut flow.checks;
        if !fits || !checks.has_room() {
            let text =
                format!("the peer asked to compare what transfer {transfer} has not, or too much at once");
            return Err(Error::new(Code::ProtocolError, text));
        }
        checks.wait(at..end, sums);
        self.queue_sums(transfer, cx);
        Ok(())
    }

    /// The owner's side of that part is the same.
    pub fn on_checked(&mut self, transfer: u64, at: u64, cx: &mut Context<'_, R>) -> Result<()> {
        let Some(flow) = self.flows.get_mut(&transfer) else { return Ok(()) };
        if !flow.checks.answered(at) {
            let text =
                format!("the peer answered a comparison of transfer {transfer} that was not asked for");
            return Err(Error::new(Code::ProtocolError, text));
        }
        self.queue_sums(transfer, cx);
        self.settle(transfer, cx);
        Ok(())
    }
}

fn mismatch<R>(flow: &Flow<R>, position: u64) -> Error {
    let place = flow.memory.as_ref().map(|(_, view)| view.locate(position));
    let (layer, page) = place.unwrap_or_default();
    let text = format!(
        "the two sides of a transfer by NICs differ: page {page} of the owner, layer {layer} (position {position} of \
         the transfer); the pages were changed during the transfer, or memory or the network damages data: do not use \
         them"
    );
    Error::new(Code::ChecksumMismatch, text)
}
