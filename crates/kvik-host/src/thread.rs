//! Threads of kvik: named, deaf to signals, and where they were asked to be.
//!
//! A thread that kvik starts in somebody's process must not run that process's signal handlers: Python, for one,
//! expects them on its main thread. So all signals are blocked before the thread exists, and it inherits that.

use std::fs;
use std::mem::MaybeUninit;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::cpu::ThreadTimes;
use crate::error::HostError;

/// What every name begins with.
pub const PREFIX: &str = "kvik-";

/// The kernel keeps this many bytes of a name.
pub const MAX_NAME: usize = 15;

/// How long a new thread may take to report that it is in place; only a machine in trouble needs it.
const SETUP_LIMIT: Duration = Duration::from_secs(10);

const NODES: &str = "/sys/devices/system/node";

/// Where a thread runs.
#[derive(Clone, Debug, Default)]
pub struct ThreadOptions {
    /// CPUs to run on; all must be allowed to this process. `None`: those of the NUMA node, or as inherited.
    pub cpus: Option<Vec<usize>>,
    /// NUMA node to prefer for memory that the thread touches first, and to run on if no CPUs are given.
    pub numa_node: Option<u32>,
    /// Where its CPU time can be read.
    pub times: ThreadTimes,
}

/// Takes a lock that a panic elsewhere does not make useless: what it guards is whole at every step.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts a thread. Its name begins with `kvik-` and has at most 15 bytes. When this returns, the thread is in
/// place and runs `f`; if it could not be put in place, `f` was not run.
pub fn spawn_named(
    name: &str,
    options: &ThreadOptions,
    f: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, HostError> {
    if !name.starts_with(PREFIX) || name.len() > MAX_NAME || name.bytes().any(|b| b == 0) {
        let rule =
            format!("a thread's name begins with {PREFIX} and has at most {MAX_NAME} bytes, not {name:?}");
        return Err(HostError::InvalidArgument(rule));
    }
    let (options, counted_as) = (options.clone(), name.to_owned());
    // Who takes what is said here decides whether `f` runs: never after the caller was told that it did not start. No
    // channel does it: those of the standard library wait by looking for a moment, in which a real-time thread keeps an
    // ordinary one from the CPU.
    let report = Arc::new((Mutex::new(Start::Awaited), Condvar::new()));
    let thread = {
        let (report, _blocked) = (report.clone(), SignalsBlocked::new()?);
        std::thread::Builder::new().name(name.into()).spawn(move || {
            let _counted = options.times.count(&counted_as);
            let placed = place(&options);
            let mut run = placed.is_ok();
            {
                let mut start = lock(&report.0);
                run &= matches!(*start, Start::Awaited);
                *start = Start::Known(placed);
            }
            report.1.notify_one();
            drop(report);
            if run {
                f();
            }
        })
    }
    .map_err(|e| HostError::os(format!("starting thread {name}"), e))?;
    let start = lock(&report.0);
    let awaited = |start: &mut Start| matches!(start, Start::Awaited);
    let start = report.1.wait_timeout_while(start, SETUP_LIMIT, awaited);
    let known = std::mem::replace(&mut *start.unwrap_or_else(PoisonError::into_inner).0, Start::GivenUp);
    match known {
        Start::Known(Ok(())) => Ok(thread),
        Start::Known(Err(e)) => {
            // It has nothing left to do; waiting keeps a failed start from leaving a thread behind.
            let _ = thread.join();
            Err(e)
        }
        Start::Awaited | Start::GivenUp => {
            Err(HostError::TimedOut { what: format!("starting thread {name}"), after: SETUP_LIMIT })
        }
    }
}

/// What a new thread and the one that starts it know of each other.
enum Start {
    Awaited,
    Known(Result<(), HostError>),
    GivenUp,
}

/// Blocks all signals in the calling thread until dropped.
struct SignalsBlocked {
    before: libc::sigset_t,
}

impl SignalsBlocked {
    fn new() -> Result<SignalsBlocked, HostError> {
        let mut all = MaybeUninit::<libc::sigset_t>::uninit();
        let mut before = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: both sets are ours; sigfillset and pthread_sigmask initialise them when they succeed.
        unsafe {
            libc::sigfillset(all.as_mut_ptr());
            match libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr()) {
                0 => Ok(SignalsBlocked { before: before.assume_init() }),
                error => Err(HostError::os("blocking signals", std::io::Error::from_raw_os_error(error))),
            }
        }
    }
}

impl Drop for SignalsBlocked {
    fn drop(&mut self) {
        // SAFETY: `before` was filled by the kernel; restoring a valid set cannot fail.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.before, std::ptr::null_mut()) };
    }
}

/// Puts the calling thread where `options` say.
fn place(options: &ThreadOptions) -> Result<(), HostError> {
    let node_cpus = options.numa_node.map(prefer_node).transpose()?;
    match (&options.cpus, node_cpus) {
        (Some(cpus), _) => run_on(cpus, true),
        (None, Some(cpus)) => run_on(&cpus, false),
        (None, None) => Ok(()),
    }
}

