"""The rows of a plan by its kind, each with an id."""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import pandas as pd

from kvik_lab.design.factor import Factor
from kvik_lab.design.model import FloatArray, Model
from kvik_lab.design.optimal import Criterion, Goal, Search, augment, columns_of_terms, find_optimum
from kvik_lab.design.pairs import row_keys
from kvik_lab.design.screening import (
    LETTERS,
    columns_needed,
    find_generators,
    fraction,
    map_levels,
    pairs_of,
    plackett_burman,
    resolution,
)
from kvik_lab.design.splitplot import find_split_plot, hard_settings
from kvik_lab.errors import LabError

CLEAR = 4
"""The resolution at which no main effect is aliased with a two-factor interaction."""
MANY = 11
"""Of more columns, a search for a higher resolution takes too long."""


class Kind(Enum):
    """How rows are chosen."""

    FULL = "full"
    LAYERED = "layered"
    FRACTIONAL = "fractional"
    SCREENING = "screening"
    D_OPTIMAL = "d-optimal"
    I_OPTIMAL = "i-optimal"
    SPLIT_PLOT = "split-plot"


@dataclass(frozen=True)
class Chosen:
    """Rows with ids as their index; which start each belongs to, where that is part of the plan; what was
    done."""

    rows: pd.DataFrame
    plots: tuple[int, ...] | None
    notes: tuple[str, ...]
    ran: int = 0
    """How many of the rows, the first ones, ran already."""


@dataclass(frozen=True)
class Wish:
    """What to choose: `runs` rows, or as many as the kind needs."""

    kind: Kind
    runs: int | None = None
    focus: tuple[str, ...] = ()
    """Terms that matter more (D only)."""
    ratio: float = 1.0
    search: Search = field(default_factory=Search)


def choose_rows(wish: Wish, candidates: pd.DataFrame, coded: FloatArray, model: Model) -> Chosen:
    """Choose rows of the feasible candidates, coded as the columns of the model that they can estimate.

    Raises LabError where the kind needs a number of runs and has none, or cannot do with it.
    """
    if wish.kind is Kind.FULL:
        return Chosen(_with_ids(candidates), None, ())
    if wish.kind in (Kind.FRACTIONAL, Kind.SCREENING):
        return _two_level(wish, candidates, model.factors)
    if wish.kind is Kind.LAYERED:
        raise LabError("the rows of a layered plan are given, not chosen")
    if wish.runs is None:
        raise LabError(
            f"a {wish.kind.value} plan needs a number of runs; the model has {coded.shape[1]} columns"
        )
    if wish.kind is Kind.SPLIT_PLOT:
        return _split_plot(wish, wish.runs, candidates, coded, model.factors)
    criterion = Criterion.I if wish.kind is Kind.I_OPTIMAL else Criterion.D
    focus = columns_of_terms(model.names, wish.focus) if wish.focus else ()
    found = find_optimum(coded, wish.runs, Goal(criterion, focus), wish.search)
    note = f"{criterion.value}-optimal: the best of {len(found.scores)} searches, {_agreement(found.scores)}"
    return Chosen(_with_ids(candidates.iloc[list(found.rows)]), None, (note,))


def augment_rows(
    ran: pd.DataFrame,
    ran_coded: FloatArray,
    candidates: pd.DataFrame,
    coded: FloatArray,
    more: int,
    search: Search,
) -> Chosen:
    """Keep the rows that ran, and add the `more` candidates that tell most beside them; ids begin with
    `a`, and are those that no row has that ran."""
    # What ran is a block of its own, and its difference to the rest a coefficient like others.
    before, beside = (
        np.column_stack([matrix, np.full(len(matrix), number)])
        for number, matrix in enumerate((ran_coded, coded))
    )
    found = augment(beside, before, more, search=search)
    added = _with_ids(candidates.iloc[list(found.rows)], "a", taken=set(ran.index))
    rows = pd.concat([ran.astype(object), added.astype(object)])
    note = f"{len(ran)} rows ran, and count as a block of their own; {more} are added, D-optimal beside them"
    return Chosen(rows, None, (note,), len(ran))


