"""What a fitted model says of sizes that were not measured, with an interval, and how far it reaches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvik_lab.errors import LabError
from kvik_lab.physics.data import Floats, Samples, Summary
from kvik_lab.physics.fit import Fit, each_start, half_width, resolve, starts_of
from kvik_lab.physics.models import Inputs, inputs


@dataclass(frozen=True)
class Prediction:
    """Seconds of one transfer. lo, hi: interval of the mean; None where the fit has nothing to spare.

    beyond: how many times larger than the largest (or smaller than the smallest) measured value it is, over
    bytes, blocks and concurrency; 1 inside. An interval of an extrapolation holds only if the model does.
    """

    seconds: float
    lo: float | None
    hi: float | None
    beyond: float

    @property
    def extrapolated(self) -> bool:
        """Whether it lies outside of what was measured."""
        return self.beyond > 1


def predict(
    data: Samples | Summary, fitted: Fit, at: Inputs, *, level: float = 0.95, draws: int = 60, seed: int = 1
) -> tuple[Prediction, ...]:
    """Predict the mean at each entry of `at`.

    Where starts are known, the interval is Student's over what each start by itself predicts. Else it is a
    bootstrap of residuals: the model is refitted to `draws` data sets that it could have given, with
    residuals scaled up by sqrt(n / (n - p)).
    """
    if at.size.size == 0 or not (
        (at.size > 0).all() and (at.blocks > 0).all() and (at.concurrency >= 1).all()
    ):
        raise LabError("bytes and blocks of a prediction are numbers above 0, concurrency a number from 1")
    centre = fitted.predict(at)
    beyond = _beyond(inputs(data), at)
    ends = _ends(data, fitted, at, level, draws, seed)
    out = []
    for index, seconds in enumerate(centre):
        lo, hi = (None, None) if ends is None else (float(ends[0][index]), float(ends[1][index]))
        out.append(Prediction(float(seconds), lo, hi, float(beyond[index])))
    return tuple(out)


def _beyond(seen: Inputs, at: Inputs) -> Floats:
    out = np.ones_like(at.size)
    for have, want in ((seen.size, at.size), (seen.blocks, at.blocks), (seen.concurrency, at.concurrency)):
        out = np.maximum(out, np.maximum(want / have.max(), have.min() / want))
    return out


def _ends(
    data: Samples | Summary, fitted: Fit, at: Inputs, level: float, draws: int, seed: int
) -> tuple[Floats, Floats] | None:
    centre = fitted.predict(at)
    if (starts := starts_of(data)) is not None:
        each = each_start(fitted.model, data, starts)
        half = half_width(np.array([fitted.model.predict(one, at) for one in each]), level)
        return np.maximum(centre - half, 0.0), centre + half
    count, size = data.seconds.size, len(fitted.parameters)
    if count - size < 1:
        return None
    have = inputs(data)
    fit_seconds = fitted.predict(have)
    residual = np.log(data.seconds) - np.log(fit_seconds)
    residual = (residual - residual.mean()) * np.sqrt(count / (count - size))
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(draws):
        again = fit_seconds * np.exp(rng.choice(residual, count))
        rows.append(fitted.model.predict(resolve(fitted.model, have, again, fitted.values), at))
    lo, hi = np.quantile(np.array(rows), [0.5 - level / 2, 0.5 + level / 2], axis=0)
    return lo, hi
