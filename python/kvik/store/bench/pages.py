"""The blocks that are moved: registered memory with something in it that tells each byte's place."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import kvik
from kvik.bench.errors import CheckError
from kvik.store.bench.models import BlockShape

Bytes = npt.NDArray[np.uint8]


@dataclass
class Pages:
    """Two buffers of as many blocks: what is copied and put, and where copies and gets go.

    order: which block each of the others is, a random permutation.
    """

    shape: BlockShape
    blocks: int
    layout: kvik.Layout
    by_layer: bool
    regions: tuple[kvik.Region, kvik.Region]
    source: Bytes
    target: Bytes
    order: npt.NDArray[np.uint32]

    @classmethod
    def make(cls, engine: kvik.Engine, shape: BlockShape, blocks: int, *, by_layer: bool, seed: int) -> Pages:
        """Allocate both, all of it touched. Raises MemoryCapReached."""
        layout = shape.layout(blocks, by_layer=by_layer)
        regions = (engine.allocate(layout.nbytes), engine.allocate(layout.nbytes))
        source, target = (np.frombuffer(memoryview(region), dtype=np.uint8) for region in regions)
        random = np.random.default_rng(seed)
        some = random.integers(0, 256, 1 << 20, dtype=np.uint8)
        for at in range(0, source.size, some.size):
            part = source[at : at + some.size]
            part[:] = some[: part.size]
            part[: min(8, part.size)] = np.frombuffer(at.to_bytes(8, "little"), dtype=np.uint8)[: part.size]
        target[:] = 0
        order = random.permutation(blocks).astype(np.uint32)
        return cls(shape, blocks, layout, by_layer, regions, source, target, order)

    def pages(self, which: int) -> kvik.PageSet:
        """All blocks of one buffer, in the random order."""
        return self.regions[which].pages(self.layout, self.order)

    def rows(self, which: int) -> Bytes:
        """One buffer as ``[blocks, bytes]``, or ``[layers, blocks, bytes]`` where it lies layer by layer."""
        flat = (self.source, self.target)[which]
        if self.by_layer:
            return flat.reshape(self.shape.layers, self.blocks, 2 * self.shape.run)
        return flat.reshape(self.blocks, self.shape.bytes)

    def poison(self) -> None:
        """Make sure that what is compared next was written since."""
        self.target[:] = 0x5A

    def check(self) -> None:
        """Compare every byte of both buffers; raises `CheckError`."""
        if not np.array_equal(self.source, self.target):
            raise CheckError(f"{self.shape.model}: what came back is not what was put")
