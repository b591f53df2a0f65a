//! The transfers of one session: this side's flows, and whose turn it is.
//!
//! Invariants:
//! - a flow is stopped, and concluded, here and nowhere else: whoever ends a grant or a session asks for that;
//! - a flow with a grant is attached to it from before its first work request until after its last: so no page is free
//!   while a work request is pinned, whenever the end of the grant is heard of here;
//! - the peer is charged for what it makes this side hold, and for no longer than it is held.

mod comparing;
mod flows;
mod initiator;
mod onesided;
mod owner;
mod served;
mod staging;
mod turns;
mod work;

pub(crate) use initiator::lost;
pub use initiator::{Open, Side};
pub(crate) use staging::ChunkEvent;
pub use turns::{Batch, Claim};
pub use work::{WorkId, WorkKind, WorkOutcome, WorkRequest};

use crate::connection::Context;
use crate::event::Event;
use crate::flow::{Flow, Role, Work};
use crate::frame::{Begin, Frame, Path};
use crate::offer::Given;
use crate::reclaim::Reclaim;
use crate::sync::Ordering;
use flows::Flows;
use kvik_core::{Code, Error, GrantId, Result, Use};
use std::collections::HashMap;
use std::time::Duration;
use turns::Turns;

/// See the module's text.
pub(crate) struct Transfers<R> {
    session: u64,
    flows: Flows<R>,
    /// Requests for grants that are not known yet.
    parked: HashMap<u64, Begin>,
    turns: Turns,
    /// The number of the next one that begins here.
    next: u64,
    /// The peer's latest.
    last_begun: u64,
}

impl<R: Clone> Transfers<R> {
    /// Those of a session; of the engine itself they count from 1.
    pub fn new(session: u64, first: u64) -> Transfers<R> {
        Transfers {
            session,
            flows: Flows::new(),
            parked: HashMap::new(),
            turns: Turns::default(),
            next: first,
            last_begun: 0,
        }
    }

    /// What is open, and when it is due.
    pub fn flows(&self) -> &Flows<R> {
        &self.flows
    }

    /// Whose turn it is, and what the channels have in flight.
    pub fn turns(&self) -> &Turns {
        &self.turns
    }

    /// Some deadlines have passed.
    pub fn tick(&mut self, now: Duration, cx: &mut Context<'_, R>) {
        while let Some(transfer) = self.flows.take_overdue(now) {
            self.overdue(transfer, cx);
        }
    }

    fn overdue(&mut self, transfer: u64, cx: &mut Context<'_, R>) {
        let Some(flow) = self.flows.get(&transfer) else { return };
        let error = match flow.role {
            Role::Parked { grant } => Error::new(
                Code::GrantUnknown,
                format!(
                    "the owner had not given grant {grant} in time: it never gave it, forgot it long after its end, or its \
                     pages were still in use by a device"
                ),
            ),
            _ => Error::new(
                Code::DeadlineExceeded,
                format!(
                    "the transfer with {} did not end by its deadline: {} of {} bytes were done; \
                     give it a longer deadline, or look at the peer",
                    cx.peer_text(),
                    flow.bytes_done(),
                    flow.chunking.bytes
                ),
            ),
        };
        // Whoever moves it is asked to stop first. Without an answer, or a completion, only a cut path gives the
        // memory back.
        let told = flow.stop.is_some();
        self.stop(transfer, error, cx);
        if told && self.flows.get(&transfer).is_some_and(Flow::is_in_flight) {
            break_link(cx);
        }
    }

    /// Ends a flow as soon as its work requests are done.
    pub fn stop(&mut self, transfer: u64, error: Error, cx: &mut Context<'_, R>) {
        let Some(flow) = self.flows.get_mut(&transfer) else { return };
        let first = flow.set_stop(error);
        if first {
            staging::lend_no_more(flow, cx);
        }
        if flow.pins > 0 {
            cx.tell(Event::Stop(self.session));
        }
        if first && flow.is_in_flight() && cx.is_live() {
            self.tell_to_stop(transfer, cx);
        }
        self.settle(transfer, cx);
    }

    /// The session is over: all flows end as soon as their work requests are done, and nobody answers any more.
    pub fn stop_all(&mut self, error: &Error, cx: &mut Context<'_, R>) {
        for transfer in self.flows.numbers() {
            if let Some(flow) = self.flows.get_mut(&transfer) {
                flow.peer_ended = true;
            }
            self.stop(transfer, error.clone(), cx);
        }
    }

    /// A channel of the session is lost: its flows end, and the peer is told.
    pub fn stop_each(&mut self, error: &Error, cx: &mut Context<'_, R>) {
        self.flows.numbers().into_iter().for_each(|transfer| self.stop(transfer, error.clone(), cx));
    }

