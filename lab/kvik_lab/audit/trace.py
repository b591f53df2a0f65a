"""What a rule gives at each cell of a target, one after the other.

An audit tries thousands of rules on a table, and most of them end at their first cells. So what does
not change from cell to cell (scales, intervals of columns) is worked out once a rule or once a
column, and nothing is worked out before it is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

from kvik_lab.audit.rules import MANY, Rule, Value, evaluate, exact, scales_of
from kvik_lab.audit.series import Series

_Interval = tuple[float, float, float]
_COUNTED = {"difference", "size of difference"}
_PAIRED = _COUNTED | {"ratio", "change", "reduction", "size of change", "quotient"}
_POOLED = MANY - {"product"}


def trace(rule: Rule, target: Series) -> Iterator[tuple[int, Value | None]]:
    """The indices at which target and inputs are printed, with what follows there; None where the
    units or the numbers forbid the rule."""
    name = rule.family.name
    if name in _PAIRED and target.uniform and all(series.uniform for series in rule.inputs):
        yield from _paired(rule, target)
        return
    if name in _POOLED and not rule.cumulative and target.uniform and _one_unit(rule.inputs):
        yield from _pooled(rule, target)
        return
    if target.uniform and all(series.uniform and series.full for series in rule.inputs):
        units = tuple([series.unit for series in rule.inputs])
        if scales_of(name, units, target.unit, rule.binary) is None:
            return
    for index in target.printed:
        slot = target.slots[index]
        if slot is not None and rule.slots(index) is not None:
            yield index, evaluate(rule, index, slot.quantity)


def _paired(rule: Rule, target: Series) -> Iterator[tuple[int, Value | None]]:
    """A rule of two inputs over columns that have one unit each."""
    name, function = rule.family.name, rule.family.function
    one, other = rule.inputs
    scales = scales_of(name, (one.unit, other.unit), target.unit, rule.binary)
    if scales is None:
        return
    measured = name not in _COUNTED
    left, right = _intervals(one, measured), _intervals(other, measured)
    unsigned = name.startswith("size of")
    first, second, scale = scales
    for index in target.printed:
        a, b = left[index], right[index]
        if a is None or b is None:
            continue
        try:
            middle = function((a[1] * first, b[1] * second))
            corners = [function((x * first, y * second)) for x in a[::2] for y in b[::2]]
        except ZeroDivisionError:
            yield index, None
            continue
        if unsigned and a[0] * first < b[2] * second and b[0] * second < a[2] * first:
            corners.append(0.0)
        yield index, Value(min(corners), middle, max(corners), scale)


def _one_unit(inputs: tuple[Series, ...]) -> bool:
    return all(series.uniform and series.unit == inputs[0].unit for series in inputs)


def _pooled(rule: Rule, target: Series) -> Iterator[tuple[int, Value | None]]:
    """An aggregate of columns that all have the same unit: of what is printed of them in a row."""
    function, unit = rule.family.function, rule.inputs[0].unit
    scales = scales_of(rule.family.name, (unit, unit), target.unit, rule.binary)
    if scales is None:
        return
    each, _, scale = scales
    columns = [_intervals(series, False) for series in rule.inputs]
    for index in target.printed:
        row = [interval for column in columns if (interval := column[index]) is not None]
        if len(row) < 2:
            continue
        middle = function([one[1] * each for one in row])
        ends = (function([one[0] * each for one in row]), function([one[2] * each for one in row]))
        yield index, Value(min(ends), middle, max(ends), scale) if math.isfinite(middle) else None


@lru_cache(maxsize=4096)
def _intervals(series: Series, measured: bool) -> tuple[_Interval | None, ...]:
    """Lower end, middle and upper end of each value, in its unit; whole numbers as measured ones
    when `measured`."""
    answer: list[_Interval | None] = []
    for slot in series.slots:
        if slot is None:
            answer.append(None)
            continue
        quantity = slot.best
        half = 0.0 if exact(quantity, "ratio" if measured else "difference") else quantity.half
        low, high = quantity.ends
        answer.append((low - half, (low + high) / 2, high + half))
    return tuple(answer)
