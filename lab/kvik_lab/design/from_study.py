"""From a study file to its plan."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from kvik_lab.design.choose import Chosen, Kind, Wish, augment_rows, choose_rows
from kvik_lab.design.cost import Rates
from kvik_lab.design.model import model_matrix
from kvik_lab.design.optimal import Search
from kvik_lab.design.pairs import row_keys
from kvik_lab.design.plan import (
    Basis,
    Plan,
    Setup,
    Space,
    compare_optimal,
    make_plan,
    reachable_model,
)
from kvik_lab.design.schedule import Anchor, Order, check_anchor
from kvik_lab.errors import LabError
from kvik_lab.study import Study, expand_layers
from kvik_lab.study.evaluate import violated

BEGINNINGS = 10
"""Random beginnings of a search."""
_WITH_RUNS = (Kind.FRACTIONAL, Kind.D_OPTIMAL, Kind.I_OPTIMAL, Kind.SPLIT_PLOT)
_SEARCHED = _WITH_RUNS[1:]
_ORDERS = {"randomised": Order.RANDOMISED, "as-written": Order.GIVEN, "williams": Order.WILLIAMS}


@dataclass(frozen=True)
class Options:
    """What is said beside the study file."""

    runs: int | None = None
    """Instead of the study's own number."""
    ratio: float | None = None
    """Instead of the study's own, as are `focus` and `williams`."""
    delta: float | None = None
    """The effect to be seen: in deviations of a run, or with `sigma` in the response's units (see Setup)."""
    power: float = 0.8
    sigma: float | None = None
    contrasts: tuple[str, ...] = ()
    focus: tuple[str, ...] = ()
    beginnings: int = BEGINNINGS
    williams: bool = False
    compare: bool = False
    smaller: int | None = None
    ran: pd.DataFrame | None = None
    """Rows that ran already, ids as index: they stay, and `more` are added."""
    more: int | None = None


def plan_study(study: Study, options: Options) -> Plan:
    """Plan a study. Raises LabError for a study or options from which no plan can be made."""
    if study.model is None:
        raise LabError(f"{study.file}: no model, so nothing says what is to be estimated; add `model: ...`")
    _check_options(Kind(study.design.kind), options)
    space = study_space(study)
    basis = reachable_model(study.model, space)
    search = Search(options.beginnings, study.design.seed)
    chosen, impossible = _rows(study, space, basis, options, search)
    plan = make_plan(study.name, space, basis, chosen, _setup(study, basis, options), impossible)
    _check_anchor(study, plan)
    plan = replace(plan, notes=(*plan.notes, *_not_in_file(study, options)))
    return compare_optimal(plan, space, basis, search, options.smaller) if options.compare else plan


def _check_options(kind: Kind, options: Options) -> None:
    """Raise LabError for an option that would change nothing."""
    what = f"a {kind.value} design" if options.ran is None else "the rows to add"
    if options.runs is not None and (kind not in _WITH_RUNS or options.ran is not None):
        raise LabError(f"--runs says nothing of {what}; leave it out")
    if options.focus and (kind is not Kind.D_OPTIMAL or options.ran is not None):
        raise LabError(f"--focus says nothing of {what}; leave it out")
    if options.smaller is not None and not options.compare:
        raise LabError(
            "--smaller is of what --compare-optimal puts beside the plan; give that, or leave it out"
        )


def study_space(study: Study) -> Space:
    """The feasible combinations of a study, and the others with what they violate."""
    infeasible = study.infeasible()
    columns = {factor.name: infeasible[factor.name].to_numpy() for factor in study.factors}
    broken = np.zeros(len(infeasible), int)
    for constraint in study.constraints:
        broken += violated(constraint, columns, len(infeasible), study.constants, study.unit)
    return Space(study.factors, study.candidates(), infeasible.assign(only=broken == 1))


def _rows(
    study: Study, space: Space, basis: Basis, options: Options, search: Search
) -> tuple[Chosen, dict[str, tuple[str, ...]]]:
    if options.ran is not None:
        return _augmented(space, basis, options, search), {}
    if study.design.kind == Kind.LAYERED.value:
        return _layered(study)
    wish = Wish(
        Kind(study.design.kind),
        options.runs or study.design.runs,
        options.focus or study.design.focus,
        ratio=_ratio(study, options),
        search=search,
    )
    return choose_rows(wish, space.candidates, basis.coded, basis.model), {}


