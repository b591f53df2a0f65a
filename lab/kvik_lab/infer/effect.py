"""A difference of logarithms, from which follow a ratio with its interval and a test.

A ratio is always B over A, A being the base; below 1, B's values are smaller.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

from kvik_lab.errors import LabError
from kvik_lab.infer.arrays import Floats, Interval, Values, fraction, series
from kvik_lab.infer.serial import moments


@dataclass(frozen=True)
class Difference:
    """A difference on some scale with its standard error and degrees of freedom; `method` says what
    varied."""

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


def logs(values: Floats, what: str) -> Floats:
    """Their logarithms; raises LabError for a value that has none."""
    bad = np.flatnonzero(values <= 0)
    if len(bad):
        raise LabError(f"{what} holds {values[bad[0]]}: a ratio needs values above zero")
    return np.log(values)


def log_ratio_of_series(a: Values, b: Values) -> Difference:
    """The logarithm of B's mean over A's from one start each, respecting serial correlation.

    It compares these two starts and no others: what differs between starts is not in the interval.
    """
    x, y = series(a, "A", at_least=3), series(b, "B", at_least=3)
    logs(x, "A")
    logs(y, "B")
    one, two = moments(x[None, :]), moments(y[None, :])
    parts = np.array([(m.error[0] / m.mean[0]) ** 2 for m in (one, two)])
    freedom = np.array([m.effective[0] - 1.0 for m in (one, two)])
    total = float(parts.sum())
    # Satterthwaite 1946, Biometrics Bulletin 2.
    degrees = total**2 / float((parts**2 / freedom).sum()) if total else float(freedom.sum())
    estimate = math.log(two.mean[0] / one.mean[0])
    return Difference(estimate, math.sqrt(total), degrees, "t with effective n, of these two starts only")
