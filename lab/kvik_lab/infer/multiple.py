"""Many tests at once: p-values that hold for all of a table together."""

from __future__ import annotations

import numpy as np

from kvik_lab.errors import LabError
from kvik_lab.infer.arrays import Floats, Values, series


def holm(p_values: Values) -> Floats:
    """Adjusted p-values: rejecting those up to alpha errs anywhere with probability alpha at most, however
    the tests depend on each other (Holm 1979, Scand. J. Statist. 6)."""
    p, order = _sorted(p_values)
    adjusted = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    return _back(np.minimum(adjusted, 1.0), order)


def benjamini_hochberg(p_values: Values) -> Floats:
    """Adjusted p-values: of those rejected up to q, a share q at most is expected to be wrong, for tests that
    are independent or positively dependent (Benjamini and Hochberg 1995, J. R. Statist. Soc. B 57)."""
    p, order = _sorted(p_values)
    n = len(p)
    raised = p[order] * n / np.arange(1, n + 1)
    adjusted = np.minimum.accumulate(raised[::-1])[::-1]
    return _back(np.minimum(adjusted, 1.0), order)


def _sorted(p_values: Values) -> tuple[Floats, np.ndarray[tuple[int], np.dtype[np.intp]]]:
    p = series(p_values, "the p-values")
    wrong = np.flatnonzero((p < 0) | (p > 1))
    if len(wrong):
        raise LabError(f"the p-value at position {wrong[0]} is {p[wrong[0]]}; p-values lie between 0 and 1")
    return p, np.argsort(p, kind="stable")


def _back(values: Floats, order: np.ndarray[tuple[int], np.dtype[np.intp]]) -> Floats:
    result = np.empty_like(values)
    result[order] = values
    return result
