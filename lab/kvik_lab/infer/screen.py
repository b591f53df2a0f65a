"""Where a series may change: exact segmentation of its ranks and of its values, for many series at once.

Every candidate that this leaves is tested in `changes`; nothing here decides that a change is real.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from kvik_lab.infer.arrays import Bools, Floats


def min_segment(n: int) -> int:
    """Iterations that a segment of a series of n has at least: 3 of 30, 6 of 100, 12 of 2,000.

    One or two odd ones are outliers, not a state; and the longer a series, the more of them meet by chance.
    """
    return max(3, round(1.5 * math.log2(n)) - 4)


WINDOW = 5
"""Neighbours, itself among them, whose median a value is held against before values are segmented."""

CLIP = 2.5
"""Robust standard deviations from its segment's median beyond which a value is pulled in."""


@dataclass(frozen=True)
class Fit:
    """Many series, shape (series, n), each cut into segments; `changes[s, i]`: a segment starts at i > 0.

    `clean` is the series with outliers pulled in to their segment's median +- CLIP robust standard
    deviations, `scale` its standard deviation within segments, and `rho` its lag-1 autocorrelation within
    segments, without outliers, corrected for the number of segments.
    """

    changes: Bools
    clean: Floats
    scale: Floats
    rho: Floats


class Screen(Enum):
    """What is segmented. Each sees what the other is blind to."""

    RANKS = "ranks"
    """A step among heavy tails: no outlier weighs more than its order. Many levels look alike to it."""
    VALUES = "values"
    """Several levels, in values whose outliers were put in line with their neighbours first."""

    @property
    def penalty(self) -> float:
        """What a further segment must save, in units of log(n) times the variance."""
        return 3.0 if self is Screen.RANKS else 6.0


def segment(series: Floats, screen: Screen) -> Bools:
    """The optimal segmentation of each row under a squared-error cost and the screen's penalty a segment."""
    if screen is Screen.RANKS:
        scores = stats.rankdata(series, axis=1)
        spread = scores.std(axis=1, keepdims=True)
    else:
        scores, spread = _aligned(series)
    scores = scores - scores.mean(axis=1, keepdims=True)
    n = series.shape[1]
    return optimal(scores / np.where(spread > 0, spread, 1.0), screen.penalty * math.log(n), min_segment(n))


def _aligned(series: Floats) -> tuple[Floats, Floats]:
    """Each row with its outliers replaced by the median of their neighbours, and the standard deviation of
    its noise, from the differences of successive values, which a change of level touches only once."""
    steps = np.median(np.abs(np.diff(series, axis=1)), axis=1, keepdims=True)
    spread = steps / (0.6745 * np.sqrt(2.0))
    # Values that are mostly equal (a coarse clock) have no median difference, yet they vary.
    spread = np.where(spread > 0, spread, 0.05 * series.std(axis=1, keepdims=True))
    side = WINDOW // 2
    around = np.pad(series, ((0, 0), (side, side)), mode="edge")
    middle = np.median(np.lib.stride_tricks.sliding_window_view(around, WINDOW, axis=1), axis=2)
    return np.where(np.abs(series - middle) > 3.0 * spread, middle, series), spread


def optimal(scores: Floats, price: float, shortest: int) -> Bools:
    """The segmentation of each row with the least squares about segment means plus `price` a segment,
    none of them shorter than `shortest`.

    Exact dynamic programming (Jackson et al. 2005, IEEE Signal Processing Letters 12; pruning it is PELT,
    Killick et al. 2012, J. Amer. Statist. Assoc. 107). Time n^2 a row.
    """
    rows, n = scores.shape
    changes = np.zeros((rows, n), dtype=bool)
    total = np.concatenate([np.zeros((rows, 1)), np.cumsum(scores, axis=1)], axis=1)
    # The sum of squares is the same for every segmentation, so a segment costs only -sum^2 / length.
    best = np.full((rows, n + 1), np.inf)
    best[:, 0] = 0.0
    before = np.zeros((rows, n + 1), dtype=np.int64)
    row = np.arange(rows)
    for end in range(shortest, n + 1):
        span = end - shortest + 1
        gain = (total[:, end, None] - total[:, :span]) ** 2 / np.arange(end, shortest - 1, -1)
        cost = best[:, :span] - gain
        pick = np.argmin(cost, axis=1)
        before[:, end] = pick
        best[:, end] = cost[row, pick] + price
    at = np.full(rows, n)
    while True:
        at = before[row, at]
        live = at > 0
        if not live.any():
            return changes
        changes[row[live], at[live]] = True


