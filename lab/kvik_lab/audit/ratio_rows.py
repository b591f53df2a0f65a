"""A row that is what the two rows above it are to each other: "ratio", "speed-up", "difference".

A column has one such cell, too few to find the rule by. The label says it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from kvik_lab.audit import rules as r
from kvik_lab.audit.model import Check, recomputed
from kvik_lab.audit.quantity import Quantity
from kvik_lab.audit.series import Series, Slot, View
from kvik_lab.audit.slips import DIGITS, general

_LABEL = re.compile(
    r"^\W*(ratio|speed-? ?up|improvement|gain|change|overhead|diff(erence)?|delta|reduction|factor|Δ"
    r"|比率?|差|倍率|改善率|変化率|提升|加速比)(?![A-Za-z])",
    re.IGNORECASE,
)


def ratio_rows(view: View) -> list[Check]:
    """Checks of each such cell that follows from the two numbers above it, or is a slip of digits of what
    does."""
    rows = [
        row
        for row in range(2, len(view.labels))
        if _LABEL.match(view.labels[row]) and not any(map(_LABEL.match, view.labels[row - 2 : row]))
    ]
    return [check for row in rows for series in view.series for check in _cell(series, row)]


def _cell(series: Series, row: int) -> Iterator[Check]:
    one, other, slot = series.slots[row - 2 : row + 1]
    if one is None or other is None or slot is None or series.note or not slot.quantity.single:
        return
    checks = [
        _check(slot, value, family.pattern.format(a.text, b.text), family)
        for a, b in ((one.best, other.best), (other.best, one.best))
        if a.unit.dimension == b.unit.dimension
        for family in _families(slot.quantity, a)
        if (value := r.compute(family, [a, b], slot.quantity)) is not None
    ]
    good = next((check for check in checks if check.holds), None)
    slips = [check for check in checks if (check.diagnosis or "").startswith(DIGITS)]
    if good is not None or slips:
        yield good or slips[0]


def _families(printed: Quantity, above: Quantity) -> tuple[r.Family, ...]:
    """What a cell in its form may be of two others."""
    if printed.unit.kind == "percent":
        return (r.CHANGE,) if printed.signed else (r.CHANGE, r.SIZE)
    if printed.unit.kind == "ratio":
        return (r.RATIO,)
    if printed.unit.kind == "plain" and above.unit.kind != "plain":
        return (r.RATIO, r.DIFFERENCE)
    same = printed.unit.dimension == above.unit.dimension
    return (r.DIFFERENCE, r.RATIO) if same and printed.unit.kind == "plain" else (r.DIFFERENCE,) * same


def _check(slot: Slot, value: r.Value, formula: str, family: r.Family) -> Check:
    printed, number = slot.quantity, value.middle / value.scale
    good = r.holds(printed, value)
    rule = f"{family.words.format('the other', 'the other')} of the two rows above"
    check = recomputed(slot.place, printed, number, printed.show(number), good, rule, formula)
    return replace(check, diagnosis=None if good else general(printed, value))
