"""What `until: changepoint` does to series whose warm-up is known: when it ends, and what is left of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvik_lab.infer.changes import ar1
from kvik_lab.infer.trailing import level_from

LEAST, MOST = 10, 60

Levels = Callable[[NDArray[np.float64]], NDArray[np.float64]]

SHAPES: Mapping[str, Levels] = {
    "none": lambda at: np.ones(len(at)),
    "30 % above until request 8": lambda at: np.where(at < 8, 1.3, 1.0),
    "30 % above, falls by 1/e in 10": lambda at: 1.0 + 0.3 * np.exp(-at / 10),
    "twofold, falls by 1/e in 10": lambda at: 1.0 + np.exp(-at / 10),
    "twofold, falls by 1/e in 20": lambda at: 1.0 + np.exp(-at / 20),
    "falls by a half over 60 requests": lambda at: 1.0 + np.clip(1 - at / 60, 0, 1),
}
"""The level of each request, 1 in the end."""


@dataclass(frozen=True)
class Ends:
    """Of many series: after how many requests the warm-up ended, and how far above 1 the level was then.
    `bound`: the share that did not end before the most; `counted`: how far above 1 after LEAST."""

    requests: NDArray[np.int64]
    bound: float
    left: float
    counted: float


def ends(shape: str, noise: float, rho: float, rows: int, seed: int) -> Ends:
    """Series of a shape with relative noise that is AR(rho)."""
    level = SHAPES[shape](np.arange(MOST + 1.0))
    wander = ar1(rows, MOST, rho, np.random.default_rng(seed)) * np.sqrt(1 - rho * rho)
    found = [_end(row) for row in level[:MOST] * (1.0 + noise * wander)]
    requests = np.array([MOST if one is None else one for one in found])
    bound = sum(one is None for one in found) / rows
    return Ends(requests, bound, float(level[requests].mean()) - 1.0, float(level[LEAST]) - 1.0)


def _end(row: NDArray[np.float64]) -> int | None:
    values = [float(one) for one in row]
    return next((n for n in range(LEAST, MOST + 1) if level_from(values[:n], LEAST) is not None), None)