def _two_level(wish: Wish, candidates: pd.DataFrame, factors: Sequence[Factor]) -> Chosen:
    columns = [factor.name for factor in factors for _ in range(columns_needed([factor]))]
    if wish.kind is Kind.SCREENING:
        matrix = plackett_burman(len(columns))
        note = f"Plackett-Burman: {len(columns)} columns in {len(matrix)} runs"
    else:
        matrix, note = _fraction(len(columns), pairs_of(factors), wish.runs)
    rows = map_levels(matrix, factors)
    names = [factor.name for factor in factors]
    feasible = set(row_keys(candidates, names))
    possible = [key in feasible for key in row_keys(rows, names)]
    notes = [note, f"columns {LETTERS[: len(columns)]} are, in order, of {', '.join(columns)}"]
    if not all(possible):
        notes.append(
            f"{possible.count(False)} of its rows are infeasible and left out, which costs it its balance"
        )
    if not any(possible):
        raise LabError(f"no row of this plan is feasible ({note}); take a d-optimal one")
    return Chosen(_with_ids(rows[possible]), None, tuple(notes))


def _fraction(columns: int, pairs: Sequence[int], runs: int | None) -> tuple[FloatArray, str]:
    """Of resolution IV; with a number of runs, of the best resolution that fits into it."""
    if runs is None:
        generators = find_generators(columns, CLEAR, pairs)
    else:
        generators = _best_generators(columns, pairs, runs)
    matrix = fraction(columns, generators)
    what = f"resolution {resolution(columns, generators, pairs)}" if generators else "the full factorial"
    return matrix, f"{len(matrix)} runs of 2^{columns}: {what}; {', '.join(generators) or 'no generators'}"


def _best_generators(columns: int, pairs: Sequence[int], runs: int) -> tuple[str, ...]:
    # The full factorial has a resolution above its columns.
    for wanted in range(max(columns + 1, CLEAR) if columns <= MANY else CLEAR, 2, -1):
        with suppress(LabError):
            return find_generators(columns, wanted, pairs, runs)
    raise LabError(f"{runs} runs are too few for a fraction of {columns} columns; take more, or screening")


def _split_plot(
    wish: Wish, runs: int, candidates: pd.DataFrame, coded: FloatArray, factors: Sequence[Factor]
) -> Chosen:
    """As many starts as the hard factors' own columns need, and two to three more for error."""
    setting = hard_settings(candidates, factors)
    order = np.argsort(setting, kind="stable")
    change = np.diff(setting[order]) == 0
    constant = np.array([bool(np.all(np.diff(c[order])[change] == 0)) for c in coded.T])
    needed = int(np.linalg.matrix_rank(coded[:, constant]))
    starts, size = _shares(runs, max(needed + 3, 4))
    found = find_split_plot(candidates, coded, factors, starts, size, wish.ratio, wish.search)
    rows = [row for start in found.starts for row in start]
    plots = tuple(k for k, start in enumerate(found.starts) for _ in start)
    notes = [
        f"split-plot: {starts} starts x {size} runs ({runs} wanted), D-optimal at a variance ratio of "
        f"{wish.ratio:g}",
        f"the best of {len(found.scores)} searches, {_agreement(found.scores)}",
    ]
    return Chosen(_with_ids(candidates.iloc[rows]), plots, tuple(notes))


def _shares(runs: int, least: int) -> tuple[int, int]:
    """At least so many starts, of equal size, that use up the runs if a few starts more do."""
    choices = range(min(least, runs), min(least + 6, runs) + 1)
    even = [starts for starts in choices if runs % starts == 0]
    starts = even[0] if even else choices[0]
    return starts, runs // starts


def _agreement(scores: Sequence[float]) -> str:
    """How many searches ended at the best score: many is a sign that nothing better was missed."""
    hits = sum(abs(score - max(scores)) < 1e-6 for score in scores)
    return f"{hits} of which ended there"


def _with_ids(rows: pd.DataFrame, letter: str = "r", taken: Container[str] = ()) -> pd.DataFrame:
    width = max(2, len(str(len(rows))))
    free = (name for k in itertools.count(1) if (name := f"{letter}{k:0{width}d}") not in taken)
    return rows.set_axis(list(itertools.islice(free, len(rows))), axis=0)
