"""A whole report of measurements: what was run, what it shows, and what it cannot."""

from __future__ import annotations

import numpy as np
from scipy import stats

from kvik_lab.errors import LabError
from kvik_lab.infer.arrays import TooFew
from kvik_lab.infer.order import quantile
from kvik_lab.infer.serial import serial
from kvik_lab.infer.steady import Start
from kvik_lab.report.cells import Estimate, Missing, Number, State
from kvik_lab.report.claims import claims, limits
from kvik_lab.report.figures import (
    Bars,
    Distributions,
    Factor,
    Figure,
    Forest,
    Group,
    HeatCell,
    HeatMap,
    Level,
    Line,
    Named,
    Ordered,
    Quantile,
    RunOrder,
)
from kvik_lab.report.look import Compared, Looked, Rules, compare_all, look
from kvik_lab.report.model import Cell, Report, Section, Table
from kvik_lab.report.read import Data
from kvik_lab.report.sizes import Sized, sized

QUANTILES = (0.5, 0.9, 0.99)


def build_report(data: Data, rules: Rules, title: str) -> Report:
    """Examine every cell, compare every arm with the base, and write down what follows.

    Raises LabError for a base that is no arm.
    """
    base = rules.base or data.arms[0]
    if base not in data.arms:
        raise LabError(f"the base {base!r} is no level of {data.arm}: {', '.join(data.arms)}")
    looked = tuple(look(cell, rules) for cell in data.cells)
    compared = compare_all(data, base, rules)
    by_size = _sizes(data, base, looked, rules)
    sections = [
        _measured(data, looked, rules),
        _series(data, looked, rules),
        _distributions(data, looked, rules),
    ]
    if compared:
        sections.append(_comparison(data, base, compared, rules))
    if data.others:
        sections.append(_factors(data, looked, rules))
    if by_size:
        sections.append(_size_section(by_size))
    sections.append(claims(data, base, looked, compared, by_size, rules))
    sections.append(limits(data, looked, compared, by_size, rules))
    return Report(title, tuple(sections))


def words(data: Data, condition: tuple[str, ...]) -> str:
    """A condition as text."""
    return ", ".join(f"{n} {v}" for n, v in zip(data.others, condition, strict=True)) or "all"


def _measured(data: Data, looked: tuple[Looked, ...], rules: Rules) -> Section:
    rows: list[tuple[Cell, ...]] = []
    for condition in data.conditions:
        for arm in data.arms:
            found = next((x for x in looked if x.cell.arm == arm and x.cell.condition == condition), None)
            if found is None:
                nothing = Missing(State.NOT_MEASURED)
                rows.append(
                    (arm, *condition, "0", "0", "0", nothing, Estimate(nothing), "no row in the data")
                )
                continue
            values = [v for run in found.cell.runs for v in run.values]
            gone = sum(isinstance(v, Missing) for v in values)
            kind: Cell = Missing(State.NOT_POSSIBLE) if found.steady is None else found.steady.kind.value
            counts = (str(len(found.cell.runs)), str(len(values) - gone), str(gone))
            rows.append((arm, *condition, *counts, kind, found.headline, found.why))
    columns = (
        data.arm,
        *data.others,
        "starts",
        "values",
        "missing",
        "class",
        f"mean, {rules.unit}",
        "of what",
    )
    same = [f"{name} was {value} throughout." for name, value in data.constant.items()]
    text = (
        f"{len(data.cells)} combinations were run, from {', '.join(data.sources)}.",
        f"A mean is that of the steady part of each start, with its {100 * (1 - rules.alpha):g} % interval. "
        "Where a start has no steady state, a mean would describe none of its levels, and none is given.",
        *same,
    )
    return Section("measured", "What was measured", text, (Table("cells", "Runs", columns, tuple(rows)),))


def _series(data: Data, looked: tuple[Looked, ...], rules: Rules) -> Section:
    figures: list[Figure] = []
    for number, condition in enumerate(data.conditions, 1):
        series = [
            s for x in looked if x.cell.condition == condition for s in _ordered(x, f"{x.cell.arm}, start ")
        ]
        title = f"In run order: {words(data, condition)}"
        figures.append(RunOrder(f"series-{number}", title, f"value, {rules.unit}", tuple(series)))
    text = "Points are values in the order of their iterations; thick lines are the levels that were found."
    return Section("series", "Series in run order", (text,), (), tuple(figures))


