//! The kernel that copies many pieces in one launch (`copy.cu`): when it pays, and how many threads it takes.
//!
//! The driver's copy engine takes pieces one after the other, each in 0.5 to 4 microseconds, however short. A
//! kernel has thousands of reads in flight. It takes multiprocessors from the program's kernels for that, and waits
//! for one that has room.
//!
//! `copy.ptx` is text that the driver compiles for its GPU (0.1 s, once; it keeps what it has compiled in files).
//! To put it into a context, **the driver waits for all kernels that run there**, and most other calls wait with
//! it: it was so on an H200 with the driver 580, by `cuModuleLoadData` and by `cuLibraryLoadData`. So that is done
//! when a device is opened: when the first memory of it is registered, or a peer's is opened where there is none. What
//! transfers afterwards finds it loaded.

use super::abi::{self, Addr, Code, Handle, Table};
use super::error::CudaError;
use super::piece::{Direction, Piece};
use std::ffi::{CStr, c_int, c_void};
use std::ptr;
use std::sync::OnceLock;

/// What the driver compiles.
const IMAGE: &str = concat!(include_str!("copy.ptx"), "\0");
const NAME: &CStr = c"kvik_copy_pieces";
/// Bytes that a warp copies at a time, as in `copy.cu`.
const SHARE: usize = 4096;
/// Of a block, at most as many as `copy.cu` is made for.
const THREADS: u32 = 256;
const WARPS: u32 = THREADS / 32;
/// Longer ones are the copy engine's always: the shares of a list are counted in 32 bits.
const LONGEST: u64 = 1 << 30;

/// Which pieces go by the kernel, and on how many blocks.
struct Limits {
    /// Fewer of a call are the copy engine's.
    least: usize,
    /// So long ones are the copy engine's.
    long: u64,
    /// Pieces whose two sides lie less alike are the copy engine's.
    word: u64,
    /// Blocks, each of [`THREADS`].
    blocks: u32,
}

/// One multiprocessor has room for more of such blocks, so that other kernels run beside them.
const WITHIN_BLOCKS: u32 = 4;

/// The kernel in a context. It holds nothing that is to be given back: the context has it to its end.
pub(super) struct Kernel {
    function: Handle,
    multiprocessors: u32,
    /// Why it is not used, or no more.
    refused: OnceLock<String>,
}

// SAFETY: a function of a context, which any thread may launch.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

impl Kernel {
    /// Has the driver compile it. The copy engine does without it, so what fails is said once, and no error. `attribute` asks
    /// the device.
    ///
    /// # Safety
    /// The device's context is current.
    pub unsafe fn load(table: &Table, ordinal: c_int, attribute: impl Fn(c_int) -> c_int) -> Kernel {
        let multiprocessors = attribute(abi::MULTIPROCESSORS).unsigned_abs().max(1);
        let kernel = |function| Kernel { function, multiprocessors, refused: OnceLock::new() };
        if attribute(abi::UNIFIED_ADDRESSING) == 0 || attribute(abi::HOST_POINTERS) == 0 {
            let none = kernel(ptr::null_mut());
            none.refuse(ordinal, "page-locked memory has other addresses there than on the host".into());
            return none;
        }
        let (mut module, mut function) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: text that ends with a null, and a C string; each call writes a handle if it returns 0.
        let code = unsafe {
            match (table.module_load)(&mut module, IMAGE.as_ptr().cast::<c_void>()) {
                abi::SUCCESS => (table.module_function)(&mut function, module, NAME.as_ptr()),
                code => code,
            }
        };
        let kernel = kernel(function);
        if code != abi::SUCCESS {
            kernel.refuse(
                ordinal,
                CudaError::driver(table, "loading the kernel for small pages", code).to_string(),
            );
        }
        kernel
    }

    /// From now on the copy engine does everything.
    fn refuse(&self, ordinal: c_int, why: String) {
        if self.refused.set(why).is_ok() {
            let why = self.refused().unwrap_or_default();
            log::info!("small pages of GPU {ordinal} go by its copy engine, which is slower: {why}");
        }
    }

    /// Why it is not used, if so.
    pub fn refused(&self) -> Option<&str> {
        self.refused.get().map(String::as_str)
    }

    /// Whether a piece goes by the kernel if enough others do.
    pub fn takes(&self, piece: &Piece, direction: Direction) -> bool {
        let limits = self.limits(direction);
        piece.len < limits.long && piece.word() >= limits.word
    }

