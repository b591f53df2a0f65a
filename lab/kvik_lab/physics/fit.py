"""Models fitted to measured times: relative residuals, robust, no negative parameter, honest intervals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import optimize, special

from kvik_lab.errors import LabError
from kvik_lab.physics.data import Floats, Samples, Summary
from kvik_lab.physics.least import huber_loss, least
from kvik_lab.physics.models import Inputs, Model, applicable, inputs

HUBER = 1.345  # of the residuals' scale: 95 % efficient where errors are normal (Huber, 1964)
LEAST_SCALE = 1e-6  # relative; below it residuals are printing and rounding


@dataclass(frozen=True)
class Parameter:
    """A fitted parameter. lo, hi: its interval; None for an end that the data do not give.

    identified: false where the data allow both no effect at all and any larger one, or no interval is known.
    """

    name: str
    value: float
    lo: float | None
    hi: float | None
    identified: bool


@dataclass(frozen=True)
class Fit:
    """A model with its parameters. `scatter` is the relative scale of the residuals.

    aicc: corrected Akaike criterion on the log scale, None with too few measurements. left_out: root mean
    square of log errors at sizes that the fit was not given, None with fewer than three sizes.
    """

    model: Model
    parameters: tuple[Parameter, ...]
    scatter: float
    measurements: int
    aicc: float | None
    left_out: float | None
    notes: tuple[str, ...]

    @property
    def values(self) -> Floats:
        """The parameters' values, in the model's order."""
        return np.array([parameter.value for parameter in self.parameters])

    def predict(self, at: Inputs) -> Floats:
        """Seconds."""
        return self.model.predict(self.values, at)


def fit(data: Samples | Summary, model: Model, *, level: float = 0.95, score: bool = True) -> Fit:
    """Fit one model. Intervals are profile likelihoods; of the starts' own fits where starts are known.

    Raises `LabError` for fewer measurements than parameters, or for columns that the data lack.
    """
    at, seconds = inputs(data), data.seconds
    count, size = seconds.size, len(model.parameters)
    for need in model.needs:
        column = "blocks" if need == "block_size" else need
        if getattr(data, column, None) is None and not (need == "blocks" and data.unit == "tokens"):
            raise LabError(f"{data.name}: the model {model.name} needs a column {column}")
    if count < size:
        raise LabError(f"{data.name}: {count} measurements cannot give the {size} parameters of {model.name}")
    best = _solve(model, at, seconds)
    residual = _residual(model, best, at, seconds)
    freedom = count - size
    scatter = float(np.sqrt(np.sum(residual**2) / freedom)) if freedom else 0.0
    notes: list[str] = []
    starts = starts_of(data)
    if starts is not None:
        rows = each_start(model, data, starts)
        parameters = _of_starts(model, rows, level)
        notes.append(f"intervals are of {len(rows)} server starts, each fitted by itself")
    elif freedom < 1:
        parameters = tuple(
            Parameter(name, float(value), None, None, False)
            for name, value in zip(model.parameters, best, strict=True)
        )
        notes.append("as many parameters as measurements: the fit passes through all, and has no intervals")
    else:
        parameters = _profiles(model, at, seconds, best, level)
    notes += [f"{p.name} is not identified by these data" for p in parameters if not p.identified]
    return Fit(
        model,
        parameters,
        scatter,
        count,
        _aicc(residual, size) if score else None,
        _left_out(model, at, seconds, np.unique(_cells(data), axis=0)) if score else None,
        tuple(notes),
    )


def rank(data: Samples | Summary, queue: float | None = None) -> tuple[Fit, ...]:
    """Every model that the data can carry, the one that predicts best first.

    By AICc (Hurvich and Tsai, Biometrika 76:297, 1989), which needs measurements to spare; models without
    come last, by what they miss at left-out sizes.
    """
    most = _most(data)
    fits = [fit(data, model) for model in applicable(data, queue) if most >= len(model.parameters)]
    if not fits:
        raise LabError(
            f"{data.name}: too few measurements for any model; two sizes at least, in each start where "
            "starts are given"
        )
    far = float("inf")
    return tuple(
        sorted(
            fits,
            key=lambda f: (
                f.aicc is None,
                f.aicc if f.aicc is not None else far,
                f.left_out if f.left_out is not None else far,
                len(f.parameters),
            ),
        )
    )


def resolve(model: Model, at: Inputs, seconds: Floats, near: Floats) -> Floats:
    """Refit to other times, beginning near known values; for resampling."""
    return _solve(model, at, seconds, near)


def _residual(model: Model, values: Floats, at: Inputs, seconds: Floats) -> Floats:
    return np.asarray(np.log(np.maximum(model.predict(values, at), 1e-300)) - np.log(seconds))


def _typical(model: Model, at: Inputs, seconds: Floats) -> Floats:
    """For each parameter, the value with which it alone would give the measured times."""
    out = []
    for index, name in enumerate(model.parameters):
        if name == "contention":
            out.append(1.0)
            continue
        unit = np.zeros(len(model.parameters))
        unit[index] = 1.0
        if "contention" in model.parameters:
            unit[-1] = 1.0
        alone = model.predict(unit, at)
        with np.errstate(divide="ignore"):
            out.append(float(np.min(np.where(alone > 0, seconds / np.maximum(alone, 1e-300), np.inf))))
    return np.array([value if np.isfinite(value) and value > 0 else float(seconds.min()) for value in out])


def _solve(model: Model, at: Inputs, seconds: Floats, near: Floats | None = None) -> Floats:
    """Huber's fit of log residuals. A plain fit gives the scale that tells far residuals from near ones.

    near: begin here only.
    """
    typical = _typical(model, at, seconds)
    size = len(model.parameters)

    def residual(scaled: Floats) -> Floats:
        return _residual(model, scaled * typical, at, seconds)

    begins = [np.full(size, 0.9), np.full(size, 0.5), *(0.95 * np.eye(size) + 0.05)]
    if near is not None:
        begins = [np.maximum(near / typical, 1e-9)]
    plain = min((least(residual, begin) for begin in begins), key=lambda found: found.loss)
    return least(residual, plain.x, HUBER * _scale(plain.residual)).x * typical


def _scale(residual: Floats) -> float:
    return max(1.4826 * float(np.median(np.abs(residual))), LEAST_SCALE)


def _held(
    model: Model, at: Inputs, seconds: Floats, index: int, value: float, best: Floats, scale: float
) -> Floats:
    """The other parameters refitted with one held at a value, by the loss of the whole fit."""
    typical = _typical(model, at, seconds)
    free = np.arange(best.size) != index

    def whole(scaled: Floats) -> Floats:
        values = np.empty(best.size)
        values[free] = scaled * typical[free]
        values[index] = value
        return values

    def residual(scaled: Floats) -> Floats:
        return _residual(model, whole(scaled), at, seconds)

    if not free.any():
        return whole(np.array([]))
    begins = [best[free] / typical[free], np.full(int(free.sum()), 0.5)]
    if begins[0].size == 1:  # one valley: no second begin
        begins.pop()
    found = min((least(residual, begin, HUBER * scale) for begin in begins), key=lambda end: end.loss)
    return whole(found.x)


def _deviance(residual: Floats, scale: float) -> float:
    """Huber's loss in units of squares: residuals within HUBER scales count by their square."""
    return 2 * huber_loss(residual, HUBER * scale)


