"""The demo with engine emulators: real HTTP, real KV pages, real transfers, and no model."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from kvik.demo import words
from kvik.demo.engines import start_router
from kvik.demo.measure import TOKENS
from kvik.demo.reports import ReportReader
from kvik.demo.scene import (
    KvFacts,
    Place,
    Scene,
    SettingError,
    Settings,
    StoreAct,
    check_memory,
    model_name,
    report_file,
    wait_all,
)
from kvik.emulator.faults import parse_fault
from kvik.errors import InvalidArgument
from kvik.roles.ports import LOOPBACK, free_ports
from kvik.roles.processes import Fleet, HttpServer, Process
from kvik.shapes import ModelShape

LENGTHS: tuple[int, ...] = (1, 100, 500, 1000, 2000, 4000)
SHAPE = "llama-3.1-8b"
PAGE_TOKENS = 16
# A small server: with 8 billion parameters and 2 FLOP for each and a token, this is 64 TFLOP/s. It also
# leaves the emulators the time that writing hundreds of MiB of KV takes on a CPU.
PREFILL_TOKENS_PER_SECOND = 4000
STEP_SECONDS = 0.005  # of a step besides: of each output token
# Every so many output tokens all KV of a request is read again; those between read what is new, and what
# the last whole reading gave goes into them. Reading it all for each would make the demo slow, not truer.
REREAD = 12
START_LIMIT = 60.0
GRACE = 1.0  # an emulator has nothing to save
RANK_BYTES = 80 << 20  # of a process without its KV: Python, numpy and the engine's own buffers
# The prefill engine holds the KV of a request until its reader has confirmed, which may be a moment after the
# next request has come.
HELD_REQUESTS = 2
STARTING = "starting three emulated engines"
# The prompt of the second act, and how long its KV may take over a link.
ACT_TOKENS = 1000
ACT_LINK_SECONDS = 3.0
# However slow this machine is, the demo shows blocks that come from the store: it waits for them.
STORE_DEADLINE = 30.0
STORE_READY = "kvik store serves on "


@dataclass(frozen=True)
class Emulator:
    """One emulated engine. `kv_bytes` is what each of its ranks has for KV."""

    name: str
    role: str
    shape: str
    ranks: int
    kv_bytes: int
    transport: str
    host: str = LOOPBACK
    report: Path | None = None
    fault: str | None = None
    store: str | None = None

    def command(self, port: int) -> list[str]:
        """Its command line."""
        command = [sys.executable, "-m", "kvik.cli", "emulator", "serve", "--role", self.role]
        command += ["--model-shape", self.shape, "--host", self.host, "--port", str(port)]
        command += ["--tp", str(self.ranks), "--page-tokens", str(PAGE_TOKENS), "--no-prefix-cache"]
        command += ["--kv-memory", str(self.kv_bytes), "--transport", self.transport]
        command += ["--listen", f"{self.host}:0", "--reread", str(REREAD)]
        command += ["--compute", f"fixed={STEP_SECONDS},prefill_token={1 / PREFILL_TOKENS_PER_SECOND}"]
        command += ["--report-file", str(self.report)] if self.report else []
        command += ["--store", self.store] if self.store else []
        return [*command, *(["--fault", self.fault] if self.fault else [])]

    def start(self, port: int, logs: Path, env: dict[str, str]) -> HttpServer:
        """Start it; it is up once `wait_ready` returns."""
        log = logs / f"{self.name}.log"
        return HttpServer(self.name, self.command(port), port, log, env, host=self.host, grace=GRACE)


def check(settings: Settings) -> None:
    """`SettingError` for what this engine cannot show, or not on this machine."""
    try:
        shape = ModelShape.resolve(settings.model_shape or SHAPE)
        for ranks in (settings.ranks.prefill, settings.ranks.decode):
            shape.check_tp(ranks)
        for fault in settings.fault.split(";") if settings.fault else ():
            parse_fault(fault.strip(), 1, settings.ranks.prefill)
    except InvalidArgument as error:
        raise SettingError(str(error)) from error
    longest = max(settings.lengths)
    if longest + TOKENS > shape.max_context:
        raise SettingError(
            f"--lengths: {shape.name} takes {shape.max_context:,} tokens, and {longest:,} with {TOKENS} of "
            "output are more"
        )
    engines = _engines(settings, Place(), Path())
    processes = sum(engine.ranks for engine in engines)
    # Of the second act the store; its engine takes the place of one of the first.
    store = _store_bytes(facts(settings), _act_length(settings, Place()))
    check_memory(
        sum(engine.kv_bytes * engine.ranks for engine in engines)
        + (processes + len(engines)) * RANK_BYTES
        + store,
        f"three engines with {longest:,} tokens of {shape.name}",
        f"--lengths {max(1, longest // 4)} or a smaller --model-shape",
    )


def facts(settings: Settings) -> KvFacts:
    """The KV that these settings move."""
    shape, ranks = ModelShape.resolve(settings.model_shape or SHAPE), settings.ranks.decode
    page = shape.page_bytes(PAGE_TOKENS, ranks) * ranks
    return KvFacts(PAGE_TOKENS, page, range(1, shape.vocab_size))


def start(settings: Settings, place: Place, fleet: Fleet, logs: Path) -> Scene:
    """Start everything; `ProcessError` when something does not come up."""
    shape = ModelShape.resolve(settings.model_shape or SHAPE)
    deadline = time.monotonic() + START_LIMIT
    engines = _engines(settings, place, logs)
    with place.near():
        *ports, router_port = free_ports(len(engines) + 1)
        servers = []
        for engine, port in zip(engines, ports, strict=True):
            with place.at_prefill() if engine.role == "prefill" else place.near():
                servers.append(fleet.add(engine.start(port, logs, place.environment())))
        prefill, decode, alone = servers
        router = fleet.add(start_router([prefill.url], [decode.url], router_port, logs))
        wait_all([*servers, router], deadline)
        model = model_name(alone)
    per_token = words.size(shape.kv_bytes_per_token())
    return Scene(
        prefill, decode, alone, router, ReportReader(report_file(logs)),
        facts(settings), place,
        what=f"emulated engines with the KV of {shape.name}: {per_token} a token, pages of {PAGE_TOKENS} "
        f"tokens, {settings.ranks}; they compute {PREFILL_TOKENS_PER_SECOND:,} prompt tokens a second",
        model=model,
        note="To compute a token, an emulator reads all of its KV on the CPU; a GPU is faster at that.",
        proof="each depends on every byte of KV, so KV that is wrong anywhere gives other tokens",
    )  # fmt: skip


def _act_length(settings: Settings, place: Place) -> int:
    """Tokens of the prompt of the second act: the longest, but no more than a few seconds take."""
    length = min(max(settings.lengths), ACT_TOKENS)
    if place.link is not None:
        seconds = place.link.rate.seconds(facts(settings).bytes_of(length))
        length = int(length * ACT_LINK_SECONDS / max(seconds, ACT_LINK_SECONDS))
    return max(length, PAGE_TOKENS + 1)


def _store_bytes(kv: KvFacts, length: int) -> int:
    """Room for the prompt and its answer, which is taken in slabs."""
    return max(2 * kv.bytes_of(length), 64 << 20)


def store_act(scene: Scene, settings: Settings, fleet: Fleet, logs: Path) -> StoreAct:
    """Start a store where the prefill engine is; the engine alone makes room for one that uses it."""
    place, ranks = scene.place, settings.ranks.decode
    length = _act_length(settings, place)
    fleet.stop(scene.alone)
    at, log = place.prefill_host(), logs / "store.log"
    with place.at_prefill():
        address = f"{at}:{free_ports(1)[0]}"
        command = [sys.executable, "-m", "kvik.cli", "store", "serve", "--listen", address]
        command += ["--memory", str(_store_bytes(scene.kv, length)), "--transport", settings.transport]
        store = fleet.add(Process("store", command, log, place.environment(), GRACE))
    store.wait_until(lambda: STORE_READY in store.said(), time.monotonic() + START_LIMIT)
    shape = ModelShape.resolve(settings.model_shape or SHAPE)
    # No more than half of the pool is held for puts.
    pages = 2 * (-(-(length + TOKENS) // PAGE_TOKENS) + 1)
    engine = Emulator(
        "restarted", "both", settings.model_shape or SHAPE, ranks,
        pages * shape.page_bytes(PAGE_TOKENS, ranks), settings.transport,
        store=f"{address},deadline={STORE_DEADLINE:g}",
    )  # fmt: skip

    def start() -> HttpServer:
        server = fleet.add(engine.start(free_ports(1)[0], logs, place.environment()))
        server.wait_ready(time.monotonic() + START_LIMIT)
        return server

    return StoreAct(length, ranks, f"at {address}", start, fleet.stop)


def _engines(settings: Settings, place: Place, logs: Path) -> list[Emulator]:
    """Prefill, decode and alone, with KV memory for what they are going to hold."""
    shape = ModelShape.resolve(settings.model_shape or SHAPE)
    name, transport = settings.model_shape or SHAPE, settings.transport
    pages = -(-(max(settings.lengths) + TOKENS) // PAGE_TOKENS) + 1

    def memory(ranks: int, requests: int) -> int:
        return pages * requests * shape.page_bytes(PAGE_TOKENS, ranks)

    ranks = settings.ranks
    return [
        Emulator(
            "prefill", "prefill", name, ranks.prefill, memory(ranks.prefill, HELD_REQUESTS), transport,
            host=place.prefill_host(), fault=settings.fault,
        ),
        Emulator(
            "decode", "decode", name, ranks.decode, memory(ranks.decode, 1), transport,
            report=report_file(logs),
        ),
        Emulator("alone", "both", name, ranks.decode, memory(ranks.decode, 1), transport),
    ]  # fmt: skip
