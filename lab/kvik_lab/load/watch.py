"""The client watches itself: its CPU time, how late its loop runs, and whether its clock was set."""

from __future__ import annotations

import asyncio
import time

from kvik_lab.records import Clock

_EVERY_S = 0.05


class Watch:
    """Runs beside a load. The two clocks are read as closely together as can be."""

    def __init__(self) -> None:
        self.largest_lag = 0.0
        self._largest_step = 0.0
        self._began = clocks()
        self._cpu = time.process_time()
        self._task = asyncio.create_task(self._look())

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        last = clocks()
        while True:
            due = loop.time() + _EVERY_S
            await asyncio.sleep(_EVERY_S)
            self.largest_lag = max(self.largest_lag, loop.time() - due)
            now = clocks()
            self._largest_step = max(self._largest_step, _step(last, now))
            last = now

    async def stop(self) -> tuple[Clock, float, float]:
        """The clock, and the CPU and wall seconds since the beginning."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        ended = clocks()
        clock = Clock(
            wall_before=self._began[0],
            wall_after=ended[0],
            monotonic_before=self._began[1],
            monotonic_after=ended[1],
            largest_step=self._largest_step,
        )
        return clock, time.process_time() - self._cpu, (ended[1] - self._began[1]) / 1e9


def clocks() -> tuple[int, int]:
    """Wall and monotonic clock in ns, read at once: of three tries the one in which least time passed."""
    best: tuple[int, int, int] | None = None
    for _ in range(3):
        before = time.monotonic_ns()
        wall = time.time_ns()
        took = time.monotonic_ns() - before
        if best is None or took < best[0]:
            best = (took, wall, before + took // 2)
    if best is None:
        raise AssertionError("no try was made")
    return best[1], best[2]


def _step(before: tuple[int, int], after: tuple[int, int]) -> float:
    """Seconds by which the wall clock went otherwise than the monotonic one."""
    return abs((after[0] - before[0]) - (after[1] - before[1])) / 1e9
