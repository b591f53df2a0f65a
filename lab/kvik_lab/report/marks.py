"""What the drawings of figures share: colours, escaped names, axes, and how a missing number is shown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from colorsys import hls_to_rgb
from html import escape
from typing import Any

from kvik_lab.report.cells import Estimate, Missing, known, show_estimate
from kvik_lab.report.figures import Mark, Point

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#a6761d", "#56b4e9", "#7a5cc0", "#8c8c8c")
GREY = "#888888"
LONGEST = 48

Json = dict[str, Any]


def label(text: str, longest: int = LONGEST) -> str:
    """A name as plotly shows it: its pseudo-HTML taken as plain text, and cut where it would not fit."""
    flat = " ".join(text.split())
    return escape(flat if len(flat) <= longest else flat[: longest - 1] + "…", quote=False)


def colour(index: int) -> str:
    """The colour of the series with this number."""
    return COLOURS[index % len(COLOURS)]


def spectrum(index: int, count: int) -> str:
    """The colour of one of so many in order, from blue to red, of a lightness that is seen on white and on
    black."""
    hue = (220.0 - 220.0 * index / max(1, count - 1)) / 360.0
    return "#" + "".join(f"{round(255 * part):02x}" for part in hls_to_rgb(hue, 0.47, 0.75))


def faint(colour_: str, opacity: float) -> str:
    """The colour with an opacity."""
    red, green, blue = (int(colour_[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity:g})"


def axis(title: str, **more: Any) -> Json:
    """An axis with a title, which makes room for its labels."""
    return {"title": {"text": label(title, 90)}, "automargin": True, **more}


def categories(names: Sequence[str], title: str, **more: Any) -> Json:
    """An axis of names at the positions 0, 1, 2, so that two equal names stay two."""
    ticks = {"tickmode": "array", "tickvals": list(range(len(names))), "ticktext": [label(n) for n in names]}
    return axis(title, zeroline=False, **ticks, **more)


def absent(missing: Missing, **where: Any) -> Json:
    """The word that stands where a number is missing."""
    text = f"✕ {label(missing.state.value)}"
    font = {"color": GREY, "size": 11}
    return {"text": text, "hovertext": label(str(missing), 90), "showarrow": False, "font": font, **where}


def reach(axis: str, tone: str, estimates: Iterable[Estimate]) -> Json:
    """Error bars along `x` or `y` to the bounds of intervals, a part of a trace; empty where none has any."""
    up, down = [], []
    for estimate in estimates:
        value = known(estimate.value)
        ok = value is not None
        up.append(max(0.0, estimate.high - value) if ok and estimate.high is not None else 0.0)  # type: ignore[operator]
        down.append(max(0.0, value - estimate.low) if ok and estimate.low is not None else 0.0)  # type: ignore[operator]
    if not any(up) and not any(down):
        return {}
    style = {"thickness": 1.5, "width": 4, "color": tone}
    return {f"error_{axis}": {"type": "data", "symmetric": False, "array": up, "arrayminus": down, **style}}


def point_traces(
    points: Sequence[Point], name: str, index: int, fitted: bool, mode: str = "lines+markers"
) -> list[Json]:
    """Points as a line that breaks where a number is missing: with a band where it is fitted and has bounds,
    else with error bars."""
    tone = colour(index)
    x = [point.x for point in points]
    trace: Json = {
        "type": "scatter",
        "mode": "lines" if fitted else mode,
        "name": label(name),
        "x": x,
        "y": [known(point.y.value) for point in points],
        "text": [label(f"{name}: {show_estimate(point.y)}", 90) for point in points],
        "hovertemplate": "%{text}<br>at %{x}<extra></extra>",
        "connectgaps": False,
        "line": {"color": tone, "dash": "dash" if fitted else "solid", "width": 1.8},
        "marker": {"color": tone, "size": 7},
    }
    if not fitted:
        return [trace | reach("y", tone, (point.y for point in points))]
    bounded = [p for p in points if p.y.low is not None and p.y.high is not None]
    return [*_band(bounded, tone), trace] if bounded else [trace]


def _band(points: Sequence[Point], tone: str) -> list[Json]:
    x = [point.x for point in points]
    shared: Json = {"type": "scatter", "mode": "lines", "line": {"width": 0}, "showlegend": False}
    shared["hoverinfo"] = "skip"
    low, high = [p.y.low for p in points], [p.y.high for p in points]
    return [
        {
            **shared,
            "x": x + x[::-1],
            "y": high + low[::-1],
            "fill": "toself",
            "fillcolor": faint(tone, 0.15),
        }
    ]


def absent_points(points: Iterable[Point], log_x: bool) -> list[Json]:
    """Words at the foot of the plot for points without a number."""
    return [absent(p.y.value, **foot(p.x, log_x)) for p in points if isinstance(p.y.value, Missing)]


def foot(x: float, log_x: bool = False) -> Json:
    """The place at the foot of the plot, above x."""
    return {"x": place(x, log_x), "y": 0.01, "yref": "paper", "yanchor": "bottom", "textangle": -90}


def place(x: float, log: bool) -> float:
    """A place on an axis as annotations take it: plotly wants logarithms there."""
    return math.log10(x) if log and x > 0 else x


def mark_shapes(
    marks: Iterable[Mark], domain: tuple[float, float], log_x: bool
) -> tuple[list[Json], list[Json]]:
    """Shapes and words for places on the x-axis: a line where it is, a band where it may be."""
    shapes: list[Json] = []
    words: list[Json] = []
    for at, mark in enumerate(marks):
        if mark.stretch is not None:
            low = domain[0] if mark.stretch.low is None else mark.stretch.low
            high = domain[1] if mark.stretch.high is None else mark.stretch.high
            shapes.append(band(low, high))
        if mark.x is not None:
            shapes.append(upright(mark.x))
        middle = mark.x if mark.x is not None else domain[0]
        where = {"x": place(middle, log_x), "y": 1.0 - 0.07 * at, "yref": "paper", "yanchor": "top"}
        words.append({"text": label(mark.name), "showarrow": False, "xanchor": "left", "xshift": 4, **where})
    return shapes, words


def band(low: float, high: float) -> Json:
    """A stretch of the x-axis, shaded over the whole height."""
    return {
        "type": "rect",
        "xref": "x",
        "yref": "paper",
        "x0": low,
        "x1": high,
        "y0": 0,
        "y1": 1,
        "line": {"width": 0},
        "fillcolor": "rgba(230,159,0,0.18)",
        "layer": "below",
    }


_DOTTED = {"color": GREY, "width": 1.5, "dash": "dot"}


def upright(x: float) -> Json:
    """An upright line over the whole height."""
    return {"type": "line", "xref": "x", "yref": "paper", "x0": x, "x1": x, "y0": 0, "y1": 1, "line": _DOTTED}


def level_line(y: float) -> Json:
    """A level line over the whole width."""
    return {"type": "line", "xref": "paper", "yref": "y", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": _DOTTED}
