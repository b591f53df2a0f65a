"""Ranges of numbers, for the options of commands."""

from __future__ import annotations

import math
from typing import Any

import click


class Range(click.FloatRange):
    """Numbers from one to another. NaN, which no comparison keeps out, is none of them."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number, or click's BadParameter."""
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number
