"""A difference of logarithms, from which follows a ratio with its interval.

A ratio is always B over A, A being the base; below 1, B's values are smaller.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kvik_lab.errors import LabError
from kvik_lab.infer.arrays import Interval, Values, by_t, series
from kvik_lab.infer.serial import moments


@dataclass(frozen=True)
class Difference:
    """A difference on some scale with its standard error and degrees of freedom; `method` says what
    varied."""

    estimate: float
    error: float
    degrees: float
    method: str

    def ratio(self, level: float = 0.95) -> Interval:
        """For a difference of logarithms: the ratio with its bounds."""
        return by_t(self.estimate, self.error, self.degrees, level, self.method).of_logs()


def log_ratio_of_series(a: Values, b: Values) -> Difference:
    """The logarithm of B's mean over A's from one start each, respecting serial correlation.

    It compares these two starts and no others: what differs between starts is not in the interval.
    """
    x, y = series(a, "A", at_least=3), series(b, "B", at_least=3)
    for row, what in ((x, "A"), (y, "B")):
        if (row <= 0).any():
            raise LabError(f"{what} holds {row[row <= 0][0]}: a ratio needs values above zero")
    one, two = moments(x[None, :]), moments(y[None, :])
    parts = np.array([(m.error[0] / m.mean[0]) ** 2 for m in (one, two)])
    freedom = np.array([m.effective[0] - 1.0 for m in (one, two)])
    total = float(parts.sum())
    # Satterthwaite 1946, Biometrics Bulletin 2.
    degrees = total**2 / float((parts**2 / freedom).sum()) if total else float(freedom.sum())
    estimate = math.log(two.mean[0] / one.mean[0])
    return Difference(estimate, math.sqrt(total), degrees, "t with effective n, of these two starts only")
