"""The memory of either side: one region, and a numpy view of its bytes."""

from __future__ import annotations

import numpy as np

import kvik
from kvik.bench.pages import PageIds
from kvik.bench.pattern import Bytes


class Memory:
    """A registered buffer: ``host`` memory of the caller, or ``shared`` memory that kvik allocated."""

    def __init__(self, engine: kvik.Engine, kind: str, nbytes: int) -> None:
        self.bytes: Bytes
        if kind == "shared":
            self.region = engine.allocate(nbytes)
            self.bytes = np.frombuffer(memoryview(self.region), dtype=np.uint8)
        else:
            self.bytes = np.empty(nbytes, dtype=np.uint8)
            self.region = engine.register(self.bytes)
        # Every page of the machine is there before anything is timed.
        self.bytes[:] = 0

    def layout(self, page_bytes: int) -> kvik.Layout:
        """The buffer seen as consecutive pages of ``page_bytes``."""
        return kvik.Layout(self.bytes.size // page_bytes, page_bytes)

    def pages(self, layout: kvik.Layout, ids: PageIds) -> kvik.PageSet:
        """Pages ``ids`` of the buffer."""
        selected: kvik.PageSet = self.region.pages(layout, ids)
        return selected
