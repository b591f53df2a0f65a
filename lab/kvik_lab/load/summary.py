"""A load in a few figures. An analysis takes the requests themselves; these are for a look."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

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
_PERCENTILES = (50, 90, 95, 99)


def summarise(requests: Sequence[Request], goals: Goals | None = None) -> list[Figure]:
    """Means and percentiles over requests (of `itl`: over all gaps), rates, and the number that failed.

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
    found |= {
        f"p{at}": float(value)
        for at, value in zip(_PERCENTILES, np.percentile(values, _PERCENTILES), strict=True)
    }
    return [Figure(metric=metric, unit="s", value=value, statistic=name) for name, value in found.items()]


def lines(figures: Sequence[Figure]) -> list[str]:
    """The figures for people: one line a metric, times in ms."""
    found: dict[str, list[str]] = {}
    for figure in figures:
        value = f"{figure.value * 1e3:.3f} ms" if figure.unit == "s" else f"{figure.value:.6g} {figure.unit}"
        at = "".join(f" at {name} {level:g}" for name, level in figure.levels.items() if _number(level))
        text = f"{value}{at}" if figure.statistic == "value" else f"{figure.statistic} {value}"
        found.setdefault(figure.metric.removeprefix("load_"), []).append(text)
    return [f"{name:>22}  {', '.join(texts)}" for name, texts in found.items()]


def _number(level: object) -> bool:
    return isinstance(level, int | float) and not isinstance(level, bool)
