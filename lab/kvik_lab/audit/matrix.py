# ruff: noqa: RUF001, RUF002 - the marks and words that tables print
"""Tables that hold times and rates of the same cells in different rows: rate = count × size / time.

The rows of the rates stand under those of the times, with the same labels; the count stands in the
column's header ("20 blocks") or in a row's label, the size in the row's label ("16K") or in the
header.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from kvik_lab.audit.model import Check, Table, recomputed
from kvik_lab.audit.quantity import Quantity, parse_cell, quantities
from kvik_lab.audit.rules import Value, holds
from kvik_lab.audit.series import Slot, View
from kvik_lab.audit.units import BYTES, TIME, combine


@dataclass(frozen=True)
class _Cell:
    slot: Slot
    keys: tuple[str, ...]
    size: Quantity
    count: Quantity


def rate_checks(table: Table, view: View) -> list[Check]:
    """Checks of the rates of a table against the times above them, where most follow."""
    cells = list(_labelled(table, view))
    times = {
        (cell.keys, cell.slot.label, cell.slot.place.column): cell
        for cell in cells
        if cell.slot.quantity.unit.dimension == TIME
    }
    checks: list[Check] = []
    for cell in cells:
        if cell.slot.quantity.unit.dimension != combine(BYTES, TIME, -1):
            continue
        time = times.get((cell.keys, cell.slot.label, cell.slot.place.column))
        if time is not None:
            checks.append(_check(cell, time))
    right = sum(check.holds for check in checks)
    return checks if right >= 3 and right >= 2 * (len(checks) - right) else []


def _labelled(table: Table, view: View) -> Iterator[_Cell]:
    """The cells with what their row and column say: keys, a size, a count."""
    carried: list[str] = [""] * len(table.header)
    for row, cells in enumerate(table.rows):
        for column, cell in enumerate(cells):
            if cell.text and not any(part.label for part in cell.parts):
                carried = (
                    [*carried[:column], cell.text, *([""] * (len(carried) - column - 1))]
                    if not cell.parts
                    else ([*carried[:column], cell.text, *carried[column + 1 :]])
                )
        for series in view.series:
            slot = series.slots[row]
            count = _count(series.name)
            if slot is None or series.note or count is None:
                continue
            labels = tuple(text for text in carried[1 : series.position] if text and _size(text) is not None)
            size = next((s for s in map(_size, labels) if s is not None), None)
            if size is not None:
                yield _Cell(slot, labels, size, count)


def _count(header: str) -> Quantity | None:
    match = re.match(r"^(\d[\d,]*)\s*(blocks?|个|块|ブロック|requests|pages)", header)
    found = parse_cell(match[1]) if match else ()
    return found[0].quantity if found else None


def _size(text: str) -> Quantity | None:
    found = quantities(text)
    if len(found) == 1 and found[0].unit.kind in ("count", "bytes") and found[0].unit.scale >= 1000:
        return found[0]
    return None


def _check(cell: _Cell, time: _Cell) -> Check:
    printed, elapsed = cell.slot.quantity, time.slot.quantity
    scale, unit = printed.unit.scale, elapsed.unit.scale
    total = cell.count.number * cell.size.number * cell.size.unit.binary
    value = Value(
        total / (elapsed.high * unit), total / (elapsed.number * unit), total / (elapsed.low * unit), scale
    )
    number = value.middle / scale
    rule = "bandwidth = count × size / time"
    formula = f"{cell.count.text} × {cell.size.text} / {elapsed.text} {elapsed.unit.symbol}"
    follows, good = printed.show(number), holds(printed, value)
    return recomputed(cell.slot.place, printed, number, follows, good, rule, formula)
