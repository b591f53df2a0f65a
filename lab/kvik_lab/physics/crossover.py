"""The size from which one transport is faster than another, and how well it is known.

The 95 % set of crossovers is every size at which the interval for the difference of the two mean times holds
zero (a test inverted). For two lines this is Fieller's set (Fieller, J. R. Stat. Soc. B 16:175, 1954), which
may be an interval, reach to one side without end, be everything, leave a hole, or be empty; the result's
type says which. Cutting such a set to a tidy interval would make it miss the crossover too often (Gleser and
Hwang, Ann. Stat. 15:1351, 1987).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import special

from kvik_lab.errors import LabError
from kvik_lab.physics.curve import Curve, Method, curve
from kvik_lab.physics.data import Floats, Measured, summarise

GRID = 801
REACH = 1e4  # how far beyond the measured sizes the set of two lines is followed
MISFIT = 0.05  # a line whose lack of fit has a smaller p-value is not used unasked


@dataclass(frozen=True)
class Bounded:
    """The crossover lies from `lo` to `hi`."""

    lo: float
    hi: float

    def contains(self, size: float) -> bool:
        """Whether the set has this size."""
        return self.lo <= size <= self.hi


@dataclass(frozen=True)
class AboveOnly:
    """The crossover lies somewhere from `lo` upwards: the data do not bound it."""

    lo: float

    def contains(self, size: float) -> bool:
        """Whether the set has this size."""
        return size >= self.lo


@dataclass(frozen=True)
class BelowOnly:
    """The crossover lies somewhere up to `hi`: the data do not bound it below."""

    hi: float

    def contains(self, size: float) -> bool:
        """Whether the set has this size."""
        return size <= self.hi


@dataclass(frozen=True)
class Everywhere:
    """The data exclude no size."""

    def contains(self, size: float) -> bool:
        """Whether the set has this size: always."""
        return size > 0


@dataclass(frozen=True)
class NoCrossing:
    """`faster` is faster at every size that was looked at, `lo` to `hi`."""

    faster: str
    lo: float
    hi: float

    def contains(self, size: float) -> bool:
        """Whether the set has this size; nothing is said of sizes outside of what was looked at."""
        return not self.lo <= size <= self.hi


@dataclass(frozen=True)
class Several:
    """Separate stretches; None is an end that the data do not bound."""

    stretches: tuple[tuple[float | None, float | None], ...]

    def contains(self, size: float) -> bool:
        """Whether the set has this size."""
        return any((lo is None or lo <= size) and (hi is None or size <= hi) for lo, hi in self.stretches)


@dataclass(frozen=True)
class Bracket:
    """No interval is possible, because nothing is known of the errors: only that means change order here."""

    lo: float
    hi: float


Region: TypeAlias = Bounded | AboveOnly | BelowOnly | Everywhere | NoCrossing | Several


@dataclass(frozen=True)
class Crossover:
    """Where mean times of two transports cross.

    estimates: sizes at which the estimated means are equal, ascending. region: the set at `level`, or the
    brackets where no errors are known. none_in_range: the probability that the transports do not cross in
    `range`, None without errors. faster_throughout: the same split by which one is then faster. method,
    notes: how it was computed, and what limits it.
    """

    names: tuple[str, str]
    unit: str
    method: Method
    level: float
    estimates: tuple[float, ...]
    region: Region | tuple[Bracket, ...]
    range: tuple[float, float]
    none_in_range: float | None
    faster_throughout: tuple[float, float] | None
    notes: tuple[str, ...]


def crossover(
    first: Measured,
    second: Measured,
    *,
    method: Literal["auto"] | Method = "auto",
    level: float = 0.95,
    within: tuple[float, float] | None = None,
    draws: int = 4000,
    seed: int = 1,
) -> Crossover:
    """Compare two transports.

    method: "line" fits a line to each, "interpolate" takes the means as they are and straight pieces between
    them; "auto" takes lines where both have three sizes or more and neither misfits (p under 0.05).
    within: the sizes of interest, for the probability of no crossing; by default those both have measured.
    draws, seed: for that probability.

    Raises `LabError` where the two have different units or no sizes in common.
    """
    if first.unit != second.unit:
        raise LabError(f"{first.name} has sizes in {first.unit}, {second.name} in {second.unit}")
    if not 0.5 <= level < 1:
        raise LabError(f"level is {level!r}; it is a number from 0.5 to below 1, for example 0.95")
    chosen, curves = _choose(first, second, method)
    return crossover_of_curves(*curves, method=chosen, level=level, within=within, draws=draws, seed=seed)


def _choose(first: Measured, second: Measured, method: str) -> tuple[Method, tuple[Curve, Curve]]:
    fewest = min(summarise(first).size.size, summarise(second).size.size)
    if method == "line" or (method == "auto" and fewest >= 3):
        lines = (curve(first, "line"), curve(second, "line"))
        fits = all(line.parts and (line.misfit is None or line.misfit >= MISFIT) for line in lines)
        if method == "line" or fits:
            return "line", lines
    return "interpolate", (curve(first, "interpolate"), curve(second, "interpolate"))


def crossover_of_curves(
    first: Curve,
    second: Curve,
    *,
    method: Method,
    level: float = 0.95,
    within: tuple[float, float] | None = None,
    draws: int = 4000,
    seed: int = 1,
) -> Crossover:
    """As `crossover`, of curves that are made already."""
    lo, hi = max(first.knots[0], second.knots[0]), min(first.knots[-1], second.knots[-1])
    if lo >= hi and method == "interpolate":
        raise LabError(f"{first.name} and {second.name} have no two sizes in common, so nothing can cross")
    span = (min(first.knots[0], second.knots[0]), max(first.knots[-1], second.knots[-1]))
    measured = (float(lo), float(hi)) if lo < hi else (float(span[0]), float(span[1]))
    domain = (measured[0] / REACH, measured[1] * REACH) if method == "line" else measured
    ends = within or measured
    if not 0 < ends[0] < ends[1]:
        raise LabError(f"the range of interest is {ends}; it goes from a size above 0 to a larger one")
    notes = list(dict.fromkeys((*first.notes, *second.notes)))
    if method == "interpolate" and (ends[0] < measured[0] or ends[1] > measured[1]):
        ends = (max(ends[0], measured[0]), min(ends[1], measured[1]))
        if not ends[0] < ends[1]:
            raise LabError(f"the range of interest lies outside of the measured sizes, {measured}")
        notes.append("nothing is said beyond the measured sizes; the range of interest was cut to them")
    for line in (first, second):
        if line.misfit is not None and line.misfit < MISFIT:
            notes.append(f"{line.name}: its means do not lie on a line (p = {line.misfit:.2g})")
    known = bool(first.parts or second.parts)
    if known and not (first.parts and second.parts):
        notes.append("the error of only one of the two is known; the interval leaves out the other's")
    region = _region(first, second, domain, level) if known else _brackets(first, second, measured)
    if method == "line" and known and not _within(region, measured):
        notes.append("the set reaches beyond the measured sizes: there the lines are continued, not measured")
    none, throughout = _no_crossing(first, second, ends, draws, seed) if known else (None, None)
    return Crossover(
        names=(first.name, second.name),
        unit=first.unit,
        method=method,
        level=level,
        estimates=roots(first, second, domain),
        region=region,
        range=(float(ends[0]), float(ends[1])),
        none_in_range=none,
        faster_throughout=throughout,
        notes=tuple(notes),
    )


def difference(first: Curve, second: Curve, size: Floats) -> tuple[Floats, Floats, Floats]:
    """Mean of first minus second, its standard error and degrees of freedom, at each size."""
    mean = first.mean(size) - second.mean(size)
    ours, our_freedom = first.variances(size)
    theirs, their_freedom = second.variances(size)
    parts = np.concatenate([ours, theirs])
    freedom = np.concatenate([our_freedom, their_freedom])
    total = parts.sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.sum(parts**2 / freedom[:, None], axis=0)
        welch = np.where(share > 0, total**2 / share, np.inf)
    return mean, np.sqrt(total), welch


def quantile(level: float, freedom: Floats) -> Floats:
    """Two-sided critical value of Student's t."""
    return np.asarray(special.stdtrit(np.minimum(freedom, 1e9), 0.5 + level / 2))


