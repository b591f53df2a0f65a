"""From rows of levels to the columns of a model matrix.

Numeric factors are coded to x in [-1, 1]: (f(v) - middle) / half range, with f the identity or log2, so that
a coefficient is half of what going from the lowest to the highest level changes. Categorical factors have sum
contrasts with the first level left out: the column `backend[efa]` is 1 at efa, -1 at the first level and 0
elsewhere, and its coefficient is what efa is above the mean of all levels. A factor that exists only within a
level of another is coded there and is 0 elsewhere; its coefficients are contrasts within the parent's level.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from kvik_lab.design.factor import Factor, Level, Scale
from kvik_lab.errors import LabError
from kvik_lab.study.formula import Formula, Term, parse_formula

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.intp]

INTERCEPT = "intercept"


@dataclass(frozen=True)
class Column:
    """One column of the model matrix: a product of one coded column of each factor in it."""

    name: str
    term: Term
    parts: tuple[tuple[str, int, int], ...]
    """Factor, which of its coded columns, and to which power."""


@dataclass(frozen=True)
class Model:
    """What is to be estimated: the factors, and a column for each coefficient. The first is the intercept."""

    formula: Formula
    factors: tuple[Factor, ...]
    columns: tuple[Column, ...]
    notes: tuple[str, ...]
    """What the formula asked for and the factors cannot give."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(column.name for column in self.columns)


def build_model(formula: str, factors: Iterable[Factor]) -> Model:
    """Read a formula over these factors into columns.

    Raises LabError for a formula that cannot be read, and for a power of a categorical factor.
    """
    known = {factor.name: factor for factor in factors}
    parsed = parse_formula(formula, list(known))
    notes: list[str] = []
    terms: dict[frozenset[tuple[str, int]], Term] = {}
    for term in parsed.terms:
        reduced = _without_parents(term, known)
        terms.setdefault(frozenset(reduced), reduced)
    columns = [Column(INTERCEPT, (), ())]
    for term in sorted(terms.values(), key=lambda term: sum(power for _, power in term)):
        single = [name for name, _ in term if len(known[name].levels) < 2]
        if single:
            notes.append(f"{_of(term)}: {single[0]} has one level, so it has no effect to estimate")
            continue
        columns += _columns_of(term, known)
    return Model(parsed, tuple(known.values()), tuple(columns), tuple(notes))


def keep_columns(model: Model, keep: Iterable[int]) -> Model:
    """The model with only these columns."""
    return Model(model.formula, model.factors, tuple(model.columns[k] for k in keep), model.notes)


def model_matrix(model: Model, frame: pd.DataFrame) -> FloatArray:
    """Code rows of levels, one column a factor: shape (rows, columns of the model).

    Raises LabError for a level that a factor does not have, a factor without a level in a row where it
    exists, and one with a level where it does not.
    """
    used = {name for column in model.columns for name, _, _ in column.parts}
    known = {factor.name: factor for factor in model.factors}
    codes = {name: _code(known[name], frame) for name in used}
    return _product(model, codes, len(frame))


def profile_row(model: Model, setting: Mapping[str, Level]) -> FloatArray:
    """The expected response at a setting, as a row over the model's columns.

    A factor that is not set is averaged: a categorical one over its levels, a numeric one at the middle of
    its range. A nested factor that is set sets its parents. Raises LabError where the two contradict.
    """
    full = dict(setting)
    known = {factor.name: factor for factor in model.factors}
    for name in setting:
        if name not in known:
            raise LabError(f"there is no factor {name!r}; there are {', '.join(known)}")
        for parent, level in _ancestors(known[name], known).items():
            if full.setdefault(parent, level) != level:
                raise LabError(f"{name} exists only within {parent}={level}, not within {full[parent]}")
    codes = {}
    for name, factor in known.items():
        if name in full:
            codes[name] = _code_values(factor, pd.Series([full[name]], dtype=object))
        else:
            codes[name] = np.zeros((1, _width(factor)))
    row: FloatArray = _product(model, codes, 1)[0]
    return row


def _product(model: Model, codes: Mapping[str, FloatArray], rows: int) -> FloatArray:
    matrix = np.ones((rows, len(model.columns)))
    for k, column in enumerate(model.columns):
        for name, part, power in column.parts:
            matrix[:, k] *= codes[name][:, part] ** power
    return matrix


