//! Many copies in one call of the driver's, which is what small pages at no equal distances take.

use super::abi::{self, Addr, Code, CopyAttributes, Handle};
use super::device::Inner;
use super::piece::{Direction, Piece};
use std::ffi::c_void;
use std::sync::atomic::Ordering;

/// Copies of one call. Room for them is made once.
const MOST: usize = 1024;
/// Fewer are as fast one by one.
const FEW: usize = 4;

/// Copies that the driver has not been given yet, all of them one way. They are in no order among each other.
pub(super) struct Batch {
    to: Vec<Addr>,
    from: Vec<Addr>,
    len: Vec<usize>,
}

impl Default for Batch {
    /// None, with room for a call's.
    fn default() -> Batch {
        Batch { to: Vec::with_capacity(MOST), from: Vec::with_capacity(MOST), len: Vec::with_capacity(MOST) }
    }
}

impl Batch {
    /// Takes a copy, and gives all of them to the driver when there is room for no more.
    ///
    /// # Safety
    /// As for [`Batch::flush`].
    pub unsafe fn push(
        &mut self,
        piece: Piece,
        device: &Inner,
        direction: Direction,
        stream: Handle,
    ) -> Code {
        self.to.push(piece.to);
        self.from.push(piece.from);
        self.len.push(piece.len as usize);
        match self.len.len() == MOST {
            // SAFETY: the caller's promise.
            true => unsafe { self.flush(device, direction, stream) },
            false => abi::SUCCESS,
        }
    }

    /// Gives all of them to the driver.
    ///
    /// # Safety
    /// The context of `stream` is current, and both sides of each copy are memory until it has ended.
    pub unsafe fn flush(&mut self, device: &Inner, direction: Direction, stream: Handle) -> Code {
        // SAFETY: the caller's promise.
        let code = unsafe { self.give(device, direction, stream) };
        self.to.clear();
        self.from.clear();
        self.len.clear();
        code
    }

    /// # Safety
    /// As for [`Batch::flush`].
    unsafe fn give(&mut self, device: &Inner, direction: Direction, stream: Handle) -> Code {
        let table = device.cuda.table();
        if let Some(copy) = table.copy_batch
            && self.len.len() >= FEW
            && device.batches.load(Ordering::Relaxed)
        {
            let order = abi::ORDER_OF_STREAM;
            let mut how = CopyAttributes { order, source: [0; 2], target: [0; 2], flags: 0 };
            let (mut first, mut failed) = (0, usize::MAX);
            let (to, from, len) = (self.to.as_mut_ptr(), self.from.as_mut_ptr(), self.len.as_mut_ptr());
            // SAFETY: three arrays of one length, and one attribute that holds from the first copy on; the rest is
            // the caller's promise.
            let code =
                unsafe { copy(to, from, len, self.len.len(), &mut how, &mut first, 1, &mut failed, stream) };
            if code != abi::NOT_SUPPORTED {
                return code;
            }
            // Whatever the driver's version says: from now on one by one.
            device.batches.store(false, Ordering::Relaxed);
        }
        for ((to, from), len) in self.to.iter().zip(&self.from).zip(&self.len) {
            // SAFETY: the caller's promise; the host's side is the address that it was.
            let code = unsafe {
                match direction {
                    Direction::ToHost => (table.to_host_async)(*to as *mut c_void, *from, *len, stream),
                    Direction::ToDevice => (table.to_device_async)(*to, *from as *const c_void, *len, stream),
                    Direction::Within => (table.within_async)(*to, *from, *len, stream),
                }
            };
            if code != abi::SUCCESS {
                return code;
            }
        }
        abi::SUCCESS
    }
}
