"""Measurements as a CSV file in long form: one row a value, with named columns.

`iteration` and `value` must be there; `start` (default: one start), and `block`, may be. A file that has them
under other names is told so by --start, --iteration, --value and --block.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

import numpy as np

from kvik_lab.errors import LabError
from kvik_lab.infer.arrays import Floats

ROLES = ("start", "iteration", "value", "block")


@dataclass(frozen=True)
class Columns:
    """What the columns are called."""

    start: str = "start"
    iteration: str = "iteration"
    value: str = "value"
    block: str = "block"


@dataclass(frozen=True)
class Starts:
    """The values of each start in the order of their iterations, and the block that each start ran in; all
    starts have one, or none has."""

    source: str
    values: Mapping[str, Floats]
    blocks: Mapping[str, str] = field(default_factory=dict)


def read(path: Path, columns: Columns | None = None) -> Starts:
    """Read a file; raises LabError that names the line and what is wrong with it."""
    columns = columns or Columns()
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise LabError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise LabError(f"{path}: is not UTF-8 text (byte {error.start}); export it as CSV") from error
    return parse(text, str(path), columns)


def parse(text: str, source: str, columns: Columns) -> Starts:
    """Read the text of a file, named `source` in what is said about it."""
    reader = csv.DictReader(text.splitlines(), strict=True)
    names = [n.strip() for n in reader.fieldnames or []]
    reader.fieldnames = names
    check_header(names, columns, source)
    rows: dict[str, dict[int, tuple[float, int]]] = {}
    blocks: dict[str, str] = {}
    try:
        for row in reader:
            where = f"{source}, line {reader.line_num}"
            if None in row or None in row.values():
                raise LabError(f"{where}: has not the {len(names)} columns that the header names")
            start = row[columns.start].strip() if columns.start in names else "1"
            iteration = whole(row[columns.iteration], where, columns.iteration)
            value = _value(row[columns.value], where, columns.value)
            seen = rows.setdefault(start, {})
            if iteration in seen:
                raise LabError(
                    f"{where}: start {start!r} has iteration {iteration} already (line {seen[iteration][1]}"
                    "); if these are several starts, give them a column 'start'"
                )
            seen[iteration] = (value, reader.line_num)
            if columns.block in names:
                _place(blocks, start, row[columns.block].strip(), where)
    except csv.Error as error:
        raise LabError(f"{source}, line {reader.line_num}: is not CSV: {error}") from error
    if not rows:
        raise LabError(f"{source}: has a header and no values")
    values = {s: np.array([found[i][0] for i in sorted(found)]) for s, found in rows.items()}
    return Starts(source, values, blocks)


def check_header(names: list[str], columns: Columns, source: str) -> None:
    """Raise LabError for a name that is there twice, and for a column that is needed or was named and is not
    there."""
    if not names or not any(names):
        raise LabError(f"{source}: is empty; it takes a header such as start,iteration,value")
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise LabError(f"{source}: the header names {', '.join(twice)} more than once")
    for role, wanted in (("iteration", columns.iteration), ("value", columns.value)):
        if wanted in names:
            continue
        near = get_close_matches(wanted, names, 1)
        hint = f"; is it {near[0]!r}? then --{role} {near[0]}" if near else f"; or name it with --{role}"
        raise LabError(f"{source}: there is no column {wanted!r} among {', '.join(names)}{hint}")
    for role, wanted, usual in (("start", columns.start, "start"), ("block", columns.block, "block")):
        if wanted != usual and wanted not in names:
            raise LabError(
                f"{source}: there is no column {wanted!r} among {', '.join(names)}, named by --{role}"
            )


def whole(text: str, where: str, name: str) -> int:
    """The number of an iteration; LabError where it is none."""
    try:
        return int(text)
    except ValueError as error:
        raise LabError(f"{where}: {name} is {text!r}, not a whole number") from error


def _value(text: str, where: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        what = "empty" if not text.strip() else f"{text!r}, not a number"
        raise LabError(f"{where}: {name} is {what}; leave out rows of what was not measured") from error
    if not math.isfinite(value):
        raise LabError(f"{where}: {name} is {text.strip()}; leave out rows of what was not measured")
    return value


def _place(blocks: dict[str, str], start: str, block: str, where: str) -> None:
    if not block:
        raise LabError(f"{where}: block is empty; each row says which block its start ran in")
    if blocks.setdefault(start, block) != block:
        raise LabError(
            f"{where}: start {start!r} is in block {block!r} here and in {blocks[start]!r} above; a start "
            "runs in one block"
        )
