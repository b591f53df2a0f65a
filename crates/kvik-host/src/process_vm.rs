//! Reading the memory of another process that shares no mapping with this one.
//!
//! Memory that kvik did not allocate (a tensor of the caller's) cannot be mapped by a peer; the kernel can copy
//! from it with `process_vm_readv`, if it lets this process look at that one. Process numbers are reused, so a
//! [`ProcessMemory`] holds a pidfd and believes no byte unless the process was still alive *after* the copy:
//! as long as it lives, its number is its own. What the number meant before the pidfd was opened is proven by
//! [`ProcessMemory::probe`]: the peer tells, over its own connection, a nonce and where it lies.
//!
//! A process that replaces its program keeps its number, and its memory is another one from then on, for good. So the
//! nonce is looked for once more after a copy ([`ProcessMemory::prove_again`]): while it is there, so was the memory.

use std::os::fd::OwnedFd;
use std::sync::OnceLock;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, retry_on_intr};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::error::HostError;
use crate::runs::{RecvBatch, RecvRun, RemoteBatch, RunBuffer};

/// The longest nonce that [`ProcessMemory::probe`] compares.
pub const MAX_NONCE: usize = 64;

/// Another process of the same user, open for reading.
#[derive(Debug)]
pub struct ProcessMemory {
    pid: u32,
    pidfd: OwnedFd,
    /// The nonce that it was proven by, and where that lies.
    proven: OnceLock<(u64, Vec<u8>)>,
}

impl ProcessMemory {
    /// Opens the process that has this number now. It must belong to the same user.
    pub fn open(pid: u32) -> Result<ProcessMemory, HostError> {
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let number = number.ok_or_else(|| HostError::ProcessRefused {
            pid,
            why: "it is not visible from this PID namespace; share the namespace, or use tcp".into(),
        })?;
        let pidfd = pidfd_open(number, PidfdFlags::empty()).map_err(|e| match e {
            Errno::SRCH => HostError::ProcessGone { pid },
            other => HostError::os(format!("opening a pidfd of process {pid} (needs Linux 5.3)"), other),
        })?;
        let process = ProcessMemory { pid, pidfd, proven: OnceLock::new() };
        let owner = user_of(pid)?;
        process.alive()?;
        let own = rustix::process::geteuid().as_raw();
        if owner != own {
            let why = format!("it belongs to user {owner}, this process to {own}; run both as one user");
            return Err(HostError::ProcessRefused { pid, why });
        }
        Ok(process)
    }

    /// The process's number.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Fails if the process has ended.
    pub fn alive(&self) -> Result<(), HostError> {
        let mut wait = [PollFd::new(&self.pidfd, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        match retry_on_intr(|| poll(&mut wait, Some(&now))) {
            Ok(0) => Ok(()),
            Ok(_) => Err(HostError::ProcessGone { pid: self.pid }),
            Err(e) => Err(HostError::os(format!("watching process {}", self.pid), e)),
        }
    }

    /// Copies all of `remote` into all of `local`, which are equally long. On an error some of `local` may
    /// have been written.
    pub fn read(&self, remote: &mut RemoteBatch<'_>, local: &mut RecvBatch<'_, '_>) -> Result<(), HostError> {
        if remote.bytes() != local.bytes() {
            let (from, to) = (remote.bytes(), local.bytes());
            return Err(HostError::InvalidArgument(format!("{from} bytes cannot be read into {to}")));
        }
        self.alive()?;
        // The kernel may stop early: at its limit for one call, or before a page that is not there. Each turn
        // moves at least a byte or fails.
        while local.bytes() > 0 {
            let moved = self.read_some(remote, local)?;
            remote.queue.advance(moved);
            local.queue.advance(moved);
        }
        self.alive()
    }

    fn read_some(&self, remote: &RemoteBatch<'_>, local: &RecvBatch<'_, '_>) -> Result<usize, HostError> {
        let (from, to) = (remote.queue.pending(), local.queue.pending());
        // SAFETY: `to` are runs whose memory is borrowed by `local`; `from` is checked by the kernel, which only
        // reads there.
        let moved = unsafe {
            libc::process_vm_readv(
                self.pid as libc::pid_t,
                to.as_ptr(),
                to.len() as _,
                from.as_ptr(),
                from.len() as _,
                0,
            )
        };
        let addr = from.first().map_or(0, |run| run.iov_base as u64);
        match usize::try_from(moved) {
            Ok(0) => Err(HostError::RemoteUnmapped { pid: self.pid, addr }),
            Ok(moved) => Ok(moved),
            Err(_) => Err(self.explain(std::io::Error::last_os_error(), addr)),
        }
    }

    fn explain(&self, error: std::io::Error, addr: u64) -> HostError {
        let pid = self.pid;
        let why = match error.raw_os_error() {
            Some(libc::EFAULT) => return HostError::RemoteUnmapped { pid, addr },
            Some(libc::ESRCH) => return HostError::ProcessGone { pid },
            Some(libc::EPERM) => {
                "the kernel forbids it (kernel.yama.ptrace_scope above 0, another user namespace, or a process \
                 that is not dumpable); let the peer allow it, allocate with kvik to share memory, or use tcp"
            }
            Some(libc::ENOSYS) => {
                "this kernel has no process_vm_readv, or a filter hides it; allocate with kvik to share memory"
            }
            _ => return HostError::os(format!("reading process {pid} at {addr:#x}"), error),
        };
        HostError::ProcessRefused { pid, why: why.into() }
    }

    /// Proves that this is the process that holds `nonce` at `addr`, and that it can be read.
    pub fn probe(&self, addr: u64, nonce: &[u8]) -> Result<(), HostError> {
        let mut seen = [0u8; MAX_NONCE];
        let seen = match seen.get_mut(..nonce.len()) {
            Some(seen) if !seen.is_empty() => seen,
            _ => {
                let len = nonce.len();
                return Err(HostError::InvalidArgument(format!(
                    "a nonce has 1 to {MAX_NONCE} bytes, not {len}"
                )));
            }
        };
        let (mut from, mut to) = (RunBuffer::new(1), RunBuffer::new(1));
        let (mut from, mut to) = (from.begin_remote(), to.begin_recv());
        if !from.push(addr, nonce.len()) || !to.push(RecvRun::from(&mut seen[..])) {
            return Err(HostError::RemoteUnmapped { pid: self.pid, addr });
        }
        self.read(&mut from, &mut to)?;
        if seen != nonce {
            return Err(HostError::NonceMismatch { pid: self.pid });
        }
        self.proven.get_or_init(|| (addr, nonce.to_vec()));
        Ok(())
    }

    /// Proves that what was read since it was proven first was the peer's: it still runs the same program.
    ///
    /// # Errors
    /// It has ended, or its memory is another one; or it was never proven.
    pub fn prove_again(&self) -> Result<(), HostError> {
        let proven = self.proven.get();
        let (addr, nonce) = proven.ok_or(HostError::NonceMismatch { pid: self.pid })?;
        self.probe(*addr, nonce)
    }
}

/// The effective user of a process.
fn user_of(pid: u32) -> Result<u32, HostError> {
    let status = match std::fs::read_to_string(format!("/proc/{pid}/status")) {
        Ok(status) => status,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Err(HostError::ProcessGone { pid }),
        Err(e) => return Err(HostError::os(format!("reading the status of process {pid}"), e)),
    };
    let uids = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    uids.and_then(|uids| uids.split_whitespace().nth(1)?.parse().ok())
        .ok_or_else(|| HostError::ProcessRefused { pid, why: "its user cannot be read from /proc".into() })
}
