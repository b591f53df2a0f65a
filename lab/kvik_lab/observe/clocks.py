"""Wall clock and monotonic clock, read together."""

from __future__ import annotations

import time
from dataclasses import dataclass

_TRIES = 3


@dataclass(frozen=True)
class Clocks:
    """Both at one moment, in ns: since the epoch, and of `time.monotonic_ns`."""

    wall: int
    monotonic: int


def clocks() -> Clocks:
    """Read both: of three tries, the one in which least time passed between."""
    tries = []
    for _ in range(_TRIES):
        before = time.monotonic_ns()
        wall = time.time_ns()
        took = time.monotonic_ns() - before
        tries.append((took, Clocks(wall, before + took // 2)))
    return min(tries, key=lambda one: one[0])[1]


def step(before: Clocks, after: Clocks) -> float:
    """Seconds by which the wall clock went otherwise than the monotonic one: it was set, or is being
    slewed."""
    return abs((after.wall - before.wall) - (after.monotonic - before.monotonic)) / 1e9
