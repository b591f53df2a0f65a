# ruff: noqa: RUF001 - the marks and words that tables print
"""Counts in a table against the lists that stand beside them: 5 levels, and five values."""

from __future__ import annotations

import re

from kvik_lab.audit.model import Check, Place, Table
from kvik_lab.audit.series import View

# a comma between thousands separates nothing
_SEPARATOR = re.compile(r"(?:(?<!\d),|,(?!\d{3}(?!\d))|[、;/，])\s*")


def listed(text: str) -> int:
    """How many values a list has; 0 when it is none."""
    pieces = [piece.strip() for piece in _SEPARATOR.split(text)]
    if len(pieces) < 2 or not all(pieces) or any(len(piece) > 24 for piece in pieces):
        return 0
    return 0 if "..." in text or "…" in text or "等" in text else len(pieces)


def level_counts(document: str, index: int, table: Table, view: View) -> list[Check]:
    """Checks of a column of counts whose rows list what they count, where most agree, and two of different
    counts: what is 2 everywhere agrees with any two words."""
    best: list[Check] = []
    for series in view.series:
        numbers = [(row, slot) for row, slot in enumerate(series.slots) if slot is not None]
        if series.note or any(s.quantity.decimals or s.quantity.unit.dimension for _, s in numbers):
            continue
        for column in range(len(table.header)):
            checks = []
            for row, slot in numbers:
                text = table.rows[row][column].text
                count = listed(text)
                if column == series.position or not count:
                    continue
                printed = slot.quantity
                good = printed.number == count
                rule = f"{series.name} = how many values {table.header[column]} lists"
                ending = f"printed {printed.text}" if good else f"so {count}; printed is {printed.text}"
                why = None if good else "miscounted"
                place = Place(document, index, row, series.position, table.rows[row][series.position].line)
                checks.append(
                    Check(
                        place,
                        "cell",
                        printed.text,
                        printed.show(count),
                        good,
                        rule,
                        text,
                        f"{rule}: {text} are {count}, {ending}",
                        why,
                    )
                )
            right = [check.printed for check in checks if check.holds]
            if len(set(right)) >= 2 and 2 * len(right) > len(checks) > len(best):
                best = checks
    return best
