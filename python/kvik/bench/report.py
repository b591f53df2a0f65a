"""A run's results for people (a table) and for programs (JSON)."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvik.bench.figures import NEEDED, Ratio, Series, percentile
from kvik.bench.options import UNITS, size_text
from kvik.bench.run import CellResult, KvikResult, Results

FORMAT = "kvik-bench-transfer/1"


def seconds_text(seconds: float) -> str:
    """A duration with three significant digits and a unit that fits."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= 0.9995 * scale:  # what three digits round up to it: 0.9997 s is 1 s, and not 1e+03 ms
            return (
                f"{seconds / scale:.3g} {unit}"
                if seconds < 999.5 * scale
                else f"{seconds / scale:.0f} {unit}"
            )
    return f"{seconds * 1e9:.0f} ns"


def percentile_text(samples: list[float], percent: int) -> str:
    """A percentile, or what is missing for it."""
    value = percentile(samples, percent)
    return f"n<{NEEDED[percent]}" if value is None else seconds_text(value)


def ratio_text(ratio: Ratio | None) -> str:
    """The median of the rounds, and how far they lie apart."""
    return "" if ratio is None else f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


def path_text(part: KvikResult) -> str:
    """The transport and the mechanism that the reports named."""
    used = ", ".join(
        f"{name}: {' / '.join(sorted(mechanisms))}" for name, mechanisms in sorted(part.used.paths.items())
    )
    return f"kvik {used}" if part.transport != "auto" else f"kvik auto -> {used}"


def row(name: str, series: Series, unit: str, ratios: tuple[str, str]) -> list[str]:
    """The cells of a contender: name, percentiles, samples, rate, CPU time, and ratios to the limits."""
    samples, cpu, rate = series.latencies_s, series.cpu_per_gib(), series.rate
    latencies = [percentile_text(samples, p) for p in NEEDED] if samples else ["", "", ""]
    return [
        name,
        *latencies,
        str(len(samples)) if samples else "",
        "" if rate is None else f"{rate / UNITS[unit]:.2f}",
        "" if cpu is None else f"{sum(cpu):.2f}",
        *ratios,
    ]


def table(results: Results) -> Table:
    """One section a cell: kvik over each transport, then the limits."""
    unit = results.options.unit
    grid = Table(title="kvik bench transfer", title_justify="left")
    grid.add_column("batch")
    grid.add_column("path")
    for heading in ("p50", "p90", "p99", "n", unit, "CPU s/GiB", "x memcpy", "x tcp stream"):
        grid.add_column(heading, justify="right")
    for result in results.cells:
        cell = result.cell
        label = f"{cell.op} {cell.pages} x {size_text(cell.page_bytes)}"
        for part in result.kvik:
            ratios = (
                ratio_text(part.series.ratio_to(result.memcpy)),
                ratio_text(part.series.ratio_to(result.stream)),
            )
            grid.add_row(label, *map(escape, row(path_text(part), part.series, unit, ratios)))
            label = ""
        label = "" if result.complete else "not finished"
        if results.options.repetitions:
            if label:
                grid.add_row(label)
            grid.add_section()
            continue
        grid.add_row(label, *row("memcpy", result.memcpy, unit, ("", "")), style="dim")
        stream = f"tcp stream, {size_text(result.send_bytes)} sends"
        grid.add_row("", *row(stream, result.stream, unit, ("", "")), style="dim", end_section=True)
    return grid


def _checks_lines(results: Results) -> list[str]:
    made: dict[str, set[str]] = {}
    for part in (part for result in results.cells for part in result.kvik):
        texts = {", ".join(checks) or "none" for checks in part.used.checks}
        made.setdefault(part.transport, set()).update(texts)
    lines = [f"Checks by kvik over {name}: {' | '.join(sorted(texts))}" for name, texts in made.items()]
    rejected_transports = {
        text for r in results.cells for part in r.kvik for text in part.used.rejected_transports
    }
    lines += [f"Rejected: {text}" for text in sorted(rejected_transports)]
    finished = sum(result.complete for result in results.cells)
    lines.append(
        "Checks by this benchmark: first and last batches compared byte by byte, equal in "
        f"{finished} of {len(results.options.cells())} cells"
    )
    return lines


