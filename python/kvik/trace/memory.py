"""Memory that lies as a recorded layout did, of which only the pages that are moved are ever there.

A layout can reach over all of a server's KV memory while a recording uses a part of it. The region is as long
as the layout; what is never touched takes no memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from typing import Any

import numpy as np

import kvik
from kvik.bench import facts
from kvik.bench.errors import BenchError
from kvik.bench.pattern import Bytes
from kvik.trace.file import Dims, PageIds
from kvik.trace.pattern import Elements


class Sparse:
    """A region with a layout, and its bytes."""

    def __init__(
        self, engine: kvik.Engine, dims: Dims, kind: str, used_pages: int, beside: Iterable[Sparse] = ()
    ) -> None:
        self.dims = dims
        self._layout = dims.layout()
        self.used = used_pages * dims.page_bytes
        """Bytes that will be there; those of the regions `beside` it have a place as well."""
        used, available = self.used + sum(one.used for one in beside), facts.memory_available()
        if available is not None and used > available // 2:
            raise BenchError(
                f"the recording uses {used >> 20} MiB of memory, more than half of the {available >> 20} MiB "
                "that are free: replay a shorter one, or on a larger machine"
            )
        self.bytes: Bytes
        if kind == "shared":
            self.region = engine.allocate(self._layout.nbytes)
            self.bytes = np.frombuffer(memoryview(self.region), dtype=np.uint8)
        else:
            self.bytes = np.frombuffer(mmap.mmap(-1, self._layout.nbytes), dtype=np.uint8)
            self.region = engine.register(self.bytes)

    def pages(self, elements: Elements, ids: Any) -> kvik.PageSet:
        """A page set over some of its layers and slices."""
        more: dict[str, Any] = {} if elements.parts == 1 else {"parts": elements.parts}
        return self.region.pages(self._layout, ids, layers=elements.layers, slices=elements.slices, **more)


def runs_of(ids: PageIds) -> list[tuple[int, int]]:
    """The inverse of `expanded`."""
    if ids.size == 0:
        return []
    breaks = np.flatnonzero(np.diff(ids.astype(np.int64)) != 1) + 1
    starts = np.concatenate([[0], breaks])
    counts = np.diff(np.concatenate([starts, [ids.size]]))
    return [(int(ids[start]), int(count)) for start, count in zip(starts, counts, strict=True)]
