"""Whole pages of comparisons whose truth is known: how often they decide, hold the truth, or refuse.

Every page is simulated down to its iterations and goes through the product's own analysis, many pages at
once: `pooled.settle_rows` for the warm-up, `judge` for the intervals. `test_decisions` checks that `compare`,
which a report calls, says the same of single pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvik_lab.infer.changes import ar1
from kvik_lab.infer.judge import Layout, Plan, judge
from kvik_lab.infer.pooled import settle_rows
from kvik_lab.infer.power import Spread, promise
from tests.lab.inference_truth import Rate

Rows = NDArray[np.float64]
Noise = Callable[[int, int, np.random.Generator], Rows]

BETWEEN, WITHIN, RHO = 0.02, 0.05, 0.6
"""Deviations of starts and of iterations, and the correlation of iterations where there is any."""
BLOCKS = 0.05
"""Deviation of what a block adds to both of its starts."""


@dataclass(frozen=True)
class Design:
    """A design that the documentation recommends. `nested`: each start runs one size; otherwise each runs
    all."""

    name: str
    starts: int
    iterations: int = 30
    arms: int = 2
    sizes: int = 1
    nested: bool = True
    paired: bool = False

    @property
    def comparisons(self) -> int:
        """Intervals on the page."""
        return (self.arms - 1) * self.sizes

    @property
    def plan(self) -> Plan:
        """How starts are compared."""
        return Plan.PAIRED if self.paired else Plan.GROUPED

    @property
    def layout(self) -> Layout:
        """Of one comparison."""
        return Layout.paired(self.starts) if self.paired else Layout.grouped(self.starts, self.starts)


DESIGNS = (
    Design("2 arms, 5 starts each", 5),
    Design("2 arms, 10 starts each", 10),
    Design("2 arms, 20 starts of 100", 20, iterations=100),
    Design("2 arms x 3 sizes, 4 starts a size", 4, sizes=3),
    Design("4 arms, 5 starts each", 5, arms=4),
    Design("6 pairs of starts", 6, paired=True),
    Design("6 pairs, 3 sizes in each start", 6, sizes=3, nested=False, paired=True),
)


def independent(rows: int, n: int, rng: np.random.Generator) -> Rows:
    """Unit Gaussian."""
    return rng.standard_normal((rows, n))


def wandering(rows: int, n: int, rng: np.random.Generator) -> Rows:
    """AR(0.6) of unit variance."""
    return np.asarray(ar1(rows, n, RHO, rng) * np.sqrt(1 - RHO**2))


def mixed(rows: int, n: int, rng: np.random.Generator) -> Rows:
    """AR(0.9) and white noise of equal variance: a lag-1 correlation of 0.45, and a memory of ten
    iterations."""
    slow = ar1(rows, n, 0.9, rng) * np.sqrt(1 - 0.9**2)
    return np.asarray((slow + rng.standard_normal((rows, n))) / np.sqrt(2))


def tailed(rows: int, n: int, rng: np.random.Generator) -> Rows:
    """Gaussian, and in 5 % of the iterations an exponential delay of ten deviations in the mean."""
    late = rng.random((rows, n)) < 0.05
    return rng.standard_normal((rows, n)) + late * rng.exponential(10.0, (rows, n))


@dataclass(frozen=True)
class Scenario:
    """What the iterations do. `odd`: chance that a start is 30 % slower; `warmup`: whether two slow
    iterations begin each, twice the level in the base and 1.2 times in the arms; `step`: chance that a start
    slows down by 30 % in mid-run; `drift`: over a run, as a share."""

    name: str
    noise: Noise = independent
    odd: float = 0.0
    warmup: bool = False
    step: float = 0.0
    drift: float = 0.0


SCENARIOS = (
    Scenario("independent"),
    Scenario("AR(0.6)", wandering),
    Scenario("heavy tails", tailed),
    Scenario("AR plus white noise", mixed),
    Scenario("one start in ten 30 % slower", odd=0.1),
    Scenario("two warm-up iterations", warmup=True),
    Scenario("drift of 3 % over a run", drift=0.03),
    Scenario("one in twenty slows in mid-run", step=0.05),
)


@dataclass(frozen=True)
class Pages:
    """Of many pages: whether any comparison was decided, and of all their comparisons how many were decided,
    held the truth, or were refused. `held` is of those that were not refused."""

    any_decided: Rate
    decided: Rate
    held: Rate
    refused: Rate


def pages(design: Design, scenario: Scenario, effect: float, rows: int, seed: int) -> Pages:
    """Simulate pages in which every arm's level is `1 + effect` times the base's."""
    rng = np.random.default_rng(seed)
    values = simulate(design, scenario, effect, rows, rng)
    shape = (rows, design.arms, design.sizes * design.starts, design.iterations)
    found = [settle_rows(np.log(values.reshape(shape)[:, arm])) for arm in range(design.arms)]
    cut = np.stack([f.at * f.settled for f in found]).max(axis=0)
    means = np.log(_means(values, cut))
    any_decided = np.zeros(rows, dtype=bool)
    decided = held = refused = 0
    for arm in range(1, design.arms):
        good = found[0].settled & found[arm].settled
        refused += int((~good).sum()) * design.sizes
        for size in range(design.sizes):
            levels = np.concatenate([means[:, 0, size], means[:, arm, size]], axis=1)[good]
            one = judge(levels, design.layout, comparisons=design.comparisons)
            any_decided[good] |= one.different
            decided += int(one.different.sum())
            single = judge(levels, design.layout)
            truth = np.log1p(effect)
            held += int(((single.low <= truth) & (truth <= single.high)).sum())
    total = rows * design.comparisons
    return Pages(
        Rate(int(any_decided.sum()), rows),
        Rate(decided, total),
        Rate(held, total - refused),
        Rate(refused, total),
    )


def simulate(design: Design, scenario: Scenario, effect: float, rows: int, rng: np.random.Generator) -> Rows:
    """Values of shape (pages, arms, sizes, starts, iterations)."""
    a, c, s, n = design.arms, design.sizes, design.starts, design.iterations
    own = rng.standard_normal((rows, a, c if design.nested else 1, s, 1)) * BETWEEN
    odd = rng.random(own.shape) < scenario.odd
    shared = rng.standard_normal((rows, 1, own.shape[2], s, 1)) * BLOCKS if design.paired else 0.0
    level = np.exp(own + shared) * np.where(odd, 1.3, 1.0)
    level = level * np.where(np.arange(a) > 0, 1 + effect, 1.0)[:, None, None, None]
    level = level * (100.0 * 2.0 ** np.arange(c))[:, None, None]
    noise = scenario.noise(rows * a * c * s, n, rng).reshape(rows, a, c, s, n)
    shape = np.ones((a, n))
    if scenario.warmup:
        shape[:, :2] = 1.2
        shape[0, :2] = 2.0
    shape = shape * (1 + scenario.drift * (np.arange(n) / (n - 1) - 0.5))
    steps = (rng.random((rows, a, c, s, 1)) < scenario.step) & (np.arange(n) >= n // 2)
    values = level * (1 + WITHIN * noise) * shape[:, None, None, :] * np.where(steps, 1.3, 1.0)
    return np.asarray(values)


def _means(values: Rows, cut: NDArray[np.intp]) -> Rows:
    out = np.empty(values.shape[:-1])
    for first in np.unique(cut):
        here = cut == first
        out[here] = values[here][..., first:].mean(axis=-1)
    return out


def planned(design: Design, effect: float, rho: float = 0.0) -> float:
    """The power that a plan promises for one comparison of this page."""
    spread = Spread(BETWEEN, WITHIN, rho).of_start(design.iterations)
    return promise(effect, spread, design.starts, plan=design.plan, comparisons=design.comparisons).power