    /// The peer takes no further part.
    pub fn on_end(&mut self, transfer: u64, outcome: Result<()>, cx: &mut Context<'_, R>) -> Result<()> {
        let Some(flow) = self.flows.get_mut(&transfer) else {
            cx.send(&Frame::Ended { transfer });
            return Ok(());
        };
        match outcome {
            Err(error) => {
                flow.peer_ended = true;
                flow.close_reach();
                // The peer has seen a channel end before this side has: the next transfer is not to come to it, too.
                if flow.path == Path::Channels && error.code == Code::PeerLost {
                    cx.lose_channel(error.clone(), cx.clock());
                }
                self.stop(transfer, error, cx);
            }
            // The reader has all its bytes, or the writer's bytes are all in place. The executor of the last work
            // request here may not have said so yet, and touches its memory until it has.
            Ok(()) if flow.can_be_done() => {
                (flow.peer_ended, flow.peer_done) = (true, true);
                flow.close_reach();
                self.settle(transfer, cx);
            }
            // It has crossed a stop, after which nobody listened to what it says of its slots.
            Ok(()) if flow.was_read_unheard() => {
                flow.peer_ended = true;
                flow.close_reach();
                self.settle(transfer, cx);
            }
            Ok(()) => {
                let text = format!("the peer called transfer {transfer} a success before it was one");
                return Err(Error::new(Code::ProtocolError, text));
            }
        }
        Ok(())
    }

    /// Looks whether a flow has come to its end.
    fn settle(&mut self, transfer: u64, cx: &mut Context<'_, R>) {
        let Some(flow) = self.flows.get_mut(&transfer) else { return };
        if flow.is_touched() {
            return work::end_ahead(flow, cx);
        }
        if flow.peer_done {
            return self.conclude(transfer, Ok(()), cx);
        }
        if let Some(error) = flow.stop.clone() {
            return self.conclude(transfer, Err(error), cx);
        }
        // Who sends waits for the other side to say that it is in place.
        if flow.is_complete() && matches!(flow.work, Work::Place | Work::Copy | Work::Post) {
            self.conclude(transfer, Ok(()), cx);
        }
    }

    /// The flow is over on this side: nothing here touches its memory any more.
    fn conclude(&mut self, transfer: u64, outcome: Result<()>, cx: &mut Context<'_, R>) {
        let Some(flow) = self.flows.remove(transfer) else { return };
        let key = flow.key;
        if matches!(flow.work, Work::Expose(_)) {
            cx.call().expose(false);
        }
        staging::return_slots(&flow, cx);
        if let Some(slot) = flow.slot {
            cx.tell(Event::Raise(slot));
        }
        // It may have kept bulk from its turn.
        if flow.work == Work::Send && flow.next < flow.chunking.chunks() {
            self.turns.sending.remove(flow.class, &transfer);
            if self.turns.wants_to_send() {
                cx.tell(Event::Send(self.session));
            }
        }
        if !flow.is_own() {
            work::tell_end(&flow, &outcome, cx);
        }
        let reclaim = reclaim_of(&flow, cx.is_live());
        match flow.role {
            Role::Initiator => {
                if outcome.is_err() {
                    cx.call().common.counts.transfers[reclaim as usize].fetch_add(1, Ordering::Relaxed);
                }
                work::report(&flow, outcome, cx);
            }
            Role::Parked { grant } => {
                // One whose session is gone was never answered.
                if let Some(peer) = cx.reader() {
                    served::note_served(&flow, peer, &outcome, cx);
                }
                self.parked.remove(&transfer);
                cx.call().grants().forget_parked(grant, key);
            }
            Role::Owner { grant, reader } => {
                served::note_served(&flow, reader, &outcome, cx);
                let confirms = outcome.is_ok() && flow.confirm;
                cx.call().leave_grant(grant, key, confirms.then_some(reader), reclaim);
            }
            Role::Both { grant } => {
                let reader = cx.call().identity().engine;
                let confirms = outcome.is_ok() && flow.confirm;
                cx.call().leave_grant(grant, key, confirms.then_some(reader), reclaim);
                work::report(&flow, outcome, cx);
            }
        }
    }
}

/// By what a flow, which has just concluded, let go of its memory; `live`: its session is not over.
fn reclaim_of<R>(flow: &Flow<R>, live: bool) -> Reclaim {
    match flow.work {
        _ if !flow.is_own() && !live => Reclaim::Disconnected,
        Work::Expose(_) => Reclaim::Acknowledged,
        Work::Wait | Work::Send | Work::Place | Work::Copy | Work::Post => Reclaim::Released,
    }
}

/// A request is served that says how many readers its grant is for: where it knows of more than the owner said, the
/// grant waits for them.
fn count_readers<R: Clone>(grant: GrantId, given: &Given<R>, readers: u16, cx: &mut Context<'_, R>) {
    if matches!(given.offer().uses, Use::Once(known) if known < readers.into()) {
        cx.call().grants().count_readers(grant, readers);
    }
}

/// Something was posted and cannot be waited for: the session ends, so that both sides cut the path.
fn break_link<R: Clone>(cx: &mut Context<'_, R>) {
    let text = format!(
        "the one-sided link to {} was cut: an operation on it did not end in time, or failed",
        cx.peer_text()
    );
    cx.cut(Error::new(Code::PeerLost, text));
}
