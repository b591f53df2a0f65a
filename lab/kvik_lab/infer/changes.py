"""Changes of level in a series of iterations, each confirmed against a series that merely wanders.

A series whose values depend on those before them drifts in a way that looks like steps. Candidates from
`screen` are therefore compared with what the same procedure finds in stationary AR(1) series without any
change (a parametric bootstrap): the smallest remaining step, in standard errors, against the distribution
of the same figure there. The serial correlation of those series is not the one measured, which the
segmentation has eaten part of, but its upper confidence bound at UPPER, found from the same simulations: the
correlation up to which so small a measured one is not odd. The figure compared is the largest of the whole
series, so that the p-values hold for all changes of a series together.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import signal, stats

from kvik_lab.errors import LabError
from kvik_lab.infer.arrays import LONGEST, SHORTEST, Bools, Floats, TooFew, Values, fraction, series
from kvik_lab.infer.order import median_interval
from kvik_lab.infer.screen import (
    CLIP,
    Fit,
    Screen,
    fit,
    min_segment,
    segment,
    segment_medians,
    steps,
    strongest,
)

UPPER = 0.05
"""Probability that is left above the upper bound of the serial correlation. Chosen by simulation (see
`tests/lab/validate.py`): larger and AR(0.6) series give more than 5 % false alarms, smaller costs power."""

_GRID = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
_SIMULATED = 200
_SEED = 20_261_122
# Relative to the largest value: a series without any spread has no likelihood.
_LEVEL_FLOOR = 1e-12


@dataclass(frozen=True)
class Change:
    """A change of level: the new one starts at iteration `at`, and at `earliest` to `latest` with the level
    asked.

    `p` holds for all changes of the series together. `percent` is the change of the mean (outliers pulled
    in), with its bounds; nan where the level before is not positive.
    """

    at: int
    earliest: int
    latest: int
    p: float
    percent: float
    percent_low: float
    percent_high: float


@dataclass(frozen=True)
class Segment:
    """A stretch of one level: iterations `start` to `start + length - 1`; bounds of its median are None where
    it is too short for any."""

    start: int
    length: int
    median: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Segmentation:
    """A series cut at its confirmed changes.

    `rho` is the lag-1 autocorrelation within segments, `rho_upper` the one that the changes were tested
    against; `scale` the standard deviation within segments, outliers pulled in.
    """

    n: int
    changes: tuple[Change, ...]
    segments: tuple[Segment, ...]
    rho: float
    rho_upper: float
    scale: float
    alpha: float


def ar1(rows: int, n: int, rho: float, rng: np.random.Generator) -> Floats:
    """Stationary Gaussian AR(1) series of unit innovations, shape (rows, n)."""
    shocks = rng.standard_normal((rows, n))
    shocks[:, 0] /= np.sqrt(1.0 - rho * rho)
    return np.asarray(signal.lfilter([1.0], [1.0, -rho], shocks, axis=1), dtype=np.float64)


@lru_cache(maxsize=256)
def _without_change(n: int, rho: float, screen: Screen) -> tuple[Floats, Floats]:
    """Sorted: the strongest step, and the measured correlation, of series of this length without a change."""
    rng = np.random.default_rng([_SEED, n, round(1000 * rho)])
    rows = 2000 if n <= 60 else 1000
    pieces = []
    for size in _blocks(rows, n):
        sample = ar1(size, n, rho, rng)
        found = fit(sample, segment(sample, screen))
        pieces.append((strongest(found), found.rho))
    return np.sort(np.concatenate([p[0] for p in pieces])), np.sort(np.concatenate([p[1] for p in pieces]))


def _blocks(rows: int, n: int) -> list[int]:
    """Rows in blocks whose working arrays fit a processor's cache."""
    size = max(1, 200_000 // n)
    return [min(size, rows - done) for done in range(0, rows, size)]


def _upper(n: int, rho: Floats, screen: Screen) -> Floats:
    """The smallest correlation of the grid at which so small a measured one is odd, for each row."""
    upper = np.full(len(rho), _GRID[-1])
    open_rows = np.ones(len(rho), dtype=bool)
    for level in _GRID:
        _, measured = _without_change(n, level, screen)
        below = np.searchsorted(measured, rho, side="right") / len(measured)
        reached = open_rows & (below < UPPER)
        upper[reached] = level
        open_rows &= ~reached
        if not open_rows.any():
            break
    return upper


def _p(n: int, upper: Floats, size: Floats, screen: Screen) -> Floats:
    """How often a series without a change has a step of at least this size, at each row's correlation."""
    used = min(n, _SIMULATED)
    p = np.ones(len(size))
    for level in np.unique(upper):
        rows = upper == level
        strong, _ = _without_change(used, float(level), screen)
        above = len(strong) - np.searchsorted(strong, size[rows], side="left")
        p[rows] = (1.0 + above) / (1.0 + len(strong))
    # A longer series counts as several of the longest simulated, whose alarms add up at most.
    return np.minimum(1.0, p * max(1.0, n / _SIMULATED))


@dataclass(frozen=True)
class Confirmed:
    """Series of shape (rows, n) with their confirmed changes, each change's p (1 elsewhere), and the
    correlation that they were tested against."""

    changes: Bools
    p: Floats
    upper: Floats


def confirm(rows: Floats, alpha: float = 0.05) -> Confirmed:
    """The confirmed changes of many series of one length, shape (rows, n).

    Both screens are tried, each with half of alpha, and the one that confirms more changes is taken.
    """
    one, other = (_confirm(rows, alpha / len(Screen), screen) for screen in Screen)
    more = other.changes.sum(axis=1) > one.changes.sum(axis=1)
    pick = more[:, None]
    p = np.minimum(1.0, len(Screen) * np.where(pick, other.p, one.p))
    return Confirmed(np.where(pick, other.changes, one.changes), p, np.where(more, other.upper, one.upper))


def _confirm(rows: Floats, alpha: float, screen: Screen) -> Confirmed:
    """The changes that one screen leaves and the test confirms: the weakest is dropped until all are."""
    n = rows.shape[1]
    found = fit(rows, segment(rows, screen))
    changes = found.changes.copy()
    upper = np.zeros(len(rows))
    p = np.ones_like(rows)
    active = np.flatnonzero(changes.any(axis=1))
    if len(active):
        upper[active] = _upper(min(n, _SIMULATED), found.rho[active], screen)
    while len(active):
        part = Fit(changes[active], found.clean[active], found.scale[active], found.rho[active])
        size = np.where(part.changes, steps(part), np.inf)
        weakest = np.argmin(size, axis=1)
        lowest = _p(n, upper[active], size[np.arange(len(active)), weakest], screen)
        drop = lowest > alpha
        for row, sizes in zip(active[~drop], size[~drop], strict=True):
            at = np.flatnonzero(changes[row])
            p[row, at] = _p(n, np.full(len(at), upper[row]), sizes[at], screen)
        changes[active[drop], weakest[drop]] = False
        active = active[drop]
        active = active[changes[active].any(axis=1)]
    return Confirmed(changes, p, upper)


def find_changes(values: Values, alpha: float = 0.05, level: float = 0.95) -> Segmentation:
    """The confirmed changes of one series, in the order of its iterations, and the segments between them.

    A wandering or heavy-tailed series without a change gives one with probability alpha at most. Raises
    LabError for fewer than SHORTEST values, more than LONGEST, or such that are not finite.
    """
    row = series(values, at_least=SHORTEST)
    if len(row) > LONGEST:
        group = -(-len(row) // LONGEST)
        raise LabError(
            f"the series has {len(row)} values; up to {LONGEST} are segmented: take means of {group} in a row"
        )
    fraction(alpha, "alpha")
    fraction(level, "the level")
    result = confirm(row[None, :], alpha)
    at = np.flatnonzero(result.changes[0]).tolist()
    cuts = _relocate(row, at)
    changes = np.zeros((1, len(row)), dtype=bool)
    changes[0, cuts] = True
    found = fit(row[None, :], changes)
    edges = [0, *cuts, len(row)]
    rho = float(np.clip(found.rho[0], 0.0, _GRID[-1]))
    segments = tuple(_segment(row, a, b, rho, level) for a, b in itertools.pairwise(edges))
    listed = tuple(
        _change(row, found, edges[i : i + 3], rho, chance, level)
        for i, chance in enumerate(result.p[0, at].tolist())
    )
    scale = float(found.scale[0])
    return Segmentation(len(row), listed, segments, float(found.rho[0]), float(result.upper[0]), scale, alpha)


def _huber(error: Floats, bound: float) -> Floats:
    size = np.abs(error)
    return np.where(size <= bound, error**2, 2.0 * bound * size - bound**2)


def _gain(row: Floats, levels: tuple[float, float], scale: float) -> Floats:
    """For each k the loss of a change at k beside that of a change at 0: the level before up to k, then
    after."""
    # Without any spread the step itself gives the loss its scale.
    bound = max(CLIP * scale, 1e-3 * abs(levels[1] - levels[0]))
    saved = _huber(row - levels[0], bound) - _huber(row - levels[1], bound)
    return np.concatenate([[0.0], np.cumsum(saved)])


def _relocate(row: Floats, at: list[int]) -> list[int]:
    """Each change moved to where it fits best under a loss that no outlier dominates, its neighbours held."""
    cuts = list(at)
    changes = np.zeros((1, len(row)), dtype=bool)
    changes[0, at] = True
    scale = float(fit(row[None, :], changes).scale[0])
    middle = segment_medians(row[None, :], changes)[0]
    shortest = min_segment(len(row))
    for i, cut in enumerate(at):
        low = (cuts[i - 1] if i else 0) + shortest
        high = (at[i + 1] if i + 1 < len(at) else len(row)) - shortest + 1
        if high <= low:
            continue
        loss = _gain(row, (middle[cut - 1], middle[cut]), scale)
        cuts[i] = low + int(np.argmin(loss[low:high]))
    return cuts


def _segment(row: Floats, start: int, end: int, rho: float, level: float) -> Segment:
    part = row[start:end]
    bounds = median_interval(part, level=level, rho=rho)
    middle = float(np.median(part))
    if isinstance(bounds, TooFew):
        return Segment(start, end - start, middle, None, None)
    return Segment(start, end - start, middle, bounds.low, bounds.high)


def _change(row: Floats, found: Fit, edges: list[int], rho: float, p: float, level: float) -> Change:
    start, at, end = edges
    before, after = found.clean[0, start:at], found.clean[0, at:end]
    inflation = (1.0 + rho) / (1.0 - rho)
    scale = max(float(found.scale[0]), _LEVEL_FLOOR * float(np.abs(row).max()))
    # Hansen 2000 (Econometrica 68), theorem 1: all k whose likelihood ratio is at most this, here of
    # dependent values.
    bound = -2.0 * np.log(1.0 - np.sqrt(level)) * inflation * scale**2
    loss = _gain(row[start:end], (float(np.median(before)), float(np.median(after))), scale)
    inner = loss[1 : end - start]
    near = 1 + start + np.flatnonzero(inner - inner.min() <= bound)
    one, two = float(before.mean()), float(after.mean())
    if one <= 0:
        return Change(at, int(near.min()), int(near.max()), p, np.nan, np.nan, np.nan)
    counts = [max(1.0, len(part) / inflation) for part in (before, after)]
    error = scale * np.sqrt(1.0 / (one**2 * counts[1]) + two**2 / (one**4 * counts[0]))
    degrees = max(1.0, len(row) / inflation - int(found.changes.sum()) - 1.0)
    reach = float(stats.t.ppf(0.5 + level / 2.0, degrees) * error)
    ratio = two / one
    percents = [100.0 * (ratio - 1.0 + way * reach) for way in (0, -1, 1)]
    return Change(at, int(near.min()), int(near.max()), p, percents[0], percents[1], percents[2])
