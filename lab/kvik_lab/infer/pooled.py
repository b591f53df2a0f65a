"""Warm-up and drift, judged over all starts together.

A change that every start makes at the same iteration is no accident of one of them, and is seen where no
single start could show it: two slow iterations at the begin of each, or a drift of a few per cent. The unit
is again the start: of each the mean before a place is held against that after it, and what counts is whether
the starts agree. So iterations may depend on each other in any way.

A start that changes where the others do not is an odd one, and no property of the system: it stays, and
`judge`'s rule for odd starts decides whether its level counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from kvik_lab.infer.arrays import Bools, Floats

Ints = NDArray[np.intp]

FEWEST_STARTS = 3
FEWEST_ITERATIONS = 8
SHARE = 1.0 / 3.0
"""Share of a run that its last level lasts at least, to be called steady."""
TOLERANCE = 0.01
"""Levels that differ by less than this share are one."""
ALPHA = 0.01
"""Error of each of the two tests, for a change and for a drift."""
ROUNDS = 4


@dataclass(frozen=True)
class Settling:
    """What all starts together do over their iterations.

    `steady_from`: the iteration from which they keep a level; None where they change too late for any to be
    called steady, at `at`. `before` is how much higher their level was before, as a share (0: no change).
    `drift` is the change over the steady part, as a share; None where there is none that the starts agree on.
    """

    starts: int
    steady_from: int | None
    at: int
    before: float
    drift: float | None

    def __str__(self) -> str:
        if self.steady_from is None:
            return f"not settled: over all {self.starts} starts the level changes at iteration {self.at}"
        parts = []
        if self.steady_from:
            what = "above" if self.before > 0 else "below"
            size = 100 * abs(self.before)
            parts.append(f"warm-up of {self.steady_from} iterations, {size:.2g} % {what} what follows")
        if self.drift is not None:
            parts.append(f"drift of {100 * self.drift:+.2g} % over the rest of a run")
        return "; ".join(parts) or "steady from the first iteration"


def settle(series: Sequence[Floats]) -> Settling | None:
    """Judge series of positive values, one a start, over the iterations that all of them have.

    None where there are fewer than three starts, or fewer than eight iterations: then nothing can be pooled.
    """
    n = min((len(row) for row in series), default=0)
    if len(series) < FEWEST_STARTS or n < FEWEST_ITERATIONS:
        return None
    logs = np.log(np.stack([np.asarray(row[:n], dtype=np.float64) for row in series]))
    found = settle_rows(logs[None, :, :])
    at, before, settled = int(found.at[0]), math.expm1(float(found.before[0])), bool(found.settled[0])
    if not settled:
        return Settling(len(series), None, at, before, None)
    return Settling(len(series), at, at, before, _drift(logs[:, at:]))


@dataclass(frozen=True)
class Rows:
    """Of each experiment: where the last level begins, how much higher the one before the first change was
    (of logs), and whether that level lasts long enough."""

    at: Ints
    before: Floats
    settled: Bools


def settle_rows(logs: Floats) -> Rows:
    """Judge many experiments at once: logarithms of shape (experiments, starts, iterations).

    Several changes are taken off one after the other; a straight line that fits better than a step is a
    drift, and no warm-up.
    """
    rows, _, n = logs.shape
    at, before = np.zeros(rows, dtype=np.intp), np.zeros(rows)
    active = np.arange(rows)
    for _ in range(ROUNDS):
        going = []
        for cut in np.unique(at[active]):
            here = active[at[active] == cut]
            place, size = _step(logs[here][:, :, cut:])
            last = n - cut - place
            # A late change that hardly moves the mean of a run makes it no less steady.
            some = (place > 0) & ((last >= SHARE * n) | (last * np.abs(size) >= TOLERANCE * n))
            found = here[some]
            at[found] = cut + place[some]
            first = before[found] == 0
            before[found[first]] = size[some][first]
            going.append(found)
        active = np.concatenate(going) if going else active[:0]
        active = active[n - at[active] >= SHARE * n]
        if not len(active):
            break
    return Rows(at, before, n - at >= SHARE * n)


def _step(logs: Floats) -> tuple[Ints, Floats]:
    """Of each experiment the place that divides the mean series best, and how much higher the part before it
    is (of logs); place 0 where starts do not agree on it, where it does not matter, or where a line fits
    better."""
    n = logs.shape[2]
    places = np.arange(1, n)
    sums = np.cumsum(logs, axis=2)
    gap = sums[:, :, :-1] / places - (sums[:, :, -1:] - sums[:, :, :-1]) / (n - places)
    mean = gap.mean(axis=1)
    saved = places * (n - places) / n * mean**2
    best = np.argmax(saved, axis=1)
    every = np.arange(len(logs))
    size = mean[every, best]
    centred = np.arange(n) - (n - 1) / 2
    by_line = (logs.mean(axis=1) @ centred) ** 2 / float(centred @ centred)
    agreed = _p(gap[every, :, best]) * len(places) <= ALPHA
    good = agreed & (np.abs(size) >= TOLERANCE) & (by_line < saved[every, best])
    return np.where(good, places[best], 0), np.where(good, size, 0.0)


def _drift(logs: Floats) -> float | None:
    """The change from the first to the last iteration along a line, where the starts agree on one."""
    n = logs.shape[1]
    centred = np.arange(n) - (n - 1) / 2
    slopes = logs @ centred / float(centred @ centred)
    total = float(slopes.mean()) * (n - 1)
    return None if abs(total) < TOLERANCE or _p(slopes[None, :])[0] > ALPHA else math.expm1(total)


def _p(values: Floats) -> Floats:
    """Two-sided p of a mean of zero in each row, by Student's t over its values."""
    count = values.shape[1]
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.abs(values.mean(axis=1)) / (values.std(axis=1, ddof=1) / math.sqrt(count))
    return np.asarray(2.0 * special.stdtr(count - 1, -np.nan_to_num(t, nan=0.0, posinf=np.inf)))
