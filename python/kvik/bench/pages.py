"""Which pages a batch moves, on both sides, from a seed alone.

Initiator and target each compute the same plan, so that no list of page ids crosses the control connection.
The order comes from sorting a bijective 64-bit mix, not from a random generator of numpy, whose streams may
change between versions of the two hosts.

The batches of a plan are disjoint: two that are in flight together never touch the same page, and a walk over
all of them visits the whole buffer, so a small batch does not find its pages in the processor's cache from
last time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from kvik.bench.errors import BenchError

Op = Literal["read", "write"]
Spread = Literal["contiguous", "scattered"]
PageIds = npt.NDArray[np.uint32]

MIN_PAGE = 512
"""Smaller pages would make the plan of a large buffer larger than its use."""

_WORD = 0xFFFF_FFFF_FFFF_FFFF


@dataclass(frozen=True)
class Cell:
    """One row of the experiment: what is moved, whichever path moves it."""

    op: Op
    page_bytes: int
    pages: int

    @property
    def batch_bytes(self) -> int:
        """Payload of one batch."""
        return self.page_bytes * self.pages


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A bijection on 64-bit words that looks random (xor-shift and odd multiplication, as in splitmix64)."""
    values = values ^ (values >> np.uint64(30))
    values = values * np.uint64(0xBF58476D1CE4E5B9)
    values = values ^ (values >> np.uint64(27))
    values = values * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def permutation(count: int, seed: int) -> PageIds:
    """The numbers 0..count in an order that depends on ``seed`` alone."""
    start = np.uint64((seed * 0x9E3779B97F4A7C15 + 1) & _WORD)
    keys = _mix(np.arange(count, dtype=np.uint64) + start)
    return np.argsort(keys, kind="stable").astype(np.uint32)


class PagePlan:
    """The batches of one cell: ``batches`` pairs of equally long page id arrays, disjoint on either side."""

    def __init__(self, buffer: int, page_bytes: int, pages: int, spread: Spread, seed: int) -> None:
        if page_bytes < MIN_PAGE or page_bytes % 8 or pages < 1:
            raise BenchError(
                f"{pages} pages of {page_bytes} bytes: a page is a multiple of 8 bytes from {MIN_PAGE} up"
            )
        if spread not in get_args(Spread):
            raise BenchError(f"unknown layout {spread!r}")
        self.page_bytes = page_bytes
        self.pages = pages
        self.spread = spread
        self.buffer_pages = buffer // page_bytes
        self.batches = self.buffer_pages // pages
        if self.batches < 1:
            raise BenchError(f"a buffer of {buffer} bytes does not hold {pages} pages of {page_bytes} bytes")
        used = self.batches * pages
        if spread == "scattered":
            self._initiator = permutation(self.buffer_pages, 2 * seed)[:used]
            self._target = permutation(self.buffer_pages, 2 * seed + 1)[:used]
        else:
            # Half the buffer apart: a transfer that ignored the target's positions would not pass the check.
            self._initiator = np.arange(used, dtype=np.uint32)
            self._target = np.roll(self._initiator, (self.batches // 2) * pages)

    def _slot(self, batch: int) -> slice:
        if not 0 <= batch < self.batches:
            raise BenchError(f"batch {batch} of a plan with {self.batches}")
        return slice(batch * self.pages, (batch + 1) * self.pages)

    def initiator_ids(self, batch: int) -> PageIds:
        """Page ids of ``batch`` in the initiator's region."""
        return self._initiator[self._slot(batch)]

    def target_ids(self, batch: int) -> PageIds:
        """Page ids of ``batch`` in the target's region, in the same order."""
        return self._target[self._slot(batch)]
