"""Each figure as a table of the data that it shows."""

from __future__ import annotations

from collections.abc import Iterator

from kvik_lab.report.cells import show
from kvik_lab.report.figures import (
    Bars,
    Curve,
    Distributions,
    Factor,
    Figure,
    Forest,
    HeatMap,
    Lines,
    Mark,
    Roofline,
    RunOrder,
    SizeTime,
    Waterfall,
)
from kvik_lab.report.model import Cell, Table

Row = tuple[Cell, ...]


def as_table(figure: Figure) -> Table:
    """The figure's data; its id is the figure's with `-data` after it."""
    columns, rows = _parts(figure)
    return Table(f"{figure.id}-data", f"{figure.title}: data", columns, tuple(rows), _note(figure))


def _parts(figure: Figure) -> tuple[tuple[str, ...], Iterator[Row]]:
    match figure:
        case RunOrder():
            return ("series", "from", "to", figure.y), _run_order(figure)
        case Distributions():
            return ("group", "n", "quantile", figure.x), _distributions(figure)
        case Forest():
            return ("effect", figure.x), ((e.name, e.estimate) for e in figure.effects)
        case Factor() | Bars():
            names = tuple(line.name for line in figure.lines)
            cells = zip(figure.levels, *(line.cells for line in figure.lines), strict=True)
            return (figure.x, *names), iter(cells)
        case SizeTime():
            return ("arm", "what", figure.x, figure.y), _size_time(figure)
        case Waterfall():
            return ("", "part", figure.x), _waterfall(figure)
        case HeatMap():
            return ("", *figure.columns), _heat_map(figure)
        case Lines():
            return ("curve", figure.x, figure.y), _curves(figure.curves, figure.marks)
        case Roofline():
            return ("curve", figure.x, figure.y), _curves(figure.ceilings + figure.measured, figure.marks)


def _note(figure: Figure) -> str:
    if isinstance(figure, SizeTime):
        return " ".join(crossing.statement for crossing in figure.crossings)
    if isinstance(figure, HeatMap):
        return f"{figure.unit}. * significant, (n.s.) tested and not significant, no mark: not tested."
    return ""


def _run_order(figure: RunOrder) -> Iterator[Row]:
    for series in figure.series:
        for level in series.levels:
            yield (series.name, str(level.first), str(level.last), level.level)
        # All in one cell: a row for each would make most of the page.
        last = series.first + len(series.values) - 1
        yield (series.name, str(series.first), str(last), ", ".join(map(show, series.values)))


def _distributions(figure: Distributions) -> Iterator[Row]:
    for group in figure.groups:
        for quantile in group.quantiles:
            yield (group.name, str(len(group.values)), f"{quantile.probability:g}", quantile.estimate)


def _size_time(figure: SizeTime) -> Iterator[Row]:
    for arm in figure.arms:
        for point in arm.measured:
            yield (arm.name, "measured", point.x, point.y)
        for point in arm.model:
            yield (arm.name, arm.formula or "model", point.x, point.y)


def _waterfall(figure: Waterfall) -> Iterator[Row]:
    for stack in figure.stacks:
        for part in stack.parts:
            yield (stack.name, part.name, part.value)
        if stack.total is not None:
            yield (stack.name, "measured total", stack.total)


def _heat_map(figure: HeatMap) -> Iterator[Row]:
    mark = {True: " *", False: " (n.s.)", None: ""}
    for name, row in zip(figure.rows, figure.cells, strict=True):
        shown: list[Cell] = []
        for cell in row:
            if isinstance(cell.value, float | int):
                note = f" {cell.note}" if cell.note else ""
                shown.append(f"{cell.value:.4g}{mark[cell.significant]}{note}")
            else:
                shown.append(cell.value)
        yield (name, *shown)


def _curves(curves: tuple[Curve, ...], marks: tuple[Mark, ...]) -> Iterator[Row]:
    for curve in curves:
        for point in curve.points:
            yield (curve.name, point.x, point.y)
    for mark in marks:
        reach = mark.stretch
        low, high = (None, None) if reach is None else (reach.low, reach.high)
        ends = "" if reach is None else f" ({_end(low)} to {_end(high)})"
        yield (f"{mark.name}{ends}", mark.x, None)


def _end(value: float | None) -> str:
    return "open" if value is None else f"{value:.4g}"
