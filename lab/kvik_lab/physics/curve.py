"""A mean time as a function of size, with what is known of its error.

The function is linear in its coefficients: a line, or the means at the measured sizes with straight pieces
between them. The coefficients' error is a sum of independent parts, each with a covariance and degrees of
freedom, so that the variance at any size has its own degrees of freedom (Satterthwaite, Biometrics
Bulletin 2:110, 1946; Welch, Biometrika 34:28, 1947).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from scipy import special

from kvik_lab.errors import LabError
from kvik_lab.physics.data import Floats, Measured, Samples, Summary, summarise

Method: TypeAlias = Literal["line", "interpolate"]
FEWEST_REPEATS = 3  # of each size, for a variance of its own


@dataclass(frozen=True)
class Part:
    """One independent source of error: the covariance that it gives the coefficients."""

    covariance: Floats
    freedom: float


@dataclass(frozen=True)
class Curve:
    """Mean seconds by size. `parts` is empty where nothing is known of the error.

    knots: the measured sizes. coefficients: intercept and slope of a line, or the mean at each knot.
    misfit: for a line, the p-value of the test that the means lie on it; None where it cannot be tested.
    """

    name: str
    unit: str
    method: Method
    knots: Floats
    coefficients: Floats
    parts: tuple[Part, ...]
    misfit: float | None
    notes: tuple[str, ...]

    def basis(self, size: Floats) -> Floats:
        """What the coefficients are multiplied with; sizes by coefficients."""
        if self.method == "line":
            return np.column_stack([np.ones_like(size), size])
        if self.knots.size == 1:
            return np.ones((size.size, 1))
        right = np.clip(np.searchsorted(self.knots, size), 1, self.knots.size - 1)
        share = (size - self.knots[right - 1]) / (self.knots[right] - self.knots[right - 1])
        out = np.zeros((size.size, self.knots.size))
        rows = np.arange(size.size)
        out[rows, right - 1] = 1 - share
        out[rows, right] = share
        return out

    def mean(self, size: Floats) -> Floats:
        """Seconds."""
        return np.asarray(self.basis(size) @ self.coefficients)

    def variances(self, size: Floats) -> tuple[Floats, Floats]:
        """The variance of the mean from each part, parts by sizes, and the parts' degrees of freedom."""
        basis = self.basis(size)
        rows = [np.einsum("ij,jk,ik->i", basis, part.covariance, basis) for part in self.parts]
        return np.array(rows).reshape(len(rows), size.size), np.array([part.freedom for part in self.parts])

    def draw(self, count: int, rng: np.random.Generator) -> Floats:
        """Coefficients that the data allow, `count` by coefficients: estimate plus t-distributed error."""
        out = np.tile(self.coefficients, (count, 1))
        for part in self.parts:
            values, vectors = np.linalg.eigh(part.covariance)
            root = vectors * np.sqrt(np.clip(values, 0, None))
            normal = rng.standard_normal((count, values.size)) @ root.T
            if np.isfinite(part.freedom):
                normal *= np.sqrt(part.freedom / rng.chisquare(part.freedom, count))[:, None]
            out += normal
        return out


def stated_line(name: str, latency_seconds: float, bytes_per_second: float) -> Curve:
    """A link as its data sheet states it: a line without error information."""
    coefficients = np.array([latency_seconds, 1 / bytes_per_second])
    note = f"{name} is as stated, not measured: nothing is known of its error"
    return Curve(name, "bytes", "line", np.array([1.0, 1e12]), coefficients, (), None, (note,))


def curve(data: Measured, method: Method) -> Curve:
    """Describe measurements as a line or by straight pieces.

    Where starts of the servers are known, they are the unit: their means are independent, repeats within one
    are not. Raises `LabError` where a start lacks a size, or a line has fewer than two sizes.
    """
    table = summarise(data)
    projection = _line_projection(table) if method == "line" else np.eye(table.size.size)
    coefficients = projection @ table.seconds
    notes: list[str] = []
    misfit: float | None = None
    parts: tuple[Part, ...] = ()
    if isinstance(data, Samples) and data.start is not None and np.unique(data.start).size > 1:
        means = _start_means(data, table.size)
        freedom = means.shape[0] - 1
        coefficients = projection @ means.mean(axis=0)
        spread = np.atleast_2d(np.cov(means, rowvar=False)) / means.shape[0]
        parts = (Part(projection @ spread @ projection.T, freedom),)
        notes.append(f"{data.name}: the unit is the server start, of which there are {freedom + 1}")
        misfit = _misfit_of_starts(table.size, means) if method == "line" else None
    elif table.error is not None and table.freedom is not None and _own_variances(table):
        parts = tuple(
            Part(np.outer(column, column) * error**2, float(freedom))
            for column, error, freedom in zip(projection.T, table.error, table.freedom, strict=True)
        )
        misfit = _misfit(table) if method == "line" else None
        notes.append(_independence(data))
    else:
        parts, note = _pooled(data, table, projection)
        misfit = _misfit_pooled(data, table, coefficients) if method == "line" else None
        notes.append(note)
    return Curve(
        data.name, data.unit, method, table.size, coefficients, parts, misfit, tuple(filter(None, notes))
    )


def _independence(data: Measured) -> str:
    if not isinstance(data, Samples):
        return ""
    return f"{data.name}: no server starts are given, so repeats are taken as independent"


