"""Moving the page sets of a recording again, between this process and a target.

What moved well is moved again: the same operation, layout, ids and sizes, in the order of the calls, at the
recorded pace or as fast as it goes. Both sides have regions that lie as the recorded engine's did; what lay
at the owner is known only by its ids, so its region lies as the recorded side's too. First, outside all
timing, transfers are made one by one over poisoned pages and every byte is compared; then come the timed
rounds.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from threading import Event
from typing import Any

import numpy as np
import numpy.typing as npt

import kvik
from kvik.bench import facts
from kvik.bench.contenders import Used, as_asked
from kvik.bench.control import IDLE_SECONDS
from kvik.bench.errors import CheckError
from kvik.bench.figures import Series, Slice
from kvik.bench.limits import fastest_chunk
from kvik.bench.options import LONGEST_GRANT_SECONDS
from kvik.bench.pattern import Bytes
from kvik.bench.stream import StreamInitiator
from kvik.bench.target import CLOSE_SECONDS, TargetOptions, engine_at
from kvik.trace.file import Dims, Moved, PageIds, Trace, TraceError
from kvik.trace.memory import Sparse
from kvik.trace.pattern import Elements
from kvik.trace.target import MODULE, ReplayPeer

Say = Callable[[str], None]
Flags = npt.NDArray[np.bool_]

STREAM_BUFFER = 64 << 20
CHECKED_BYTES = 1 << 30
"""Bytes that are compared before anything is timed."""

MOST_OPEN = 256
"""Transfers in flight at the recorded pace; above, the pace waits, and the result says how late it was."""

_DEADLINE = 86400.0
"""Seconds that one transfer may take, the most that an engine allows: many may wait for a slow link."""
_SALT = 0x1F3D5B79
_UNHEARD = IDLE_SECONDS / 5
"""Seconds of a turn after which the target hears from this side."""


@dataclass(frozen=True)
class ReplayOptions:
    """How to replay. `speed` is times the recorded pace; None is as fast as it goes."""

    transport: kvik.TransportName
    speed: float | None
    inflight: int
    rounds: int
    channels: int
    verify: kvik.VerifyName


@dataclass(frozen=True)
class Step:
    """One transfer of the recording, ready to be made again."""

    moved: Moved
    region: str
    elements: Elements
    positions: PageIds
    """In the target's grant, which is of all pages of its region in the order of their ids."""


