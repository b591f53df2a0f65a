"""Effects of a study's factors from what was measured, by the model and the contrasts of its plan.

What is fitted is what was planned: the formula, the coding of its factors, the contrasts, and the analysis in
strata whose simulated power the plan promises (`strata`). All intervals hold together. Of log(y), effects are
ratios.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import special

from kvik_lab.design.model import FloatArray, IntArray, Model, model_matrix
from kvik_lab.design.plan import block_columns, default_contrasts
from kvik_lab.design.power import parse_contrast
from kvik_lab.design.strata import Strata
from kvik_lab.design.words import unmeasured
from kvik_lab.errors import LabError
from kvik_lab.infer.arrays import Bools

VALUE = "value"
"""The column of `kvik lab table` with what was measured."""


@dataclass(frozen=True)
class Columns:
    """What columns of the data are called; `value` defaults to the name before the model's `~`, or to `value`
    where no column has that name."""

    value: str | None = None
    start: str = "start"
    block: str = "block"
    iteration: str = "iteration"
    """Where the data have it, rows of one start with the same levels are iterations of one run, but for
    those that `run` tells apart."""
    run: str = "run"
    """Where the data have it beside `iteration`, the number of a run among those of its start with the same
    levels: a plan may have a row several times."""


@dataclass(frozen=True)
class Effect:
    """One contrast: a ratio where the model is of a logarithm, else a difference in units of the data."""

    contrast: str
    value: float
    low: float
    high: float
    p: float
    """Of this contrast alone."""
    df: float
    stratum: str


@dataclass(frozen=True)
class Effects:
    """The contrasts that the data can judge, their intervals together at `level`."""

    response: str
    logarithmic: bool
    level: float
    effects: tuple[Effect, ...]
    runs: int
    starts: int
    notes: tuple[str, ...]
    """What was asked for and cannot be judged, and why; and what was left out."""


def fit_effects(
    model: Model,
    data: pd.DataFrame,
    contrasts: Sequence[str] = (),
    columns: Columns = Columns(),
    level: float = 0.95,
) -> Effects:
    """Estimate contrasts from a frame with a row a run or iteration and a column a factor.

    Iterations are no replicates: where a column numbers them, rows of one start with the same levels, and
    the same number of a run where a column has it, are one run, whose mean counts. Rows with a word for a
    missing value are left out. Without contrasts they are those that the plan's report has for every factor.
    Raises LabError for data that do not fit the model.
    """
    if not 0 < level < 1:
        raise LabError(f"a confidence of {level:g}: it is between 0 and 1")
    _check_columns(data, columns)
    for column in (columns.start, columns.block):
        _numbered(data, column)  # names a row that lacks it by its place, before rows are left out
    measured, notes = _measured(model, data, columns)
    if columns.start not in data:
        notes.append(f"there is no column {columns.start!r}: each row counts as a start of its own")
    data = _runs(model, measured, columns)
    y = data["_y"].to_numpy(dtype=np.float64)
    plain = model_matrix(model, data)
    blocks = _numbered(data, columns.block)
    full = np.hstack([plain, block_columns(blocks, int(blocks.max()) + 1)])
    starts = _numbered(data, columns.start) if columns.start in data else np.arange(len(y))
    strata = Strata(full, starts)
    wanted = {
        one.text: one for one in (parse_contrast(t, model) for t in contrasts or default_contrasts(model))
    }
    fitted = strata.fit(y[None, :])
    found = []
    for contrast in wanted.values():
        row = np.concatenate([contrast.row, np.zeros(full.shape[1] - len(contrast.row))])
        stratum = "runs" if strata.starts == len(y) else strata.stratum(row)
        if not strata.estimable(row):
            notes.append(f"{contrast.text}: these rows cannot tell it from other effects")
            continue
        one = fitted.contrast(row, 1 - level, len(wanted))
        df = round(float(one.degrees[0]), 6)
        if df < 1:
            notes.append(f"{contrast.text}: no {stratum} are left over to judge it by; replicate them")
            continue
        value, error = float(one.estimate[0]), float(one.error[0])
        p = float(2 * special.stdtr(df, -abs(value) / error)) if error else float(value == 0)
        scale = math.exp if model.formula.logarithmic else float
        bounds = scale(value), scale(float(one.low[0])), scale(float(one.high[0]))
        found.append(Effect(contrast.text, *bounds, p, df, stratum))
    response = model.formula.response or "value"
    return Effects(
        response, model.formula.logarithmic, level, tuple(found), len(y), strata.starts, tuple(notes)
    )


def _check_columns(data: pd.DataFrame, columns: Columns) -> None:
    """Without its start an iteration would count as an independent run."""
    for role in ("start", "block"):
        name = getattr(columns, role)
        if name not in data and name != getattr(Columns, role):
            raise LabError(f"there is no column {name!r}, named by --{role}; {_named(data)}")
    if columns.iteration in data and columns.start not in data:
        raise LabError(
            f"rows are iterations, and no column {columns.start!r} says of which start; name it with "
            f"--start; {_named(data)}"
        )


def _named(data: pd.DataFrame) -> str:
    return f"there are {', '.join(map(str, data.columns))}"


def _measured(model: Model, data: pd.DataFrame, columns: Columns) -> tuple[pd.DataFrame, list[str]]:
    """The rows that have a value, with what is fitted as `_y`, and notes on the others."""
    wanted = columns.value or model.formula.measured or VALUE
    # As `kvik lab table` names it; a column that was asked for is that column.
    name = wanted if wanted in data or columns.value else VALUE
    if name not in data:
        raise LabError(f"there is no column {wanted!r}; {_named(data)}")
    said, notes = unmeasured(data[name])
    values = _response(model, data, name, said)
    if said.all():
        raise LabError(f"no row has a value of {wanted}; {notes[0]}")
    taken = [] if name == wanted else [f"{wanted} is what the column {name!r} has"]
    return data.assign(_y=values)[~said], [*taken, *notes]


def _response(model: Model, data: pd.DataFrame, name: str, said: Bools) -> FloatArray:
    """What is fitted of each row; of those where a word says that there is no value, anything."""
    numbers = pd.to_numeric(data[name], errors="coerce").to_numpy(dtype=np.float64)
    values = np.where(said, 1.0, numbers)
    good = np.isfinite(values) & ((values > 0) if model.formula.logarithmic else True)
    if not good.all():
        first = int(np.argmin(good))
        why = "is no number above 0, so it has no logarithm" if model.formula.logarithmic else "is no number"
        raise LabError(f"row {first + 1}: {name} {data[name].iloc[first]!r} {why}")
    result: FloatArray = np.log(values) if model.formula.logarithmic else values
    return result


def _runs(model: Model, data: pd.DataFrame, columns: Columns) -> pd.DataFrame:
    """A row a run: the mean of its iterations, where there are any."""
    if columns.start not in data or columns.iteration not in data:
        return data
    _numbered(data, columns.start)
    names = [factor.name for factor in model.factors if factor.name in data]
    more = [name for name in (columns.block, columns.run) if name in data]
    keys = list(dict.fromkeys([columns.start, *names, *more]))
    return data.groupby(keys, dropna=False, sort=False)["_y"].mean().reset_index()


def _numbered(data: pd.DataFrame, column: str) -> IntArray:
    """The values of a column by number from 0; all 0 where it is not there."""
    if column not in data:
        return np.zeros(len(data), np.intp)
    if data[column].isna().any():
        first = int(np.argmax(data[column].isna().to_numpy(bool)))
        raise LabError(f"row {first + 1}: no {column}; name it in every row, or leave the column out")
    return pd.factorize(data[column])[0].astype(np.intp)
