"""Benchmarks of KV transfer: Mooncake's transfer_engine_bench, and nixlbench of NIXL. Both write text."""

from __future__ import annotations

import re

from kvik_lab.errors import LabError
from kvik_lab.load.importers.reading import Columns, cell, result, row
from kvik_lab.records import Figure, LoadResult

# Mooncake, transfer_engine_bench.cpp: units by 1000 (GB, Gb, MB, ...) and by 1024 (GiB, ...), a second.
_UNITS = {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_UNITS |= {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}
_UNITS |= {"b": 1 / 8, "Kb": 1e3 / 8, "Mb": 1e6 / 8, "Gb": 1e9 / 8, "Tb": 1e12 / 8}
_UNITS |= {"Kib": 2.0**10 / 8, "Mib": 2.0**20 / 8, "Gib": 2.0**30 / 8}
_DONE = re.compile(
    r"Test completed: duration ([0-9.]+), batch count (\d+), throughput ([0-9.]+) ?"
    rf"({'|'.join(_UNITS)})(?:/s|ps|\b)"
)


def read_transfer_engine_bench(text: str, where: str) -> LoadResult:
    """Each line `Test completed: ...`, as one figure of `bandwidth` (bytes/s) and one of `batches` (1/s)."""
    figures: list[Figure] = []
    seconds = 0.0
    for number, line in enumerate(text.splitlines(), 1):
        if (match := _DONE.search(line)) is None:
            continue
        at = f"{where}, line {number}"
        duration, batches = cell(match[1], at), cell(match[2], at)
        if duration <= 0:
            raise LabError(f"{at}: a test of {duration:g} seconds has measured nothing")
        iteration = len(figures) // 2
        rate = cell(match[3], at) * _UNITS[match[4]]
        figures.append(Figure(metric="bandwidth", unit="bytes/s", value=rate, iteration=iteration))
        figures.append(Figure(metric="batches", unit="1/s", value=batches / duration, iteration=iteration))
        seconds += duration
    if not figures:
        raise LabError(
            f"{where}: has no line 'Test completed: ...'; give what the initiator wrote (its log goes to "
            f"standard error)"
        )
    return result("transfer_engine_bench", figures=figures, seconds=seconds)


# nixlbench, its README's table "Reading Benchmark Output".
_COLUMNS: Columns = {
    "B/W (GB/Sec)": ("bandwidth", "bytes/s", "value", 1e9),
    "Aggregate B/W (GB/Sec)": ("aggregate_bandwidth", "bytes/s", "value", 1e9),
    "Avg Lat. (us)": ("latency", "s", "mean", 1e-6),
    "Avg Prep (us)": ("prepare", "s", "mean", 1e-6),
    "P99 Prep (us)": ("prepare", "s", "p99", 1e-6),
    "Avg Post (us)": ("post", "s", "mean", 1e-6),
    "P99 Post (us)": ("post", "s", "p99", 1e-6),
    "Avg Tx (us)": ("transfer", "s", "mean", 1e-6),
    "P99 Tx (us)": ("transfer", "s", "p99", 1e-6),
}


def read_nixlbench(text: str, where: str) -> LoadResult:
    """Each row of its table as figures of `bandwidth`, `latency`, `prepare`, `post` and `transfer`, with the
    levels `bytes` (of a block) and `batch`."""
    figures: list[Figure] = []
    columns: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        names = [name for name in re.split(r" {2,}", line.strip()) if name]
        if names[:2] == ["Block Size (B)", "Batch Size"]:
            columns = names
            continue
        cells = line.split()
        if not columns or len(cells) != len(columns) or not (cells[0].isdigit() and cells[1].isdigit()):
            continue
        levels = {"bytes": int(cells[0]), "batch": int(cells[1])}
        figures += row(_COLUMNS, columns, cells, levels, f"{where}, line {number}")
    if not figures:
        raise LabError(f"{where}: has no table with 'Block Size (B)  Batch Size  ...' and a row below it")
    return result("nixlbench", figures=figures)
