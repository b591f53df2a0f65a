"""Time against size: models of each arm, and where two arms cross."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from kvik_lab.errors import LabError
from kvik_lab.infer.arrays import Floats
from kvik_lab.infer.compare import Conclusion
from kvik_lab.infer.judge import MOST_ODD
from kvik_lab.physics.crossover import (
    AboveOnly,
    BelowOnly,
    Bounded,
    Bracket,
    Crossover,
    Everywhere,
    NoCrossing,
    Several,
    crossover,
)
from kvik_lab.physics.data import Samples
from kvik_lab.physics.fit import rank
from kvik_lab.physics.models import Inputs
from kvik_lab.physics.predict import predict
from kvik_lab.report.cells import Estimate, short, show
from kvik_lab.report.figures import Arm, Crossing, Point, SizeTime, Stretch
from kvik_lab.report.look import Compared, Looked, Rules
from kvik_lab.report.read import SIZES, Data

SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_BYTES = {"kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30}
PLACES = 40


Crossed = tuple[str, Crossover | None, str]
"""An arm, its crossover with the base or None, and why there is none."""


@dataclass(frozen=True)
class Sized:
    """A figure, with each crossover or the reason that there is none.

    `at` says which levels the other factors have, and is empty where there are none."""

    figure: SizeTime
    at: str
    crossings: tuple[Crossed, ...]
    notes: tuple[str, ...]


def sized(
    id_: str,
    data: Data,
    rest: tuple[str, ...],
    base: str,
    looked: tuple[Looked, ...],
    compared: tuple[Compared, ...],
    rules: Rules,
    level: float,
) -> Sized:
    """Time against size where the other factors have the levels `rest`; crossovers have intervals at
    `level`. One that the comparisons at single sizes contradict is not given."""
    names = (n for n in data.others if n != data.size)
    at = ", ".join(f"{n} {v}" for n, v in zip(names, rest, strict=True))
    arms: list[Arm] = []
    samples: dict[str, Samples] = {}
    notes: list[str] = []
    left: list[str] = []
    for name in data.arms:
        cells = [x for x in looked if x.cell.arm == name and _rest(data, x.cell.condition) == rest]
        measured = tuple(Point(_size(data, x.cell.condition), x.headline) for x in cells)
        found, why, without = _samples(name, data, cells, rules)
        model: tuple[Point, ...] = ()
        formula = ""
        if found is not None:
            samples[name] = found
            try:
                model, formula = _model(found, data, rules)
            except LabError as error:
                why = str(error)
        if why:
            notes.append(f"{name}: no model: {why}")
        left += [f"{name}: {without}"] if without else []
        if measured:
            arms.append(Arm(name, measured, model, formula))
    here = [one for one in compared if _rest(data, one.condition) == rest]
    means = {n for n, s in samples.items() if s.start is None and _many(n, looked)}
    crossings = tuple(_cross(name, base, samples, means, level) for name in data.arms if name != base)
    crossings = tuple(
        (arm, None if found is None else replace(found, notes=(*found.notes, *_of(left, arm, base))), why)
        for arm, found, why in (_held_against(here, one, base, data) for one in crossings)
    )
    notes += [f"{one}." for one in left]
    shown = tuple(_crossing(found, data) for _, found, _ in crossings if found is not None)
    title = "Time against size" + (f": {at}" if at else "")
    figure = SizeTime(id_, title, data.size or "size", f"mean, {rules.unit}", tuple(arms), shown)
    return Sized(figure, at, crossings, tuple(notes))


def _held_against(compared: Sequence[Compared], crossing: Crossed, base: str, data: Data) -> Crossed:
    """A crossover of models, if what is decided at single sizes is in the order that it gives."""
    arm, found, _ = crossing
    if found is None:
        return crossing
    decided = [
        (_size(data, one.condition), one.found.ratio.estimate > 1)
        for one in compared
        if one.arm == arm and one.found is not None and one.found.ratio is not None
        if one.found.conclusion in (Conclusion.DIFFERENT, Conclusion.BOTH)
    ]
    said = measured(found, data)
    orders = [{slower for _, slower in decided}]
    if said.known is Known.BOUNDED and said.low is not None and said.high is not None:
        orders = [
            {slower for size, slower in decided if size < said.low},
            {not slower for size, slower in decided if size > said.high},
        ]
    elif said.known is Known.OUTSIDE and not isinstance(found.region, tuple):
        orders.append({_faster(found) == base})
    elif said.known is Known.OPEN or said.known is Known.ORDER:
        return crossing
    if len(set().union(*orders)) < 2:
        return crossing
    above, below = (
        ", ".join(show(size) for size, slower in decided if slower is wanted) or "none"
        for wanted in (True, False)
    )
    why = f"the models' order is not that of single sizes: {arm} is above {base} at {above}, below at {below}"
    return arm, None, why


def _of(notes: Sequence[str], *arms: str) -> tuple[str, ...]:
    return tuple(note for note in notes if note.startswith(tuple(f"{arm}: " for arm in arms)))


def _many(name: str, looked: tuple[Looked, ...]) -> bool:
    return any(len(x.cell.runs) > 1 for x in looked if x.cell.arm == name)


def _rest(data: Data, condition: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(v for n, v in zip(data.others, condition, strict=True) if n != data.size)


def _size(data: Data, condition: tuple[str, ...]) -> float:
    return float(condition[data.others.index(data.size or "")])


def factor_of(data: Data) -> tuple[str, float]:
    """The unit that the physics counts the size column in, and what one of the column's is in it."""
    name = (data.size or "").lower().rpartition("_")[2]
    return ("tokens", 1.0) if name not in SIZES or name == "tokens" else ("bytes", _BYTES.get(name, 1.0))


