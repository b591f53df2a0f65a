"""What the functions here take: one-dimensional arrays of finite numbers, and intervals that they give."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import special

from kvik_lab.errors import LabError

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Values = Sequence[float] | Floats

SHORTEST = 8
"""Values that a series needs before changes are looked for."""

LONGEST = 2000
"""Values up to which a p-value of a few percent can be had from the simulations."""

LARGEST_LOG = 700.0
"""Of two starts that are far apart, one of a hundred comparisons has bounds beyond it."""

IN_TAIL = 2
"""Values that lie beyond a percentile that is given, at least: else it is little more than the largest."""


@dataclass(frozen=True)
class Interval:
    """An estimate with its bounds at `level`; `method` says how they were found."""

    estimate: float
    low: float
    high: float
    level: float
    method: str

    @property
    def half_width(self) -> float:
        """Half of the distance between the bounds."""
        return 0.5 * (self.high - self.low)

    def holds(self, value: float) -> bool:
        """Whether the value lies within the bounds."""
        return self.low <= value <= self.high

    def of_logs(self) -> Interval:
        """Of an interval of logarithms: that of what they are of, up to what a number holds."""
        low, middle, high = (math.exp(min(x, LARGEST_LOG)) for x in (self.low, self.estimate, self.high))
        return replace(self, estimate=middle, low=low, high=high)


def by_t(estimate: float, error: float, degrees: float, level: float, method: str) -> Interval:
    """An estimate with bounds by Student's t."""
    reach = float(special.stdtrit(degrees, 0.5 + fraction(level, "the level") / 2.0)) * error
    return Interval(estimate, estimate - reach, estimate + reach, level, method)


def mean_by_t(values: Floats, level: float, method: str) -> Interval:
    """The mean of two independent values or more."""
    n = len(values)
    return by_t(float(values.mean()), float(values.std(ddof=1)) / math.sqrt(n), n - 1, level, method)


@dataclass(frozen=True)
class TooFew:
    """An answer that n values cannot give, and how many would."""

    what: str
    n: int
    needed: int

    def __str__(self) -> str:
        return f"{self.what}: {self.n} values cannot say; it takes {self.needed}"


def needed_in_tail(probability: float) -> int:
    """Values that a percentile takes so that `IN_TAIL` lie beyond it: 20 for p90, 200 for p99."""
    return math.ceil(round(IN_TAIL / min(probability, 1.0 - probability), 9))


def series(values: Values, what: str = "the series", at_least: int = 1) -> Floats:
    """The values as an array; raises LabError where they are not a row of finite numbers, or too few."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        raise LabError(f"{what} has {array.ndim} dimensions; give one row of numbers")
    if len(array) < at_least:
        raise LabError(f"{what} has {len(array)} values; it takes at least {at_least}")
    bad = np.flatnonzero(~np.isfinite(array))
    if len(bad):
        raise LabError(f"{what} holds {array[bad[0]]} at position {bad[0]}; leave out what was not measured")
    return array


def fraction(value: float, what: str) -> float:
    """The value, which lies strictly between 0 and 1; else LabError."""
    if not 0.0 < value < 1.0:
        raise LabError(f"{what} is {value}; it lies between 0 and 1, such as 0.95")
    return value
