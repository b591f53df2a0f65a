//! `kvik.Engine`.

use crate::args::{self, Ends, Natural, Seconds, maybe_seconds, seconds};
use crate::buffers;
use crate::content::PyContent;
use crate::errors::OrRaise;
use crate::events::{self, PyEvents};
use crate::fork::Owned;
use crate::gpus;
use crate::grant::PyGrant;
use crate::joint::{self, PyJointRead, PyRead};
use crate::kept::{self, Kept};
use crate::layout::PyLayout;
use crate::notice::{self, PyNotice};
use crate::options as configured;
use crate::process;
use crate::region::{PyPageSet, PyRegion};
use crate::requests::{self, Part, common, options, refuse};
use crate::ticket::PyTicket;
use crate::transfer::{self, PyTransfer};
use crate::warm_up::{self, PyWarmUp};
use kvik_core::{GrantId, Right};
use kvik_engine::{Engine, Grant, GrantOptions, TransferOptions};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyType};

/// The part of kvik in this process: it owns the transports, the peers and a few threads. One is enough.
///
/// listen: where peers reach it: "HOST:PORT" or a list of them, "[::1]:0" for IPv6; port 0 takes a free one.
/// advertise: hosts or "HOST:PORT" to put into tickets, when peers see other addresses than it listens on.
/// secret: str or bytes that all engines share. This or `tls` is demanded (SecretRequired) when an address is not
///     loopback. Never logged.
/// tls: a directory with tls.crt, tls.key and ca.crt, in PEM: every TCP connection is then under TLS, and both sides
///     present a certificate that chains to ca.crt.
/// transport: "auto" (the best that reaches the peer), "tcp", "local" (same host) or "nics" (see nics). What is asked
///     for is used, or the transfer fails: nothing is substituted.
/// verify: "auto" (page checksums on tcp, of a sample of the pages over NICs, none on local), "off", "sample" or
///     "full".
/// channels: TCP connections to a peer: 4 keep a fast network busy where one connection does not.
/// io_threads: threads that move data.
/// deadline: seconds that a transfer may take when it says nothing else. There is no "for ever".
/// memory_cap: bytes, or text such as "256MiB", that kvik may hold for itself; beyond it MemoryCapReached.
/// window: bytes, or text, that one peer's channels may have in flight to send, so that a peer that takes nothing
///     holds no more.
/// nics: the NICs that move pages one-sidedly ("verbs", "efa", "libfabric:PROVIDER", "plugin", with ":DEVICE,..."
///     for some); None for none.
/// nic_library: the file of the library that speaks to them, where the usual places are not meant.
/// nic_threads: threads that drive the NICs, which are divided evenly among them; no more than there are NICs.
/// cpus, numa_node: CPU numbers, or a node's number, for kvik's threads; left out they go where the kernel
///     puts them.
/// name: for logs.
///
/// What is not given, or None, is taken from its variable (KVIK_CHANNELS), else from the configuration file
/// (the one that KVIK_CONFIG names, or ~/.config/kvik/config.toml), else it is the default. `kvik config engine`
/// shows what counts.
///
/// Raises InvalidArgument (also for an unknown option, variable or key of the file, with a suggestion),
/// UnknownTransport, SecretRequired, TransportUnavailable. A forked child cannot use it: everything raises EngineForked
/// there, and the parent's engine goes on untouched.
#[pyclass(name = "Engine", module = "kvik", frozen, weakref)]
pub struct PyEngine(pub(crate) Owned<Engine>, pub(crate) Owned<Kept>);

