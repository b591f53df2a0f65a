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

_PREFIXES = (
    (1000.0, "a factor of 1,000: the prefix of the unit"),
    (1024.0, "a factor of 1,024: the prefix of the unit"),
    (1e6, "a factor of 1,000,000: the prefix of the unit"),
    (8.0, "a factor of 8: bits and bytes"),
    (1.024, "a factor of 1.024: K = 1000 against K = 1024"),
    (1.024**2, "a factor of 1.0486: MB (10^6) against MiB (2^20)"),
    (1.024**3, "a factor of 1.0737: GB (10^9) against GiB (2^30)"),
    (60.0, "a factor of 60: minutes and seconds"),
    (100.0, "a factor of 100: a fraction and a percentage"),
    (10.0, "a factor of 10: the decimal point"),
)


def diagnose(found: Found, index: int, value: Value, view: View) -> str | None:
    """The slip that gives what is printed, or None when none of the known ones does."""
    slot = found.target.slots[index]
    if slot is None:
        return None
    printed = slot.quantity
    for text, number in _candidates(found, index, value, view):
        if matches(printed, number / value.scale, value):
            return text
    return general(printed, value)


def matches(printed: Quantity, number: float, value: Value) -> bool:
    """Whether a printed quantity is what `number` (in its unit) rounds to, given the inputs' own
    rounding."""
    if not math.isfinite(number):
        return False
    middle = abs(value.middle / value.scale)
    blur = (value.high - value.low) / 2 / value.scale
    blur *= min(abs(number) / middle, 2.0) if middle else 1.0
    slack = printed.half + min(blur, 3 * printed.half)
    return abs(number - printed.number) <= slack * (1 + 1e-9)


def general(printed: Quantity, value: Value) -> str | None:
    """Slips that need nothing but the number: rounding, sign, unit, digit, factor of two."""
    number = value.middle / value.scale
    step = 10.0**-printed.decimals
    if abs(printed.number - number) < step * (1 + 1e-9) and number:
        if math.isclose(abs(printed.number), math.floor(abs(number) / step) * step, abs_tol=step / 1e3):
            return "truncated instead of rounded"
        return "rounded away in the last place"
    if matches(printed, -number, value):
        return "the sign"
    for factor, text in _PREFIXES:
        if matches(printed, number * factor, value) or matches(printed, number / factor, value):
            return text
    digit = _digits(printed, number)
    if digit:
        return digit
    for factor, text in ((2.0, "twice what follows"), (0.5, "half of what follows")):
        if matches(printed, number * factor, value):
            return text
    return None


def _digits(printed: Quantity, number: float) -> str | None:
    a = f"{abs(printed.number):.{printed.decimals}f}"
    b = f"{math.floor(abs(number) * 10**printed.decimals + 0.5) / 10**printed.decimals:.{printed.decimals}f}"
    if len(a) != len(b):
        shorter, longer = sorted((a, b), key=len)
        dropped = any(longer[:i] + longer[i + 1 :] == shorter for i in range(len(longer)))
        return "a digit dropped or doubled" if dropped and len(longer) - len(shorter) == 1 else None
    differ = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
    if len(differ) == 1:
        return f"one digit: {a[differ[0]]} for {b[differ[0]]}"
    if len(differ) == 2 and a[differ[0]] == b[differ[1]] and a[differ[1]] == b[differ[0]]:
        return "two digits changed places"
    return None


def _candidates(found: Found, index: int, value: Value, view: View) -> Iterator[tuple[str, float]]:
    """Other computations, with what they give in base units."""
    yield from _bases(found, index)
    yield from _other_rows(found, index, value)
    yield from _other_columns(found, index, view)
    slots = found.rule.slots(index) or []
    numbers = [slot.quantity.number * slot.quantity.unit.scale for slot in slots]
    if found.rule.family.name in ("sum", "mean", "product", "geometric mean"):
        yield from _aggregates(found, numbers)
    yield from _neighbours(found, index, value)


def _slot_quantity(found: Found, index: int) -> Quantity:
    slot = found.target.slots[index]
    if slot is None:
        raise IndexError(index)
    return slot.quantity


def _bases(found: Found, index: int) -> Iterator[tuple[str, float]]:
    rule, printed = found.rule, _slot_quantity(found, index)
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


def _other_columns(found: Found, index: int, view: View) -> Iterator[tuple[str, float]]:
    printed = _slot_quantity(found, index)
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
