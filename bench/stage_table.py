"""Tables of stages through which a store and an engine are restarted, by where the KV came from.

For `store_stages.py` and `vllm_store.py`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from vllm_beside_figures import of_mean

from kvik.store.bench.figures import markdown

SOURCES = ("recompute", "remote store", "host store", "engine cache")
"""Where KV comes from, the slowest first."""


def interval(samples: Sequence[float]) -> tuple[float, float, float]:
    """Mean, and the ends of its 95 % interval by Student's t: not numbers where there are too few."""
    low, high = of_mean(samples) or (math.nan, math.nan)
    return statistics.fmean(samples), low, high


@dataclass
class Stages:
    """One figure of each stage in each round, and where the KV came from."""

    unit: str
    digits: int
    rising: bool
    """Whether a faster source has a higher figure."""
    figures: dict[str, list[float]] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def add(self, stage: str, source: str, figure: float) -> None:
        """One round's."""
        self.figures.setdefault(stage, []).append(figure)
        self.sources[stage] = source

    def by_stage(self, **columns: Mapping[str, float]) -> str:
        """Each stage with the mean of its rounds; `columns` are more figures of each, by stage."""
        names = ["stage", "KV from", f"{self.unit}, mean of rounds", *columns]
        rows = [
            [
                stage,
                self.sources[stage],
                self._text(statistics.fmean(samples)),
                *(self._text(column[stage]) for column in columns.values()),
            ]
            for stage, samples in self.figures.items()
        ]
        return markdown(names, rows)

    def by_source(self, *, without: str = "(none)") -> str:
        """Each source with its interval over rounds, from its stages but those that have a text in their
        name; and whether the intervals are apart."""
        rows, intervals = [], []
        for source in SOURCES:
            stages = [name for name in self.figures if self.sources[name] == source and without not in name]
            rounds = zip(*(self.figures[name] for name in stages), strict=True)
            samples = [statistics.fmean(of_stages) for of_stages in rounds]
            mean, low, high = interval(samples)
            intervals.append((low, high))
            span = f"{self._text(low)} to {self._text(high)}"
            rows.append([source, self._text(mean), span, str(len(samples))])
        table = markdown(["KV from", self.unit, "95 % interval", "samples"], rows)
        return f"{table}\n\nintervals apart, in this order: {'yes' if self._apart(intervals) else 'NO'}"

    def _apart(self, intervals: Sequence[tuple[float, float]]) -> bool:
        return all(
            slower[1] < faster[0] if self.rising else slower[0] > faster[1]
            for slower, faster in pairwise(intervals)
        )

    def _text(self, figure: float) -> str:
        return f"{figure:.{self.digits}f}"
