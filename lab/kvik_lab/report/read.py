"""Measurements in long form with factors: one row a value, one column a factor.

As `kvik lab series` reads them, with three things more: columns that are not start, iteration, value or block
are factors, a value may be a word that says why it is missing, and a column `unit` says what values are in.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvik_lab.errors import LabError
from kvik_lab.infer.table import Columns, check_header, whole
from kvik_lab.report.cells import Missing, Number, State

MOST_LEVELS = 60
SUSPECT = "suspect"
FACTS = {
    "when": "when",
    "date": "when",
    "where": "where",
    "host": "where",
    "node": "where",
    "version": "versions",
    "versions": "versions",
    "emulated": "emulated",
    "suspect": SUSPECT,
}
"""Columns that say when, where and with which versions was measured, what of it was emulated, and which gates
call its run suspect; they are no factors unless they are named. So is a column named as a program's version,
such as `vllm_version`."""
UNIT = "unit"
"""The column that says what the values are in; it is no factor either, unless it is named."""
RUN = "run"
"""The column that tells runs of one combination in one start apart; nor is it a factor, unless it is
named."""
MOST_TOLD = 4
SIZES = ("bytes", "kb", "mb", "gb", "kib", "mib", "gib", "tokens")
ARMS = ("arm", "backend", "transport", "configuration", "config", "variant", "build")

_WORDS = dict.fromkeys(("", "-", "na", "n/a", "none", "null", "not measured"), State.NOT_MEASURED)
_WORDS |= dict.fromkeys(("failed", "failure", "error"), State.FAILED)
_WORDS |= dict.fromkeys(("in progress", "pending", "running"), State.IN_PROGRESS)
_WORDS |= {"not possible": State.NOT_POSSIBLE, "impossible": State.NOT_POSSIBLE}


@dataclass(frozen=True)
class Run:
    """The values of one start under one set of levels, in the order of their iterations from `first`."""

    start: str
    block: str
    first: int
    values: tuple[Number, ...]

    @property
    def known(self) -> tuple[float, ...]:
        """The values that are there."""
        return tuple(value for value in self.values if not isinstance(value, Missing))


@dataclass(frozen=True)
class Cell:
    """What was run of one arm under one condition: the levels of the other factors, in their order."""

    arm: str
    condition: tuple[str, ...]
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Data:
    """All cells. `arm` is the factor that is compared, `others` are the rest; `size` is one of these, or
    None. `constant` are factors with one level, `facts` what columns say of when, where and with which
    versions a start was measured, `unit` what a column says that the values are in."""

    sources: tuple[str, ...]
    arm: str
    arms: tuple[str, ...]
    others: tuple[str, ...]
    size: str | None
    constant: Mapping[str, str]
    cells: tuple[Cell, ...]
    facts: Mapping[str, str] = field(default_factory=dict)
    unit: str | None = None

    def find(self, arm: str, condition: tuple[str, ...]) -> Cell | None:
        """The cell, or None where nothing was run."""
        return next((c for c in self.cells if c.arm == arm and c.condition == condition), None)

    @property
    def conditions(self) -> tuple[tuple[str, ...], ...]:
        """Every condition that was run, in order."""
        return tuple(dict.fromkeys(cell.condition for cell in self.cells))


@dataclass(frozen=True)
class Choice:
    """What the columns are: None lets `read` find out."""

    columns: Columns = field(default_factory=Columns)
    arm: str | None = None
    size: str | None = None
    ignore: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Row:
    where: str
    file: str
    levels: Mapping[str, str]
    start: str
    block: str
    iteration: int
    value: Number
    facts: Mapping[str, str]
    unit: str


def read(paths: Sequence[Path], choice: Choice) -> Data:
    """Read files; LabError says which line cannot be used. Several files are arms, unless a column is."""
    rows: list[_Row] = []
    common: list[str] | None = None
    for path, name in zip(paths, _names(paths), strict=True):
        found, factors = _rows(path, name, choice)
        rows += found
        common = factors if common is None else [n for n in common if n in factors]
    names = common or []
    if len(paths) > 1 and choice.arm is None:
        names = ["file", *names]
        rows = [_with_file(row) for row in rows]
    levels = {name: tuple(dict.fromkeys(row.levels[name] for row in rows)) for name in names}
    for name, found_levels in levels.items():
        if len(found_levels) > MOST_LEVELS:
            raise LabError(
                f"column {name!r} has {len(found_levels)} levels, more than the {MOST_LEVELS} a factor may "
                f"have; if it is none, leave it out with --ignore {name}"
            )
    size = _size(names, levels, choice)
    arm = _arm(names, levels, size, choice, len(paths))
    others = tuple(n for n in names if n != arm and (len(levels[n]) > 1 or n == size))
    constant = {n: levels[n][0] for n in names if n != arm and n not in others}
    return Data(
        tuple(str(p) for p in paths),
        arm or "all",
        levels[arm] if arm else ("all",),
        others,
        size,
        constant,
        tuple(_cells(rows, arm, others, size, many=len(paths) > 1)),
        _told(rows),
        _unit(rows),
    )


def is_fact(name: str) -> bool:
    """Whether a column of this name says when, where or with which versions was measured."""
    return name.lower() in FACTS or name.lower().endswith("_version")


def missing(text: str) -> State | None:
    """Why there is no value, where a word says it in its place."""
    return _WORDS.get(text.strip().lower())


def _unit(rows: Sequence[_Row]) -> str | None:
    found = dict.fromkeys(row.unit for row in rows if row.unit)
    if len(found) > 1:
        raise LabError(
            f"by the column {UNIT!r} values are in {', '.join(found)}; make a report of each unit, or leave "
            f"the column out with --ignore {UNIT}"
        )
    return next(iter(found), None)


def _told(rows: Sequence[_Row]) -> dict[str, str]:
    """When (the first and the last), where, and versions, as the rows have them."""
    found: dict[str, dict[str, None]] = {}
    for row in rows:
        for name, value in row.facts.items():
            program = name.lower().removesuffix("_version") if name.lower().endswith("_version") else ""
            kind = "versions" if program else FACTS[name.lower()]
            if value and kind != SUSPECT:
                found.setdefault(kind, {})[f"{program} {value}".strip()] = None
    told = {}
    for kind, values in found.items():
        listed = sorted(values)
        if kind == "when" and len(listed) > 1:
            listed = [f"{listed[0]} to {listed[-1]}"]
        more = f" and {len(listed) - MOST_TOLD} more" if len(listed) > MOST_TOLD else ""
        told[kind] = ", ".join(listed[:MOST_TOLD]) + more
    return {**told, **_suspect(rows)}


def _suspect(rows: Sequence[_Row]) -> dict[str, str]:
    """How many values are of runs that may have been disturbed: they count, so the page says it."""
    values = [row.facts for row in rows if not isinstance(row.value, Missing)]
    called = [said for facts in values if (said := _called(facts))]
    gates = sorted({gate for said in called for gate in said.split()})
    if not called:
        return {}
    return {SUSPECT: f"{len(called)} of {len(values)} values, by {', '.join(gates)}; they count"}


def _called(facts: Mapping[str, str]) -> str:
    return next((value for name, value in facts.items() if FACTS.get(name.lower()) == SUSPECT), "")


def _names(paths: Sequence[Path]) -> list[str]:
    stems = [path.stem for path in paths]
    return stems if len(set(stems)) == len(stems) else [str(path) for path in paths]


def _with_file(row: _Row) -> _Row:
    levels = {"file": row.file, **row.levels}
    return replace(row, levels=levels)


def _rows(path: Path, name: str, choice: Choice) -> tuple[list[_Row], list[str]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise LabError(f"{path}: cannot be read: {error}") from error
    columns = choice.columns
    reader = csv.reader(text.splitlines(), strict=True)
    try:
        table = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(row)]
    except csv.Error as error:
        raise LabError(f"{path}, line {reader.line_num}: {error}") from error
    if len(table) < 2:
        raise LabError(f"{path}: has no values; it takes a header such as start,iteration,value and rows")
    header = table[0][1]
    check_header(header, columns, str(path))
    roles = {columns.start, columns.iteration, columns.value, columns.block, *choice.ignore}
    others = [n for n in header if n not in roles]
    told = [n for n in others if n not in (choice.arm, choice.size) and (is_fact(n) or n in (UNIT, RUN))]
    factors = [n for n in others if n not in told]
    rows = []
    for line, cells in table[1:]:
        where = f"{path}, line {line}"
        if len(cells) != len(header):
            raise LabError(f"{where}: has {len(cells)} cells, the header {len(header)}")
        rows.append(_row(where, name, dict(zip(header, cells, strict=True)), factors, told, columns))
    return rows, factors


def _row(
    where: str,
    file: str,
    cells: Mapping[str, str],
    factors: Iterable[str],
    told: Sequence[str],
    columns: Columns,
) -> _Row:
    return _Row(
        where,
        file,
        {name: cells[name] for name in factors},
        cells.get(columns.start, "1"),
        cells.get(columns.block, ""),
        whole(cells[columns.iteration], where, columns.iteration),
        _value(cells[columns.value], where, columns.value),
        {name: cells[name] for name in told if is_fact(name)},
        cells[UNIT] if UNIT in told else "",
    )


def _value(text: str, where: str, name: str) -> Number:
    state = missing(text)
    if state is not None:
        return Missing(state)
    try:
        value = float(text)
    except ValueError as error:
        raise LabError(
            f"{where}: {name} is {text!r}, neither a number nor a word for a missing one "
            "(failed, in progress, not possible, not measured)"
        ) from error
    if not math.isfinite(value):
        raise LabError(f"{where}: {name} is {text}; write why it is missing, such as failed")
    return value


def _size(names: list[str], levels: Mapping[str, tuple[str, ...]], choice: Choice) -> str | None:
    if choice.size is not None and choice.size not in names:
        raise LabError(f"there is no column {choice.size!r} among {', '.join(names)}, named by --size")
    found = choice.size or next(
        (n for n in names if n != choice.arm and n.lower().rpartition("_")[2] in SIZES), None
    )
    if found is None:
        return None
    for text in levels[found]:
        try:
            usable = math.isfinite(float(text)) and float(text) > 0
        except ValueError:
            usable = False
        if not usable:
            if choice.size is None:
                return None
            raise LabError(f"column {found!r} holds {text!r}; a size is a number above 0")
    return found


def _arm(
    names: list[str],
    levels: Mapping[str, tuple[str, ...]],
    size: str | None,
    choice: Choice,
    files: int,
) -> str | None:
    if choice.arm is not None:
        if choice.arm not in names:
            raise LabError(f"there is no column {choice.arm!r} among {', '.join(names)}, named by --arm")
        return choice.arm
    if files > 1:
        return "file"
    vary = [n for n in names if n != size and len(levels[n]) > 1]
    return next((n for n in vary if n.lower() in ARMS), vary[0] if vary else None)


def _cells(
    rows: Sequence[_Row], arm: str | None, others: tuple[str, ...], size: str | None, many: bool
) -> list[Cell]:
    grouped: dict[tuple[str, tuple[str, ...]], dict[str, dict[int, _Row]]] = {}
    for row in rows:
        key = (row.levels[arm] if arm else "all", tuple(row.levels[n] for n in others))
        start = f"{row.file}/{row.start}" if many and arm != "file" else row.start
        place = grouped.setdefault(key, {}).setdefault(start, {})
        if row.iteration in place:
            raise LabError(
                f"{row.where}: start {row.start!r} has iteration {row.iteration} already "
                f"({place[row.iteration].where}); name what differs in a column of its own"
            )
        place[row.iteration] = row
    at = others.index(size) if size is not None and size in others else None

    def order(key: tuple[str, tuple[str, ...]]) -> float:
        return 0.0 if at is None else float(key[1][at])

    return [
        Cell(*key, tuple(_run(s, r) for s, r in grouped[key].items())) for key in sorted(grouped, key=order)
    ]


def _run(start: str, rows: Mapping[int, _Row]) -> Run:
    """The values from the first iteration to the last; one that no row has was not measured."""
    first, last = min(rows), max(rows)
    if last - first > 10 * len(rows) + 1000:
        raise LabError(
            f"start {start!r}: iterations go from {first} to {last} with {len(rows)} values; count them"
        )
    values = tuple(
        rows[at].value if at in rows else Missing(State.NOT_MEASURED) for at in range(first, last + 1)
    )
    blocks = {row.block for row in rows.values()}
    if len(blocks) > 1:
        raise LabError(f"start {start!r} is in the blocks {', '.join(sorted(blocks))}; a start runs in one")
    return Run(start, blocks.pop(), first, values)
