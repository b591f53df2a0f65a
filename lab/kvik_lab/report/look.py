"""What the inference says of each cell, and of each arm beside the base, or why it says nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvik_lab.errors import LabError
from kvik_lab.infer.compare import Comparison, Conclusion, compare
from kvik_lab.infer.judge import Plan
from kvik_lab.infer.pooled import Settling, settle
from kvik_lab.infer.steady import Steady, examine
from kvik_lab.infer.table import Starts
from kvik_lab.report.cells import Estimate, Missing, State
from kvik_lab.report.read import Cell, Data


@dataclass(frozen=True)
class Rules:
    """What the person who asks decides: units, error rates, what counts as equal, and what is better.

    `alpha` is the error rate of the page as a whole. `question` is what the page answers, by default which
    arm is better; `facts` say when, where and with which versions was measured.
    """

    unit: str = "ms"
    base: str | None = None
    margin: float | None = None
    alpha: float = 0.05
    smaller_is_better: bool = True
    question: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)


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
    """An arm beside the base under one condition, or why there is nothing to compare."""

    arm: str
    condition: tuple[str, ...]
    found: Comparison | None
    why: str

    @property
    def ratio(self) -> Estimate:
        """Arm over base with its simultaneous interval, or why there is none."""
        if self.found is None or self.found.ratio is None:
            return Estimate(Missing(State.NOT_POSSIBLE, self.why))
        return Estimate(self.found.ratio.estimate, self.found.ratio.low, self.found.ratio.high)


@dataclass(frozen=True)
class Settled:
    """What all starts of each arm do together over all conditions, and the warm-up that is left out of all
    alike."""

    arms: Mapping[str, Settling | None]
    cut: int


def settle_arms(data: Data) -> Settled:
    """Judge the starts of each arm together. An arm that does not settle does not lengthen the others'
    warm-up."""
    found = {
        arm: settle(
            [np.array(r.known) for c in data.cells if c.arm == arm for r in c.runs if _usable(r.known)]
        )
        for arm in data.arms
    }
    return Settled(found, max((f.steady_from or 0 for f in found.values() if f is not None), default=0))


def _usable(values: tuple[float, ...]) -> bool:
    return bool(values) and min(values) > 0


def look(cell: Cell, rules: Rules, settled: Settled) -> Looked:
    """Examine a cell's starts."""
    try:
        values = {run.start: np.array(run.known) for run in cell.runs if run.known}
        if not values:
            return Looked(cell, None, "no value is there")
        together = settled.arms.get(cell.arm)
        found = examine(values, rules.smaller_is_better, rules.alpha, settled.cut, together)
    except LabError as error:
        return Looked(cell, None, str(error))
    return Looked(cell, found, found.why)


def compare_all(
    data: Data, base: str, rules: Rules, settled: Settled, crossovers: int = 0
) -> tuple[Compared, ...]:
    """Every arm beside the base under every condition. All their intervals, and those of so many crossovers,
    hold together at 1 - alpha."""
    pairs = [(arm, condition) for condition in data.conditions for arm in data.arms if arm != base]
    family = max(1, sum(_comparable(data, base, *pair) for pair in pairs) + crossovers)
    return tuple(_compare(data, base, arm, condition, rules, settled, family) for arm, condition in pairs)


def _comparable(data: Data, base: str, arm: str, condition: tuple[str, ...]) -> bool:
    cells = [data.find(name, condition) for name in (base, arm)]
    return all(c is not None and sum(bool(run.known) for run in c.runs) > 1 for c in cells)


def _compare(
    data: Data, base: str, arm: str, condition: tuple[str, ...], rules: Rules, settled: Settled, family: int
) -> Compared:
    sides = []
    for name in (base, arm):
        cell = data.find(name, condition)
        if cell is None or not any(run.known for run in cell.runs):
            return Compared(arm, condition, None, f"{name} has no values here")
        sides.append(_starts(cell))
    try:
        (one, two), left = _in_blocks_of_both(sides)
        found = compare(
            one,
            two,
            rules.margin,
            rules.alpha,
            rules.smaller_is_better,
            comparisons=family,
            cut=settled.cut,
            together=(settled.arms.get(base), settled.arms.get(arm)),
        )
    except LabError as error:
        return Compared(arm, condition, None, str(error))
    found = replace(found, notes=(*found.notes, *left))
    silent = found.conclusion is Conclusion.UNSTEADY or found.plan is Plan.SINGLE
    return Compared(arm, condition, found, "; ".join(found.notes) if silent else "")


def _in_blocks_of_both(sides: Sequence[Starts]) -> tuple[list[Starts], tuple[str, ...]]:
    """Both sides without the starts whose block has none of the other side, as where one start was given up;
    and what was left out. Raises LabError where nothing is left."""
    if not all(side.blocks for side in sides):
        return list(sides), ()
    both = set.intersection(*(set(side.blocks.values()) for side in sides))
    if not both:
        names = " and ".join(side.source for side in sides)
        raise LabError(f"no block has starts of {names}; run both in each block")
    left = [f"{s.source}: {name} (block {b})" for s in sides for name, b in s.blocks.items() if b not in both]
    kept = [
        Starts(
            s.source,
            {name: values for name, values in s.values.items() if s.blocks[name] in both},
            {name: block for name, block in s.blocks.items() if block in both},
        )
        for s in sides
    ]
    said = f"left out, as the other arm has no start in their block: {', '.join(left)}"
    return kept, (said,) if left else ()


def _starts(cell: Cell) -> Starts:
    runs = [run for run in cell.runs if run.known]
    blocks = {run.start: run.block for run in runs} if all(run.block for run in runs) else {}
    return Starts(cell.arm, {run.start: np.array(run.known) for run in runs}, blocks)
