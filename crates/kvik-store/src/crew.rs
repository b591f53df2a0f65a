//! A few threads that take pieces of several works in turn, so that a disk has several requests at once, however many
//! ask, and no work keeps another one waiting.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Something that is done piece by piece, by several threads at once, `On` something that all works have in common.
pub(crate) trait Work<On>: Send + Sync {
    /// Does the next piece, if there is one.
    fn step(&self, on: &On);

    /// Whether there is a piece that nobody has begun.
    fn has_more(&self) -> bool;
}

/// See the module's text. Its threads are those that [`Crew::serve`].
pub(crate) struct Crew<On> {
    turn: Mutex<Turn<On>>,
    ready: Condvar,
}

struct Turn<On> {
    /// Works with pieces that nobody has begun.
    works: VecDeque<Arc<dyn Work<On>>>,
    closed: bool,
}

impl<On> Crew<On> {
    pub fn new() -> Crew<On> {
        let turn = Turn { works: VecDeque::new(), closed: false };
        Crew { turn: Mutex::new(turn), ready: Condvar::new() }
    }

    fn turn(&self) -> MutexGuard<'_, Turn<On>> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has a work done that has something to do. It may be offered again whenever it has more.
    pub fn offer(&self, work: Arc<dyn Work<On>>) {
        let mut turn = self.turn();
        if !turn.works.iter().any(|other| Arc::ptr_eq(other, &work)) {
            turn.works.push_back(work);
        }
        drop(turn);
        self.ready.notify_all();
    }

    /// Does pieces until the crew is closed and nothing is left.
    pub fn serve(&self, on: &On) {
        let mut turn = self.turn();
        loop {
            let Some(work) = turn.works.pop_front() else {
                if turn.closed {
                    return;
                }
                turn = self.ready.wait(turn).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            // The other threads find its next pieces meanwhile, behind those of other works.
            turn.works.push_back(work.clone());
            drop(turn);
            work.step(on);
            turn = self.turn();
            // Asked under the lock: whoever gives it more offers it afterwards, and so finds it here or not.
            if !work.has_more() {
                turn.works.retain(|other| !Arc::ptr_eq(other, &work));
            }
        }
    }

    /// What was offered is still done; then the threads end.
    pub fn close(&self) {
        self.turn().closed = true;
        self.ready.notify_all();
    }
}
