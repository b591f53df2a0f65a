"""States that a server takes: how high each is, and how much of the time it lasts.

A level that changes within a run, and comes back or differs from start to start, is a mixture. Its mean is
that of the mixture, and holds only for its weights; the states and the weights say more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kvik_lab.infer.arrays import Floats, Interval, mean_by_t
from kvik_lab.infer.pooled import Ints
from kvik_lab.infer.steady import Steady

GAP = math.log1p(0.05)
"""How much two states differ at least, of logs."""
APART = 4.0
"""And how many standard deviations of the values within them. The halves of normal values are 2.6 apart,
those of uniform ones 3.5."""
RAREST = 0.05
"""Share of all iterations that a state has at least."""
MOST = 4


@dataclass(frozen=True)
class State:
    """A state: its level, and the share of iterations in it, each with an interval over starts.

    The bounds are nan where only one start was in it (level), or where there is one start (share).
    """

    level: Interval
    share: Interval
    starts: int


def states(found: Steady, alpha: float = 0.05) -> tuple[State, ...]:
    """The states of a configuration after its warm-up, the most frequent first; empty where it keeps one
    level.

    There are none unless a change of level is confirmed in some start. Then the values of all starts are
    divided where that leaves least variation within (Otsu 1979, IEEE Trans. SMC 9), as long as the parts are
    apart.
    """
    parts = found.steady or tuple(start.values for start in found.starts)
    cut = len(found.starts[0].values) - len(parts[0])
    if not any(c.latest > cut for start in found.starts for c in start.segmentation.changes):
        return ()
    logs = [np.log(part) for part in parts]
    bounds = _bounds(np.sort(np.concatenate(logs)))
    if not bounds:
        return ()
    of = [np.searchsorted(bounds, row) for row in logs]
    out = [_state(k, parts, of, alpha) for k in range(len(bounds) + 1)]
    return tuple(sorted(out, key=lambda state: -state.share.estimate))


def _bounds(ordered: Floats) -> list[float]:
    """Where sorted values are divided into states, from the best division on."""
    pieces = [ordered]
    while len(pieces) < MOST:
        cuts = [_divide(piece, len(ordered)) for piece in pieces]
        at = next((k for k, cut in enumerate(cuts) if cut), None)
        if at is None:
            break
        pieces[at : at + 1] = [pieces[at][: cuts[at]], pieces[at][cuts[at] :]]
    return [0.5 * float(a[-1] + b[0]) for a, b in pairwise(pieces)]


def _divide(ordered: Floats, of: int) -> int:
    """The place that divides sorted values into two states; 0 where they are one."""
    n, least = len(ordered), max(3, math.ceil(RAREST * of))
    if n < 2 * least:
        return 0
    count = np.arange(1, n)
    sums, squares = np.cumsum(ordered), np.cumsum(ordered**2)
    low, high = sums[:-1] / count, (sums[-1] - sums[:-1]) / (n - count)
    within = squares[-1] - count * low**2 - (n - count) * high**2
    within[: least - 1], within[n - least :] = np.inf, np.inf
    at = int(np.argmin(within))
    gap = high[at] - low[at]
    return at + 1 if gap >= max(GAP, APART * math.sqrt(max(0.0, within[at]) / n)) else 0


def _state(k: int, parts: tuple[Floats, ...], of: list[Ints], alpha: float) -> State:
    levels = np.array(
        [part[which == k].mean() for part, which in zip(parts, of, strict=True) if (which == k).any()]
    )
    share = _over(np.array([(which == k).mean() for which in of]), alpha)
    bounded = Interval(share.estimate, max(0.0, share.low), min(1.0, share.high), share.level, share.method)
    return State(_over(levels, alpha), bounded, len(levels))


def _over(values: Floats, alpha: float) -> Interval:
    method = f"t over {len(values)} starts"
    if len(values) == 1:
        return Interval(float(values[0]), math.nan, math.nan, 1.0 - alpha, method)
    return mean_by_t(values, 1.0 - alpha, method)
