"""Numbers in a report: known, or missing for a stated reason. A missing number is never a zero."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from kvik_lab.errors import LabError


class State(Enum):
    """Why a number is missing."""

    IN_PROGRESS = "in progress"
    FAILED = "failed"
    NOT_POSSIBLE = "not possible"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Missing:
    """A number that is not there; `note` says more than its state does, or is empty."""

    state: State
    note: str = ""

    def __str__(self) -> str:
        return f"{self.state.value}: {self.note}" if self.note else self.state.value


Number: TypeAlias = float | Missing


@dataclass(frozen=True)
class Estimate:
    """A number with the bounds of its interval; an end that is None is open or unknown.

    Raises LabError for bounds in the wrong order, and for numbers that are not finite: use Missing.
    """

    value: Number
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        for number in (self.value, self.low, self.high):
            if number is not None and not isinstance(number, Missing):
                finite(number)
        if self.low is not None and self.high is not None and self.low > self.high:
            raise LabError(f"an interval goes from {self.low} to {self.high}; swap its bounds")


def finite(number: float) -> float:
    """The number, if it is one; else LabError."""
    if not math.isfinite(number):
        raise LabError(f"{number} is not a number that can be shown; say with Missing why there is none")
    return number


def known(number: Number) -> float | None:
    """The number, or None where it is missing."""
    return None if isinstance(number, Missing) else number


def show(number: Number | None) -> str:
    """Five significant digits, the state of what is missing, a dash for an end that is not there."""
    if number is None:
        return "-"
    if isinstance(number, Missing):
        return str(number)
    size = abs(number)
    if size >= 1e4 and size < 1e15:
        return f"{number:,.0f}"
    return f"{number:.5g}"


def change(ratio: float) -> str:
    """A ratio as what it changes: 1.214 is +21.4 %."""
    if not math.isfinite(ratio):
        return show(None)
    percent = 100 * (ratio - 1)
    return f"{percent:+.{1 if abs(percent) < 100 else 0}f} %"


def short(number: float) -> str:
    """As `show`, with three significant digits: what an interval beside it leaves of them."""
    return show(float(f"{number:.3g}"))


def show_estimate(estimate: Estimate) -> str:
    """The number, with its bounds in brackets where it has any."""
    if estimate.low is None and estimate.high is None:
        return show(estimate.value)
    return f"{show(estimate.value)} [{show(estimate.low)}, {show(estimate.high)}]"
