"""How large a difference is, with an interval: ratios of levels, Cliff's delta, and P(A < B).

A ratio is always B over A, A being the base; below 1, B's values are smaller.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from kvik_lab.errors import LabError
from kvik_lab.infer.arrays import Floats, Interval, Values, fraction, series
from kvik_lab.infer.serial import moments


@dataclass(frozen=True)
class Difference:
    """A difference on some scale with its standard error and degrees of freedom, from which follow interval,
    test, and equivalence. `method` says what varied."""

    estimate: float
    error: float
    degrees: float
    method: str

    def interval(self, level: float = 0.95) -> Interval:
        """The difference with its bounds."""
        reach = float(stats.t.ppf(0.5 + fraction(level, "the level") / 2.0, self.degrees)) * self.error
        return Interval(self.estimate, self.estimate - reach, self.estimate + reach, level, self.method)

    def ratio(self, level: float = 0.95) -> Interval:
        """For a difference of logarithms: the ratio with its bounds."""
        found = self.interval(level)
        return Interval(
            math.exp(found.estimate), math.exp(found.low), math.exp(found.high), level, self.method
        )

    def p(self) -> float:
        """Two-sided probability of a difference this large if there were none."""
        if self.error == 0:
            return 0.0 if self.estimate else 1.0
        return float(2.0 * stats.t.sf(abs(self.estimate) / self.error, self.degrees))


def _logs(values: Floats, what: str) -> Floats:
    bad = np.flatnonzero(values <= 0)
    if len(bad):
        raise LabError(f"{what} holds {values[bad[0]]}: a ratio needs values above zero")
    return np.log(values)


def log_ratio(a: Values, b: Values) -> Difference:
    """The logarithm of B's level over A's, one value a start: Welch's t with Satterthwaite's degrees.

    The level compared is the geometric mean of the starts' levels, which a ratio belongs to. Raises LabError
    for fewer than two starts on a side, or values that are not positive.
    """
    x = _logs(series(a, "A", at_least=2), "A")
    y = _logs(series(b, "B", at_least=2), "B")
    parts = np.array([x.var(ddof=1) / len(x), y.var(ddof=1) / len(y)])
    return _welch(
        float(y.mean() - x.mean()),
        parts,
        np.array([len(x) - 1.0, len(y) - 1.0]),
        "Welch's t over starts, of logs",
    )


def paired_log_ratio(a: Values, b: Values) -> Difference:
    """As `log_ratio`, of starts that ran in pairs: t of the pairs' differences."""
    x, y = series(a, "A", at_least=2), series(b, "B", at_least=2)
    if len(x) != len(y):
        raise LabError(f"A has {len(x)} values and B {len(y)}; pairs need as many of each")
    rest = _logs(y, "B") - _logs(x, "A")
    error = float(rest.std(ddof=1)) / math.sqrt(len(rest))
    return Difference(float(rest.mean()), error, len(rest) - 1.0, "t over pairs, of logs")


def log_ratio_of_series(a: Values, b: Values) -> Difference:
    """The logarithm of B's mean over A's from one start each, respecting serial correlation.

    It compares these two starts and no others: what differs between starts is not in the interval.
    """
    x, y = series(a, "A", at_least=3), series(b, "B", at_least=3)
    _logs(x, "A")
    _logs(y, "B")
    one, two = moments(x[None, :]), moments(y[None, :])
    parts = np.array([(m.error[0] / m.mean[0]) ** 2 for m in (one, two)])
    degrees = np.array([m.effective[0] - 1.0 for m in (one, two)])
    return _welch(
        math.log(two.mean[0] / one.mean[0]), parts, degrees, "t with effective n, of these two starts only"
    )


def _welch(estimate: float, parts: Floats, degrees: Floats, method: str) -> Difference:
    total = float(parts.sum())
    if total == 0.0:
        return Difference(estimate, 0.0, float(degrees.sum()), method)
    # Satterthwaite 1946, Biometrics Bulletin 2.
    joint = total**2 / float((parts**2 / degrees).sum())
    return Difference(estimate, math.sqrt(total), joint, method)


