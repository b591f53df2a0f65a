"""A study that has passed every check: frozen, and able to say which combinations are possible."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kvik_lab.design.factor import Factor, Level
from kvik_lab.records.schema import Gate
from kvik_lab.study.combinations import Indices, as_column, as_frame, combine, levels_of
from kvik_lab.study.evaluate import Violation, explain, violated
from kvik_lab.study.expressions import Constant, Expression
from kvik_lab.study.layers import Layer, Pattern
from kvik_lab.study.unit import Unit


@dataclass(frozen=True)
class Cost:
    """What runs cost; None where the file does not say. Minutes, and money an hour in `currency`."""

    minutes_per_run: float | None = None
    minutes_per_restart: float | None = None
    price_per_hour: float | None = None
    currency: str = "USD"


@dataclass(frozen=True)
class Anchors:
    """A combination that is measured every so many runs, to see drift."""

    at: Mapping[str, Level]
    every: int


@dataclass(frozen=True)
class Design:
    """Which runs: `kind` is one of full, layered, fractional, screening, d-optimal, i-optimal, split-plot."""

    kind: str
    runs: int | None = None
    starts: int = 1
    blocks: int = 1
    order: str = "randomised"
    """Of the starts of a block: randomised, as-written or williams."""
    seed: int = 0
    ratio: float = 1.0
    """Variance between starts over that of a run."""
    focus: tuple[str, ...] = ()
    """Terms that matter more (d-optimal only)."""
    anchors: Anchors | None = None
    layers: tuple[Layer, ...] = ()
    patterns: tuple[Pattern, ...] = ()


@dataclass(frozen=True)
class Warmup:
    """Requests before those that count: `least` of them, or until `metric` has kept a level for so many, and
    `most` at most."""

    until_steady: bool = False
    least: int = 10
    most: int = 60
    metric: str = "ttft"


@dataclass(frozen=True)
class Program:
    """What is run: the file's `run` as it stands, its texts with `{factor}` in them; and by factor and level,
    what the level puts in, by path."""

    raw: Mapping[str, Any]
    sets: Mapping[str, Mapping[Level, Mapping[str, Any]]]


@dataclass(frozen=True)
class Study:
    """A study file, checked. `digest` is the SHA-256 of its text, `file` its name for messages."""

    name: str
    about: str
    unit: Unit
    constants: Mapping[str, Constant]
    cost: Cost
    factors: tuple[Factor, ...]
    constraints: tuple[Expression, ...]
    model: str | None
    design: Design
    warmup: Warmup
    gates: tuple[Gate, ...]
    file: str
    digest: str
    program: Program | None = None

    def factor(self, name: str) -> Factor:
        """A factor by its name. Raises `KeyError`."""
        return next(one for one in self.factors if one.name == name)

    def product(self) -> int:
        """The product of the numbers of levels: what a full factorial without nesting has."""
        return math.prod(len(factor.levels) for factor in self.factors)

    def combinations(self) -> pd.DataFrame:
        """Every combination that the nesting allows, feasible or not; the last factor changes fastest.

        A column a factor. Where a factor does not exist: NaN among numbers, None among others.
        """
        return as_frame(self.factors, combine(self.factors))

    def candidates(self) -> pd.DataFrame:
        """The feasible combinations, those that violate no constraint; columns as in `combinations`."""
        indices, first = self._judged()
        feasible = {name: column[first < 0] for name, column in indices.items()}
        return as_frame(self.factors, feasible)

    def infeasible(self) -> pd.DataFrame:
        """The other combinations, with `constraint`, the first that each violates, and `why`."""
        indices, first = self._judged()
        rows = np.flatnonzero(first >= 0)
        frame = as_frame(self.factors, {name: column[rows] for name, column in indices.items()})
        frame["constraint"] = [self.constraints[at].text for at in first[rows]]
        frame["why"] = [
            self._why(int(first[row]), levels_of(self.factors, indices, int(row))) for row in rows
        ]
        return frame

    def excluded(self) -> dict[str, int]:
        """For each constraint, how many combinations it is the first to exclude."""
        _, first = self._judged()
        return {one.text: int((first == at).sum()) for at, one in enumerate(self.constraints)}

    def violations(self, levels: Mapping[str, Level]) -> tuple[Violation, ...]:
        """Every constraint that one combination violates. Factors that are not in `levels` are absent."""
        found = (explain(one, levels, self.constants, self.unit) for one in self.constraints)
        return tuple(one for one in found if one is not None)

    def _why(self, at: int, levels: Mapping[str, Level]) -> str:
        found = explain(self.constraints[at], levels, self.constants, self.unit)
        return found.shows if found else ""

    def _judged(self) -> tuple[Indices, NDArray[np.int64]]:
        """Every combination, and the number of the first constraint that it violates; -1 for none."""
        indices = combine(self.factors)
        rows = len(next(iter(indices.values())))
        columns: dict[str, NDArray[Any]] = {
            factor.name: as_column(factor, indices[factor.name]) for factor in self.factors
        }
        first = np.full(rows, -1, dtype=np.int64)
        for at, constraint in enumerate(self.constraints):
            broken = violated(constraint, columns, rows, self.constants, self.unit)
            first[broken & (first < 0)] = at
        return indices, first
