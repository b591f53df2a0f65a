"""How large a model rows can carry: from main effects alone to all interactions and curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from kvik_lab.design.estimability import assess, fewer_rows, find_rank
from kvik_lab.design.factor import Factor, Scale
from kvik_lab.design.model import build_model, keep_columns, model_matrix

MOST_COLUMNS = 400
"""Larger models are not tried: no plan carries them."""


@dataclass(frozen=True)
class Step:
    """One model: its columns, how many of them the candidates can tell apart, and how many the rows can."""

    model: str
    columns: int
    candidates: int
    rows: int


@dataclass(frozen=True)
class MainEffect:
    """The standard error of a main effect, over sigma, if no interaction and no curve were there."""

    name: str
    se: float | None


def model_steps(factors: Sequence[Factor], candidates: pd.DataFrame, rows: pd.DataFrame) -> tuple[Step, ...]:
    """Ranks of common models. `factors` have the levels that are feasible."""
    used = [factor for factor in factors if len(factor.levels) > 1]
    if not used:
        return ()
    all_levels = [replace(factor, scale=Scale.CATEGORICAL) for factor in factors]
    names = " + ".join(factor.name for factor in used)
    curved = [f"{f.name}^2" for f in used if f.scale is not Scale.CATEGORICAL and len(f.levels) > 2]
    wanted = [
        ("main effects", names, factors),
        ("with all two-factor interactions", f"({names})^2", factors),
        ("with curves too", " + ".join([f"({names})^2", *curved]), factors),
        ("main effects, each level by itself", names, all_levels),
        ("with interactions, each level by itself", f"({names})^2", all_levels),
    ]
    steps = []
    for title, formula, coded_as in wanted:
        model = build_model(formula, coded_as)
        if len(model.columns) <= MOST_COLUMNS:
            coded = [model_matrix(model, frame) for frame in (candidates, rows)]
            ranks = [int(np.linalg.matrix_rank(fewer_rows(matrix))) for matrix in coded]
            steps.append(Step(title, len(model.columns), *ranks))
    return tuple(steps)


def main_effects(
    factors: Sequence[Factor], candidates: pd.DataFrame, rows: pd.DataFrame
) -> tuple[MainEffect, ...]:
    """Standard errors of the main effects of independent rows in a model of nothing else."""
    names = " + ".join(factor.name for factor in factors if len(factor.levels) > 1)
    if not names:
        return ()
    model = build_model(names, factors)
    kept = find_rank(model_matrix(model, candidates), model.names).kept
    model = keep_columns(model, kept)
    told = assess(model_matrix(model, rows), model.names)
    return tuple(MainEffect(c.name, None if c.aliased_with else c.se) for c in told.coefficients)
