//! The CPU time of threads, for whoever asks from another thread.
//!
//! A thread's CPU clock can be read from anywhere in its process: one system call, in nanoseconds, and nothing is
//! parsed. Its number must not outlive the thread, so a thread that ends leaves its last reading under the same
//! lock that a reader holds.

use std::mem::MaybeUninit;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::clock::thread_cpu;
use crate::thread::lock;

/// The CPU clocks of some threads. Threads that are started with it in their
/// [`ThreadOptions`](crate::thread::ThreadOptions) are in it, also after their end. Clones share one list.
#[derive(Clone, Debug, Default)]
pub struct ThreadTimes {
    list: Arc<Mutex<Vec<Arc<Clock>>>>,
}

#[derive(Debug)]
struct Clock {
    thread: String,
    state: Mutex<State>,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Running(libc::clockid_t),
    Ended(Duration),
}

/// Keeps a thread's last reading when the thread drops it at its end.
pub(crate) struct Counted {
    clock: Arc<Clock>,
}

impl ThreadTimes {
    /// Name and CPU time of each thread, in the order in which they were started.
    pub fn read(&self) -> Vec<(String, Duration)> {
        lock(&self.list).iter().map(|clock| (clock.thread.clone(), clock.read())).collect()
    }

    /// Counts the calling thread until what this returns is dropped, which must be in this thread.
    pub(crate) fn count(&self, thread: &str) -> Counted {
        let state = own_clock().map_or(State::Ended(Duration::ZERO), State::Running);
        let clock = Arc::new(Clock { thread: thread.to_owned(), state: Mutex::new(state) });
        lock(&self.list).push(clock.clone());
        Counted { clock }
    }
}

impl Clock {
    fn read(&self) -> Duration {
        // While this is held, the thread cannot have ended: it takes the lock before it does.
        let state = lock(&self.state);
        match *state {
            State::Running(clock) => read(clock),
            State::Ended(time) => time,
        }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        *lock(&self.clock.state) = State::Ended(thread_cpu());
    }
}

/// The number of the calling thread's CPU clock; `None` where the kernel has none.
fn own_clock() -> Option<libc::clockid_t> {
    let mut clock = MaybeUninit::<libc::clockid_t>::uninit();
    // SAFETY: the calling thread is alive, and the call initialises the number when it succeeds.
    unsafe {
        match libc::pthread_getcpuclockid(libc::pthread_self(), clock.as_mut_ptr()) {
            0 => Some(clock.assume_init()),
            _ => None,
        }
    }
}

fn read(clock: libc::clockid_t) -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one timespec, and refuses a clock that is not there.
    if unsafe { libc::clock_gettime(clock, &raw mut time) } != 0 {
        return Duration::ZERO;
    }
    // The clock starts at zero and only rises, so both parts are never negative.
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}
