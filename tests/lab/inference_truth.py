"""What the lab's inference says of data whose truth is known, as rates with their simulation errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from kvik_lab.infer.changes import ar1, confirm, find_changes
from kvik_lab.infer.order import Quantile, quantile
from kvik_lab.infer.power import Spread, promise
from kvik_lab.infer.serial import moments
from kvik_lab.infer.steady import mean_over_starts

Rows = NDArray[np.float64]
Draw = Callable[[int, int, np.random.Generator], Rows]


@dataclass(frozen=True)
class Rate:
    """How often something happened in so many repetitions."""

    hits: int
    of: int

    @property
    def value(self) -> float:
        """The share."""
        return self.hits / self.of

    @property
    def error(self) -> float:
        """Its simulation error: the binomial standard error."""
        return math.sqrt(max(self.value * (1 - self.value), 1 / self.of) / self.of)

    def within(self, low: float, high: float, errors: float = 3.0) -> bool:
        """Whether the share lies within the bounds even when this many simulation errors off."""
        return self.value - errors * self.error >= low and self.value + errors * self.error <= high

    def __str__(self) -> str:
        return f"{self.value:.4f} +- {self.error:.4f} ({self.of} repetitions)"


def correlated(rho: float) -> Draw:
    """AR(1) series, Gaussian."""
    return lambda rows, n, rng: ar1(rows, n, rho, rng)


def outliers(rows: int, n: int, rng: np.random.Generator) -> Rows:
    """Gaussian, and in 5 % of the points an exponential delay of ten standard deviations in the mean."""
    return rng.standard_normal((rows, n)) + (rng.random((rows, n)) < 0.05) * rng.exponential(10.0, (rows, n))


def student(rows: int, n: int, rng: np.random.Generator) -> Rows:
    """Student's t with three degrees of freedom."""
    return rng.standard_t(3, (rows, n))


def lognormal(rows: int, n: int, rng: np.random.Generator) -> Rows:
    """Lognormal with sigma 1: skewed, long to the right."""
    return np.asarray(np.exp(rng.standard_normal((rows, n))))


def correlated_outliers(rows: int, n: int, rng: np.random.Generator) -> Rows:
    """AR(0.6) with the delays of `outliers` on top."""
    return ar1(rows, n, 0.6, rng) + (rng.random((rows, n)) < 0.05) * rng.exponential(10.0, (rows, n))


def mean_coverage(rho: float, n: int, rows: int, seed: int) -> tuple[Rate, Rate]:
    """How often the interval of one series' mean holds it: the lab's, and the naive one."""
    x = ar1(rows, n, rho, np.random.default_rng(seed))
    found = moments(x)
    held = np.abs(found.mean) <= stats.t.ppf(0.975, found.effective - 1.0) * found.error
    error = x.std(axis=1, ddof=1) / math.sqrt(n)
    naive = np.abs(x.mean(axis=1)) <= stats.t.ppf(0.975, n - 1) * error
    return Rate(int(held.sum()), rows), Rate(int(naive.sum()), rows)


def starts_coverage(
    starts: int, n: int, between: float, rho: float, rows: int, seed: int, uneven: bool = False
) -> tuple[Rate, Rate]:
    """How often the interval over starts holds the truth: the lab's, and one that takes all iterations for
    independent. Iterations have a standard deviation of 1; uneven: starts of n/2 to 3n/2 iterations."""
    rng = np.random.default_rng(seed)
    lengths = np.linspace(n // 2, 3 * n // 2, starts).astype(int) if uneven else np.full(starts, n)
    parts = [
        ar1(rows, int(m), rho, rng) * math.sqrt(1 - rho**2) + between * rng.standard_normal((rows, 1))
        for m in lengths
    ]
    held = naive = 0
    for i in range(rows):
        data = [p[i] for p in parts]
        held += mean_over_starts([float(d.mean()) for d in data]).holds(0.0)
        pool = np.concatenate(data)
        naive += bool(abs(pool.mean()) <= 1.96 * pool.std(ddof=1) / math.sqrt(len(pool)))
    return Rate(held, rows), Rate(naive, rows)


def quantile_coverage(probability: float, n: int, sides: int, rows: int, seed: int) -> Rate:
    """How often the bounds of a lognormal's quantile hold it."""
    truth = math.exp(stats.norm.ppf(probability))
    held = 0
    for row in lognormal(rows, n, np.random.default_rng(seed)):
        found = quantile(row, probability, sides=sides)
        if not isinstance(found, Quantile):
            raise AssertionError(str(found))
        held += (found.low is None or found.low <= truth) and (found.high is None or truth <= found.high)
    return Rate(held, rows)


def false_alarms(draw: Draw, n: int, rows: int, seed: int) -> Rate:
    """How often a series without a change is said to have one."""
    rng = np.random.default_rng(seed)
    alarms = 0
    for done in range(0, rows, 500):
        found = confirm(draw(min(500, rows - done), n, rng))
        alarms += int(found.changes.any(axis=1).sum())
    return Rate(alarms, rows)


@dataclass(frozen=True)
class Detection:
    """How often a step was found within one iteration, how many others were a series, and how often the
    intervals of its location and of its size in % held the true ones."""

    found: Rate
    spurious: float
    spurious_error: float
    located: Rate
    sized: Rate


def step_series(rows: int, seed: int, size: float = -0.23, at: int = 17, n: int = 30) -> Rows:
    """1,900 ms with 2 % noise and a step; 5 % of the points have an exponential delay of 400 ms in the
    mean."""
    rng = np.random.default_rng(seed)
    x = 1900.0 * (1.0 + 0.02 * rng.standard_normal((rows, n)))
    x[:, at:] *= 1.0 + size
    return np.asarray(x + (rng.random((rows, n)) < 0.05) * rng.exponential(400.0, (rows, n)))


def wandering_step(rows: int, seed: int, at: int, n: int) -> Rows:
    """AR(0.6) of unit innovations about 100, with a step of -15."""
    x = 100.0 + ar1(rows, n, 0.6, np.random.default_rng(seed))
    x[:, at:] -= 15.0
    return x


def detection(series: Rows, at: int, size: float) -> Detection:
    """How well a step of this relative size is found in each row."""
    hits = located = sized = 0
    others = []
    for row in series:
        changes = find_changes(row).changes
        near = [c for c in changes if abs(c.at - at) <= 1]
        hits += bool(near)
        others.append(len(changes) - min(1, len(near)))
        located += any(c.earliest <= at <= c.latest for c in near)
        sized += any(c.percent_low <= 100 * size <= c.percent_high for c in near)
    rows = len(series)
    spread = float(np.std(others)) / math.sqrt(rows)
    return Detection(Rate(hits, rows), float(np.mean(others)), spread, Rate(located, rows), Rate(sized, rows))


def power_as_planned(
    effect: float, spread: Spread, starts: int, n: int, rows: int, seed: int
) -> tuple[float, Rate]:
    """The planned power of a comparison of start means, and how often Welch's test, as scipy has it, finds
    the effect."""
    planned = promise(effect, spread.of_start(n), starts).power
    rng = np.random.default_rng(seed)
    arms = []
    for level in (0.0, math.log1p(effect)):
        noise = ar1(rows * starts, n, spread.rho, rng) * math.sqrt(1 - spread.rho**2) * spread.within
        means = noise.mean(axis=1).reshape(rows, starts)
        arms.append(level + means + spread.between * rng.standard_normal((rows, starts)))
    p = stats.ttest_ind(arms[0], arms[1], axis=1, equal_var=False).pvalue
    return planned, Rate(int((p <= 0.05).sum()), rows)
