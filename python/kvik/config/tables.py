"""All options of kvik, each defined once.

The engine's are those of `kvik.Engine`; a test compares them with its signature, with the defaults of the
Rust side and with its bounds. The connector takes most of the engine's too; the emulator takes those of both
that its tests and demos set.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from kvik.config.cache import CACHE
from kvik.config.kinds import (
    Addresses,
    ByRank,
    Choice,
    Cpus,
    Flag,
    Path,
    Seconds,
    Secret,
    Size,
    Tenants,
    Text,
    Texts,
    Urls,
    Whole,
)
from kvik.config.object_store import OBJECT
from kvik.config.schema import ENGINE_SECTION, Entry, Option

_LOOPBACK = "127.0.0.1"

_engine = partial(Option, section=ENGINE_SECTION)
_connector = partial(Option, section="connector")
_router = partial(Option, section="router")
_emulator = partial(Option, section="emulator")
_store = partial(Option, section="store")


def _logged(section: str, at_info: str) -> tuple[Option, Option]:
    """What a server logs to standard error, and how. `at_info` says what that level is good for."""
    return (
        Option(
            name="log_level",
            section=section,
            kind=Choice(("debug", "info", "warning", "error")),
            default="info",
            help="What is logged to standard error.",
            reason=at_info,
        ),
        Option(
            name="log_format",
            section=section,
            kind=Choice(("text", "json")),
            default="text",
            help="Lines for people, or one JSON object a line.",
            reason="JSON has ids in fields of their own, which log collectors can search.",
        ),
    )


ENGINE = Entry(
    name="engine",
    title="kvik.Engine",
    where="an argument of `kvik.Engine(...)`",
    options=(
        _engine(
            name="listen",
            kind=Addresses(),
            default=(f"{_LOOPBACK}:0",),
            help="Where peers reach this engine, for control and data; port 0 takes a free one.",
            reason="Loopback, because nobody gets in unless told; any other address demands a secret or TLS.",
        ),
        _engine(
            name="advertise",
            kind=Addresses(bare=True),
            default=None,
            unset="what it listens on",
            help="What tickets say instead of the addresses listened on.",
            reason="Behind NAT or in a container, peers reach this host by another address.",
        ),
        _engine(
            name="secret",
            kind=Secret(8),
            default=None,
            help="Shared by all engines that may connect; both sides prove that they know it.",
            reason="Without one, anybody who reaches a port beyond loopback could read pages. Best given by "
            "the variable: a command line is visible to every user of the host.",
        ),
        _engine(
            name="tls",
            kind=Path(what="the path of a directory"),
            default=None,
            help="A directory with `tls.crt`, `tls.key` and `ca.crt`: puts TCP connections under TLS.",
            reason="Where others can read or change what is on the wire. Both sides present a certificate of "
            "the authority in `ca.crt`. Read at the start; the names are those of a Kubernetes TLS secret.",
        ),
        _engine(
            name="transport",
            kind=Choice(("auto", "tcp", "local", "nics")),
            default="auto",
            help="How pages move: the best that reaches the peer, or the one that is named.",
            reason="A named one is used or the transfer fails, so that what was decided holds.",
        ),
        _engine(
            name="verify",
            kind=Choice(("auto", "off", "sample", "full")),
            default="auto",
            help="Which bytes have page checksums: all on TCP and a sample over NICs (auto), none, a "
            "sample, or all.",
            reason="Checksums cost time on both sides; off is for who has other checks, full for who doubts. "
            "A sample is taken over NICs only, where no processor sees the bytes pass.",
        ),
        _engine(
            name="channels",
            kind=Whole(1, 64),
            default=4,
            help="TCP connections to a peer that carry data.",
            reason="One is bound by one core's copying; more than a fast network needs only costs memory.",
        ),
        _engine(
            name="io_threads",
            kind=Whole(1, 64),
            default=2,
            help="Threads that move data over TCP, and as many that copy.",
            reason="More for a network that two cores cannot fill; fewer where the model wants the cores.",
        ),
        _engine(
            name="deadline",
            kind=Seconds(),
            default=30.0,
            help="Time that a transfer may take if it is not told.",
            reason="Nothing waits for ever. At a handover the request is recomputed after it, so it is "
            "longer than the slowest honest load.",
        ),
        _engine(
            name="memory_cap",
            kind=Size(1 << 20),
            default=256 << 20,
            help="Most memory that kvik holds for itself; registered memory does not count.",
            reason="Peers and page lists must not take a host's memory; beyond it MemoryCapReached.",
        ),
        _engine(
            name="window",
            kind=Size(64 << 10),
            default=32 << 20,
            help="Most bytes that one peer's channels have in flight to send; one chunk is always allowed.",
            reason="A peer that takes nothing holds no more than this; fewer bytes than the channels have in "
            "hand at full speed would slow every peer.",
        ),
        _engine(
            name="nics",
            kind=Text(most=256, what="the name of NICs"),
            default=None,
            help="NICs for one-sided transfers: `verbs`, `efa`, `libfabric:PROVIDER` (`libfabric:tcp`), or "
            "`plugin`; with `:DEVICE,...` behind it, some of them (`verbs:mlx5_0@3` by GID index 3), with "
            "`:all` each that there is; in a connector `:near`, those near a rank's GPU.",
            reason="What is named is used or the engine does not start, so that no other network is taken "
            "unseen. Left out, no library is loaded for it. Without devices it is all; in a connector near, "
            "for KV on a GPU: bytes stay on its socket, and ranks have NICs of their own.",
        ),
        _engine(
            name="nic_library",
            kind=Path(),
            default=None,
            unset="the process's own copy, the vendor's, the distribution's",
            help="The file of the library that speaks to the NICs; with `plugin`, the plug-in's, which must "
            "be named.",
            reason="For a host with several. A copy that the process has already comes first, since two "
            "cannot share a device; of a plug-in it is always this file.",
        ),
        _engine(
            name="nic_threads",
            kind=Whole(1, 32),
            default=4,
            help="Threads that drive the NICs, which are divided evenly among them; no more than there are "
            "NICs.",
            reason="With 16 NICs as many work requests as with 16 threads, at less processor time. More "
            "where extents are small and cores are free; 1 where the model wants the cores.",
        ),
        _engine(
            name="cpus",
            kind=Cpus(),
            default=None,
            unset="the kernel's choice",
            help="CPU numbers for kvik's threads.",
            reason="Keeps them off the cores of the model.",
        ),
        _engine(
            name="numa_node",
            kind=Whole(0, 4095),
            default=None,
            unset="the kernel's choice",
            help="NUMA node for kvik's threads.",
            reason="Copies are fastest on the node of the memory and of the network card.",
        ),
        _engine(
            name="name",
            kind=Text(100),
            default="",
            unset="none",
            help="What the engine is called in logs.",
            reason="Tells the engines of one host apart.",
        ),
    ),
)


def _expiry_order(values: Mapping[str, Any]) -> str | None:
    expiry, most = values["expiry"], values["max_expiry"]
    return f"max_expiry {most:g} is below expiry {expiry:g}" if most < expiry else None


# A connector makes its name itself; the others are rarely set, and keep their variables and keys in the file.
_ENGINE_ONLY = ("name", "window", "nic_library", "nic_threads")

CONNECTOR = Entry(
    name="connector",
    title="The connector of a serving engine",
    where="a key of `kv_connector_extra_config`",
    check=_expiry_order,
    # A rank's NICs are those beside its GPU. A variable is one text, for all ranks.
    direct={"nics": ByRank(ENGINE["nics"].kind)},
    options=(
        *(option for option in ENGINE.options if option.name not in _ENGINE_ONLY),
        _connector(
            name="expiry",
            kind=Seconds(),
            default=120.0,
            help="How long finished prefill KV waits for its reader; of a stream, also decode for the KV.",
            reason="Bounds what a lost client can strand; it outlasts a queue in front of the reader.",
        ),
        _connector(
            name="max_expiry",
            kind=Seconds(),
            default=600.0,
            help="How far holders of a ticket may extend that.",
            reason="A router keeps KV alive while a request queues, but not for ever.",
        ),
        _connector(
            name="park_after",
            kind=Seconds(),
            default=2.0,
            help="After this time, unread KV is held without keeping the serving engine awake.",
            reason="Until then vLLM steps some 600 times a second to notice the reader at once; at or above "
            "expiry: never parked.",
        ),
        _connector(
            name="release_deadline",
            kind=Seconds(),
            default=5.0,
            help="Time to tell the prefill side that its KV is not wanted.",
            reason="It is a courtesy: past it, the expiry frees the KV.",
        ),
        _connector(
            name="close_timeout",
            kind=Seconds(),
            default=5.0,
            help="Time that a shutdown may take.",
            reason="Supervisors kill what does not end.",
        ),
        _connector(
            name="namespace",
            kind=Text(),
            default=None,
            unset="model and revision",
            help="Name of the model, which must be equal on both sides for KV to be exchanged.",
            reason="Set it when the same weights lie under two paths. A sample of them counts all the same.",
        ),
        _connector(
            name="report_file",
            kind=Path(),
            default=None,
            help="One JSON line for each finished load or recomputed request is appended here.",
            reason="For measurements, and for finding out why a request was recomputed.",
        ),
    ),
)

ROUTER = Entry(
    name="router",
    title="kvik router",
    where="a flag of `kvik router serve`",
    options=(
        _router(
            name="prefill",
            kind=Urls(),
            default=None,
            required=True,
            help="Engines that compute prompts, taken in turn.",
            reason="The router finds no engines by itself.",
        ),
        _router(
            name="decode",
            kind=Urls(),
            default=None,
            required=True,
            help="Engines that generate answers, taken in turn.",
            reason="The router finds no engines by itself.",
        ),
        _router(
            name="host",
            kind=Text(255),
            default=_LOOPBACK,
            help="Address to listen on.",
            reason="Clients are not authenticated, so any address but loopback is a choice.",
        ),
        _router(
            name="port",
            kind=Whole(0, 65_535),
            default=8000,
            help="Port to listen on; 0 takes a free one, which the first line of output tells.",
            reason="8000 is where OpenAI-compatible servers usually are.",
        ),
        _router(
            name="connect_timeout",
            kind=Seconds(),
            default=5.0,
            help="Time to connect to an engine; then others are tried, for a while before this one.",
            reason="Nothing was sent yet, so trying another one is safe.",
        ),
        _router(
            name="prefill_timeout",
            kind=Seconds(),
            default=300.0,
            help="Longest silence of a prefill engine.",
            reason="Long prompts in a queue take minutes.",
        ),
        _router(
            name="decode_timeout",
            kind=Seconds(),
            default=600.0,
            help="Longest silence of a decode engine.",
            reason="An answer that is not streamed is one silence.",
        ),
        _router(
            name="client_timeout",
            kind=Seconds(),
            default=60.0,
            help="Longest silence of a client that owes data; a whole body has as long, and 1 s for 16 KiB.",
            reason="It holds a place meanwhile.",
        ),
        _router(
            name="release_timeout",
            kind=Seconds(),
            default=30.0,
            help="Time to give back KV that no decode engine takes.",
            reason="Past its expiry there is nothing to give back.",
        ),
        _router(
            name="drain_timeout",
            kind=Seconds(),
            default=30.0,
            help="Time to finish open requests after SIGINT or SIGTERM.",
            reason="Supervisors kill soon after.",
        ),
        _router(
            name="max_body",
            kind=Size(),
            default=32 << 20,
            help="Largest request body.",
            reason="Images in chats are large, and each body is held in memory.",
        ),
        _router(
            name="max_body_memory",
            kind=Size(),
            default=512 << 20,
            help="Most memory for the bodies of all requests, three times their length; at least 3 max_body.",
            reason="More get 503, which a client can retry: so no clients can use up the machine's memory.",
        ),
        _router(
            name="max_inflight",
            kind=Whole(1, 1_000_000),
            default=1024,
            help="Most requests in progress.",
            reason="More get 503, which a client can retry, instead of a queue that nobody sees.",
        ),
        _router(
            name="transfer_mode",
            kind=Choice(("pull", "stream")),
            default="pull",
            help="When KV moves: pull, once prefill is done, or stream, as it is computed.",
            reason="A stream holds decode's KV blocks while prefill computes.",
        ),
        *_logged("router", "At info it is one line a request; warning leaves only trouble."),
    ),
)

EMULATOR = Entry(
    name="emulator",
    title="kvik emulator",
    where="a flag of `kvik emulator serve`",
    options=(
        _emulator(
            name="role",
            kind=Choice(("prefill", "decode", "both")),
            default="both",
            help="Whether it offers KV, takes it, or does either; it answers whole requests in any role.",
            reason="A prefill server that took offers, or a decode server that made them, would be misread.",
        ),
        _emulator(
            name="model_shape",
            kind=Text(),
            default="tiny",
            help="Whose KV it has: a preset, a config.json, or layers=4,kv_heads=2,head_size=64,...",
            reason="Its name is the model's name; tiny is the model of `kvik demo`.",
        ),
        _emulator(
            name="host",
            kind=Text(255),
            default=_LOOPBACK,
            help="Address to listen on for HTTP.",
            reason="Clients are not authenticated, so any address but loopback is a choice.",
        ),
        _emulator(
            name="port",
            kind=Whole(0, 65_535),
            default=8100,
            help="Port for HTTP; 0 takes a free one, which the first line of output tells.",
            reason="8000 is the router's.",
        ),
        _emulator(
            name="tp",
            kind=Whole(1, 64),
            default=1,
            help="Ranks that share the heads of a model; each is a process with an engine of its own.",
            reason="To try what a split model does: unequal numbers on either side, ranks that die.",
        ),
        _emulator(
            name="dp",
            kind=Whole(1, 64),
            default=1,
            help="Replicas of all that; a request goes to the one with the least to do.",
            reason="To try what several replicas do, and what happens when one of them dies.",
        ),
        _emulator(
            name="page_tokens",
            kind=Whole(1, 65_536),
            default=16,
            help="Tokens of a KV page.",
            reason="16 is vLLM's own choice on a GPU.",
        ),
        _emulator(
            name="kv_memory",
            kind=Size(),
            default=256 << 20,
            help="KV memory of each rank.",
            reason="As large as the contexts that are tried; the machine needs what is written, not more.",
        ),
        _emulator(
            name="plain_memory",
            kind=Flag(),
            default=False,
            help="Own memory that kvik registers, in place of memory that it allocates.",
            reason="Allocated memory can be mapped by peers on the host; a serving engine's own cannot.",
        ),
        _emulator(
            name="prefix_cache",
            kind=Flag(),
            default=True,
            help="Keep the KV of full pages, and use it for prompts that begin alike.",
            reason="Off when every handover shall move all of a prompt.",
        ),
        ENGINE["transport"],
        ENGINE["listen"],
        CONNECTOR["report_file"],
        _emulator(
            name="store",
            kind=Text(),
            default=None,
            unset="no store",
            help="A store: HOST:PORT, or embedded:SIZE in each rank; with ,deadline=SECONDS behind it (1).",
            reason="A request waits for its blocks no longer than the deadline, whatever the store does.",
        ),
        _emulator(
            name="compute",
            kind=Text(),
            default="instant",
            help="How long steps take: a preset, or fixed=,prefill_token=,decode_token=,context_token= in "
            "seconds.",
            reason="Without times the handover is tested; a preset gives a load the shape of a GPU's.",
        ),
        _emulator(
            name="load_failure",
            kind=Choice(("recompute", "fail")),
            default="recompute",
            help="Compute what could not be loaded, or end the request with an error.",
            reason="The choice is also vLLM's (kv_load_failure_policy), which has the other default.",
        ),
        _emulator(
            name="reread",
            kind=Whole(0, 1_000_000),
            default=0,
            help="0: each token reads all KV of its request. N: only each Nth does.",
            reason="Reading all shows also what changes late; with tens of GiB it takes seconds a token.",
        ),
        _emulator(
            name="fault",
            kind=Texts("a fault, such as slow:factor=3"),
            default=None,
            help="What goes wrong: slow, stalled, wrong-page or dead, with details.",
            reason="Faults are rare where one looks for what they do.",
        ),
        _emulator(
            name="allow_faults",
            kind=Flag(),
            default=False,
            help="Take further faults by POST /fault.",
            reason="Off, because clients are not authenticated.",
        ),
        _emulator(
            name="drain",
            kind=Whole(0, 86_400),
            default=5,
            help="Seconds that open requests have after SIGTERM or SIGINT.",
            reason="Supervisors kill soon after; 0 ends at once.",
        ),
    ),
)

# Of a server's engine; its address is the store's own, since clients have it in their configuration.
_OF_A_STORE = ("advertise", "secret", "tls", "transport", "nics", "nic_library", "channels", "io_threads",
               "memory_cap", "cpus", "numa_node")  # fmt: skip

STORE = Entry(
    name="store",
    title="kvik store",
    where="a flag of `kvik store serve`",
    options=(
        _store(
            name="listen",
            kind=Addresses(),
            default=(f"{_LOOPBACK}:7500",),
            help="Where clients reach the store, for requests and data; port 0 takes a free one.",
            reason="Loopback, because nobody gets in unless told; any other address demands a secret or TLS.",
        ),
        _store(
            name="memory",
            kind=Size(1 << 20),
            default=1 << 30,
            help="Bytes of blocks that it keeps in memory.",
            reason="It is taken as blocks come, and never more; the process needs about 100 MiB beside it.",
        ),
        _store(
            name="log",
            kind=Path(what="the path of a directory"),
            default=None,
            help="A directory where blocks are kept over a restart.",
            reason="A server that starts again is otherwise empty. On a local disk, or on NFS.",
        ),
        _store(
            name="log_size",
            kind=Size(8 << 20),
            default=16 << 30,
            help="Bytes that the log may take on its disk.",
            reason="Beyond it the blocks go that were not asked for for longest.",
        ),
        _store(
            name="policy",
            kind=Choice(("selector", "lru", "s3-fifo", "s3-fifo-half", "s3-fifo-admit")),
            default="selector",
            help="Which block makes room for another one.",
            reason="The selector does what the best of the others does on the load that there is; a named "
            "one is for comparisons.",
        ),
        _store(
            name="tenant",
            kind=Tenants("a tenant, such as NAME=quota:2GiB,apart"),
            default=None,
            help="What a tenant may have: NAME=quota:SIZE (of memory), apart (regions of its own), or both.",
            reason="All others share what is left, and regions. The log is shared by all.",
        ),
        _store(
            name="metrics",
            kind=Addresses(),
            default=None,
            help="Where Prometheus finds /metrics, over HTTP; port 0 takes a free one.",
            reason="Figures have names of tenants, and who asks is not authenticated: so it is off, and any "
            "address but loopback is a choice.",
        ),
        *(option for option in ENGINE.options if option.name in _OF_A_STORE),
        *_logged("store", "At info it is a line for each client that comes or goes; warning leaves trouble."),
    ),
)

ENTRIES = (ENGINE, CONNECTOR, CACHE, ROUTER, EMULATOR, STORE, OBJECT)


def entry(name: str) -> Entry:
    """The entry point of this name."""
    return next(entry for entry in ENTRIES if entry.name == name)


def all_options() -> dict[str, Option]:
    """Every option by its key in the TOML file, once."""
    return {option.key: option for entry in ENTRIES for option in entry.options}
