"""Every combination of the factors' levels, nesting respected, as index columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kvik_lab.design.factor import Factor, Level
from kvik_lab.errors import LabError

LARGEST = 2_000_000
ABSENT = -1

Indices = dict[str, NDArray[np.int64]]


def parents_first(factors: Sequence[Factor]) -> list[Factor]:
    """The factors, each behind those that it is nested in. The nesting has no circle."""
    by_name = {factor.name: factor for factor in factors}
    ordered: dict[str, Factor] = {}

    def add(factor: Factor) -> None:
        for parent in factor.within:
            add(by_name[parent])
        ordered.setdefault(factor.name, factor)

    for factor in factors:
        add(factor)
    return list(ordered.values())


def combine(factors: Sequence[Factor]) -> Indices:
    """The index of each factor's level in every combination; `ABSENT` where the nesting leaves it out.

    The last factor changes fastest. Raises `LabError` beyond `LARGEST` combinations.
    """
    indices: Indices = {}
    rows = 1
    for factor in parents_first(factors):
        exists = np.ones(rows, dtype=bool)
        for parent, level in factor.within.items():
            levels = next(one.levels for one in factors if one.name == parent)
            exists &= indices[parent] == levels.index(level)
        times = np.where(exists, len(factor.levels), 1)
        total = int(times.sum())
        if total > LARGEST:
            raise LabError(
                f"more than {LARGEST:,} combinations of levels; take levels away, or split the study in two"
            )
        starts = np.cumsum(times) - times
        within = np.arange(total) - np.repeat(starts, times)
        indices = {name: np.repeat(column, times) for name, column in indices.items()}
        indices[factor.name] = np.where(np.repeat(exists, times), within, ABSENT)
        rows = total
    names = [factor.name for factor in factors]
    order = np.lexsort([indices[name] for name in reversed(names)])
    return {name: indices[name][order] for name in names}


def as_column(factor: Factor, indices: NDArray[np.int64]) -> NDArray[Any]:
    """The levels themselves: numbers as int64 or float64 (NaN where absent), others as objects (None)."""
    absent = indices == ABSENT
    kind = type(factor.levels[0])
    if kind is str or (kind is bool and absent.any()):
        return np.array([*factor.levels, None], dtype=object)[indices]
    if kind is bool:
        return np.array(factor.levels, dtype=bool)[indices]
    whole = all(isinstance(level, int) for level in factor.levels) and not absent.any()
    if whole:
        return np.array(factor.levels, dtype=np.int64)[indices]
    return np.array([*map(float, factor.levels), np.nan])[indices]


def as_frame(factors: Sequence[Factor], indices: Indices) -> pd.DataFrame:
    """A row a combination, a column a factor."""
    columns = {
        factor.name: pd.Series(column, dtype=column.dtype)
        for factor in factors
        for column in [as_column(factor, indices[factor.name])]
    }
    return pd.DataFrame(columns)


def levels_of(factors: Sequence[Factor], indices: Indices, row: int) -> dict[str, Level]:
    """One combination, without the factors that it does not have."""
    found = {factor.name: int(indices[factor.name][row]) for factor in factors}
    return {one.name: one.levels[found[one.name]] for one in factors if found[one.name] != ABSENT}


def exists_in(factor: Factor, levels: Mapping[str, Level]) -> bool:
    """Whether a combination has the factor at all."""
    return all(levels.get(parent) == level for parent, level in factor.within.items())
