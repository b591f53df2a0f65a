//! Pieces that lie at no equal distances: many small ones go by kvik's kernel, the others by the copy engine.

use super::abi::{self, Code, Handle};
use super::batch::Batch;
use super::device::{Current, Device, InUse};
use super::kernel::Kernel;
use super::lists::{Lists, ROOM};
use super::piece::{Direction, Piece};
use std::sync::Arc;

/// What copies the pieces of a stream that lie at no equal distances.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Way {
    /// What is faster, by their number and their length. Transfers leave it at that; the others are there to compare.
    #[default]
    Faster,
    /// The driver's copy engine.
    Engine,
    /// The kernel where it can, however few they are.
    Kernel,
}

/// Where the pieces of one call go.
pub(super) struct Call<'a> {
    pub device: &'a Device,
    pub current: &'a Current<'a>,
    pub direction: Direction,
    pub stream: Handle,
    /// Whether a kernel of the device reaches both sides.
    pub reached: bool,
}

/// The pieces of a call that the driver has not been given yet. Empty between calls.
#[derive(Default)]
pub(super) struct Small {
    pub way: Way,
    /// For the kernel, and how long the longest of them is.
    pieces: Vec<Piece>,
    longest: u64,
    lists: Lists,
    batch: Batch,
}

impl Small {
    /// Takes a piece, and gives the driver what there is no more room for. `held` is what the stream's copies use.
    ///
    /// # Safety
    /// As for [`Small::flush`].
    pub unsafe fn push(&mut self, piece: Piece, call: &Call<'_>, held: &mut Vec<InUse>) -> Code {
        if !self.is_for_kernel(&piece, call) {
            // SAFETY: the caller's promise.
            return unsafe { self.batch.push(piece, &call.device.0, call.direction, call.stream) };
        }
        self.longest = self.longest.max(piece.len);
        self.pieces.push(piece);
        match self.pieces.len() == ROOM {
            // SAFETY: the caller's promise.
            true => unsafe { self.launch(call, held) },
            false => abi::SUCCESS,
        }
    }

    /// Gives all of them to the driver.
    ///
    /// # Safety
    /// The context of the stream is current, and both sides of each piece are memory until it has been copied.
    pub unsafe fn flush(&mut self, call: &Call<'_>, held: &mut Vec<InUse>) -> Code {
        // SAFETY: the caller's promise. After a failure they empty both, and the first failure is what is told.
        unsafe {
            let code = self.launch(call, held);
            match (code, self.batch.flush(&call.device.0, call.direction, call.stream)) {
                (abi::SUCCESS, last) => last,
                (first, _) => first,
            }
        }
    }

    /// Forgets what the lists were used for; the stream ends.
    pub fn end(&mut self, device: &Device) {
        self.lists.end(device);
    }

    fn is_for_kernel(&self, piece: &Piece, call: &Call<'_>) -> bool {
        let Some(kernel) = call.device.0.kernel() else { return false };
        call.reached
            && match self.way {
                Way::Faster => kernel.takes(piece, call.direction),
                Way::Engine => false,
                Way::Kernel => Kernel::can_take(piece),
            }
    }

    /// Launches the kernel for the pieces that it is to take, or gives them to the copy engine.
    ///
    /// # Safety
    /// As for [`Small::flush`].
    unsafe fn launch(&mut self, call: &Call<'_>, held: &mut Vec<InUse>) -> Code {
        if self.pieces.is_empty() {
            return abi::SUCCESS;
        }
        // SAFETY: the caller's promise.
        let code = unsafe { self.by_kernel(call, held) };
        let mut left = std::mem::take(&mut self.pieces);
        self.longest = 0;
        let mut last = code.unwrap_or(abi::SUCCESS);
        for piece in left.iter().filter(|_| code.is_none()) {
            if last != abi::SUCCESS {
                break;
            }
            // SAFETY: the caller's promise.
            last = unsafe { self.batch.push(*piece, &call.device.0, call.direction, call.stream) };
        }
        left.clear();
        self.pieces = left;
        last
    }

    /// What the driver says of a launch; none where the copy engine is to have the pieces.
    ///
    /// # Safety
    /// As for [`Small::flush`].
    unsafe fn by_kernel(&mut self, call: &Call<'_>, held: &mut Vec<InUse>) -> Option<Code> {
        let kernel = call.device.0.kernel()?;
        if self.way == Way::Faster && !kernel.pays(self.pieces.len(), call.direction) {
            return None;
        }
        let (list, at) = self.lists.write(&self.pieces, call.device, call.current, call.stream)?;
        let list: InUse = list;
        if !held.iter().rev().any(|held| Arc::ptr_eq(held, &list)) {
            held.push(list);
        }
        let (device, count) = (&call.device.0, self.pieces.len() as u32);
        let table = device.cuda.table();
        // SAFETY: the list is held until the copies have ended, and its entries are taken by these alone; the rest is the
        // caller's promise.
        let code = unsafe { kernel.launch(table, (at, count), self.longest, call.direction, call.stream) };
        kernel.launched(table, device.ordinal, code).then_some(code)
    }
}