#[pymethods]
impl PyEngine {
    #[new]
    #[pyo3(signature = (listen=None, **given),
           text_signature = "(listen='127.0.0.1:0', *, advertise=None, secret=None, tls=None, transport='auto', \
                             verify='auto', channels=4, io_threads=2, deadline=30.0, memory_cap='256MiB', window='32MiB', \
                             nics=None, nic_library=None, nic_threads=4, cpus=None, numa_node=None, name='')")]
    fn new(
        py: Python<'_>,
        listen: Option<&Bound<'_, PyAny>>,
        given: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<PyEngine> {
        let config = configured::config(py, listen, given)?;
        // Before the engine, so that what it logs at its start is delivered.
        py.import("kvik._logs")?.call_method0("start")?;
        let engine = py.detach(|| kept::started(config)).or_raise(py)?;
        process::current().opened(&engine);
        Ok(PyEngine(Owned::new(engine), Owned::new(Kept::default())))
    }

    /// 32 hexadecimal digits. An engine that is started again at the same addresses of this host keeps them.
    #[getter]
    fn id(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.0.get(py)?.id().to_string())
    }

    /// The number of this start of the engine.
    #[getter]
    fn incarnation(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.0.get(py)?.incarnation().0)
    }

    /// Where it listens, as "HOST:PORT", with the ports that were chosen for 0.
    #[getter]
    fn addresses(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        Ok(self.0.get(py)?.addresses().iter().map(ToString::to_string).collect())
    }

    /// The name given for logs.
    #[getter]
    fn name(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.0.get(py)?.name().to_owned())
    }

    /// Whether it was closed.
    #[getter]
    fn closed(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.0.get(py)?.is_closed())
    }

    /// Register memory, so that transfers can use it.
    ///
    /// obj: one of
    ///     - anything with a C-contiguous buffer (bytearray, memoryview, NumPy array, array). While it is
    ///       registered Python refuses to resize or release it (BufferError). A read-only one (bytes) can
    ///       only be the source of transfers.
    ///     - a contiguous torch tensor, on the CPU or on a CUDA device. kvik holds the tensor; don't resize its
    ///       storage.
    ///     - anything C-contiguous with `__cuda_array_interface__`, of version 2 or 3 (CuPy, Numba). kvik holds
    ///       the object. A stream that the interface names is waited for here, up to 30 s.
    ///     - (address, nbytes), of the host or of a CUDA device. The caller promises that the memory stays mapped,
    ///       readable and writable until the region, or the engine, has been closed.
    ///
    /// Of a GPU: kvik copies by streams of its own, which wait for nobody's kernels unless they are told: give grants and
    /// transfers the stream of the kernels that still use the pages (`after=torch.cuda.current_stream()`). Once a
    /// transfer is done, whatever is launched afterwards sees its bytes. Registration itself waits for nothing but
    /// a stream that the interface names. Such pages move over tcp and within an engine by way of page-locked memory,
    /// and over `verbs` and libfabric by dma-bufs where GPU and NIC have them.
    ///
    /// Raises BufferInvalid for a zero length, memory that is not contiguous, an address that CUDA does not know
    /// (freed, or of another context), and a device of another maker; DeviceFailed for what the driver refuses;
    /// TypeError for an object without memory; EngineClosed.
    fn register<'py>(slf: &Bound<'py, Self>, obj: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyRegion>> {
        let py = slf.py();
        let engine = slf.get().0.get(py)?;
        let source = buffers::source(obj)?;
        let memory = source.memory;
        let region = py.detach(|| engine.register(memory));
        // A refused registration has let go of the buffer.
        process::current().inbox.give_up_held(py);
        let region = PyRegion::new(region.or_raise(py)?, slf.clone().into_any().unbind(), source.writable);
        let region = Bound::new(py, region)?;
        slf.get().1.get(py)?.keep_region(&region)?;
        Ok(region)
    }

    /// Allocate zeroed memory that engines on this host can map, so that a read of it takes one copy.
    ///
    /// nbytes: int, or text such as "1GiB". `memoryview(region)` and `numpy.frombuffer(region, dtype)` view
    /// it; while a view lives the region cannot be closed. It does not count against `memory_cap`, which is
    /// for what kvik itself holds.
    fn allocate(slf: &Bound<'_, Self>, nbytes: &Bound<'_, PyAny>) -> PyResult<PyRegion> {
        let py = slf.py();
        let (engine, bytes) = (slf.get().0.get(py)?, args::size("nbytes", nbytes)?);
        let region = py.detach(|| engine.allocate(bytes)).or_raise(py)?;
        Ok(PyRegion::new(region, slf.clone().into_any().unbind(), true))
    }

    /// Permit peers to use pages; its `ticket` is what they need.
    ///
    /// right: "read" or "write". "write" takes writable memory.
    /// use: how many engines may confirm before the grant is consumed, or "many": until it expires. The
    ///     default, 1, is a handover: one reader, which may retry or read in parts until it confirms, or as
    ///     many as the readers themselves declare (`readers` of `Engine.read`).
    /// expiry, max_expiry: seconds it lives, and the most that extensions can make of it. 120 s outlasts a
    ///     queue in front of the reader; a grant that nobody used must not hold its pages for ever.
    /// content: what the pages hold, with one link for each of them; None: nothing is said of it, and nothing compared.
    ///     A grant with content serves only who states the same, whatever the ticket says: ContentMismatch and
    ///     ContentRequired tell others.
    /// grant_id: 32 hexadecimal digits, to issue a grant that a ticket made by `ticket_template` already names.
    /// after: a stream of the GPU that the pages lie on, as of `Engine.read`: who asks for them waits, within its
    ///     deadline, until the stream has done what it was given up to this call. If that fails, the grant is revoked.
    /// tag: a request id for this engine's log lines (`kvik_request`); it is never sent.
    ///
    /// Raises InvalidArgument for an option that cannot be, or content that has not one link for each page (which are
    /// whole pages then), BufferInvalid for a write grant on read-only memory, RegionClosed, EngineClosed.
    #[pyo3(signature = (pages, *, right="read", r#use=None, expiry=Seconds::of(120.0),
                        max_expiry=Seconds::of(600.0), content=None, grant_id=None, after=None, tag=""),
           text_signature = "($self, pages, *, right='read', use=1, expiry=120.0, max_expiry=600.0, \
                             content=None, grant_id=None, after=None, tag='')")]
    #[expect(clippy::too_many_arguments, reason = "they are Python's keyword arguments")]
    fn grant(
        &self,
        py: Python<'_>,
        pages: &Bound<'_, PyPageSet>,
        right: &str,
        r#use: Option<&Bound<'_, PyAny>>,
        expiry: Seconds,
        max_expiry: Seconds,
        content: Option<&Bound<'_, PyContent>>,
        grant_id: Option<&str>,
        after: Option<&Bound<'_, PyAny>>,
        tag: &str,
    ) -> PyResult<PyGrant> {
        let (engine, set) = (self.0.get(py)?, pages.get().pages.get(py)?);
        let options = GrantOptions {
            right: args::right(py, right)?,
            uses: r#use.map_or(Ok(kvik_core::Use::Once(1)), args::uses)?,
            expiry: seconds(py, "expiry", expiry)?,
            max_expiry: seconds(py, "max_expiry", max_expiry)?,
            content: crate::content::content(content),
            id: grant_id.map(GrantId::from_hex).transpose().or_raise(py)?,
            after: gpus::stream(after)?,
            tag: tag.to_owned(),
        };
        if options.right == Right::Write {
            pages.get().region.get().check_writable(py, "the holder of a write grant")?;
        }
        // The ticket may outlive the Python objects that it was made from.
        let grant = py.detach(|| engine.grant(set, options).inspect(Grant::keep_region)).or_raise(py)?;
        process::current().inbox.give_up_held(py);
        Ok(PyGrant::new(grant, pages.clone().unbind()))
    }

    /// A ticket without a grant, for a process that composes tickets for this engine with
    /// `Ticket.with_grant`.
    ///
    /// A read that names a grant which the owner has not issued yet waits for it within its deadline.
    fn ticket_template(&self, py: Python<'_>, layout: &Bound<'_, PyLayout>) -> PyResult<PyTicket> {
        self.0.get(py)?.ticket_template(&layout.get().0).or_raise(py).map(PyTicket)
    }

    /// Read granted pages into `local`. Returns at once; the Transfer tells the end.
    ///
    /// ticket: Ticket or its text, of a read grant.
    /// positions: None for all pages of the grant in its order, or which of them, by their place in that order: a
    ///     range, (start, stop) with stop excluded, or an array or list of integers. Of a grant with content they are
    ///     one contiguous range.
    /// remote_layers, remote_slices: None for all that the grant covers, or (start, stop) of the owner's
    ///     layout with stop excluded, inside the grant: the KV heads of one of several readers, for example.
    /// remote_parts: in how many parts the owner's pages are seen, as `parts` of `Region.pages`: positions then count
    ///     parts, part j of the grant's p-th page at p * parts + j. None: as the grant was given.
    /// content: what this engine takes the grant's pages to hold, from what it knows itself and not from who gave it
    ///     the ticket; for a grant with content, and no other. A link for each page of the grant, at least up to the
    ///     last of `positions`; without positions exactly those of the grant. The owner compares it before anything
    ///     moves.
    /// traffic_class: "handover", which a request waits for, or "bulk": copies of a store, prefetches. Handovers go
    ///     first; bulk takes what they leave, and keeps a tenth of the bytes while both wait.
    /// deadline: seconds after which it is ended with DeadlineExceeded; None for the engine's.
    /// transport, verify: as for Engine, for this transfer; None for the engine's. A transport is never
    ///     replaced silently.
    /// confirm: whether success counts as this engine's use of the grant: False for all but the last part of
    ///     a read in parts. Of a grant with content a part that ends before the last page is no use of it.
    /// readers: how many engines read the grant together, this one included (1 to 4096). It is consumed when
    ///     so many have confirmed, or as many as its `use` says where that is more. The largest number that
    ///     any of them declares is what counts: where they disagree, or one of them dies, the grant ends by
    ///     its expiry and not before.
    /// after: a stream of the GPU that `local` lies on: nothing of it is read or written before the stream has done
    ///     what it was given up to this call, and who calls waits for nothing. A torch stream or an object with
    ///     `__cuda_stream__`, or the driver's handle (0: the default stream). None: the pages are free. In host memory it is
    ///     an error.
    /// tag: a request id for this engine's log lines (`kvik_request`); it is never sent.
    ///
    /// Pages of unequal size go as one stream of bytes, layer by layer. Those of several slices are named in
    /// parts that are as large here as there: anything else is a ShapeMismatch.
    ///
    /// Raises at once TicketInvalid, TicketVersion, PageOutOfRange, DuplicatePage (a page of `local` twice),
    /// BufferInvalid (`local` is read-only), UnknownTransport, InvalidArgument, EngineClosed. Everything that
    /// the owner or the network says comes with the end: GrantUnknown, GrantExpired, GrantConsumed,
    /// GrantRevoked, GrantWrongRight, ContentMismatch, ContentRequired, PageNotGranted, ShapeMismatch, TicketForeign,
    /// PeerRestarted, PeerUnreachable, PeerLost, SecretMismatch, ChecksumMismatch, DeadlineExceeded, ...
    #[pyo3(signature = (local, ticket, positions=None, *, traffic_class="handover", deadline=None, transport=None,
                        verify=None, confirm=true, remote_layers=None, remote_slices=None, remote_parts=None,
                        readers=Natural::of(1), content=None, after=None, tag="", **other),
           text_signature = "($self, local, ticket, positions=None, *, traffic_class='handover', deadline=None, \
                             transport=None, \
                             verify=None, confirm=True, remote_layers=None, remote_slices=None, \
                             remote_parts=None, readers=1, content=None, after=None, tag='')")]
    #[expect(clippy::too_many_arguments, reason = "they are Python's keyword arguments")]
    fn read(
        slf: &Bound<'_, Self>,
        local: &Bound<'_, PyPageSet>,
        ticket: &Bound<'_, PyAny>,
        positions: Option<&Bound<'_, PyAny>>,
        traffic_class: &str,
        deadline: Option<Seconds>,
        transport: Option<&str>,
        verify: Option<&str>,
        confirm: bool,
        remote_layers: Option<Ends>,
        remote_slices: Option<Ends>,
        remote_parts: Option<Natural>,
        readers: Natural,
        content: Option<&Bound<'_, PyContent>>,
        after: Option<&Bound<'_, PyAny>>,
        tag: &str,
        other: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<PyTransfer> {
        refuse(other)?;
        let part = Part { layers: remote_layers, slices: remote_slices, parts: remote_parts };
        let (class, after) = (args::class(slf.py(), traffic_class)?, gpus::stream(after)?);
        let common = common(slf.py(), deadline, readers, content, tag)?;
        let common = TransferOptions { class, after, ..common };
        let options = options(slf.py(), common, transport, verify, confirm, part)?;
        local.get().region.get().check_writable(slf.py(), "a read")?;
        transfer::begin(slf.get().0.get(slf.py())?, slf, Engine::read, local, ticket, positions, options)
    }

    /// Read from several grants, of one owner or many, as one. Returns at once; the JointRead tells the end.
    ///
    /// reads: Read objects; no page of this side is in two of them, which is not looked for. None at all is done at
    ///     once.
    /// traffic_class, transport, verify, after, tag: as for `read`, for all of them.
    /// deadline: seconds after which all are ended; None for the engine's.
    ///
    /// It succeeds when all reads have. The first that fails ends the others, and its error is that of the whole: its
    /// `read` says which it was, its `peer` whose pages. When it has ended, in whatever way, none of them touches this
    /// side's memory. A read that succeeds confirms its own grant, also where another one fails.
    ///
    /// Raises what `read` raises at once, about the first read that is refused: then none has begun.
    #[pyo3(signature = (reads, *, traffic_class="handover", deadline=None, transport=None, verify=None, after=None,
                        tag=""))]
    #[expect(clippy::too_many_arguments, reason = "they are Python's keyword arguments")]
    fn read_all(
        slf: &Bound<'_, Self>,
        reads: Vec<Py<PyRead>>,
        traffic_class: &str,
        deadline: Option<Seconds>,
        transport: Option<&str>,
        verify: Option<&str>,
        after: Option<&Bound<'_, PyAny>>,
        tag: &str,
    ) -> PyResult<PyJointRead> {
        let py = slf.py();
        let common = TransferOptions {
            class: args::class(py, traffic_class)?,
            transport: transport.map(str::parse).transpose().or_raise(py)?,
            verify: verify.map(str::parse).transpose().or_raise(py)?,
            after: gpus::stream(after)?,
            tag: tag.to_owned(),
            ..TransferOptions::default()
        };
        joint::begin(slf.get().0.get(py)?, slf, reads, &common, maybe_seconds(py, "deadline", deadline)?)
    }

    /// Write `local` into granted pages. As `read`, with a ticket of a write grant; `local` may be read-only.
    ///
    /// Success means that the bytes are in the owner's memory and were checked there.
    #[pyo3(signature = (local, ticket, positions=None, *, traffic_class="handover", deadline=None, transport=None,
                        verify=None, confirm=true, remote_layers=None, remote_slices=None, remote_parts=None,
                        readers=Natural::of(1), content=None, after=None, tag="", **other),
           text_signature = "($self, local, ticket, positions=None, *, traffic_class='handover', deadline=None, \
                             transport=None, \
                             verify=None, confirm=True, remote_layers=None, remote_slices=None, \
                             remote_parts=None, readers=1, content=None, after=None, tag='')")]
    #[expect(clippy::too_many_arguments, reason = "they are Python's keyword arguments")]
    fn write(
        slf: &Bound<'_, Self>,
        local: &Bound<'_, PyPageSet>,
        ticket: &Bound<'_, PyAny>,
        positions: Option<&Bound<'_, PyAny>>,
        traffic_class: &str,
        deadline: Option<Seconds>,
        transport: Option<&str>,
        verify: Option<&str>,
        confirm: bool,
        remote_layers: Option<Ends>,
        remote_slices: Option<Ends>,
        remote_parts: Option<Natural>,
        readers: Natural,
        content: Option<&Bound<'_, PyContent>>,
        after: Option<&Bound<'_, PyAny>>,
        tag: &str,
        other: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<PyTransfer> {
        refuse(other)?;
        let part = Part { layers: remote_layers, slices: remote_slices, parts: remote_parts };
        let (class, after) = (args::class(slf.py(), traffic_class)?, gpus::stream(after)?);
        let common = common(slf.py(), deadline, readers, content, tag)?;
        let common = TransferOptions { class, after, ..common };
        let options = options(slf.py(), common, transport, verify, confirm, part)?;
        transfer::begin(slf.get().0.get(slf.py())?, slf, Engine::write, local, ticket, positions, options)
    }

    /// Confirm this engine's use of a grant without moving anything, so that its owner has the pages back
    /// early.
    ///
    /// content: what this engine takes the whole grant to hold, for a grant with content: a prompt that only shares a
    ///     prefix with it releases nothing.
    /// readers, tag: as for `read`. A release that declares one reader ends a grant for one, unless another
    ///     engine has declared more.
    #[pyo3(signature = (ticket, *, deadline=None, readers=Natural::of(1), content=None, tag=""),
           text_signature = "($self, ticket, *, deadline=None, readers=1, content=None, tag='')")]
    fn release(
        slf: &Bound<'_, Self>,
        ticket: &Bound<'_, PyAny>,
        deadline: Option<Seconds>,
        readers: Natural,
        content: Option<&Bound<'_, PyContent>>,
        tag: &str,
    ) -> PyResult<PyTransfer> {
        let py = slf.py();
        let (engine, ticket) = (slf.get().0.get(py)?, crate::ticket::ticket(ticket)?);
        let options = common(py, deadline, readers, content, tag)?;
        let transfer = py.detach(|| engine.release(&ticket, options)).or_raise(py)?;
        Ok(PyTransfer::new(transfer, slf.clone().into_any().unbind(), None))
    }

    /// Ask the owner of a grant to let it live `seconds` longer; it gives up to the grant's `max_expiry`.
    ///
    /// content: as for `release`. tag: as for `read`.
    #[pyo3(signature = (ticket, seconds, *, deadline=None, content=None, tag=""),
           text_signature = "($self, ticket, seconds, *, deadline=None, content=None, tag='')")]
    fn extend(
        slf: &Bound<'_, Self>,
        ticket: &Bound<'_, PyAny>,
        seconds: Seconds,
        deadline: Option<Seconds>,
        content: Option<&Bound<'_, PyContent>>,
        tag: &str,
    ) -> PyResult<PyTransfer> {
        let py = slf.py();
        let (engine, ticket) = (slf.get().0.get(py)?, crate::ticket::ticket(ticket)?);
        let (by, options) =
            (args::seconds(py, "seconds", seconds)?, common(py, deadline, Natural::of(1), content, tag)?);
        let transfer = py.detach(|| engine.extend(&ticket, by, options)).or_raise(py)?;
        Ok(PyTransfer::new(transfer, slf.clone().into_any().unbind(), None))
    }

    /// How a transfer with this ticket would go.
    ///
    /// A dict: "transport" and "mechanism" it would take, "estimate" (an `Estimate` of the smallest transfer, or None
    /// where nothing was measured), "rejected_transports" (every other transport, each "transport: reason") and "probes" (what was tried on this machine: dicts of "name", "works", "reason",
    /// "detail").
    fn explain<'py>(&self, py: Python<'py>, ticket: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyDict>> {
        let (engine, ticket) = (self.0.get(py)?, crate::ticket::ticket(ticket)?);
        let found = py.detach(|| engine.explain(&ticket)).or_raise(py)?;
        requests::explained(py, found)
    }

    /// How long `nbytes` with a peer would take from now: an `Estimate`, or None where that is unknown.
    ///
    /// peer: any ticket of it, or its text, of which only the owner counts; or its id.
    /// nbytes: int, or text such as "1GiB".
    ///
    /// From what this engine's transfers on the present connection have measured over the transport that it would take,
    /// and with what open transfers with that peer have still to move: no network traffic. None where there is no
    /// connection, or no transfer of this engine has ended well on it, and for the engine itself. What the
    /// peer moves with others is not known here. Raises InvalidArgument, TicketInvalid, EngineClosed.
    fn estimate<'py>(
        &self,
        py: Python<'py>,
        peer: &Bound<'py, PyAny>,
        nbytes: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let (engine, peer, bytes) = (self.0.get(py)?, notice::whom(peer)?, args::size("nbytes", nbytes)?);
        requests::estimated(py, py.detach(|| engine.estimate(peer, bytes)).or_raise(py)?)
    }

    /// Open all that the first transfer with a peer would wait for, so that no request pays for it.
    ///
    /// ticket: any ticket of the peer, or its text: one of `ticket_template`, or one whose grant has ended, does as
    ///     well. No page is touched, and no grant is used.
    /// timeout: seconds until it has ended; None for the engine's deadline.
    ///
    /// Returns a WarmUp at once: `wait()` for it, or `await` it. It opens the connection, and of what this engine's
    /// `transport` allows the data channels, the local link and the connection of each NIC here to its NIC there. What
    /// is open is left as it is. A NIC that cannot be warmed is in the report's `failed`; the others are warm all the
    /// same. Raises InvalidArgument; `wait()` PeerUnreachable, PeerRestarted, TransportUnavailable, DeadlineExceeded.
    #[pyo3(signature = (ticket, *, timeout=None))]
    fn warm_up(
        &self,
        py: Python<'_>,
        ticket: &Bound<'_, PyAny>,
        timeout: Option<Seconds>,
    ) -> PyResult<PyWarmUp> {
        warm_up::warm_up(py, self.0.get(py)?, ticket, timeout)
    }

    /// Connect to whoever listens at an address, such as "store.example:7000", and say who it is: a `Peer`.
    ///
    /// address: HOST:PORT, an IPv6 address in brackets. A name may have several addresses, which are tried one after
    ///     the other.
    /// deadline: seconds; None for the engine's. The system's resolving of a name is not counted.
    ///
    /// A connection that there is with that engine is used. From then on it is a peer like any other that this engine
    /// has dialled: `notify` takes its `id`, and lost it is dialled again. Where another start or another engine answers
    /// at its address, its id raises PeerRestarted: meet again. From asyncio, use a thread (`asyncio.to_thread`).
    ///
    /// Raises InvalidArgument (also for an address of this engine itself), PeerUnreachable, PeerNotKvik, SecretMismatch,
    /// SecretRequired, TlsRequired, TlsFailed, VersionMismatch, EngineClosed.
    #[pyo3(signature = (address, *, deadline=None))]
    fn meet<'py>(
        &self,
        py: Python<'py>,
        address: &str,
        deadline: Option<Seconds>,
    ) -> PyResult<Bound<'py, PyAny>> {
        events::meet(py, self.0.get(py)?, address, maybe_seconds(py, "deadline", deadline)?)
    }

    /// Notify a peer's program, which finds the notification among its events.
    ///
    /// to: a ticket of the peer (it is connected to if that is not done yet), the ticket's text, or the id of an
    ///     engine that is connected to this one.
    /// payload: bytes, 65,536 at most: it shares the control connection with heartbeats. More belongs into pages.
    /// deadline: seconds until the peer's program must have taken it; None for the engine's.
    ///
    /// Returns when the notification is on its way, which takes a moment, or, while the peer has not taken the
    /// 1024 before it or 1 MiB of them, until it does. From asyncio, use a thread for a peer that may be slow
    /// (`asyncio.to_thread`). Notifications of one thread to one peer come in order. While the connection lives
    /// each comes exactly once; when it ends, those that were not acknowledged end with PeerLost, and may have
    /// come or not.
    ///
    /// Raises NotificationsFull when there was no place for it by the deadline, InvalidArgument, PeerUnreachable,
    /// PeerLost, PeerRestarted, EngineClosed.
    #[pyo3(signature = (to, payload, *, deadline=None))]
    fn notify(
        &self,
        py: Python<'_>,
        to: &Bound<'_, PyAny>,
        payload: &Bound<'_, PyAny>,
        deadline: Option<Seconds>,
    ) -> PyResult<PyNotice> {
        notice::notify(py, self.0.get(py)?, to, payload, maybe_seconds(py, "deadline", deadline)?)
    }

    /// What happens from now on, and the notifications that waited for somebody: an iterator, also in asyncio.
    ///
    /// Kinds: docs/events.md. Close it when it is not read any more.
    fn events(&self, py: Python<'_>) -> PyResult<PyEvents> {
        Ok(PyEvents::new(self.0.get(py)?.events().or_raise(py)?))
    }

    /// Call `callback(event)` for every event from now on, from a Python thread of its own (`kvik-events`).
    ///
    /// An exception in it is logged (`kvik.events`), and the next event comes all the same. It is called under no
    /// lock of kvik and may use the engine. `remove()` of what this returns ends it, as closing the engine does;
    /// both wait, for up to 1 s, for a call that is in flight.
    fn on_event<'py>(&self, py: Python<'py>, callback: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        static LISTEN: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let events = self.events(py)?;
        LISTEN.import(py, "kvik._events", "Subscription")?.call1((events, callback))
    }

    /// The peers of this engine: those it is connected to, those being reached, and those lost last (256 at most).
    fn peers<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let engine = self.0.get(py)?;
        let found = py.detach(|| engine.peers());
        events::peers(py, found)
    }

    /// Counters since the start, by name.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counters = PyDict::new(py);
        for (name, value) in self.0.get(py)?.stats() {
            counters.set_item(name, value)?;
        }
        Ok(counters)
    }

    /// What the engine has counted and what it holds, in the Prometheus text format (0.0.4).
    ///
    /// Every metric with its meaning: docs/reference/metrics.md. Asking is cheap (well under a millisecond) and
    /// needs nothing of the peers.
    fn metrics(&self, py: Python<'_>) -> PyResult<String> {
        let engine = self.0.get(py)?;
        Ok(py.detach(|| engine.metrics()))
    }

    /// End all transfers and grants, unregister all regions, stop the threads. Closing it again, or on another thread
    /// meanwhile, waits for the same end.
    ///
    /// timeout: seconds to do it in an orderly way with the peers; what has not ended by then is cut. It takes
    /// that long at most, or half a second. Raises PagesQuarantined if a thread still has memory in use then;
    /// the text says of which grants, and transfers that have not ended end when it lets go. The end of the
    /// interpreter does this for every open engine, within 5 s together.
    #[pyo3(signature = (timeout=Seconds::of(5.0)), text_signature = "($self, timeout=5.0)")]
    fn close(&self, py: Python<'_>, timeout: Seconds) -> PyResult<()> {
        let (engine, timeout) = (self.0.get(py)?, seconds(py, "timeout", timeout)?);
        kept::close(py, engine, self.1.get(py)?, timeout).or_raise(py)
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        _kind: Option<&Bound<'_, PyType>>,
        _value: Option<&Bound<'_, PyAny>>,
        _trace: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.close(py, Seconds::of(5.0))
    }

    fn __repr__(&self) -> String {
        let Some(engine) = self.0.here() else { return "<kvik.Engine of the parent process>".into() };
        let name = if engine.name().is_empty() { String::new() } else { format!(" {:?}", engine.name()) };
        let at = match engine.is_closed() {
            true => "closed".into(),
            false => engine.addresses().iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
        };
        format!("<kvik.Engine{name} {:.8}… at {at}>", engine.id().to_string())
    }
}
