"""What an experiment varies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

Level = str | int | float | bool
"""A value that a factor takes."""


class Scale(Enum):
    """How the levels of a factor enter a model."""

    CATEGORICAL = "categorical"
    LINEAR = "linear"
    LOG2 = "log2"


@dataclass(frozen=True)
class Factor:
    """One thing that an experiment varies.

    `within` names the levels of other factors where this one exists at all, such as {"mode": "disagg"} for
    a transport; elsewhere it has no level. A hard one is changed only by a restart of the servers: it belongs
    to whole plots.
    """

    name: str
    levels: tuple[Level, ...]
    scale: Scale = Scale.CATEGORICAL
    within: Mapping[str, Level] = field(default_factory=dict)
    hard: bool = False
    price_per_hour: Mapping[Level, float] = field(default_factory=dict)
    """What a level costs beside the others, in the study's currency."""


def level_named(factor: Factor, text: str) -> Level | None:
    """The level that a text names, a number by its value; of a numeric factor any number. None where it names
    none."""
    for level in factor.levels:
        if str(level) == text or (isinstance(level, bool) and str(level).lower() == text.lower()):
            return level
    if any(isinstance(level, str | bool) for level in factor.levels):
        return None
    try:
        value = float(text)
    except ValueError:
        return None
    if value in factor.levels:
        return factor.levels[factor.levels.index(value)]
    return value if factor.scale is not Scale.CATEGORICAL and math.isfinite(value) else None
