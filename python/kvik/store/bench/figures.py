"""Medians and ratios of rounds, and tables of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

GIB = 1 << 30


def seconds(f: Callable[[], object]) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    f()
    return time.perf_counter() - began


@dataclass
class Rounds:
    """Seconds by name, one a round: what has one name had its turn in the same rounds as the others."""

    times: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        """One round's."""
        self.times.setdefault(name, []).append(value)

    def median(self, name: str) -> float | None:
        """Seconds; None for what was not measured."""
        times = self.times.get(name)
        return statistics.median(times) if times else None

    def ratio(self, name: str, to: str) -> float | None:
        """The median over the rounds of the ratio of two times of the same round."""
        times, others = self.times.get(name), self.times.get(to)
        if not times or not others:
            return None
        return statistics.median(time / other for time, other in zip(times, others, strict=True))


def text(value: float | None, digits: int = 2, missing: str = "-") -> str:
    """A number of a table."""
    return missing if value is None else f"{value:.{digits}f}"


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that can stand in a document."""
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
