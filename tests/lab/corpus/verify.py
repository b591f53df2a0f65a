"""The corpus checked against itself by other code: every derived number recomputed from the printed texts.

Nothing of `figures` is used but the name of the operation and the list of inputs: texts are read again, in
exact fractions, and the rounding of each text is taken from its own digits.
"""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import product

from tests.lab.corpus.figures import Number, Rule

_CLOCK = re.compile(r"(?:(\d+)m)?(\d+(?:\.\d+)?)s$")


def _read(number: Number) -> tuple[Fraction, Fraction]:
    """The value of a printed text, and half a unit of its last digit."""
    text = number.text.replace("~", "").replace(",", "").strip()
    minus = text[0] in "-\N{MINUS SIGN}↓"
    text = text.lstrip("-\N{MINUS SIGN}↓↑+")
    timed = _CLOCK.match(text)
    if number.style.clock and timed:
        digits, value = timed.group(2), 60 * Fraction(timed.group(1) or 0) + Fraction(timed.group(2))
    else:
        found = re.match(r"[\d.]+", text)
        if found is None:
            raise ValueError(f"no number in {number.text!r}")
        digits, value = found.group(), Fraction(found.group())
    places = len(digits.partition(".")[2])
    half = Fraction(0) if number.style.exact else Fraction(1, 2 * 10**places)
    return -value if minus else value, half


def _apply(rule: Rule, x: tuple[Fraction, ...]) -> Fraction:
    scale = Fraction(rule.scale)
    if rule.operation == "count":
        return scale
    if rule.operation == "difference":
        return scale * (x[0] - x[1])
    if rule.operation == "change":
        return scale * (x[0] / x[1] - 1) * 100
    if rule.operation == "product":
        result = scale
        for value, power in zip(x, rule.powers, strict=True):
            result = result * value if power > 0 else result / value
        return result
    kinds = {"sum": sum(x), "mean": sum(x) / len(x), "max": max(x), "min": min(x)}
    return scale * Fraction(kinds[rule.operation])


def follows(number: Number) -> bool:
    """Whether the text of a derived number can come from the printed texts of its inputs by rounding."""
    if number.rule is None:
        return True
    ends = [(value - half, value + half) for value, half in map(_read, number.rule.inputs)]
    if number.rule.operation in ("sum", "mean", "max", "min"):
        corners = [tuple(end[side] for end in ends) for side in (0, 1)]
    else:
        corners = list(product(*ends))
    values = [_apply(number.rule, corner) for corner in corners]
    printed, half = _read(number)
    # Scales such as 1024e3 / 1e9 are not exact in binary.
    slack = abs(printed) * Fraction(1, 10**12)
    return min(values) - half - slack <= printed <= max(values) + half + slack
