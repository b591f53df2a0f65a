//! Whose turn it is to send, to copy or to post: handovers go before bulk, and transfers of a class take turns, chunk
//! by chunk.

use kvik_core::{Class, ClassQueue};

/// Bulk takes no more than one in so many bytes of the window.
const BULK_PART: u64 = 2;

/// What a claim of a chunk to send, or to post, is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Claim {
    /// For whatever goes next.
    Next,
    /// For a chunk of this class.
    Only(Class),
    /// For bulk when it is its turn, and for a handover only while no bulk waits: what goes where it may wait behind
    /// bulk. `Event::Send` follows when it is.
    Beside,
}

/// How much one claim is given at most: so many work requests, of which the one that reaches the bytes is the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Batch {
    /// Work requests.
    pub requests: usize,
    /// Bytes of them all.
    pub bytes: u64,
}

/// The queues of a session, and how much of its window is taken.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    pub sending: ClassQueue<u64>,
    pub copying: ClassQueue<u64>,
    pub posting: ClassQueue<u64>,
    /// The session is among those that have something to copy, by class.
    in_copy_queue: [bool; 2],
    /// Bytes of chunks that the channels have in flight, by class.
    in_flight: [u64; 2],
    /// They are all that the window allows, and somebody wanted more.
    full: bool,
}

impl Turns {
    /// The classes that a claim may be given, in their order.
    pub fn order(queue: &ClassQueue<u64>, claim: Claim) -> impl Iterator<Item = Class> + use<> {
        let (turn, both) = (queue.turn(), queue.waits(Class::Bulk) && queue.waits(Class::Handover));
        turn.into_iter().filter(move |class| match claim {
            Claim::Next => true,
            Claim::Only(only) => *class == only,
            Claim::Beside => !both || [turn[0], *class] == [Class::Bulk; 2],
        })
    }

    pub fn wants_to_send(&self) -> bool {
        !self.sending.is_empty()
    }

    /// The session has something of a class to copy: true when it is not in the queue of such sessions, which it
    /// enters now.
    pub fn enter_copy_queue(&mut self, class: Class) -> bool {
        !std::mem::replace(&mut self.in_copy_queue[class as usize], true)
    }

    /// The session has had its turn to copy: true when it has no more of the class, and leaves the queue.
    pub fn leave_copy_queue(&mut self, class: Class) -> bool {
        let more = self.copying.waits(class);
        self.in_copy_queue[class as usize] = more;
        !more
    }

    pub fn wants_to_post(&self) -> bool {
        !self.posting.is_empty()
    }

    /// Whether a chunk of so many bytes may be sent now; one always may. If not, [`Turns::make_room`] says when.
    pub fn has_room(&mut self, class: Class, bytes: u64, window: u64) -> bool {
        let bulk = self.in_flight[Class::Bulk as usize];
        let room = match class {
            _ if self.in_flight() == 0 => true,
            Class::Handover => self.in_flight() + bytes <= window,
            Class::Bulk => bulk + bytes <= window / BULK_PART && self.in_flight() + bytes <= window,
        };
        self.full |= !room;
        room
    }

    pub fn take_room(&mut self, class: Class, bytes: u64) {
        self.in_flight[class as usize] += bytes;
    }

    /// What a work request took of the window is free again: true when somebody waited for it.
    pub fn make_room(&mut self, class: Class, bytes: u64) -> bool {
        if bytes == 0 {
            return false;
        }
        let in_flight = &mut self.in_flight[class as usize];
        *in_flight = in_flight.saturating_sub(bytes);
        std::mem::take(&mut self.full)
    }

    /// Bytes of chunks that the channels have in flight.
    pub fn in_flight(&self) -> u64 {
        self.in_flight.iter().sum()
    }
}
