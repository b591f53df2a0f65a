"""Slips that need nothing but the number: rounding, sign, unit, digit, factor of two.

They tell an error from a number that is about something else: most numbers are no slip of a given value.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from kvik_lab.audit.quantity import Quantity
from kvik_lab.audit.rules import Value, holds
from kvik_lab.audit.units import Unit

_FACTORS = (
    (1000.0, "a factor of 1,000: the prefix of the unit"),
    (1e6, "a factor of 1,000,000: the prefix of the unit"),
    (100.0, "a factor of 100: a fraction and a percentage"),
    (10.0, "a factor of 10: the decimal point"),
)
_OF_TIMES = ((60.0, "a factor of 60: minutes and seconds"),)
_OF_COUNTS = (
    (1024.0, "a factor of 1,024: the prefix of the unit"),
    (1.024, "a factor of 1.024: K = 1000 against K = 1024"),
)
_OF_BYTES = (
    *_OF_COUNTS,
    (8.0, "a factor of 8: bits and bytes"),
    (1.024**2, "a factor of 1.0486: MB (10^6) against MiB (2^20)"),
    (1.024**3, "a factor of 1.0737: GB (10^9) against GiB (2^30)"),
)


def _factors(unit: Unit) -> tuple[tuple[float, str], ...]:
    """The factors by which a number in a unit may be wrong: only bytes and counts have prefixes of 1024."""
    measured = dict(unit.dimension)
    if "byte" in measured:
        return _FACTORS + _OF_BYTES
    if "time" in measured:
        return _FACTORS + _OF_TIMES
    return _FACTORS + _OF_COUNTS if unit.kind in ("plain", "count", "tokens") else _FACTORS


#: How the slips begin that are of digits, not of what was computed.
DIGITS = ("one digit", "two digits", "a digit", "a factor of 10:", "rounded", "truncated")


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
    for factor, text in _factors(printed.unit):
        if matches(printed, number * factor, value) or matches(printed, number / factor, value):
            return text
    digit = _digits(printed, value)
    if digit:
        return digit
    for factor, text in ((2.0, "twice what follows"), (0.5, "half of what follows")):
        if matches(printed, number * factor, value):
            return text
    return None


def _digits(printed: Quantity, value: Value) -> str | None:
    """A slip of the digits, undone: one is another, two changed places, one is there twice or not."""
    digits = printed.digits.replace(",", "")
    if not value.middle or printed.clock or "e" in digits.lower():
        return None
    places = [at for at, digit in enumerate(digits) if digit.isdigit()]
    for one, two in itertools.pairwise(places):
        between = digits[one + 1 : two]
        if _undone(printed, digits[:one] + digits[two] + between + digits[one] + digits[two + 1 :], value):
            return "two digits changed places"
    for at in places:
        for other in "0123456789":
            if (
                other != digits[at]
                and (at > places[0] or other != "0")
                and _undone(printed, digits[:at] + other + digits[at + 1 :], value)
            ):
                return f"one digit: {digits[at]} for {other}"
    for at in places[: len(places) if len(places) > 2 else 0]:
        if _undone(printed, digits[:at] + digits[at + 1 :], value):
            return "a digit too many"
    return None


def _undone(printed: Quantity, digits: str, value: Value) -> bool:
    number = math.copysign(float(digits), printed.number)
    return holds(replace(printed, number=number, upper=None), value)


def slip(one: str, other: str) -> bool:
    """Whether digits are others with one changed, two neighbours swapped, or the decimal point moved. A
    change of the last two digits is none (of the last, where there are two), and none is one between 0.79 and
    1.79: that is another measurement more often."""
    a, b = one.replace(",", ""), other.replace(",", "")
    if a.replace(".", "").strip("0") == b.replace(".", "").strip("0"):
        return a != b and any(math.isclose(float(a), f * float(b), rel_tol=1e-9) for f in (10, 0.1))
    if len(a) != len(b) or a.find(".") != b.find("."):
        return False
    digits = [(x, y) for x, y in zip(a, b, strict=True) if x != "."]
    digits = list(itertools.dropwhile(("0", "0").__eq__, digits))
    differ = [at for at, (x, y) in enumerate(digits) if x != y]
    if len(differ) == 1:
        return differ[0] < max(len(digits) - 2, 1) and "0" not in digits[0]
    return len(differ) == 2 and differ[1] == differ[0] + 1 and digits[differ[0]] == digits[differ[1]][::-1]
