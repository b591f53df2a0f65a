//! The clocks that kvik reads.
//!
//! Expiry is judged on the boot clock, which goes on while a machine is suspended: a process that wakes late
//! must find its grants expired.

use std::time::Duration;

use rustix::time::{ClockId, Timespec, clock_gettime};

/// Time since the machine started, suspension included.
pub fn boottime() -> Duration {
    duration(clock_gettime(ClockId::Boottime))
}

/// CPU time that the calling thread has used.
pub fn thread_cpu() -> Duration {
    duration(clock_gettime(ClockId::ThreadCPUTime))
}

/// CPU time that all threads of this process have used.
pub fn process_cpu() -> Duration {
    duration(clock_gettime(ClockId::ProcessCPUTime))
}

fn duration(time: Timespec) -> Duration {
    // These clocks start at zero and only rise, so both parts are never negative.
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}
