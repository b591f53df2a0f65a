//! The fence around a copy in every order of two threads that the memory model allows, tried by loom.
//!
//! The real cells lie in a mapping that two processes share, so this is a model: the same operations with the same
//! orderings as `FenceTable::raise` and `PeerFence::generation`. A page is two words, so that a torn copy is seen.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering, fence};
use loom::thread;

const GRANTED: u64 = 7;
const OLD: u64 = 1;
const NEW: u64 = 2;

struct Shared {
    generation: AtomicU64,
    page: [AtomicU64; 2],
}

/// Which of the barriers a reader or owner has: the code has all of them.
#[derive(Clone, Copy)]
struct Barriers {
    owner: bool,
    second_check: bool,
}

const ALL: Barriers = Barriers { owner: true, second_check: true };

/// `FenceTable::raise`, and the writes that follow it.
fn end_and_reuse(shared: &Shared, barriers: Barriers) {
    shared.generation.fetch_add(1, Ordering::AcqRel);
    if barriers.owner {
        fence(Ordering::SeqCst);
    }
    for word in &shared.page {
        word.store(NEW, Ordering::Relaxed);
    }
}

/// `PeerFence::generation`.
fn generation(shared: &Shared, barrier: bool) -> u64 {
    if barrier {
        fence(Ordering::Acquire);
    }
    let generation = shared.generation.load(Ordering::Relaxed);
    fence(Ordering::Acquire);
    generation
}

/// A copy between two checks: `None` where it is thrown away.
fn copy(shared: &Shared, barriers: Barriers) -> Option<[u64; 2]> {
    if generation(shared, true) != GRANTED {
        return None;
    }
    let page = [0, 1].map(|word: usize| shared.page[word].load(Ordering::Relaxed));
    (generation(shared, barriers.second_check) == GRANTED).then_some(page)
}

/// Whether a copy that was kept can hold a byte of the pages' next contents.
fn try_all(barriers: Barriers) {
    loom::model(move || {
        let page = [AtomicU64::new(OLD), AtomicU64::new(OLD)];
        let shared = Arc::new(Shared { generation: AtomicU64::new(GRANTED), page });
        let owner = thread::spawn({
            let shared = shared.clone();
            move || end_and_reuse(&shared, barriers)
        });
        if let Some(page) = copy(&shared, barriers) {
            assert_eq!(page, [OLD, OLD], "a stale copy was kept");
        }
        owner.join().unwrap();
        assert_eq!(generation(&shared, true), GRANTED + 1);
    });
}

#[test]
fn a_copy_that_saw_new_contents_is_thrown_away() {
    try_all(ALL);
}

#[test]
#[should_panic(expected = "a stale copy was kept")]
fn without_the_owners_barrier_one_is_kept() {
    try_all(Barriers { owner: false, ..ALL });
}

#[test]
#[should_panic(expected = "a stale copy was kept")]
fn without_the_readers_barrier_one_is_kept() {
    try_all(Barriers { second_check: false, ..ALL });
}
