//! Whose turn it is to send, to copy or to post: transfers of a session take turns, chunk by chunk.

use std::collections::VecDeque;

/// The queues of a session, and how much of its window is taken.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    sending: VecDeque<u64>,
    copying: VecDeque<u64>,
    posting: VecDeque<u64>,
    /// The session is among those that have something to copy.
    in_copy_queue: bool,
    /// Bytes of chunks that the channels have in flight.
    in_flight: u64,
    /// They are all that the window allows, and somebody wanted more.
    full: bool,
}

impl Turns {
    pub fn send(&mut self, transfer: u64) {
        self.sending.push_back(transfer);
    }

    pub fn copy(&mut self, transfer: u64) {
        self.copying.push_back(transfer);
    }

    pub fn post(&mut self, transfer: u64) {
        if !self.posting.contains(&transfer) {
            self.posting.push_back(transfer);
        }
    }

    pub fn wants_to_send(&self) -> bool {
        !self.sending.is_empty()
    }

    /// The session has something to copy: true when it is not in the queue of such sessions, which it enters now.
    pub fn enter_copy_queue(&mut self) -> bool {
        !std::mem::replace(&mut self.in_copy_queue, true)
    }

    /// The session has had its turn to copy: true when it has more, and enters the queue again.
    pub fn leave_copy_queue(&mut self) -> bool {
        self.in_copy_queue = !self.copying.is_empty();
        self.in_copy_queue
    }

    pub fn wants_to_post(&self) -> bool {
        !self.posting.is_empty()
    }

    pub fn next_to_send(&mut self) -> Option<u64> {
        self.sending.pop_front()
    }

    /// It keeps its turn: there was no room for it.
    pub fn first_to_send(&mut self, transfer: u64) {
        self.sending.push_front(transfer);
    }

    pub fn next_to_copy(&mut self) -> Option<u64> {
        self.copying.pop_front()
    }

    pub fn next_to_post(&mut self) -> Option<u64> {
        self.posting.pop_front()
    }

    /// Whether a chunk of so many bytes may be sent now; one always may. If not, [`Turns::make_room`] says when.
    pub fn has_room(&mut self, bytes: u64, window: u64) -> bool {
        let room = self.in_flight == 0 || self.in_flight + bytes <= window;
        self.full |= !room;
        room
    }

    pub fn take_room(&mut self, bytes: u64) {
        self.in_flight += bytes;
    }

    /// What a work request took of the window is free again: true when somebody waited for it.
    pub fn make_room(&mut self, bytes: u64) -> bool {
        if bytes == 0 {
            return false;
        }
        self.in_flight = self.in_flight.saturating_sub(bytes);
        std::mem::take(&mut self.full)
    }

    /// Bytes of chunks that the channels have in flight.
    pub fn in_flight(&self) -> u64 {
        self.in_flight
    }
}