_Steady = tuple[float, str, Floats]
"""A size, a start, and its steady values there."""


def _samples(name: str, data: Data, cells: list[Looked], rules: Rules) -> tuple[Samples | None, str, str]:
    """The steady values, why there are none, and which starts are not among them. Where each start ran one
    size, its mean is one measurement: starts are the unit."""
    if rules.unit not in SECONDS:
        return None, f"values in {rules.unit!r} are no times (s, ms, us, ns)", ""
    rows: list[_Steady] = []
    odd: set[tuple[float, str]] = set()
    for cell in cells:
        if cell.steady is None or not cell.steady.steady:
            continue
        size = _size(data, cell.cell.condition)
        for start, values, out in zip(cell.steady.starts, cell.steady.steady, cell.steady.odd, strict=True):
            rows.append((size, start.name, values))
            odd |= {(size, start.name)} if out else set()
    rows, left = _kept(rows, odd)
    if len(sizes := {size for size, _, _ in rows}) < 2:
        return None, f"steady values at {len(sizes)} sizes; a model takes two", left
    unit, factor = factor_of(data)
    scale = SECONDS[rules.unit]
    starts = {start for _, start, _ in rows}
    try:
        if len(starts) > 1 and len(starts) == len(rows):
            x = np.array([size for size, _, _ in rows]) * factor
            return Samples(name, unit, x, np.array([v.mean() for _, _, v in rows]) * scale), "", left
        x = np.concatenate([np.full(len(v), size) for size, _, v in rows]) * factor
        y = np.concatenate([v for _, _, v in rows]) * scale
        each = np.concatenate([np.full(len(v), start) for _, start, v in rows]) if len(starts) > 1 else None
        return Samples(name, unit, x, y, start=each), "", left
    except LabError as error:
        return None, str(error), left


def _kept(rows: list[_Steady], odd: set[tuple[float, str]]) -> tuple[list[_Steady], str]:
    """The rows that a model is made of, and what was left out.

    A model takes each start at every size. So a start that is odd at one size, or was not measured at one,
    is left out at all of them, where those are a third of the starts at most (`judge.RULE`); of more, the odd
    ones are kept.
    """
    measured: dict[str, set[float]] = {}
    for size, start, _ in rows:
        measured.setdefault(start, set()).add(size)
    sizes = {size for size, _, _ in rows}
    if all(len(found) == 1 for found in measured.values()):
        return [row for row in rows if (row[0], row[1]) not in odd], ""
    short = {start for start, found in measured.items() if found != sizes}
    strange = {start for _, start in odd}
    most = len(measured) * MOST_ODD
    for out, why in ((short | strange, "odd, or not measured, at a size"), (short, "not measured at a size")):
        if len(out) <= most:
            kept = [row for row in rows if row[1] not in out]
            stays = strange - out
            said = [f"start {', '.join(sorted(out))} is left out of the model: {why}"] if out else []
            said += [f"start {', '.join(sorted(stays))} is odd at a size, and kept"] if stays else []
            return kept, "; ".join(said)
    return rows, ""


def _model(samples: Samples, data: Data, rules: Rules) -> tuple[tuple[Point, ...], str]:
    best = rank(samples)[0]
    factor, scale = factor_of(data)[1], SECONDS[rules.unit]
    x = np.linspace(samples.sizes[0], samples.sizes[-1], PLACES)
    at = Inputs(x, x if samples.unit == "tokens" else np.ones_like(x), np.ones_like(x))
    points = []
    for size, p in zip(x, predict(samples, best, at, level=1 - rules.alpha), strict=True):
        low, high = (None if end is None else end / scale for end in (p.lo, p.hi))
        points.append(Point(float(size) / factor, Estimate(p.seconds / scale, low, high)))
    return tuple(points), best.model.formula


