"""Slips that need nothing but the number: rounding, sign, unit, digit, factor of two.

They tell an error from a number that is about something else: most numbers are no slip of a given value.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import lru_cache

from kvik_lab.audit.quantity import Quantity
from kvik_lab.audit.rules import Value
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
    """Whether these digits would follow; not by what coarse inputs leave open: any digits would then."""
    right = replace(printed, number=math.copysign(float(digits), printed.number), upper=None)
    return matches(right, value.middle / value.scale, value)


def slip(one: str, other: str) -> bool:
    """Whether digits are others after a slip: one changed, two neighbours swapped, or the point moved."""
    a, b = one.replace(",", ""), other.replace(",", "")
    if not a or not b:
        return False
    moved = any(math.isclose(float(a), factor * float(b), rel_tol=1e-9) for factor in (10, 0.1))
    return b in slips(a) or (moved and len(a.replace(".", "").strip("0")) > 1)


@lru_cache(maxsize=4096)
def slips(digits: str) -> frozenset[str]:
    """The digits of which these may be a slip, without those of a moved point.

    The last two are not changed (of two, the last is not), nor is 1.79 to 0.79: that is another measurement
    more often.
    """
    found = set[str]()
    places = [at for at, digit in enumerate(digits) if digit != "."]
    places = list(itertools.dropwhile(lambda at: digits[at] == "0", places))
    for at in places[: max(len(places) - 2, 1)]:
        found |= {digits[:at] + other + digits[at + 1 :] for other in "123456789"}
        if at > places[0]:
            found.add(digits[:at] + "0" + digits[at + 1 :])
    for one, two in itertools.pairwise(places):
        found.add(digits[:one] + digits[two] + digits[one + 1 : two] + digits[one] + digits[two + 1 :])
    return frozenset(found - {digits})