def _ordered(looked: Looked, prefix: str) -> list[Ordered]:
    found: dict[str, Start] = {}
    if looked.steady is not None:
        found = {start.name: start for start in looked.steady.starts}
    out = []
    for run in looked.cell.runs:
        levels: list[Level] = []
        places = [run.first + i for i, v in enumerate(run.values) if not isinstance(v, Missing)]
        if run.start in found:
            for s in found[run.start].segmentation.segments:
                first, last = places[s.start], places[s.start + s.length - 1]
                levels.append(Level(first, last, Estimate(s.median, s.low, s.high)))
        out.append(Ordered(f"{prefix}{run.start}", run.first, run.values, tuple(levels), looked.cell.arm))
    return out


def _distributions(data: Data, looked: tuple[Looked, ...], rules: Rules) -> Section:
    figures: list[Figure] = []
    for number, condition in enumerate(data.conditions, 1):
        groups = []
        for x in looked:
            if x.cell.condition != condition or x.steady is None or x.steady.headline is None:
                continue
            parts = [np.asarray(s.steady) for s in x.steady.starts if s.steady is not None]
            found = tuple(Quantile(p, _quantile(parts, p, 1 - rules.alpha)) for p in QUANTILES)
            pooled = tuple(float(v) for part in parts for v in part)
            groups.append(Group(x.cell.arm, pooled, found))
        if groups:
            title = f"Distribution of the steady parts: {words(data, condition)}"
            figures.append(
                Distributions(f"distribution-{number}", title, f"value, {rules.unit}", tuple(groups))
            )
    text = (
        "Diamonds are the median and the 90 % and 99 % quantiles. With one start, bounds are "
        "distribution-free and allow for serial correlation; with several, they are Student's t of the "
        "starts' own quantiles. A quantile that so few values cannot bound is not given.",
    )
    if not figures:
        text = ("No cell has a steady state, so there is no distribution to show.",)
    return Section("distributions", "Distributions", text, (), tuple(figures))


def _quantile(
    parts: list[np.ndarray[tuple[int, ...], np.dtype[np.float64]]], p: float, level: float
) -> Estimate:
    found = [quantile(part, p, level, max(0.0, serial(part).rho), 1 if p > 0.5 else 2) for part in parts]
    few = [x for x in found if isinstance(x, TooFew)]
    if few:
        return Estimate(Missing(State.NOT_POSSIBLE, str(few[0])))
    there = [x for x in found if not isinstance(x, TooFew)]
    if len(there) == 1:
        return Estimate(there[0].estimate, there[0].low, there[0].high)
    values = np.array([x.estimate for x in there])
    half = float(stats.t.ppf(0.5 + level / 2, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values)))
    return Estimate(float(values.mean()), float(values.mean()) - half, float(values.mean()) + half)


def _comparison(data: Data, base: str, compared: tuple[Compared, ...], rules: Rules) -> Section:
    rows: list[tuple[Cell, ...]] = []
    for c in compared:
        p: Number = Missing(State.NOT_POSSIBLE, c.why) if c.p is None else c.p
        verdict = c.why if c.found is None else c.found.conclusion.value
        how = "" if c.found is None else c.found.plan.value
        rows.append((c.arm, *c.condition, c.ratio, p, verdict, how))
    columns = (data.arm, *data.others, f"ratio to {base}", "p (Holm)", "conclusion", "compared as")
    table = Table("ratios", f"Every {data.arm} beside {base}", columns, tuple(rows))
    effects = tuple(Named(f"{c.arm}: {words(data, c.condition)}", c.ratio) for c in compared)
    figures: list[Figure] = [
        Forest(
            "effects", f"Ratio to {base}", f"ratio to {base} (1: no difference)", effects, 1.0, rules.margin
        )
    ]
    arms = [arm for arm in data.arms if arm != base]
    if len(data.conditions) > 1:
        lines = tuple(Line(a, tuple(_of(compared, a, c) for c in data.conditions)) for a in arms)
        names = tuple(words(data, c) for c in data.conditions)
        figures.append(Bars("ratio-bars", f"Ratio to {base}", "condition", "ratio", names, lines, 1.0))
    if len(data.others) > 1:
        figures += [_heat(data, base, arm, number, compared, rules) for number, arm in enumerate(arms, 1)]
    better = "smaller" if rules.smaller_is_better else "larger"
    text = (
        f"Ratios of means over those of {base}, steady parts only; {better} is better. Conclusions in the "
        "table are of each comparison by itself; p is adjusted for all of them together (Holm 1979).",
    )
    return Section("comparison", f"Comparison with {base}", text, (table,), tuple(figures))


