"""The heat map: values as colours and text, what is missing hatched out in words."""

from __future__ import annotations

from kvik_lab.report.cells import Missing, known
from kvik_lab.report.figures import HeatCell, HeatMap
from kvik_lab.report.marks import GREY, Json, categories, label

_SCALE = [[0, "#2166ac"], [0.25, "#92c5de"], [0.5, "#f7f7f7"], [0.75, "#f4a582"], [1, "#b2182b"]]
_AMOUNTS = [[0, "#f7fbff"], [0.5, "#6baed6"], [1, "#08519c"]]


def heat_map(figure: HeatMap) -> Json:
    """Colours are symmetric about zero where values are changes; text is in each cell."""
    values = [[known(cell.value) for cell in row] for row in figure.cells]
    there = [value for row in values for value in row if value is not None]
    most = max((abs(value) for value in there), default=1.0) or 1.0
    least = -most if figure.signed else min(there, default=0.0)
    # White words where the colour is dark: both ends of the one scale, the upper part of the other.
    dark = 0.6 * most if figure.signed else least + 0.6 * (most - least)
    notes: list[Json] = []
    shapes: list[Json] = []
    for y, row in enumerate(figure.cells):
        for x, cell in enumerate(row):
            notes.append(_word(cell, x, y, dark, figure.signed))
            if isinstance(cell.value, Missing):
                shapes.append(_hollow(x, y))
    trace: Json = {
        "type": "heatmap",
        "z": values,
        "x": list(range(len(figure.columns))),
        "y": list(range(len(figure.rows))),
        "zmin": least,
        "zmax": most if most > least else least + 1,
        "colorscale": _SCALE if figure.signed else _AMOUNTS,
        "xgap": 2,
        "ygap": 2,
        "hoverongaps": False,
        "hoverinfo": "text",
        "text": [[label(f"{r}, {c}", 90) for c in figure.columns] for r in figure.rows],
        "colorbar": {"title": {"text": label(figure.unit), "side": "right"}, "thickness": 14},
    }
    layout = {
        "xaxis": categories(figure.columns, "", side="top", showgrid=False),
        "yaxis": categories(figure.rows, "", range=[len(figure.rows) - 0.5, -0.5], showgrid=False),
        "annotations": notes,
        "shapes": shapes,
        "height": 150 + 38 * max(2, len(figure.rows)),
    }
    return {"data": [trace], "layout": layout}


def _word(cell: HeatCell, x: int, y: int, dark_from: float, signed: bool) -> Json:
    shared: Json = {"x": x, "y": y, "showarrow": False}
    if isinstance(cell.value, Missing):
        font = {"color": GREY, "size": 11}
        return {
            **shared,
            "text": label(cell.value.state.value, 24),
            "hovertext": label(str(cell.value)),
            "font": font,
        }
    mark = {True: " *", False: " n.s.", None: ""}[cell.significant]
    note = f"<br>{label(cell.note, 24)}" if cell.note else ""
    dark = abs(cell.value) > dark_from
    font = {"color": "#ffffff" if dark else "#111111", "size": 12}
    shown = f"{cell.value:+.4g}{mark}" if signed else f"{cell.value:.4g}{mark}"
    text = f"<b>{shown}</b>" if cell.significant else shown
    return {**shared, "text": text + note, "font": font}


def _hollow(x: int, y: int) -> Json:
    box = {"x0": x - 0.48, "x1": x + 0.48, "y0": y - 0.46, "y1": y + 0.46}
    return {"type": "rect", **box, "line": {"color": GREY, "width": 1, "dash": "dot"}, "layer": "below"}
