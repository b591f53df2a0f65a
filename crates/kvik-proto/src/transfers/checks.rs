//! Checksums of what a NIC has moved.
//!
//! No code sees the bytes pass. So the initiator sums its own side of a part when its NIC has called it delivered, the
//! owner sums its side of the same part, compares, and answers. The transfer is a success when every answer is there.
//! On both sides the grant still stands meanwhile: nothing else may change the pages.

use super::Transfers;
use super::work::{WorkId, name_peer};
use crate::FlowKey;
use crate::channel::MAX_SUMS;
use crate::connection::Context;
use crate::flow::{Chunking, Flow, Role, Work};
use crate::frame::Frame;
use kvik_core::{Code, Error, Result, page_sum};
use std::collections::VecDeque;
use std::ops::Range;

/// Parts of a transfer that are compared at once.
pub(crate) const AT_ONCE: usize = 4;
/// One chunk in so many gives a sample. With pages of 64 KiB in chunks of 512 KiB it is one page of 128.
const SAMPLE: u64 = 16;

/// How much of what a NIC has moved is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Check {
    /// Nothing.
    #[default]
    No,
    /// One unit of every sixteenth chunk, and of the first and the last one.
    Sample,
    /// All.
    All,
}

/// The comparisons of one side of a transfer.
#[derive(Debug, Default)]
pub(crate) struct Checks {
    /// What the initiator wants.
    pub wanted: Check,
    /// Parts that are to be summed here; the owner has the initiator's sums of them.
    waiting: VecDeque<(Range<u64>, Vec<u64>)>,
    /// Those that are being summed.
    summing: Vec<(Range<u64>, Vec<u64>)>,
    /// Where the parts begin that the owner has not answered for.
    asked: Vec<u64>,
    /// Whether the flow takes its turn among those that have something to copy or sum.
    pub queued: bool,
}

impl Checks {
    pub fn new(wanted: Check) -> Checks {
        Checks { wanted, ..Checks::default() }
    }

    /// Whether all that was to be compared is alike.
    pub fn are_done(&self) -> bool {
        self.waiting.is_empty() && self.summing.is_empty() && self.asked.is_empty()
    }

    /// The initiator's NIC has delivered a chunk. True when something of it is to be compared.
    pub fn delivered(&mut self, key: FlowKey, chunking: &Chunking, at: u64) -> bool {
        let index = at / chunking.chunk;
        let chunk = chunking.part(index);
        let part = match self.wanted {
            Check::No => return false,
            Check::All => chunk,
            Check::Sample if !index.is_multiple_of(SAMPLE) && index + 1 != chunking.chunks() => return false,
            Check::Sample => unit_of(key, chunking, &chunk),
        };
        self.waiting.push_back((part, Vec::new()));
        true
    }

    /// The next part to sum.
    pub fn claim(&mut self) -> Option<Range<u64>> {
        if self.summing.len() + self.asked.len() >= AT_ONCE {
            return None;
        }
        let (part, sums) = self.waiting.pop_front()?;
        self.summing.push((part.clone(), sums));
        Some(part)
    }

    /// A part is summed no longer: what was known of it.
    pub fn summed(&mut self, at: u64) -> Option<(Range<u64>, Vec<u64>)> {
        let index = self.summing.iter().position(|(part, _)| part.start == at)?;
        Some(self.summing.swap_remove(index))
    }
}

/// Some unit of a chunk: another one in each transfer, so that no place is never looked at.
fn unit_of(key: FlowKey, chunking: &Chunking, chunk: &Range<u64>) -> Range<u64> {
    let units = (chunk.end - chunk.start).div_ceil(chunking.unit).max(1);
    let seed = [key.0.to_le_bytes(), key.1.to_le_bytes(), chunk.start.to_le_bytes()].concat();
    let start = chunk.start + page_sum(&seed) % units * chunking.unit;
    start..(start + chunking.unit).min(chunk.end)
}

/// The unit whose checksums differ, if any does.
fn first_difference(part: &Range<u64>, unit: u64, here: &[u64], there: &[u64]) -> Option<u64> {
    let index = (0..here.len().max(there.len())).find(|at| here.get(*at) != there.get(*at))?;
    Some(part.start + index as u64 * unit)
}

