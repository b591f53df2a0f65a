"""The crossover by bootstrap: no distribution assumed, and starts of servers resampled before their repeats.

It is beside the inverted test of `crossover` and not in its place: with fewer than about ten starts (or
repeats) a size a percentile interval covers less than it says.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvik_lab.errors import LabError
from kvik_lab.physics.crossover import AboveOnly, BelowOnly, Bounded, Everywhere
from kvik_lab.physics.data import Floats, Samples

FEW = 10


@dataclass(frozen=True)
class Resampled:
    """Percentile interval of the first change of order, and how many resamples had none."""

    region: Bounded | AboveOnly | BelowOnly | Everywhere
    none_in_range: float
    draws: int
    note: str | None


def bootstrap_crossover(
    first: Samples, second: Samples, *, level: float = 0.95, draws: int = 2000, seed: int = 1
) -> Resampled:
    """Resample both transports and interpolate the change of order of their means.

    A resample without one counts as a crossover beyond the side that it leans to, so that the interval is
    open where too many have none. Raises `LabError` where the two have not the same sizes, at least two.
    """
    sizes = first.sizes
    if first.unit != second.unit or not np.array_equal(sizes, second.sizes) or sizes.size < 2:
        raise LabError(f"{first.name} and {second.name} need the same sizes, at least two, for a bootstrap")
    rng = np.random.default_rng(seed)
    gap = _means(first, sizes, draws, rng) - _means(second, sizes, draws, rng)
    centre = gap.mean(axis=0)
    found = np.array([_first_root(sizes, row, bool(centre[0] > 0)) for row in gap])
    lo, hi = np.quantile(found, [0.5 - level / 2, 0.5 + level / 2], method="inverted_cdf")
    units = min(_units(first), _units(second))
    note = (
        f"{units} independent units are few for a bootstrap; its interval is too narrow"
        if units < FEW
        else None
    )
    return Resampled(_typed(float(lo), float(hi), sizes), float(np.mean(~_inside(found))), draws, note)


def _inside(found: Floats) -> npt.NDArray[np.bool_]:
    return np.asarray(np.isfinite(found) & (found > 0))


def _typed(lo: float, hi: float, sizes: Floats) -> AboveOnly | BelowOnly | Bounded | Everywhere:
    below, above = lo <= 0, not np.isfinite(hi)
    if below and above:
        return Everywhere()
    if above:
        return AboveOnly(lo if np.isfinite(lo) else float(sizes[-1]))
    if below:
        return BelowOnly(hi if hi > 0 else float(sizes[0]))
    return Bounded(lo, hi)


def _units(data: Samples) -> int:
    if data.start is not None:
        return len(set(data.start.tolist()))
    return int(min((data.size == size).sum() for size in data.sizes))


def _means(data: Samples, sizes: Floats, draws: int, rng: np.random.Generator) -> Floats:
    """Draws by sizes: means of resampled starts of resampled repeats."""
    starts = np.zeros(data.size.size, dtype=np.int64)
    if data.start is not None:
        _, starts = np.unique(data.start, return_inverse=True)
    count = int(starts.max()) + 1
    drawn = np.empty((draws, count, sizes.size))
    for index, size in enumerate(sizes):
        for start in range(count):
            here = data.seconds[(data.size == size) & (starts == start)]
            if here.size == 0:
                raise LabError(f"{data.name}: a start has no measurement of {size:g} {data.unit}")
            drawn[:, start, index] = rng.choice(here, (draws, here.size)).mean(axis=1)
    chosen = rng.integers(0, count, (draws, count))
    return np.asarray(np.take_along_axis(drawn, chosen[:, :, None], axis=1).mean(axis=1))


def _first_root(sizes: Floats, gap: Floats, begins_slower: bool) -> float:
    """The first change of order; infinity for none and still as it begins, 0 for changed before the first."""
    change = np.flatnonzero(np.sign(gap[1:]) != np.sign(gap[:-1]))
    if change.size == 0:
        return float("inf") if bool(gap[0] > 0) == begins_slower else 0.0
    at = int(change[0])
    return float(sizes[at] + (sizes[at + 1] - sizes[at]) * gap[at] / (gap[at] - gap[at + 1]))
