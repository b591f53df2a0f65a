"""From the slices of a contender to figures, and the refusal of figures that the samples do not carry."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

GIB = 1 << 30

NEEDED = {50: 1, 90: 10, 99: 100}
"""Samples without which a percentile would only be the largest value by another name."""


@dataclass(frozen=True)
class Slice:
    """One uninterrupted turn of a contender: whole batches, from the first call to the last completion."""

    payload: int
    wall_s: float
    cpu_initiator_s: float
    cpu_target_s: float
    latencies_s: tuple[float, ...] = ()

    @property
    def rate(self) -> float:
        """Payload bytes per second."""
        return self.payload / self.wall_s


def percentile(samples: Sequence[float], percent: int) -> float | None:
    """The nearest-rank percentile, a value that really occurred; ``None`` when there are too few samples."""
    if len(samples) < NEEDED[percent]:
        return None
    ordered = sorted(samples)
    return ordered[math.ceil(len(ordered) * percent / 100) - 1]


@dataclass(frozen=True)
class Ratio:
    """A contender's rate over a limit's, round by round: the median, and how far the rounds lie apart."""

    median: float
    low: float
    high: float


@dataclass
class Series:
    """All slices of one contender in one cell."""

    slices: list[Slice] = field(default_factory=list)

    @property
    def payload(self) -> int:
        """Payload bytes of all slices."""
        return sum(s.payload for s in self.slices)

    @property
    def wall_s(self) -> float:
        """Seconds of all slices; the time between them belongs to others."""
        return sum(s.wall_s for s in self.slices)

    @property
    def latencies_s(self) -> list[float]:
        """Seconds of every batch, in the order in which slices ran."""
        return [latency for s in self.slices for latency in s.latencies_s]

    @property
    def rate(self) -> float | None:
        """Payload bytes per second over all slices."""
        return self.payload / self.wall_s if self.slices else None

    def cpu_per_gib(self) -> tuple[float, float] | None:
        """CPU seconds per GiB of payload: (initiator, target)."""
        if not self.slices:
            return None
        gib = self.payload / GIB
        initiator = sum(s.cpu_initiator_s for s in self.slices)
        return initiator / gib, sum(s.cpu_target_s for s in self.slices) / gib

    def ratio_to(self, limit: Series) -> Ratio | None:
        """Compare with a limit that had its turn in the same rounds."""
        ratios = [own.rate / other.rate for own, other in zip(self.slices, limit.slices, strict=False)]
        return Ratio(statistics.median(ratios), min(ratios), max(ratios)) if ratios else None