@dataclass
class Results:
    """What a replay found."""

    options: ReplayOptions
    trace: Trace
    steps: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Transfers that were not made again, by reason."""
    notices: list[str] = field(default_factory=list)
    compared: int = 0
    """Transfers whose every byte was compared."""
    used: Used = field(default_factory=Used)
    kvik: Series = field(default_factory=Series)
    memcpy: Series = field(default_factory=Series)
    stream: Series = field(default_factory=Series)
    send_bytes: int = 0
    late_s: float = 0.0
    """How much later than recorded the latest call was made, at the recorded pace."""
    recorded_s: list[float] = field(default_factory=list)
    """The recorded time of each transfer that was made again."""
    initiator: dict[str, object] = field(default_factory=facts.collect)
    target: dict[str, object] = field(default_factory=dict)


def plan(trace: Trace, results: Results) -> tuple[list[Step], dict[str, tuple[Dims, str]]]:
    """The transfers that can be made again, and the regions that they need, each with its kind of memory."""
    steps: list[Step] = []
    regions: dict[str, tuple[Dims, str]] = {}
    for moved in sorted(trace.moved, key=lambda moved: moved.t):
        why = _why_not(trace, moved)
        if why is not None:
            results.left_out[why] += 1
            continue
        dims = trace.layouts[moved.layout]
        positions = moved.pages if moved.positions is None else moved.positions
        name = f"{moved.layout}-{moved.memory}"
        wanted = int(max(moved.pages.max(), positions.max())) // moved.parts + 1
        known = regions.get(name, (dims, ""))[0]
        regions[name] = (_reaching(known, wanted), moved.memory)
        steps.append(Step(moved, name, Elements(dims, moved.layers, moved.slices, moved.parts), positions))
    if not steps:
        raise TraceError(
            "nothing of the recording can be moved again: " + (_reasons(results) or "it is empty")
        )
    steps = [_in_region(step, regions[step.region][0]) for step in steps]
    for name, (dims, _) in regions.items():
        if dims.pages != trace.layouts[name.rpartition("-")[0]].pages:
            results.notices.append(
                f"layout {dims.digest} was widened to {dims.pages} pages: the owner's grants reach that far"
            )
    return steps, regions


def _why_not(trace: Trace, moved: Moved) -> str | None:
    if moved.outcome != "ok":
        return f"failed with {moved.outcome} when it was recorded"
    if moved.positions is not None and moved.positions.size != moved.pages.size:
        return "the two sides had pages of different size"
    dims = trace.layouts[moved.layout]
    elements = Elements(dims, moved.layers, moved.slices, moved.parts)
    if moved.parts < 1 or dims.run_bytes % moved.parts:
        return f"parts={moved.parts} of runs of {dims.run_bytes} bytes"
    if moved.layers[1] > dims.layers or moved.slices[1] > dims.slices:
        return "layers or slices that its layout does not have"
    if elements.id_bytes * moved.pages.size != moved.bytes:
        return "its size does not follow from its layout"
    return None


def _reasons(results: Results) -> str:
    return "; ".join(f"{count}: {why}" for why, count in results.left_out.items())


def _reaching(dims: Dims, pages: int) -> Dims:
    """The layout with at least so many pages. Slices and layers beyond all pages move apart for it."""
    if pages <= dims.pages:
        return dims
    # Layers at offsets of their own lie outermost then, as the last of these.
    wanted: list[tuple[str, float, int]] = [
        ("page_stride", dims.page_stride, pages),
        ("slice_stride", dims.slice_stride, dims.slices),
        ("layer_stride", math.inf if dims.layer_stride is None else dims.layer_stride, dims.layers),
    ]
    strides, inside = dict[str, Any](), dims.run_bytes
    for name, stride, count in sorted(wanted, key=lambda step: step[1]):
        if count > 1:
            strides[name] = inside if math.isinf(stride) else max(inside, int(stride))
            inside += strides[name] * (count - 1)
    return replace(dims, pages=pages, layer_offsets=None, **strides)


def _in_region(step: Step, dims: Dims) -> Step:
    return replace(step, elements=replace(step.elements, dims=dims))


class Replay:
    """Both sides' regions, and the ways to move a step between them."""

    def __init__(
        self,
        options: ReplayOptions,
        engine: kvik.Engine,
        peer: ReplayPeer,
        steps: list[Step],
        regions: dict[str, tuple[Dims, str]],
    ) -> None:
        self.options = options
        self._engine = engine
        self._peer = peer
        self._heard = time.perf_counter()
        self._steps = steps
        self._regions: dict[str, Sparse] = {}
        self._tickets: dict[tuple[object, ...], kvik.Ticket] = {}
        for name, (dims, memory) in regions.items():
            used = _used_pages(steps, name)
            peer.region(name, dims, memory, used)
            self._regions[name] = Sparse(engine, dims, memory, used, self._regions.values())
        for step in steps:
            if self._key(step) not in self._tickets:
                ticket = peer.grant(step.region, step.elements, step.moved.op, LONGEST_GRANT_SECONDS)
                self._tickets[self._key(step)] = kvik.Ticket(ticket)

    @staticmethod
    def _key(step: Step) -> tuple[object, ...]:
        return step.region, step.elements, step.moved.op

    def begin(self, step: Step) -> kvik.Transfer:
        """Start a step."""
        local = self._regions[step.region].pages(step.elements, step.moved.pages)
        call = self._engine.read if step.moved.op == "read" else self._engine.write
        ticket = self._tickets[self._key(step)]
        of = step.moved.traffic_class
        way = self.options.transport
        return call(local, ticket, step.positions, traffic_class=of, deadline=_DEADLINE, transport=way)

    def fill(self) -> None:
        """Write all that a round moves, on both sides, once: what is not compared, too. What nobody has
        written is one page of zeros, read from the processor's cache, and a fault where it is written first.
        """
        seen: dict[tuple[object, ...], tuple[Flags, Flags]] = {}
        for step in self._steps:
            ids = step.elements.dims.pages * step.elements.parts
            here, there = seen.setdefault(self._key(step), (np.zeros(ids, bool), np.zeros(ids, bool)))
            self._lay_out(step, _fresh(step.moved.pages, here), _fresh(step.positions, there))

    def _lay_out(self, step: Step, pages: PageIds, positions: PageIds) -> None:
        """The pattern where it comes from, and poison where it goes to."""
        mine, elements = self._regions[step.region].bytes, step.elements
        if step.moved.op == "read":
            self._peer.paint(step.region, elements, positions, _SALT)
            elements.poison(mine, pages)
        else:
            elements.paint(mine, pages, _SALT)
            self._peer.blank(step.region, elements, positions)

    def check(self, results: Results) -> None:
        """Make transfers one by one over poisoned pages, and compare every byte. Raises CheckError."""
        compared = 0
        for step in self._steps:
            if compared and compared + step.moved.bytes > CHECKED_BYTES:
                return
            self._check(step, results)
            results.compared += 1
            compared += step.moved.bytes

    def _check(self, step: Step, results: Results) -> None:
        mine, elements, moved = self._regions[step.region].bytes, step.elements, step.moved
        self._lay_out(step, moved.pages, step.positions)
        report = self.begin(step).wait()
        judge(step, report, self.options, results)
        if moved.op == "write":
            self._peer.compare(step.region, elements, step.positions, moved.pages, _SALT)
        elif (wrong := elements.check(mine, moved.pages, step.positions, _SALT)) is not None:
            raise CheckError(f"transfer at {moved.t:.6f} s: {wrong}")

    def turn(self, results: Results) -> Slice:
        """Make every transfer once, at the pace that was asked for."""
        target_cpu, cpu = self._peer.cpu_s(), time.process_time()
        begun = time.perf_counter()
        reports = self._at_pace(results) if self.options.speed is not None else self._at_once()
        wall = time.perf_counter() - begun
        cpu = time.process_time() - cpu
        target_cpu = self._peer.cpu_s() - target_cpu
        for step, report in zip(self._steps, reports, strict=True):
            judge(step, report, self.options, results)
        payload = sum(report.bytes for report in reports)
        return Slice(payload, wall, cpu, target_cpu, tuple(report.total_s for report in reports))

    def _at_once(self) -> list[kvik.Report]:
        return self._collect(self.begin(step) for step in self._steps)

    def _at_pace(self, results: Results) -> list[kvik.Report]:
        return self._collect((self.begin(step) for step in self._when_due(results)), MOST_OPEN)

    def _when_due(self, results: Results) -> Iterator[Step]:
        first, begun, pause = self._steps[0].moved.t, time.perf_counter(), Event()
        for step in self._steps:
            due = (step.moved.t - first) / (self.options.speed or 1.0)
            ahead = due - (time.perf_counter() - begun)
            while ahead > 0:
                self._be_heard()  # before the wait, or the call would come as late as that takes
                pause.wait(min(ahead, _UNHEARD))
                ahead = due - (time.perf_counter() - begun)
            results.late_s = max(results.late_s, -ahead)
            yield step

    def _collect(self, transfers: Iterator[kvik.Transfer], most: int | None = None) -> list[kvik.Report]:
        """Keep at most so many transfers open; their reports in the order of the calls."""
        reports: list[kvik.Report] = []
        under_way: deque[kvik.Transfer] = deque()
        try:
            for transfer in transfers:
                under_way.append(transfer)
                if len(under_way) >= (most or self.options.inflight):
                    reports.append(self._end_of(under_way.popleft()))
            while under_way:
                reports.append(self._end_of(under_way.popleft()))
        finally:
            for transfer in under_way:
                transfer.cancel()
        return reports

    def _end_of(self, transfer: kvik.Transfer) -> kvik.Report:
        while True:
            try:
                report = transfer.wait(_UNHEARD)
            except kvik.WaitTimeout:
                self._be_heard()
            else:
                self._be_heard()
                return report

    def _be_heard(self) -> None:
        """Ask the target something now and then: one that hears nothing takes this side for gone."""
        if time.perf_counter() - self._heard >= _UNHEARD:
            self._peer.cpu_s()
            self._heard = time.perf_counter()

    def memcpy(self) -> Slice:
        """Gather the same pages of this side on one thread, as the limit that the memory sets."""
        latencies, payload = [], 0
        largest = max(step.elements.id_bytes * step.moved.pages.size for step in self._steps)
        scratch = np.ones(largest, dtype=np.uint8)  # written: no copy pays for a page's first touch
        cpu, begun = time.process_time(), time.perf_counter()
        before = begun
        for step in self._steps:
            self._gather(step, scratch)
            after = time.perf_counter()
            latencies.append(after - before)
            payload += step.moved.bytes
            self._be_heard()
            before = time.perf_counter()
        return Slice(payload, before - begun, time.process_time() - cpu, 0.0, tuple(latencies))

    def _gather(self, step: Step, scratch: Bytes) -> None:
        elements, ids = step.elements, step.moved.pages.astype(np.intp)
        row = elements.id_bytes // (elements.layers[1] - elements.layers[0])
        for number, layer in enumerate(range(*elements.layers)):
            view = elements.layer(self._regions[step.region].bytes, layer)
            if elements.parts == 1 and row == elements.dims.page_stride:
                # One memcpy a page and no copy between: `mode="clip"` writes straight to `out`.
                out = scratch[number * row * ids.size : (number + 1) * row * ids.size].reshape(ids.size, row)
                np.take(view.reshape(-1, row), ids, axis=0, out=out, mode="clip")
            else:
                view[ids // elements.parts, ids % elements.parts]

    def stream_turn(self, stream: StreamInitiator, chunk: int, rate: float) -> Slice:
        """The same bytes over one plain TCP connection, which moves about `rate` bytes a second."""
        # In pieces, and the target hears from this side between them. A piece is a tenth of what the time
        # allows: a network may grow that much slower than it was when it was tried.
        piece = max(int(rate * _UNHEARD / 10), 1)
        target_cpu, cpu, begun = self._peer.cpu_s(), time.process_time(), time.perf_counter()
        payload = 0
        for op in ("read", "write"):
            total = sum(step.moved.bytes for step in self._steps if step.moved.op == op)
            payload += total
            while total:
                part = min(total, piece)
                stream.turn(op, part, chunk)
                total -= part
                self._be_heard()
        wall = time.perf_counter() - begun
        cpu = time.process_time() - cpu
        return Slice(payload, wall, cpu, self._peer.cpu_s() - target_cpu)


def _fresh(ids: PageIds, seen: Flags) -> PageIds:
    """Those that were not seen yet, which are from now on."""
    found = np.unique(ids[~seen[ids]])
    seen[found] = True
    return found


def _used_pages(steps: list[Step], region: str) -> int:
    """Pages of a region that are touched on the side that touches more of them."""
    own = [step for step in steps if step.region == region]

    def count(lists: list[PageIds]) -> int:
        return int(np.unique(np.concatenate(lists)).size)

    mine = [step.moved.pages // np.uint32(step.moved.parts) for step in own]
    theirs = [step.positions // np.uint32(step.moved.parts) for step in own]
    return max(count(mine), count(theirs))


def judge(step: Step, report: kvik.Report, options: ReplayOptions, results: Results) -> None:
    """Refuse a transfer that was not the recorded one."""
    if report.bytes != step.moved.bytes:
        raise CheckError(f"a transfer of {report.bytes} bytes; recorded were {step.moved.bytes}")
    if not as_asked(options.transport, report.transport):
        raise CheckError(f"a transfer went over {report.transport}, not over {options.transport}")
    results.used.note(report)


@contextmanager
def _peer(options: ReplayOptions, address: str | None, secret: str | None) -> Iterator[ReplayPeer]:
    if address is not None:
        peer = ReplayPeer.join(address, secret)
    else:
        peer = ReplayPeer.start(target_options(options, "127.0.0.1:0"), secret, MODULE)
    try:
        yield peer
    finally:
        peer.close()


def target_options(options: ReplayOptions, engine_listen: str) -> TargetOptions:
    """What a target is started with: its own buffer is for the plain TCP stream only."""
    return TargetOptions(STREAM_BUFFER, "host", "auto", options.channels, options.verify, engine_listen)


def _demand_bounded(steps: list[Step], options: ReplayOptions) -> None:
    """Refuse a pace at which the grants would end before the replay does."""
    if options.speed is None:
        return
    span, day = (steps[-1].moved.t - steps[0].moved.t) / options.speed, 86400.0
    if options.rounds * span >= LONGEST_GRANT_SECONDS:
        raise TraceError(
            f"{options.rounds} rounds of {span / day:.1f} days would outlive the grants, which end after "
            f"{LONGEST_GRANT_SECONDS / day:.0f} days: use fewer --rounds, or a higher --speed"
        )


def execute(results: Results, address: str | None, secret: str | None, say: Say) -> None:
    """Replay a recording. Raises TraceError, BenchError, kvik.KvikError."""
    options = results.options
    steps, regions = plan(results.trace, results)
    results.steps = len(steps)
    results.recorded_s = [step.moved.times["total_s"] for step in steps if "total_s" in step.moved.times]
    _demand_bounded(steps, options)
    with ExitStack() as stack:
        peer = stack.enter_context(_peer(options, address, secret))
        results.target = peer.facts
        engine = engine_at(
            secret=secret,
            transport="auto",
            verify=options.verify,
            channels=options.channels,
            name="replay-initiator",
        )
        stack.callback(engine.close, timeout=CLOSE_SECONDS)
        replay = Replay(options, engine, peer, steps, regions)
        buffer = bytearray(STREAM_BUFFER)
        stream = peer.stream(memoryview(buffer))
        stack.callback(stream.close)
        say("writing and comparing bytes")
        replay.fill()
        replay.check(results)
        results.send_bytes, rate = fastest_chunk(steps[0].moved.op, stream)
        for number in range(options.rounds):
            say(f"round {number + 1} of {options.rounds}")
            results.kvik.slices.append(replay.turn(results))
            results.memcpy.slices.append(replay.memcpy())
            results.stream.slices.append(replay.stream_turn(stream, results.send_bytes, rate))
