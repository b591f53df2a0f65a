"""Each figure as what plotly draws: traces and a layout, plain JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain, groupby
from typing import Any

from kvik_lab.report.cells import Missing, known, show, show_estimate
from kvik_lab.report.draw_heat import heat_map
from kvik_lab.report.figures import (
    Bars,
    Distributions,
    Factor,
    Figure,
    Forest,
    HeatMap,
    Line,
    Lines,
    Ordered,
    Point,
    Roofline,
    RunOrder,
    SizeTime,
    Waterfall,
)
from kvik_lab.report.marks import (
    GREY,
    Json,
    absent,
    absent_points,
    axis,
    band,
    categories,
    colour,
    faint,
    foot,
    label,
    level_line,
    mark_shapes,
    place,
    point_traces,
    reach,
    spectrum,
    upright,
)

ROW = 30
"""Pixels of a row in figures whose height follows their rows."""


def draw(figure: Figure) -> Json:
    """Traces (`data`) and `layout`; every name in them is escaped."""
    match figure:
        case RunOrder():
            return _run_order(figure)
        case Distributions():
            return _distributions(figure)
        case Forest():
            return _forest(figure)
        case Factor() | Bars():
            return _factor(figure) if isinstance(figure, Factor) else _bars(figure)
        case SizeTime():
            return _size_time(figure)
        case Waterfall():
            return _waterfall(figure)
        case HeatMap():
            return heat_map(figure)
        case Lines():
            return _lines(figure)
        case Roofline():
            return _roofline(figure)


def _run_order(figure: RunOrder) -> Json:
    """A panel for each group, beside each other on one scale, and in it one colour a series."""
    panels: dict[str, list[Ordered]] = {}
    for series in figure.series:
        panels.setdefault(series.group or series.name, []).append(series)
    data: list[Json] = []
    notes: list[Json] = []
    layout: Json = {"yaxis": axis(figure.y), "annotations": notes, "height": 320, "showlegend": False}
    width = 1.0 / max(1, len(panels))
    for at, (name, group) in enumerate(panels.items()):
        suffix = "" if at == 0 else str(at + 1)
        ends = [
            at * width + (0.02 if at else 0.0),
            (at + 1) * width - (0.02 if at + 1 < len(panels) else 0.0),
        ]
        layout[f"xaxis{suffix}"] = axis("iteration", domain=ends, anchor="y")
        corner = {"x": ends[0], "xref": "paper", "xanchor": "left"}
        corner |= {"y": 1.0, "yref": "paper", "yanchor": "bottom"}
        notes.append({"text": f"<b>{label(name)}</b>", "showarrow": False, **corner})
        for k, series in enumerate(group):
            data += _ordered(series, spectrum(k, len(group)), f"x{suffix}")
            notes += [note for note in _gone(series, f"x{suffix}") if note not in notes]
    return {"data": data, "layout": layout}


def _gone(series: Ordered, xref: str) -> list[Json]:
    """Words where values are missing."""
    out: list[Json] = []
    at = series.first
    for value, run in groupby(series.values, lambda v: v if isinstance(v, Missing) else None):
        count = len(list(run))
        if isinstance(value, Missing):
            out.append(absent(value, **foot(at + (count - 1) / 2), xref=xref))
        at += count
    return out


def _ordered(series: Ordered, tone: str, xaxis: str) -> list[Json]:
    drawn: list[Json] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": label(series.name),
            "xaxis": xaxis,
            "text": label(series.name, 90),
            "hovertemplate": "%{text}<br>%{x}: %{y}<extra></extra>",
            "x0": series.first,
            "dx": 1,
            "y": [known(value) for value in series.values],
            "line": {"color": faint(tone, 0.25), "width": 1},
            "marker": {
                "color": tone,
                "size": 6 if series.odd else 4,
                "symbol": "x" if series.odd else "circle",
            },
        }
    ]
    for level in series.levels:
        value = known(level.level.value)
        if value is None:
            continue
        ends = [level.first - 0.5, level.last + 0.5]
        shared: Json = {"type": "scatter", "mode": "lines", "xaxis": xaxis}
        text = label(f"{series.name}, {level.first} to {level.last}: {show_estimate(level.level)}", 90)
        drawn.append(
            {**shared, "x": ends, "y": [value] * 2, "line": {"color": tone, "width": 2}, "hovertext": text}
        )
    return drawn


def _distributions(figure: Distributions) -> Json:
    data: list[Json] = []
    for at, group in enumerate(figure.groups):
        ordered = sorted(group.values)
        tone = colour(at)
        shares = [round((i + 1) / len(ordered), 6) for i in range(len(ordered))]
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": label(group.name),
                "legendgroup": str(at),
                "x": ordered,
                "y": shares,
                "line": {"color": tone, "shape": "hv", "width": 1.8},
            }
        )
        there = [q for q in group.quantiles if known(q.estimate.value) is not None]
        if there:
            names = [f"{group.name}, quantile {q.probability:g}: {show_estimate(q.estimate)}" for q in there]
            points: Json = {
                "type": "scatter",
                "mode": "markers",
                "showlegend": False,
                "legendgroup": str(at),
                "x": [known(q.estimate.value) for q in there],
                "y": [q.probability for q in there],
                "text": [label(name, 90) for name in names],
                "hovertemplate": "%{text}<extra></extra>",
                "marker": {"color": tone, "size": 8, "symbol": "diamond"},
            }
            data.append(points | reach("x", tone, (q.estimate for q in there)))
    shares_axis = axis("share of values up to this", range=[0, 1.03])
    return {"data": data, "layout": {"xaxis": axis(figure.x), "yaxis": shares_axis, "height": 380}}


def _forest(figure: Forest) -> Json:
    there = [(at, e) for at, e in enumerate(figure.effects) if known(e.estimate.value) is not None]
    points: Json = {
        "type": "scatter",
        "mode": "markers",
        "showlegend": False,
        "x": [known(e.estimate.value) for _, e in there],
        "y": [at for at, _ in there],
        "text": [label(f"{e.name}: {show_estimate(e.estimate)}", 110) for _, e in there],
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {"color": colour(0), "size": 9, "symbol": "square"},
        **reach("x", colour(0), (e.estimate for _, e in there)),
    }
    shapes = [upright(figure.reference)]
    if figure.margin is not None:
        low, high = figure.reference / (1 + figure.margin), figure.reference * (1 + figure.margin)
        shapes.append(band(low, high))
    notes = [
        absent(e.estimate.value, x=figure.reference, y=at, xanchor="left", xshift=6)
        for at, e in enumerate(figure.effects)
        if isinstance(e.estimate.value, Missing)
    ]
    names = [e.name for e in figure.effects]
    rows = categories(names, "", range=[len(names) - 0.5, -0.5], showgrid=False)
    height = 110 + ROW * max(2, len(names))
    layout = {
        "xaxis": axis(figure.x),
        "yaxis": rows,
        "shapes": shapes,
        "annotations": notes,
        "height": height,
    }
    return {"data": [points], "layout": layout}


def _factor(figure: Factor) -> Json:
    data, notes = _over_levels(figure.lines, 0.06)
    for at, trace in enumerate(data):
        line = {"color": colour(at), "width": 1.8}
        trace |= {"type": "scatter", "mode": "lines+markers", "line": line}
        trace |= {
            "marker": {"color": colour(at), "size": 8},
            **reach("y", colour(at), figure.lines[at].cells),
        }
    layout = {
        "xaxis": categories(figure.levels, figure.x, range=[-0.5, len(figure.levels) - 0.5]),
        "yaxis": axis(figure.y),
        "annotations": notes,
        "height": 360,
    }
    return {"data": data, "layout": layout}


def _bars(figure: Bars) -> Json:
    width = 0.8 / max(1, len(figure.lines))
    data, notes = _over_levels(figure.lines, width)
    for at, trace in enumerate(data):
        trace |= {"type": "bar", "width": 0.92 * width, "textposition": "none"}
        trace |= {"marker": {"color": colour(at)}, **reach("y", GREY, figure.lines[at].cells)}
    layout = {
        "xaxis": categories(figure.levels, figure.x, range=[-0.6, len(figure.levels) - 0.4]),
        "yaxis": axis(figure.y),
        "shapes": [] if figure.reference is None else [level_line(figure.reference)],
        "annotations": notes,
        "height": 380,
        "showlegend": True,
    }
    return {"data": data, "layout": layout}


def _over_levels(lines: Sequence[Line], apart: float) -> tuple[list[Json], list[Json]]:
    """What traces of lines have in common, those of a level beside each other, and words where numbers are
    missing."""
    data: list[Json] = []
    notes: list[Json] = []
    for at, line in enumerate(lines):
        places = [i + (at - (len(lines) - 1) / 2) * apart for i in range(len(line.cells))]
        data.append(
            {
                "name": label(line.name),
                "x": places,
                "y": [known(cell.value) for cell in line.cells],
                "text": [label(f"{line.name}: {show_estimate(cell)}", 90) for cell in line.cells],
                "hovertemplate": "%{text}<extra></extra>",
            }
        )
        for x, cell in zip(places, line.cells, strict=True):
            if isinstance(cell.value, Missing):
                notes.append(absent(cell.value, **foot(x)))
    return data, notes


def _size_time(figure: SizeTime) -> Json:
    data: list[Json] = []
    notes: list[Json] = []
    for at, arm in enumerate(figure.arms):
        data += point_traces(arm.measured, arm.name, at, False, "markers")
        notes += absent_points(arm.measured, figure.log)
        if arm.model:
            name = f"{arm.name}: {arm.formula}" if arm.formula else f"{arm.name}: model"
            data += point_traces(arm.model, name, at, True)
    sizes = [p.x for arm in figure.arms for p in (*arm.measured, *arm.model)] or [0.0, 1.0]
    least, most = min(sizes), max(sizes)
    times = [known(p.y.value) for arm in figure.arms for p in (*arm.measured, *arm.model)]
    shapes: list[Json] = []
    for crossing in figure.crossings:
        for stretch in crossing.stretches:
            low = least if stretch.low is None else max(least, min(stretch.low, most))
            high = most if stretch.high is None else min(most, max(stretch.high, least))
            if low < high:
                shapes.append(band(low, high))
        shapes += [upright(x) for x in crossing.estimates if least <= x <= most]
        notes += [
            {
                "text": f"≈ {show(x)}",
                "showarrow": False,
                "x": place(x, figure.log),
                "y": 1.0,
                "yref": "paper",
                "yanchor": "bottom",
            }
            for x in crossing.estimates
            if least <= x <= most
        ]
    layout = {
        "xaxis": axis(figure.x, **_scale(figure.log, list(sizes))),
        "yaxis": axis(figure.y, **_scale(figure.log, times)),
        "shapes": shapes,
        "annotations": notes,
        "height": 440,
        "legend": {"orientation": "h", "y": -0.2, "yanchor": "top", "x": 0},
        "showlegend": True,
    }
    return {"data": data, "layout": layout}


def _scale(log: bool, values: list[float | None]) -> dict[str, Any]:
    """A logarithmic axis with the ticks 1, 2 and 5 of each decade, written in full."""
    there = [value for value in values if value is not None and value > 0]
    if not log or not there:
        return {}
    first, last = math.floor(math.log10(min(there))) - 1, math.ceil(math.log10(max(there))) + 1
    ticks = [digit * 10.0**decade for decade in range(first, last) for digit in (1, 2, 5)]
    shown = [f"{tick:.15g}" if tick < 1e5 else f"{tick:.0e}" for tick in ticks]
    return {"type": "log", "tickmode": "array", "tickvals": ticks, "ticktext": shown}


def _waterfall(figure: Waterfall) -> Json:
    names = list(dict.fromkeys(part.name for stack in figure.stacks for part in stack.parts))
    bases: dict[str, list[tuple[int, float, float]]] = {name: [] for name in names}
    notes: list[Json] = []
    for row, stack in enumerate(figure.stacks):
        at = 0.0
        for part in stack.parts:
            if isinstance(part.value, Missing):
                notes.append(absent(part.value, x=at, y=row - 0.38, xanchor="left"))
                notes[-1]["text"] = f"✕ {label(part.name)} {label(part.value.state.value)}"
                continue
            bases[part.name].append((row, at, part.value))
            at += part.value
        if isinstance(stack.total, Missing):
            notes.append(absent(stack.total, x=at, y=row, xanchor="left", xshift=6))
    data = [_part(name, bases[name], at) for at, name in enumerate(names)]
    totals = [(row, known(s.total)) for row, s in enumerate(figure.stacks) if s.total is not None]
    measured = [(row, total) for row, total in totals if total is not None]
    if measured:
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "measured total",
                "x": [total for _, total in measured],
                "y": [row for row, _ in measured],
                "marker": {"symbol": "line-ns-open", "size": 30, "color": GREY, "line": {"width": 3}},
            }
        )
    layout = {
        "barmode": "overlay",
        "xaxis": axis(figure.x),
        "yaxis": categories([s.name for s in figure.stacks], "", range=[len(figure.stacks) - 0.5, -0.5]),
        "annotations": notes,
        "height": 130 + 60 * max(2, len(figure.stacks)),
        "showlegend": True,
    }
    return {"data": data, "layout": layout}


def _part(name: str, bars: list[tuple[int, float, float]], index: int) -> Json:
    return {
        "type": "bar",
        "orientation": "h",
        "name": label(name),
        "y": [row for row, _, _ in bars],
        "base": [base for _, base, _ in bars],
        "x": [value for _, _, value in bars],
        "width": 0.5,
        "text": [show(value) for _, _, value in bars],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "marker": {"color": colour(index)},
    }


def _lines(figure: Lines) -> Json:
    traces = [point_traces(c.points, c.name, at, c.fitted) for at, c in enumerate(figure.curves)]
    points = [point for curve in figure.curves for point in curve.points]
    return _curves(figure, traces, points, figure.log_x, figure.log_y)


def _roofline(figure: Roofline) -> Json:
    measured = [point_traces(c.points, c.name, at, False, "markers") for at, c in enumerate(figure.measured)]
    roofs = [point_traces(c.points, c.name, at, True) for at, c in enumerate(figure.ceilings, len(measured))]
    points = [point for curve in (*figure.ceilings, *figure.measured) for point in curve.points]
    return _curves(figure, measured + roofs, points, True, True)


def _curves(
    figure: Lines | Roofline, traces: list[list[Json]], points: list[Point], log_x: bool, log_y: bool
) -> Json:
    places = [point.x for point in points] or [1.0, 10.0]
    shapes, words = mark_shapes(figure.marks, (min(places), max(places)), log_x)
    layout = {
        "xaxis": axis(figure.x, **_scale(log_x, [p.x for p in points])),
        "yaxis": axis(figure.y, **_scale(log_y, [known(p.y.value) for p in points])),
        "shapes": shapes,
        "annotations": words + absent_points(points, log_x),
        "height": 400,
        "showlegend": True,
    }
    return {"data": list(chain.from_iterable(traces)), "layout": layout}
