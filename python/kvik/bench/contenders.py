"""kvik's turns: batches through the public API, as a serving engine would post them.

A slot is a thread that has one batch in flight. Each batch is a page set made from an array of page ids, one
call of ``read`` or ``write`` and one ``wait``; its latency runs from before the first to after the last of
these.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import kvik
from kvik.bench import pattern
from kvik.bench.errors import CheckError
from kvik.bench.figures import Series, Slice
from kvik.bench.memory import Memory
from kvik.bench.pages import Cell, PagePlan
from kvik.bench.peer import Peer

CHECKED_BYTES = 64 << 20
REPEAT_SECONDS = 10.0
NIC_TRANSPORTS = ("libfabric", "verbs", "plugin")
"""What reports call the transport `nics`."""


def as_asked(asked: str, used: str) -> bool:
    """Whether a report's transport is the one that was asked for."""
    return asked in ("auto", used) or (asked == "nics" and used in NIC_TRANSPORTS)


@dataclass
class Used:
    """What kvik's reports said of the batches of a cell."""

    paths: dict[str, set[str]] = field(default_factory=dict)
    checks: set[tuple[str, ...]] = field(default_factory=set)
    rejected_transports: set[str] = field(default_factory=set)

    def note(self, report: kvik.Report) -> None:
        """Remember what one report says."""
        self.paths.setdefault(report.transport, set()).add(report.mechanism)
        self.checks.add(tuple(report.checks))
        self.rejected_transports.update(report.rejected_transports)


