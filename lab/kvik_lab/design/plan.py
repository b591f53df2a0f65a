"""All that can be said about a plan before anything runs, as one value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from kvik_lab.design.choose import Chosen
from kvik_lab.design.cost import Cost, Figure, Rates, check_rates, schedule_cost
from kvik_lab.design.estimability import Alias, Estimability, assess, fewer_rows, find_rank
from kvik_lab.design.factor import Factor, Scale
from kvik_lab.design.ladder import MainEffect, Step, main_effects, model_steps
from kvik_lab.design.model import FloatArray, IntArray, Model, build_model, keep_columns, model_matrix
from kvik_lab.design.optimal import Search, find_optimum, relative_d_efficiency
from kvik_lab.design.pairs import PairReport, duplicates, matched_pairs
from kvik_lab.design.power import Power, contrast_powers, parse_contrast
from kvik_lab.design.schedule import Anchor, Order, Schedule, make_schedule
from kvik_lab.errors import LabError
from kvik_lab.study.formula import term_name

WITNESSES = 5000
"""Infeasible combinations of a constraint that are looked at to say what it costs the model."""


@dataclass(frozen=True)
class Space:
    """What could be run: factors, feasible combinations, and the others.

    These have two more columns: `constraint`, the first that each violates, and `only`, whether it violates
    no other.
    """

    factors: tuple[Factor, ...]
    candidates: pd.DataFrame
    infeasible: pd.DataFrame

    @property
    def product(self) -> int:
        """Combinations of levels without nesting and constraints."""
        return math.prod(len(factor.levels) for factor in self.factors)


@dataclass(frozen=True)
class Unreachable:
    """A column that no plan on these candidates can tell from others, and why."""

    alias: Alias
    why: str


@dataclass(frozen=True)
class Basis:
    """The model that the candidates can estimate, the candidates in its columns, and what had to be left
    out."""

    model: Model
    coded: FloatArray
    unreachable: tuple[Unreachable, ...]
    notes: tuple[str, ...]
    """Levels that are never feasible, interactions that the formula does not have."""


@dataclass(frozen=True)
class Setup:
    """How the rows are run: replicates, order, anchors, and what is assumed of errors."""

    blocks: int = 1
    starts_a_block: int = 1
    order: Order = Order.RANDOMISED
    anchor: Anchor | None = None
    seed: int = 1
    rates: Rates = field(default_factory=Rates)
    ratio: float = 1.0
    """Variance between starts over that of a run; an assumption until a pilot measures it."""
    contrasts: tuple[str, ...] = ()
    """Effects that matter, beside each factor's own."""
    delta: float = 1.0
    """How large an effect is to be seen, in units of the deviation of a run."""
    wanted_power: float = 0.8
    sigma: float | None = None
    """The deviation of a run in the response's units, or relative where that is a logarithm."""


@dataclass(frozen=True)
class Rival:
    """An optimal plan on the same candidates, beside the plan. Standard errors are those of single runs."""

    runs: int
    rank: int
    relative_efficiency: float | None
    """What a run of the plan tells, over what one of this tells (D); none where the plan lacks rank."""
    se: Mapping[str, float]
    main_effects: tuple[MainEffect, ...]


@dataclass(frozen=True)
class Plan:
    """What a plan can tell, and what it takes."""

    name: str
    sizes: Mapping[str, Figure]
    notes: tuple[str, ...]
    rows: pd.DataFrame
    """Feasible rows, ids as index."""
    impossible: Mapping[str, tuple[str, ...]]
    """Ids of rows that cannot run, with what they violate."""
    excluded: Mapping[str, int]
    """Combinations that each constraint excludes."""
    duplicates: tuple[tuple[str, ...], ...]
    pairs: PairReport
    unreachable: tuple[Unreachable, ...]
    single: Estimability
    """Of the rows as they stand, one independent run each."""
    main_effects: tuple[MainEffect, ...]
    """Of the same, in a model without interactions."""
    steps: tuple[Step, ...]
    scheduled: Estimability
    """Of the schedule and of rows that ran, with the starts' own deviation and blocks."""
    schedule: Schedule
    """Of what is to run."""
    powers: tuple[Power, ...]
    cost: Cost
    rivals: tuple[Rival, ...]
    setup: Setup
    response: str | None
    """What the model is of, such as log(ttft)."""
    logarithmic: bool
    """Whether effects are ratios."""


