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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_rise_and_work_is_charged_to_the_thread() {
        let (boot, thread, process) = (boottime(), thread_cpu(), process_cpu());
        let mut sum = 0u64;
        while thread_cpu() == thread {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        assert!(boottime() > boot);
        assert!(process_cpu() >= process);
        assert!(process_cpu() > Duration::ZERO);
    }
}
