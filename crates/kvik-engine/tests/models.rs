//! What threads of an engine do without a lock, in every order that the memory model allows, tried by loom.
//!
//! Models, with the operations and orderings of the code that each names: the code itself waits in epoll, for an
//! eventfd that loom does not know.

use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use loom::sync::{Arc, Mutex};
use loom::thread;

/// A waker: an eventfd, which the kernel has a lock around. While it is signalled nobody sleeps.
#[derive(Default)]
struct Waker(Mutex<bool>);

impl Waker {
    fn wake(&self) {
        *self.0.lock().unwrap() = true;
    }
    /// Whether it was signalled since.
    fn hear(&self) -> bool {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

/// `Commands`: what the control thread sleeps by.
struct Sleeper {
    /// The soonest deadline that the protocol knows: `Soonest`.
    due: AtomicU64,
    wakes_at: AtomicU64,
    waker: Waker,
}

impl Sleeper {
    /// `Commands::wake_by`, by whoever has just made something due at `at`.
    fn wake_by(&self, at: u64) {
        if at < self.wakes_at.load(Ordering::Acquire) {
            self.waker.wake();
        }
    }

    /// `Commands::sleep_until`; `announced` is whether it first says that it is about to look.
    fn sleep_until(&self, announced: bool) -> u64 {
        if announced {
            self.wakes_at.store(u64::MAX, Ordering::Release);
            fence(Ordering::SeqCst);
        }
        let soonest = self.due.load(Ordering::Acquire);
        self.wakes_at.store(soonest, Ordering::Release);
        soonest
    }
}

/// The thread has slept until 50 before; another one makes something due at 70 while it goes to sleep again.
fn sleep_while_it_becomes_due(announced: bool) {
    loom::model(move || {
        let (waker, wakes_at) = (Waker::default(), AtomicU64::new(50));
        let sleeper = Arc::new(Sleeper { due: AtomicU64::new(100), wakes_at, waker });
        let waker = thread::spawn({
            let sleeper = sleeper.clone();
            move || {
                // `Soonest::set`.
                sleeper.due.store(70, Ordering::Release);
                fence(Ordering::SeqCst);
                sleeper.wake_by(70);
            }
        });
        let until = sleeper.sleep_until(announced);
        waker.join().unwrap();
        let due = sleeper.due.load(Ordering::Acquire);
        assert!(until <= due || sleeper.waker.hear(), "asleep until {until}, due at {due}");
    });
}

#[test]
fn nobody_sleeps_over_what_becomes_due_meanwhile() {
    sleep_while_it_becomes_due(true);
}

#[test]
#[should_panic(expected = "asleep until")]
fn without_the_announcement_somebody_would() {
    sleep_while_it_becomes_due(false);
}

/// `Budget::resize`: adds first, and takes back what was too much.
fn take(used: &AtomicU64, cap: u64, bytes: u64) -> bool {
    let before = used.fetch_add(bytes, Ordering::Relaxed);
    if before + bytes <= cap {
        return true;
    }
    used.fetch_sub(bytes, Ordering::Relaxed);
    false
}

#[test]
fn two_that_take_at_once_never_hold_more_than_the_cap() {
    loom::model(|| {
        let used = Arc::new(AtomicU64::new(1));
        let other = thread::spawn({
            let used = used.clone();
            move || take(&used, 10, 6)
        });
        let held = u64::from(take(&used, 10, 5)) * 5 + u64::from(other.join().unwrap()) * 6 + 1;
        assert!(held <= 10, "{held}");
        assert_eq!(used.load(Ordering::Relaxed), held, "what was refused was given back");
    });
}

/// `Inbox::put` and `Inbox::take`: the waker is signalled with the first command, and is drained before any is taken.
#[test]
fn no_command_stays_in_an_inbox_whose_waker_is_silent() {
    loom::model(|| {
        let inbox = Arc::new((Mutex::new(Vec::new()), Waker::default()));
        let put = |inbox: &(Mutex<Vec<u8>>, Waker), command| {
            let mut waiting = inbox.0.lock().unwrap();
            let first = waiting.is_empty();
            waiting.push(command);
            drop(waiting);
            if first {
                inbox.1.wake();
            }
        };
        let others = [1, 2].map(|command| {
            let inbox = inbox.clone();
            thread::spawn(move || put(&inbox, command))
        });
        // One turn of the worker, which may come too early, and the state that it goes to sleep in.
        let mut taken = Vec::new();
        if inbox.1.hear() {
            taken.append(&mut inbox.0.lock().unwrap());
        }
        for other in others {
            other.join().unwrap();
        }
        let waiting = inbox.0.lock().unwrap().len();
        assert!(waiting == 0 || inbox.1.hear(), "{waiting} commands wait unheard");
        assert_eq!(taken.len() + waiting, 2);
    });
}

/// `Flow::set_stop` and the executors' look at the flag: what was written before it is seen.
#[test]
fn who_sees_the_stop_flag_sees_why() {
    loom::model(|| {
        let flow = Arc::new((AtomicU64::new(0), AtomicBool::new(false)));
        let stopper = thread::spawn({
            let flow = flow.clone();
            move || {
                flow.0.store(9, Ordering::Relaxed);
                flow.1.store(true, Ordering::Release);
            }
        });
        if flow.1.load(Ordering::Acquire) {
            assert_eq!(flow.0.load(Ordering::Relaxed), 9);
        }
        stopper.join().unwrap();
    });
}
