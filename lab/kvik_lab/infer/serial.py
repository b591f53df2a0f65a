"""Means of series whose values depend on those before them, with intervals that hold.

Thirty iterations of one server start are rarely thirty independent ones. At a lag-1 autocorrelation rho the
mean of n values varies as that of n (1 - rho) / (1 + rho) independent ones (Bayley and Hammersley 1946,
J. R. Statist. Soc. Suppl. 8), and an interval that takes n for it holds the truth far less often than it
says.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvik_lab.infer.arrays import Floats, Interval, Values, by_t, mean_by_t, series

FEWEST = 2.0
"""Floor of the effective number: below, no interval of a series this short means anything but "very wide"."""


@dataclass(frozen=True)
class Serial:
    """A series' serial correlation: as measured, corrected for its bias, and the number of independent values
    that its n are worth for a mean."""

    n: int
    measured: float
    rho: float
    effective: float


@dataclass(frozen=True)
class Moments:
    """Of many series of one length: the mean, its standard error, and the effective number, one each."""

    mean: Floats
    error: Floats
    effective: Floats


def autocorrelation(rows: Floats) -> Floats:
    """The lag-1 autocorrelation of each row; 0 for one without any variation."""
    rest = rows - rows.mean(axis=-1, keepdims=True)
    squares = (rest**2).sum(axis=-1)
    lagged = (rest[..., 1:] * rest[..., :-1]).sum(axis=-1)
    return np.asarray(np.where(squares > 0, lagged / np.where(squares > 0, squares, 1.0), 0.0))


def corrected(measured: Floats, n: int) -> Floats:
    """The autocorrelation without its bias to first order, -(1 + 4 rho) / n for this estimator (Kendall 1954,
    Biometrika 41; Marriott and Pope 1954, ibid.).

    Negative ones become 0: values that alternate are given no credit for it. The upper bound is the rho at
    which n values are worth FEWEST.
    """
    cap = (n - FEWEST) / (n + FEWEST)
    return np.clip((measured + 1.0 / n) / max(1.0 - 4.0 / n, 0.1), 0.0, max(0.0, cap))


def moments(rows: Floats) -> Moments:
    """Mean and standard error of many series, shape (rows, n), each with its own serial correlation.

    The sum of squares about the mean of n dependent values lacks the mean's own variance, so that it is
    divided by n (1 - 1 / effective) and not by n - 1.
    """
    n = rows.shape[-1]
    rho = corrected(autocorrelation(rows), n)
    effective = n * (1.0 - rho) / (1.0 + rho)
    mean = rows.mean(axis=-1)
    squares = ((rows - mean[..., None]) ** 2).sum(axis=-1)
    return Moments(mean, np.sqrt(squares / (n * (effective - 1.0))), effective)


def serial(values: Values) -> Serial:
    """The serial correlation of one series of at least three values."""
    row = series(values, at_least=3)
    measured = autocorrelation(row[None, :])
    rho = float(corrected(measured, len(row))[0])
    return Serial(len(row), float(measured[0]), rho, len(row) * (1.0 - rho) / (1.0 + rho))


def mean_interval(values: Values, level: float = 0.95) -> Interval:
    """The mean of one series: Student's t with the effective number of values, less one, as degrees of
    freedom.

    It speaks of the level of this one series, and not of other server starts. Raises LabError for fewer than
    three values.
    """
    row = series(values, at_least=3)
    found = moments(row[None, :])
    mean, error, effective = float(found.mean[0]), float(found.error[0]), float(found.effective[0])
    return by_t(mean, error, effective - 1.0, level, f"t, effective n {effective:.1f} of {len(row)}")


def naive_interval(values: Values, level: float = 0.95) -> Interval:
    """The mean by Student's t as of independent values: what most tools print, kept to be shown beside."""
    return mean_by_t(series(values, at_least=2), level, "t, as if independent")
