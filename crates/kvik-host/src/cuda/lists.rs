//! The lists of pieces that kvik's kernel reads, in page-locked memory.
//!
//! Nobody waits for a list, and none is written while a kernel may read it: launches take the entries of a list one
//! after the other, and a list that is full is used again once the stream was seen to be past an event behind it. Where
//! no list is free another one is made, up to a bound; then the copy engine takes the pieces.

use super::abi::{self, Addr, Handle};
use super::device::{Current, Device, Event};
use super::piece::Piece;
use super::pinned::Pinned;
use std::collections::VecDeque;
use std::sync::Arc;

/// Pieces of a list, which is 128 KiB: as many of 4 KiB keep the host's link busy for 0.3 ms, a hundred times what
/// a launch takes.
pub(super) const ROOM: usize = 4096;
/// Lists of a stream: a quarter of a million pieces in flight.
const MOST: usize = 64;

/// The lists of a stream. Each copy holds its list like all else that it uses, so they may be dropped at any time.
#[derive(Default)]
pub(super) struct Lists {
    /// The one that is being filled, and how many of its entries are taken.
    now: Option<Arc<Pinned>>,
    taken: usize,
    /// Full ones in the stream's order, each with the event behind what reads it.
    full: VecDeque<(Event, Arc<Pinned>)>,
}

impl Lists {
    /// Writes pieces, [`ROOM`] of them at most, for a kernel that is launched next in this stream: the list, and
    /// where in it they are. None where there is no room.
    pub fn write(
        &mut self,
        pieces: &[Piece],
        device: &Device,
        current: &Current<'_>,
        stream: Handle,
    ) -> Option<(Arc<Pinned>, Addr)> {
        if self.taken + pieces.len() > ROOM {
            self.turn(device, current, stream);
        }
        let list = match self.now.take() {
            Some(list) => list,
            None => self.free(device)?,
        };
        self.now = Some(list.clone());
        let place = self.taken * size_of::<Piece>();
        // SAFETY: plain numbers without gaps between them.
        let bytes = unsafe { std::slice::from_raw_parts(pieces.as_ptr().cast::<u8>(), size_of_val(pieces)) };
        list.memory().copy_in(place, bytes).ok()?;
        self.taken += pieces.len();
        let at = list.at(place, bytes.len()).ok()?;
        Some((list, at as Addr))
    }

    /// Puts the list that is full behind the others.
    fn turn(&mut self, device: &Device, current: &Current<'_>, stream: Handle) {
        self.taken = 0;
        let Some(list) = self.now.take() else { return };
        let Ok(event) = device.0.event(current) else { return };
        // SAFETY: an event and a stream of the current context.
        let code = unsafe { (device.cuda().table().event_record)(event.0, stream) };
        match code {
            abi::SUCCESS => self.full.push_back((event, list)),
            // There is no telling when it is free again: it goes with the copies that use it.
            _ => device.0.give_back(event),
        }
    }

    /// A list that no kernel reads.
    fn free(&mut self, device: &Device) -> Option<Arc<Pinned>> {
        if let Some((event, _)) = self.full.front()
            && device.0.has_ended(*event).unwrap_or(false)
            && let Some((event, list)) = self.full.pop_front()
        {
            device.0.give_back(event);
            return Some(list);
        }
        if self.full.len() >= MOST {
            return None;
        }
        let made = Pinned::new(device, ROOM * size_of::<Piece>());
        made.inspect_err(|error| log::debug!("small pages go by the copy engine: {error}")).ok().map(Arc::new)
    }

    /// Gives back the events. The lists stay with the copies that use them.
    pub fn end(&mut self, device: &Device) {
        for (event, _) in self.full.drain(..) {
            device.0.give_back(event);
        }
        self.now = None;
    }
}
