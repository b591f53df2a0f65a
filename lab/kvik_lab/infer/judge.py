"""The one analysis of a comparison: an interval over starts, and the verdict that it gives.

`kvik lab report`, `compare`, `pilot` and the simulated power of a plan all call `judge`: what is promised is
what is done. It takes the logarithms of start levels, many experiments at once (a row each), since a plan
simulates thousands of them and a report has one.

The unit is the server start (the whole plot of a split-plot design). Iterations within a start, however they
depend on each other, enter only by their mean, so that no model of their correlation is needed. Where several
comparisons stand on one page, each interval is taken at 1 - alpha / comparisons (Bonferroni): all of them
hold together with probability 1 - alpha at least, however they depend on each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray
from scipy import special

from kvik_lab.errors import LabError
from kvik_lab.infer.arrays import Bools, Floats, fraction

ODD_SHARE = 0.15
ODD_SPREAD = 5.0
MOST_ODD = 1.0 / 3.0
RULE = (
    f"a start is odd if its level lies more than {100 * ODD_SHARE:g} % and more than {ODD_SPREAD:g} robust "
    "standard deviations from the median of its arm (of pairs: if the ratio of a pair does, from that of the "
    "pairs); odd starts are left out where they are a third of their arm at most, and kept otherwise"
)
"""The rule for odd starts, stated before the data are seen."""

# Croux and Rousseeuw (1992, COMPSTAT): what makes the MAD of n normal values right on average; beyond them
# n / (n - 0.8).
_MAD = np.array([1.0, 1.0, 1.196, 1.495, 1.363, 1.206, 1.200, 1.140, 1.129, 1.107])

Ints = NDArray[np.intp]


class Plan(Enum):
    """What the starts of a comparison were to each other."""

    PAIRED = "pairs of starts, one pair a block"
    BLOCKED = "starts within blocks"
    GROUPED = "two groups of starts"
    SINGLE = "one start each"


@dataclass(frozen=True)
class Layout:
    """Of each start of a comparison: whether it is of the arm (or of the base), and the number of its
    block."""

    of_arm: Bools
    block: Ints

    @staticmethod
    def grouped(base: int, arm: int) -> Layout:
        """Two groups of starts."""
        return Layout(np.arange(base + arm) >= base, np.zeros(base + arm, np.intp))

    @staticmethod
    def paired(pairs: int) -> Layout:
        """One start of each arm in every block; base and arm in the order of their blocks."""
        return Layout(np.arange(2 * pairs) >= pairs, np.tile(np.arange(pairs), 2))

    @property
    def plan(self) -> Plan:
        """How the starts are compared."""
        # Of odd starts that are left out, one may have been its side's only one in the last block.
        blocks = int(self.block.max()) + 1
        counts = np.stack(
            [np.bincount(self.block[self.of_arm == side], minlength=blocks) for side in (False, True)]
        )
        if counts.shape[1] == 1:
            return Plan.GROUPED if counts.min() > 1 else Plan.SINGLE
        return Plan.PAIRED if (counts == 1).all() else Plan.BLOCKED


@dataclass(frozen=True)
class Judged:
    """Of each experiment (row): the log ratio of the arm over the base, its standard error and degrees of
    freedom, the bounds at the simultaneous level, and which starts were kept. A row without an answer has nan
    bounds."""

    estimate: Floats
    error: Floats
    degrees: Floats
    low: Floats
    high: Floats
    kept: Bools
    method: str

    @property
    def different(self) -> Bools:
        """Whether the interval excludes a ratio of 1."""
        return np.asarray((self.low > 0) | (self.high < 0))

    def p(self, comparisons: int = 1) -> Floats:
        """Two-sided p-values of no difference, adjusted for so many comparisons: up to alpha exactly where
        the interval excludes a ratio of 1."""
        with np.errstate(divide="ignore", invalid="ignore"):
            size = np.where(
                self.error > 0, np.abs(self.estimate) / self.error, np.inf * np.abs(self.estimate)
            )
        tail = 2.0 * special.stdtr(self.degrees, -np.nan_to_num(size, nan=0.0, posinf=np.inf))
        return np.asarray(np.minimum(1.0, comparisons * np.where(np.isnan(self.low), np.nan, tail)))


def judge(
    levels: Floats, layout: Layout, alpha: float = 0.05, comparisons: int = 1, leave_out: bool = True
) -> Judged:
    """Judge experiments: `levels` has the logarithms of start levels, shape (experiments, starts).

    `leave_out`: whether odd starts are left out by `RULE`. Raises LabError for a single start on a side, of
    which nothing can be said of other starts.
    """
    fraction(alpha, "alpha")
    plan = layout.plan
    if plan is Plan.SINGLE:
        raise LabError("one side has a single start: how starts differ is not known; replicate the starts")
    kept = ~odd(levels, layout) if leave_out else np.ones(levels.shape, dtype=bool)
    with np.errstate(divide="ignore", invalid="ignore"):
        if plan is Plan.PAIRED:
            estimate, error, degrees = _pairs(levels, kept, layout)
        elif plan is Plan.GROUPED:
            estimate, error, degrees = _groups(levels, kept, layout)
        else:
            estimate, error, degrees = _blocks(levels, kept, layout)
    reach = special.stdtrit(np.maximum(degrees, 1e-9), 1.0 - alpha / (2.0 * comparisons)) * error
    reach = np.where(degrees > 0, reach, np.nan)
    return Judged(estimate, error, degrees, estimate - reach, estimate + reach, kept, _METHODS[plan])


_METHODS = {
    Plan.PAIRED: "t over pairs of starts, of logs",
    Plan.GROUPED: "Welch's t over starts, of logs",
    Plan.BLOCKED: "least squares over starts within blocks, of logs",
}


def odd(levels: Floats, layout: Layout) -> Bools:
    """Which starts are odd by `RULE` and few enough to be left out, shape (experiments, starts)."""
    out = np.zeros(levels.shape, dtype=bool)
    if layout.plan is Plan.PAIRED:
        pairs = odd_levels(_differences(levels, layout))
        return np.asarray(pairs[:, np.searchsorted(np.unique(layout.block), layout.block)])
    alone = _without_blocks(levels, layout)
    for side in (False, True):
        at = np.flatnonzero(layout.of_arm == side)
        out[:, at] = odd_levels(alone[:, at])
    return out


def odd_levels(levels: Floats) -> Bools:
    """Which levels of one arm (or of pairs) are odd by `RULE` and few enough to be left out."""
    n = levels.shape[1]
    if n < 3:
        return np.zeros(levels.shape, dtype=bool)
    rest = np.abs(levels - np.median(levels, axis=1, keepdims=True))
    factor = _MAD[n] if n < len(_MAD) else n / (n - 0.8)
    spread = 1.4826 * factor * np.median(rest, axis=1, keepdims=True)
    found = (rest > math.log1p(ODD_SHARE)) & (rest > ODD_SPREAD * spread)
    return np.asarray(found & (found.sum(axis=1, keepdims=True) <= n * MOST_ODD))


def _differences(levels: Floats, layout: Layout) -> Floats:
    """Arm minus base of each pair, by block."""
    sides = []
    for side in (False, True):
        at = np.flatnonzero(layout.of_arm == side)
        sides.append(levels[:, at[np.argsort(layout.block[at])]])
    return np.asarray(sides[1] - sides[0])


def _without_blocks(levels: Floats, layout: Layout) -> Floats:
    """Levels less what their block adds to both arms: the median of each block about its arms."""
    if not layout.block.any():
        return levels
    arms = np.empty_like(levels)
    for side in (False, True):
        at = layout.of_arm == side
        arms[:, at] = np.median(levels[:, at], axis=1, keepdims=True)
    out = levels.copy()
    for block in np.unique(layout.block):
        at = layout.block == block
        out[:, at] -= np.median((levels - arms)[:, at], axis=1, keepdims=True)
    return out


def _sums(values: Floats, kept: Bools) -> tuple[Floats, Floats, Floats]:
    """Mean, sum of squares about it, and number of the values kept in each row; 0 where there are none."""
    n = kept.sum(axis=1).astype(np.float64)
    mean = np.where(kept, values, 0.0).sum(axis=1) / np.maximum(n, 1.0)
    return mean, np.where(kept, (values - mean[:, None]) ** 2, 0.0).sum(axis=1), n


def _mean(values: Floats, kept: Bools) -> tuple[Floats, Floats, Floats]:
    """Mean, variance, and number of the values kept in each row."""
    mean, squares, n = _sums(values, kept)
    return mean, squares / (n - 1.0), n


def _pairs(levels: Floats, kept: Bools, layout: Layout) -> tuple[Floats, Floats, Floats]:
    of_pair = kept[:, ~layout.of_arm][:, np.argsort(layout.block[~layout.of_arm])]
    mean, variance, n = _mean(_differences(levels, layout), of_pair)
    return mean, np.sqrt(variance / n), n - 1.0


def _groups(levels: Floats, kept: Bools, layout: Layout) -> tuple[Floats, Floats, Floats]:
    """Welch's t with Satterthwaite's degrees of freedom (1946, Biometrics Bulletin 2)."""
    one, two = (_mean(levels[:, layout.of_arm == s], kept[:, layout.of_arm == s]) for s in (False, True))
    parts = [variance / n for _, variance, n in (one, two)]
    total = parts[0] + parts[1]
    degrees = total**2 / (parts[0] ** 2 / (one[2] - 1.0) + parts[1] ** 2 / (two[2] - 1.0))
    return two[0] - one[0], np.sqrt(total), np.where(total > 0, degrees, one[2] + two[2] - 2.0)


def _blocks(levels: Floats, kept: Bools, layout: Layout) -> tuple[Floats, Floats, Floats]:
    """The difference within blocks, with a level for each: blocks weigh n_a n_b / (n_a + n_b)."""
    rows, blocks = len(levels), np.unique(layout.block)
    weights, each = np.zeros((len(blocks), rows)), np.zeros((len(blocks), rows))
    squares, fitted = np.zeros(rows), np.zeros(rows)
    for k, block in enumerate(blocks):
        here = layout.block == block
        base, arm = (np.flatnonzero(here & (layout.of_arm == side)) for side in (False, True))
        one, of_base, n = _sums(levels[:, base], kept[:, base])
        two, of_arm, m = _sums(levels[:, arm], kept[:, arm])
        weights[k] = n * m / np.maximum(n + m, 1.0)
        each[k] = two - one
        squares += of_base + of_arm
        fitted += (n + m) > 0
    estimate = (weights * each).sum(axis=0) / weights.sum(axis=0)
    squares += (weights * (each - estimate) ** 2).sum(axis=0)
    degrees = kept.sum(axis=1) - fitted - 1.0
    return estimate, np.sqrt(squares / degrees / weights.sum(axis=0)), degrees
