"""The runs of a plan, in their order: each has an id that is the same whenever the same file is planned
again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from kvik_lab.design.factor import Factor, Level
from kvik_lab.design.from_study import Options, plan_study
from kvik_lab.design.schedule import ANCHOR
from kvik_lab.study import Study

Levels = Mapping[str, Level | None]


@dataclass(frozen=True)
class Slot:
    """One planned run. `order` counts over the whole study."""

    id: str
    order: int
    pattern: str
    levels: Levels
    anchor: bool


@dataclass(frozen=True)
class Start:
    """One planned start of the servers, with its runs."""

    name: str
    group: str
    whole_plot: str
    slots: tuple[Slot, ...]


def plan_slots(study: Study) -> tuple[Start, ...]:
    """The starts of a study in their order. Raises `LabError` for a study that cannot be planned."""
    plan = plan_study(study, Options())
    names = [factor.name for factor in study.factors]
    hard = [factor.name for factor in study.factors if factor.hard]
    rows = {str(name): _levels(row, study.factors) for name, row in plan.rows.iterrows()}
    if study.design.anchors is not None:
        rows[ANCHOR] = dict(study.design.anchors.at)
    width = len(str(len(plan.schedule.starts)))
    starts, order = [], 0
    for number, start in enumerate(plan.schedule.starts, 1):
        name = f"s{number:0{width}}"
        slots = []
        for at, pattern in enumerate(start.runs, 1):
            levels = rows[pattern]
            if pattern == ANCHOR:  # with easy levels only, it takes the others from its start
                levels = {one: levels.get(one, start.levels.get(one)) for one in names}
            slots.append(
                Slot(f"{study.digest[:8]}-{name}-r{at:02}", order, pattern, levels, pattern == ANCHOR)
            )
            order += 1
        whole = ", ".join(f"{one}={start.levels[one]}" for one in hard if start.levels[one] is not None)
        starts.append(Start(name, str(start.block + 1), whole or "all", tuple(slots)))
    return tuple(starts)


def _levels(row: pd.Series, factors: Sequence[Factor]) -> dict[str, Level | None]:
    """A row's levels as the study file has them: in a frame a whole number may have become a float."""
    found: dict[str, Level | None] = {}
    for factor in factors:
        value = row[factor.name]
        at = None if pd.isna(value) else factor.levels.index(value)
        found[factor.name] = None if at is None else factor.levels[at]
    return found
