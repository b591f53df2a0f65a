"""Seven ways to copy blocks within a machine, by the names that the article gives them.

Each copies the same random blocks from the first buffer of `Pages` to the second. What a machine cannot do
is not measured, and says why.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from kvik.bench.errors import BenchError
from kvik.store.bench.pages import Pages

Copy = Callable[[], object]


def memcpy(pages: Pages, pool: ThreadPoolExecutor, threads: int) -> Copy:
    """The C library's `memcpy`, a call for each run of memory, by so many threads."""
    row = 2 * pages.shape.run if pages.by_layer else pages.shape.bytes
    layers = pages.shape.layers if pages.by_layer else 1
    from_, to = pages.source.ctypes.data, pages.target.ctypes.data
    offsets = [(layer * pages.blocks + int(block)) * row for layer in range(layers) for block in pages.order]
    shares = [offsets[share::threads] for share in range(threads)]

    def copy(share: list[int]) -> None:
        for offset in share:
            ctypes.memmove(to + offset, from_ + offset, row)

    if threads == 1:
        return lambda: copy(offsets)
    return lambda: list(pool.map(copy, shares))


def layer_by_layer(pages: Pages) -> Copy:
    """A loop over layers, and in it over blocks: the pages lie layer by layer."""
    shape = (pages.shape.layers, pages.blocks, 2 * pages.shape.run)
    from_, to = pages.source.reshape(shape), pages.target.reshape(shape)

    def copy() -> None:
        for layer in range(shape[0]):
            source, target = from_[layer], to[layer]
            for block in pages.order:
                target[block] = source[block]

    return copy


def block_by_block(pages: Pages) -> Copy:
    """A loop over blocks."""
    shape = (pages.blocks, pages.shape.bytes)
    from_, to = pages.source.reshape(shape), pages.target.reshape(shape)

    def copy() -> None:
        for block in pages.order:
            to[block] = from_[block]

    return copy


def fancy_index(pages: Pages) -> Copy:
    """One assignment with arrays of block numbers, which makes a copy in between."""
    shape = (pages.blocks, pages.shape.bytes)
    from_, to = pages.source.reshape(shape), pages.target.reshape(shape)

    def copy() -> None:
        to[pages.order] = from_[pages.order]

    return copy


def index_copy(pages: Pages) -> Copy:
    """PyTorch's `index_copy_`, and `index_select` before it."""
    torch = _torch()
    shape = (pages.blocks, pages.shape.bytes)
    from_, to = (torch.from_numpy(flat.reshape(shape)) for flat in (pages.source, pages.target))
    order = torch.from_numpy(pages.order.astype(np.int64))
    return lambda: to.index_copy_(0, order, from_.index_select(0, order))


def swap_in(pages: Pages) -> Copy:
    """From memory to a GPU, block by block on one stream."""
    return _swap(pages, to_gpu=True)


def swap_out(pages: Pages) -> Copy:
    """From a GPU to memory, block by block on one stream."""
    return _swap(pages, to_gpu=False)


def _swap(pages: Pages, *, to_gpu: bool) -> Copy:
    torch = _torch()
    if not torch.cuda.is_available():
        raise BenchError("no GPU that PyTorch can use")
    shape = (pages.blocks, pages.shape.bytes)
    here = torch.from_numpy(pages.source.reshape(shape)).pin_memory()
    there = torch.empty(shape, dtype=torch.uint8, device="cuda")
    from_, to = (here, there) if to_gpu else (there, here)

    def copy() -> None:
        for block in pages.order:
            to[int(block)].copy_(from_[int(block)], non_blocking=True)
        torch.cuda.synchronize()

    return copy


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise BenchError("no PyTorch") from None
    return torch


BASELINES: dict[str, Callable[[Pages], Copy]] = {
    "layer by layer": layer_by_layer,
    "block by block": block_by_block,
    "fancy index": fancy_index,
    "index_copy_": index_copy,
    "swap in": swap_in,
    "swap out": swap_out,
}
"""Besides `memcpy`, with which they are compared."""