def _of(compared: tuple[Compared, ...], arm: str, condition: tuple[str, ...]) -> Estimate:
    return next(c.ratio for c in compared if c.arm == arm and c.condition == condition)


def _heat(
    data: Data, base: str, arm: str, number: int, compared: tuple[Compared, ...], rules: Rules
) -> HeatMap:
    rows = tuple(dict.fromkeys(c[0] for c in data.conditions))
    columns = tuple(dict.fromkeys(c[1:] for c in data.conditions))
    here = {c.condition: c for c in compared if c.arm == arm}
    cells = tuple(
        tuple(_heat_cell(here.get((row, *column)), rules.alpha) for column in columns) for row in rows
    )
    names = tuple(", ".join(f"{n} {v}" for n, v in zip(data.others[1:], c, strict=True)) for c in columns)
    shown = tuple(f"{data.others[0]} {row}" for row in rows)
    return HeatMap(f"heat-{number}", f"Change from {base} to {arm}", "change, %", shown, names, cells)


def _heat_cell(found: Compared | None, alpha: float) -> HeatCell:
    if found is None:
        return HeatCell(Missing(State.NOT_MEASURED))
    value = found.ratio.value
    if isinstance(value, Missing):
        return HeatCell(value)
    return HeatCell(100 * (value - 1), None if found.p is None else found.p <= alpha)


def _factors(data: Data, looked: tuple[Looked, ...], rules: Rules) -> Section:
    figures: list[Figure] = []
    for number, name in enumerate(data.others):
        levels = tuple(dict.fromkeys(c[number] for c in data.conditions))
        lines = tuple(
            Line(arm, tuple(_over(looked, arm, number, level, len(data.others)) for level in levels))
            for arm in data.arms
        )
        id_ = f"factor-{number + 1}"
        figures.append(Factor(id_, f"{name} by {data.arm}", name, f"mean, {rules.unit}", levels, lines))
    several = len(data.others) > 1
    text = (
        "Lines that are not parallel show an interaction."
        + (
            " With several factors, a point is the plain mean over the levels of the others, without an "
            "interval, and missing where one of them is."
            if several
            else " Bounds are those of each mean."
        ),
    )
    return Section("factors", "Factors", text, (), tuple(figures))


def _over(looked: tuple[Looked, ...], arm: str, number: int, level: str, factors: int) -> Estimate:
    """The mean of cells at a level, which would be of other cells if one were left out."""
    cells = [x.headline for x in looked if x.cell.arm == arm and x.cell.condition[number] == level]
    conditions = {x.cell.condition for x in looked if x.cell.condition[number] == level}
    if len(cells) < len(conditions):
        return Estimate(Missing(State.NOT_MEASURED, "not at every level of the other factors"))
    if factors == 1 and len(cells) == 1:
        return cells[0]
    values = [c.value for c in cells if not isinstance(c.value, Missing)]
    if len(values) < len(cells):
        return Estimate(Missing(State.NOT_POSSIBLE, "a mean that it would take is missing"))
    return Estimate(float(np.mean(values)))


def _sizes(data: Data, base: str, looked: tuple[Looked, ...], rules: Rules) -> tuple[Sized, ...]:
    if data.size is None or data.size == data.arm or data.size not in data.others:
        return ()
    at = data.others.index(data.size)
    rests = tuple(dict.fromkeys((*c[:at], *c[at + 1 :]) for c in data.conditions))
    names = (*data.others[:at], *data.others[at + 1 :])
    found = []
    for number, rest in enumerate(rests, 1):
        where = ", ".join(f"{n} {v}" for n, v in zip(names, rest, strict=True))
        title = "Time against size" + (f": {where}" if where else "")
        found.append(sized(f"size-{number}", title, data, rest, base, looked, rules))
    return tuple(found)


def _size_section(by_size: tuple[Sized, ...]) -> Section:
    text = [
        "Points are means with intervals; broken lines are the model that predicts best, with the interval "
        "of its mean. The shaded band is where the data allow a crossover."
    ]
    for each in by_size:
        text += [crossing.statement for crossing in each.figure.crossings]
        text += list(each.notes)
    return Section("size", "Time against size", tuple(text), (), tuple(x.figure for x in by_size))
