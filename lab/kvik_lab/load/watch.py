"""The client watches itself: its CPU time, how late its loop runs, and whether its clock was set."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvik_lab.observe.clocks import clocks, step
from kvik_lab.records import Clock

_EVERY_S = 0.05


class Watch:
    """Runs beside a load. Lag and CPU time are those of the measured stretches, which `timed` encloses."""

    def __init__(self) -> None:
        self.largest_lag = 0.0
        self.cpu_seconds = 0.0
        self.wall_seconds = 0.0
        self._timed = False
        self._largest_step = 0.0
        self._began = clocks()
        self._task = asyncio.create_task(self._look())

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        last = clocks()
        while True:
            due, timed = loop.time() + _EVERY_S, self._timed
            await asyncio.sleep(_EVERY_S)
            if timed and self._timed:
                self.largest_lag = max(self.largest_lag, loop.time() - due)
            now = clocks()
            self._largest_step = max(self._largest_step, step(last, now))
            last = now

    @contextmanager
    def timed(self) -> Iterator[None]:
        """A stretch that is measured: without garbage collection, whose pauses would be taken for the
        server's."""
        gc.collect()
        was = gc.isenabled()
        gc.disable()
        cpu, wall = time.process_time(), time.monotonic()
        self._timed = True
        try:
            yield
        finally:
            self._timed = False
            self.cpu_seconds += time.process_time() - cpu
            self.wall_seconds += time.monotonic() - wall
            if was:
                gc.enable()

    async def stop(self) -> Clock:
        """The clocks over all of it."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        ended = clocks()
        return Clock(
            wall_before=self._began.wall,
            wall_after=ended.wall,
            monotonic_before=self._began.monotonic,
            monotonic_after=ended.monotonic,
            largest_step=self._largest_step,
        )
