"""Stopping when the answer is precise enough, at looks that were declared before, with intervals that still
hold.

An experiment that is looked at until its interval is short, or excludes zero, stops where chance was kind.
Here the looks are declared, the error is spent over them (Lan and DeMets 1983, Biometrika 70), and the
interval of each look is wide enough that all of them together hold the truth with the level asked (repeated
confidence intervals, Jennison and Turnbull 1989, J. R. Statist. Soc. B 51). One may therefore stop at any
look, for any reason.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import numpy as np
from scipy import optimize, stats

from kvik_lab.errors import LabError
from kvik_lab.infer.arrays import Interval, fraction
from kvik_lab.infer.effect import Difference

_NODES = 201


class Spending(Enum):
    """How the error is spent over the looks."""

    OBRIEN_FLEMING = "obrien-fleming"
    """Little early: the last look costs almost nothing."""
    POCOCK = "pocock"
    """Evenly: early looks can stop, the last one pays for it."""

    def spent(self, share: float, alpha: float) -> float:
        """The error spent once this share of the information is in."""
        if self is Spending.POCOCK:
            return alpha * math.log1p((math.e - 1.0) * share)
        # Each side spends half of it.
        return float(4.0 * stats.norm.sf(stats.norm.isf(alpha / 4.0) / math.sqrt(share)))


@lru_cache(maxsize=64)
def boundaries(shares: tuple[float, ...], alpha: float, spending: Spending) -> tuple[float, ...]:
    """The two-sided critical values of z at looks with these shares of the information, rising to 1.

    By integrating over paths that have not crossed (Armitage, McPherson and Rowe 1969, J. R. Statist. Soc. A
    132), in the scale where the statistic is a Brownian motion.
    """
    values: list[float] = []
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    at, mass = np.zeros(1), np.ones(1)
    before, spent = 0.0, 0.0
    for share in shares:
        step = math.sqrt(share - before)
        target = spending.spent(share, alpha) - spent

        def excess(
            edge: float,
            at: np.ndarray = at,
            mass: np.ndarray = mass,
            step: float = step,
            target: float = target,
        ) -> float:
            out = stats.norm.sf((edge - at) / step) + stats.norm.cdf((-edge - at) / step)
            return float((mass * out).sum()) - target

        edge = float(optimize.brentq(excess, 1e-9, 40.0 * math.sqrt(share), xtol=1e-10))
        values.append(edge / math.sqrt(share))
        points = edge * nodes
        density = stats.norm.pdf((points[:, None] - at[None, :]) / step) / step @ mass
        at, mass = points, density * weights * edge
        before, spent = share, spending.spent(share, alpha)
    return tuple(values)


class Decision(Enum):
    """What a look says."""

    CONTINUE = "continue"
    PRECISE = "stop: precise enough"
    DIFFERENT = "stop: the difference is established"
    FUTILE = "stop: the last look would not be precise enough either"
    EXHAUSTED = "stop: the last look is done"


@dataclass(frozen=True)
class StopRule:
    """Declared before the first run.

    `looks` are units (starts) an arm, rising; `half_width` the half-width wanted of the ratio's interval,
    relative to the ratio. `patience` is how much wider than wanted the last look may promise to be before it
    is given up, since the spread measured so far is itself uncertain.
    """

    looks: tuple[int, ...]
    half_width: float
    alpha: float = 0.05
    spending: Spending = Spending.OBRIEN_FLEMING
    stop_when_different: bool = False
    patience: float = 1.5

    def __post_init__(self) -> None:
        """Raise LabError for a rule that cannot be followed."""
        fraction(self.alpha, "alpha")
        if (
            not self.looks
            or self.looks[0] < 2
            or any(b <= a for a, b in zip(self.looks, self.looks[1:], strict=False))
        ):
            raise LabError(f"looks are {list(self.looks)}; they rise, from two units an arm at least")
        if self.half_width <= 0 or self.patience < 1:
            raise LabError("the half-width wanted is above 0, and patience is at least 1")

    def critical(self, look: int) -> float:
        """The critical value of z at a look, from 0."""
        return boundaries(tuple(n / self.looks[-1] for n in self.looks), self.alpha, self.spending)[look]


@dataclass(frozen=True)
class Look:
    """One look: units an arm, the ratio with its repeated interval, its relative half-width, and what
    follows."""

    units: int
    ratio: Interval
    half_width: float
    decision: Decision


def look(rule: StopRule, number: int, found: Difference) -> Look:
    """Judge the difference of logarithms at look `number`, from 0. Raises LabError for a look not
    declared."""
    if not 0 <= number < len(rule.looks):
        raise LabError(f"look {number + 1} was not declared; there are {len(rule.looks)}")
    # The boundary's nominal level, on the t distribution that so few units have.
    nominal = float(stats.norm.sf(rule.critical(number)))
    reach = float(stats.t.isf(nominal, found.degrees)) * found.error
    low, high = math.exp(found.estimate - reach), math.exp(found.estimate + reach)
    ratio = Interval(
        math.exp(found.estimate), low, high, 1.0 - rule.alpha, "repeated interval, declared looks"
    )
    width = ratio.half_width / ratio.estimate
    return Look(rule.looks[number], ratio, width, _decide(rule, number, found, width, ratio))


def _decide(rule: StopRule, number: int, found: Difference, width: float, ratio: Interval) -> Decision:
    if width <= rule.half_width:
        return Decision.PRECISE
    if rule.stop_when_different and not ratio.holds(1.0):
        return Decision.DIFFERENT
    if number == len(rule.looks) - 1:
        return Decision.EXHAUSTED
    growth = rule.looks[-1] / rule.looks[number]
    nominal = float(stats.norm.sf(rule.critical(len(rule.looks) - 1)))
    last = float(stats.t.isf(nominal, found.degrees * growth)) * found.error / math.sqrt(growth)
    return Decision.FUTILE if math.sinh(last) > rule.patience * rule.half_width else Decision.CONTINUE


@dataclass(frozen=True)
class Record:
    """What goes beside a result that was looked at: the rule, and each look."""

    rule: StopRule
    looks: tuple[Look, ...]

    @property
    def data_dependent(self) -> bool:
        """Whether the data decided where it stopped: true unless it went to the last look."""
        return self.looks[-1].units != self.rule.looks[-1]

    def __str__(self) -> str:
        last = self.looks[-1]
        how = "data-dependent" if self.data_dependent else "at the last look declared"
        return (
            f"stopped {how}, at look {len(self.looks)} of {len(self.rule.looks)} ({last.units} units "
            f"an arm): {last.decision.value}; intervals hold for all looks together "
            f"({self.rule.spending.value} spending)"
        )


def follow(rule: StopRule, found: Sequence[Difference]) -> Record:
    """Apply the rule to the differences at successive looks until it stops; raises LabError for none."""
    looks: list[Look] = []
    for number, difference in enumerate(found):
        looks.append(look(rule, number, difference))
        if looks[-1].decision is not Decision.CONTINUE:
            break
    if not looks:
        raise LabError("no look was taken; give the difference at the first one at least")
    return Record(rule, tuple(looks))
