"""One rank's KV memory: of a model's true size and layout, layers in separate areas as vLLM has them.

Seen as 64-bit words it is ``[layers, pages, heads, tokens, words]``, with K and V of a token and head packed
side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from kvik.emulator.content import WORD, Words
from kvik.errors import InvalidArgument
from kvik.handover.memory import KvMemory
from kvik.handover.native import Engine, Region
from kvik.handover.protocol import KvShape
from kvik.shapes import ModelShape, RankLayout


def pages_in(shape: ModelShape, page_tokens: int, tp: int, nbytes: int) -> int:
    """How many pages fit into `nbytes` of one rank; `InvalidArgument` when not one does."""
    page = shape.page_bytes(page_tokens, tp)
    if nbytes < page:
        raise InvalidArgument(
            f"--kv-memory of {nbytes} bytes holds not one page: a page of {page_tokens} tokens of "
            f"{shape.name} is {page} bytes on each of {tp} rank(s)"
        )
    return nbytes // page


@dataclass(frozen=True)
class PoolMemory(KvMemory):
    """KV memory that comes into being when the rank's engine does.

    plain: memory of this process that the engine registers; otherwise memory that the engine allocates and
    peers on this host can map.
    """

    plain: bool = False

    def region(self, engine: Engine) -> Region:
        """The region, whose memory `words` views from then on."""
        if self.plain:
            memory = np.empty(self.nbytes, dtype=np.uint8)
            region = engine.register(memory)
        else:
            region = cast(Any, engine).allocate(self.nbytes)
            memory = np.frombuffer(memoryview(cast(Any, region)), dtype=np.uint8)
        self.owner.append(memory)
        return region


def pool_memory(model: ModelShape, layout: RankLayout, pages: int, *, plain: bool) -> PoolMemory:
    """Describe a rank's memory of so many pages; `InvalidArgument` for rows that are not whole words."""
    row = layout.content * layout.element_bytes
    if row % WORD:
        raise InvalidArgument(
            f"the KV of one token and head is {row} bytes; the emulator needs a multiple of {WORD}"
        )
    shape = KvShape(
        kind=model.attention,
        layers=layout.layers,
        kv_heads=model.kv_heads,
        content=layout.content,
        dtype=model.dtype,
        tp=layout.tp,
        stages=(layout.layers,),
        heads=len(layout.heads),
        block_tokens=layout.page_tokens,
        order="HNC",
        block_bytes=layout.block_bytes,
    )
    stride = layout.layer_stride(pages)
    return PoolMemory(
        address=0,  # unknown until `region` has made it; nothing asks for it before
        nbytes=stride * layout.layers,
        num_blocks=pages,
        block_stride=layout.block_bytes,
        layers=tuple(str(layer) for layer in range(layout.layers)),
        layer_offsets=[layer * stride for layer in range(layout.layers)],
        head_stride=layout.block_bytes // len(layout.heads),
        shape=shape,
        owner=[],
        plain=plain,
    )


def words_of(memory: PoolMemory) -> Words:
    """The memory as ``[layers, pages, heads, tokens, words]``, once its region exists."""
    shape = memory.shape
    whole: np.ndarray[Any, np.dtype[np.uint8]] = memory.owner[0]
    return whole.view(np.uint64).reshape(shape.layers, memory.num_blocks, shape.heads, shape.block_tokens, -1)
