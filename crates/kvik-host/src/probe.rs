//! What works here, in words: each fact with what it means for kvik and what to do about it.
//!
//! A path that is rejected must be able to say why. These probes try the thing itself where that is possible
//! and read the kernel's own settings where it is not. They change nothing.

use std::fs;

use rustix::process::{Resource, getrlimit};

use crate::cuda::Cuda;
use crate::error::HostError;
use crate::huge_pages::{HugePageFacts, HugePages};
use crate::identity::{HostFacts, nonce};
use crate::memory::Memory;
use crate::process_vm::ProcessMemory;
use crate::thread::numa_nodes;

/// Inodes that the kernel gives to the namespaces it starts with.
const FIRST_PID_NAMESPACE: u64 = 0xEFFF_FFFC;
const FIRST_USER_NAMESPACE: u64 = 0xEFFF_FFFD;

/// One fact.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    /// What was looked at, in `snake_case`.
    pub name: &'static str,
    /// Whether it lets kvik do all it can.
    pub ok: bool,
    /// What was found.
    pub value: String,
    /// What that means, and what to do if it is not wanted.
    pub reason: String,
}

/// All facts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probes {
    /// In the order in which they are shown.
    pub all: Vec<Probe>,
}

impl Probes {
    /// Looks at everything. Takes milliseconds, and fails never: what cannot be found out is a fact too.
    pub fn run() -> Probes {
        let facts = HostFacts::read();
        let huge = HugePageFacts::read();
        let (pid, user) = (facts.as_ref().map(|f| f.pid_namespace), facts.as_ref().map(|f| f.user_namespace));
        let all = [
            ("process_vm_readv", process_vm()),
            ("yama_ptrace_scope", yama()),
            ("seccomp", seccomp()),
            ("memfd_sealing", memfd()),
            ("huge_page_pools", pools(&huge)),
            ("transparent_huge_pages", transparent(&huge)),
            ("memlock", memlock()),
            ("pid_namespace", namespace(pid, FIRST_PID_NAMESPACE)),
            ("user_namespace", namespace(user, FIRST_USER_NAMESPACE)),
            ("cgroup_memory", cgroup_memory()),
            ("numa", numa()),
            ("cuda", cuda()),
        ];
        let probe = |(name, (ok, value, reason))| Probe { name, ok, value, reason };
        Probes { all: all.into_iter().map(probe).collect() }
    }

    /// The fact of this name.
    pub fn get(&self, name: &str) -> Option<&Probe> {
        self.all.iter().find(|probe| probe.name == name)
    }
}

/// What a probe has found: `ok`, `value` and `reason` of its [`Probe`].
type Finding = (bool, String, String);

fn found(ok: bool, value: impl Into<String>, reason: impl Into<String>) -> Finding {
    (ok, value.into(), reason.into())
}

/// Reads a nonce of our own by the way that peers would use. It says whether the call exists and is not filtered;
/// whether another process may be read is for yama and the namespaces to say, and for a nonce of that process.
fn process_vm() -> Finding {
    let attempt = || -> Result<(), HostError> {
        let nonce = nonce()?;
        ProcessMemory::open(std::process::id())?.probe(nonce.as_ptr() as u64, &nonce)
    };
    match attempt() {
        Ok(()) => found(true, "works", "peers of one user may copy from memory they do not map"),
        Err(e) => found(false, "refused", format!("only memory allocated by kvik is shared: {e}")),
    }
}

fn yama() -> Finding {
    let path = "/proc/sys/kernel/yama/ptrace_scope";
    let Ok(text) = fs::read_to_string(path) else {
        return found(true, "absent", "the kernel sets no extra limit on reading processes of one user");
    };
    let scope = text.trim();
    match scope {
        "0" => found(true, scope, "processes of one user may read each other"),
        "1" => found(
            false,
            scope,
            "only children may be read; set kernel.yama.ptrace_scope=0 or allocate with kvik",
        ),
        _ => found(false, scope, "no process may be read; allocate with kvik to share memory on one host"),
    }
}

fn seccomp() -> Finding {
    let mode = status_field("Seccomp");
    let filters = status_field("Seccomp_filters");
    match mode.as_deref() {
        Some("0") => found(true, "off", "no system call is filtered"),
        Some("2") => {
            let count = filters.unwrap_or_else(|| "some".into());
            let reason =
                "system calls are filtered, as in most containers; process_vm_readv above says what is left";
            found(true, format!("{count} filter(s)"), reason)
        }
        other => found(false, other.unwrap_or("unknown"), "system calls may be missing"),
    }
}

