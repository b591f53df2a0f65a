"""Measured times by size, as raw repeats or as a table of means."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvik_lab.errors import LabError

Floats: TypeAlias = npt.NDArray[np.float64]

_SIZES = {"bytes": ("bytes", 1.0), "kb": ("bytes", 1e3), "mb": ("bytes", 1e6), "gb": ("bytes", 1e9)}
_SIZES |= {"kib": ("bytes", 2.0**10), "mib": ("bytes", 2.0**20), "gib": ("bytes", 2.0**30)}
_SIZES |= {"tokens": ("tokens", 1.0)}
_TIMES = {"seconds": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_OTHERS = ("blocks", "start", "concurrency", "sd", "se", "n")
FAR = 1e30
"""Beyond what is moved or waited for, and far from where products of them have no value."""


@dataclass(frozen=True)
class Samples:
    """Repeated measurements, one entry each: size (in `unit`), seconds, and what else is known.

    blocks: in how many blocks the size was moved. start: which start of the servers it belongs to; repeats of
    one start are not independent of each other. concurrency: transfers at a time.
    """

    name: str
    unit: str
    size: Floats
    seconds: Floats
    blocks: Floats | None = None
    start: npt.NDArray[np.str_] | None = None
    concurrency: Floats | None = None

    def __post_init__(self) -> None:
        for label in ("size", "seconds", "blocks", "concurrency"):
            if (column := getattr(self, label)) is None:
                continue
            if column.shape != self.seconds.shape or column.size == 0:
                raise LabError(
                    f"{self.name}: as many values of {label} as of seconds are needed, at least one"
                )
            if not _sound(column):
                raise LabError(f"{self.name}: every value of {label} is a number above 0, and below {FAR:g}")

    @property
    def sizes(self) -> Floats:
        """The distinct sizes, ascending."""
        return np.unique(self.size)


@dataclass(frozen=True)
class Summary:
    """A mean time for each size, ascending; with its standard error and degrees of freedom where known."""

    name: str
    unit: str
    size: Floats
    seconds: Floats
    error: Floats | None = None
    freedom: Floats | None = None

    def __post_init__(self) -> None:
        if self.size.size == 0 or self.size.shape != self.seconds.shape:
            raise LabError(f"{self.name}: a mean for each size is needed, at least one")
        if (np.diff(self.size) <= 0).any():
            raise LabError(f"{self.name}: sizes ascend, each once")
        if not (_sound(self.size) and _sound(self.seconds)):
            raise LabError(f"{self.name}: sizes and mean times are numbers above 0, and below {FAR:g}")


def _sound(column: Floats) -> bool:
    return bool(((column > 1 / FAR) & (column < FAR)).all())


Measured: TypeAlias = Samples | Summary


def summarise(data: Measured) -> Summary:
    """Means by size, with standard errors where a size has at least two repeats (all sizes, or none)."""
    if isinstance(data, Summary):
        return data
    sizes, which = np.unique(data.size, return_inverse=True)
    count = np.bincount(which).astype(np.float64)
    mean = np.bincount(which, data.seconds) / count
    if (count < 2).any():
        return Summary(data.name, data.unit, sizes, mean)
    spread = np.bincount(which, (data.seconds - mean[which]) ** 2) / (count - 1)
    return Summary(data.name, data.unit, sizes, mean, np.sqrt(spread / count), count - 1)


def read_measured(path: str | Path, name: str | None = None) -> Measured:
    """Read a CSV file; `LabError` says which line and column cannot be used.

    Columns: a size (`bytes`, `kb`, `mb`, `kib`, `mib`, `gib`, `tokens`), a time (`seconds`, `ms`, `us`), and
    optionally `blocks`, `start`, `concurrency`. A table of means names its time `mean_seconds` or `mean_ms`
    (`mean_us`) and may add `sd` with `n`, or `se`, in the same unit as the mean.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise LabError(f"{file}: cannot be read: {error}") from error
    return parse_measured(text, name or file.stem, str(file))


