"""Bytes that know which element they belong to, wherever a layout puts it.

Word `w` of the element (layer, id, slice) is `(number * words + w + 1) * MULTIPLIER + salt` modulo 2**64,
where `number` is `layer * 2**40 + id * slices + slice` and `words` is how many words an element begins; what
is too much of the last one is left off. So a layout of any strides and offsets can be painted, and a word
that is found in the wrong place is seen. Ids count parts of pages, as in `Region.pages`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvik.bench.pattern import MULTIPLIER, POISON, Bytes
from kvik.trace.file import Dims, PageIds

_MODULUS = 1 << 64
_AT_ONCE = 1 << 12
"""Ids that are looked at together, so that what is compared with stays small."""


@dataclass(frozen=True)
class Elements:
    """What a page set takes of a layout: its layers, slices and parts."""

    dims: Dims
    layers: tuple[int, int]
    slices: tuple[int, int]
    parts: int

    @property
    def piece(self) -> int:
        """Bytes of one part of a run."""
        return self.dims.run_bytes // self.parts

    @property
    def id_bytes(self) -> int:
        """Bytes that an id stands for."""
        slices = self.slices[1] - self.slices[0]
        return self.piece * slices * (self.layers[1] - self.layers[0])

    def layer(self, memory: Bytes, layer: int) -> Bytes:
        """A layer as an array of (page, part, slice, byte) over the memory itself."""
        dims = self.dims
        if dims.layer_offsets is not None:
            start = dims.offset + dims.layer_offsets[layer]
        else:
            start = dims.offset + layer * (dims.layer_stride or 0)
        count = self.slices[1] - self.slices[0]
        return np.lib.stride_tricks.as_strided(
            memory[start + self.slices[0] * dims.slice_stride :],
            shape=(dims.pages, self.parts, count, self.piece),
            strides=(dims.page_stride, self.piece, dims.slice_stride, 1),
        )

    def expected(self, layer: int, ids: PageIds, salt: int) -> Bytes:
        """The bytes of some ids in a layer, as (id, slice, byte)."""
        first, end = self.slices
        words = -(-self.piece // 8)
        row = ids.astype(np.uint64)[:, None] * np.uint64(self.dims.slices)
        row = row + np.arange(first, end, dtype=np.uint64)[None, :]
        number = (row + np.uint64((layer << 40) % _MODULUS)) * np.uint64(words)
        word = number[:, :, None] + np.arange(1, words + 1, dtype=np.uint64)[None, None, :]
        word = word * np.uint64(MULTIPLIER) + np.uint64(salt % _MODULUS)
        return np.ascontiguousarray(word).view(np.uint8)[:, :, : self.piece]

    def paint(self, memory: Bytes, ids: PageIds, salt: int) -> None:
        """Write the pattern into some ids."""
        for part in _in_parts(ids):
            for layer in range(*self.layers):
                view = self.layer(memory, layer)
                view[part // self.parts, part % self.parts] = self.expected(layer, part, salt)

    def poison(self, memory: Bytes, ids: PageIds) -> None:
        """Overwrite some ids with one byte all over."""
        for part in _in_parts(ids):
            for layer in range(*self.layers):
                self.layer(memory, layer)[part // self.parts, part % self.parts] = POISON

    def check(self, memory: Bytes, ids: PageIds, sources: PageIds, salt: int) -> str | None:
        """Compare some ids with the pattern of the ids that they were moved from; the first difference."""
        for part, source in zip(_in_parts(ids), _in_parts(sources), strict=True):
            for layer in range(*self.layers):
                found = self.layer(memory, layer)[part // self.parts, part % self.parts]
                expected = self.expected(layer, source, salt)
                if not np.array_equal(found, expected):
                    at, piece, byte = (int(where[0]) for where in np.nonzero(found != expected))
                    return (
                        f"id {part[at]} (moved from {source[at]}), layer {layer}, slice "
                        f"{self.slices[0] + piece}, byte {byte}: found {found[at, piece, byte]:#04x}, "
                        f"expected {expected[at, piece, byte]:#04x}"
                    )
        return None


def _in_parts(ids: PageIds) -> list[PageIds]:
    return [ids[at : at + _AT_ONCE] for at in range(0, ids.size, _AT_ONCE)]
