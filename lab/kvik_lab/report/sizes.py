"""Time against size: models of each arm, and where two arms cross."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kvik_lab.errors import LabError
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
from kvik_lab.report.cells import Estimate, show
from kvik_lab.report.figures import Arm, Crossing, Point, SizeTime, Stretch
from kvik_lab.report.look import Looked, Rules
from kvik_lab.report.read import SIZES, Data

SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_BYTES = {"kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30}
PLACES = 40


@dataclass(frozen=True)
class Sized:
    """A figure, with each crossover or the reason that there is none: (arm, base, crossover or None, why)."""

    figure: SizeTime
    crossings: tuple[tuple[str, Crossover | None, str], ...]
    notes: tuple[str, ...]


def sized(
    id_: str,
    title: str,
    data: Data,
    rest: tuple[str, ...],
    base: str,
    looked: tuple[Looked, ...],
    rules: Rules,
) -> Sized:
    """Time against size where the other factors have the levels `rest`."""
    arms: list[Arm] = []
    samples: dict[str, Samples] = {}
    notes: list[str] = []
    for name in data.arms:
        cells = [x for x in looked if x.cell.arm == name and _rest(data, x.cell.condition) == rest]
        measured = tuple(Point(_size(data, x.cell.condition), x.headline) for x in cells)
        found, why = _samples(name, data, cells, rules)
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
        if measured:
            arms.append(Arm(name, measured, model, formula))
    means = {n for n, s in samples.items() if s.start is None and _many(n, looked)}
    crossings = tuple(_cross(name, base, samples, means, rules) for name in data.arms if name != base)
    shown = tuple(_crossing(found, data) for _, found, _ in crossings if found is not None)
    figure = SizeTime(id_, title, data.size or "size", f"mean, {rules.unit}", tuple(arms), shown)
    return Sized(figure, crossings, tuple(notes))


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


def _samples(name: str, data: Data, cells: list[Looked], rules: Rules) -> tuple[Samples | None, str]:
    """The steady values. Where each start ran one size, its mean is one measurement: starts are the unit."""
    if rules.unit not in SECONDS:
        return None, f"values in {rules.unit!r} are no times (s, ms, us, ns)"
    rows: list[tuple[float, float, str]] = []
    of_start: dict[str, set[float]] = {}
    for cell in cells:
        for start in cell.steady.starts if cell.steady is not None else ():
            if start.steady is None:
                continue
            size = _size(data, cell.cell.condition)
            of_start.setdefault(start.name, set()).add(size)
            rows += [(size, float(v), start.name) for v in start.steady]
    sizes = {row[0] for row in rows}
    if len(sizes) < 2:
        return None, f"steady values at {len(sizes)} sizes; a model takes two"
    unit, factor = factor_of(data)
    scale = SECONDS[rules.unit]
    try:
        if len(of_start) > 1 and all(len(s) == 1 for s in of_start.values()):
            means: dict[tuple[float, str], list[float]] = {}
            for size, value, start_name in rows:
                means.setdefault((size, start_name), []).append(value)
            x = np.array([key[0] for key in means]) * factor
            return Samples(name, unit, x, np.array([np.mean(v) for v in means.values()]) * scale), ""
        starts = np.array([row[2] for row in rows]) if len(of_start) > 1 else None
        x, y = np.array([row[0] for row in rows]) * factor, np.array([row[1] for row in rows]) * scale
        return Samples(name, unit, x, y, start=starts), ""
    except LabError as error:
        return None, str(error)


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


def _cross(
    name: str, base: str, samples: dict[str, Samples], means: set[str], rules: Rules
) -> tuple[str, Crossover | None, str]:
    lost = [n for n in (base, name) if n not in samples]
    if lost:
        return name, None, f"{lost[0]} has no model"
    try:
        found = crossover(samples[base], samples[name], level=1 - rules.alpha)
    except LabError as error:
        return name, None, str(error)
    if not means & {base, name}:
        return name, found, ""
    notes = tuple(n for n in found.notes if "no server starts are given" not in n)
    return name, replace(found, notes=("each start ran one size, so its mean is one measurement", *notes)), ""


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


def statement(found: Crossover, data: Data) -> str:
    """What is known of the crossover, in the size column's unit."""
    factor, unit = factor_of(data)[1], data.size or "size"
    first, second = found.names
    chance = (
        ""
        if found.none_in_range is None
        else (
            f" The probability that they do not cross within what was measured is {found.none_in_range:.2g}."
        )
    )
    if isinstance(found.region, NoCrossing):
        return f"{first} and {second} do not cross: {found.region.faster} is faster throughout.{chance}"
    ends = " or ".join(_ends(s, factor) for s in stretches(found)) or "nowhere"
    at = ", ".join(show(x / factor) for x in found.estimates) or "none inside"
    known = (
        "only an order of means is known"
        if isinstance(found.region, tuple)
        else f"{100 * found.level:g} % set"
    )
    return f"{first} and {second} cross at {at} {unit} ({known}: {ends}).{chance}"


def _ends(stretch: Stretch, factor: float) -> str:
    if stretch.low is None and stretch.high is None:
        return "any size"
    if stretch.high is None:
        return f"from {show((stretch.low or 0) / factor)} upwards"
    if stretch.low is None:
        return f"up to {show(stretch.high / factor)}"
    return f"{show(stretch.low / factor)} to {show(stretch.high / factor)}"


def _crossing(found: Crossover, data: Data) -> Crossing:
    factor = factor_of(data)[1]
    scaled = tuple(
        Stretch(*(None if end is None else end / factor for end in (s.low, s.high))) for s in stretches(found)
    )
    return Crossing(tuple(x / factor for x in found.estimates), scaled, statement(found, data))
