"""Measured values that stand in two tables of a document under different keys: like compared with
unlike.

A measured value of five or more digits does not come out the same twice by chance. Where one column of
two tables holds it, in a row for 2,000 tokens here and for 2,048 there, one of the keys is not what was
measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvik_lab.audit.model import Check, Place
from kvik_lab.audit.rules import exact
from kvik_lab.audit.series import Series, Slot, View, words

_DIGITS = 5


def displaced(views: Sequence[View], derived: set[Place]) -> list[Check]:
    """A check for each row whose values another table prints under another key. The table whose
    keys are rounder is the one that is taken to have moved them."""
    checks = []
    for here, view in enumerate(views):
        for there, other in enumerate(views):
            if here != there:
                checks += list(_moved((here, view), (there, other), derived))
    return list({check.place: check for check in reversed(checks)}.values())[::-1]


def _keys(view: View) -> Series | None:
    first = next((s for s in view.series if s.position == 0 and s.note == 0), None)
    return first if first is not None and first.count == len(view.labels) else None


def _moved(one: tuple[int, View], two: tuple[int, View], derived: set[Place]) -> Iterator[Check]:
    mine, theirs = _keys(one[1]), _keys(two[1])
    if mine is None or theirs is None or not words(mine.name) & words(theirs.name):
        return
    for index, key in enumerate(mine.slots):
        for other, their_key in enumerate(theirs.slots):
            if key is None or their_key is None or not _rounder(key, their_key):
                continue
            shared = _shared((one[1], index), (two[1], other), derived)
            if shared:
                yield _check(key, their_key, shared, two[0])


def _rounder(key: Slot, other: Slot) -> bool:
    """Whether a key differs from another and is the rounder one."""
    if key.quantity.number == other.quantity.number:
        return False
    mine, theirs = key.quantity.digits.replace(",", ""), other.quantity.digits.replace(",", "")
    return len(mine.rstrip("0")) < len(theirs.rstrip("0"))


def _shared(one: tuple[View, int], two: tuple[View, int], derived: set[Place]) -> list[str]:
    found = []
    for series in one[0].series:
        slot = series.slots[one[1]]
        if slot is None or series.note or slot.place in derived or not _telling(series, slot):
            continue
        for other in two[0].series:
            match = other.slots[two[1]]
            if match is None or match.quantity.digits != slot.quantity.digits:
                continue
            if _telling(other, match) and words(series.name) & words(other.name):
                found.append(f"{slot.quantity.text} ({series.name})")
    return found


def _telling(series: Series, slot: Slot) -> bool:
    """Whether a value does not come out twice by chance: it is measured, stands in its column once, and has
    digits enough without the zeros at its end."""
    digits = slot.quantity.digits.replace(",", "").replace(".", "").strip("0")
    again = sum(one is not None and one.quantity.digits == slot.quantity.digits for one in series.slots)
    return len(digits) >= _DIGITS and again == 1 and not exact(slot.quantity, "difference")


def _check(key: Slot, other: Slot, shared: list[str], table: int) -> Check:
    rule = f"the row of table {table + 1} with the same measured values"
    values = ", ".join(shared)
    where = f"stands in table {table + 1} at {other.quantity.text}"
    text = f"{values} {where}; here it is printed at {key.quantity.text}"
    why = "values of different keys in one comparison"
    return Check(key.place, "cell", key.quantity.text, other.quantity.text, False, rule, values, text, why)
