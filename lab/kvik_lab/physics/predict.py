"""What a fitted model says of sizes that were not measured, with an interval, and how far it reaches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvik_lab.errors import LabError
from kvik_lab.physics.data import Floats, Samples, Summary
from kvik_lab.physics.fit import Fit, resolve
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

    The interval is a bootstrap of residuals (of starts, where they are known): the model is refitted to
    `draws` data sets that it could have given, with residuals scaled up by sqrt(n / (n - p)).
    """
    if at.size.size == 0 or not (
        (at.size > 0).all() and (at.blocks > 0).all() and (at.concurrency >= 1).all()
    ):
        raise LabError("bytes and blocks of a prediction are numbers above 0, concurrency a number from 1")
    centre = fitted.predict(at)
    beyond = _beyond(inputs(data), at)
    spread = _spread(data, fitted, at, draws, np.random.default_rng(seed))
    out = []
    for index, seconds in enumerate(centre):
        lo = hi = None
        if spread is not None:
            lo, hi = (float(v) for v in np.quantile(spread[:, index], [0.5 - level / 2, 0.5 + level / 2]))
        out.append(Prediction(float(seconds), lo, hi, float(beyond[index])))
    return tuple(out)


def _beyond(seen: Inputs, at: Inputs) -> Floats:
    out = np.ones_like(at.size)
    for have, want in ((seen.size, at.size), (seen.blocks, at.blocks), (seen.concurrency, at.concurrency)):
        out = np.maximum(out, np.maximum(want / have.max(), have.min() / want))
    return out


def _spread(
    data: Samples | Summary, fitted: Fit, at: Inputs, draws: int, rng: np.random.Generator
) -> Floats | None:
    count, size = data.seconds.size, len(fitted.parameters)
    if count - size < 1:
        return None
    have = inputs(data)
    fit_seconds = fitted.predict(have)
    residual = np.log(data.seconds) - np.log(fit_seconds)
    residual = (residual - residual.mean()) * np.sqrt(count / (count - size))
    starts = data.start if isinstance(data, Samples) else None
    groups = (
        None if starts is None else [np.flatnonzero(starts == name) for name in sorted(set(starts.tolist()))]
    )
    rows = []
    for _ in range(draws):
        if groups is None:
            again = fit_seconds * np.exp(rng.choice(residual, count))
            values = resolve(fitted.model, have, again, fitted.values)
        else:
            chosen = np.concatenate([groups[pick] for pick in rng.integers(0, len(groups), len(groups))])
            part = Inputs(have.size[chosen], have.blocks[chosen], have.concurrency[chosen])
            values = resolve(fitted.model, part, data.seconds[chosen], fitted.values)
        rows.append(fitted.model.predict(values, at))
    return np.array(rows)
