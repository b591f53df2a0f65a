"""How likely a plan is to show an effect, and how small an effect it can show.

The t statistic of a contrast is noncentral t with delta / SE, on the error degrees of freedom of its stratum
(Searle, Linear Models, 1971, ch. 3). A contrast of factors that only a restart changes is judged against the
variation between starts, with the starts' degrees of freedom. One that mixes both strata is given the smaller
of the two: its power is not overstated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from kvik_lab.design.estimability import TOLERANCE, find_rank, information
from kvik_lab.design.factor import Factor, Level, Scale
from kvik_lab.design.model import FloatArray, IntArray, Model, profile_row
from kvik_lab.errors import LabError

_CONTRAST = re.compile(r"^\s*(?P<name>[\w.]+)\s*(?:\[(?P<pair>[^\]]*)\])?\s*(?:@(?P<at>.*))?$")


@dataclass(frozen=True)
class Contrast:
    """The difference of the expected response between two settings."""

    text: str
    row: FloatArray
    """Weights over the model's columns."""


@dataclass(frozen=True)
class Power:
    """What a plan can show of one contrast. All sizes are in units of sigma, the deviation of one run."""

    contrast: str
    se: float | None
    """None where the plan cannot estimate the contrast."""
    df: int
    stratum: str
    delta: float
    power: float | None
    smallest: float | None
    """The effect that is shown with the wanted power; none without error degrees of freedom."""
    wanted: float
    halfwidth: float | None
    """Expected half-width of the interval at 1 - alpha, were sigma known: t times SE."""


def parse_contrast(text: str, model: Model) -> Contrast:
    """Read `factor`, `factor[high vs low]`, either with `@other=level,...` behind it.

    Without levels it is last against first for a categorical factor, highest against lowest for a numeric
    one. What is not set is averaged (see `profile_row`).
    """
    match = _CONTRAST.match(text)
    known = {factor.name: factor for factor in model.factors}
    if match is None or match["name"] not in known:
        raise LabError(
            f"contrast {text!r}: write factor, factor[level vs level] or factor@other=level; "
            f"factors are {', '.join(known)}"
        )
    factor = known[match["name"]]
    at = _settings(text, match["at"] or "", known)
    high, low = _ends(text, factor, match["pair"])
    row = profile_row(model, {**at, factor.name: high}) - profile_row(model, {**at, factor.name: low})
    where = f" at {match['at'].strip()}" if match["at"] else ""
    return Contrast(f"{factor.name}: {high} vs {low}{where}", row)


def contrast_power(
    contrast: Contrast,
    matrix: FloatArray,
    starts: IntArray | None = None,
    ratio: float = 0.0,
    delta: float = 1.0,
    wanted: float = 0.8,
    alpha: float = 0.05,
    nuisance: FloatArray | None = None,
) -> Power:
    """Power of the two-sided test of a contrast at level `alpha`.

    `matrix` has the model's columns, a row a run; `starts` numbers each run's start, `ratio` is the variance
    between starts over that of a run; `nuisance` are further columns, such as those of blocks.
    """
    extra = np.zeros((len(matrix), 0)) if nuisance is None else nuisance
    full = np.hstack([matrix, extra])
    row = np.concatenate([contrast.row, np.zeros(extra.shape[1])])
    kept = list(find_rank(full, [""] * full.shape[1]).kept)
    df, stratum = _error_df(full, row, starts, ratio)
    se = _standard_error(full, row, kept, starts, ratio)
    if se is None or df < 1 or se == 0:
        return Power(contrast.text, se, df, stratum, delta, None, None, wanted, None)
    smallest = se * _noncentrality(wanted, df, alpha)
    power, halfwidth = t_power(delta / se, df, alpha), t_quantile(1 - alpha / 2, df) * se
    return Power(contrast.text, se, df, stratum, delta, power, smallest, wanted, halfwidth)


def t_power(noncentrality: float, df: float, alpha: float = 0.05) -> float:
    """P(|t| > t_{1 - alpha/2, df}) of noncentral t, whose square is noncentral F."""
    limit = t_quantile(1 - alpha / 2, df)
    power = 1 - float(special.ncfdtr(1, df, noncentrality**2, limit**2))
    return power if math.isfinite(power) else _mixture(abs(noncentrality), df, limit)


def t_quantile(probability: float, df: float) -> float:
    """Quantile of Student's t."""
    return float(special.stdtrit(df, probability))


