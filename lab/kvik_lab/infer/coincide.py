"""Whether changes of several series fall together, or would do so by chance as often.

That two backends both change at iteration 18 points to what they share (host, client, clock, count of
requests) if it is unlikely by chance. The test holds each series' pattern of changes and shifts it cyclically
over the places where changes can be: given that each series has these changes, would they meet?
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvik_lab.errors import LabError
from kvik_lab.infer.screen import min_segment

_LISTED = 20_000


@dataclass(frozen=True)
class Coincidence:
    """How many changes of the first series have one of every other within `window`, and how often chance
    does as well: `p`, with its standard error if it was drawn (0: all shifts were gone through)."""

    together: tuple[int, ...]
    window: int
    p: float
    error: float
    shifts: int


def coincidence(
    changes: Sequence[Sequence[int]], n: int, window: int = 1, draws: int = 20_000, seed: int = 1
) -> Coincidence:
    """Test whether the changes of two or more series of n iterations each coincide.

    `changes` are the iterations at which each series' new levels start. Closer is better: a pair at distance
    d counts window + 1 - d. Raises LabError where a series has no change, or one at no possible place.
    """
    if len(changes) < 2:
        raise LabError("a coincidence takes two series at least")
    low = min_segment(n)
    places = n - 2 * low + 1
    lists = [np.asarray(sorted(c), dtype=np.int64) for c in changes]
    for i, found in enumerate(lists):
        if not len(found):
            raise LabError(f"series {i + 1} has no change: there is nothing to coincide")
        if found[0] < low or found[-1] >= low + places:
            raise LabError(f"series {i + 1} has a change outside iterations {low} to {low + places - 1}")
    if window < 0:
        raise LabError("the window is a number of iterations, 0 or more")
    nearness = [_nearness(c - low, places, window) for c in lists[1:]]
    first = lists[0] - low
    zero = np.zeros((1, len(nearness)), dtype=np.int64)
    observed = float(_score(first, nearness, zero, places)[0])
    together = tuple(int(at + low) for at in first if all(near[at] > 0 for near in nearness))
    count = places ** len(nearness)
    if count <= _LISTED:
        grid = np.indices((places,) * len(nearness)).reshape(len(nearness), -1).T
        scores = _score(first, nearness, grid, places)
        return Coincidence(together, window, float((scores >= observed).mean()), 0.0, count)
    rng = np.random.default_rng(seed)
    scores = _score(first, nearness, rng.integers(0, places, (draws, len(nearness))), places)
    p = (1 + int((scores >= observed).sum())) / (1 + draws)
    return Coincidence(together, window, p, math.sqrt(p * (1 - p) / draws), draws)


def _nearness(changes: NDArray[np.int64], places: int, window: int) -> NDArray[np.int64]:
    """For each place how near the nearest change is: window + 1 at it, down to 0 beyond the window."""
    distance = np.abs(np.arange(places)[:, None] - changes[None, :]).min(axis=1)
    return np.asarray(np.maximum(0, window + 1 - distance))


def _score(
    first: NDArray[np.int64], nearness: list[NDArray[np.int64]], shifts: NDArray[np.int64], places: int
) -> NDArray[np.int64]:
    """For each row of shifts, the sum over the first series' changes of how near the farthest series' is."""
    each = np.stack(
        [near[(first[None, :] + shifts[:, i, None]) % places] for i, near in enumerate(nearness)], axis=0
    )
    return np.asarray(each.min(axis=0).sum(axis=1))