fn memfd() -> Finding {
    match Memory::shared(rustix::param::page_size(), HugePages::Never) {
        Ok(_) => found(true, "works", "memory allocated by kvik can be mapped by peers on this host"),
        Err(e) => found(false, "refused", format!("no memory can be shared on this host: {e}")),
    }
}

fn pools(facts: &HugePageFacts) -> Finding {
    let pools: Vec<String> = facts
        .pools
        .iter()
        .map(|p| format!("{} KiB: {} of {} free", p.page_size >> 10, p.available, p.total))
        .collect();
    let some = facts.pools.iter().any(|p| p.available > 0);
    let reason = if some {
        "large shared memory takes pages from a pool that has room"
    } else {
        "no huge pages are set aside; set vm.nr_hugepages to give large shared memory fewer page faults"
    };
    found(some, if pools.is_empty() { "none".into() } else { pools.join(", ") }, reason)
}

fn transparent(facts: &HugePageFacts) -> Finding {
    let mode = |text: &str| if text.is_empty() { "absent".to_string() } else { text.to_string() };
    let value = format!("private {}, shared {}", mode(&facts.transparent), mode(&facts.transparent_shared));
    let ok = facts.shared_on_request();
    let reason = if ok {
        "shared memory asks for huge pages and gets them when the kernel finds some"
    } else {
        "shared memory gets no transparent huge pages; set transparent_hugepage/shmem_enabled to advise"
    };
    found(ok, value, reason)
}

fn memlock() -> Finding {
    match getrlimit(Resource::Memlock).current {
        None => found(true, "unlimited", "any amount of memory can be pinned for a network card"),
        Some(bytes) => {
            let reason =
                "memory pinned for a network card may not exceed this; raise ulimit -l if one is used";
            found(false, format!("{bytes} bytes"), reason)
        }
    }
}

fn namespace(inode: Result<u64, &HostError>, first: u64) -> Finding {
    match inode {
        Ok(inode) if inode == first => {
            found(true, "the machine's own", "shared with every process outside containers")
        }
        Ok(inode) => {
            let reason =
                "a container's: peers in another one are not read by process number, and may be refused";
            found(true, inode.to_string(), reason)
        }
        Err(e) => found(false, "unknown", e.to_string()),
    }
}

fn cgroup_memory() -> Finding {
    match memory_limit() {
        Some(bytes) => {
            let reason =
                "shared memory counts against this limit; the kernel kills a process that exceeds it";
            found(true, format!("{bytes} bytes"), reason)
        }
        None => found(true, "no limit", "memory is limited by the machine alone"),
    }
}

fn numa() -> Finding {
    let nodes = numa_nodes();
    let value = format!("{} node(s)", nodes.len().max(1));
    let reason = if nodes.len() > 1 {
        "give an engine the node of its memory and network card (numa_node)"
    } else {
        "memory is equally near to all CPUs"
    };
    found(true, value, reason)
}

/// Loads and initialises nothing: a probe must not take CUDA away from a child that is forked later.
fn cuda() -> Finding {
    if let Some(cuda) = Cuda::loaded() {
        let (major, minor) = cuda.version();
        let value = format!("{} device(s), CUDA {major}.{minor}", cuda.devices());
        return found(true, value, "this process uses GPUs: their memory can be registered");
    }
    match fs::read_to_string("/proc/driver/nvidia/version") {
        Ok(text) => {
            let version = text.split_whitespace().find(|word| word.starts_with(|c: char| c.is_ascii_digit()));
            let value = format!("driver {}", version.unwrap_or("of an unknown version"));
            found(true, value, "there are GPUs, which this process does not use so far")
        }
        Err(_) => found(true, "none", "no NVIDIA driver: only memory of the host can be registered"),
    }
}

/// The lowest memory limit of the control groups that hold this process.
fn memory_limit() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let limits = groups.lines().filter_map(|line| {
        let mut parts = line.splitn(3, ':');
        let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        match controllers {
            "" => lowest("/sys/fs/cgroup", path, "memory.max"),
            "memory" => lowest("/sys/fs/cgroup/memory", path, "memory.limit_in_bytes"),
            _ => None,
        }
    });
    limits.min()
}

/// The lowest number in `file` of the group at `path` and of those above it. The old kernel interface writes
/// "no limit" as the largest number of whole pages.
fn lowest(root: &str, path: &str, file: &str) -> Option<u64> {
    std::path::Path::new(path)
        .ancestors()
        .filter_map(|group| {
            let group = group.to_string_lossy();
            let text = fs::read_to_string(format!("{root}{}/{file}", group.trim_end_matches('/'))).ok()?;
            text.trim().parse::<u64>().ok().filter(|bytes| *bytes < 1 << 62)
        })
        .min()
}

fn status_field(name: &str) -> Option<String> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let value = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    Some(value.trim().to_string())
}