def _ancestors(factor: Factor, known: Mapping[str, Factor]) -> dict[str, Level]:
    """The levels of other factors without which this one does not exist, near and far."""
    found = dict(factor.within)
    for parent in factor.within:
        if parent not in known:
            raise LabError(f"factor {factor.name} is within {parent}, which is not a factor")
        found |= _ancestors(known[parent], known)
    return found


def _without_parents(term: Term, known: Mapping[str, Factor]) -> Term:
    """mode:transport is transport where transport exists only within one mode: its columns are 0
    elsewhere."""
    parents = {parent for name, _ in term for parent in _ancestors(known[name], known)}
    return tuple((name, power) for name, power in term if name not in parents)


def _columns_of(term: Term, known: Mapping[str, Factor]) -> list[Column]:
    choices = []
    for name, power in term:
        factor = known[name]
        if factor.scale is Scale.CATEGORICAL:
            if power > 1:
                raise LabError(f"{name}^{power}: {name} is categorical; only a numeric factor has powers")
            choices.append([(f"{name}[{level}]", (name, k, 1)) for k, level in enumerate(factor.levels[1:])])
        else:
            choices.append([(name if power == 1 else f"{name}^{power}", (name, 0, power))])
    return [
        Column(":".join(label for label, _ in pick), term, tuple(part for _, part in pick))
        for pick in itertools.product(*choices)
    ]


def _of(term: Term) -> str:
    return ":".join(name for name, _ in term)


def _width(factor: Factor) -> int:
    return len(factor.levels) - 1 if factor.scale is Scale.CATEGORICAL else 1


def _code(factor: Factor, frame: pd.DataFrame) -> FloatArray:
    if factor.name not in frame.columns:
        raise LabError(
            f"the rows have no column {factor.name!r}; they have {', '.join(map(str, frame.columns))}"
        )
    values = frame[factor.name]
    exists = np.ones(len(frame), bool)
    for parent, level in factor.within.items():
        exists &= (frame[parent] == level).to_numpy(bool)
    wrong = np.flatnonzero(values.notna().to_numpy(bool) != exists)
    if len(wrong):
        what = "has no level" if exists[wrong[0]] else f"exists only within {dict(factor.within)}"
        raise LabError(f"row {frame.index[wrong[0]]}: {factor.name} {what}")
    return _code_values(factor, values)


def _code_values(factor: Factor, values: pd.Series) -> FloatArray:
    """Coded columns of one factor; 0 where there is no level."""
    if factor.scale is not Scale.CATEGORICAL:
        return _numeric(factor, values)
    place = {level: k for k, level in enumerate(factor.levels)}
    position = values.map(place)
    unknown = np.flatnonzero((position.isna() & values.notna()).to_numpy(bool))
    if len(unknown):
        level = values.iloc[unknown[0]]
        raise LabError(f"{factor.name} has no level {level!r}; it has {', '.join(map(str, factor.levels))}")
    table = np.vstack([-np.ones(len(place) - 1), np.eye(len(place) - 1), np.zeros(len(place) - 1)])
    rows: FloatArray = np.asarray(table[position.fillna(len(place)).to_numpy(np.intp)], float)
    return rows


def _numeric(factor: Factor, values: pd.Series) -> FloatArray:
    scaled = [_scaled(factor, level) for level in factor.levels]
    middle, half = (min(scaled) + max(scaled)) / 2, (max(scaled) - min(scaled)) / 2 or 1.0
    table = {level: (_scaled(factor, level) - middle) / half for level in values.dropna().unique()}
    coded = values.map(table).astype(float).fillna(0.0)
    result: FloatArray = np.asarray(coded, float)[:, None]
    return result


def _scaled(factor: Factor, level: Level) -> float:
    if isinstance(level, str | bool):
        raise LabError(f"{factor.name}: level {level!r} is not a number; give the factor scale: categorical")
    if factor.scale is Scale.LOG2:
        if level <= 0:
            raise LabError(f"{factor.name}: level {level} has no logarithm; give the factor scale: linear")
        return math.log2(level)
    return float(level)
