"""A journal as MLflow has it: a run for the study, below it one for each start, and below that one for each
time that a run was executed.

Names are those of the article "EFA vs TCP" (S0) where it has them: `ttft_p50`, `throughput_rps`, the
parameters `mode`, `backend`, `prompt_tokens` and so on, with times in milliseconds. What a run measured
request by request is a series of its own, `ttft_ms` and others, with the iteration as its step.
"""

from __future__ import annotations

import hashlib
import json
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
import yaml

from kvik_lab.infer.arrays import needed_in_tail
from kvik_lab.records import Figure, RunRecord, dump
from kvik_lab.records.cli import facts
from kvik_lab.records.measures import PER_REQUEST, PER_RUN, UNITS

FORM = 1  # change it with names or values: what MLflow has in another form is made again
EXCLUDED = "excluded/"
"""Before the name of what does not count, so that no chart and no mean takes it for one that does."""
PERCENTILES = (50, 95, 99)
SUMMED = ("ttft", "tpot", "e2e", "load_time", "bandwidth")
STATES = ("valid", "suspect", "invalid", "not judged", "failed", "lost", "cancelled")
ALSO_TAGS = ("mode", "backend", "prefix_cache", "prompt_tokens", "concurrency", "measurement_type")
"""Parameters that the article has as tags, too."""
_CACHE = {"disabled": "nocache", "enabled": "cache"}
MOST_PARAM, MOST_TAG, MOST_KEY = 500, 1000, 250  # characters, so that older servers take them


class Point(NamedTuple):
    """One value of a metric; `at` is in ms since the epoch."""

    key: str
    value: float
    at: int
    step: int


@dataclass(frozen=True)
class Content:
    """What is logged of an entry. Points and parameters are never changed; tags are set again."""

    params: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    points: Sequence[Point] = ()


@dataclass(frozen=True)
class Entry:
    """One run of MLflow. `ended` is None while it goes on; `digest` is another one whenever anything is."""

    id: str
    parent: str | None
    name: str
    status: str
    began: int
    ended: int | None
    digest: str
    content: Callable[[], Content]
    form: str = str(FORM)


class Seen(NamedTuple):
    """A record of the journal, and its digest, which takes a while."""

    record: RunRecord
    digest: str


def seen(record: RunRecord) -> Seen:
    """With its digest."""
    return Seen(record, _digest(dump(record)))


def entries(journal: Sequence[Seen], study: str, *, running: bool) -> list[Entry]:
    """All that a journal comes to, parents first. `study` is the text of the study file; `running`: that the
    study goes on."""
    if not journal:
        return []
    executions = {execution(one.record): one for one in journal}  # judged anew, it is the same execution
    last = {one.record.id: execution(one.record) for one in journal}
    records = [one.record for one in executions.values()]
    starts: dict[str, list[RunRecord]] = {}
    for record in records:
        starts.setdefault(record.place.start, []).append(record)
    current = [one for one in records if last[one.id] == execution(one)]
    found = [_study(current, records, study, running=running)]
    for name, own in starts.items():
        found.append(_start(name, own, found[0].id, running=running and name == next(reversed(starts))))
    return [*found, *(_run(one, superseded=last[one.record.id] != key) for key, one in executions.items())]


def execution(record: RunRecord) -> str:
    """A run that failed and was run again was executed twice."""
    return f"run {record.id} {record.times.began}"


def _study(current: Sequence[RunRecord], records: Sequence[RunRecord], text: str, *, running: bool) -> Entry:
    states: Counter[str] = Counter(
        one.verdict or "not judged" if one.outcome == "completed" else one.outcome for one in current
    )
    tags = {} if running else {f"runs.{state}": str(states[state]) for state in STATES}
    failed = any(one.outcome != "completed" for one in current)
    file = yaml.safe_load(text) or {}
    if isinstance(file, dict) and file.get("about"):
        tags["mlflow.note.content"] = str(file["about"])
    return _parent("study", None, records[0].study, records, Content(_flat(file), tags), failed, running)


def _start(name: str, records: Sequence[RunRecord], study: str, *, running: bool) -> Entry:
    place = records[0].place
    tags = {"start": name, "block": place.group or "", "whole_plot": place.whole_plot or ""}
    failed = any(one.outcome != "completed" for one in records)
    title = f"{name} ({place.whole_plot})" if place.whole_plot else name
    return _parent(f"start {name}", study, title, records, Content({}, tags), failed, running)


