"""Threads that submit transfers and keep several in flight, and a point measured with them.

Each place for a transfer has batches of its own, so no two that are in flight touch the same page.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import kvik
from kvik.bench.errors import BenchError
from kvik.bench.figures import Slice, percentile
from kvik.bench.pages import Cell, PagePlan
from kvik.selftest.plan import REPEATS
from kvik.selftest.sides import Sides

_CHECKED = 4
"""Batches of a point whose bytes are compared, after its last repeat."""


@dataclass(frozen=True)
class Point:
    """What is measured at a time."""

    cell: Cell
    threads: int
    in_flight: int
    """Of each thread."""

    @property
    def places(self) -> int:
        """Transfers in flight at a time, of all threads."""
        return self.threads * self.in_flight

    @property
    def least_bytes(self) -> int:
        """Memory in which their pages are disjoint."""
        return self.places * self.cell.batch_bytes


class _Thread:
    """Submits round its places: waits for the oldest transfer, then begins the next one there."""

    def __init__(self, begin: Callable[[int], kvik.Transfer], places: list[list[int]], end: float) -> None:
        self.latencies: list[float] = []
        self.reports: list[kvik.Report] = []
        self.began = self.ended = 0.0
        self.failure: BaseException | None = None
        self._begin, self._places, self._end = begin, places, end
        self._thread = threading.Thread(target=self._run, name="selftest-submit", daemon=True)
        self.start, self.join = self._thread.start, self._thread.join

    def _run(self) -> None:
        try:
            self._submit()
        except Exception as failure:  # Raised again by the thread that waits for this one.
            self.failure = failure

    def _submit(self) -> None:
        in_flight: list[tuple[float, kvik.Transfer]] = []
        self.began = time.perf_counter()
        for batches in self._places:
            in_flight.append((time.perf_counter(), self._begin(batches[0])))
        turn = 0
        while in_flight:
            began, transfer = in_flight.pop(0)
            self.reports.append(transfer.wait())
            self.ended = time.perf_counter()
            self.latencies.append(self.ended - began)
            turn += 1
            if self.ended < self._end:
                place, lap = (turn - 1) % len(self._places), (turn - 1) // len(self._places) + 1
                batches = self._places[place]
                in_flight.append((time.perf_counter(), self._begin(batches[lap % len(batches)])))


def _turn(sides: Sides, point: Point, pages: PagePlan, ticket: kvik.Ticket, seconds: float) -> Slice:
    def begin(batch: int) -> kvik.Transfer:
        return sides.move(point.cell, pages, ticket, batch)

    places = [list(range(place, pages.batches, point.places)) for place in range(point.places)]
    target_cpu, cpu = sides.other.cpu_s(), time.process_time()
    end = time.perf_counter() + seconds
    threads = [_Thread(begin, places[number :: point.threads], end) for number in range(point.threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cpu, target_cpu = time.process_time() - cpu, sides.other.cpu_s() - target_cpu
    for thread in threads:
        if thread.failure is not None:
            raise thread.failure
        for report in thread.reports:
            sides.judge(report, point.cell.batch_bytes)
    latencies = tuple(latency for thread in threads for latency in thread.latencies)
    wall = max(thread.ended for thread in threads) - min(thread.began for thread in threads)
    return Slice(len(latencies) * point.cell.batch_bytes, wall, cpu, target_cpu, latencies)


def measure(sides: Sides, point: Point, seconds: float) -> dict[str, Any]:
    """Measure a point over memory that is filled: warm up, repeat, then compare bytes over poison."""
    cell, seed = point.cell, sides.plan.asked.seed
    if point.least_bytes > sides.buffer:
        raise BenchError(f"{point} takes {point.least_bytes} bytes, there are {sides.buffer}")
    pages, text = sides.granted(cell, seed)
    ticket = kvik.Ticket(text)
    _turn(sides, point, pages, ticket, 0.0)
    slices = [_turn(sides, point, pages, ticket, seconds / REPEATS) for _ in range(REPEATS)]
    compared = min(_CHECKED, pages.batches)
    sides.blank(cell.op)
    for batch in range(compared):
        sides.judge(sides.move(cell, pages, ticket, batch).wait(), cell.batch_bytes)
    sides.compare(cell, pages, 0, compared, seed)
    rates = [one.rate for one in slices]
    latencies = [latency for one in slices for latency in one.latencies_s]
    payload = sum(one.payload for one in slices)
    return {
        "op": cell.op,
        "block_bytes": cell.page_bytes,
        "pages": cell.pages,
        "threads": point.threads,
        "in_flight": point.in_flight,
        "bytes_per_s": {"median": statistics.median(rates), "low": min(rates), "high": max(rates)},
        "latency_s": {f"p{percent}": percentile(latencies, percent) for percent in (50, 90, 99)},
        "cpu_s_per_byte": {
            "this_side": sum(one.cpu_initiator_s for one in slices) / payload,
            "other_side": sum(one.cpu_target_s for one in slices) / payload,
        },
        "compared_bytes": compared * cell.batch_bytes,
        "repeats": [
            {
                "bytes": one.payload,
                "seconds": one.wall_s,
                "latencies_s": [round(latency, 7) for latency in one.latencies_s],
            }
            for one in slices
        ],
    }


def rate_text(point: dict[str, Any]) -> str:
    """GB/s (1e9 bytes a second): the median of the repeats, and the lowest and the highest."""
    rates = point["bytes_per_s"]
    low, high = rates["low"] / 1e9, rates["high"] / 1e9
    return f"{rates['median'] / 1e9:.2f} GB/s [{low:.2f}, {high:.2f}]"
