//! Children of a test: always waited for, never longer than a bound.

use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, kill_process, pidfd_open, waitpid};

const BOUND: Duration = Duration::from_secs(60);

/// Forks, runs `f` in the child, and gives its verdict. A panic in the child is a `false`.
pub fn in_forked_child(f: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child runs `f` alone and leaves by `_exit`, so that nothing of the test harness runs twice.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork failed");
    if pid == 0 {
        let verdict = std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).unwrap_or(false);
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(i32::from(!verdict)) };
    }
    let pid = Pid::from_raw(pid).unwrap();
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).unwrap();
    let ended = kvik_host::event::wait_ready(&pidfd, kvik_host::event::Interest::READ, BOUND).unwrap();
    if !ended {
        kill_process(pid, Signal::KILL).unwrap();
    }
    let (_, status) = waitpid(Some(pid), WaitOptions::empty()).unwrap().unwrap();
    ended && status.exit_status() == Some(0)
}