def _cross(name: str, base: str, samples: dict[str, Samples], means: set[str], level: float) -> Crossed:
    lost = [n for n in (base, name) if n not in samples]
    if lost:
        return name, None, f"{lost[0]} has no model"
    try:
        found = crossover(samples[base], samples[name], level=level)
    except LabError as error:
        return name, None, str(error)
    if not means & {base, name}:
        return name, found, ""
    notes = tuple(n for n in found.notes if "no server starts are given" not in n)
    return name, replace(found, notes=("each start ran one size, so its mean is one measurement", *notes)), ""


class Known(Enum):
    """What is known of a crossover within the sizes that were measured."""

    BOUNDED = "bounded"
    """They cross there, and the interval lies there."""
    OUTSIDE = "not in the measured range"
    UNORDERED = "in one order, and not known in which"
    """They keep one order there; which is faster is not decided."""
    OPEN = "open"
    """They may cross there or not."""
    ORDER = "order of means"
    """Nothing is known of the errors."""


@dataclass(frozen=True)
class Measured:
    """A crossover as far as sizes were measured: `low` and `high` are the ends of what the data allow there,
    in the size column's unit; None where it is not there."""

    known: Known
    estimate: float | None
    low: float | None
    high: float | None
    sentence: str


def measured(found: Crossover, data: Data) -> Measured:
    """What is known within the measured sizes; nothing is said beyond them."""
    factor, unit = factor_of(data)[1], data.size or "size"
    first, second = found.names
    lo, hi = found.range
    reach = f"{show(lo / factor)} to {show(hi / factor)} {unit}"
    inside = [x for x in found.estimates if lo <= x <= hi]
    cuts = [(max(lo, s.low or lo), min(hi, s.high or hi)) for s in stretches(found)]
    cuts = [(low, high) for low, high in cuts if low <= high]
    estimate = inside[0] / factor if len(inside) == 1 else None
    if isinstance(found.region, tuple):
        if not inside:
            return Measured(
                Known.OUTSIDE, None, None, None, f"{first} and {second} keep their order: {reach}."
            )
        text = f"The means of {first} and {second} change order near {short(inside[0] / factor)} {unit}."
        return Measured(Known.ORDER, estimate, cuts[0][0] / factor, cuts[-1][1] / factor, text)
    none = found.none_in_range or 0.0
    if not cuts or max(found.faster_throughout or (0.0,)) >= found.level:
        faster = _faster(found)
        text = (
            f"{first} and {second} do not cross in the measured range, "
            f"{reach}: {faster} is faster throughout."
        )
        return Measured(Known.OUTSIDE, None, None, None, text)
    if none >= found.level:  # as where each start is fast or slow at all sizes alike
        text = (
            f"{first} and {second} keep one order in the measured range, {reach}; "
            "which is faster is not decided."
        )
        return Measured(Known.UNORDERED, None, None, None, text)
    ends = cuts[0][0], cuts[-1][1]
    low, high = ends[0] / factor, ends[1] / factor
    # An end of what was measured is told as it was set.
    between = " to ".join((show if x in (lo, hi) else short)(x / factor) for x in ends) + f" {unit}"
    if none <= 1 - found.level and estimate is not None and len(cuts) == 1:
        text = (
            f"{first} and {second} cross at {short(estimate)} {unit} ({100 * found.level:.4g} %: {between})."
        )
        return Measured(Known.BOUNDED, estimate, low, high, text)
    text = (
        f"Whether {first} and {second} cross in the measured range, {reach}, is not decided; if they do, "
        f"then at {between}. Probability that they do not: {none:.2g}."
    )
    return Measured(Known.OPEN, estimate, low, high, text)


def _faster(found: Crossover) -> str:
    if isinstance(found.region, NoCrossing):
        return found.region.faster
    first, second = found.faster_throughout or (0.0, 0.0)
    return found.names[0] if first >= second else found.names[1]


def stretches(found: Crossover) -> tuple[Stretch, ...]:
    """The set of crossovers as stretches, in the physics' unit."""
    region = found.region
    match region:
        case Bounded():
            return (Stretch(region.lo, region.hi),)
        case AboveOnly():
            return (Stretch(region.lo, None),)
        case BelowOnly():
            return (Stretch(None, region.hi),)
        case Everywhere():
            return (Stretch(None, None),)
        case Several():
            return tuple(Stretch(lo, hi) for lo, hi in region.stretches)
        case NoCrossing():
            return ()
    return tuple(Stretch(b.lo, b.hi) for b in region if isinstance(b, Bracket))


def _crossing(found: Crossover, data: Data) -> Crossing:
    known = measured(found, data)
    shown = () if known.low is None else (Stretch(known.low, known.high),)
    return Crossing(() if known.estimate is None else (known.estimate,), shown, known.sentence)
