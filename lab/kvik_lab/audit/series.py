"""The columns and the rows of a table as series of quantities, each with its place."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from kvik_lab.audit.model import Cell, Place, Table
from kvik_lab.audit.quantity import Part, Quantity, header_unit, plain
from kvik_lab.audit.units import NONE, Unit


@dataclass(frozen=True)
class Slot:
    """One printed quantity and where it stands. `finer` is the same value where another table of
    the document prints it with more digits: the better input."""

    quantity: Quantity
    place: Place
    label: str
    finer: Quantity | None = None

    @property
    def best(self) -> Quantity:
        """The quantity to compute with."""
        return self.quantity if self.finer is None else self.finer


@dataclass(frozen=True)
class Series:
    """Quantities that a column or a row holds. `note` counts the derived values inside cells from
    1; 0 is the cells' own value. `shift` says whose rows these are: "" its own, "first", "last",
    "above", "below", "base"."""

    name: str
    position: int
    note: int
    slots: tuple[Slot | None, ...]
    shift: str = ""

    def __hash__(self) -> int:
        # series are keys of caches; their cells take long to hash, and names tell nearly all apart
        return hash((self.name, self.position, self.note, self.shift))

    @property
    def key(self) -> tuple[int, int]:
        """What tells a series from the others of its table, whatever its shift."""
        return (self.position, self.note)

    @cached_property
    def count(self) -> int:
        """How many values it has."""
        return sum(slot is not None for slot in self.slots)

    @cached_property
    def unit(self) -> Unit:
        """The unit of its first value."""
        return next(slot.quantity.unit for slot in self.slots if slot is not None)

    @cached_property
    def uniform(self) -> bool:
        """Whether all its values have one unit, and none is a bound."""
        present = [slot for slot in self.slots if slot is not None]
        units = {slot.best.unit for slot in present}
        return len(units) == 1 and not any(slot.best.bound for slot in present)

    @cached_property
    def printed(self) -> tuple[int, ...]:
        """The indices of its values that are no bounds."""
        return tuple(
            index for index, slot in enumerate(self.slots) if slot is not None and not slot.quantity.bound
        )

    @cached_property
    def prefixed(self) -> bool:
        """Whether a unit of its can be read in powers of 1024."""
        units = (slot.quantity.unit for slot in self.slots if slot is not None)
        return any(unit.binary != unit.scale for unit in units)


@dataclass(frozen=True)
class View:
    """A table seen along one axis: its series, and the labels of their index."""

    axis: str
    series: tuple[Series, ...]
    labels: tuple[str, ...]


def label_of(row: tuple[Cell, ...]) -> str:
    """The label of a row: the texts of its cells before the first value, or the first value."""
    texts = []
    for cell in row:
        if cell.main is not None:
            break
        if cell.text:
            texts.append(cell.text)
    return " ".join(texts) or (row[0].text if row else "")


def row_labels(table: Table) -> tuple[str, ...]:
    """The labels of all rows; a row without one carries the label above it."""
    labels: list[str] = []
    for row in table.rows:
        blank = not row[0].text
        own = label_of(row) if not blank or row[0].main else " ".join(c.text for c in row[:1] if c.text)
        labels.append(own or (labels[-1] if labels else ""))
    return tuple(labels)


def label_above(table: Table, row: int) -> str:
    """The text in a row's first cell, carried from above when it is blank; none where it is a number."""
    for at in range(row, -1, -1):
        if table.rows[at] and table.rows[at][0].text:
            return table.rows[at][0].text if table.rows[at][0].main is None else ""
    return ""


_COUNTS = re.compile(
    r"^(#|no\.|num|n$)|\b(count|requests?|hits?|misses|gpus?|nics?|nodes?|blocks|tokens?|layers?|heads?|runs?|pieces"
    r"|patterns?|models|levels?|threads?|slots|iterations?|samples?|cores|pages|files|batch|concurrency|ranks?|size)$"
    r"|数$|数量|件|回数|個数|枚数|次数|台数|並行度|トークン|并发",
    re.IGNORECASE,
)
_COUNT = Unit("", "count", NONE, 1.0, 1.0)


