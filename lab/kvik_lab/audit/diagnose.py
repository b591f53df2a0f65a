"""What may have happened to a number that does not follow: the slip under which it would."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvik_lab.audit import rules as r
from kvik_lab.audit.derive import Found
from kvik_lab.audit.quantity import Quantity
from kvik_lab.audit.rules import Rule, Value, evaluate
from kvik_lab.audit.series import View
from kvik_lab.audit.slips import general, matches


def diagnose(found: Found, index: int, value: Value, view: View) -> str | None:
    """The slip that gives what is printed, or None when none of the known ones does."""
    slot = found.target.slots[index]
    if slot is None:
        return None
    printed = slot.quantity
    for text, number in _candidates(found, index, printed, value, view):
        if matches(printed, number / value.scale, value):
            return text
    return general(printed, value)


def _candidates(
    found: Found, index: int, printed: Quantity, value: Value, view: View
) -> Iterator[tuple[str, float]]:
    """Other computations, with what they give in base units."""
    yield from _bases(found, index, printed)
    yield from _other_rows(found, index, value)
    yield from _other_columns(found, index, printed, view)
    slots = found.rule.slots(index) or []
    numbers = [slot.quantity.number * slot.quantity.unit.scale for slot in slots]
    if found.rule.family.name in ("sum", "mean", "product", "geometric mean"):
        yield from _aggregates(found, numbers)
    yield from _neighbours(found, index, value)


def _bases(found: Found, index: int, printed: Quantity) -> Iterator[tuple[str, float]]:
    rule = found.rule
    if rule.family.name in ("change", "reduction", "ratio", "size of change") and len(rule.inputs) == 2:
        a, b = rule.inputs
        swapped = {"change": r.REDUCTION, "reduction": r.CHANGE}.get(rule.family.name)
        if swapped is not None:
            base = a if rule.family.name == "change" else b
            other = evaluate(replace(rule, family=swapped), index, printed)
            if other is not None:
                yield f"the wrong base: relative to {base.name or 'the other value'}", other.middle
                yield "the wrong base and the sign", -other.middle
        turned = evaluate(replace(rule, inputs=(b, a)), index, printed)
        if turned is not None:
            yield "turned around: the wrong base", turned.middle
            if rule.family.name != "ratio":
                yield "turned around: the wrong base and the sign", -turned.middle
        for family in (r.RATIO, r.CHANGE):
            other = evaluate(replace(rule, family=family), index, printed)
            if other is not None and family.name != rule.family.name:
                yield f"{family.words.format(a.name, b.name)} is printed", other.middle


def _other_rows(found: Found, index: int, value: Value) -> Iterator[tuple[str, float]]:
    for other, slot in enumerate(found.target.slots):
        if other == index or slot is None:
            continue
        there = evaluate(found.rule, other, slot.quantity)
        if there is None:
            continue
        swapped = matches(slot.quantity, value.middle / value.scale, value)
        name = f"row {other + 1}"
        if swapped and other in found.misses:
            yield f"swapped with {name}", there.middle
        yield f"what follows for {name}", there.middle


def _other_columns(found: Found, index: int, printed: Quantity, view: View) -> Iterator[tuple[str, float]]:
    used = {series.key for series in found.rule.inputs}
    if found.rule.family.name in r.MANY or len(found.rule.inputs) > 3:
        return
    for at, series in enumerate(found.rule.inputs):
        for other in view.series:
            if other.key in used or other.key == found.target.key or other.note:
                continue
            inputs = tuple(other if i == at else s for i, s in enumerate(found.rule.inputs))
            value = evaluate(Rule(found.rule.family, inputs, found.rule.binary), index, printed)
            if value is not None:
                yield f"another column: computed with {other.name} in place of {series.name}", value.middle
    for other in view.series:
        slot = other.slots[index]
        if (
            other.key != found.target.key
            and slot is not None
            and slot.quantity.unit.kind == printed.unit.kind
        ):
            yield f"the value of another {view.axis}: {other.name}", slot.quantity.number * printed.unit.scale


def _aggregates(found: Found, numbers: Sequence[float]) -> Iterator[tuple[str, float]]:
    function = found.rule.family.function
    for left in range(len(numbers)):
        rest = [n for i, n in enumerate(numbers) if i != left]
        if len(rest) > 1:
            yield f"{found.rule.family.name} off by one: without {_input_name(found, left)}", function(rest)
    for twice in range(len(numbers)):
        yield (
            f"{found.rule.family.name} off by one: with {_input_name(found, twice)} twice",
            function([*numbers, numbers[twice]]),
        )
    yield "the maximum of the cells", max(numbers)
    yield "the minimum of the cells", min(numbers)
    yield "the median of the cells", statistics.median(numbers)
    yield "the mean of the cells", sum(numbers) / len(numbers)
    yield "the sum of the cells", math.fsum(numbers)


def _input_name(found: Found, at: int) -> str:
    return found.rule.inputs[at].name if at < len(found.rule.inputs) else f"value {at + 1}"


def _neighbours(found: Found, index: int, value: Value) -> Iterator[tuple[str, float]]:
    """The mean or an extreme of the other cells of the series."""
    others = [
        slot.quantity.number * value.scale
        for at, slot in enumerate(found.target.slots)
        if slot is not None and at != index
    ]
    if len(others) > 1:
        yield "the mean of the other cells", sum(others) / len(others)
        yield "the largest of the other cells", max(others)
        yield "the smallest of the other cells", min(others)
    everything = [
        evaluate(found.rule, at, slot.quantity) for at, slot in enumerate(found.target.slots) if slot
    ]
    known = [v.middle for v in everything if v is not None]
    if len(known) > 2:
        yield "the mean over the rows", sum(known) / len(known)
