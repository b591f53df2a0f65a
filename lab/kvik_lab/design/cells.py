"""Rows of levels as CSV: each cell is the level of the study that it names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from kvik_lab.design.factor import Factor, level_named
from kvik_lab.errors import LabError


def read_cells(path: Path) -> pd.DataFrame:
    """A CSV file with its cells as texts, and only an empty one as none: 0.10 is no number here, and None may
    be a level. Raises LabError for a file that cannot be read as CSV, or has no rows."""
    try:
        frame = pd.read_csv(path, dtype=object, keep_default_na=False, na_values=[""])
    except (ValueError, OSError) as error:
        raise LabError(f"{path}: cannot be read as CSV: {error}") from error
    if frame.empty:
        raise LabError(f"{path}: has no rows; write one a run or iteration")
    return frame


def with_levels(frame: pd.DataFrame, factors: Sequence[Factor]) -> pd.DataFrame:
    """The frame with the levels that the texts of the factors' columns name; what names none stays."""
    there = [factor for factor in factors if factor.name in frame]
    return frame.assign(**{factor.name: _levels(factor, frame[factor.name]) for factor in there})


def _levels(factor: Factor, cells: pd.Series) -> pd.Series:
    found = []
    for cell in cells:
        level = level_named(factor, cell) if isinstance(cell, str) else None
        found.append(cell if level is None else level)
    return pd.Series(found, index=cells.index, dtype=object)