def _profiles(model: Model, at: Inputs, seconds: Floats, best: Floats, level: float) -> tuple[Parameter, ...]:
    """Intervals of every value with which the others, refitted, do not fit much worse.

    The bound is F-based, deviance <= best * (1 + F(1, n - p) / (n - p)) (Bates and Watts, Nonlinear
    Regression Analysis, 1988, section 6.1.2), which allows for the scatter's own error with few points.
    """
    residual = _residual(model, best, at, seconds)
    freedom = seconds.size - best.size
    scale = _scale(residual)
    floor = max(_deviance(residual, scale), seconds.size * LEAST_SCALE**2)
    bound = floor * (1 + float(special.fdtri(1, freedom, level)) / freedom)
    typical = _typical(model, at, seconds)

    def excess(index: int, value: float) -> float:
        found = _held(model, at, seconds, index, value, best, scale)
        return _deviance(_residual(model, found, at, seconds), scale) - bound

    out = []
    for index, name in enumerate(model.parameters):
        value, unit = float(best[index]), max(float(best[index]), 1e-6 * float(typical[index]))
        lo = 0.0 if excess(index, 0.0) <= 0 else _edge(excess, index, value, 0.0)
        far = value + unit
        while excess(index, far) <= 0 and far < 1e3 * max(float(typical[index]), unit):
            far = value + (far - value) * 4
        hi = None if excess(index, far) <= 0 else _edge(excess, index, value, far)
        out.append(Parameter(name, value, lo, hi, not (hi is None or (lo == 0.0 and hi > typical[index]))))
    return tuple(out)