def reachable_model(formula: str, space: Space) -> Basis:
    """Reduce a model to what the candidates can estimate, and say of each column left out why.

    Raises LabError for a formula that cannot be read and for a space without candidates.
    """
    if space.candidates.empty:
        raise LabError("no combination of levels is feasible; see which constraint excludes them")
    factors, notes = feasible_levels(space)
    model = build_model(formula, factors)
    coded = model_matrix(model, space.candidates)
    rank = find_rank(coded, model.names)
    reasons = _reasons(model, coded, space, [alias.column for alias in rank.aliases])
    lost = tuple(Unreachable(alias, reasons[alias.column]) for alias in rank.aliases)
    absent = missing_interactions(model)
    if absent:
        notes = (*notes, f"the model assumes that these interactions are absent: {', '.join(absent)}")
    return Basis(keep_columns(model, rank.kept), coded[:, list(rank.kept)], lost, (*notes, *model.notes))


def feasible_levels(space: Space) -> tuple[tuple[Factor, ...], tuple[str, ...]]:
    """The factors with those of their levels that some feasible combination has, and notes on the others."""
    factors, notes = [], []
    for factor in space.factors:
        have = set(space.candidates[factor.name].dropna().unique())
        levels = tuple(level for level in factor.levels if level in have)
        if levels and len(levels) < len(factor.levels):
            gone = ", ".join(str(level) for level in factor.levels if level not in have)
            notes.append(
                f"{factor.name} {gone} is in no feasible combination; the range is that of the others"
            )
            factor = replace(factor, levels=levels)
        factors.append(factor)
    return tuple(factors), tuple(notes)


def make_plan(
    name: str,
    space: Space,
    basis: Basis,
    chosen: Chosen,
    setup: Setup,
    impossible: Mapping[str, tuple[str, ...]] | None = None,
) -> Plan:
    """Say all that can be said of rows before they run.

    `chosen.rows` are the feasible ones; `impossible` names those that were asked for and cannot run.
    """
    check_rates(setup.rates)
    if chosen.rows.empty:
        raise LabError("the plan has no feasible row")
    matrix = model_matrix(basis.model, chosen.rows)
    schedule = make_schedule(
        chosen.rows.iloc[chosen.ran :],
        space.factors,
        setup.blocks,
        setup.order,
        setup.anchor,
        setup.seed,
        chosen.plots,
        setup.starts_a_block,
    )
    twins = duplicates(chosen.rows, space.factors)
    left_out = impossible or {}
    scheduled, powers = _with_starts(
        basis.model, matrix, chosen.rows, _with_earlier(schedule, chosen, space), setup
    )
    return Plan(
        name,
        _sizes(space, chosen, twins, schedule, len(left_out)),
        (*chosen.notes, *basis.notes),
        chosen.rows,
        left_out,
        _excluded(space),
        twins,
        matched_pairs(chosen.rows, space.factors),
        basis.unreachable,
        assess(matrix, basis.model.names),
        main_effects(basis.model.factors, space.candidates, chosen.rows),
        model_steps(basis.model.factors, space.candidates, chosen.rows),
        scheduled,
        schedule,
        powers,
        schedule_cost(schedule, chosen.rows, space.factors, setup.rates, setup.anchor),
        (),
        setup,
        basis.model.formula.response,
        basis.model.formula.logarithmic,
    )