def print_results(results: Results, console: Console) -> None:
    """The table, what was checked, and how the run ended."""
    if results.cells:
        console.print(table(results))
        for line in _checks_lines(results):
            console.print(line, markup=False, highlight=False)
        if not results.options.repetitions:
            console.print(
                "Ratios: median of the rounds (lowest-highest); a round is compared with the limit's turn in "
                "it.",
                markup=False,
            )
    if results.interrupted:
        console.print("Interrupted: this is what was measured until then.", style="yellow")
    if results.failure is not None:
        console.print(f"FAILED: {results.failure}", style="red", markup=False, highlight=False)


def _series_json(series: Series) -> dict[str, Any]:
    samples, cpu = series.latencies_s, series.cpu_per_gib()
    return {
        "payload_bytes": series.payload,
        "wall_s": series.wall_s,
        "bytes_per_s": series.rate,
        "cpu_s_per_gib": None if cpu is None else {"initiator": cpu[0], "target": cpu[1]},
        "latency_s": {
            "n": len(samples),
            **{f"p{p}": percentile(samples, p) if samples else None for p in NEEDED},
        },
        "rounds": [
            {"payload_bytes": s.payload, "wall_s": s.wall_s, "batches": len(s.latencies_s)}
            for s in series.slices
        ],
    }


def _repeated_json(part: KvikResult) -> dict[str, Any]:
    """Of repetitions: the seconds of each, in their order; when all are made, what each engine counted."""
    if part.repeated is None:
        return {}
    return {
        "warmup_s": part.repeated.warmup.latencies_s,
        "repetitions_s": part.series.latencies_s,
        "counted": part.repeated.counted,
    }


def _ratio_json(ratio: Ratio | None) -> dict[str, float] | None:
    return None if ratio is None else asdict(ratio)


def _cell_json(result: CellResult) -> dict[str, Any]:
    return {
        **asdict(result.cell),
        "batch_bytes": result.cell.batch_bytes,
        "batches_in_buffer": result.batches,
        "inflight": result.inflight,
        "complete": result.complete,
        "kvik": [
            {
                "transport": part.transport,
                "used": {name: sorted(mechanisms) for name, mechanisms in sorted(part.used.paths.items())},
                "checks": sorted(list(checks) for checks in part.used.checks),
                "rejected_transports": sorted(part.used.rejected_transports),
                **_series_json(part.series),
                **_repeated_json(part),
                "ratio_to_memcpy": _ratio_json(part.series.ratio_to(result.memcpy)),
                "ratio_to_tcp_stream": _ratio_json(part.series.ratio_to(result.stream)),
            }
            for part in result.kvik
        ],
        "memcpy": _series_json(result.memcpy),
        "tcp_stream": {"send_bytes": result.send_bytes, **_series_json(result.stream)},
    }


def _target_options_json(results: Results) -> dict[str, Any] | None:
    if results.target_options is None:
        return None
    # The address would name a host in a file that is meant to be shown.
    return {name: value for name, value in asdict(results.target_options).items() if name != "engine_listen"}


def to_json(results: Results) -> dict[str, Any]:
    """Everything, in base units (bytes, seconds), whatever ``--unit`` shows."""
    return {
        "format": FORMAT,
        "complete": results.complete,
        "interrupted": results.interrupted,
        "failure": results.failure,
        "options": asdict(results.options),
        "notices": list(results.notices),
        "initiator": {**results.initiator, "cpu_s": sum(os.times()[:4])},
        "target": {
            "options": _target_options_json(results),
            "facts": results.target,
        },
        "cells": [_cell_json(result) for result in results.cells],
    }