def _parent(
    key: str, parent: str | None, name: str, records: Sequence[RunRecord], content: Content, failed: bool,
    running: bool,
) -> Entry:  # fmt: skip
    began, ended = min(one.times.began for one in records), max(one.times.ended for one in records)
    status = "RUNNING" if running else "FAILED" if failed else "FINISHED"
    # While it goes on nothing of it changes: what a run adds to the journal is one entry, not three.
    digest = _digest(json.dumps([FORM, status, None if running else ended, dict(content.tags)]))
    return Entry(
        key, parent, name, status, _ms(began), None if running else _ms(ended), digest, lambda: content
    )


def _run(one: Seen, *, superseded: bool) -> Entry:
    record = one.record
    status = "FINISHED" if record.counts else "KILLED" if record.outcome == "cancelled" else "FAILED"
    return Entry(
        execution(record), f"start {record.place.start}", _name(record), status,
        _ms(record.times.began), _ms(record.times.ended), _digest(f"{FORM} {superseded} {one.digest}"),
        lambda: Content(_params(record), _tags(record, superseded), _points(record)),
        f"{FORM}" if record.counts else f"{FORM} {EXCLUDED}",
    )  # fmt: skip


def _name(record: RunRecord) -> str:
    """As in the article: `disaggregated-tcp-nocache-pt4096-c1-20260226-101500`, without what there is not."""
    known = _params(record)
    parts = [record.stated.mode, record.stated.transport, _CACHE.get(known.get("prefix_cache", ""))]
    parts += [f"pt{record.stated.prompt_tokens}"] if record.stated.prompt_tokens else []
    parts += [f"c{known['concurrency']}"] if "concurrency" in known else []
    return "-".join([*filter(None, parts), f"{_date(record):%Y%m%d-%H%M%S}"])


def _date(record: RunRecord) -> datetime:
    return datetime.fromtimestamp(record.times.began / 1e9, UTC)


def _params(record: RunRecord) -> dict[str, str]:
    """The article's parameters, flags and variables of each role by `ROLE.NAME`, and the levels, which go
    before a parameter of the same name."""
    stated, client, configuration = record.stated, record.client, record.key.configuration
    arrival = (client.load if client else {}).get("arrival")
    caches = [
        bool(value)
        for role in record.roles
        for name, value in role.settings.items()
        if name in ("prefix_cache", "enable_prefix_caching")
    ]
    found: dict[str, Any] = {
        "mode": stated.mode,
        "backend": stated.transport,
        "prefix_cache": ("enabled" if any(caches) else "disabled") if caches else None,
        "prompt_tokens": stated.prompt_tokens,
        "max_tokens": stated.output_tokens,
        "warmup_iterations": client.warmup.requests if client and client.warmup else None,
        "measurement_iterations": len(record.measured()) or None,
        "concurrency": arrival.get("concurrency") if isinstance(arrival, dict) else None,
        "measurement_type": "online" if record.requests else None,
        "model": configuration.get("model"),
        "url": client.target if client else None,
    }
    found |= {f"{program}_version": version for program, version in record.key.code.items()}
    found |= {f"{role.name}.{name}": value for role in record.roles for name, value in role.settings.items()}
    found |= record.levels
    return {_key(name): _text(value, MOST_PARAM) for name, value in found.items() if value is not None}


def _tags(record: RunRecord, superseded: bool) -> dict[str, str]:
    place = record.place
    wrong = [one for one in record.findings if one.status in ("invalid", "suspect")]
    params = _params(record)
    found: dict[str, Any] = {
        "id": record.id,
        "outcome": record.outcome,
        "verdict": record.verdict or "not judged",
        "reasons": "; ".join(f"{one.gate}: {one.what}" for one in wrong),
        "error": record.error or "",
        "superseded": superseded,
        "key": record.key.digest(),
        "start": place.start,
        "block": place.group or "",
        "pattern": place.pattern or "",
        "order": place.order,
        "anchor": place.anchor,
        "timestamp": f"{_date(record):%Y-%m-%d %H:%M:%S}",
    }
    found |= {name: params[name] for name in ALSO_TAGS if name in params}
    found |= facts(record)
    found |= {f"gate.{one.gate}": one.status for one in record.findings}
    for node, known in record.key.facts.items():
        items = known.items() if isinstance(known, dict) else [("", known)]
        found |= {f"fact.{node}.{name}": value for name, value in items if value is not None}
    return {_key(name): _text(value, MOST_TAG) for name, value in found.items()}


