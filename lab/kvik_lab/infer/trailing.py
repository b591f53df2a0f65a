"""Whether the last values of a series that goes on keep a level: what ends a warm-up.

The segmentations are those of `changes`, without its confirmation. There a change that is none is an error of
a report, and one that wanders like AR(0.95) is therefore let pass; here it costs a few more requests, and one
that is overlooked is measured. A slope too small for a step is looked for with the same readiness.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import stats

from kvik_lab.infer.arrays import SHORTEST, Floats
from kvik_lab.infer.pooled import TOLERANCE
from kvik_lab.infer.screen import Screen, segment, segment_medians

SLOPE_ALPHA = 0.05
"""Error of the test for a slope, of values that do not depend on each other."""


def level_from(values: Sequence[float | None], least: int) -> int | None:
    """The place from which the values keep a level, once that has lasted for `least` of them; else None.

    A level ends where a segmentation of the values, or of their ranks, sees a change of more than TOLERANCE.
    The last `least` values have no slope, by their ranks, that adds up to more than TOLERANCE. None among
    `values` is one that is not there.
    """
    there = [(at, value) for at, value in enumerate(values) if value is not None]
    row = np.array([value for _, value in there], dtype=np.float64)
    if len(row) < max(least, SHORTEST):
        return None
    first = max(_last_change(row, screen) for screen in Screen)
    if len(row) - first < least or _slopes(row[len(row) - least :]):
        return None
    return there[first][0]


def _last_change(row: Floats, screen: Screen) -> int:
    """Where the last level begins; 0 where there is one."""
    medians = segment_medians(row[None, :], segment(row[None, :], screen))[0]
    apart = np.flatnonzero(np.abs(medians - medians[-1]) > TOLERANCE * abs(medians[-1]))
    return int(apart[-1]) + 1 if len(apart) else 0


def _slopes(row: Floats) -> bool:
    """Whether the values rise or fall (Spearman's test), and by more than TOLERANCE from end to end."""
    n = len(row)
    centred = np.arange(n) - (n - 1) / 2
    rise = float(centred @ row) / float(centred @ centred) * (n - 1)
    if abs(rise) <= TOLERANCE * abs(float(np.median(row))):
        return False
    return bool(stats.spearmanr(centred, row).pvalue < SLOPE_ALPHA)