def _with_unit(quantity: Quantity, *texts: str) -> Quantity:
    if quantity.unit.kind != "plain":
        return quantity
    if texts and not quantity.decimals and not quantity.signed and _COUNTS.search(texts[0].strip()):
        return quantity.with_unit(_COUNT)
    for text in texts:
        found = header_unit(text)
        if found is not None:
            return quantity.with_unit(found)
    return quantity


def _slot(document: str, index: int, table: Table, at: tuple[int, int], part: Part) -> Slot:
    row, column = at
    cell = table.rows[row][column]
    place = Place(document, index, row, column, cell.line)
    texts = () if part.note else (table.header[column], label_above(table, row))
    return Slot(_with_unit(part.quantity, *texts), place, part.label)


def columns(document: str, index: int, table: Table) -> View:
    """A table as columns; derived values inside cells are series of their own."""
    series: list[Series] = []
    for column, name in enumerate(table.header):
        depth = max((len(row[column].parts) for row in table.rows), default=0)
        for note in range(depth):
            slots = tuple(
                _slot(document, index, table, (row, column), cells[column].parts[note])
                if len(cells[column].parts) > note
                else None
                for row, cells in enumerate(table.rows)
            )
            label = next((slot.label for slot in slots if slot is not None and slot.label), "")
            series.append(
                Series(name if note == 0 else f"{name} {label or 'in parentheses'}", column, note, slots)
            )
    return View("column", tuple(series), row_labels(table))


def rows(document: str, index: int, table: Table) -> View:
    """A table as rows."""
    labels = row_labels(table)
    series: list[Series] = []
    for row, cells in enumerate(table.rows):
        slots = tuple(
            _slot(document, index, table, (row, column), cell.parts[0]) if cell.parts else None
            for column, cell in enumerate(cells)
        )
        if sum(slot is not None for slot in slots):
            series.append(Series(labels[row], row, 0, slots))
    return View("row", tuple(series), table.header)


@lru_cache(maxsize=4096)
def shifted(series: Series, shift: str) -> Series:
    """The series whose value at each index is the first, the last, the one above or the one below."""
    slots = series.slots
    present = [slot for slot in slots if slot is not None]
    moved: tuple[Slot | None, ...]
    if shift == "first":
        moved = (present[0],) * len(slots)
    elif shift == "last":
        moved = (present[-1],) * len(slots)
    elif shift == "above":
        moved = (None, *slots[:-1])
    else:
        moved = (*slots[1:], None)
    return replace(series, slots=moved, shift=shift)


_WORD = re.compile(r"[a-z0-9_.]+|[^\W\d_a-z]+")


@lru_cache(maxsize=4096)
def words(name: str) -> frozenset[str]:
    """The words of a name, without its unit, hyphens as separators."""
    clean = re.sub(r"[(\[][^()\[\]]*[)\]]", lambda m: " " if header_unit(m[0]) else m[0], plain(name))
    return frozenset(_WORD.findall(clean.lower().replace("-", " ").replace("_", " ").replace("=", " ")))


def refine(views: list[View]) -> list[View]:
    """Columns of several tables of a document, with the digits that other tables have for the same
    cells.

    The same cell has the same row label and column name, and an overlapping interval.
    """
    known: dict[tuple[str, frozenset[str]], list[Quantity]] = {}
    for view in views:
        for series in view.series:
            for label, slot in zip(view.labels, series.slots, strict=True):
                if slot is not None and series.note == 0 and words(series.name) and slot.quantity.single:
                    known.setdefault((label, words(series.name)), []).append(slot.quantity)
    return [
        replace(
            view,
            series=tuple(
                replace(
                    series,
                    slots=tuple(
                        _finer(slot, known.get((label, words(series.name)), []))
                        for label, slot in zip(view.labels, series.slots, strict=True)
                    ),
                )
                if series.note == 0
                else series
                for series in view.series
            ),
        )
        for view in views
    ]


def _finer(slot: Slot | None, others: list[Quantity]) -> Slot | None:
    if slot is None:
        return None
    own = slot.quantity
    best = own
    for other in others:
        same = other.unit.scale == own.unit.scale or "plain" in (other.unit.kind, own.unit.kind)
        if same and other.half < best.half and own.low <= other.number <= own.high:
            best = other
    return slot if best is own else replace(slot, finer=best.with_unit(own.unit))
