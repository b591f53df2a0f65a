"""Rows beside each other: which differ in one factor only, which are the same, which violate what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from kvik_lab.design.factor import Factor, Level


@dataclass(frozen=True)
class MatchedPairs:
    """Rows that differ in one factor and in nothing else: a contrast that needs no model."""

    factor: str
    first: str
    second: str
    pairs: int


@dataclass(frozen=True)
class PairReport:
    """Matched pairs by contrast, and the rows that are in none."""

    contrasts: tuple[MatchedPairs, ...]
    alone: tuple[str, ...]
    """Ids of rows that no other row differs from in one factor only."""


def matched_pairs(rows: pd.DataFrame, factors: Sequence[Factor]) -> PairReport:
    """Count the pairs of distinct rows that differ in one factor only.

    Where the two differ in a parent, the factors nested in it may have a level in one and none in the other.
    The index of `rows` holds their ids.
    """
    paired: set[str] = set()
    found = []
    for factor in factors:
        nested = _nested_in(factor.name, factors)
        others = [f.name for f in factors if f.name != factor.name and f.name not in nested]
        counts: dict[tuple[str, str], int] = {}
        for group in _groups(rows, others).values():
            levels = _by_level(rows, group, factor)
            for i, (one, of_one) in enumerate(levels):
                for other, of_other in levels[i + 1 :]:
                    counts[one, other] = counts.get((one, other), 0) + len(of_one) * len(of_other)
                    paired |= {*of_one, *of_other}
        found += [MatchedPairs(factor.name, one, other, n) for (one, other), n in counts.items()]
    return PairReport(tuple(found), tuple(str(k) for k in rows.index if str(k) not in paired))


def duplicates(rows: pd.DataFrame, factors: Sequence[Factor]) -> tuple[tuple[str, ...], ...]:
    """Groups of ids whose rows have the same level of every factor."""
    groups = _groups(rows, [factor.name for factor in factors]).values()
    return tuple(tuple(group) for group in groups if len(group) > 1)


def row_keys(rows: pd.DataFrame, names: Iterable[str]) -> list[tuple[Level | None, ...]]:
    """The levels of each row as a value that compares: None where a factor has none."""
    columns = [_plain(rows[name]) for name in names]
    return list(zip(*columns, strict=True)) if columns else [()] * len(rows)


def _plain(values: pd.Series) -> list[Level | None]:
    return [None if pd.isna(value) else value for value in values]


def _groups(rows: pd.DataFrame, names: Sequence[str]) -> Mapping[tuple[Level | None, ...], list[str]]:
    groups: dict[tuple[Level | None, ...], list[str]] = {}
    for key, row in zip(row_keys(rows, names), rows.index, strict=True):
        groups.setdefault(key, []).append(str(row))
    return groups


def _by_level(rows: pd.DataFrame, group: Sequence[str], factor: Factor) -> list[tuple[str, list[str]]]:
    """The ids of a group by their level, in the factor's order; rows where it has none are left out."""
    values = dict(zip(map(str, rows.index), _plain(rows[factor.name]), strict=True))
    found: dict[Level, list[str]] = {}
    for row in group:
        value = values[row]
        if value is not None:
            found.setdefault(value, []).append(row)
    order = {level: k for k, level in enumerate(factor.levels)}
    ordered = sorted(found, key=lambda level: order.get(level, len(order)))
    return [(str(level), found[level]) for level in ordered]


def _nested_in(name: str, factors: Sequence[Factor]) -> set[str]:
    children = {factor.name for factor in factors if name in factor.within}
    return children.union(*(_nested_in(child, factors) for child in children))
