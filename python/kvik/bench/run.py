"""The experiment: for each cell, rounds in which every contender gets one short turn, and checks around them.

A round is kvik over each transport, memcpy, the TCP stream; the next round starts one contender later, so
that no contender always follows the same one. Sources are filled once per direction; before the first round
and after the last, pages at the destination are poisoned, moved and compared byte by byte, outside all
timing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import kvik
from kvik.bench import facts, pattern
from kvik.bench.contenders import Kvik, Used
from kvik.bench.control import split_address
from kvik.bench.errors import BenchError
from kvik.bench.figures import Series
from kvik.bench.limits import Contender, Memcpy, TcpStream, fastest_chunk
from kvik.bench.memory import Memory
from kvik.bench.options import Options, fit_target, size_text
from kvik.bench.pages import Cell, Op, PagePlan
from kvik.bench.peer import Peer
from kvik.bench.stream import StreamInitiator
from kvik.bench.target import CLOSE_SECONDS, TargetOptions, counted, engine_at

Say = Callable[[str], None]

WALK_SECONDS = 1.0
_WORD = 0xFFFF_FFFF_FFFF_FFFF
_COUNT_SECONDS = 10.0


Counted = tuple[dict[str, float], dict[str, float]]
"""What an engine counted before and after."""


@dataclass
class Repeated:
    """Beside batches that were timed one by one: those before them, and what both engines counted of all."""

    warmup: Series = field(default_factory=Series)
    counted: dict[str, Counted] | None = None
    """By the name of the side; None where not all batches were moved."""


@dataclass
class KvikResult:
    """kvik over one transport in one cell."""

    transport: str
    used: Used
    series: Series = field(default_factory=Series)
    repeated: Repeated | None = None


@dataclass
class CellResult:
    """All contenders of one cell."""

    cell: Cell
    batches: int
    inflight: int
    send_bytes: int
    kvik: list[KvikResult]
    memcpy: Series = field(default_factory=Series)
    stream: Series = field(default_factory=Series)
    complete: bool = False
    """Every round ran and the last check passed; otherwise only the first one did."""


@dataclass
class Results:
    """What a run has found so far; complete only when it says so."""

    options: Options
    notices: list[str]
    initiator: dict[str, Any] = field(default_factory=facts.collect)
    target: dict[str, Any] = field(default_factory=dict)
    target_options: TargetOptions | None = None
    cells: list[CellResult] = field(default_factory=list)
    interrupted: bool = False
    failure: str | None = None

    @property
    def complete(self) -> bool:
        """Whether the plan was carried out and nothing failed."""
        return self.failure is None and not self.interrupted


def salts(seed: int) -> dict[Op, int]:
    """The salt of the source's pattern in each direction."""
    return {"read": (seed * 0x2545F4914F6CDD1D + 1) & _WORD, "write": (seed * 0x2545F4914F6CDD1D + 3) & _WORD}