def _own_variances(table: Summary) -> bool:
    if table.freedom is None or table.error is None:
        return False
    return bool((table.freedom >= FEWEST_REPEATS - 1).all() and (table.error > 0).all())


def _line_projection(table: Summary) -> Floats:
    """From means to intercept and slope: least squares of relative residuals, weights 1 / mean^2."""
    if table.size.size < 2:
        raise LabError(f"{table.name}: a line needs at least two sizes, and there is one")
    weight = 1 / table.seconds**2
    scale = table.size[-1]
    design = np.column_stack([np.ones_like(table.size), table.size / scale])
    normal = design.T * weight
    out = np.linalg.solve(normal @ design, normal)
    out[1] /= scale
    return np.asarray(out)


def _start_means(data: Samples, sizes: Floats) -> Floats:
    """Starts by sizes."""
    starts = data.start
    if starts is None:
        raise LabError(f"{data.name}: no starts are given")
    names, which = np.unique(starts, return_inverse=True)
    cell = which * sizes.size + np.searchsorted(sizes, data.size)
    count = np.bincount(cell, minlength=names.size * sizes.size).reshape(names.size, sizes.size)
    if (count == 0).any():
        start, size = np.argwhere(count == 0)[0]
        raise LabError(
            f"{data.name}: start {str(names[start])!r} has no measurement of {sizes[size]:g} {data.unit}; "
            "every start has to measure every size, so leave out that start or that size"
        )
    return np.asarray(np.bincount(cell, data.seconds).reshape(count.shape) / count)


def _pooled(data: Measured, table: Summary, projection: Floats) -> tuple[tuple[Part, ...], str]:
    """Error from relative residuals that all sizes share, for sizes with too few repeats each."""
    if isinstance(data, Summary):
        if table.error is None or table.freedom is None:
            return (), f"{data.name}: only means are given, so nothing is known of their error"
        count = table.freedom + 1
        relative = float(
            np.sum(table.freedom * count * (table.error / table.seconds) ** 2) / table.freedom.sum()
        )
        freedom = float(table.freedom.sum())
    else:
        fitted = (
            np.interp(data.size, table.size, table.seconds)
            if projection.shape[0] == table.size.size
            else np.column_stack([np.ones_like(data.size), data.size]) @ (projection @ table.seconds)
        )
        used = projection.shape[0]
        freedom = float(data.size.size - used)
        count = np.array([(data.size == size).sum() for size in table.size], dtype=np.float64)
        if freedom < 1:
            return (), f"{data.name}: as many coefficients as measurements, so nothing is known of the error"
        relative = float(np.sum((data.seconds / fitted - 1) ** 2) / freedom)
    if not relative > 0 or (table.error is not None and not table.error.any()):
        return (), f"{data.name}: repeats are equal to the last digit, which says nothing of their error"
    covariance = (projection * (relative * table.seconds**2 / count)) @ projection.T
    note = f"{data.name}: few repeats of each size, so all sizes share one relative spread"
    return (Part(covariance, freedom),), note


def _misfit(table: Summary) -> float | None:
    """p-value of lack of fit: squared residuals of the means in standard errors, against F.

    A square in estimated standard errors has the mean f / (f - 2) with f degrees of freedom, so each is
    scaled by its inverse; with fewer than five repeats of a size it has no useful distribution: None.
    """
    spare = table.size.size - 2
    if spare < 1 or table.error is None or table.freedom is None or table.freedom.min() < 4:
        return None
    inflated = np.where(np.isinf(table.freedom), 1.0, table.freedom / np.maximum(table.freedom - 2, 1))
    error = table.error * np.sqrt(inflated)
    design = np.column_stack([np.ones_like(table.size), table.size / table.size[-1]]) / error[:, None]
    target = table.seconds / error
    best, *_ = np.linalg.lstsq(design, target, rcond=None)
    residual = target - design @ best
    freedom = float(min(table.freedom.sum(), 1e9))
    return float(special.fdtrc(spare, freedom, float(residual @ residual) / spare))


def _misfit_pooled(data: Measured, table: Summary, line: Floats) -> float | None:
    """The classical test of lack of fit against the repeats' own spread, relative to the line."""
    if not isinstance(data, Samples):
        return None
    spare, freedom = table.size.size - 2, data.size.size - table.size.size
    if spare < 1 or freedom < 1:
        return None
    fitted = line[0] + line[1] * data.size
    means = np.interp(data.size, table.size, table.seconds)
    within = float(np.sum(((data.seconds - means) / fitted) ** 2))
    between = float(np.sum(((means - fitted) / fitted) ** 2))
    if not within > 0:
        return None
    return float(special.fdtrc(spare, freedom, between / spare / (within / freedom)))


def _misfit_of_starts(sizes: Floats, means: Floats) -> float | None:
    """Hotelling's test that the starts' residual contrasts have mean zero; None with too few starts."""
    spare, starts = sizes.size - 2, means.shape[0]
    if spare < 1 or starts <= spare:
        return None
    design = np.column_stack([np.ones_like(sizes), sizes / sizes[-1]])
    full, _ = np.linalg.qr(design, mode="complete")
    contrasts = means @ full[:, 2:]
    centre = contrasts.mean(axis=0)
    covariance = np.atleast_2d(np.cov(contrasts, rowvar=False))
    if np.linalg.matrix_rank(covariance) < spare:
        return None
    squared = starts * float(centre @ np.linalg.solve(covariance, centre))
    return float(special.fdtrc(spare, starts - spare, squared * (starts - spare) / (spare * (starts - 1))))
