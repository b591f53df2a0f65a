"""Whether a server has settled: what all starts do together, the class of each, and the mean that follows.

The classes are those of Barrett et al. (2017, OOPSLA, "Virtual machine warmup blows hot and cold"), of
segments that `changes` confirmed, with one more: a run that goes up and down and never stays. Where there are
three starts at least, the warm-up that is left out is the one that all of them have together (`pooled`), and
the class of a single start says only how that one looks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import numpy as np

from kvik_lab.errors import LabError
from kvik_lab.infer.arrays import SHORTEST, Bools, Floats, Interval, Values, mean_by_t, series
from kvik_lab.infer.changes import Segment, Segmentation, find_changes
from kvik_lab.infer.judge import odd_levels
from kvik_lab.infer.pooled import SHARE, TOLERANCE, Settling, settle
from kvik_lab.infer.serial import mean_interval


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
    """One start: its values, and where it changes, which is looked for when it is asked for."""

    name: str
    values: Floats
    smaller_is_better: bool = True
    alpha: float = 0.05

    @cached_property
    def segmentation(self) -> Segmentation:
        """Its confirmed changes and the segments between them."""
        if len(self.values) == 1:  # as of a metric of whole runs
            alone = Segment(0, 1, float(self.values[0]), None, None)
            return Segmentation(1, (), (alone,), 0.0, 0.0, 0.0, self.alpha)
        return find_changes(self.values, self.alpha, 1.0 - self.alpha)

    @cached_property
    def verdict(self) -> Verdict:
        """Its class, by itself."""
        return classify(self.segmentation, self.smaller_is_better)


@dataclass(frozen=True)
class Steady:
    """All starts of one configuration.

    `settling` is what they do together, None where they are too few for that. `steady` are the values that
    count, of each start; empty where there is no steady part. `odd` marks the starts that `judge.RULE` leaves
    out of `headline`, the mean over starts; `all_kept` is the mean with them. The headline of a single start
    says nothing of others, and there is none where the level changes too late; `why` says what stands in its
    place.
    """

    starts: tuple[Start, ...]
    settling: Settling | None
    steady: tuple[Floats, ...]
    odd: tuple[bool, ...]
    headline: Interval | None
    all_kept: Interval | None
    why: str

    @cached_property
    def kind(self) -> Kind:
        """The class of the whole: of what the starts do together, or of the starts where they are too few."""
        found = self.settling
        if found is None:
            kinds = Counter(s.verdict.kind for s in self.starts)
            return next(iter(kinds)) if len(kinds) == 1 else Kind.INCONSISTENT
        if found.steady_from is None:
            return Kind.NO_STEADY_STATE
        if not found.steady_from:
            return Kind.FLAT
        slower = found.before > 0
        return Kind.WARM_UP if slower == self.starts[0].smaller_is_better else Kind.SLOWDOWN

    @property
    def unlike(self) -> tuple[str, ...]:
        """Starts whose level changes by itself after the common warm-up."""
        if self.settling is None or self.settling.steady_from is None:
            return ()
        cut = self.settling.steady_from
        return tuple(
            s.name for s in self.starts if any(c.latest > cut for c in s.segmentation.changes)
        )  # fmt: skip

    @property
    def left_out(self) -> int:
        """Iterations left out of the start that loses most."""
        parts = zip(self.starts, self.steady, strict=False)  # no part where nothing is steady
        return max((len(start.values) - len(part) for start, part in parts), default=0)


def common_cut(groups: Iterable[Iterable[Values]]) -> int:
    """The warm-up that is left out of all arms alike: the longest that any arm's starts have together."""
    found = [settle([np.asarray(s, dtype=np.float64) for s in group]) for group in groups]
    return max((f.steady_from or 0 for f in found if f is not None), default=0)


def examine(
    starts: Mapping[str, Values],
    smaller_is_better: bool = True,
    alpha: float = 0.05,
    cut: int | None = None,
    together: Settling | None = None,
) -> Steady:
    """Judge the starts of one configuration together, and give the headline that they allow.

    `together`: what more starts than these do, such as all of an arm under all conditions; by default these
    alone are judged. `cut`: iterations that are left out of each start whatever it does (the longest warm-up
    of all arms that stand beside each other). Where each start has one value, as of a metric of whole runs,
    that is its level, and nothing is judged within it. Raises LabError for no start, or one too short to
    be looked at, and for values that are not above zero.
    """
    if not starts:
        raise LabError("there is no start to look at; give at least one series")
    single = len(starts) > 1 and all(len(values) == 1 for values in starts.values())
    least = 1 if single else SHORTEST
    rows = {name: series(values, f"start {name}", at_least=least) for name, values in starts.items()}
    for name, row in rows.items():
        if (row <= 0).any():
            raise LabError(f"start {name!r} holds {row.min()}: times, rates and their ratios lie above 0")
    done = tuple(Start(name, row, smaller_is_better, alpha) for name, row in rows.items())
    if single:
        return _over(done, None, tuple(rows.values()), alpha, "single values")
    settling = together or settle(list(rows.values()))
    if settling is None:
        return _apart(done, alpha, cut)
    if settling.steady_from is None:
        return Steady(done, settling, (), (False,) * len(done), None, None, f"{settling}; no mean is given")
    first = settling.steady_from if cut is None else max(cut, settling.steady_from)
    parts = tuple(s.values[min(first, len(s.values) - 1) :] for s in done)
    return _over(done, settling, parts, alpha)


def _apart(done: tuple[Start, ...], alpha: float, cut: int | None) -> Steady:
    """One start or two: each has its own steady part, or none."""
    loose = [s.name for s in done if s.verdict.steady_from is None]
    if loose:
        why = f"unsteady: no steady state in {', '.join(loose)}, and too few starts to tell what they share"
        return Steady(done, None, (), (False,) * len(done), None, None, f"{why}; no mean is given")
    parts = tuple(s.values[max(cut or 0, s.verdict.steady_from or 0) :] for s in done)
    if len(parts) > 1:
        return _over(done, None, parts, alpha)
    why = "the mean of this one start's steady part; how starts differ is not in its interval"
    return Steady(done, None, parts, (False,), mean_interval(parts[0], 1.0 - alpha), None, why)


def _over(
    done: tuple[Start, ...], settling: Settling | None, parts: tuple[Floats, ...], alpha: float,
    what: str = "steady parts",
) -> Steady:  # fmt: skip
    means = np.array([part.mean() for part in parts])
    odd = odd_levels(np.log(means)[None, :])[0]
    headline = mean_over_starts(means, ~odd, alpha)
    everything = mean_over_starts(means, np.ones(len(means), dtype=bool), alpha) if odd.any() else None
    left = [s.name for s, o in zip(done, odd, strict=True) if o]
    why = f"the mean of the {what} of {len(means) - len(left)} starts"
    if left:
        why += f"; left out as odd: {', '.join(left)}"
    return Steady(done, settling, parts, tuple(bool(o) for o in odd), headline, everything, why)


def mean_over_starts(means: Values, kept: Bools | None = None, alpha: float = 0.05) -> Interval:
    """The mean that further starts would have: Student's t over the means of the starts that are kept.

    Raises LabError for fewer than two of them.
    """
    row = series(means, "the means of starts", at_least=2)
    row = row if kept is None else row[kept]
    return mean_by_t(row, 1.0 - alpha, f"t over {len(row)} starts")