def _layered(study: Study) -> tuple[Chosen, dict[str, tuple[str, ...]]]:
    """The patterns by name; those that violate a constraint apart, with what they violate."""
    patterns = expand_layers(study)
    impossible = {}
    for pattern in patterns:
        wrong = study.violations(pattern.levels)
        if wrong:
            impossible[pattern.id] = tuple(str(one) for one in wrong)
    kept = [pattern for pattern in patterns if pattern.id not in impossible]
    names = [factor.name for factor in study.factors]
    rows = pd.DataFrame(
        [[pattern.levels.get(name) for name in names] for pattern in kept],
        columns=names,
        index=[pattern.id for pattern in kept],
        dtype=object,
    )
    hard = row_keys(rows, [factor.name for factor in study.factors if factor.hard])
    restarts = 1 + sum(one != other for one, other in itertools.pairwise(hard))
    layers = study.design.layers
    notes = [f"{len(patterns)} patterns in {len(layers)} layers"]
    notes.append(f"in the order of the file they take {restarts} starts; here rows of one start are together")
    minutes = [layer.minutes for layer in layers if layer.minutes is not None]
    if minutes:
        total = " + ".join(f"{one:g}" for one in minutes)
        notes.append(f"its layers are planned to take {sum(minutes) / 60:g} h: {total} min")
    return Chosen(rows, None, tuple(notes)), impossible


def _augmented(space: Space, basis: Basis, options: Options, search: Search) -> Chosen:
    if options.ran is None or options.more is None:
        raise LabError("say how many rows to add to those that ran")
    names = [factor.name for factor in space.factors]
    missing = [name for name in names if name not in options.ran.columns]
    if missing:
        raise LabError(f"the rows that ran have no column {', '.join(missing)}")
    ran = options.ran[names].astype(object)
    if (twice := ran.index[ran.index.duplicated()]).size:
        raise LabError(f"two rows that ran have the id {twice[0]!r}; give each one of its own")
    feasible = set(row_keys(space.candidates, names))
    for key, name in zip(row_keys(ran, names), ran.index, strict=True):
        if key not in feasible:
            levels = ", ".join(f"{n}={v}" for n, v in zip(names, key, strict=True) if v is not None)
            raise LabError(f"row {name} ({levels}) is no feasible combination of the study's levels")
    coded = model_matrix(basis.model, ran)
    return augment_rows(ran, coded, space.candidates, basis.coded, options.more, search)


def _setup(study: Study, basis: Basis, options: Options) -> Setup:
    design, cost = study.design, study.cost
    if design.starts % design.blocks:
        raise LabError(
            f"{study.file}: {design.starts} starts cannot be shared out over {design.blocks} blocks; "
            "make starts a multiple of blocks"
        )
    anchors = design.anchors
    return Setup(
        blocks=design.blocks,
        starts_a_block=design.starts // design.blocks,
        order=Order.WILLIAMS if options.williams else _ORDERS[design.order],
        anchor=Anchor(anchors.at, anchors.every) if anchors else None,
        seed=design.seed,
        rates=Rates(
            cost.minutes_per_run, cost.minutes_per_restart or 0.0, cost.price_per_hour or 0.0, cost.currency
        ),
        ratio=_ratio(study, options),
        contrasts=options.contrasts,
        delta=_delta(basis, options),
        wanted_power=options.power,
        sigma=options.sigma,
    )


def _check_anchor(study: Study, plan: Plan) -> None:
    """Raise LabError for an anchor that cannot be run in one of its starts."""
    if plan.setup.anchor is None:
        return
    for levels in check_anchor(plan.setup.anchor, plan.schedule, study.factors):
        if wrong := study.violations(levels):
            raise LabError(f"{study.file}: the anchor cannot be run: {'; '.join(map(str, wrong))}")


def _ratio(study: Study, options: Options) -> float:
    return study.design.ratio if options.ratio is None else options.ratio


def _not_in_file(study: Study, options: Options) -> tuple[str, ...]:
    """What changes rows or their order and is not in the file: `kvik lab run` plans by the file alone."""
    if options.ran is not None:
        return ("`kvik lab run` takes its rows from the file; to run these, list them in a layered design",)
    design, kind = study.design, Kind(study.design.kind)
    lacks = []
    if kind in _WITH_RUNS and options.runs not in (None, design.runs):
        lacks.append(f"runs: {options.runs}")
    if kind is Kind.SPLIT_PLOT and options.ratio not in (None, design.ratio):
        lacks.append(f"ratio: {options.ratio:g}")
    if kind is Kind.D_OPTIMAL and options.focus not in ((), design.focus):
        lacks.append(f"focus: [{', '.join(options.focus)}]")
    if options.williams and design.order != Order.WILLIAMS.value:
        lacks.append("order: williams")
    notes = [f"`kvik lab run` would not run this plan; write in the file's design: {', '.join(lacks)}"]
    if kind in _SEARCHED and options.beginnings != BEGINNINGS:
        notes.append(f"`kvik lab run` searches from {BEGINNINGS} beginnings, and may find other rows")
    return tuple(notes if lacks else notes[1:])


def _delta(basis: Basis, options: Options) -> float:
    """The effect in deviations of a run. Relative to a logarithm, 0.05 is 5 %: log(1.05)."""
    if options.delta is None or options.sigma is None:
        return 1.0 if options.delta is None else options.delta
    if options.sigma <= 0:
        raise LabError("the deviation of a run is above 0")
    relative = basis.model.formula.logarithmic
    if relative and options.delta <= -1:
        raise LabError("a relative effect is above -1")
    size = math.log1p(options.delta) if relative else options.delta
    return size / options.sigma
