//! The errors of this crate. A text says what happened and, where there is something to do, what.
//!
//! What each library says stands here too, so that [`HostError`] needs none of the modules that fail with it.

use std::io;
use std::time::Duration;

/// Why a library is not there, or cannot be used: a text that says where it was looked for and what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct LibraryError(pub String);

/// Why the CUDA driver refused something.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("CUDA: {what}: {text}")]
pub struct CudaError {
    /// What was asked of it.
    pub what: String,
    /// The number of the error, as in `cuda.h`; 0 where it is kvik that refuses.
    pub code: i32,
    /// The driver's name and words for it, what it means, and what to do where that is known.
    pub text: String,
}

/// Why libfabric refused something: its name for the error, and what was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("libfabric: {what}: {text}")]
pub struct FabricError {
    /// What was asked of it.
    pub what: &'static str,
    /// The number of the error, positive, as in `errno` or `fi_errno.h`.
    pub number: i32,
    /// The library's words for it.
    pub text: String,
}

/// Why libibverbs, or the kernel below it, refused something.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("libibverbs: {what}: {text}")]
pub struct VerbsError {
    /// What was asked, and of which device.
    pub what: String,
    /// The number of the error, as in `errno`; 0 where it is kvik that refuses.
    pub number: i32,
    /// What it means, and what to do where that is known.
    pub text: String,
}

/// Why a plug-in refused something, or what it said wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the plug-in {plugin}: {what}: {text}")]
pub struct PluginError {
    /// Its name.
    pub plugin: String,
    /// What was asked of it.
    pub what: &'static str,
    /// Its words, or what is wrong with them.
    pub text: String,
}

/// Why bytes are no address of a queue pair.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the peer's address of a queue pair cannot be used: {0}")]
pub struct AddressError(pub String);