def _mixture(shift: float, df: float, limit: float) -> float:
    """The same where the series of noncentral F fails: a normal probability, averaged over sigma."""
    middle = (np.arange(4000) + 0.5) / 4000
    sigma = np.sqrt(special.chdtri(df, middle) / df)
    return float(np.mean(special.ndtr(shift - limit * sigma) + special.ndtr(-shift - limit * sigma)))


def _noncentrality(wanted: float, df: float, alpha: float) -> float:
    """The noncentrality with the wanted power, by halving: power grows with it."""
    low, high = 0.0, 1.0
    while t_power(high, df, alpha) < wanted:
        high *= 2
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if t_power(middle, df, alpha) < wanted else (low, middle)
    return high


def group_size(effect: float, power: float = 0.8, alpha: float = 0.05) -> int:
    """Runs in each of two independent groups to show a difference of `effect` standard deviations."""
    if effect <= 0 or not 0 < power < 1:
        raise LabError("a group size needs an effect above 0 and a power between 0 and 1")
    size = 2
    while t_power(effect * math.sqrt(size / 2), 2 * size - 2, alpha) < power:
        size += max(1, size // 200)
    while size > 2 and t_power(effect * math.sqrt((size - 1) / 2), 2 * size - 4, alpha) >= power:
        size -= 1
    return size


def _standard_error(
    full: FloatArray, row: FloatArray, kept: list[int], starts: IntArray | None, ratio: float
) -> float | None:
    # Estimable only if it is a combination of rows; then the dropped columns follow from the kept ones.
    used = full[:, kept]
    back = np.linalg.lstsq(full.T, row, rcond=None)[0]
    if np.linalg.norm(full.T @ back - row) > TOLERANCE * 100 * max(1.0, float(np.linalg.norm(row))):
        return None
    inverse = np.linalg.inv(information(used, starts, ratio))
    return float(np.sqrt(row[kept] @ inverse @ row[kept]))


def _error_df(full: FloatArray, row: FloatArray, starts: IntArray | None, ratio: float) -> tuple[int, str]:
    """Error degrees of freedom, and against what the contrast is judged."""
    rank = int(np.linalg.matrix_rank(full))
    if starts is None or ratio == 0:
        return len(full) - rank, "runs"
    count = np.bincount(starts)
    means = np.zeros((len(count), full.shape[1]))
    np.add.at(means, starts, full)
    means /= count[:, None]
    within = full - means[starts]
    constant = np.all(np.abs(within) < TOLERANCE, axis=0)
    whole = len(count) - int(np.linalg.matrix_rank(full[:, constant])) if constant.any() else len(count)
    sub = len(full) - len(count) - int(np.linalg.matrix_rank(within))
    touched = np.abs(row) > TOLERANCE
    if touched[constant].any():
        only = not touched[~constant].any()
        return (whole, "starts") if only or sub < 1 else (min(whole, sub), "starts and runs")
    return sub, "runs"


def _settings(text: str, at: str, known: Mapping[str, Factor]) -> dict[str, Level]:
    found: dict[str, Level] = {}
    for part in filter(None, (piece.strip() for piece in at.split(","))):
        name, sign, value = (piece.strip() for piece in part.partition("="))
        if not sign or name not in known:
            raise LabError(f"contrast {text!r}: {part!r} is not factor=level; factors are {', '.join(known)}")
        found[name] = _level(known[name], value)
    return found


def _ends(text: str, factor: Factor, pair: str | None) -> tuple[Level, Level]:
    if pair is None:
        levels: Sequence[Level] = factor.levels
        if factor.scale is not Scale.CATEGORICAL:
            levels = sorted(level for level in levels if not isinstance(level, str))
        if len(levels) < 2:
            raise LabError(f"contrast {text!r}: {factor.name} has one level, so there is nothing to compare")
        return levels[-1], levels[0]
    high, sign, low = (piece.strip() for piece in pair.partition(" vs "))
    if not sign:
        raise LabError(f"contrast {text!r}: write the levels as [{factor.levels[-1]} vs {factor.levels[0]}]")
    return _level(factor, high), _level(factor, low)


def _level(factor: Factor, text: str) -> Level:
    """A level from its text; any number for a numeric factor."""
    for level in factor.levels:
        if str(level) == text or (isinstance(level, bool) and str(level).lower() == text.lower()):
            return level
    if factor.scale is not Scale.CATEGORICAL:
        try:
            return float(text)
        except ValueError:
            pass
    raise LabError(f"{factor.name} has no level {text!r}; it has {', '.join(map(str, factor.levels))}")
