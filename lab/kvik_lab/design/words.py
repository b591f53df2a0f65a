"""Values that are not there: the words that `kvik lab table` writes in their place."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pandas as pd

from kvik_lab.infer.arrays import Bools
from kvik_lab.report.read import missing


def unmeasured(values: pd.Series) -> tuple[Bools, tuple[str, ...]]:
    """Which values are a word that says why there is none (failed, not measured, ...), and a note that so
    many rows are left out; no note where there are none."""
    states = [missing(value) if isinstance(value, str) else None for value in values]
    counts = Counter(state.value for state in states if state is not None)
    told = ", ".join(f"{count} {word}" for word, count in counts.items())
    notes = (f"rows without a value are left out: {told}",) if told else ()
    return np.array([state is not None for state in states], dtype=bool), notes