/// Runs the calling thread on `cpus`: on all of them if `strict`, else on those that are allowed.
fn run_on(cpus: &[usize], strict: bool) -> Result<(), HostError> {
    let allowed = allowed_cpus()?;
    let mut set = CpuSet::new();
    for &cpu in cpus {
        if cpu < CpuSet::MAX_CPU && allowed.is_set(cpu) {
            set.set(cpu);
        } else if strict {
            return Err(HostError::CpuNotAllowed { cpu, allowed: ranges(&allowed) });
        }
    }
    if set.count() == 0 {
        let why = format!("no CPU to run on: asked for {cpus:?}, allowed are {}", ranges(&allowed));
        return Err(HostError::InvalidArgument(why));
    }
    sched_setaffinity(None, &set)
        .map_err(|e| HostError::os(format!("moving a thread to CPUs {}", ranges(&set)), e))
}

/// The CPUs that the cpuset of this process allows. The affinity of the starting thread is not asked: a serving
/// engine pins its own threads, and that says nothing about ours. So ask for all, and see what was given.
fn allowed_cpus() -> Result<CpuSet, HostError> {
    let mut all = CpuSet::new();
    (0..CpuSet::MAX_CPU).for_each(|cpu| all.set(cpu));
    sched_setaffinity(None, &all)
        .and_then(|()| sched_getaffinity(None))
        .map_err(|e| HostError::os("reading the CPUs allowed to this process", e))
}

/// Prefers `node` for the memory of the calling thread, and gives the node's CPUs.
fn prefer_node(node: u32) -> Result<Vec<usize>, HostError> {
    let online = fs::read_to_string(format!("{NODES}/online")).unwrap_or_default();
    if !parse_ranges(&online).contains(&(node as usize)) {
        let online =
            if online.trim().is_empty() { "none that it names".into() } else { online.trim().into() };
        return Err(HostError::NodeUnknown { node, online });
    }
    const WORD: usize = libc::c_ulong::BITS as usize;
    let mut mask = [0 as libc::c_ulong; 1024 / WORD];
    if let Some(word) = mask.get_mut(node as usize / WORD) {
        *word = 1 << (node as usize % WORD);
    }
    // The kernel reads one bit less than it is told, an old habit.
    let bits = mask.len() * WORD + 1;
    // SAFETY: the mask is readable for the bits named, of which the kernel copies whole words only.
    let status = unsafe { libc::syscall(libc::SYS_set_mempolicy, libc::MPOL_PREFERRED, mask.as_ptr(), bits) };
    if status != 0 {
        return Err(HostError::last_os(format!("preferring memory of NUMA node {node}")));
    }
    let cpus = fs::read_to_string(format!("{NODES}/node{node}/cpulist"))
        .map_err(|e| HostError::os(format!("reading the CPUs of NUMA node {node}"), e))?;
    Ok(parse_ranges(&cpus))
}

/// Lets the calling thread run as soon as it wakes, before all threads of the ordinary class: the lowest real-time
/// priority, not inherited. For a thread that sleeps nearly always and must not be late, such as one that sends
/// heartbeats: on a machine whose cores all spin, an ordinary thread was seen to wait for more than 2 s.
///
/// # Errors
/// Where the process may not ask for it (no CAP_SYS_NICE, and `ulimit -r` is 0); the thread goes on as it was.
pub fn be_prompt() -> Result<(), HostError> {
    let lowest = libc::sched_param { sched_priority: 1 };
    // SAFETY: 0 is the calling thread, and the parameter outlives the call.
    match unsafe { libc::sched_setscheduler(0, libc::SCHED_RR | libc::SCHED_RESET_ON_FORK, &lowest) } {
        0 => Ok(()),
        _ => Err(HostError::last_os("asking for real-time priority (CAP_SYS_NICE, or ulimit -r above 0)")),
    }
}

/// The NUMA nodes that are online, e.g. `[0, 1]`; empty where the kernel has no NUMA.
pub fn numa_nodes() -> Vec<u32> {
    let online = fs::read_to_string(format!("{NODES}/online")).unwrap_or_default();
    parse_ranges(&online).into_iter().filter_map(|node| u32::try_from(node).ok()).collect()
}

/// Numbers of a list like `0-3,8`, of at most as many as the kernel counts.
fn parse_ranges(text: &str) -> Vec<usize> {
    let range = |part: &str| -> Option<std::ops::RangeInclusive<usize>> {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.trim().parse().ok()?..=last.trim().parse().ok().filter(|last| *last < 1 << 16)?)
    };
    text.split(',').filter_map(range).flatten().collect()
}

/// The list of a set, like `0-3,8`.
fn ranges(set: &CpuSet) -> String {
    let cpus: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect();
    let runs = cpus.chunk_by(|one, next| one + 1 == *next).map(|run| match run {
        [first, .., last] => format!("{first}-{last}"),
        one => one.iter().map(usize::to_string).collect(),
    });
    runs.collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_read_and_write() {
        assert_eq!(parse_ranges("0-3,8,10-11\n"), [0, 1, 2, 3, 8, 10, 11]);
        assert_eq!(parse_ranges(""), Vec::<usize>::new());
        assert_eq!(parse_ranges("0-99999999999"), Vec::<usize>::new());
        let mut set = CpuSet::new();
        [0, 1, 2, 5, 1023].into_iter().for_each(|cpu| set.set(cpu));
        assert_eq!(ranges(&set), "0-2,5,1023");
    }
}
