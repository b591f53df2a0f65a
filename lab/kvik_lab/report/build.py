"""A whole report of measurements: the answer, what it rests on, how it was reached, and what it cannot
say."""

from __future__ import annotations

import numpy as np

from kvik_lab.errors import LabError
from kvik_lab.infer.arrays import Floats, TooFew
from kvik_lab.infer.compare import Comparison
from kvik_lab.infer.judge import RULE
from kvik_lab.infer.order import quantile_over_starts
from kvik_lab.infer.states import State as ServerState
from kvik_lab.infer.states import states
from kvik_lab.report.answer import answer, where
from kvik_lab.report.cells import Estimate, Missing, State, show_estimate
from kvik_lab.report.figures import (
    Distributions,
    Factor,
    Figure,
    Group,
    Level,
    Line,
    Ordered,
    Quantile,
    RunOrder,
)
from kvik_lab.report.limits import limits
from kvik_lab.report.look import Compared, Looked, Rules, Settled, compare_all, look, settle_arms
from kvik_lab.report.model import Cell, Report, Section, Table
from kvik_lab.report.read import Data
from kvik_lab.report.sizes import Sized, sized

QUANTILES = (0.5, 0.9, 0.99)


def build_report(data: Data, rules: Rules, title: str) -> Report:
    """Examine every cell, compare every arm with the base, and write down what follows, the answer first.

    Raises LabError for a base that is no arm.
    """
    base = rules.base or data.arms[0]
    if base not in data.arms:
        raise LabError(f"the base {base!r} is no level of {data.arm}: {', '.join(data.arms)}")
    settled = settle_arms(data)
    looked = tuple(look(cell, rules, settled) for cell in data.cells)
    crossovers = _crossovers(data)
    compared = compare_all(data, base, rules, settled, crossovers)
    family = next((c.found.comparisons for c in compared if c.found is not None), max(1, crossovers))
    by_size = _sizes(data, base, looked, compared, rules, family)
    sections = [_measured(data, looked, settled, rules)]
    if by_size:
        sections.append(_size_section(by_size))
    sections += [_series(data, looked, rules), _distributions(data, looked, rules)]
    if any(name != data.size for name in data.others) and len(data.others) > 1:
        sections.append(_factors(data, looked, rules))
    if compared:
        sections.append(_tests(data, base, compared, rules))
    sections += [
        _method(base, _warm_up(settled.cut, looked), rules, family),
        limits(data, looked, compared, by_size, rules),
    ]
    return Report(title, tuple(sections), answer(data, base, compared, by_size, rules))


def _measured(data: Data, looked: tuple[Looked, ...], settled: Settled, rules: Rules) -> Section:
    rows: list[tuple[Cell, ...]] = []
    percentiles: list[tuple[Cell, ...]] = []
    mixtures: list[tuple[Cell, ...]] = []
    shown = [
        p for p in QUANTILES if any(not isinstance(_percentile(x, p, rules).value, Missing) for x in looked)
    ]
    for condition in data.conditions:
        for arm in data.arms:
            found = next((x for x in looked if x.cell.arm == arm and x.cell.condition == condition), None)
            if found is None:
                nothing = Missing(State.NOT_MEASURED)
                rows.append((arm, *condition, 0.0, 0.0, 0.0, Estimate(nothing), "no row in the data"))
                continue
            rows.append((arm, *condition, *_counts(found), found.headline, _remark(found)))
            if found.steady is not None and found.steady.steady:
                percentiles.append((arm, *condition, *(_percentile(found, p, rules) for p in shown)))
                mixtures += [(arm, *condition, *_mixture(s)) for s in states(found.steady, rules.alpha)]
    columns = (data.arm, *data.others)
    tables = [
        Table(
            "cells",
            "Means over starts",
            (*columns, "starts", "left out", "values missing", f"mean, {rules.unit}", "remarks"),
            tuple(rows),
        )
    ]
    if shown:
        names = tuple(f"p{100 * p:g}, {rules.unit}" for p in shown)
        tables.append(Table("percentiles", "Percentiles over starts", (*columns, *names), tuple(percentiles)))
    if mixtures:
        names = (f"level, {rules.unit}", "share of iterations, %", "starts in it")
        note = "A mean over states is that of the mixture, and holds only for these shares."
        tables.append(Table("states", "States that alternate", (*columns, *names), tuple(mixtures), note))
    same = [f"{name} was {value} throughout." for name, value in data.constant.items()]
    told = [f"{arm}: {found}." for arm, found in settled.arms.items() if found is not None and str(found)]
    files = ", ".join(_file(source) for source in data.sources)
    text = (f"{len(data.cells)} combinations were run, from {files}.", *same, *told)
    return Section("measured", "What was measured", text, tuple(tables))


def _file(source: str) -> str:
    return source.rpartition("/")[2]


def _counts(found: Looked) -> tuple[float, float, float]:
    values = [v for run in found.cell.runs for v in run.values]
    left = 0 if found.steady is None else sum(found.steady.odd)
    return float(len(found.cell.runs)), float(left), float(sum(isinstance(v, Missing) for v in values))


