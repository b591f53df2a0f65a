//! An allocator that counts, so that a decoder that takes memory for what did not come is found.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// The system's allocator, with a count of what each thread holds.
struct Counting;

thread_local! {
    /// Bytes that this thread has allocated and not freed, and the most that it ever had.
    static HELD: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

fn add(bytes: usize) {
    // A thread that ends allocates after its locals are gone: nobody asks about that one any more.
    let _ = HELD.try_with(|held| {
        let now = held.get().0.saturating_add(bytes);
        held.set((now, held.get().1.max(now)));
    });
}

fn sub(bytes: usize) {
    let _ = HELD.try_with(|held| held.set((held.get().0.saturating_sub(bytes), held.get().1)));
}

// SAFETY: every call goes to the system's allocator with the same arguments; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: the caller keeps what `alloc` demands.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        sub(layout.size());
        // SAFETY: `at` came from `alloc` here, which is the system's, with this layout.
        unsafe { System.dealloc(at, layout) }
    }
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Old and new may both be there for a moment.
        add(size);
        sub(layout.size());
        // SAFETY: as for `dealloc`.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The most bytes that `f` held beside what was there before it, on this thread.
pub fn most_held<T>(f: impl FnOnce() -> T) -> (T, usize) {
    let before = HELD.with(|held| {
        held.set((held.get().0, held.get().0));
        held.get().0
    });
    let result = f();
    (result, HELD.with(|held| held.get().1).saturating_sub(before))
}