def _edge(excess: Any, index: int, inside: float, outside: float) -> float:
    """Where the excess changes sign, to 0.1 % of the way there."""
    found = optimize.brentq(
        lambda value: excess(index, value), inside, outside, xtol=1e-3 * abs(outside - inside), maxiter=60
    )
    return float(found)


def starts_of(data: Samples | Summary) -> npt.NDArray[np.str_] | None:
    """Which start each measurement belongs to; None where that is not known, or there is one only."""
    starts = data.start if isinstance(data, Samples) else None
    return starts if starts is not None and np.unique(starts).size > 1 else None


def each_start(model: Model, data: Samples | Summary, starts: npt.NDArray[np.str_]) -> Floats:
    """Every start's own parameters, a row each. Raises `LabError` where a start cannot give them."""
    at, cells = inputs(data), _cells(data)
    rows = []
    for start in np.unique(starts):
        here = starts == start
        if (own := np.unique(cells[here], axis=0).shape[0]) < len(model.parameters):
            raise LabError(
                f"{data.name}: start {str(start)!r} has measured {own} different transfers, and {model.name} "
                f"has {len(model.parameters)} parameters; leave out that start, or take a simpler model"
            )
        part = Inputs(at.size[here], at.blocks[here], at.concurrency[here])
        rows.append(_solve(model, part, data.seconds[here]))
    return np.array(rows)


def half_width(rows: Floats, level: float) -> Floats:
    """Of Student's interval for the mean of the starts, a row each."""
    count = rows.shape[0]
    critical = float(special.stdtrit(count - 1, 0.5 + level / 2))
    return np.asarray(critical * rows.std(axis=0, ddof=1) / np.sqrt(count))


def _of_starts(model: Model, rows: Floats, level: float) -> tuple[Parameter, ...]:
    """Student's interval of the starts' own parameters, cut at 0."""
    return tuple(
        Parameter(name, float(c), max(0.0, float(c - h)), float(c + h), bool(c > 0))
        for name, c, h in zip(model.parameters, rows.mean(axis=0), half_width(rows, level), strict=True)
    )


def _cells(data: Samples | Summary) -> Floats:
    """Of each measurement the bytes, blocks and concurrency: equal where it repeats another one."""
    at = inputs(data)
    return np.column_stack([at.size, at.blocks, at.concurrency])


def _most(data: Samples | Summary) -> int:
    """How many parameters the data can give: where starts are known, those that every start can."""
    starts, cells = starts_of(data), _cells(data)
    if starts is None:
        return data.seconds.size
    return min(len(np.unique(cells[starts == start], axis=0)) for start in np.unique(starts))


def _aicc(residual: Floats, size: int) -> float | None:
    count, free = residual.size, size + 1  # the scatter is estimated too
    if count - free - 1 < 1:
        return None
    mean = max(float(np.mean(residual**2)), LEAST_SCALE**2)
    return float(count * np.log(mean) + 2 * free + 2 * free * (free + 1) / (count - free - 1))


def _left_out(model: Model, at: Inputs, seconds: Floats, cells: Floats) -> float | None:
    """Fit without each size (bytes, blocks and concurrency together) and predict it."""
    if cells.shape[0] < max(3, len(model.parameters) + 1):
        return None
    errors = []
    for size, blocks, concurrency in cells:
        out = (at.size == size) & (at.blocks == blocks) & (at.concurrency == concurrency)
        kept = Inputs(at.size[~out], at.blocks[~out], at.concurrency[~out])
        values = _solve(model, kept, seconds[~out])
        miss = _residual(
            model, values, Inputs(at.size[out], at.blocks[out], at.concurrency[out]), seconds[out]
        )
        errors.append(float(np.mean(miss**2)))
    return float(np.sqrt(np.mean(errors)))
