"""Medians and quantiles by order statistics, which need no distribution, and what n values cannot say.

The number of values below a quantile is binomial, so an interval between two order statistics holds it with a
probability that can be computed exactly (Hahn and Meeker 1991, chapter 5).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from kvik_lab.errors import LabError
from kvik_lab.infer.arrays import Interval, TooFew, Values, fraction, mean_by_t, needed_in_tail, series


@dataclass(frozen=True)
class Quantile:
    """A quantile's estimate and bounds; a side on which n values reach no bound at the level asked is None.

    At least one side is bounded: where neither is, there is a TooFew instead. `covers` is the exact
    probability that the bounds hold the quantile, at least the level asked.
    """

    probability: float
    estimate: float
    low: float | None
    high: float | None
    covers: float


def needed_for_bound(probability: float, level: float = 0.95) -> int:
    """Independent values that a one-sided bound takes on the far side of a quantile: 299 for p99 at 95 %.

    The largest of n values lies above the quantile with probability 1 - probability^n. The quantile 0.01
    takes as many as 0.99, from below.
    """
    fraction(probability, "the quantile")
    fraction(level, "the level")
    tail = max(probability, 1.0 - probability)
    return math.ceil(round(math.log(1.0 - level) / math.log(tail), 9))


def quantile(
    values: Values, probability: float, level: float = 0.95, rho: float = 0.0, sides: int = 1
) -> Quantile | TooFew:
    """A quantile with distribution-free bounds, or how many values it takes.

    With sides=1 it asks for the bound away from the median only (for p99: the upper one), at the level; the
    other side is then open. With sides=2 for both, each at (1 + level) / 2. `rho` is the serial correlation:
    n values count as n (1 - rho) / (1 + rho). Raises LabError for a probability or level outside (0, 1).
    """
    data = np.sort(series(values))
    fraction(probability, "the quantile")
    fraction(level, "the level")
    if sides not in (1, 2):
        raise LabError(f"sides is {sides}; a bound has one side or two")
    n = len(data)
    inflation = _inflation(rho)
    effective = int(n / inflation + 1e-9)
    each = level if sides == 1 else 0.5 * (1.0 + level)
    needed = math.ceil(needed_for_bound(probability, each) * inflation - 1e-9)
    if effective < needed_for_bound(probability, each):
        return TooFew(f"the {100 * probability:g} % quantile with a bound at {100 * level:g} %", n, needed)
    lower, upper = _ranks(effective, probability, each, sides)
    covers = (1.0 if upper is None else stats.binom.cdf(upper - 1, effective, probability)) - (
        0.0 if lower is None else stats.binom.cdf(lower - 1, effective, probability)
    )
    return Quantile(
        probability,
        float(np.quantile(data, probability, method="median_unbiased")),
        None if lower is None else float(data[max(0, math.floor(lower * n / effective + 1e-9) - 1)]),
        None if upper is None else float(data[min(n, math.ceil(upper * n / effective - 1e-9)) - 1]),
        float(covers),
    )


def _inflation(rho: float) -> float:
    if not -1.0 < rho < 1.0:
        raise LabError(
            f"a serial correlation of {rho} is not one of a series that settles; give -1 < rho < 1"
        )
    rho = max(0.0, rho)
    return (1.0 + rho) / (1.0 - rho)


def _ranks(n: int, probability: float, level: float, sides: int) -> tuple[int | None, int | None]:
    """The order statistics (from 1) that bound the quantile from below and from above, each at the level."""
    upper = _above(n, probability, level)
    lower = n + 1 - _above(n, 1.0 - probability, level)
    if sides == 2:
        return lower, upper
    return (None, upper) if probability >= 0.5 else (lower, None)


def _above(n: int, probability: float, level: float) -> int:
    """The smallest rank whose order statistic lies above the quantile with at least this probability."""
    return int(stats.binom.ppf(level, n, probability)) + 1


def median_interval(values: Values, level: float = 0.95, rho: float = 0.0) -> Interval | TooFew:
    """The median between two order statistics; six independent values are the fewest at 95 %."""
    found = quantile(values, 0.5, level, rho, sides=2)
    if isinstance(found, TooFew):
        return TooFew(f"the median with bounds at {100 * level:g} %", found.n, found.needed)
    if found.low is None or found.high is None:
        raise LabError("a two-sided quantile has both bounds")
    return Interval(float(np.median(series(values))), found.low, found.high, level, "order statistics")


def quantile_over_starts(
    starts: Sequence[Values], probability: float, level: float = 0.95
) -> Interval | TooFew:
    """A percentile of the iterations of a typical start, with the interval that further starts would fall
    about.

    The geometric mean of the starts' own quantiles, and Student's t over their logarithms: iterations of one
    start may depend on each other. TooFew for one start, or where a start has fewer than `IN_TAIL` values
    beyond the percentile. Values lie above zero.
    """
    fraction(probability, "the quantile")
    rows = [series(s, f"start {i + 1}", at_least=1) for i, s in enumerate(starts)]
    needed = needed_in_tail(probability)
    fewest = min(len(row) for row in rows)
    what = f"the {100 * probability:g} % quantile over starts"
    if len(rows) < 2:
        return TooFew(f"{what} (starts)", len(rows), 2)
    if fewest < needed:
        return TooFew(f"{what} (values in each start)", fewest, needed)
    logs = np.log([np.quantile(row, probability, method="median_unbiased") for row in rows])
    return mean_by_t(logs, level, f"t over {len(logs)} starts' own quantiles, of logs").of_logs()
