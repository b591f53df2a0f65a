"""What a document prints with a unit, by kind, with the words that it is printed with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from kvik_lab.audit.quantity import Quantity
from kvik_lab.audit.units import Dimension

Kind: TypeAlias = tuple[str, Dimension]
"""The kind of a unit without dimension, and the dimension."""


@dataclass(frozen=True)
class Fact:
    """A number in a sentence, or in a cell with its names."""

    quantity: Quantity
    line: int
    words: frozenset[str]
    cell: bool


@dataclass(frozen=True)
class Said:
    """All facts of a document: by their values in base units, and by their digits and the unit's scale,
    also those that they round to with one digit less.

    `alike` counts the different digits that stand at the same places; `weights` are of words, larger for rare
    ones.
    """

    values: Mapping[tuple[Kind, str], tuple[Fact, ...]] = field(default_factory=dict)
    digits: Mapping[tuple[Kind, float, str], tuple[Fact, ...]] = field(default_factory=dict)
    alike: Mapping[tuple[Kind, float, str], int] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
