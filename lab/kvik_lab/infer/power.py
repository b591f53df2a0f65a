"""Power of a comparison of two arms, before it is run.

The unit is the server start: its mean varies between starts, and by what its iterations leave over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy import stats

from kvik_lab.errors import LabError
from kvik_lab.infer.arrays import fraction


@dataclass(frozen=True)
class Spread:
    """What varies: the standard deviation between starts, that of iterations within one, and their lag-1
    correlation, all in one unit (a share of the level, where effects are ratios)."""

    between: float
    within: float
    rho: float = 0.0

    def of_start(self, iterations: int) -> float:
        """The standard deviation of one start's mean."""
        if iterations < 1 or not 0 <= self.rho < 1 or min(self.between, self.within) < 0:
            raise LabError("a start has at least one iteration, spreads are not negative, and 0 <= rho < 1")
        worth = max(1.0, iterations * (1.0 - self.rho) / (1.0 + self.rho))
        return math.hypot(self.between, self.within / math.sqrt(worth))


def power(effect: float, spread: float, units: int, alpha: float = 0.05) -> float:
    """The probability that a two-sided t-test with `units` a side finds a difference of `effect`.

    `spread` is the standard deviation of one unit. Noncentral t with 2 units - 2 degrees (Cohen 1988,
    chapter 2).
    """
    fraction(alpha, "alpha")
    if units < 2 or spread <= 0:
        raise LabError("power takes at least two units a side, and a spread above zero")
    degrees = 2 * units - 2
    away = abs(effect) / spread * math.sqrt(units / 2.0)
    cut = float(stats.t.ppf(1.0 - alpha / 2.0, degrees))
    return float(stats.nct.sf(cut, degrees, away) + stats.nct.cdf(-cut, degrees, away))


def units_needed(effect: float, spread: float, wanted: float = 0.8, alpha: float = 0.05) -> int:
    """The fewest units a side that reach the power wanted. Raises LabError beyond a million."""
    fraction(wanted, "the power wanted")
    if effect == 0:
        raise LabError("no number of starts finds an effect of zero; say which one would matter")
    low, high = 1, 2
    while power(effect, spread, high, alpha) < wanted:
        low, high = high, 2 * high
        if high > 1_000_000:
            raise LabError(f"an effect of {effect:g} in a spread of {spread:g} takes over a million starts")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(effect, spread, middle, alpha) >= wanted else (middle, high)
    return high