def parse_measured(text: str, name: str, origin: str = "the given table") -> Measured:
    """As `read_measured`, from text."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    try:
        rows = list(csv.reader(io.StringIO("\n".join(lines)), skipinitialspace=True))
    except csv.Error as error:  # such as a cell of more than 128 KiB
        raise LabError(f"{origin}: this is no table: {error}") from error
    if len(rows) < 2:
        raise LabError(f"{origin}: no data; a header such as bytes,seconds and a line for each measurement")
    header = [cell.strip().lower() for cell in rows[0]]
    columns = _columns(rows, header, origin)
    size_key = next((key for key in header if key in _SIZES), None)
    time_key = next((key for key in header if key.removeprefix("mean_") in _TIMES), None)
    if size_key is None or time_key is None:
        raise LabError(
            f"{origin}: the header {','.join(header)!r} lacks a "
            f"{'size (bytes, mb, mib, tokens)' if size_key is None else 'time (seconds, ms, us, mean_ms)'}"
        )
    unit, factor = _SIZES[size_key]
    scale = _TIMES[time_key.removeprefix("mean_")]
    size, seconds = columns[size_key] * factor, columns[time_key] * scale
    if time_key.startswith("mean_"):
        return _table_of_means(name, unit, size, seconds, scale, columns, origin)
    if {"sd", "se", "n"} & set(header):
        raise LabError(f"{origin}: sd, se and n belong to means; name the time mean_{time_key}")
    return Samples(
        name, unit, size, seconds, columns.get("blocks"), columns.get("start"), columns.get("concurrency")
    )


def _columns(rows: list[list[str]], header: list[str], origin: str) -> dict[str, Any]:
    known = {*_SIZES, *_TIMES, *(f"mean_{key}" for key in _TIMES), *_OTHERS}
    if unknown := [key for key in header if key not in known]:
        raise LabError(f"{origin}: column {unknown[0]!r} is not known; there are {', '.join(sorted(known))}")
    if len(set(header)) != len(header):
        raise LabError(f"{origin}: a column is named twice in {','.join(header)!r}")
    for number, row in enumerate(rows[1:], 1):
        if len(row) != len(header):
            raise LabError(f"{origin}: data line {number} has {len(row)} cells, the header {len(header)}")
    found: dict[str, Any] = {}
    for index, key in enumerate(header):
        cells = [row[index].strip() for row in rows[1:]]
        if key == "start":
            found[key] = np.array(cells)
            continue
        values = np.empty(len(cells))
        for number, cell in enumerate(cells, 1):
            try:
                values[number - 1] = float(cell)
            except ValueError as error:
                raise LabError(
                    f"{origin}: data line {number}, column {key}: {cell!r} is no number"
                ) from error
        found[key] = values
    return found


def _table_of_means(
    name: str, unit: str, size: Floats, seconds: Floats, scale: float, columns: dict[str, Any], origin: str
) -> Summary:
    order = np.argsort(size)
    error: Floats | None = None
    freedom: Floats | None = None
    count = columns.get("n")
    if count is not None and (count < 2).any():
        raise LabError(f"{origin}: n counts the repeats behind a mean and its spread; it is from 2")
    if "se" in columns:
        error = columns["se"] * scale
    elif "sd" in columns:
        if count is None:
            raise LabError(f"{origin}: sd without n says nothing about a mean's error; add n, or give se")
        error = columns["sd"] * scale / np.sqrt(count)
    if error is not None:
        if not (np.isfinite(error).all() and (error > 0).all()):
            raise LabError(f"{origin}: sd and se are numbers above 0")
        freedom = np.full(size.shape, np.inf) if count is None else count - 1
        error, freedom = error[order], freedom[order]
    return Summary(name, unit, size[order], seconds[order], error, freedom)
