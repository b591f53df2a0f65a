"""What rows can tell about the coefficients of a model: which, which only together, and how well.

A coefficient is estimable if no combination of the others gives the same column (Searle, Linear Models, 1971,
ch. 5). Standard errors are in units of sigma, the standard deviation of one run. Where runs share a server
start, their errors share its deviation: V = I + ratio * J within a start, ratio the variance between starts
over that of a run, and the information about the coefficients is X' V^-1 X (Goos and Vandebroek, Optimal
Split-Plot Designs, J. Quality Technology 33, 2001).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvik_lab.design.model import INTERCEPT, FloatArray, IntArray

TOLERANCE = 1e-8
"""A column is a combination of others if what is left of it is this much shorter than it was."""


@dataclass(frozen=True)
class Alias:
    """A column that the rows cannot tell from a combination of others. Without parts it is 0 in all rows."""

    column: str
    parts: tuple[tuple[str, float], ...]

    @property
    def text(self) -> str:
        """The equation, as it holds in every row."""
        if not self.parts:
            return f"{self.column} = 0 in every row"
        words = []
        for k, (name, weight) in enumerate(self.parts):
            sign = "-" if weight < 0 else "+" if k else ""
            size = "" if abs(abs(weight) - 1) < 1e-6 else f"{abs(weight):.4g} "
            words.append(f"{sign}{' ' if sign and k else ''}{size}{name}")
        return f"{self.column} = {' '.join(words)}"


@dataclass(frozen=True)
class Rank:
    """The columns that are kept, in their order, and those that are combinations of columns kept before."""

    kept: tuple[int, ...]
    aliases: tuple[Alias, ...]


@dataclass(frozen=True)
class Coefficient:
    """What the rows say of one coefficient."""

    name: str
    se: float | None
    """Standard error over sigma; none where it is not estimable, even with the dropped terms absent."""
    vif: float | None
    """Variance inflation: by how much correlation with other columns enlarges its variance; none of the
    intercept."""
    aliased_with: tuple[str, ...]
    """Dropped terms whose effect is part of this one's estimate."""


@dataclass(frozen=True)
class Estimability:
    """What rows can tell about a model."""

    runs: int
    rank: int
    columns: int
    aliases: tuple[Alias, ...]
    coefficients: tuple[Coefficient, ...]
    d_efficiency: float
    """(|information| ** (1 / rank)) / runs of the kept columns, in this coding: 1 for an orthogonal two-level
    plan."""

    @property
    def estimable(self) -> tuple[str, ...]:
        """The coefficients that these rows estimate by themselves."""
        return tuple(c.name for c in self.coefficients if c.se is not None and not c.aliased_with)


def find_rank(matrix: FloatArray, names: Sequence[str]) -> Rank:
    """Go through the columns in order; drop each that is a combination of those kept so far.

    With terms ordered by degree it is the interaction that is dropped, not the main effect.
    """
    matrix = fewer_rows(matrix)
    basis = np.zeros((matrix.shape[0], 0))
    kept: list[int] = []
    aliases = []
    for k in range(matrix.shape[1]):
        column = matrix[:, k]
        left = column - basis @ (basis.T @ column)
        left -= basis @ (basis.T @ left)
        if np.linalg.norm(left) > TOLERANCE * max(float(np.linalg.norm(column)), 1.0):
            basis = np.column_stack([basis, left / np.linalg.norm(left)])
            kept.append(k)
            continue
        weights = np.linalg.lstsq(matrix[:, kept], column, rcond=None)[0] if kept else np.zeros(0)
        parts = [(names[j], float(w)) for j, w in zip(kept, weights, strict=True) if abs(w) > 1e-7]
        aliases.append(Alias(names[k], tuple(parts)))
    return Rank(tuple(kept), tuple(aliases))


def fewer_rows(matrix: FloatArray) -> FloatArray:
    """As many rows as columns at most, with the same dependences among the columns."""
    result: FloatArray = np.linalg.qr(matrix).R if len(matrix) > matrix.shape[1] else matrix
    return result


def information(matrix: FloatArray, starts: IntArray | None = None, ratio: float = 0.0) -> FloatArray:
    """X' V^-1 X; `starts` numbers the server start of each row from 0, `ratio` is the variance ratio."""
    result: FloatArray = matrix.T @ matrix
    if starts is None or ratio == 0:
        return result
    count = np.bincount(starts)
    sums = np.zeros((len(count), matrix.shape[1]))
    np.add.at(sums, starts, matrix)
    # The inverse of I + ratio * J of size k is I - ratio / (1 + ratio * k) * J.
    weight = ratio / (1 + ratio * count)
    less: FloatArray = (sums * weight[:, None]).T @ sums
    return result - less


def assess(
    matrix: FloatArray, names: Sequence[str], starts: IntArray | None = None, ratio: float = 0.0
) -> Estimability:
    """Rank, aliases, standard errors, variance inflation and efficiency of rows under a model."""
    rank = find_rank(matrix, names)
    kept = list(rank.kept)
    used = matrix[:, kept]
    info = information(used, starts, ratio)
    inverse: FloatArray = np.asarray(np.linalg.inv(info), float)
    inflation = _inflation(info, inverse, [names[k] for k in kept])
    shared: dict[str, list[str]] = {}
    for alias in rank.aliases:
        for name, _ in alias.parts:
            shared.setdefault(name, []).append(alias.column)
    place = {k: j for j, k in enumerate(kept)}
    coefficients = []
    for k, name in enumerate(names):
        j = place.get(k)
        se = None if j is None else float(np.sqrt(inverse[j, j]))
        vif = None if j is None else inflation[j]
        coefficients.append(Coefficient(name, se, vif, tuple(shared.get(name, ()))))
    sign, log_det = np.linalg.slogdet(info) if kept else (1.0, 0.0)
    efficiency = float(np.exp(log_det / max(len(kept), 1)) / max(len(matrix), 1)) if sign > 0 else 0.0
    return Estimability(len(matrix), len(kept), len(names), rank.aliases, tuple(coefficients), efficiency)


def _inflation(info: FloatArray, inverse: FloatArray, names: Sequence[str]) -> list[float | None]:
    """Variance over what it would be if the column were uncorrelated with all others but the intercept."""
    if INTERCEPT not in names:
        return [None] * len(names)
    base = names.index(INTERCEPT)
    alone = np.diag(info) - info[base] ** 2 / info[base, base]
    return [None if j == base else float(inverse[j, j] * alone[j]) for j in range(len(names))]
