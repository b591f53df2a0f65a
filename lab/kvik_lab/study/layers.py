"""A layered plan: patterns of levels, written compactly, as rows with ids.

A pattern is `for` (the outer loop), `sweep` (the inner one) and `at` (levels that are held). What it does not
say comes from `design.defaults`. Ids are made from a template: `{backend}` stands for the level,
`{tokens|k}` for thousands (8000 and 8192 are both 8), `{gmu|digits}` for the digits without the point (0.8 is
08).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvik_lab.design.factor import Factor, Level
from kvik_lab.study.combinations import exists_in, parents_first
from kvik_lab.study.problems import MistakeError, did_you_mean

if TYPE_CHECKING:
    from kvik_lab.study.model import Study

FILTERS = ("k", "digits")
_FIELD = re.compile(r"\{([^{}]*)\}")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True)
class Layer:
    """A part of a plan with one purpose. `minutes` is what all its patterns take together, as planned."""

    name: str
    priority: str | None = None
    minutes: float | None = None
    about: str = ""


@dataclass(frozen=True)
class Pattern:
    """One row of a layered plan.

    `levels` has every factor that exists in it. `duplicate_of` is the id of the first row with the same
    levels; None for a row that is itself the first.
    """

    id: str
    layer: str
    levels: Mapping[str, Level]
    duplicate_of: str | None = None


@dataclass(frozen=True)
class Rule:
    """A pattern as the file has it: what is looped over, outermost first, and what is held."""

    id: str | None
    loops: tuple[tuple[str, tuple[Level, ...]], ...]
    at: Mapping[str, Level]


def expand_layers(study: Study) -> list[Pattern]:
    """The rows of a layered study, in the order of the file, duplicates kept and named.

    A row may be infeasible: `study.violations(row.levels)` says so.
    """
    return list(study.design.patterns)


def rows_of(rule: Rule, factors: Sequence[Factor], defaults: Mapping[str, Level]) -> list[dict[str, Level]]:
    """The levels of each row of one pattern. Raises `MistakeError` where a row lacks a factor or has one that
    does not exist with its other levels."""
    names = [name for name, _ in rule.loops]
    rows = []
    for levels in itertools.product(*(levels for _, levels in rule.loops)):
        said = {**rule.at, **dict(zip(names, levels, strict=True))}
        whole = {**defaults, **said}
        row: dict[str, Level] = {}
        for factor in parents_first(factors):
            if not exists_in(factor, row):
                if factor.name in said:
                    parents = " and ".join(f"{name} = {level}" for name, level in factor.within.items())
                    text = f"{factor.name!r} has a level in a row where it does not exist"
                    raise MistakeError(
                        0, text, f"it exists within {parents} only; leave it out, or split the pattern"
                    )
            elif factor.name not in whole:
                text = f"no level of {factor.name!r} in a row"
                raise MistakeError(0, text, "add it to `at`, or to design.defaults for all patterns")
            else:
                row[factor.name] = whole[factor.name]
        rows.append({factor.name: row[factor.name] for factor in factors if factor.name in row})
    return rows


def check_template(template: str, factors: Sequence[str]) -> None:
    """Raise `MistakeError` unless every field names a factor, or `n`, and a filter that there is."""
    rest = _FIELD.sub("", template)
    if "{" in rest or "}" in rest:
        raise MistakeError(0, f"brackets of {template!r} do not match", "write {factor} or {factor|k}")
    for field in _FIELD.findall(template):
        name, _, chosen = field.partition("|")
        if name != "n" and name not in factors:
            remedy = did_you_mean(name, [*factors, "n"], what="factors")
            raise MistakeError(0, f"{name!r} in the id {template!r} is no factor", remedy)
        if "|" in field and chosen not in FILTERS:
            remedy = did_you_mean(chosen, FILTERS, what="filters")
            raise MistakeError(0, f"no filter {chosen!r} for ids", remedy)


def make_id(template: str, levels: Mapping[str, Level], number: int) -> str:
    """A row's id; characters that no file name should have become `-`. Raises `MistakeError`."""

    def put(match: re.Match[str]) -> str:
        name, _, chosen = match[1].partition("|")
        if name == "n":
            return str(number)
        if name not in levels:
            raise MistakeError(
                0, f"the id {template!r} needs {name!r}, which a row does not have", "give it another id"
            )
        return _filtered(levels[name], chosen, template)

    return _UNSAFE.sub("-", _FIELD.sub(put, template))


def _filtered(level: Level, chosen: str, template: str) -> str:
    if chosen == "digits":
        return str(level).replace(".", "")
    if chosen == "k":
        if not isinstance(level, bool) and isinstance(level, int):
            for thousand in (1000, 1024):
                if level % thousand == 0:
                    return str(level // thousand)
        text = f"{level!r} is no whole number of thousands (1000 or 1024) in the id {template!r}"
        raise MistakeError(0, text, "leave `|k` out")
    return str(level).lower() if isinstance(level, bool) else str(level)
