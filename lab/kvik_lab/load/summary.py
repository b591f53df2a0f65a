"""A load in a few figures. An analysis takes the requests themselves; these are for a look."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvik_lab.infer.arrays import needed_in_tail
from kvik_lab.records import Figure, Request
from kvik_lab.records.measures import (
    PER_REQUEST,
    Goals,
    gaps,
    goodput,
    output_throughput,
    throughput,
)

_SHOWN = ("ttft", "ttft_from_send", "tpot", "e2e")
_TAKES = {at: needed_in_tail(at / 100) for at in (50, 90, 95, 99)}
"""Percentiles that are given, and the values that each takes."""


def summarise(requests: Sequence[Request], goals: Goals | None = None) -> list[Figure]:
    """Means and percentiles over requests (of `itl`: over all gaps), rates, and the number that failed.

    A percentile beyond which fewer than `IN_TAIL` values would lie is left out: it would say nothing.
    Metrics have the prefix `load_`, so that no analysis takes a mean of them for a value of a request.
    """
    good = [request for request in requests if request.ok]
    figures = [Figure(metric="load_failed", unit="1", value=float(len(requests) - len(good)))]
    for name in _SHOWN:
        values = [value for request in good if (value := PER_REQUEST[name](request)) is not None]
        figures += _spread(f"load_{name}", values)
    figures += _spread("load_itl", [gap for request in good for gap in gaps(request)])
    rates = {"throughput": throughput(requests), "output_throughput": output_throughput(requests)}
    if goals is not None:
        rates["goodput"] = goodput(requests, goals)
    for name, value in rates.items():
        if value is not None:
            unit = "tokens/s" if name == "output_throughput" else "requests/s"
            figures.append(Figure.model_validate({"metric": f"load_{name}", "unit": unit, "value": value}))
    return figures


def _spread(metric: str, values: list[float]) -> list[Figure]:
    if not values:
        return []
    found = {"mean": float(np.mean(values))}
    for at, takes in _TAKES.items():
        if len(values) >= takes:
            found[f"p{at}"] = float(np.percentile(values, at))
    return [Figure(metric=metric, unit="s", value=value, statistic=name) for name, value in found.items()]


def lines(figures: Sequence[Figure]) -> list[str]:
    """The figures for people: one line a metric, times in ms, and which percentiles take more values."""
    found: dict[str, list[str]] = {}
    given: dict[str, set[str]] = {}
    for figure in figures:
        value = f"{figure.value * 1e3:.3f} ms" if figure.unit == "s" else f"{figure.value:.6g} {figure.unit}"
        at = "".join(f" at {name} {level:g}" for name, level in figure.levels.items() if _number(level))
        text = f"{value}{at}" if figure.statistic == "value" else f"{figure.statistic} {value}"
        name = figure.metric.removeprefix("load_")
        found.setdefault(name, []).append(text)
        given.setdefault(name, set()).add(figure.statistic)
    return [f"{name:>22}  {', '.join(texts)}{_left_out(given[name])}" for name, texts in found.items()]


def _left_out(given: set[str]) -> str:
    """Of a metric with a mean: the percentiles that are not given, and how many values each takes."""
    if "mean" not in given:
        return ""
    absent = [f"p{at} takes {takes} values" for at, takes in _TAKES.items() if f"p{at}" not in given]
    return f" ({', '.join(absent)})" if absent else ""


def _number(level: object) -> bool:
    return isinstance(level, int | float) and not isinstance(level, bool)
