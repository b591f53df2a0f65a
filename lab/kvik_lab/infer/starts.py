"""Means over server starts: iterations within a start are sub-samples, the start is what was replicated.

Each start has a level of its own (memory layout, route, placement, clock). An interval for what the next
start will give comes from the spread between starts, however many iterations each one had.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from kvik_lab.infer.arrays import Floats, Interval, TooFew, Values, fraction, series
from kvik_lab.infer.serial import autocorrelation, corrected


@dataclass(frozen=True)
class OverStarts:
    """A mean over starts, and where its variation comes from.

    `between` is the standard deviation of the starts' levels (0 where their means differ no more than their
    iterations explain), `within` that of iterations in a start, `rho` their serial correlation, pooled.
    """

    interval: Interval
    starts: int
    degrees: float
    between: float
    within: float
    rho: float
    weights: Floats


@dataclass(frozen=True)
class Summary:
    """The means of starts, the variance that iterations leave in each, and what these were made from."""

    means: Floats
    variances: Floats
    within: float
    rho: float


def summarise(starts: Sequence[Values]) -> Summary:
    """The starts' means; one variance and one serial correlation are pooled over all of them.

    Pooled, since thirty iterations of one start say little about its own correlation, and since weights that
    are noisy would make the interval too short. Raises LabError for starts of fewer than three values.
    """
    rows = [series(s, f"start {i + 1}", at_least=3) for i, s in enumerate(starts)]
    length = np.array([len(r) for r in rows], dtype=np.float64)
    squares = np.array([((r - r.mean()) ** 2).sum() for r in rows])
    lagged = np.array([float(autocorrelation(r[None, :])[0]) for r in rows])
    pooled = float((lagged * squares).sum() / squares.sum()) if squares.sum() > 0 else 0.0
    typical = max(3, int(length.mean()))
    rho = float(corrected(np.array([pooled]), typical)[0])
    effective = np.maximum(length * (1.0 - rho) / (1.0 + rho), 1.0 + 1e-9)
    variance = squares.sum() / (length * (1.0 - 1.0 / effective)).sum()
    return Summary(np.array([r.mean() for r in rows]), variance / effective, math.sqrt(variance), rho)


def mean_over_starts(starts: Sequence[Values], level: float = 0.95) -> OverStarts | TooFew:
    """The mean over starts with an interval for the level that further starts would average to.

    With starts of equal length it is Student's t of their means; of unequal, means are weighted by the
    inverse of their variance with the between-start part by Paule and Mandel (1982, J. Res. NBS 87), and the
    interval is Hartung and Knapp's (2001, Statistics in Medicine 20), t with one degree fewer than starts.
    One start has no answer, and gives a TooFew.
    """
    fraction(level, "the level")
    if len(starts) < 2:
        return TooFew("a mean over server starts", len(starts), 2)
    found = summarise(starts)
    between = _paule_mandel(found.means, found.variances)
    weights = 1.0 / np.maximum(between + found.variances, np.finfo(float).tiny)
    weights /= weights.sum()
    mean = float((weights * found.means).sum())
    degrees = len(starts) - 1
    error = math.sqrt(float((weights * (found.means - mean) ** 2).sum()) / degrees)
    reach = float(special.stdtrit(degrees, 0.5 + level / 2.0)) * error
    interval = Interval(mean, mean - reach, mean + reach, level, f"t over {len(starts)} starts")
    return OverStarts(interval, len(starts), degrees, math.sqrt(between), found.within, found.rho, weights)


def _paule_mandel(means: Floats, variances: Floats) -> float:
    """The variance between starts at which the weighted squares are what they should be; 0 where none is."""

    def excess(between: float) -> float:
        weights = 1.0 / np.maximum(between + variances, np.finfo(float).tiny)
        middle = (weights * means).sum() / weights.sum()
        return float((weights * (means - middle) ** 2).sum() - (len(means) - 1))

    spread = float(means.var(ddof=1))
    if np.ptp(variances) == 0:
        return max(0.0, spread - float(variances[0]))
    # Above the larger of the two no weight favours any mean enough.
    low, high = 0.0, spread * len(means)
    if high == 0.0 or excess(0.0) <= 0:
        return 0.0
    for _ in range(200):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
        if high - low <= 1e-12 * high:
            break
    return high
