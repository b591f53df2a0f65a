//! How long something took, without the time in which this machine was busy with other things.
//!
//! A test that says by when something ends would else fail wherever its threads wait for a processor. On a machine that has
//! one for them, nothing is left out.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long the thread sleeps that finds out.
const STEP: Duration = Duration::from_millis(5);
/// Woken later than this, it has waited for a processor, and others may have.
const BUSY: Duration = Duration::from_millis(20);

/// Sleeps and is late, since the first watch was started.
struct Sleeper {
    first: Instant,
    /// When it was woken last, and how late it was in all: in microseconds.
    woken: AtomicU64,
    late: AtomicU64,
}

impl Sleeper {
    fn get() -> &'static Sleeper {
        static SLEEPER: OnceLock<Sleeper> = OnceLock::new();
        SLEEPER.get_or_init(|| {
            std::thread::spawn(|| Sleeper::get().sleep());
            Sleeper { first: Instant::now(), woken: AtomicU64::new(0), late: AtomicU64::new(0) }
        })
    }

    fn sleep(&self) {
        loop {
            std::thread::sleep(STEP);
            self.late.fetch_add(self.overdue().as_micros() as u64, Ordering::Relaxed);
            self.woken.store(self.first.elapsed().as_micros() as u64, Ordering::Relaxed);
        }
    }

    /// How late it is, where that is much.
    fn overdue(&self) -> Duration {
        let woken = Duration::from_micros(self.woken.load(Ordering::Relaxed));
        let late = self.first.elapsed().saturating_sub(woken + STEP);
        if late > BUSY { late } else { Duration::ZERO }
    }

    /// How late it was in all by now, also where it was not woken yet.
    fn late(&self) -> Duration {
        Duration::from_micros(self.late.load(Ordering::Relaxed)) + self.overdue()
    }
}

/// See the module's text. In place of an [`Instant`], for bounds from above.
#[derive(Debug, Clone, Copy)]
pub struct Watch {
    began: Instant,
    late: Duration,
}

/// A watch that runs from now on.
pub fn start() -> Watch {
    let late = Sleeper::get().late();
    Watch { began: Instant::now(), late }
}

impl Watch {
    pub fn elapsed(&self) -> Duration {
        let late = Sleeper::get().late().saturating_sub(self.late);
        self.began.elapsed().saturating_sub(late)
    }
}