class Kvik:
    """One transport of kvik in one cell."""

    def __init__(
        self,
        transport: kvik.TransportName,
        cell: Cell,
        plan: PagePlan,
        engine: kvik.Engine,
        memory: Memory,
        peer: Peer,
        inflight: int,
        verify: kvik.VerifyName | None = None,
        traffic_class: kvik.TrafficClassName = "handover",
    ) -> None:
        self.name = f"kvik {transport}"
        self.transport = transport
        self.verify = verify
        self.traffic_class = traffic_class
        self.used = Used()
        self._cell = cell
        self._plan = plan
        self._engine = engine
        self._memory = memory
        self._layout = memory.layout(cell.page_bytes)
        self._peer = peer
        self._slots = min(inflight, plan.batches)
        self._ticket: kvik.Ticket | None = None
        self._next = list(range(self._slots))

    def open(self, ticket: str) -> None:
        """Take the ticket of the cell."""
        self._ticket = kvik.Ticket(ticket)

    def turn(self, seconds: float) -> Slice:
        """Keep every slot busy for about ``seconds``; each finishes the batch that it has begun."""
        end = time.perf_counter() + seconds
        return self._run([self._walk(slot, end) for slot in range(self._slots)])

    def repeat(self, count: int, found: Series) -> None:
        """Move so many batches, one after the other; in parts, each of which is in ``found`` as it ends, and
        between which the target hears of us.
        """
        while count:
            walk = self._walk(0, time.perf_counter() + REPEAT_SECONDS)
            part = self._run([itertools.islice(walk, count)])
            found.slices.append(part)
            count -= len(part.latencies_s)

    def warm_up(self, seconds: float) -> None:
        """Walk over the whole buffer once, or for ``seconds``: afterwards mappings and connections exist."""
        end = time.perf_counter() + seconds
        self._run(
            [self._once(range(slot, self._plan.batches, self._slots), end) for slot in range(self._slots)]
        )

    def checked(self, salt: int, *, last: bool) -> None:
        """Move the first or the last batches over poisoned pages, then compare every byte. Never timed."""
        count = max(self._slots, CHECKED_BYTES // self._cell.batch_bytes)
        count = min(count, self._plan.batches)
        first = self._plan.batches - count if last else 0
        self._poison(first, count)
        batches = range(first, first + count)
        self._run([iter(batches[slot :: self._slots]) for slot in range(self._slots)])
        try:
            self._compare(first, count, salt)
        except CheckError as failure:
            where = "last" if last else "first"
            raise CheckError(
                f"{self._cell.op} of {self._cell.pages} pages of {self._cell.page_bytes} B over "
                f"{self.transport}, {where} batches: {failure}"
            ) from None

    def _walk(self, slot: int, end: float) -> Iterator[int]:
        first = True
        while first or time.perf_counter() < end:
            first = False
            batch = self._next[slot]
            following = batch + self._slots
            self._next[slot] = following if following < self._plan.batches else slot
            yield batch

    def _once(self, batches: range, end: float) -> Iterator[int]:
        for batch in batches:
            yield batch
            if time.perf_counter() >= end:
                return

    def _run(self, walks: list[Iterator[int]]) -> Slice:
        slots = [_Slot(self._move, walk) for walk in walks]
        target_cpu, cpu = self._peer.cpu_s(), time.process_time()
        try:
            for slot in slots:
                slot.start()
            for slot in slots:
                slot.join()
        except KeyboardInterrupt:
            for slot in slots:
                slot.stop()
            raise
        cpu = time.process_time() - cpu
        target_cpu = self._peer.cpu_s() - target_cpu
        for slot in slots:
            if slot.failure is not None:
                raise slot.failure
        latencies = tuple(after - before for slot in slots for before, after in slot.times)
        wall = max(s.times[-1][1] for s in slots) - min(s.times[0][0] for s in slots)
        for slot in slots:
            self._judge(slot.reports)
        return Slice(len(latencies) * self._cell.batch_bytes, wall, cpu, target_cpu, latencies)

    def _move(self, batch: int) -> kvik.Transfer:
        ticket = self._ticket
        if ticket is None:
            raise CheckError("no cell is open")
        local = self._memory.pages(self._layout, self._plan.initiator_ids(batch))
        call = self._engine.read if self._cell.op == "read" else self._engine.write
        ids = self._plan.target_ids(batch)
        return call(
            local, ticket, ids, transport=self.transport, verify=self.verify,
            traffic_class=self.traffic_class,
        )  # fmt: skip

    def _judge(self, reports: list[kvik.Report]) -> None:
        for report in reports:
            if report.bytes != self._cell.batch_bytes:
                raise CheckError(f"{self.name} reports {report.bytes} bytes of {self._cell.batch_bytes}")
            if not as_asked(self.transport, report.transport):
                raise CheckError(f"{self.name} went over {report.transport}")
            self.used.note(report)

    def _poison(self, first: int, count: int) -> None:
        if self._cell.op == "write":
            self._peer.poison(first, count)
            return
        for batch in range(first, first + count):
            pattern.poison(self._memory.bytes, self._plan.page_bytes, self._plan.initiator_ids(batch))

    def _compare(self, first: int, count: int, salt: int) -> None:
        if self._cell.op == "write":
            self._peer.check(first, count, salt)
            return
        for batch in range(first, first + count):
            own, source = self._plan.initiator_ids(batch), self._plan.target_ids(batch)
            wrong = pattern.check(self._memory.bytes, self._plan.page_bytes, own, source, salt)
            if wrong is not None:
                raise CheckError(str(wrong))


class _Slot:
    """A thread with one batch in flight."""

    def __init__(self, move: Callable[[int], kvik.Transfer], walk: Iterator[int]) -> None:
        self.times: list[tuple[float, float]] = []
        self.reports: list[kvik.Report] = []
        self.failure: BaseException | None = None
        self._move = move
        self._walk = walk
        self._stopped = False
        self._current: kvik.Transfer | None = None
        self._thread = threading.Thread(target=self._run, name="bench-slot", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        """Wait for the walk's end; every batch ends by kvik's own deadline."""
        self._thread.join()

    def stop(self) -> None:
        """End the walk now: cancel what is in flight."""
        self._stopped = True
        if self._current is not None:
            self._current.cancel()
        self._thread.join()

    def _run(self) -> None:
        try:
            for batch in self._walk:
                if self._stopped:
                    return
                before = time.perf_counter()
                self._current = transfer = self._move(batch)
                report = transfer.wait()
                self.times.append((before, time.perf_counter()))
                self.reports.append(report)
        except Exception as failure:  # Raised again by the thread that waits for the turn.
            self.failure = failure