def roots(first: Curve, second: Curve, domain: tuple[float, float]) -> tuple[float, ...]:
    """Sizes at which the two means are equal; exact, since between knots the difference is a line."""
    inner = np.unique(np.concatenate([first.knots, second.knots]))
    knots = np.unique([domain[0], *inner[(inner > domain[0]) & (inner < domain[1])], domain[1]])
    value = first.mean(knots) - second.mean(knots)
    found = []
    for left in range(knots.size - 1):
        a, b = value[left], value[left + 1]
        if a == 0:
            found.append(float(knots[left]))
        elif a * b < 0:
            found.append(float(knots[left] + (knots[left + 1] - knots[left]) * a / (a - b)))
    if value[-1] == 0:
        found.append(float(knots[-1]))
    return tuple(found)


def _brackets(first: Curve, second: Curve, measured: tuple[float, float]) -> tuple[Bracket, ...]:
    """Neighbouring measured sizes between which the means change order."""
    both = np.unique(np.concatenate([first.knots, second.knots]))
    both = both[(both >= measured[0]) & (both <= measured[1])]
    out = []
    for root in roots(first, second, measured):
        right = int(np.clip(np.searchsorted(both, root, side="left"), 1, both.size - 1))
        out.append(Bracket(float(both[right - 1]), float(both[right])))
    return tuple(out)


