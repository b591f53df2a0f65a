"""Records as the table that an analysis takes: one row a value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any

import pandas as pd

from kvik_lab.errors import LabError
from kvik_lab.records.measures import PER_REQUEST, PER_RUN, TIMING, UNITS, Goals, goodput, of_request
from kvik_lab.records.schema import Figure, RunRecord

COLUMNS = ("run", "order", "start", "group", "whole_plot", "anchor", "phase", "iteration", "value", "missing")
"""Columns beside the factors'. `missing` says why `value` is NaN: failed, lost, cancelled, invalid, or
not measured. `order` is of the whole study; (`order`, `iteration`) is the order in time."""


def table(
    records: Sequence[RunRecord],
    metric: str,
    *,
    warmup: bool = False,
    goals: Goals | None = None,
) -> pd.DataFrame:
    """One row for each value of `metric`, with the columns of `COLUMNS` and one for each factor.

    metric: of a request (`measures.PER_REQUEST`: ttft, tpot, ...; a part of its `Server-Timing` as
    `timing.kv_wait`), one row a request; of a run (`measures.PER_RUN`, and `goodput`), one row a run; or of
    figures (bandwidth, elapsed, ...; one statistic of it as `latency:p99`), one row a figure, with the levels
    that it has of its own. goals: of goodput; by default those that each run's load states.
    warmup: with the requests of the warm-up.

    A run that did not complete or was found invalid has one row without a value, so that it is seen and
    counts nowhere. Raises `LabError` for a metric that no record has, and for one name that two columns
    would have.
    """
    rows: list[dict[str, Any]] = []
    factors: dict[str, None] = {}
    for record in records:
        found = list(_values(record, metric, warmup=warmup, goals=goals)) if record.counts else []
        head = _head(record)
        own: dict[str, Any]
        for phase, iteration, value, missing, own in found or [("measure", 0, None, _missing(record), {})]:
            factors.update(dict.fromkeys([*record.levels, *own]))
            rows.append({**record.levels, **own, **head, "phase": phase, "iteration": iteration,
                         "value": value, "missing": missing})  # fmt: skip
    _check(records, rows, metric, factors)
    frame = pd.DataFrame(rows, columns=[*COLUMNS, *factors])
    frame["value"] = frame["value"].astype("float64")
    return frame.sort_values(["order", "iteration"], kind="stable", ignore_index=True)


def metrics(records: Sequence[RunRecord]) -> tuple[str, ...]:
    """What `table` can be asked for of these records."""
    found: dict[str, None] = {}
    for record in records:
        if record.requests:
            found.update(dict.fromkeys((*PER_REQUEST, *PER_RUN)))
        found.update(dict.fromkeys(f"{TIMING}{part}" for one in record.requests for part in one.timing))
        if _goals(record) is not None:
            found["goodput"] = None
        for figure in record.figures:
            found[figure.metric] = None
            found[f"{figure.metric}:{figure.statistic}"] = None
    return tuple(found)


def unit(records: Sequence[RunRecord], metric: str) -> str | None:
    """The unit of the values that `table` gives; None where no record has one.

    Raises `LabError` for figures in several units: they are no values of one thing.
    """
    found: dict[str, None] = {}
    for record in (one for one in records if one.counts):
        if record.requests and (of_request(metric) or metric in (*PER_RUN, "goodput")):
            found[UNITS.get(metric, "s")] = None
        else:
            found.update(dict.fromkeys(figure.unit for figure in _figures(record, metric)))
    if len(found) > 1:
        raise LabError(f"{metric} is in {' and in '.join(found)}; make a table of the runs of each unit")
    return next(iter(found), None)


def _head(record: RunRecord) -> dict[str, Any]:
    place = record.place
    return {
        "run": record.id,
        "order": place.order,
        "start": place.start,
        "group": place.group,
        "whole_plot": place.whole_plot,
        "anchor": place.anchor,
    }


_Found = tuple[str, int, float | None, str | None, dict[str, Any]]


def _values(record: RunRecord, metric: str, *, warmup: bool, goals: Goals | None) -> Iterator[_Found]:
    if (measured := of_request(metric)) is not None:
        for request in record.requests if warmup else record.measured():
            value = measured(request) if request.ok else None
            why = None if value is not None else "not measured" if request.ok else "failed"
            yield request.phase, request.iteration, value, why, {}
        if record.requests:
            return
    elif metric == "goodput" and (held := goals or _goals(record)) is not None:
        yield _of_run(goodput(record.measured(), held))
        return
    elif (of_run := PER_RUN.get(metric)) is not None and record.requests:
        yield _of_run(of_run(record.measured()))
        return
    for number, figure in enumerate(_figures(record, metric)):
        iteration = number if figure.iteration is None else figure.iteration
        yield "measure", iteration, figure.value, None, figure.levels


def _goals(record: RunRecord) -> Goals | None:
    """Those that the run's load states."""
    stated = record.client.load.get("goals") if record.client is not None else None
    names = ("ttft", "itl", "tpot", "e2e")
    if not isinstance(stated, dict):
        return None
    known = {name: float(value) for name in names if isinstance(value := stated.get(name), int | float)}
    return Goals(**known) if known else None


def _of_run(value: float | None) -> _Found:
    return "measure", 0, value, None if value is not None else "not measured", {}


def _figures(record: RunRecord, metric: str) -> list[Figure]:
    name, _, statistic = metric.partition(":")
    named = [figure for figure in record.figures if figure.metric == name]
    if statistic:
        return [figure for figure in named if figure.statistic == statistic]
    # Percentiles beside a value or a mean are no further values of the same thing.
    for plain in ("value", "mean", "p50"):
        if chosen := [figure for figure in named if figure.statistic == plain]:
            return chosen
    return []


def _missing(record: RunRecord) -> str:
    if record.outcome != "completed":
        return record.outcome
    return "invalid" if record.verdict == "invalid" else "not measured"


def _check(
    records: Sequence[RunRecord], rows: list[dict[str, Any]], metric: str, factors: dict[str, None]
) -> None:
    if not records:
        raise LabError("there are no records; give the journal of a study that ran")
    if taken := [name for name in factors if name in COLUMNS]:
        raise LabError(
            f"a factor is called {taken[0]!r}, and so is a column of the table; call the factor otherwise"
        )
    if any(row["value"] is not None for row in rows):
        return
    known = metrics(records) or (*PER_REQUEST, *PER_RUN)
    if metric in known:
        return
    if metric == "goodput":
        raise LabError("no run's load states goals; write `goals: {ttft: 0.5}` in `load` to have goodput")
    near = get_close_matches(metric, known, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known) or 'none'}"
    raise LabError(f"none of {len(records)} runs has the metric {metric!r}; {hint}")