/// What the machine refused, or what a peer gave that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HostError {
    /// A range that does not lie in the memory it names.
    #[error("range of {len} bytes at offset {offset} does not lie in memory of {size} bytes")]
    OutOfBounds {
        /// First byte asked for.
        offset: usize,
        /// Bytes asked for.
        len: usize,
        /// Bytes that there are.
        size: usize,
    },
    /// A write was asked of memory that was registered for reading only.
    #[error("memory was registered read-only; register a writable buffer to receive into it")]
    ReadOnlyMemory,
    /// An argument of the caller that no machine could serve.
    #[error("{0}")]
    InvalidArgument(String),
    /// Huge pages were demanded and cannot be had.
    #[error("no huge pages: {0}")]
    HugePagesUnavailable(String),
    /// A descriptor from a peer that is not a memfd.
    #[error("descriptor is not a memfd ({0}); a peer shares memory only by sealed memfd")]
    NotMemfd(String),
    /// A memfd that its owner can still change in a way that would hurt a reader.
    #[error("memfd has seals {have}, but {want} are needed; the peer must seal it before sharing it")]
    SealMissing {
        /// Names of the seals it has.
        have: String,
        /// Names of the seals it needs.
        want: String,
    },
    /// A memfd of another size than its owner said.
    #[error("memfd has {have} bytes where its owner said {want}")]
    SizeMismatch {
        /// Bytes that the file has.
        have: u64,
        /// Bytes that it must have.
        want: u64,
    },
    /// Memory of another process went away before or under a copy.
    #[error("process {pid} has no readable memory at {addr:#x}; its region was unmapped or was never there")]
    RemoteUnmapped {
        /// The process that was read.
        pid: u32,
        /// The first address that could not be read.
        addr: u64,
    },
    /// Another process has ended, so nothing read under its number counts.
    #[error("process {pid} has ended")]
    ProcessGone {
        /// The process that was addressed.
        pid: u32,
    },
    /// The kernel or kvik's own rule forbids reading another process.
    #[error("process {pid} cannot be read: {why}")]
    ProcessRefused {
        /// The process that was addressed.
        pid: u32,
        /// Why, and what would change it.
        why: String,
    },
    /// The process under this number is not the peer that gave the nonce.
    #[error("process {pid} does not hold the expected nonce: it is another process than the peer")]
    NonceMismatch {
        /// The process that was addressed.
        pid: u32,
    },
    /// A library of the host is not there, or cannot be used.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// The CUDA driver refused something.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// libfabric refused something.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// libibverbs refused something.
    #[error(transparent)]
    Verbs(#[from] VerbsError),
    /// A plug-in refused something, or broke its word.
    #[error(transparent)]
    Plugin(#[from] PluginError),
    /// What a peer gave is no address of a queue pair, or none that can be reached.
    #[error(transparent)]
    QueueAddress(#[from] AddressError),
    /// All slots of a fence table are in use.
    #[error("all {slots} fence slots are in use; end some grants, or make the table larger")]
    FenceFull {
        /// Slots in the table.
        slots: u32,
    },
    /// A slot that the table does not have.
    #[error("fence slot {slot} does not exist; the table has {slots}")]
    NoSuchSlot {
        /// The slot asked for.
        slot: u32,
        /// Slots in the table.
        slots: u32,
    },
    /// Something of the parent was used in a forked child.
    #[error("{what} belongs to the parent of this forked process; start a new engine in the child")]
    Forked {
        /// What was used.
        what: &'static str,
    },
    /// A message carried more descriptors than the receiver takes.
    #[error("message carried {got} descriptors where at most {max} are taken; all were closed")]
    TooManyDescriptors {
        /// Descriptors that came.
        got: usize,
        /// Descriptors that were allowed.
        max: usize,
    },
    /// The kernel had to drop descriptors or data of a message.
    #[error("message was truncated ({what}); what came of it was closed and refused")]
    MessageTruncated {
        /// Which part.
        what: &'static str,
    },
    /// A CPU that this process may not run on.
    #[error(
        "CPU {cpu} is not among those this process may use ({allowed}); check the cpus option or the cpuset"
    )]
    CpuNotAllowed {
        /// The CPU asked for.
        cpu: usize,
        /// The CPUs allowed, as a list of ranges.
        allowed: String,
    },
    /// A NUMA node that this machine does not have.
    #[error("NUMA node {node} is not online; this machine has node(s) {online}")]
    NodeUnknown {
        /// The node asked for.
        node: u32,
        /// The nodes there are, as a list of ranges.
        online: String,
    },
    /// The other end of a connection is gone.
    #[error("{what}: the other end closed the connection ({source})")]
    Disconnected {
        /// What was being done.
        what: String,
        /// The kernel's word.
        source: io::Error,
    },
    /// A wait reached its bound.
    #[error("{what}: nothing within {after:?}")]
    TimedOut {
        /// What was waited for.
        what: String,
        /// How long.
        after: Duration,
    },
    /// Any other refusal of the kernel.
    #[error("{what}: {source}")]
    Os {
        /// What was being done, and what to do about it where that is known.
        what: String,
        /// The kernel's word.
        source: io::Error,
    },
}

impl HostError {
    /// Whether a device is lost to this process, with what lay in its memory: nothing of it is in flight any more.
    pub fn is_device_lost(&self) -> bool {
        matches!(self, HostError::Cuda(error) if error.is_lost())
    }

    /// A refusal of the kernel, with what was being done.
    pub(crate) fn os(what: impl Into<String>, source: impl Into<io::Error>) -> Self {
        HostError::Os { what: what.into(), source: source.into() }
    }

    /// The error of the last failed libc call.
    pub(crate) fn last_os(what: impl Into<String>) -> Self {
        HostError::os(what, io::Error::last_os_error())
    }

    /// A failure on a connection: a lost peer is told apart from everything else.
    pub(crate) fn connection(what: impl Into<String>, source: impl Into<io::Error>) -> Self {
        let (what, source) = (what.into(), source.into());
        match source.raw_os_error() {
            Some(libc::EPIPE | libc::ECONNRESET | libc::ECONNABORTED | libc::ENOTCONN | libc::ETIMEDOUT) => {
                HostError::Disconnected { what, source }
            }
            _ => HostError::Os { what, source },
        }
    }
}