def _within(region: Region | tuple[Bracket, ...], measured: tuple[float, float]) -> bool:
    return isinstance(region, Bounded) and measured[0] <= region.lo and region.hi <= measured[1]


def _region(first: Curve, second: Curve, domain: tuple[float, float], level: float) -> Region:
    # The estimates belong to the set, which may be narrower than the grid.
    inner = np.concatenate([first.knots, second.knots, roots(first, second, domain)])
    grid = np.unique(np.concatenate([np.geomspace(*domain, GRID), inner]))
    grid = grid[(grid >= domain[0]) & (grid <= domain[1])]
    held = plausible(first, second, grid, level)
    edges = np.flatnonzero(held[1:] != held[:-1])
    ends = [_refine(first, second, float(grid[at]), float(grid[at + 1]), level) for at in edges]
    starts = ([None] if held[0] else []) + [end for end, at in zip(ends, edges, strict=True) if held[at + 1]]
    stops = [end for end, at in zip(ends, edges, strict=True) if held[at]] + ([None] if held[-1] else [])
    stretches = tuple(zip(starts, stops, strict=True))
    if not stretches:
        slower_first = bool(first.mean(grid[:1])[0] > second.mean(grid[:1])[0])
        return NoCrossing(second.name if slower_first else first.name, *domain)
    if len(stretches) > 1:
        return Several(stretches)
    lo, hi = stretches[0]
    if lo is None:
        return Everywhere() if hi is None else BelowOnly(hi)
    return AboveOnly(lo) if hi is None else Bounded(lo, hi)


def plausible(first: Curve, second: Curve, size: Floats, level: float = 0.95) -> npt.NDArray[np.bool_]:
    """Whether each size is in the set of crossovers: the interval for the difference there holds zero."""
    return np.asarray(_slack(first, second, size, level) >= 0)


def _slack(first: Curve, second: Curve, size: Floats, level: float) -> Floats:
    """Not negative where the interval for the difference holds zero."""
    mean, error, freedom = difference(first, second, size)
    return np.asarray(quantile(level, freedom) * error - np.abs(mean))


def _refine(first: Curve, second: Curve, lo: float, hi: float, level: float) -> float:
    """The size between two of the grid at which the interval begins or ends to hold zero."""
    for _ in range(2):
        grid = np.linspace(lo, hi, 65)
        held = plausible(first, second, grid, level)
        at = int(np.argmax(held != held[0]))
        lo, hi = float(grid[max(at - 1, 0)]), float(grid[at])
    return (lo + hi) / 2


def _no_crossing(
    first: Curve, second: Curve, ends: tuple[float, float], draws: int, seed: int
) -> tuple[float, tuple[float, float]]:
    """Share of coefficients drawn from what the data allow with one sign of the difference in the range.

    Between knots the difference is a line, so its signs at the knots and the ends decide.
    """
    rng = np.random.default_rng(seed)
    inner = np.unique(np.concatenate([first.knots, second.knots]))
    at = np.unique([ends[0], *inner[(inner > ends[0]) & (inner < ends[1])], ends[1]])
    gap = first.draw(draws, rng) @ first.basis(at).T - second.draw(draws, rng) @ second.basis(at).T
    ours = float(np.mean((gap < 0).all(axis=1)))
    theirs = float(np.mean((gap > 0).all(axis=1)))
    return ours + theirs, (ours, theirs)