class Bench:
    """An initiator with everything that the cells share."""

    def __init__(self, options: Options, engine: kvik.Engine, peer: Peer) -> None:
        self.options = options
        self._engine = engine
        self._peer = peer
        self._memory = Memory(engine, options.memory, options.buffer)
        # What kvik is compared with in rounds; repetitions are of kvik alone.
        self._scratch = np.empty(0 if options.repetitions else options.buffer, dtype=np.uint8)
        pattern.fill(
            self._scratch, 0
        )  # Memory never written would be one page of zeros, read from the cache.
        self._stream = None if options.repetitions else peer.stream(self._memory.bytes.data)
        self._salts = salts(options.seed)
        self._chunk, self._stream_rate = 0, 0.0
        self._op: Op | None = None

    def close(self) -> None:
        """Close the comparison's connection; engine and peer belong to the caller."""
        if self._stream is not None:
            self._stream.close()

    def measure(self, cell: Cell, results: list[CellResult]) -> None:
        """Measure a cell; its result is in ``results`` from the first round on."""
        fresh = self._turn_to(cell.op)
        options = self.options
        plan = PagePlan(options.buffer, cell.page_bytes, cell.pages, options.layout, options.seed)
        ticket = self._peer.open(
            cell, buffer=options.buffer, layout=options.layout, seed=options.seed, expiry=options.cell_s
        )
        paths = [
            Kvik(
                name,
                cell,
                plan,
                self._engine,
                self._memory,
                self._peer,
                options.inflight,
                traffic_class=options.traffic_class,
            )
            for name in options.transports
        ]
        for path in paths:
            path.open(ticket)
            if fresh and not options.repetitions:
                path.warm_up(WALK_SECONDS)
            path.checked(self._salts[cell.op], last=False)
        result = CellResult(
            cell,
            plan.batches,
            min(options.inflight, plan.batches),
            self._chunk,
            [KvikResult(path.transport, path.used) for path in paths],
        )
        results.append(result)
        if self._stream is None:
            for path, part in zip(paths, result.kvik, strict=True):
                self._repeat(path, part)
        else:
            self._rounds(cell, plan, paths, result, self._stream)
        for path in paths:
            path.checked(self._salts[cell.op], last=True)
        self._peer.close_cell()
        result.complete = True

    def _turn_to(self, op: Op) -> bool:
        """Fill the source of a direction; says whether the direction is new."""
        if op == self._op:
            return False
        # The stream's trial first: it writes over the destination only.
        if op == "read":
            self._peer.fill(self._salts[op])
        else:
            pattern.fill(self._memory.bytes, self._salts[op])
        if self._stream is not None:
            self._chunk, self._stream_rate = fastest_chunk(op, self._stream)
        self._op = op
        return True

    def _repeat(self, path: Kvik, part: KvikResult) -> None:
        """One batch after the other, the first ones apart; what was moved until a failure is in ``part``."""
        before = self._counts()
        part.repeated = Repeated()
        path.repeat(self.options.warmup, part.repeated.warmup)
        path.repeat(self.options.repetitions, part.series)
        both = zip(before, self._counts(), strict=True)
        part.repeated.counted = dict(zip(("initiator", "target"), both, strict=True))

    def _counts(self) -> tuple[dict[str, float], dict[str, float]]:
        """What both engines have counted. The target's tells of a transfer's end and counts it then, so it is
        asked again where it has counted less, for ten seconds at most."""
        own, until = counted(self._engine), time.monotonic() + _COUNT_SECONDS
        while True:
            targets = self._peer.counted()
            if _moved(targets) >= _moved(own) or time.monotonic() > until:
                return own, targets
            time.sleep(0.001)

    def _rounds(
        self, cell: Cell, plan: PagePlan, paths: list[Kvik], result: CellResult, connection: StreamInitiator
    ) -> None:
        buffers = (self._scratch, self._memory.bytes)
        memcpy = Memcpy(plan, *(buffers if cell.op == "read" else buffers[::-1]))
        stream = TcpStream(cell, self._peer, connection, self._chunk, self._stream_rate)
        turns: list[tuple[Contender, Series]] = [
            *((path, part.series) for path, part in zip(paths, result.kvik, strict=True)),
            (memcpy, result.memcpy),
            (stream, result.stream),
        ]
        seconds = self.options.duration / self.options.rounds
        for contender, _ in turns:
            contender.turn(0.0)
        for number in range(self.options.rounds):
            first = number % len(turns)
            for contender, series in turns[first:] + turns[:first]:
                series.slices.append(contender.turn(seconds))


def _moved(counts: dict[str, float]) -> float:
    return sum(value for name, value in counts.items() if name.startswith("kvik_transfer_bytes_total"))


@contextmanager
def _peer(options: Options, address: str | None, secret: str | None) -> Iterator[Peer]:
    if address is not None:
        peer = Peer.join(address, secret)
    else:
        own = TargetOptions(
            buffer=options.buffer,
            memory=options.memory,
            transport="auto",
            channels=options.channels,
            verify=options.verify,
            engine_listen="127.0.0.1:0",
        )
        peer = Peer.start(own, secret)
    try:
        yield peer
    finally:
        peer.close()


def _notice_differences(options: Options, target: TargetOptions, say: Say) -> None:
    for name in ("memory", "channels", "verify"):
        theirs, ours = getattr(target, name), getattr(options, name)
        if theirs != ours:
            say(f"the target was started with {name} {theirs}, this side with {ours}")


def execute(results: Results, address: str | None, secret: str | None, say: Say, progress: Say) -> None:
    """Run the whole plan; what was found until an interrupt or a failure stays in ``results``."""
    try:
        with ExitStack() as stack:
            peer = stack.enter_context(_peer(results.options, address, secret))
            results.target, results.target_options = peer.facts, peer.options
            results.options = options = fit_target(results.options, peer.options.buffer, say)
            _notice_differences(options, peer.options, say)
            engine = engine_at(
                secret=secret,
                transport="auto",
                verify=options.verify,
                channels=options.channels,
                name="bench-initiator",
            )
            stack.callback(engine.close, timeout=CLOSE_SECONDS)
            bench = Bench(options, engine, peer)
            stack.callback(bench.close)
            cells = options.cells()
            for number, cell in enumerate(cells, start=1):
                progress(
                    f"cell {number} of {len(cells)}: {cell.op} {cell.pages} x {size_text(cell.page_bytes)}"
                )
                bench.measure(cell, results.cells)
    except KeyboardInterrupt:
        results.interrupted = True
    except kvik.KvikError as error:
        results.failure = f"{error.code}: {error}"
    except (BenchError, OSError) as error:
        results.failure = str(error)


def default_transports(
    address: str | None, loopback: Callable[[str], bool], say: Say
) -> tuple[kvik.TransportName, ...]:
    """Both transports on one host; to another host only the one that can reach it."""
    if address is not None and not loopback(split_address(address)[0]):
        say("transport tcp alone: the target is on another host, which local cannot reach")
        return ("tcp",)
    return ("tcp", "local")
