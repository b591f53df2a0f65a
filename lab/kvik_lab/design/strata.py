"""The analysis of a model's contrasts where runs share starts: least squares in two strata.

What differs between the runs of a start is estimated from their differences to the start's mean, and judged
against their variation; what a start has throughout is estimated from the means of starts, less what their
runs explain, and judged against the variation of these means (Yates 1935, J. R. Statist. Soc. Suppl. 2; for
split plots with unequal starts it is not efficient, but its errors are right). A contrast of both kinds has
the sum of both variances, with Satterthwaite's degrees of freedom. A plan's power is this analysis of
simulated experiments, a row each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import special

from kvik_lab.design.model import FloatArray, IntArray
from kvik_lab.infer.judge import Judged

TOLERANCE = 1e-7


@dataclass(frozen=True)
class Fitted:
    """Experiments (rows): the means of starts, the deviations of runs from them, and the variance of each."""

    strata: Strata
    means: FloatArray
    inner: FloatArray
    between: FloatArray
    within: FloatArray

    def contrast(self, row: FloatArray, alpha: float = 0.05, comparisons: int = 1) -> Judged:
        """The contrast with its simultaneous interval; nan where its stratum has no degree of freedom."""
        outer, inner = self.strata.weights(row)
        estimate = self.means @ outer + self.inner @ inner
        parts = [float(outer @ outer) * self.between, float(inner @ inner) * self.within]
        degrees = [self.strata.df_between, self.strata.df_within]
        used = [k for k in (0, 1) if np.any(np.abs((outer, inner)[k]) > TOLERANCE)]
        with np.errstate(divide="ignore", invalid="ignore"):
            total = np.sum([parts[k] for k in used], axis=0)
            df = total**2 / np.sum([parts[k] ** 2 / max(degrees[k], 0) for k in used], axis=0)
            error = np.sqrt(total)
            reach = special.stdtrit(df, 1.0 - alpha / (2.0 * comparisons)) * error
        lost = any(degrees[k] < 1 for k in used)
        df = np.where(lost | ~np.isfinite(df), 0.0 if lost else float(min(degrees[k] for k in used)), df)
        reach = np.where(df > 0, reach, np.nan)
        kept = np.ones((len(estimate), self.strata.starts), dtype=bool)
        return Judged(
            estimate, error, df, estimate - reach, estimate + reach, kept, "least squares in two strata"
        )


class Strata:
    """A model's matrix, a row a run, and the start of each run. Runs that share none are starts of their
    own."""

    def __init__(self, matrix: FloatArray, groups: IntArray) -> None:
        """`groups` numbers the starts from 0."""
        self.groups = np.asarray(groups, np.intp)
        self.count = np.bincount(self.groups)
        self.starts = len(self.count)
        means = self._means(matrix.T).T
        inner = matrix - means[self.groups]
        self.constant = np.all(np.abs(inner) < TOLERANCE, axis=0)
        self._outer, self._inner = means[:, self.constant], inner[:, ~self.constant]
        self._of_inner = means[:, ~self.constant]
        self._solve_outer, self._solve_inner = np.linalg.pinv(self._outer), np.linalg.pinv(self._inner)
        rank_inner = int(np.linalg.matrix_rank(self._inner)) if self._inner.size else 0
        self.df_between = self.starts - int(np.linalg.matrix_rank(self._outer))
        self.df_within = len(matrix) - self.starts - rank_inner

    def fit(self, response: FloatArray) -> Fitted:
        """Fit experiments of shape (experiments, runs)."""
        means = self._means(response)
        inner = response - means[:, self.groups]
        slopes = inner @ self._solve_inner.T
        freed = means - slopes @ self._of_inner.T
        rest = freed - freed @ self._solve_outer.T @ self._outer.T
        left = inner - slopes @ self._inner.T
        between = np.sum(rest**2, axis=1) / max(1, self.df_between)
        return Fitted(self, means, inner, between, np.sum(left**2, axis=1) / max(1, self.df_within))

    def weights(self, row: FloatArray) -> tuple[FloatArray, FloatArray]:
        """What the means of starts, and the deviations of runs from them, count in a contrast."""
        outer = row[self.constant] @ self._solve_outer
        return outer, (row[~self.constant] - outer @ self._of_inner) @ self._solve_inner

    def estimable(self, row: FloatArray) -> bool:
        """Whether the runs can tell the contrast."""
        outer = row[self.constant]
        inner = row[~self.constant] - outer @ self._solve_outer @ self._of_inner
        lost = np.abs(outer - outer @ self._solve_outer @ self._outer).sum()
        lost += np.abs(inner - inner @ self._solve_inner @ self._inner).sum()
        return bool(lost <= 100 * TOLERANCE * max(1.0, float(np.abs(row).sum())))

    def stratum(self, row: FloatArray) -> str:
        """Against what a contrast is judged."""
        touched = np.abs(row) > TOLERANCE
        if not touched[self.constant].any():
            return "runs"
        return "starts and runs" if touched[~self.constant].any() else "starts"

    def standard_error(self, row: FloatArray, ratio: float) -> float | None:
        """In deviations of a run, where starts vary by `ratio` times a run's variance; None if not
        estimable."""
        if not self.estimable(row):
            return None
        outer, inner = self.weights(row)
        return float(np.sqrt(np.sum(outer**2 * (ratio + 1 / self.count)) + inner @ inner))

    def _means(self, response: FloatArray) -> FloatArray:
        return np.stack([response[:, self.groups == k].mean(axis=1) for k in range(self.starts)], axis=1)