def bounds(changes: Bools) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first index, and the one past the last, of the segment that each position is in."""
    n = changes.shape[1]
    index = np.arange(n)
    first = np.maximum.accumulate(np.where(changes, index, 0), axis=1)
    ends = np.concatenate([np.where(changes[:, 1:], index[1:], n), np.full((len(changes), 1), n)], axis=1)
    past = np.minimum.accumulate(ends[:, ::-1], axis=1)[:, ::-1]
    return first, past


def segment_medians(series: Floats, changes: Bools) -> Floats:
    """The median of the segment that each position is in."""
    first, past = bounds(changes)
    order = np.lexsort((series, np.cumsum(changes, axis=1)), axis=1)
    ordered = np.take_along_axis(series, order, axis=1)
    length = past - first
    low = np.take_along_axis(ordered, first + (length - 1) // 2, axis=1)
    high = np.take_along_axis(ordered, first + length // 2, axis=1)
    return 0.5 * (low + high)


def segment_means(series: Floats, changes: Bools) -> Floats:
    """The mean of the segment that each position is in."""
    first, past = bounds(changes)
    total = np.concatenate([np.zeros((len(series), 1)), np.cumsum(series, axis=1)], axis=1)
    sums = np.take_along_axis(total, past, axis=1) - np.take_along_axis(total, first, axis=1)
    return np.asarray(sums / (past - first))


def fit(series: Floats, changes: Bools) -> Fit:
    """Clean each row within its segments, and measure its spread and its serial correlation there."""
    n = series.shape[1]
    middle = segment_medians(series, changes)
    rest = series - middle
    mad = 1.4826 * np.median(np.abs(rest), axis=1, keepdims=True)
    # Values that are mostly equal (a coarse clock) have no median deviation, yet they vary.
    spread = np.where(mad > 0, mad, np.sqrt((rest**2).mean(axis=1, keepdims=True)))
    clean = middle + np.clip(rest, -CLIP * spread, CLIP * spread)
    error = clean - segment_means(clean, changes)
    squares = (error**2).sum(axis=1)
    segments = 1 + changes.sum(axis=1)
    scale = np.sqrt(squares / np.maximum(n - segments, 1))
    # An outlier that was pulled in has lost its likeness to its neighbours: it tells nothing of them.
    kept = np.abs(rest) <= CLIP * spread
    pairs = ~changes[:, 1:] & kept[:, 1:] & kept[:, :-1]
    lagged = (error[:, 1:] * error[:, :-1] * pairs).sum(axis=1) / np.maximum(pairs.sum(axis=1), 1)
    own = (error**2 * kept).sum(axis=1) / np.maximum(kept.sum(axis=1), 1)
    raw = lagged / np.where(own > 0, own, 1.0)
    rho = (raw + segments / n) / np.maximum(1.0 - (segments + 2) / n, 0.1)
    return Fit(changes, clean, scale, rho)


def steps(found: Fit) -> Floats:
    """For each change the size of its step in standard errors as of independent values; 0 where none is."""
    mean = segment_means(found.clean, found.changes)
    first, past = bounds(found.changes)
    length = past - first
    size = np.zeros_like(mean)
    jump = np.abs(mean[:, 1:] - mean[:, :-1])
    error = np.sqrt(1.0 / length[:, 1:] + 1.0 / length[:, :-1])
    # Without any spread every step is beyond doubt.
    scale = np.maximum(found.scale, np.finfo(float).tiny)[:, None]
    size[:, 1:] = np.where(found.changes[:, 1:], jump / (scale * error), 0.0)
    return size


def strongest(found: Fit) -> Floats:
    """The largest c for which dropping the weakest change, again and again until each is at least c, leaves
    any."""
    best = np.zeros(len(found.clean))
    changes = found.changes.copy()
    rows = np.flatnonzero(changes.any(axis=1))
    while len(rows):
        part = Fit(changes[rows], found.clean[rows], found.scale[rows], found.rho[rows])
        size = np.where(part.changes, steps(part), np.inf)
        weakest = np.argmin(size, axis=1)
        best[rows] = np.maximum(best[rows], size[np.arange(len(rows)), weakest])
        changes[rows, weakest] = False
        rows = rows[changes[rows].any(axis=1)]
    return best
