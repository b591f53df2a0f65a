# ruff: noqa: RUF001 - the marks and words that tables print
"""The rules by which tables derive one number from others, and their arithmetic on printed
intervals."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from kvik_lab.audit.quantity import Quantity
from kvik_lab.audit.series import Series, Slot
from kvik_lab.audit.units import NONE, Dimension, Unit, combine

Function = Callable[[Sequence[float]], float]


@dataclass(frozen=True)
class Family:
    """A kind of rule: its name, arithmetic, how it is written, and what it is called in words."""

    name: str
    function: Function
    pattern: str
    words: str


def _mean(v: Sequence[float]) -> float:
    return sum(v) / len(v)


def _geometric(v: Sequence[float]) -> float:
    return math.exp(sum(math.log(x) for x in v) / len(v)) if min(v) > 0 else math.nan


DIFFERENCE = Family("difference", lambda v: v[0] - v[1], "{0} - {1}", "the difference")
RATIO = Family("ratio", lambda v: v[0] / v[1], "{0} / {1}", "the ratio")
CHANGE = Family("change", lambda v: (v[0] - v[1]) / v[1], "({0} - {1}) / {1}", "the change relative to {1}")
REDUCTION = Family("reduction", lambda v: (v[0] - v[1]) / v[0], "({0} - {1}) / {0}", "the reduction from {0}")
SIZE = Family(
    "size of change", lambda v: abs(v[0] - v[1]) / v[1], "|{0} - {1}| / {1}", "the change without sign"
)
GAP = Family("size of difference", lambda v: abs(v[0] - v[1]), "|{0} - {1}|", "the difference without sign")
PRODUCT = Family("product", math.prod, " × ", "the product")
QUOTIENT = Family("quotient", lambda v: v[0] / v[1], "{0} / {1}", "the quotient")
RATE = Family("rate", lambda v: v[0] * v[1] / v[2], "{0} × {1} / {2}", "size times count over time")
SAME = Family("conversion", lambda v: v[0], "{0}", "the same in another unit")
SUM = Family("sum", math.fsum, " + ", "the sum")
MEAN = Family("mean", _mean, "mean of ", "the mean")
GEOMETRIC = Family("geometric mean", _geometric, "geometric mean of ", "the geometric mean")
MEDIAN = Family("median", statistics.median, "median of ", "the median")
LARGEST = Family("maximum", max, "maximum of ", "the maximum")
SMALLEST = Family("minimum", min, "minimum of ", "the minimum")
SHARE = Family("share", lambda v: v[0] / math.fsum(v[1:]), "{0} / sum", "the share of the sum")
SCALED = Family("proportion", math.prod, "{0} × constant", "proportional")

ADDITIVE = {
    "difference",
    "size of difference",
    "sum",
    "mean",
    "geometric mean",
    "median",
    "maximum",
    "minimum",
}
ADDITIVE |= {"conversion", "cumulative"}
RELATIVE = {"ratio", "change", "reduction", "size of change", "share"}
MANY = {"sum", "mean", "geometric mean", "median", "maximum", "minimum", "product"}


@dataclass(frozen=True)
class Rule:
    """A family applied to series. `binary` reads prefixes as powers of 1024: of the inputs, of the
    result. `stated` says that the target's name states the constant."""

    family: Family
    inputs: tuple[Series, ...]
    binary: tuple[bool, bool] = (False, False)
    constant: float = 1.0
    cumulative: bool = False
    stated: bool = False

    def slots(self, index: int) -> list[Slot] | None:
        """The inputs at an index, or None when one is missing. Aggregates take what there is."""
        if self.cumulative:
            return [slot for slot in self.inputs[0].slots[: index + 1] if slot is not None] or None
        slots = [series.slots[index] for series in self.inputs]
        if self.family.name in MANY:
            present = [slot for slot in slots if slot is not None]
            return present if len(present) >= 2 else None
        return None if any(slot is None for slot in slots) else [slot for slot in slots if slot is not None]


@dataclass(frozen=True)
class Value:
    """What follows: the interval and the value from the printed digits, in base units, and one
    printed unit."""

    low: float
    middle: float
    high: float
    scale: float

    def __neg__(self) -> Value:
        return Value(-self.high, -self.middle, -self.low, self.scale)


def exactly(number: float, scale: float) -> Value:
    """A value that no rounding blurs."""
    return Value(number, number, number, scale)


def exact(quantity: Quantity, family: str) -> bool:
    """Whether a printed integer is a count, not a rounded measurement."""
    if quantity.decimals or quantity.approx or quantity.upper is not None:
        return False
    kind = quantity.unit.kind
    if kind in ("count", "tokens"):
        return True
    if kind == "plain":
        return family not in RELATIVE and family != "quotient"
    number = int(abs(quantity.number))
    return kind == "bytes" and number > 0 and number & (number - 1) == 0


def compatible(units: Sequence[Unit]) -> bool:
    """Whether numbers in these units may be added: one dimension, or none printed."""
    found = {unit.dimension for unit in units if unit.kind not in ("plain", "count")}
    relative = {unit.kind for unit in units} & {"percent", "points"}
    return len(found) <= 1 and not (relative and any(found))


def scale_of(units: Sequence[Unit], binary: bool) -> float | None:
    """The one scale that plain numbers beside measured ones take, or None when there are several."""
    found = {_size(unit, binary) for unit in units if unit.kind != "plain"}
    return 1.0 if not found else found.pop() if len(found) == 1 else None


