"""Numbers as they are printed, how they derive from one another, and what may be printed for them.

A number is known by what stands on the page: its value after rounding, and the rounding. What derives from it
can therefore only be known to lie between two bounds, and a printed value follows when its own rounding meets
them.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Literal

Signs = Literal["plain", "plus", "long", "arrow"]
Operation = Literal["product", "difference", "change", "sum", "mean", "max", "min", "count"]

_ids = itertools.count()


@dataclass(frozen=True)
class Style:
    """How a number is printed.

    `exact` says that it was not rounded, as a count; `clock` that seconds are shown as minutes and seconds.
    """

    decimals: int = 0
    unit: str = ""
    gap: str = " "
    signs: Signs = "plain"
    commas: bool = False
    about: bool = False
    exact: bool = False
    clock: bool = False

    @property
    def step(self) -> float:
        """One unit of the last digit."""
        return float(10.0**-self.decimals)

    @property
    def half(self) -> float:
        """How far the number may lie from what is printed."""
        return 0.0 if self.exact else self.step / 2

    def rounded(self, value: float) -> float:
        """The value as printed."""
        return float(f"{value:.{self.decimals}f}")

    def show(self, value: float, unit: str | None = None) -> str:
        """The text for a value; `unit` in place of the style's own."""
        size = abs(self.rounded(value))
        sign = self._sign(self.rounded(value))
        if self.clock:
            return f"{sign}{clock(size, self.decimals)}"
        digits = f"{size:,.{self.decimals}f}" if self.commas else f"{size:.{self.decimals}f}"
        name = self.unit if unit is None else unit
        tail = f"{self.gap}{name}" if name else ""
        return f"{'~' if self.about else ''}{sign}{digits}{tail}"

    def _sign(self, value: float) -> str:
        if self.signs == "arrow":
            return "↓" if value < 0 else "↑"
        if value < 0:
            return "\N{MINUS SIGN}" if self.signs == "long" else "-"
        return "+" if self.signs in ("plus", "long") and value > 0 else ""


def clock(seconds: float, decimals: int) -> str:
    """Seconds as `1m26.002s`, or `26.002s` below a minute."""
    minutes, rest = divmod(round(seconds, decimals), 60)
    return f"{int(minutes)}m{rest:.{decimals}f}s" if minutes else f"{rest:.{decimals}f}s"


@dataclass(frozen=True)
class Rule:
    """How a number derives: `scale` times an operation on the inputs.

    `product` raises each input to its power. `difference` is first minus second; `change` is
    100 (first - second) / second. `count` has no inputs: its value is `scale`. `kin` are numbers from which
    the same value derives in another way (the corner of a grid is the sum of its last row and of its last
    column).
    """

    operation: Operation
    inputs: tuple[Number, ...] = ()
    scale: float = 1.0
    powers: tuple[int, ...] = ()
    kin: tuple[Number, ...] = ()

    def value(self, inputs: tuple[float, ...]) -> float:
        """The derived value for these values of the inputs."""
        return self.scale * self._plain(inputs)

    def _plain(self, inputs: tuple[float, ...]) -> float:
        match self.operation:
            case "product":
                return math.prod(x**power for x, power in zip(inputs, self.powers, strict=True))
            case "difference":
                return inputs[0] - inputs[1]
            case "change":
                return 100 * (inputs[0] - inputs[1]) / inputs[1]
            case "sum":
                return sum(inputs)
            case "mean":
                return sum(inputs) / len(inputs)
            case "max":
                return max(inputs)
            case "min":
                return min(inputs)
            case "count":
                return 1.0

    def bounds(self) -> tuple[float, float]:
        """The least and the greatest value that the printed inputs allow."""
        ends = [(n.value - n.style.half, n.value + n.style.half) for n in self.inputs]
        if self.operation in ("sum", "mean", "max", "min"):
            both = [self.value(tuple(end[side] for end in ends)) for side in (0, 1)]
        else:
            both = [self.value(corner) for corner in itertools.product(*ends)]
        return min(both), max(both)


@dataclass(frozen=True)
class Number:
    """A printed number: `value` as it stands there, `exact` as it was before it was rounded."""

    value: float
    exact: float
    style: Style
    rule: Rule | None = None
    id: int = field(default_factory=lambda: next(_ids))

    @property
    def text(self) -> str:
        """What is printed."""
        return self.style.show(self.value)

    def misfit(self, value: float) -> float:
        """By how many units of the last digit `value`, printed here, misses everything that would follow."""
        if self.rule is None:
            return 0.0
        low, high = self.rule.bounds()
        half = self.style.half
        return max(0.0, low - (value + half), value - half - high) / self.style.step


def given(value: float, style: Style) -> Number:
    """A measured number, or one that was set. A count has no fraction to begin with."""
    shown = style.rounded(value)
    return Number(shown, shown if style.exact else value, style)


def derived(rule: Rule, style: Style, unrounded: bool) -> Number:
    """A number that derives from others: from what is printed of them, or from what they were before."""
    inputs = tuple(n.exact if unrounded else n.value for n in rule.inputs)
    exact = rule.value(inputs)
    return Number(style.rounded(exact), exact, style, rule)
