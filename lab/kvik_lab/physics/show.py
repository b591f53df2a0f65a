"""Results as JSON values and as tables."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvik_lab.physics.advise import Advice
from kvik_lab.physics.crossover import (
    AboveOnly,
    BelowOnly,
    Bounded,
    Bracket,
    Everywhere,
    NoCrossing,
    Several,
)
from kvik_lab.physics.fit import Fit, Parameter
from kvik_lab.physics.knee import Knee
from kvik_lab.physics.models import Model
from kvik_lab.physics.predict import Prediction
from kvik_lab.physics.sentences import probability
from kvik_lab.physics.units import format_bytes, format_seconds

WIDTH = 110
_KINDS = (AboveOnly, BelowOnly, Bounded, Bracket, Everywhere, NoCrossing, Several)


def as_json(value: Any) -> Any:
    """Values of JSON; a set of crossovers says its `kind`, and a number that is none is null."""
    if isinstance(value, Model):
        return {"name": value.name, "formula": value.formula, "source": value.source}
    if is_dataclass(value) and not isinstance(value, type):
        kind = {"kind": type(value).__name__} if isinstance(value, _KINDS) else {}
        return kind | {field.name: as_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {str(key): as_json(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [as_json(inner) for inner in value]
    if isinstance(value, np.generic):
        return as_json(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def console() -> Console:
    """Where tables go: at least wide enough for a row, whatever the terminal."""
    out = Console(soft_wrap=True, highlight=False)
    out.width = max(out.width, WIDTH)
    return out


def grid(title: str, *headings: str) -> Table:
    """A table whose first column is text, the others numbers."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def print_lines(out: Console, lines: tuple[str, ...]) -> None:
    """Sentences, each on a line."""
    for line in lines:
        out.print(escape(line))


def parameter_text(parameter: Parameter) -> tuple[str, str, str]:
    """A parameter's name, value and interval, rates beside their inverses."""
    name, value = parameter.name, parameter.value
    if name == "contention":
        return name, f"{value:.4g}", _range(parameter, lambda v: f"{v:.4g}")
    if name == "seconds_per_byte":
        text = f"{format_bytes(1 / value)}/s" if value > 0 else "no limit seen"
        return "bandwidth", text, _inverse(parameter, lambda v: f"{format_bytes(v)}/s")
    if name == "seconds_per_block":
        rate = f" ({1 / value:,.4g}/s)" if value > 0 else ""
        return name, format_seconds(value) + rate, _range(parameter, format_seconds)
    return name, format_seconds(value), _range(parameter, format_seconds)


def _range(parameter: Parameter, show: Any) -> str:
    if parameter.lo is None and parameter.hi is None:
        return "none"
    upper = "unbounded" if parameter.hi is None else show(parameter.hi)
    return f"{show(parameter.lo or 0.0)} to {upper}"


def _inverse(parameter: Parameter, show: Any) -> str:
    if parameter.lo is None and parameter.hi is None:
        return "none"
    lower = show(1 / parameter.hi) if parameter.hi else "0"
    return f"{lower} to {show(1 / parameter.lo) if parameter.lo else 'unbounded'}"


def fits_table(out: Console, name: str, fits: tuple[Fit, ...], level: float) -> None:
    """The models beside each other, then the parameters of the first."""
    table = grid(f"{name}: models, the best first", "model", "time", "AICc", "left-out error", "scatter")
    for item in fits:
        table.add_row(
            item.model.name,
            escape(item.model.formula),
            "-" if item.aicc is None else f"{item.aicc:.1f}",
            "-" if item.left_out is None else f"{math.expm1(item.left_out):.1%}",
            f"{item.scatter:.1%}",
        )
    out.print(table)
    best = fits[0]
    table = grid(f"{best.model.name}", "parameter", "value", f"{level * 100:g} % interval", "identified")
    for parameter in best.parameters:
        table.add_row(*parameter_text(parameter), "yes" if parameter.identified else "no")
    out.print(table)
    print_lines(out, tuple(f"{note[0].upper()}{note[1:]}." for note in best.notes))


def knee_lines(label: str, knee: Knee, unit: str) -> tuple[str, ...]:
    """A bend in sentences."""
    where = f"{knee.lo:,.0f} to {knee.hi:,.0f} {unit}"
    levels = ", ".join(f"{level:,}" for level in knee.next_levels)
    if knee.found:
        text = f"{label}: the time bends at {knee.x:,.0f} {unit} ({where}, p = {knee.p:.2g})."
    elif knee.note.startswith("the times"):
        text = f"{label}: a bend lies from {where}; {knee.note}."
    else:
        return (f"{label}: {knee.note}.",)
    return (text, f"{label}: measure next {levels} {unit}.") if levels else (text,)


def prediction_lines(labels: tuple[str, ...], found: tuple[Prediction, ...]) -> tuple[str, ...]:
    """Predictions in sentences."""
    out = []
    for label, item in zip(labels, found, strict=True):
        text = f"{label}: {format_seconds(item.seconds)}"
        if item.lo is not None and item.hi is not None:
            text += f" ({format_seconds(item.lo)} to {format_seconds(item.hi)})"
        if item.extrapolated:
            text += f", extrapolated {item.beyond:.3g} times beyond what was measured"
        out.append(text + ".")
    return tuple(out)


def advice_tables(out: Console, advice: Advice) -> None:
    """Prompt lengths by link, and what links cost."""
    names = list(advice.rows[0].seconds)
    table = grid(f"{advice.model}: time of a handover", "tokens", "KV", *names, "sure", "verdict")
    for row in advice.rows:
        times = ["-" if (t := row.seconds[name]) is None else format_seconds(t) for name in names]
        sure = "-" if row.gap is None or row.gap.probability is None else probability(row.gap.probability)
        of = f": {', '.join(row.undecided)}" if 0 < len(row.undecided) < len(names) else ""
        table.add_row(f"{row.tokens:,}", format_bytes(row.bytes), *times, sure, escape(row.verdict + of))
    out.print(table)
    table = grid("What links cost", "link", "mean", "an hour", "a million tokens", "busy")
    for cost in advice.costs:
        table.add_row(
            escape(cost.link),
            "-" if cost.mean_seconds is None else format_seconds(cost.mean_seconds),
            "-" if cost.per_hour is None else f"{cost.per_hour:.4g}",
            "-" if cost.per_million_tokens is None else f"{cost.per_million_tokens:.4g}",
            "-" if cost.busy is None else f"{cost.busy:.1%}",
        )
    out.print(table)
