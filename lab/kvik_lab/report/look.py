"""What the inference says of each cell, and of each arm beside the base, or why it says nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kvik_lab.errors import LabError
from kvik_lab.infer.compare import Comparison, Conclusion, Plan, compare
from kvik_lab.infer.multiple import holm
from kvik_lab.infer.steady import Steady, examine
from kvik_lab.infer.table import Starts
from kvik_lab.report.cells import Estimate, Missing, State
from kvik_lab.report.read import Cell, Data


@dataclass(frozen=True)
class Rules:
    """What the person who asks decides: units, error rates, what counts as equal, and what is better."""

    unit: str = "ms"
    base: str | None = None
    margin: float | None = None
    alpha: float = 0.05
    smaller_is_better: bool = True


@dataclass(frozen=True)
class Looked:
    """A cell with its steady state; `steady` is None where it could not be looked at, `why` says why."""

    cell: Cell
    steady: Steady | None
    why: str

    @property
    def headline(self) -> Estimate:
        """The mean with its interval, or why there is none."""
        if self.steady is None or self.steady.headline is None:
            states = {v.state for run in self.cell.runs for v in run.values if isinstance(v, Missing)}
            empty = not any(run.known for run in self.cell.runs)
            state = states.pop() if empty and len(states) == 1 else State.NOT_POSSIBLE
            return Estimate(Missing(state, "" if empty else self.why))
        found = self.steady.headline
        return Estimate(found.estimate, found.low, found.high)


@dataclass(frozen=True)
class Compared:
    """An arm beside the base under one condition; `p` is adjusted for all comparisons of the report."""

    arm: str
    condition: tuple[str, ...]
    found: Comparison | None
    p: float | None
    why: str

    @property
    def ratio(self) -> Estimate:
        """Arm over base with its interval, or why there is none."""
        if self.found is None or self.found.ratio is None:
            return Estimate(Missing(State.NOT_POSSIBLE, self.why))
        return Estimate(self.found.ratio.estimate, self.found.ratio.low, self.found.ratio.high)

    @property
    def of_two_starts(self) -> bool:
        """Whether it says something of these two starts only."""
        return self.found is not None and self.found.plan is Plan.SINGLE


def look(cell: Cell, rules: Rules) -> Looked:
    """Examine a cell's starts."""
    try:
        values = {run.start: np.array(run.known) for run in cell.runs if run.known}
        if not values:
            return Looked(cell, None, "no value is there")
        found = examine(values, rules.smaller_is_better, rules.alpha, 1 - rules.alpha)
    except LabError as error:
        return Looked(cell, None, str(error))
    return Looked(cell, found, found.why)


def compare_all(data: Data, base: str, rules: Rules) -> tuple[Compared, ...]:
    """Every arm beside the base under every condition, with Holm's adjustment over all of them."""
    found = [
        _compare(data, base, arm, condition, rules)
        for condition in data.conditions
        for arm in data.arms
        if arm != base
    ]
    tested = [i for i, c in enumerate(found) if c.p is not None]
    adjusted = [float(p) for p in holm([found[i].p or 0.0 for i in tested])] if tested else []
    for i, p in zip(tested, adjusted, strict=True):
        found[i] = replace(found[i], p=p)
    return tuple(found)


def _compare(data: Data, base: str, arm: str, condition: tuple[str, ...], rules: Rules) -> Compared:
    sides = []
    for name in (base, arm):
        cell = data.find(name, condition)
        if cell is None or not any(run.known for run in cell.runs):
            return Compared(arm, condition, None, None, f"{name} has no values here")
        sides.append(_starts(cell))
    try:
        found = compare(sides[0], sides[1], rules.margin, rules.alpha, rules.smaller_is_better)
    except LabError as error:
        return Compared(arm, condition, None, None, str(error))
    unsteady = found.conclusion is Conclusion.UNSTEADY
    return Compared(arm, condition, found, found.p, "; ".join(found.notes) if unsteady else "")


def _starts(cell: Cell) -> Starts:
    runs = [run for run in cell.runs if run.known]
    blocks = {run.start: run.block for run in runs} if all(run.block for run in runs) else {}
    return Starts(cell.arm, {run.start: np.array(run.known) for run in runs}, blocks)