def _remark(found: Looked) -> str:
    if found.steady is None or found.steady.headline is None:
        return found.why
    parts = []
    left = [s.name for s, odd in zip(found.steady.starts, found.steady.odd, strict=True) if odd]
    if left and found.steady.all_kept is not None:
        kept = found.steady.all_kept
        whole = show_estimate(Estimate(kept.estimate, kept.low, kept.high))
        parts.append(f"odd: {', '.join(left)}; with all kept {whole}")
    if len(found.steady.starts) == 1:
        parts.append("one start: its interval says nothing of others")
    if found.steady.unlike:
        parts.append(f"changes in mid-run: {', '.join(found.steady.unlike)}")
    return "; ".join(parts)


def _percentile(found: Looked, p: float, rules: Rules) -> Estimate:
    if found.steady is None or not found.steady.steady:
        return Estimate(Missing(State.NOT_POSSIBLE))
    parts = [x for x, odd in zip(found.steady.steady, found.steady.odd, strict=True) if not odd]
    one = quantile_over_starts(parts, p, 1 - rules.alpha)
    if isinstance(one, TooFew):
        what = "starts" if one.what.endswith("(starts)") else "values a start"
        return Estimate(Missing(State.NOT_POSSIBLE, f"takes {one.needed} {what}"))
    return Estimate(one.estimate, one.low, one.high)


def _mixture(found: ServerState) -> tuple[Cell, ...]:
    level = _bounded(found.level.estimate, found.level.low, found.level.high)
    share = _bounded(*(100 * x for x in (found.share.estimate, found.share.low, found.share.high)))
    return level, share, float(found.starts)


def _bounded(value: float, low: float, high: float) -> Estimate:
    return Estimate(value, low, high) if np.isfinite(low) else Estimate(value)


def _series(data: Data, looked: tuple[Looked, ...], rules: Rules) -> Section:
    figures: list[Figure] = []
    for number, condition in enumerate(data.conditions, 1):
        series = [
            s for x in looked if x.cell.condition == condition for s in _ordered(x, f"{x.cell.arm}, start ")
        ]
        title = f"In run order: {where(data, condition) or 'all'}"
        figures.append(RunOrder(f"series-{number}", title, f"value, {rules.unit}", tuple(series)))
    text = (
        "One colour a start, in the order in which starts are listed, from blue to red. Points are values in "
        "the order of their iterations; lines are the levels that were found. Crosses are starts that were "
        "left out as odd."
    )
    return Section("series", "Series in run order", (text,), (), tuple(figures))


def _ordered(looked: Looked, prefix: str) -> list[Ordered]:
    found = {} if looked.steady is None else {s.name: s for s in looked.steady.starts}
    odd = {} if looked.steady is None else dict(zip(found, looked.steady.odd, strict=True))
    out = []
    for run in looked.cell.runs:
        levels: list[Level] = []
        places = [run.first + i for i, v in enumerate(run.values) if not isinstance(v, Missing)]
        if run.start in found:
            for s in found[run.start].segmentation.segments:
                first, last = places[s.start], places[s.start + s.length - 1]
                levels.append(Level(first, last, Estimate(s.median, s.low, s.high)))
        name = f"{prefix}{run.start}"
        left = odd.get(run.start, False)
        out.append(Ordered(name, run.first, run.values, tuple(levels), looked.cell.arm, left))
    return out


def _distributions(data: Data, looked: tuple[Looked, ...], rules: Rules) -> Section:
    figures: list[Figure] = []
    for number, condition in enumerate(data.conditions, 1):
        groups = []
        for x in looked:
            if x.cell.condition != condition or x.steady is None or not x.steady.steady:
                continue
            parts: list[Floats] = [p for p, odd in zip(x.steady.steady, x.steady.odd, strict=True) if not odd]
            found = tuple(Quantile(p, _percentile(x, p, rules)) for p in QUANTILES)
            groups.append(Group(x.cell.arm, tuple(float(v) for part in parts for v in part), found))
        if groups:
            title = f"Distribution of the steady parts: {where(data, condition) or 'all'}"
            figures.append(
                Distributions(f"distribution-{number}", title, f"value, {rules.unit}", tuple(groups))
            )
    text = "Diamonds are the percentiles of a typical start, with their intervals over starts."
    if not figures:
        text = "No cell has a steady state, so there is no distribution to show."
    return Section("distributions", "Distributions", (text,), (), tuple(figures))


def _tests(data: Data, base: str, compared: tuple[Compared, ...], rules: Rules) -> Section:
    rows: list[tuple[Cell, ...]] = []
    for c in compared:
        if c.found is None or c.found.p is None:
            none = Missing(State.NOT_POSSIBLE)
            rows.append(
                (c.arm, *c.condition, none, none, none, "" if c.found is None else c.found.plan.value)
            )
            continue
        change = c.found.difference
        amount = None if change is None else Estimate(change.estimate, change.low, change.high)
        rows.append((c.arm, *c.condition, amount, f"{c.found.p:.2g}", _exact(c.found), c.found.plan.value))
    columns = (data.arm, *data.others, f"less {base}, {rules.unit}", "p", "p, exact test", "compared as")
    table = Table("tests", f"Every {data.arm} beside {base}", columns, tuple(rows))
    text = (
        "The verdicts above come from the intervals of the ratios. Here are the differences in the unit of "
        "the values, and p-values that are adjusted for all intervals of the page.",
    )
    return Section("comparison", f"Comparison with {base}", text, (table,))


