"""What a plan can show of a contrast: how often the very analysis of `strata`, run on simulated experiments,
finds it.

A contrast of factors that only a restart changes is judged against the variation between starts, with the
starts' degrees of freedom. All contrasts of a plan have intervals that hold together (Bonferroni), as a
report gives them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvik_lab.design.factor import Factor, Level, Scale, level_named
from kvik_lab.design.model import FloatArray, IntArray, Model, profile_row
from kvik_lab.design.strata import Strata
from kvik_lab.errors import LabError

DRAWS = 4000
SEED = 20_261_125
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
    """Median half-width of the contrast's simultaneous interval."""


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


def contrast_powers(
    contrasts: Sequence[Contrast],
    matrix: FloatArray,
    starts: IntArray | None = None,
    ratio: float = 0.0,
    delta: float = 1.0,
    wanted: float = 0.8,
    alpha: float = 0.05,
    nuisance: FloatArray | None = None,
    draws: int = DRAWS,
) -> tuple[Power, ...]:
    """Power of each contrast where all their intervals hold together at 1 - alpha.

    `matrix` has the model's columns, a row a run; `starts` numbers each run's start, `ratio` is the variance
    between starts over that of a run; `nuisance` are further columns, such as those of blocks. What only
    starts tell is judged by them at a ratio of 0 too, since the analysis does not know it.
    """
    extra = np.zeros((len(matrix), 0)) if nuisance is None else nuisance
    groups = np.arange(len(matrix)) if starts is None else starts
    strata = Strata(np.hstack([matrix, extra]), groups)
    rng = np.random.default_rng([SEED, len(matrix)])
    noise = rng.standard_normal((draws, strata.starts))[:, groups] * np.sqrt(ratio)
    noise += rng.standard_normal((draws, len(matrix)))
    fitted = strata.fit(noise)
    found = []
    for contrast in contrasts:
        row = np.concatenate([contrast.row, np.zeros(extra.shape[1])])
        kind = "runs" if strata.starts == len(matrix) else strata.stratum(row)
        se = strata.standard_error(row, ratio)
        if se is None:
            found.append(Power(contrast.text, None, 0, kind, delta, None, None, wanted, None))
            continue
        one = fitted.contrast(row, alpha, len(contrasts))
        df = int(np.median(one.degrees))
        if df < 1 or se == 0:
            found.append(Power(contrast.text, se, df, kind, delta, None, None, wanted, None))
            continue
        reach = (one.high - one.low) / 2
        power = _shown(one.estimate, reach, delta)
        smallest = _smallest(one.estimate, reach, wanted)
        half = float(np.median(reach))
        found.append(Power(contrast.text, se, df, kind, delta, power, smallest, wanted, half))
    return tuple(found)


def _shown(noise: FloatArray, reach: FloatArray, delta: float) -> float:
    """How often the interval of an effect of this size excludes zero."""
    return float(np.mean(np.abs(delta + noise) > reach))


def _smallest(noise: FloatArray, reach: FloatArray, wanted: float) -> float:
    """The effect with the wanted power, by halving: power grows with it."""
    low, high = 0.0, float(np.max(reach + np.abs(noise)))
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _shown(noise, reach, middle) < wanted else (low, middle)
    return high


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
    level = level_named(factor, text)
    if level is not None:
        return level
    raise LabError(f"{factor.name} has no level {text!r}; it has {', '.join(map(str, factor.levels))}")
