"""What an audit reads and what it says: documents, tables, cells, and checks of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvik_lab.audit.quantity import Part, Quantity


@dataclass(frozen=True)
class Place:
    """Where something is printed. Rows and columns count from 0 without the header; lines from 1.

    For prose, `table`, `row` and `column` are None.
    """

    document: str
    table: int | None
    row: int | None
    column: int | None
    line: int


@dataclass(frozen=True)
class Cell:
    """A cell as it is read: its text without markup, and the quantities in it."""

    text: str
    line: int
    parts: tuple[Part, ...]

    @property
    def main(self) -> Part | None:
        """The quantity that the cell is about, or None for a label, a list or a missing value."""
        return self.parts[0] if self.parts else None


@dataclass(frozen=True)
class Table:
    """A table; every row is as long as the header. `heading` is the text that stands above it."""

    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    line: int
    heading: str

    @property
    def cells(self) -> int:
        """How many cells its body has."""
        return sum(len(row) for row in self.rows)


@dataclass(frozen=True)
class Prose:
    """A line of text beside the tables. `table` is the index of the last table above it, or None."""

    text: str
    line: int
    heading: str
    table: int | None
    code: bool


@dataclass(frozen=True)
class Document:
    """A text as a reader gives it."""

    name: str
    tables: tuple[Table, ...]
    prose: tuple[Prose, ...]


@dataclass(frozen=True)
class Check:
    """A derived cell or a claim that was recognised and recomputed.

    `printed` and `follows` are as they stand or would stand in the text, at the printed precision.
    `rule` says what derives from what, `formula` is the arithmetic, `text` says both with the
    result, and `diagnosis` says what may have happened where something fits.
    """

    place: Place
    kind: Literal["cell", "claim"]
    printed: str
    follows: str
    holds: bool
    rule: str
    formula: str
    text: str
    diagnosis: str | None


def recomputed(
    place: Place, printed: Quantity, number: float, follows: str, good: bool, rule: str, formula: str
) -> Check:
    """The check of a printed quantity where `number` (in its unit) follows, as yet without a diagnosis."""
    exact = f"{number:.6g}{(' ' + printed.unit.symbol) if printed.unit.symbol else ''}"
    ending = f", printed {printed.text}" if good else f", so {follows}; printed is {printed.text}"
    kind: Literal["cell", "claim"] = "claim" if place.table is None else "cell"
    text = f"{rule}: {formula} = {exact}{ending}"
    return Check(place, kind, printed.text, follows, good, rule, formula, text, None)


@dataclass(frozen=True)
class Audit:
    """What was read, what was recomputed, and what does not follow."""

    tables: tuple[Table, ...]
    checks: tuple[Check, ...]

    @property
    def findings(self) -> tuple[Check, ...]:
        """The checks that do not hold."""
        return tuple(check for check in self.checks if not check.holds)

    @property
    def cells(self) -> int:
        """How many cells the tables have."""
        return sum(table.cells for table in self.tables)
