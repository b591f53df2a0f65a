"""Whether a server has settled: the steady part of each start, its class, and the one number that may be
headlined.

The classes are those of Barrett et al. (2017, OOPSLA, "Virtual machine warmup blows hot and cold"), of
segments that `changes` confirmed, with one more: a run that goes up and down and never stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np

from kvik_lab.errors import LabError
from kvik_lab.infer.arrays import Floats, Interval, TooFew, Values, series
from kvik_lab.infer.changes import Segmentation, find_changes
from kvik_lab.infer.serial import mean_interval
from kvik_lab.infer.starts import OverStarts, mean_over_starts

TOLERANCE = 0.01
"""Levels that differ by no more than this share of the last one count as one."""

SHARE = 1.0 / 3.0
"""Share of a run that its last level lasts at least, to be called steady."""


class Kind(Enum):
    """How a series behaves over its iterations."""

    FLAT = "flat"
    WARM_UP = "warm-up"
    SLOWDOWN = "slowdown"
    OSCILLATING = "oscillating"
    NO_STEADY_STATE = "no steady state"
    INCONSISTENT = "inconsistent"


@dataclass(frozen=True)
class Verdict:
    """The class of one series, and where its steady part starts; None where it has none."""

    kind: Kind
    steady_from: int | None


def classify(found: Segmentation, smaller_is_better: bool = True, tolerance: float = TOLERANCE) -> Verdict:
    """The class of one segmented series.

    The steady part is its last level, with levels right before it that differ by `tolerance` at most, if it
    is at least SHARE of the run. It is a warm-up where no earlier level was better than that one by more than
    the tolerance, otherwise a slowdown.
    """
    if not 0 <= tolerance < 1:
        raise LabError(f"the tolerance is {tolerance}; it is a share, such as 0.01")
    levels = np.array([s.median for s in found.segments])
    near = np.abs(levels - levels[-1]) <= tolerance * abs(levels[-1])
    if near.all():
        return Verdict(Kind.FLAT, 0)
    first = int(np.flatnonzero(~near)[-1]) + 1
    start = found.segments[first].start
    if found.n - start < SHARE * found.n:
        turns = np.sign(np.diff(levels))
        reversals = int((turns[1:] * turns[:-1] < 0).sum())
        return Verdict(Kind.OSCILLATING if reversals >= 2 else Kind.NO_STEADY_STATE, None)
    apart = levels[~near] - levels[-1]
    better = apart < 0 if smaller_is_better else apart > 0
    return Verdict(Kind.SLOWDOWN if better.any() else Kind.WARM_UP, start)


@dataclass(frozen=True)
class Start:
    """One start: its values, where they change, and what that makes it."""

    name: str
    values: Floats
    segmentation: Segmentation
    verdict: Verdict

    @property
    def steady(self) -> Floats | None:
        """The values of its steady part; None where it has none."""
        return None if self.verdict.steady_from is None else self.values[self.verdict.steady_from :]


@dataclass(frozen=True)
class Steady:
    """All starts of one configuration.

    `headline` is the mean of the steady parts: over starts, or of the one start, whose interval then says
    nothing of others. It is None where any start is unsteady: a mean over a run that contains a change
    describes neither level. `why` says what stands in its place.
    """

    starts: tuple[Start, ...]
    kind: Kind
    headline: Interval | None
    over_starts: OverStarts | None
    why: str


def examine(
    starts: Mapping[str, Values], smaller_is_better: bool = True, alpha: float = 0.05, level: float = 0.95
) -> Steady:
    """Find changes in each start, class them, and give the headline that they allow.

    Raises LabError for no start, or one too short to be looked at.
    """
    if not starts:
        raise LabError("there is no start to look at; give at least one series")
    done = []
    for name, values in starts.items():
        row = series(values, f"start {name}", at_least=8)
        found = find_changes(row, alpha, level)
        done.append(Start(name, row, found, classify(found, smaller_is_better)))
    kinds = Counter(s.verdict.kind for s in done)
    kind = done[0].verdict.kind if len(kinds) == 1 else Kind.INCONSISTENT
    loose = [s.name for s in done if s.verdict.steady_from is None]
    if loose:
        why = f"unsteady: no steady state in {', '.join(loose)}; no mean is given"
        return Steady(tuple(done), kind, None, None, why)
    parts = [s.steady for s in done if s.steady is not None]
    if len(parts) == 1:
        why = "the mean of this one start's steady part; how starts differ is not in its interval"
        return Steady(tuple(done), kind, mean_interval(parts[0], level), None, why)
    over = mean_over_starts(parts, level)
    if isinstance(over, TooFew):
        raise LabError(str(over))
    return Steady(
        tuple(done), kind, over.interval, over, f"the mean of the steady parts of {len(parts)} starts"
    )
