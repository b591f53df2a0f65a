"""States that a server takes: how high each is, and how much of the time it lasts.

A level that changes within a run, and comes back or differs from start to start, is a mixture. Its mean is that of
the mixture, and holds only for its weights; the states and the weights say more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from kvik_lab.infer.arrays import Floats, Interval
from kvik_lab.infer.changes import SHORTEST
from kvik_lab.infer.steady import Start, Steady

GAP = 0.05
"""Share by which two neighbouring levels differ at least, to be two states."""
SPREAD = 4.0
"""And how many standard deviations of a level within a state."""


@dataclass(frozen=True)
class State:
    """A state: its level, and the share of iterations in it, each with an interval over starts.

    The bounds are nan where only one start was in it (level), or where there is one start (share).
    """

    level: Interval
    share: Interval
    starts: int


def states(found: Steady, alpha: float = 0.05) -> tuple[State, ...]:
    """The states of a configuration, the most frequent first; empty where it keeps one level.

    They are the groups of the levels of all confirmed segments, divided where neighbours differ by GAP and more
    than chance, if any start changes from one to another of them.
    """
    segments = [_segments(start, found) for start in found.starts]
    levels = np.array([math.log(v) for rows in segments for v, _ in rows])
    if len(levels) == len(segments):
        return ()
    names = _divide(levels, _noise(found.starts))
    groups = iter(names)
    of_start = [[(next(groups), value, n) for value, n in rows] for rows in segments]
    if all(len({g for g, *_ in rows}) == 1 for rows in of_start):
        return ()
    out = [_state(g, of_start, alpha) for g in range(names.max() + 1)]
    return tuple(sorted(out, key=lambda s: -s.share.estimate))


def _segments(start: Start, found: Steady) -> list[tuple[float, int]]:
    """Mean and length of each segment after the common warm-up."""
    cut = 0 if found.settling is None else found.settling.steady_from or 0
    out = []
    for segment in start.segmentation.segments:
        first, last = max(cut, segment.start), segment.start + segment.length
        if last > first:
            out.append((float(start.values[first:last].mean()), last - first))
    return out or [(float(start.values.mean()), len(start.values))]


def _noise(starts: Sequence[Start]) -> float:
    """How much levels of one state differ by chance, of logs: by the noise of a shortest segment."""
    scale = [s.segmentation.scale / float(np.median(s.values)) for s in starts]
    return float(np.median(scale)) / math.sqrt(SHORTEST / 2)


def _divide(levels: Floats, noise: float) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    order = np.argsort(levels)
    jumps = np.diff(levels[order]) > max(math.log1p(GAP), SPREAD * noise)
    names = np.empty(len(levels), dtype=np.intp)
    names[order] = np.concatenate([[0], np.cumsum(jumps)])
    return names


def _state(group: int, of_start: list[list[tuple[int, float, int]]], alpha: float) -> State:
    levels, shares = [], []
    for rows in of_start:
        inside = [(value, n) for g, value, n in rows if g == group]
        shares.append(sum(n for _, n in inside) / sum(n for *_, n in rows))
        if inside:
            levels.append(float(np.average([v for v, _ in inside], weights=[n for _, n in inside])))
    share = _over(np.array(shares), alpha)
    bounded = Interval(share.estimate, max(0.0, share.low), min(1.0, share.high), share.level, share.method)
    return State(_over(np.array(levels), alpha), bounded, len(levels))


def _over(values: Floats, alpha: float) -> Interval:
    mean, n = float(values.mean()), len(values)
    reach = math.nan
    if n > 1:
        reach = float(special.stdtrit(n - 1, 1.0 - alpha / 2.0) * values.std(ddof=1)) / math.sqrt(n)
    return Interval(mean, mean - reach, mean + reach, 1.0 - alpha, f"t over {n} starts")
