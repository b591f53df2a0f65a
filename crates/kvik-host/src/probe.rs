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
        Probes {
            all: vec![
                process_vm(),
                yama(),
                seccomp(),
                memfd(),
                pools(&huge),
                transparent(&huge),
                memlock(),
                namespace("pid_namespace", facts.as_ref().map(|f| f.pid_namespace), FIRST_PID_NAMESPACE),
                namespace("user_namespace", facts.as_ref().map(|f| f.user_namespace), FIRST_USER_NAMESPACE),
                cgroup_memory(),
                numa(),
                cuda(),
            ],
        }
    }

    /// The fact of this name.
    pub fn get(&self, name: &str) -> Option<&Probe> {
        self.all.iter().find(|probe| probe.name == name)
    }
}

fn probe(name: &'static str, ok: bool, value: impl Into<String>, reason: impl Into<String>) -> Probe {
    Probe { name, ok, value: value.into(), reason: reason.into() }
}

/// Reads a nonce of our own by the way that peers would use. It says whether the call exists and is not filtered;
/// whether another process may be read is for yama and the namespaces to say, and for a nonce of that process.
fn process_vm() -> Probe {
    let attempt = || -> Result<(), HostError> {
        let nonce = nonce()?;
        ProcessMemory::open(std::process::id())?.probe(nonce.as_ptr() as u64, &nonce)
    };
    match attempt() {
        Ok(()) => {
            probe("process_vm_readv", true, "works", "peers of one user may copy from memory they do not map")
        }
        Err(e) => probe(
            "process_vm_readv",
            false,
            "refused",
            format!("only memory allocated by kvik is shared: {e}"),
        ),
    }
}

fn yama() -> Probe {
    let name = "yama_ptrace_scope";
    let path = "/proc/sys/kernel/yama/ptrace_scope";
    let Ok(text) = fs::read_to_string(path) else {
        return probe(
            name,
            true,
            "absent",
            "the kernel sets no extra limit on reading processes of one user",
        );
    };
    let scope = text.trim();
    match scope {
        "0" => probe(name, true, scope, "processes of one user may read each other"),
        "1" => probe(
            name,
            false,
            scope,
            "only children may be read; set kernel.yama.ptrace_scope=0 or allocate with kvik",
        ),
        _ => probe(
            name,
            false,
            scope,
            "no process may be read; allocate with kvik to share memory on one host",
        ),
    }
}

fn seccomp() -> Probe {
    let mode = status_field("Seccomp");
    let filters = status_field("Seccomp_filters");
    match mode.as_deref() {
        Some("0") => probe("seccomp", true, "off", "no system call is filtered"),
        Some("2") => {
            let count = filters.unwrap_or_else(|| "some".into());
            let reason =
                "system calls are filtered, as in most containers; process_vm_readv above says what is left";
            probe("seccomp", true, format!("{count} filter(s)"), reason)
        }
        other => probe("seccomp", false, other.unwrap_or("unknown"), "system calls may be missing"),
    }
}

fn memfd() -> Probe {
    match Memory::shared(rustix::param::page_size(), HugePages::Never) {
        Ok(_) => probe(
            "memfd_sealing",
            true,
            "works",
            "memory allocated by kvik can be mapped by peers on this host",
        ),
        Err(e) => {
            probe("memfd_sealing", false, "refused", format!("no memory can be shared on this host: {e}"))
        }
    }
}

fn pools(facts: &HugePageFacts) -> Probe {
    let found: Vec<String> = facts
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
    probe("huge_page_pools", some, if found.is_empty() { "none".into() } else { found.join(", ") }, reason)
}

fn transparent(facts: &HugePageFacts) -> Probe {
    let mode = |text: &str| if text.is_empty() { "absent".to_string() } else { text.to_string() };
    let value = format!("private {}, shared {}", mode(&facts.transparent), mode(&facts.transparent_shared));
    let ok = facts.shared_on_request();
    let reason = if ok {
        "shared memory asks for huge pages and gets them when the kernel finds some"
    } else {
        "shared memory gets no transparent huge pages; set transparent_hugepage/shmem_enabled to advise"
    };
    probe("transparent_huge_pages", ok, value, reason)
}

fn memlock() -> Probe {
    match getrlimit(Resource::Memlock).current {
        None => probe("memlock", true, "unlimited", "any amount of memory can be pinned for a network card"),
        Some(bytes) => {
            let reason =
                "memory pinned for a network card may not exceed this; raise ulimit -l if one is used";
            probe("memlock", false, format!("{bytes} bytes"), reason)
        }
    }
}

fn namespace(name: &'static str, inode: Result<u64, &HostError>, first: u64) -> Probe {
    match inode {
        Ok(inode) if inode == first => {
            probe(name, true, "the machine's own", "shared with every process outside containers")
        }
        Ok(inode) => {
            let reason =
                "a container's: peers in another one are not read by process number, and may be refused";
            probe(name, true, inode.to_string(), reason)
        }
        Err(e) => probe(name, false, "unknown", e.to_string()),
    }
}

fn cgroup_memory() -> Probe {
    match memory_limit() {
        Some(bytes) => {
            let reason =
                "shared memory counts against this limit; the kernel kills a process that exceeds it";
            probe("cgroup_memory", true, format!("{bytes} bytes"), reason)
        }
        None => probe("cgroup_memory", true, "no limit", "memory is limited by the machine alone"),
    }
}

fn numa() -> Probe {
    let nodes = numa_nodes();
    let value = format!("{} node(s)", nodes.len().max(1));
    let reason = if nodes.len() > 1 {
        "give an engine the node of its memory and network card (numa_node)"
    } else {
        "memory is equally near to all CPUs"
    };
    probe("numa", true, value, reason)
}

/// Loads and initialises nothing: a probe must not take CUDA away from a child that is forked later.
fn cuda() -> Probe {
    let name = "cuda";
    if let Some(cuda) = Cuda::loaded() {
        let (major, minor) = cuda.version();
        let value = format!("{} device(s), CUDA {major}.{minor}", cuda.devices());
        return probe(name, true, value, "this process uses GPUs: their memory can be registered");
    }
    match fs::read_to_string("/proc/driver/nvidia/version") {
        Ok(text) => {
            let version = text.split_whitespace().find(|word| word.starts_with(|c: char| c.is_ascii_digit()));
            let value = format!("driver {}", version.unwrap_or("of an unknown version"));
            probe(name, true, value, "there are GPUs, which this process does not use so far")
        }
        Err(_) => probe(name, true, "none", "no NVIDIA driver: only memory of the host can be registered"),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_probe_says_something() {
        let probes = Probes::run();
        for (i, probe) in probes.all.iter().enumerate() {
            assert!(!probe.value.is_empty() && !probe.reason.is_empty(), "{probe:?}");
            assert!(probes.all[..i].iter().all(|earlier| earlier.name != probe.name), "{probe:?}");
        }
        assert!(probes.get("memfd_sealing").unwrap().ok, "{:?}", probes.get("memfd_sealing"));
        assert!(probes.get("no_such_probe").is_none());
        assert!(probes.get("cuda").unwrap().ok, "{:?}", probes.get("cuda"));
    }
}
