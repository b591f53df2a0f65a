"""When requests are due, in seconds from the beginning; drawn before anything is sent."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvik_lab.load.spec import Constant, Gamma, Poisson

Floats = npt.NDArray[np.float64]


def due_times(arrival: Constant | Poisson | Gamma, count: int, draw: np.random.Generator) -> Floats:
    """The times of `count` requests, ascending; the first comes after the first interval.

    The intervals are what was drawn: they are not stretched so that the last one falls on count / rate, which
    would take the variance out of the load.
    """
    if arrival.kind == "constant":
        return np.arange(1, count + 1) / arrival.rate
    shape = arrival.shape if arrival.kind == "gamma" else 1.0
    return np.cumsum(draw.gamma(shape, 1.0 / (shape * arrival.rate), count))