def evaluate(rule: Rule, index: int, target: Quantity) -> Value | None:
    """What a rule gives at an index for a target of that form; None when it does not apply there."""
    slots = rule.slots(index)
    if slots is None:
        return None
    return compute(rule.family, [slot.best for slot in slots], target, rule.binary, rule.constant)


def compute(
    family: Family,
    inputs: Sequence[Quantity],
    target: Quantity,
    binary: tuple[bool, bool] = (False, False),
    constant: float = 1.0,
) -> Value | None:
    """A family's arithmetic over the intervals of printed numbers; None when the units forbid it."""
    scales = scales_of(family.name, tuple([quantity.unit for quantity in inputs]), target.unit, binary)
    if scales is None:
        return None
    ends, middles = [], []
    factor = constant
    for quantity, one in zip(inputs, scales, strict=False):  # the last scale is the target's
        if quantity.bound:
            return None
        scale = one * factor
        factor = 1.0
        half = 0.0 if exact(quantity, family.name) else quantity.half
        low, high = quantity.ends
        ends.append(((low - half) * scale, (high + half) * scale))
        middles.append((low + high) / 2 * scale)
    try:
        middle = family.function(middles)
        low, high = _ends(family, ends)
    except (ZeroDivisionError, ValueError, OverflowError):
        return None
    return Value(low, middle, high, scales[-1]) if math.isfinite(middle) else None


def _ends(family: Family, ends: list[tuple[float, float]]) -> tuple[float, float]:
    if family.name in MANY or family.name == "cumulative":
        a = family.function([low for low, _ in ends])
        b = family.function([high for _, high in ends])
        return (min(a, b), max(a, b))
    if len(ends) > 4:
        low = family.function([ends[0][0], *(high for _, high in ends[1:])])
        return (low, family.function([ends[0][1], *(low for low, _ in ends[1:])]))
    corners = [family.function(corner) for corner in itertools.product(*(_apart(one) for one in ends))]
    if family.name.startswith("size of") and ends[0][0] < ends[1][1] and ends[1][0] < ends[0][1]:
        corners.append(0.0)
    return (min(corners), max(corners))


def _apart(ends: tuple[float, float]) -> tuple[float, ...]:
    """The ends of an interval that differ: an exact number needs no second corner."""
    return ends if ends[0] != ends[1] else ends[:1]


def _size(unit: Unit, binary: bool) -> float:
    return unit.binary if binary else unit.scale


@lru_cache(maxsize=8192)
def scales_of(
    family: str, inputs: tuple[Unit, ...], target: Unit, binary: tuple[bool, bool]
) -> tuple[float, ...] | None:
    """The scales of the inputs and, last, of the target; None when the dimensions do not go
    together."""
    if family in ADDITIVE:
        return _additive(inputs, target, binary)
    if family in RELATIVE:
        if target.kind == "ratio" and family not in ("ratio", "share"):  # 45x is no change of 4,500 %
            return None
        if target.dimension != NONE or target.kind == "points" or not compatible(inputs):
            return None
        one = scale_of(inputs, binary[0])
        if one is None and any(unit.kind == "plain" for unit in inputs):
            return None
        return (*(one if one is not None else unit.scale for unit in inputs), target.scale)
    own = (*(_size(unit, binary[0]) for unit in inputs), _size(target, binary[1]))
    if family == "proportion":
        return own
    found = _dimension(family, inputs)
    first = inputs[0]
    counted = all(unit.dimension == NONE for unit in inputs[1:])
    if target.kind == "plain" and found and found == first.dimension and counted:
        # "per GPU" without a unit has the whole's
        return (first.scale, *(unit.scale for unit in inputs[1:]), first.scale)
    if found != target.dimension or target.kind in ("percent", "points"):
        return None
    return own


def _additive(inputs: tuple[Unit, ...], target: Unit, binary: tuple[bool, bool]) -> tuple[float, ...] | None:
    everything = (*inputs, target)
    kinds = {unit.kind for unit in inputs}
    if not compatible(everything) or (kinds & {"plain", "count"} and kinds & {"percent", "points"}):
        return None
    plain = sum(unit.kind == "plain" for unit in everything)
    if 0 < plain < len(everything):
        one = scale_of(everything, binary[0])
        return None if one is None else (one,) * len(everything)
    return (*(_size(unit, binary[0]) for unit in inputs), _size(target, binary[1]))


def _dimension(family: str, inputs: tuple[Unit, ...]) -> Dimension | None:
    dimensions = [unit.dimension for unit in inputs]
    if family == "quotient":
        return combine(dimensions[0], dimensions[1], -1)
    if family == "rate":
        sized = combine(dimensions[0], dimensions[1], 1)
        return combine(sized or (("byte", 1),), dimensions[2], -1)
    total: Dimension = NONE
    for dimension in dimensions:
        total = combine(total, dimension, 1)
    return total


def holds(target: Quantity, value: Value) -> bool:
    """Whether what is printed and what follows have a value in common."""
    low, high = target.low * value.scale, target.high * value.scale
    if target.bound in ("<", "<=", "≤", "未満", "以下"):
        low = -math.inf
    elif target.bound in (">", ">=", "≥", "以上", "+"):
        high = math.inf
    elif target.bound in ("±", "以内"):
        low, high = -abs(high), abs(high)
    slack = 1e-9 * max(abs(low) if math.isfinite(low) else 0, abs(high) if math.isfinite(high) else 0, 1e-12)
    return value.low <= high + slack and low <= value.high + slack
