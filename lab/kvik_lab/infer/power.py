"""Power of a comparison before it is run: how often `judge`, the very analysis, decides simulated
experiments.

The unit is the server start: its level varies between starts, and by what its iterations leave over.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from kvik_lab.errors import LabError
from kvik_lab.infer.arrays import fraction
from kvik_lab.infer.judge import Judged, Layout, Plan, judge

DRAWS = 4000
SEED = 20_261_125
MOST_STARTS = 500
FEWEST_STARTS = 4
"""Starts an arm that anything is planned with: of fewer, how starts differ is hardly known, and none can be
odd."""


@dataclass(frozen=True)
class Spread:
    """What varies: the standard deviation between starts, that of iterations within one, and their lag-1
    correlation, all as shares of the level."""

    between: float
    within: float
    rho: float = 0.0

    def of_start(self, iterations: int) -> float:
        """The standard deviation of one start's mean."""
        if iterations < 1 or not 0 <= self.rho < 1 or min(self.between, self.within) < 0:
            raise LabError("a start has at least one iteration, spreads are not negative, and 0 <= rho < 1")
        n, rho = iterations, self.rho
        # Exact for a first-order autoregression of n values, not only for a long one.
        share = (1 + rho) / (1 - rho) / n - 2 * rho * (1 - rho**n) / (n * (1 - rho)) ** 2
        return math.hypot(self.between, self.within * math.sqrt(share))


@dataclass(frozen=True)
class Promise:
    """What a comparison of so many starts an arm does, simulated: how often it is decided, and the median
    half-width of its simultaneous interval, as a share of the ratio. `error` is the simulation's, of
    `power`."""

    starts: int
    power: float
    error: float
    half_width: float


def promise(
    effect: float,
    spread: float,
    starts: int,
    *,
    plan: Plan = Plan.GROUPED,
    comparisons: int = 1,
    alpha: float = 0.05,
    draws: int = DRAWS,
    seed: int = SEED,
) -> Promise:
    """Simulate experiments in which the arm's level is `1 + effect` times the base's, and judge them.

    `spread` is the standard deviation of one start's level, as a share of it; in pairs, of what the two of a
    pair do not share. `comparisons` are all that the page will have, of which this is one. Raises LabError
    for fewer than two starts an arm, a spread that is not above zero, or an effect of -1 or less.
    """
    fraction(alpha, "alpha")
    if starts < 2 or not spread > 0 or not effect > -1 or comparisons < 1:
        raise LabError(
            "power takes two starts an arm, a spread above zero, an effect above -1, one comparison at least"
        )
    found = _simulated(math.log1p(effect), spread, starts, plan, comparisons, alpha, draws, seed)
    power = float(found.different.mean())
    return Promise(
        starts,
        power,
        math.sqrt(max(power * (1 - power), 1 / draws) / draws),
        math.sinh(float(np.median(found.high - found.low)) / 2),
    )


def _simulated(
    shift: float,
    spread: float,
    starts: int,
    plan: Plan,
    comparisons: int,
    alpha: float,
    draws: int,
    seed: int,
) -> Judged:
    if plan not in (Plan.GROUPED, Plan.PAIRED):
        raise LabError(f"power is of {Plan.GROUPED.value}, or {Plan.PAIRED.value}; not of {plan.value}")
    layout = Layout.paired(starts) if plan is Plan.PAIRED else Layout.grouped(starts, starts)
    levels = _noise(draws, 2 * starts, seed) * spread + shift * layout.of_arm
    return judge(levels, layout, alpha, comparisons)


@lru_cache(maxsize=8)
def _noise(draws: int, columns: int, seed: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    return np.random.default_rng([seed, columns]).standard_normal((draws, columns))


def starts_needed(
    effect: float,
    spread: float,
    *,
    wanted: float = 0.8,
    plan: Plan = Plan.GROUPED,
    comparisons: int = 1,
    alpha: float = 0.05,
) -> Promise:
    """The fewest starts an arm that decide an effect with the power wanted. Raises LabError beyond 500."""
    fraction(wanted, "the power wanted")
    if effect == 0:
        raise LabError("no number of starts finds an effect of zero; say which one would matter")
    tried = partial(promise, effect, spread, plan=plan, comparisons=comparisons, alpha=alpha)
    what = f"an effect of {100 * effect:g} % where starts vary by {100 * spread:.3g} %"
    return fewest(tried, lambda found: found.power >= wanted, what)


def starts_for_width(
    half_width: float, spread: float, *, plan: Plan = Plan.GROUPED, comparisons: int = 1, alpha: float = 0.05
) -> Promise:
    """The fewest starts an arm whose interval has this half-width at most, as a share, in the median."""
    if not half_width > 0:
        raise LabError(f"the half-width wanted is {half_width}; it is a share above zero, such as 0.03")
    tried = partial(promise, half_width, spread, plan=plan, comparisons=comparisons, alpha=alpha)
    what = f"a half-width of {100 * half_width:g} % where starts vary by {100 * spread:.3g} %"
    return fewest(tried, lambda found: found.half_width <= half_width, what)


def effect_seen(
    spread: float,
    starts: int,
    *,
    wanted: float = 0.8,
    plan: Plan = Plan.GROUPED,
    comparisons: int = 1,
    alpha: float = 0.05,
) -> float:
    """The effect, as a share, that so many starts an arm decide with the power wanted; found by halving."""
    low, high = 0.0, 1.0
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        found = promise(middle, spread, starts, plan=plan, comparisons=comparisons, alpha=alpha, draws=2000)
        low, high = (middle, high) if found.power < wanted else (low, middle)
    return high


def fewest(tried: Callable[[int], Promise], good: Callable[[Promise], bool], what: str) -> Promise:
    """The first of a rising number of starts that is good enough; raises LabError where 500 are not."""
    low, high = FEWEST_STARTS - 1, FEWEST_STARTS
    while not good(found := tried(high)):
        if high >= MOST_STARTS:
            raise LabError(f"{what} takes over {MOST_STARTS} starts an arm; ask for less")
        low, high = high, min(MOST_STARTS, 2 * high)
    while high - low > 1:
        middle = (low + high) // 2
        one = tried(middle)
        low, high, found = (low, middle, one) if good(one) else (middle, high, found)
    return found