def compare_optimal(
    plan: Plan, space: Space, basis: Basis, search: Search, smaller: int | None = None
) -> Plan:
    """Put D-optimal plans of the same size and of a smaller one beside the plan.

    The smaller one has `smaller` runs, or two thirds, but no fewer than the model has columns and five more.
    """
    columns = len(basis.model.columns)
    own = model_matrix(basis.model, plan.rows)
    fewer = smaller or max(columns + 5, math.ceil(2 * len(own) / 3))
    sizes = sorted({size for size in (len(own), fewer) if size >= columns}, reverse=True)
    rivals = []
    for size in sizes:
        found = find_optimum(basis.coded, size, search=search)
        matrix = basis.coded[list(found.rows)]
        told = assess(matrix, basis.model.names)
        efficiency = relative_d_efficiency(own, matrix) if plan.single.rank == columns else None
        se = {c.name: c.se for c in told.coefficients if c.se is not None}
        alone = main_effects(basis.model.factors, space.candidates, space.candidates.iloc[list(found.rows)])
        rivals.append(Rival(size, told.rank, efficiency, se, alone))
    note = f"the model has {columns} columns, so no plan of fewer runs can be compared"
    notes = plan.notes if len(sizes) > 1 or fewer == len(own) else (*plan.notes, note)
    return replace(plan, rivals=tuple(rivals), notes=notes)


def missing_interactions(model: Model) -> tuple[str, ...]:
    """Two-factor interactions that a model does not have: nothing is said about them.

    A factor and the one that it is nested in have none.
    """
    have = {frozenset(name for name, _ in column.term) for column in model.columns}
    found = []
    names = [factor for factor in model.factors if frozenset([factor.name]) in have]
    for k, one in enumerate(names):
        for other in names[k + 1 :]:
            nested = one.name in other.within or other.name in one.within
            if not nested and frozenset([one.name, other.name]) not in have:
                found.append(term_name(((one.name, 1), (other.name, 1))))
    return tuple(found)


def _reasons(model: Model, coded: FloatArray, space: Space, lost: Sequence[str]) -> dict[str, str]:
    """For each column that the candidates cannot give: the constraint without which they could."""
    reasons: dict[str, str] = {}
    if not lost:
        return reasons
    groups: list[tuple[str, pd.DataFrame]] = []
    if len(space.infeasible):
        known = _codable(model, space.infeasible)
        for text, rows in known[known["only"]].groupby("constraint", sort=False):
            groups.append((f"because of the constraint {text}", _some(rows)))
        groups.append(("because of the constraints together", _some(known)))
    for why, rows in groups:
        more = np.vstack([fewer_rows(coded), model_matrix(model, rows)])
        still = {alias.column for alias in find_rank(more, model.names).aliases}
        for column in lost:
            if column not in still:
                reasons.setdefault(column, why)
    for column in lost:
        reasons.setdefault(column, "because of the levels and the nesting: no constraint is the cause")
    return reasons


def _codable(model: Model, rows: pd.DataFrame) -> pd.DataFrame:
    """The rows whose categorical levels the model has."""
    good = np.ones(len(rows), bool)
    for factor in model.factors:
        if factor.scale is Scale.CATEGORICAL:
            values = rows[factor.name]
            good &= (values.isin(list(factor.levels)) | values.isna()).to_numpy(bool)
    return rows[good]


