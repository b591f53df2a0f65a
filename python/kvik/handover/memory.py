"""Where one rank's KV blocks lie, as an adapter found them: plain numbers that become one kvik layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvik.handover.native import Engine, Native, Region
from kvik.handover.protocol import KvShape


@dataclass(frozen=True)
class KvMemory:
    """The one storage behind all of a rank's KV, and how the blocks of one group of layers lie in it (bytes
    from its beginning).

    address, nbytes: the storage. num_blocks: KV blocks in it. block_stride: bytes from one block of a layer
    to the next. layers: their names, in order. layer_offsets: where each begins. head_stride: bytes from one
    head of a block to the next, where heads are outermost. owner: kept for as long as kvik may touch the
    memory. gpu: the PCI address of the GPU that it lies on (`native.gpu_of`); None for the host's memory.
    """

    address: int
    nbytes: int
    num_blocks: int
    block_stride: int
    layers: tuple[str, ...]
    layer_offsets: list[int]
    head_stride: int
    shape: KvShape
    owner: Any
    gpu: str | None = None

    def region(self, engine: Engine) -> Region:
        """The storage as a region of `engine`. An adapter that lets kvik allocate its KV overrides this."""
        return engine.register((self.address, self.nbytes))

    def layout(self, native: Native) -> Any:
        """The kvik layout: a page is a KV block, a slice one head of it, or all heads where those lie inside
        the tokens."""
        slices = self.shape.heads if self.shape.heads_outermost else 1
        strides = {"slice_stride": self.head_stride} if slices > 1 else {}
        return native.Layout(
            self.num_blocks,
            self.shape.block_bytes // slices,
            page_stride=self.block_stride,
            layers=len(self.layer_offsets),
            layer_offsets=self.layer_offsets,
            slices=slices,
            **strides,
        )
