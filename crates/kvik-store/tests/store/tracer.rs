//! Meddles with a child process at the system calls by which it changes a disk, counted over all of its threads: the
//! child is killed before one, or one fails, or waits.
//!
//! A filter in the child stops it at these calls alone; its parent decides at each stop. So the child runs the program
//! that is tested as it is, and every other call at its usual speed.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

/// Calls that write to files, sync them, or change what files there are; and `openat` where it makes one.
pub const CHANGES: [libc::c_long; 10] = [
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_fdatasync,
    libc::SYS_fsync,
    libc::SYS_fallocate,
    libc::SYS_ftruncate,
    libc::SYS_unlinkat,
    libc::SYS_mkdirat,
    libc::SYS_openat,
];
const SECCOMP_ALLOW: u32 = 0x7fff_0000;
const SECCOMP_TRACE: u32 = 0x7ff0_0000;

/// What becomes of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    Goes,
    /// The child is killed before it.
    Killed,
    /// It is not made, and fails with this error.
    Fails(i32),
    /// It is not made yet: that is asked again when the child is stopped the next time, by a signal for example.
    Waits,
}

/// The filter, in the kernel's classic BPF: loads the number of the call, and for `openat` its flags. What it stops at
/// tells the tracer the call's place in the list.
fn filter(calls: &[libc::c_long]) -> Vec<libc::sock_filter> {
    let op = |code: u32, k: u32, jt: u8, jf: u8| libc::sock_filter { code: code as u16, jt, jf, k };
    let (load, equal) =
        (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K);
    let (any_bit, give) = (libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K, libc::BPF_RET | libc::BPF_K);
    let mut all = vec![op(load, 0, 0, 0)];
    for (at, call) in calls.iter().enumerate() {
        let stop = op(give, SECCOMP_TRACE | at as u32, 0, 0);
        if *call == libc::SYS_openat {
            all.push(op(equal, *call as u32, 0, 4));
            // The low half of the third argument.
            all.extend([op(load, 32, 0, 0), op(any_bit, libc::O_CREAT as u32, 1, 0)]);
            all.extend([op(give, SECCOMP_ALLOW, 0, 0), stop]);
        } else {
            all.extend([op(equal, *call as u32, 0, 1), stop]);
        }
    }
    all.push(op(give, SECCOMP_ALLOW, 0, 0));
    all
}

/// A child that is stopped at the calls. The thread that starts it is the one that follows it.
pub struct Traced {
    pub child: Child,
    calls: Vec<libc::c_long>,
    /// Threads that wait, with how they have stopped.
    waiting: Vec<(libc::pid_t, libc::c_int)>,
}

impl Traced {
    pub fn start(command: &mut Command, calls: &[libc::c_long]) -> io::Result<Traced> {
        let mut all = filter(calls);
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
        Ok(Traced { child, calls: calls.to_vec(), waiting: Vec::new() })
    }

    /// Runs the child until it ends, and asks what becomes of each of its calls.
    pub fn run(&mut self, mut decide: impl FnMut(libc::c_long) -> Fate) -> io::Result<()> {
        let main = self.child.id() as libc::pid_t;
        let options = libc::PTRACE_O_TRACESECCOMP | libc::PTRACE_O_TRACECLONE | libc::PTRACE_O_EXITKILL;
        let mut begun = false;
        loop {
            let mut status = 0;
            // SAFETY: `status` is written to during the call alone. Of this thread's children there is this one only.
            let who = unsafe { libc::waitpid(-1, &raw mut status, libc::__WALL | libc::__WNOTHREAD) };
            if who < 0 {
                return Err(io::Error::last_os_error());
            }
            if !libc::WIFSTOPPED(status) {
                if who == main {
                    return Ok(());
                }
                continue;
            }
            if !begun {
                // It has stopped at its exec.
                request(libc::PTRACE_SETOPTIONS, who, 0, options as usize)?;
                begun = true;
            }
            let waiting = std::mem::take(&mut self.waiting);
            for (who, status) in waiting.into_iter().chain([(who, status)]) {
                match self.stopped(who, status, &mut decide) {
                    // It was killed meanwhile.
                    Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                    other => other?,
                }
            }
        }
    }

    /// A thread has stopped, and goes on as it is to.
    fn stopped(
        &mut self,
        who: libc::pid_t,
        status: libc::c_int,
        decide: &mut impl FnMut(libc::c_long) -> Fate,
    ) -> io::Result<()> {
        if status >> 16 == libc::PTRACE_EVENT_SECCOMP {
            match decide(self.call(who)?) {
                Fate::Goes => {}
                Fate::Killed => return self.child.kill(),
                Fate::Fails(error) => fail(who, error)?,
                Fate::Waits => {
                    self.waiting.push((who, status));
                    return Ok(());
                }
            }
        }
        // What it was stopped with is the tracer's, but for signals that are the child's own.
        let signal = match libc::WSTOPSIG(status) {
            libc::SIGTRAP | libc::SIGSTOP => 0,
            other => other,
        };
        request(libc::PTRACE_CONT, who, 0, signal as usize)
    }

    /// The call that a thread has stopped at.
    fn call(&self, who: libc::pid_t) -> io::Result<libc::c_long> {
        let mut at: libc::c_ulong = 0;
        request(libc::PTRACE_GETEVENTMSG, who, 0, &raw mut at as usize)?;
        self.calls.get(at as usize).copied().ok_or_else(|| io::Error::other("a stop of nobody's"))
    }
}

/// Has a thread that has stopped at a call not make it, and see this error.
fn fail(who: libc::pid_t, error: i32) -> io::Result<()> {
    #[cfg(target_arch = "x86_64")]
    {
        let word = size_of::<usize>();
        request(libc::PTRACE_POKEUSER, who, word * libc::ORIG_RAX as usize, usize::MAX)?;
        request(libc::PTRACE_POKEUSER, who, word * libc::RAX as usize, (-error) as usize)
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let text = format!("nobody has told how a call of {who} fails with {error} on this processor");
        Err(io::Error::new(io::ErrorKind::Unsupported, text))
    }
}

fn request(what: libc::c_uint, who: libc::pid_t, at: usize, data: usize) -> io::Result<()> {
    // SAFETY: These requests read no memory of this process, and `PTRACE_GETEVENTMSG` alone writes to it: to `data`, which
    // is an integer of its caller's then.
    match unsafe { libc::ptrace(what, who, at, data) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
