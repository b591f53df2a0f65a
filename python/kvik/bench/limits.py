"""What the machine does with the same pages without kvik: one thread's memcpy, and one plain TCP stream.

Each gets its turns in the same rounds as kvik, so that a neighbour on the machine slows all of them alike.
"""

from __future__ import annotations

import time
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvik.bench.figures import Slice
from kvik.bench.pages import Cell, PagePlan
from kvik.bench.pattern import Bytes
from kvik.bench.peer import Peer
from kvik.bench.stream import CHUNKS, StreamInitiator

_TRIAL_BYTES = 32 << 20
_TRIAL_SECONDS = 0.03


class Contender(Protocol):
    """Whatever gets turns in a cell."""

    name: str

    def turn(self, seconds: float) -> Slice:
        """Move batches for about ``seconds``, at least one."""
        ...


class Memcpy:
    """Copies the pages of one batch after the other between two buffers of this process, on one thread, in C.

    Contiguous batches are one copy each. Scattered ones are gathered by ``numpy.take`` (one ``memcpy`` a
    page, no copy between: ``mode="clip"`` writes straight to ``out``) into consecutive pages, which favours
    the limit a little.
    """

    name = "memcpy"

    def __init__(self, plan: PagePlan, source: Bytes, destination: Bytes) -> None:
        shape = (plan.buffer_pages, plan.page_bytes)
        size = plan.buffer_pages * plan.page_bytes
        self._plan = plan
        self._source: npt.NDArray[np.uint8] = source[:size].reshape(shape)
        self._destination: npt.NDArray[np.uint8] = destination[:size].reshape(shape)
        self._next = 0
        self._ids = [plan.target_ids(batch).astype(np.intp) for batch in range(plan.batches)]

    def copy(self, batch: int) -> None:
        """Copy one batch."""
        ids, start = self._ids[batch], batch * self._plan.pages
        out = self._destination[start : start + self._plan.pages]
        if self._plan.spread == "scattered":
            np.take(self._source, ids, axis=0, out=out, mode="clip")
        else:
            first = int(ids[0])
            np.copyto(out, self._source[first : first + self._plan.pages])

    def turn(self, seconds: float) -> Slice:
        """Copy batches for about ``seconds``."""
        latencies: list[float] = []
        cpu, start = time.process_time(), time.perf_counter()
        before, end = start, start + seconds
        while not latencies or before < end:
            self.copy(self._next)
            self._next = (self._next + 1) % self._plan.batches
            after = time.perf_counter()
            latencies.append(after - before)
            before = after
        payload = len(latencies) * self._plan.pages * self._plan.page_bytes
        return Slice(payload, before - start, time.process_time() - cpu, 0.0, tuple(latencies))


class TcpStream:
    """One TCP connection that carries payload without a pause, with the size of a send that was fastest."""

    name = "tcp stream"

    def __init__(self, cell: Cell, peer: Peer, stream: StreamInitiator, chunk: int, rate: float) -> None:
        self._cell = cell
        self._peer = peer
        self._stream = stream
        self._chunk = chunk
        self._rate = rate

    def turn(self, seconds: float) -> Slice:
        """Move about as many whole batches as the last turn's rate promises."""
        batches = max(1, round(self._rate * seconds / self._cell.batch_bytes))
        total = batches * self._cell.batch_bytes
        target_cpu = self._peer.cpu_s()
        cpu, start = time.process_time(), time.perf_counter()
        self._stream.turn(self._cell.op, total, self._chunk)
        wall = time.perf_counter() - start
        cpu = time.process_time() - cpu
        if seconds:  # one batch to warm up is bound by its start, and says nothing of the rate
            self._rate = total / wall
        return Slice(total, wall, cpu, self._peer.cpu_s() - target_cpu)


def fastest_chunk(op: str, stream: StreamInitiator) -> tuple[int, float]:
    """Try every size of a send, three turns each in rotation; gives the one with the best turn, its rate."""
    best = dict.fromkeys(CHUNKS, 0.0)
    total = _TRIAL_BYTES
    for attempt in range(4):
        for chunk in CHUNKS:
            start = time.perf_counter()
            stream.turn(op, total, chunk)
            rate = total / (time.perf_counter() - start)
            if attempt:  # The first rotation warms the connection up.
                best[chunk] = max(best[chunk], rate)
            total = max(_TRIAL_BYTES, int(rate * _TRIAL_SECONDS))
    chunk = max(best, key=lambda size: best[size])
    return chunk, best[chunk]