    /// Whether it can take the piece, if need be.
    pub fn can_take(piece: &Piece) -> bool {
        piece.len < LONGEST
    }

    /// Whether so many pieces go by the kernel.
    pub fn pays(&self, count: usize, direction: Direction) -> bool {
        count >= self.limits(direction).least
    }

    /// Measured on one H200 (driver 580, PCIe 5, 132 multiprocessors; November 2026), in GB/s of 256 MiB of pages
    /// in a drawn order, by a program that had the lists ready; `kvik-gpu-check` shows the same with what kvik does
    /// beside:
    ///
    /// | pages | to the host: engine, kernel | to the device | within |
    /// |---|---|---|---|
    /// | 4 KiB | 9.5, 51.7 | 8.0, 50.2 | 1.1, 1156 |
    /// | 16 KiB | 35, 52.3 | 23, 50.9 | 4.5, 1590 |
    /// | 64 KiB | 49.9, 52.5 | 46.8, 51.2 | 18, 1803 |
    /// | 128 KiB | 48.4, 52.5 | 46.2, 51.3 | 37, 1770 |
    /// | 1 MiB | 54.0, 52.5 | 53.9, 51.2 | 290, 1770 |
    /// | one copy | 55.3 | 55.4 | 2000 |
    ///
    /// So from 64 KiB on the copy engine is near enough, to the host and from there, and takes nothing from
    /// anybody. How many it takes: idle, the kernel is the faster one from 16 pieces of 4 KiB on to the host, 8 to
    /// the device, 2 within. But where the program's kernels fill the GPU, each launch waits until a block of
    /// theirs ends: with such ones of 0.12 ms, 256 KiB to the host came at 2.1 GB/s by the kernel and at 12 by the
    /// engine. So few pieces are no reason for a launch, fewest of all to the host, where most copies come from a
    /// GPU that computes.
    ///
    /// The blocks: 3 bring 94 % of one copy to the host (2: 90 %), and make a kernel that reads the device's memory
    /// 1.04 times as slow meanwhile; 16 of 512 threads are no faster and make it 1.3 times as slow, as writes to the
    /// host back up. To the device 8 bring 92 % (6: 87 %), at 1.08 times. Within, 4 for each multiprocessor bring
    /// 84 %, at 1.06 times, as one copy of the driver's.
    fn limits(&self, direction: Direction) -> Limits {
        match direction {
            Direction::ToHost => Limits { least: 64, long: 64 << 10, word: 4, blocks: 3 },
            Direction::ToDevice => Limits { least: 16, long: 64 << 10, word: 4, blocks: 8 },
            // The engine takes 4 microseconds for each, in which the kernel copies 8 MB.
            Direction::Within => {
                Limits { least: 4, long: 16 << 20, word: 1, blocks: WITHIN_BLOCKS * self.multiprocessors }
            }
        }
    }

    /// Launches it for a list of pieces, of which no one is longer than `longest`: what the driver says.
    ///
    /// # Safety
    /// The context of `stream` is current; `list` is the address of so many pieces in page-locked memory, which nobody
    /// writes before the stream is past this, and both sides of each are memory that this device reaches until then.
    pub unsafe fn launch(
        &self,
        table: &Table,
        (list, count): (Addr, u32),
        longest: u64,
        direction: Direction,
        stream: Handle,
    ) -> Code {
        let (mut list, mut count) = (list, count);
        let mut parts = longest.div_ceil(SHARE as u64) as u32;
        let blocks = (count * parts).div_ceil(WARPS).min(self.limits(direction).blocks);
        let mut given = [
            ptr::from_mut(&mut list).cast::<c_void>(),
            ptr::from_mut(&mut count).cast::<c_void>(),
            ptr::from_mut(&mut parts).cast::<c_void>(),
        ];
        // SAFETY: the kernel's arguments, which the driver copies; the rest is the caller's promise.
        unsafe {
            let none = ptr::null_mut();
            (table.launch)(self.function, blocks, 1, 1, THREADS, 1, 1, 0, stream, given.as_mut_ptr(), none)
        }
    }

    /// Looks at what a launch came to. `false`: nothing was launched, nor will be; the copy engine takes the pieces.
    pub fn launched(&self, table: &Table, ordinal: c_int, code: Code) -> bool {
        if code == abi::SUCCESS {
            return true;
        }
        let error = CudaError::driver(table, "launching the kernel for small pages", code);
        if !error.is_lost() {
            self.refuse(ordinal, error.to_string());
        }
        error.is_lost()
    }
}
