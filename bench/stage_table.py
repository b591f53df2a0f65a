"""Tables of stages through which a store and an engine are restarted, by where the KV came from.

For `store_stages.py` and `vllm_store.py`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from vllm_beside_figures import Estimate, of_mean, ratio

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
        name; and whether the intervals are apart. A round that is slow is so for all sources, so there is
        also each source's ratio to the slower one before it, by rounds, and whether it is on the right side
        of 1."""
        rows: list[list[str]] = []
        intervals, ratios, before = [], [], None
        for source in SOURCES:
            stages = [name for name in self.figures if self.sources[name] == source and without not in name]
            rounds = zip(*(self.figures[name] for name in stages), strict=True)
            samples = [statistics.fmean(of_stages) for of_stages in rounds]
            mean, low, high = interval(samples)
            intervals.append((low, high))
            span = f"{self._text(low)} to {self._text(high)}"
            faster = None if before is None else ratio(samples, before)
            ratios += [] if before is None else [faster]
            rows.append(
                [source, self._text(mean), span, "-" if faster is None else faster.text(), str(len(samples))]
            )
            before = samples
        table = markdown(
            ["KV from", self.unit, "95 % interval", "to the one above, by rounds", "samples"], rows
        )
        apart, beside = self._apart(intervals), all(map(self._faster, ratios))
        return (
            f"{table}\n\nby rounds, in this order: {'yes' if beside else 'NO'}\n"
            f"intervals apart, in this order: {'yes' if apart else 'NO'}"
        )

    def _faster(self, found: Estimate | None) -> bool:
        """Whether a ratio's whole interval says so."""
        if found is None or found.interval is None:
            return False
        low, high = found.interval
        return low > 1 if self.rising else high < 1

    def _apart(self, intervals: Sequence[tuple[float, float]]) -> bool:
        return all(
            slower[1] < faster[0] if self.rising else slower[0] > faster[1]
            for slower, faster in pairwise(intervals)
        )

    def _text(self, figure: float) -> str:
        return f"{figure:.{self.digits}f}"