def _exact(found: Comparison) -> str:
    if found.exact_p is None:
        return f"cannot reject with {found.starts} starts; {found.exact_starts} could"
    return f"{found.exact_p:.2g}"


def _warm_up(cut: int, looked: tuple[Looked, ...]) -> str:
    """What is left out as warm-up: of every start, and where starts are too few to share one, of each."""
    own = max((x.steady.left_out for x in looked if x.steady is not None), default=0)
    told = ""
    if cut:
        told = f"The first {cut} iterations of every start are left out: the longest warm-up of an arm."
    elif not own:
        told = "No warm-up is left out: no arm has one that its starts share."
    if own > cut:
        told += " Of an arm with one start or two each start's own warm-up is left out, "
        told += f"up to {own} iterations."
    return told.strip()


def _method(base: str, cut: str, rules: Rules, family: int) -> Section:
    level = f"{100 * (1 - rules.alpha):g} %"
    each = f", each at {100 * (1 - rules.alpha / family):.4g} %," if family > 1 else ""
    text = (
        "The unit is the server start: of each the mean after the warm-up counts, as its logarithm. Ratios "
        f"are those of an arm over {base}, with Student's t over starts (Welch), over pairs where blocks "
        "hold one start of each arm, and within blocks where they hold more.",
        f"The {family} intervals of the page{each} hold together with {level} at least (Bonferroni), "
        "crossovers among them. The verdict is read from the interval: it excludes 1, or lies within the "
        "margin, or neither.",
        f"Warm-up, drift and late changes are judged over all starts of an arm together. {cut}",
        f"Odd starts: {RULE}. The rule was fixed before these data were seen.",
        "Means and percentiles of an arm by itself have intervals of their own, which do not count among "
        "those of the page.",
    )
    return Section("method", "How it was reached", text)


def _factors(data: Data, looked: tuple[Looked, ...], rules: Rules) -> Section:
    figures: list[Figure] = []
    for number, name in enumerate(data.others):
        if name == data.size:
            continue
        levels = tuple(dict.fromkeys(c[number] for c in data.conditions))
        lines = tuple(
            Line(arm, tuple(_over(looked, arm, number, level) for level in levels)) for arm in data.arms
        )
        title = f"{name}: mean over the other factors"
        figures.append(Factor(f"factor-{number + 1}", title, name, f"mean, {rules.unit}", levels, lines))
    text = "Means of the means of all combinations at a level, with no interval; one line for each arm."
    return Section("factors", "Factors", (text,), (), tuple(figures))


def _over(looked: tuple[Looked, ...], arm: str, number: int, level: str) -> Estimate:
    """The mean of an arm's cells at a level. All are over the same levels of the other factors, or their
    differences would be of these."""

    def rest(one: Looked) -> tuple[str, ...]:
        return one.cell.condition[:number] + one.cell.condition[number + 1 :]

    here = [x for x in looked if x.cell.arm == arm and x.cell.condition[number] == level]
    if {rest(x) for x in here} < {rest(x) for x in looked}:
        return Estimate(Missing(State.NOT_MEASURED, "not at every level of the other factors"))
    cells = [x.headline for x in here]
    values = [c.value for c in cells if not isinstance(c.value, Missing)]
    if len(values) < len(cells):
        return Estimate(Missing(State.NOT_POSSIBLE, "a mean that it would take is missing"))
    return Estimate(float(np.mean(values)))


def _rests(data: Data) -> tuple[tuple[str, ...], ...]:
    """The levels of the factors beside the size, each under which time is drawn against it."""
    if data.size is None or data.size == data.arm or data.size not in data.others:
        return ()
    at = data.others.index(data.size)
    return tuple(dict.fromkeys((*c[:at], *c[at + 1 :]) for c in data.conditions))


def _crossovers(data: Data) -> int:
    return len(_rests(data)) * (len(data.arms) - 1)


def _sizes(
    data: Data,
    base: str,
    looked: tuple[Looked, ...],
    compared: tuple[Compared, ...],
    rules: Rules,
    family: int,
) -> tuple[Sized, ...]:
    level = 1 - rules.alpha / family
    return tuple(
        sized(f"size-{number}", data, rest, base, looked, compared, rules, level)
        for number, rest in enumerate(_rests(data), 1)
    )


def _size_section(by_size: tuple[Sized, ...]) -> Section:
    text = [
        "Points are means with intervals; broken lines are the model that predicts best, with the interval "
        "of its mean. The shaded band is where the data allow a crossover, among the sizes measured."
    ]
    for each in by_size:
        text += [f"At {each.at}: {note}" if each.at else note for note in each.notes]
    return Section("size", "Time against size", tuple(text), (), tuple(x.figure for x in by_size))