def _points(record: RunRecord) -> list[Point]:
    """Each series, and what sums it up; with `EXCLUDED` where the run does not count."""
    series: dict[str, list[tuple[str, Point]]] = {}
    for name, unit, point in (*_of_requests(record), *_of_figures(record)):
        series.setdefault(name, []).append((unit, point))
    found = [point for values in series.values() for _, point in values]
    ended = _ms(record.times.ended)
    summed = {name: [point.value for _, point in series[name]] for name in SUMMED if name in series}
    sums = {f"{name}_{at}": value for name, values in summed.items() for at, value in _sums(values)}
    measured = record.measured()
    if measured:
        sums["failed_requests"] = float(sum(not one.ok for one in measured))
        rates = {"throughput_rps": "throughput", "output_throughput": "output_throughput"}
        for name, rate in rates.items():
            if (value := PER_RUN[rate](measured)) is not None:
                sums[name] = value
    found += [Point(name, value, ended, 0) for name, value in sums.items()]
    before = "" if record.counts else EXCLUDED
    return [one._replace(key=before + one.key) for one in found]


def _of_requests(record: RunRecord) -> Iterator[tuple[str, str, Point]]:
    clock = record.client.clock if record.client else None
    zero = clock.wall_before + record.times.zero - clock.monotonic_before if clock else record.times.began
    for request in record.measured():
        for name, measure in PER_REQUEST.items():
            if request.ok and (value := measure(request)) is not None:
                at = _ms(zero + int(request.tokens[-1] * 1e9))
                yield _point(name, UNITS.get(name, "s"), value, at, request.iteration)


def _of_figures(record: RunRecord) -> Iterator[tuple[str, str, Point]]:
    """Figures by their names. Those that sum requests up are left out: they have the article's names here."""
    counts: Counter[str] = Counter()
    for figure in record.figures:
        if record.requests and figure.metric.startswith("load_"):
            continue
        name = _figure_name(figure)
        step = counts[name] if figure.iteration is None else figure.iteration
        counts[name] += 1
        yield _point(name, figure.unit, figure.value, _ms(record.times.ended), step)


def _figure_name(figure: Figure) -> str:
    statistic = "" if figure.statistic == "value" else f"_{figure.statistic}"
    levels = "".join(f"/{name} {str(value).replace('/', '_')}" for name, value in figure.levels.items())
    return figure.metric + statistic + levels


def _point(name: str, unit: str, value: float, at: int, step: int) -> tuple[str, str, Point]:
    if unit == "s":
        return name, unit, Point(_key(f"{name}_ms"), value * 1e3, at, step)
    return name, unit, Point(_key(name), value, at, step)


def _sums(values: Sequence[float]) -> Iterator[tuple[str, float]]:
    """As `kvik lab load` does: no percentile that so few values do not have."""
    yield "mean", statistics.fmean(values)
    if len(values) > 1:
        yield "stdev", statistics.stdev(values)
    for at in PERCENTILES:
        if len(values) >= needed_in_tail(at / 100):
            yield f"p{at}", float(np.percentile(values, at))


def _flat(value: object, before: str = "") -> dict[str, str]:
    """A mapping of mappings as parameters with dotted names."""
    if isinstance(value, dict):
        found: dict[str, str] = {}
        for name, one in value.items():
            found |= _flat(one, f"{before}.{name}" if before else str(name))
        return found
    return {_key(before): _text(value, MOST_PARAM)} if before else {}


def _key(name: str) -> str:
    """A name as MLflow takes one."""
    return re.sub(r"[^A-Za-z0-9_\-. /]", "_", name)[:MOST_KEY]


def _text(value: object, most: int) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= most else text[: most - 3] + "..."


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _ms(nanoseconds: int) -> int:
    return nanoseconds // 1_000_000