impl<R: Clone> Transfers<R> {
    /// The flow has something to sum, and takes its turn.
    pub(super) fn queue_sums(&mut self, transfer: u64, cx: &mut Context<'_, R>) {
        let Some(flow) = self.flows.get_mut(&transfer).filter(|flow| flow.stop.is_none()) else { return };
        let class = flow.class;
        if !std::mem::replace(&mut flow.checks.queued, true) {
            self.turns.copying.push(class, transfer);
        }
        self.want_copy(class, cx);
    }

    /// A part was summed here. The initiator asks the owner, the owner compares.
    pub(super) fn on_summed(&mut self, id: WorkId, sums: Vec<u64>, cx: &mut Context<'_, R>) {
        let transfer = id.key.1;
        let Some(flow) = self.flows.get_mut(&transfer) else { return };
        let Some((part, theirs)) = flow.checks.summed(id.at).filter(|_| flow.stop.is_none()) else { return };
        let at = part.start;
        if matches!(flow.role, Role::Initiator) {
            flow.checks.asked.push(at);
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
        if !fits || checks.waiting.len() + checks.summing.len() >= AT_ONCE {
            let text =
                format!("the peer asked to compare what transfer {transfer} has not, or too much at once");
            return Err(Error::new(Code::ProtocolError, text));
        }
        checks.waiting.push_back((at..end, sums));
        self.queue_sums(transfer, cx);
        Ok(())
    }

    /// The owner's side of that part is the same.
    pub fn on_checked(&mut self, transfer: u64, at: u64, cx: &mut Context<'_, R>) -> Result<()> {
        let Some(flow) = self.flows.get_mut(&transfer) else { return Ok(()) };
        let asked = &mut flow.checks.asked;
        let Some(index) = asked.iter().position(|asked| *asked == at) else {
            let text =
                format!("the peer answered a comparison of transfer {transfer} that was not asked for");
            return Err(Error::new(Code::ProtocolError, text));
        };
        asked.swap_remove(index);
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

impl<R> Flow<R> {
    /// The next part of this side to sum.
    pub fn claim_sums(&mut self) -> Option<Range<u64>> {
        if self.stop.is_some() {
            return None;
        }
        let part = self.checks.claim()?;
        self.pins += 1;
        Some(part)
    }

    /// Bytes that a peer's comparisons take here at most.
    pub fn held_by_checks(chunking: &Chunking) -> usize {
        AT_ONCE * (chunking.chunk.div_ceil(chunking.unit) as usize).min(MAX_SUMS as usize) * size_of::<u64>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delivered(wanted: Check, bytes: u64) -> Vec<Range<u64>> {
        let chunking = Chunking { bytes, chunk: 64, unit: 16, sums: false };
        let mut checks = Checks::new(wanted);
        for index in 0..chunking.chunks() {
            checks.delivered((1, 2), &chunking, index * 64);
        }
        checks.waiting.into_iter().map(|(part, _)| part).collect()
    }

    #[test]
    fn a_sample_is_of_the_first_the_last_and_every_sixteenth_chunk() {
        assert!(delivered(Check::No, 6400).is_empty());
        assert_eq!(delivered(Check::All, 130), [0..64, 64..128, 128..130]);
        let sample = delivered(Check::Sample, 64 * 40 + 5);
        let chunks: Vec<u64> = sample.iter().map(|part| part.start / 64).collect();
        assert_eq!(chunks, [0, 16, 32, 40]);
        assert!(sample.iter().all(|part| part.start.is_multiple_of(16) && part.end - part.start <= 16));
        assert_eq!(sample[3], 2560..2565);
    }

    #[test]
    fn each_unit_of_a_chunk_is_some_transfers_sample() {
        let chunking = Chunking { bytes: 64, chunk: 64, unit: 16, sums: false };
        let mut seen = [false; 4];
        (0..64).for_each(|transfer| {
            seen[(unit_of((1, transfer), &chunking, &(0..64)).start / 16) as usize] = true
        });
        assert_eq!(seen, [true; 4]);
    }

    #[test]
    fn the_place_of_a_difference_is_found() {
        assert_eq!(first_difference(&(32..64), 16, &[1, 2], &[1, 2]), None);
        assert_eq!(first_difference(&(32..64), 16, &[1, 2], &[1, 3]), Some(48));
        assert_eq!(first_difference(&(32..64), 16, &[1], &[1, 3]), Some(48));
    }
}
