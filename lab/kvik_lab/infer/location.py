"""Locations and shifts that no outlier moves, of independent values: Hodges-Lehmann, and BCa for anything
else.

Independent values are starts, or requests whose serial correlation was looked at; not the iterations of one
start as they come.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy import stats

from kvik_lab.errors import LabError
from kvik_lab.infer.arrays import Floats, Interval, TooFew, Values, fraction, series

_EXACT = 40


def hodges_lehmann(values: Values, level: float = 0.95) -> Interval | TooFew:
    """The median of all pairwise means, with the bounds that the signed-rank test gives.

    For values that lie symmetrically about their centre, such as paired differences (Hollander and Wolfe,
    Nonparametric Statistical Methods, section 3.2). TooFew where no bound reaches the level.
    """
    data = series(values)
    n = len(data)
    needed = _fewest(lambda count: 2.0**-count, level)
    if n < needed:
        return TooFew(f"a Hodges-Lehmann interval at {100 * level:g} %", n, needed)
    i, j = np.triu_indices(n)
    pairs = np.sort((data[i] + data[j]) / 2.0)
    cut = _signed_rank_cut(n, (1.0 - level) / 2.0)
    return Interval(
        float(np.median(pairs)),
        float(pairs[cut]),
        float(pairs[-1 - cut]),
        level,
        "Hodges-Lehmann, signed ranks",
    )


def shift(a: Values, b: Values, level: float = 0.95) -> Interval | TooFew:
    """How much larger b's values are than a's: the median of all differences, with the bounds that the
    rank-sum test gives. Supposes that the two differ in location only (Hollander and Wolfe, section 4.2)."""
    first, second = series(a, "the first group"), series(b, "the second group")
    m, n = len(first), len(second)
    fraction(level, "the level")
    if 1.0 / math.comb(m + n, m) > (1.0 - level) / 2.0:
        least = _fewest(lambda count: 1.0 / math.comb(2 * count, count), level)
        return TooFew(f"a shift at {100 * level:g} % (values in each group)", min(m, n), least)
    pairs = np.sort((second[:, None] - first[None, :]).ravel())
    cut = _rank_sum_cut(m, n, (1.0 - level) / 2.0)
    return Interval(
        float(np.median(pairs)), float(pairs[cut]), float(pairs[-1 - cut]), level, "Hodges-Lehmann, rank sums"
    )


def bca(
    values: Values,
    statistic: Callable[[Floats], float],
    level: float = 0.95,
    seed: int = 1,
    draws: int = 4999,
) -> Interval:
    """Any statistic of ten or more independent values, by the bias-corrected accelerated bootstrap
    (Efron 1987, J. Amer. Statist. Assoc. 82). Raises LabError where it does not vary over resamples."""
    data = series(values, at_least=10)
    fraction(level, "the level")
    result = stats.bootstrap(
        (data,),
        statistic,
        n_resamples=draws,
        confidence_level=level,
        method="BCa",
        vectorized=False,
        rng=np.random.default_rng(seed),
    )
    low, high = (float(x) for x in result.confidence_interval)
    if not (math.isfinite(low) and math.isfinite(high)):
        raise LabError("the statistic hardly varies over resamples; a bootstrap interval says nothing of it")
    return Interval(float(statistic(data)), low, high, level, f"BCa bootstrap, {draws} draws, seed {seed}")


def _fewest(smallest: Callable[[int], float], level: float) -> int:
    """The least count whose smallest one-sided probability fits in each tail."""
    fraction(level, "the level")
    count = 1
    while smallest(count) > (1.0 - level) / 2.0:
        count += 1
    return count


def _signed_rank_cut(n: int, tail: float) -> int:
    """The position of the sorted pairwise mean that bounds from below; as far from the end from above."""
    if n > _EXACT:
        middle, spread = n * (n + 1) / 4.0, math.sqrt(n * (n + 1) * (2 * n + 1) / 24.0)
        return max(0, math.floor(middle + stats.norm.ppf(tail) * spread) - 1)
    ways = np.ones(1)
    for rank in range(1, n + 1):
        ways = np.convolve(ways, np.concatenate([[1.0], np.zeros(rank - 1), [1.0]])) / 2.0
    return _cut(ways, tail)


def _rank_sum_cut(m: int, n: int, tail: float) -> int:
    """The position of the sorted difference that bounds from below; as far from the end from above."""
    if min(m, n) > _EXACT or m * n > _EXACT**2:
        middle, spread = m * n / 2.0, math.sqrt(m * n * (m + n + 1) / 12.0)
        return max(0, math.floor(middle + stats.norm.ppf(tail) * spread) - 1)
    # ways[k, s]: choices of k of the ranks so far whose sum is s.
    ways = np.zeros((m + 1, m * (m + 2 * n + 1) // 2 + 1))
    ways[0, 0] = 1.0
    for rank in range(1, m + n + 1):
        ways[1:, rank:] += ways[:-1, : ways.shape[1] - rank]
    counts = ways[m, m * (m + 1) // 2 :]
    return _cut(counts / counts.sum(), tail)


def _cut(probabilities: Floats, tail: float) -> int:
    """The position, from 0, of the sorted pair that bounds at this tail: one below the count of ranks whose
    cumulative probability is within it."""
    return int(np.searchsorted(np.cumsum(probabilities), tail + 1e-12, side="right")) - 1