def cliffs_delta(a: Values, b: Values, level: float = 0.95) -> Interval:
    """P(B > A) - P(B < A), from -1 to 1, of independent values (Cliff 1993, Psychological Bulletin 114), with
    the asymmetric interval of Feng and Cliff (2004, J. Modern Applied Statistical Methods 3)."""
    x, y = series(a, "A", at_least=2), series(b, "B", at_least=2)
    signs = np.sign(y[:, None] - x[None, :])
    delta = float(signs.mean())
    m, n = len(y), len(x)
    rows, columns = signs.mean(axis=1), signs.mean(axis=0)
    squares = float(((signs - delta) ** 2).sum())
    variance = (m**2 * ((rows - delta) ** 2).sum() + n**2 * ((columns - delta) ** 2).sum() - squares) / (
        m * n * (m - 1) * (n - 1)
    )
    variance = max(float(variance), (1.0 - delta**2) / (m * n - 1))
    t = float(stats.t.ppf(0.5 + fraction(level, "the level") / 2.0, m + n - 2))
    if abs(delta) == 1.0:
        # Complete separation has no variance; the bound of Feng and Cliff for it.
        bound = (min(m, n) - t**2) / (min(m, n) + t**2)
        low, high = (bound, 1.0) if delta > 0 else (-1.0, -bound)
        return Interval(delta, low, high, level, "Cliff's delta, complete separation")
    spread = t * math.sqrt(variance) * math.sqrt((1.0 - delta**2) ** 2 + t**2 * variance)
    middle, scale = delta - delta**3, 1.0 - delta**2 + t**2 * variance
    low, high = (max(-1.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale))
    return Interval(delta, low, high, level, "Cliff's delta")


@dataclass(frozen=True)
class BrunnerMunzel:
    """P(A < B) + P(A = B) / 2 with its interval, and the p-value of it being one half."""

    larger: Interval
    p: float


def brunner_munzel(a: Values, b: Values, level: float = 0.95) -> BrunnerMunzel:
    """Whether B tends to larger values than A, of independent values that may differ in spread too
    (Brunner and Munzel 2000, Biometrical Journal 42). Raises LabError where the groups do not overlap: its
    variance is zero then; a permutation test has an answer."""
    x, y = series(a, "A", at_least=2), series(b, "B", at_least=2)
    n, m = len(x), len(y)
    both = stats.rankdata(np.concatenate([x, y]))
    one, two = both[:n] - stats.rankdata(x), both[n:] - stats.rankdata(y)
    parts = np.array([one.var(ddof=1) / (n * m**2), two.var(ddof=1) / (m * n**2)])
    if parts.sum() == 0:
        raise LabError("A and B do not overlap: Brunner-Munzel has no variance; take a permutation test")
    found = _welch(float(two.mean()) / n - 0.5, parts, np.array([n - 1.0, m - 1.0]), "Brunner-Munzel")
    shifted = found.interval(level)
    bounds = Interval(
        shifted.estimate + 0.5, max(0.0, shifted.low + 0.5), min(1.0, shifted.high + 0.5), level, found.method
    )
    return BrunnerMunzel(bounds, found.p())


@dataclass(frozen=True)
class Equivalence:
    """Two one-sided tests of a ratio within 1 / (1 + margin) to 1 + margin.

    `p` is the larger of the two: up to alpha, the ratio lies within the margin. `interval` is the one at
    1 - 2 alpha, which lies inside the margin exactly then.
    """

    margin: float
    p: float
    equivalent: bool
    interval: Interval
    alpha: float


def equivalence(found: Difference, margin: float, alpha: float = 0.05) -> Equivalence:
    """Whether a difference of logarithms is a ratio within the margin, such as 0.01 for 1 %
    (Schuirmann 1987, J. Pharmacokinet. Biopharm. 15). A large p of a test for a difference does not say
    so."""
    if margin <= 0:
        raise LabError(f"the margin is {margin}; say how far a ratio may lie from 1, such as 0.01")
    fraction(2.0 * alpha, "twice alpha")
    bound = math.log1p(margin)
    if found.error == 0:
        p = 0.0 if abs(found.estimate) < bound else 1.0
    else:
        tests = [(bound - found.estimate) / found.error, (bound + found.estimate) / found.error]
        p = float(max(stats.t.sf(t, found.degrees) for t in tests))
    return Equivalence(margin, p, p <= alpha, found.ratio(1.0 - 2.0 * alpha), alpha)


def medians(starts: Sequence[Values]) -> Floats:
    """The median of each start."""
    return np.array([float(np.median(series(s, f"start {i + 1}"))) for i, s in enumerate(starts)])
