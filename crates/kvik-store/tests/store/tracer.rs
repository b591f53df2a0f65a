//! Ends a child process at one of the system calls by which it changes a disk, counted over all of its threads.
//!
//! A filter in the child stops it at these calls alone; its parent counts the stops. So the child runs the program that
//! is tested as it is, and every other call at its usual speed.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

/// Calls that write to files, sync them, or change what files there are; and `openat` where it makes one.
const CALLS: [libc::c_long; 9] = [
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_fdatasync,
    libc::SYS_fsync,
    libc::SYS_fallocate,
    libc::SYS_ftruncate,
    libc::SYS_unlinkat,
    libc::SYS_mkdirat,
];
const SECCOMP_ALLOW: u32 = 0x7fff_0000;
const SECCOMP_TRACE: u32 = 0x7ff0_0000;

/// The filter, in the kernel's classic BPF: loads the number of the call, and for `openat` its flags.
fn filter() -> Vec<libc::sock_filter> {
    let op = |code: u32, k: u32, jt: usize, jf: usize| libc::sock_filter {
        code: code as u16,
        jt: jt as u8,
        jf: jf as u8,
        k,
    };
    let (load, equal) =
        (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K);
    let (any_bit, give) = (libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K, libc::BPF_RET | libc::BPF_K);
    let mut all = vec![op(load, 0, 0, 0)];
    for (at, call) in CALLS.iter().enumerate() {
        all.push(op(equal, *call as u32, CALLS.len() - at + 3, 0));
    }
    all.push(op(equal, libc::SYS_openat as u32, 0, 2));
    // The low half of the third argument.
    all.push(op(load, 32, 0, 0));
    all.push(op(any_bit, libc::O_CREAT as u32, 1, 0));
    all.push(op(give, SECCOMP_ALLOW, 0, 0));
    all.push(op(give, SECCOMP_TRACE, 0, 0));
    all
}

/// A child that is stopped at the calls. The thread that starts it is the one that follows it.
pub struct Traced {
    pub child: Child,
}

impl Traced {
    pub fn start(command: &mut Command) -> io::Result<Traced> {
        let mut all = filter();
        let follow = move || {
            let program = libc::sock_fprog { len: all.len() as u16, filter: all.as_mut_ptr() };
            // SAFETY: Between fork and exec these calls are allowed. `program` and what it points to live until they
            // have returned.
            unsafe {
                if libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) != 0
                    || libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
                    || libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) != 0
                {
                    return Err(io::Error::last_os_error());
                }
            }
            Ok(())
        };
        // SAFETY: What it does is allowed between fork and exec: it allocates nothing and takes no lock.
        let child = unsafe { command.pre_exec(follow) }.spawn()?;
        Ok(Traced { child })
    }

    /// Runs the child until it ends, and kills it before its call number `at`. How many of the calls it began, the one
    /// that it was killed at among them.
    pub fn run(&mut self, at: u64) -> io::Result<u64> {
        let main = self.child.id() as libc::pid_t;
        let options = libc::PTRACE_O_TRACESECCOMP | libc::PTRACE_O_TRACECLONE | libc::PTRACE_O_EXITKILL;
        let (mut calls, mut begun) = (0, false);
        loop {
            let mut status = 0;
            // SAFETY: `status` is written to during the call alone. Of this thread's children there is this one only.
            let who = unsafe { libc::waitpid(-1, &raw mut status, libc::__WALL | libc::__WNOTHREAD) };
            if who < 0 {
                return Err(io::Error::last_os_error());
            }
            if !libc::WIFSTOPPED(status) {
                if who == main {
                    return Ok(calls);
                }
                continue;
            }
            if !begun {
                // It has stopped at its exec.
                request(libc::PTRACE_SETOPTIONS, who, options as usize)?;
                begun = true;
            }
            if status >> 16 == libc::PTRACE_EVENT_SECCOMP {
                calls += 1;
                if calls == at {
                    self.child.kill()?;
                    continue;
                }
            }
            // What it was stopped with is the tracer's, but for signals that are the child's own.
            let signal = match libc::WSTOPSIG(status) {
                libc::SIGTRAP | libc::SIGSTOP => 0,
                other => other,
            };
            match request(libc::PTRACE_CONT, who, signal as usize) {
                // It was killed meanwhile.
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                other => other?,
            }
        }
    }
}

fn request(what: libc::c_uint, who: libc::pid_t, data: usize) -> io::Result<()> {
    // SAFETY: These requests read no memory of this process: `data` is a number.
    match unsafe { libc::ptrace(what, who, 0, data) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
