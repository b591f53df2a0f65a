"""Where a sweep bends: the level beyond which each further unit costs more, and what to measure next."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import optimize, special

from kvik_lab.errors import LabError
from kvik_lab.physics.data import Floats

GRID = 241
NEXT = 6
SURE = 0.05  # p-value of the F test below which a bend is taken for one


@dataclass(frozen=True)
class Knee:
    """A bend of time over x: t = a + s1 * x + s2 * max(0, x - knee), a, s1 and s2 not negative.

    lo, hi: its interval, never narrower than from the measured level below it to the one above. found: the
    bend improves the fit more than chance does; False also where there are too few levels to say (p is None).
    slopes: seconds a unit before and after. next_levels: what to measure to place it, spread evenly on a log
    scale within the interval.
    """

    x: float
    lo: float
    hi: float
    slopes: tuple[float, float]
    p: float | None
    found: bool
    next_levels: tuple[int, ...]
    note: str


def find_knee(x: Floats, seconds: Floats, *, level: float = 0.95, next_count: int = NEXT) -> Knee:
    """Search the bend with the least relative residuals; the interval is its profile likelihood.

    Raises `LabError` with fewer than three levels, where a bend cannot be told from a line.
    """
    levels = np.unique(x)
    if x.shape != seconds.shape or levels.size < 3:
        raise LabError(f"a knee needs three levels at least, and there are {levels.size}")
    candidates = np.unique(np.concatenate([np.geomspace(levels[0], levels[-1], GRID), levels]))
    candidates = candidates[(candidates >= levels[0]) & (candidates < levels[-1])]
    losses, shapes = zip(*(_bent(x, seconds, knee) for knee in candidates), strict=True)
    loss = np.array(losses)
    at = int(np.argmin(loss))
    straight = _straight(x, seconds)
    freedom = x.size - 4
    floor = max(float(loss[at]), x.size * 1e-12)
    inside = loss <= floor * (
        1 + (float(special.fdtri(1, freedom, level)) / freedom if freedom > 0 else 1e-6)
    )
    held = candidates[inside]
    # A bend seen from outside of a gap cannot be placed within it, whatever the lines' intersection says.
    lo = min(float(held[0]), float(levels[max(int(np.searchsorted(levels, candidates[at])) - 1, 0)]))
    hi = max(float(held[-1]), float(levels[levels > candidates[at]][0]))
    if inside[-1]:
        hi = float(levels[-1])
    p = None
    if freedom > 0:
        gain = max(straight - floor, 0.0) / 2 / (floor / freedom)
        p = float(special.fdtrc(2, freedom, gain))
    first, more = shapes[at]
    found = p is not None and p < SURE and more > 0
    return Knee(
        float(candidates[at]),
        lo,
        hi,
        (first, first + more),
        p,
        found,
        _between(lo, hi, levels, next_count),
        _note(p, found, straight, floor),
    )


def _bent(x: Floats, seconds: Floats, knee: float) -> tuple[float, tuple[float, float]]:
    design = np.column_stack([np.ones_like(x), x, np.maximum(0, x - knee)]) / seconds[:, None]
    scale = np.maximum(design.max(axis=0), 1e-300)
    values, norm = optimize.nnls(design / scale, np.ones_like(x))
    _base, first, more = (float(value) for value in values / scale)
    return float(norm) ** 2, (first, more)


def _straight(x: Floats, seconds: Floats) -> float:
    design = np.column_stack([np.ones_like(x), x]) / seconds[:, None]
    scale = design.max(axis=0)
    return float(optimize.nnls(design / scale, np.ones_like(x))[1]) ** 2


def _between(lo: float, hi: float, levels: Floats, count: int) -> tuple[int, ...]:
    """Whole numbers inside the interval, evenly on a log scale, that are not measured yet."""
    spread = np.geomspace(max(lo, 1.0), hi, count + 2)[1:-1]
    return tuple(
        value for value in sorted({round(v) for v in spread}) if value not in levels and lo < value < hi
    )


def _note(p: float | None, found: bool, straight: float, floor: float) -> str:
    if p is None:
        if straight > 4 * floor + 1e-4:
            return (
                "the times are no line; with so few levels the bend passes through all and cannot be tested"
            )
        return "too few levels to tell a bend from a line"
    return "" if found else f"no bend is shown (p = {p:.2g})"