def _some(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.iloc[:: max(1, len(rows) // WITNESSES)]


def _with_starts(
    model: Model, matrix: FloatArray, rows: pd.DataFrame, schedule: Schedule, setup: Setup
) -> tuple[Estimability, tuple[Power, ...]]:
    """Standard errors and power of the whole schedule. Anchors are for drift and are not counted."""
    place = {str(k): j for j, k in enumerate(rows.index)}
    pick, starts, blocks, number = [], [], [], 0
    for start in schedule.starts:
        if start.anchor:
            continue
        for run in start.runs:
            if run in place:
                pick.append(place[run])
                starts.append(number)
                blocks.append(start.block)
        number += 1
    full = matrix[pick]
    groups: IntArray = np.array(starts, np.intp)
    nuisance = block_columns(np.array(blocks, np.intp), schedule.blocks)
    ratio = setup.ratio if any(factor.hard for factor in model.factors) else 0.0
    names = [*model.names, *(f"block {k + 2}" for k in range(nuisance.shape[1]))]
    told = assess(np.hstack([full, nuisance]), names, groups, ratio)
    bare = assess(full, model.names, groups, ratio)
    own = told.coefficients[: len(model.names)]
    told = replace(bare, rank=sum(c.se is not None for c in own), aliases=told.aliases, coefficients=own)
    texts = dict.fromkeys((*setup.contrasts, *default_contrasts(model)))
    contrasts = {parse_contrast(text, model).text: parse_contrast(text, model) for text in texts}
    powers = contrast_powers(
        list(contrasts.values()), full, groups, ratio, setup.delta, setup.wanted_power, nuisance=nuisance
    )
    return told, powers


def _with_earlier(schedule: Schedule, chosen: Chosen, space: Space) -> Schedule:
    """The schedule, with the rows that ran as a further block: a start for each of their hard levels."""
    if not chosen.ran:
        return schedule
    earlier = make_schedule(chosen.rows.iloc[: chosen.ran], space.factors, order=Order.GIVEN)
    starts = (replace(start, block=schedule.blocks) for start in earlier.starts)
    return replace(schedule, starts=(*schedule.starts, *starts), blocks=schedule.blocks + 1)


def default_contrasts(model: Model) -> tuple[str, ...]:
    """Each factor that the model has, and each other level of a categorical one against the first."""
    named = {name for column in model.columns for name, _ in column.term}
    found: list[str] = []
    for factor in model.factors:
        if factor.name not in named:
            continue
        if any(column.name.startswith(f"{factor.name}[") for column in model.columns):
            found += [f"{factor.name}[{level} vs {factor.levels[0]}]" for level in factor.levels[1:]]
        else:
            found.append(factor.name)
    return tuple(found)


def block_columns(block: IntArray, blocks: int) -> FloatArray:
    """Columns that tell blocks 1 and later from the first, each of mean 0."""
    columns = np.zeros((len(block), max(0, blocks - 1)))
    for k in range(columns.shape[1]):
        columns[:, k] = (block == k + 1) - np.mean(block == k + 1)
    return columns


def _sizes(
    space: Space,
    chosen: Chosen,
    twins: Sequence[Sequence[str]],
    schedule: Schedule,
    impossible: int,
) -> dict[str, Figure]:
    levels = " x ".join(str(len(factor.levels)) for factor in space.factors)
    feasible, infeasible = len(space.candidates), len(space.infeasible)
    rows = chosen.rows
    todo = len(rows) - chosen.ran
    repeated = sum(len(group) - 1 for group in twins)
    asked = len(rows) + impossible
    distinct = len(rows) - repeated
    product = space.product
    cut = f"{asked} rows asked for - {impossible} infeasible"
    return {
        "product of levels": Figure(product, levels),
        "combinations": Figure(feasible + infeasible, "nested factors only where they exist"),
        "feasible": Figure(feasible, f"{feasible + infeasible} - {infeasible} infeasible"),
        "rows": Figure(len(rows), cut),
        "distinct rows": Figure(distinct, f"{len(rows)} - {repeated} duplicates"),
        "reduction": Figure(1 - len(rows) / product, f"1 - {len(rows)} / {product}"),
        "runs": Figure(
            schedule.runs, f"{todo} rows to run x {schedule.runs // todo} replicates, without anchors"
        ),
        "anchor runs": Figure(schedule.anchors, "counted in the schedule"),
    }


def _excluded(space: Space) -> dict[str, int]:
    if space.infeasible.empty:
        return {}
    counts = space.infeasible["constraint"].value_counts(sort=False)
    return {str(text): int(n) for text, n in counts.items()}
