"""A recording, and what came of moving it again, for people and for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvik.bench.figures import NEEDED, Series, percentile
from kvik.bench.options import size_text
from kvik.bench.report import ratio_text, row, seconds_text
from kvik.trace.file import Moved, PageIds, Trace
from kvik.trace.replay import Results

REPLAY_FORMAT = "kvik-trace-replay/1"
_BAR = 30


def summary(trace: Trace) -> dict[str, Any]:
    """What a recording holds. Sizes in bytes, times in seconds."""
    ok = [moved for moved in trace.moved if moved.outcome == "ok"]
    kinds: dict[str, list[Moved]] = {}
    for moved in trace.moved:
        kinds.setdefault(f"{moved.op} {moved.transport or 'none'} {moved.outcome}", []).append(moved)
    return {
        "kvik": trace.kvik,
        "seconds": trace.seconds,
        "complete": trace.complete,
        "dropped": trace.dropped,
        "notices": trace.notices,
        "transfers": len(trace.moved),
        "bytes": sum(moved.bytes for moved in trace.moved),
        "peers": len({moved.peer for moved in trace.moved}),
        "kinds": {kind: _kind(moved) for kind, moved in sorted(kinds.items())},
        "layouts": [asdict(dims) for dims in trace.layouts.values()],
        "bytes_of_transfers": _histogram(moved.bytes for moved in ok),
        "pages_of_transfers": _histogram(moved.pages.size for moved in ok),
        "pages_of_runs": _histogram(length for moved in ok for length in _run_lengths(moved.pages)),
        "bytes_of_extents": _histogram(
            (moved.bytes // max(moved.extents or 1, 1) for moved in ok), (moved.extents or 1 for moved in ok)
        ),
    }


def _kind(moved: list[Moved]) -> dict[str, Any]:
    times = [one.times["total_s"] for one in moved if "total_s" in one.times]
    return {
        "transfers": len(moved),
        "bytes": sum(one.bytes for one in moved),
        "total_s": {f"p{p}": percentile(times, p) if times else None for p in NEEDED},
    }


def _run_lengths(ids: PageIds) -> list[int]:
    breaks = np.flatnonzero(np.diff(ids.astype(np.int64)) != 1) + 1
    return [int(length) for length in np.diff(np.concatenate([[0], breaks, [ids.size]]))]


def _histogram(values: Iterable[int], weights: Iterable[int] | None = None) -> dict[str, int]:
    """How many values lie in each power of two: the key is the least value of the bin."""
    bins: Counter[int] = Counter()
    if weights is None:
        bins.update(_floor(value) for value in values)
    else:
        for value, weight in zip(values, weights, strict=True):
            bins[_floor(value)] += weight
    return {str(least): bins[least] for least in sorted(bins)}


def _floor(value: int) -> int:
    return 1 << (value.bit_length() - 1) if value > 0 else 0


def print_summary(trace: Trace, console: Console) -> None:
    """The same for people."""
    told = summary(trace)
    length = "of unknown length" if trace.seconds is None else f"of {trace.seconds:.1f} s"
    console.print(
        f"recording {length} by kvik {trace.kvik}: {told['transfers']} transfers with "
        f"{told['peers']} peers, {_size(told['bytes'])}",
        markup=False, highlight=False,
    )  # fmt: skip
    for notice in trace.notices:
        console.print(notice, style="yellow", markup=False, highlight=False)
    table = Table(box=None, pad_edge=False)
    for title in ("op, transport, outcome", "transfers", "bytes", *(f"p{p}" for p in NEEDED)):
        table.add_column(title, justify="left" if title.startswith("op") else "right", no_wrap=True)
    for kind, of in told["kinds"].items():
        times = [of["total_s"][f"p{p}"] for p in NEEDED]
        shown = ["" if time is None else seconds_text(time) for time in times]
        table.add_row(escape(kind), str(of["transfers"]), _size(of["bytes"]), *shown)
    console.print(table)
    for dims in trace.layouts.values():
        console.print(
            f"layout {dims.digest}: {dims.pages} pages x {dims.layers} layers x {dims.slices} slices x "
            f"{dims.run_bytes} bytes",
            markup=False, highlight=False,
        )  # fmt: skip
    for title, key, text in (
        ("bytes of a transfer", "bytes_of_transfers", _size),
        ("pages of a transfer", "pages_of_transfers", str),
        ("pages of a run of ids", "pages_of_runs", str),
        ("bytes of an extent (mean of its transfer)", "bytes_of_extents", _size),
    ):
        _print_histogram(console, title, told[key], text)


def _print_histogram(console: Console, title: str, bins: dict[str, int], text: Callable[[int], str]) -> None:
    if not bins:
        return
    console.print(f"\n{title}", markup=False, highlight=False)
    most = max(bins.values())
    for least, count in bins.items():
        bar = "#" * max(1, round(_BAR * count / most))
        console.print(f"  from {text(int(least)):>8}  {count:>9}  {bar}", markup=False, highlight=False)


def _size(count: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << power:
            whole = count % (1 << power) == 0
            return size_text(count) if whole else f"{count / (1 << power):.1f}{unit}"
    return f"{count}B"


def print_replay(results: Results, unit: str, console: Console) -> None:
    """The figures of a replay beside the limits, and what was checked."""
    grid = Table(title="kvik trace replay", title_justify="left")
    grid.add_column("path")
    for heading in ("p50", "p90", "p99", "n", unit, "CPU s/GiB", "x memcpy", "x tcp stream"):
        grid.add_column(heading, justify="right")
    # At a pace the rate is that of the recording, and says nothing of what kvik can.
    paced = results.options.speed is not None
    memcpy, stream = (
        None if paced else results.kvik.ratio_to(limit) for limit in (results.memcpy, results.stream)
    )
    ratios = ratio_text(memcpy), ratio_text(stream)
    used = ", ".join(
        f"{name}: {' / '.join(sorted(mechanisms))}" for name, mechanisms in results.used.paths.items()
    )
    grid.add_row(*map(escape, row(f"kvik {used}", results.kvik, unit, ratios)))
    if results.recorded_s:
        recorded = [percentile(results.recorded_s, p) for p in NEEDED]
        times = ["" if time is None else seconds_text(time) for time in recorded]
        grid.add_row("as recorded", *times, str(len(results.recorded_s)), "", "", "", "", style="dim")
    grid.add_row(*row("memcpy", results.memcpy, unit, ("", "")), style="dim")
    name = f"tcp stream, {size_text(results.send_bytes)} sends"
    grid.add_row(*row(name, results.stream, unit, ("", "")), style="dim")
    console.print(grid)
    for line in _replay_lines(results):
        console.print(line, markup=False, highlight=False)


def _replay_lines(results: Results) -> list[str]:
    options = results.options
    pace = "as fast as it goes" if options.speed is None else f"at {options.speed:g} x the recorded pace"
    lines = [
        f"{results.steps} transfers, {options.rounds} rounds, {pace}; a latency is from call to end",
        f"Bytes compared in {results.compared} of {results.steps} transfers, all equal",
    ]
    if options.speed is not None:
        lines.append(
            f"The pace sets the rate; the latest call was {seconds_text(max(results.late_s, 0.0))} late"
        )
    lines += [f"Left out: {count} transfers: {why}" for why, count in results.left_out.items()]
    return lines + results.notices


def replay_json(results: Results) -> dict[str, Any]:
    """Everything, in bytes and seconds."""

    def series(of: Series) -> dict[str, Any]:
        samples, cpu = of.latencies_s, of.cpu_per_gib()
        return {
            "payload_bytes": of.payload,
            "wall_s": of.wall_s,
            "bytes_per_s": of.rate,
            "cpu_s_per_gib": None if cpu is None else {"initiator": cpu[0], "target": cpu[1]},
            "latency_s": {
                "n": len(samples),
                **{f"p{p}": percentile(samples, p) if samples else None for p in NEEDED},
            },
        }

    return {
        "format": REPLAY_FORMAT,
        "options": asdict(results.options),
        "transfers": results.steps,
        "compared": results.compared,
        "left_out": dict(results.left_out),
        "notices": [*results.trace.notices, *results.notices],
        "late_s": results.late_s,
        "used": {name: sorted(mechanisms) for name, mechanisms in results.used.paths.items()},
        "initiator": results.initiator,
        "target": results.target,
        "kvik": series(results.kvik),
        "memcpy": series(results.memcpy),
        "tcp_stream": series(results.stream),
    }
