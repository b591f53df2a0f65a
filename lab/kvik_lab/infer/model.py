"""Effects of factors and their interactions on the logarithm of a time, so that effects are ratios.

Rows are runs or iterations: a mapping or DataFrame with one column a variable. The standard error is the
point: of independent runs, one that holds for unequal spread (HC3, MacKinnon and White 1985, J. Econometrics
29); of iterations within starts, a mixed model with random starts, fitted by REML.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import statsmodels.formula.api as smf
from scipy import stats
from statsmodels.stats.anova import anova_lm

from kvik_lab.errors import LabError
from kvik_lab.infer.arrays import Floats, fraction


@dataclass(frozen=True)
class Effect:
    """One coefficient on the log scale: its ratio with bounds, its p, and its error's degrees of freedom."""

    term: str
    ratio: float
    low: float
    high: float
    p: float
    degrees: float


@dataclass(frozen=True)
class Effects:
    """The coefficients of a model, how they were estimated, and what to know about the fit."""

    effects: tuple[Effect, ...]
    method: str
    notes: tuple[str, ...]
    between: float | None = None
    within: float | None = None

    def get(self, term: str) -> Effect:
        """The effect of this name; raises LabError, with the names there are."""
        for effect in self.effects:
            if effect.term == term:
                return effect
        raise LabError(f"no effect {term!r}; there are {', '.join(e.term for e in self.effects)}")


def independent_runs(data: pd.DataFrame, response: str, formula: str, level: float = 0.95) -> Effects:
    """Effects from independent runs, by least squares on log(response) with HC3 errors.

    `formula` is the right side, such as "backend * tokens". Raises LabError for terms that the runs cannot
    tell apart, and where no run is left over to measure the error.
    """
    fitted = _least_squares(data, response, formula).get_robustcov_results("HC3", use_t=True)
    names = list(fitted.model.exog_names)
    degrees = np.full(len(names), float(fitted.df_resid))
    listed = _effects(names, np.asarray(fitted.params), np.asarray(fitted.bse), degrees, level)
    return Effects(listed, "least squares of logs, HC3 errors", ())


def clustered_runs(
    data: pd.DataFrame, response: str, formula: str, start: str = "start", level: float = 0.95
) -> Effects:
    """Effects by least squares on log(response), with errors that allow any dependence within a start.

    t with one degree fewer than starts. It errs on the short side below about thirty starts, and says so;
    `random_starts` is the better choice there.
    """
    plain = _least_squares(data, response, formula)
    groups = pd.factorize(data[start])[0]
    starts = int(groups.max()) + 1
    if starts < 3:
        raise LabError(f"{starts} starts: their spread cannot be measured; replicate them")
    fitted = plain.get_robustcov_results("cluster", groups=groups, use_t=True)
    names = list(fitted.model.exog_names)
    listed = _effects(
        names, np.asarray(fitted.params), np.asarray(fitted.bse), np.full(len(names), starts - 1.0), level
    )
    few = (f"{starts} starts: errors clustered by so few are too short",) if starts < 30 else ()
    return Effects(listed, f"least squares of logs, errors clustered over {starts} starts", few)


def random_starts(
    data: pd.DataFrame, response: str, formula: str, start: str = "start", level: float = 0.95
) -> Effects:
    """Effects where starts vary at random: a mixed model of log(response) by REML.

    Degrees of freedom are counted by stratum (Pinheiro and Bates 2000, section 2.4.2): a term that is the
    same throughout each start is judged against starts, others against iterations. Where the fit fails, or
    puts the variance of starts at zero while it cannot be known to be, the answer is that of start means
    for terms between starts, and the notes say so.
    """
    logged = _logged(data, response)
    starts = int(pd.Series(data[start]).nunique())
    plain = _least_squares(data, response, formula)
    matrix, names = np.asarray(plain.model.exog), list(plain.model.exog_names)
    codes = pd.factorize(data[start])[0]
    between = np.array([_constant_within(column, codes) for column in matrix.T])
    degrees_between = starts - int(np.linalg.matrix_rank(matrix[:, between]))
    if degrees_between < 1:
        raise LabError(
            f"{starts} starts for {int(between.sum())} terms that differ between starts: none is left over "
            "to measure how starts vary; replicate starts"
        )
    # Starts take a degree each out of the iterations, and the terms within them one each.
    degrees_within = len(data) - starts - int((~between).sum())
    degrees = np.where(between, float(degrees_between), float(max(1, degrees_within)))
    problem = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            fitted = smf.mixedlm(f"_log ~ {formula}", logged, groups=data[start]).fit(reml=True)
        except (np.linalg.LinAlgError, ValueError) as error:
            problem = f"the mixed model has no solution ({error})"
    if not problem:
        variance = float(np.asarray(fitted.cov_re)[0, 0])
        if variance <= 1e-6 * float(fitted.scale):
            problem = "the mixed model puts the variance of starts at its boundary, zero"
        elif not fitted.converged or not np.isfinite(np.asarray(fitted.bse_fe)).all():
            problem = "the mixed model did not converge: " + "; ".join(
                sorted({str(w.message) for w in caught})
            )
    if problem:
        return _start_means(logged, matrix, names, between, codes, level, problem)
    listed = _effects(names, np.asarray(fitted.fe_params), np.asarray(fitted.bse_fe), degrees, level)
    return Effects(
        listed,
        f"mixed model of logs by REML, {starts} random starts",
        (),
        math.sqrt(variance),
        math.sqrt(fitted.scale),
    )


def _start_means(
    logged: pd.DataFrame,
    matrix: Floats,
    names: list[str],
    between: np.ndarray[tuple[int], np.dtype[np.bool_]],
    codes: np.ndarray[tuple[int], np.dtype[np.intp]],
    level: float,
    problem: str,
) -> Effects:
    """Least squares in two strata: start means for terms between starts, deviations from them for the
    rest."""
    y = logged["_log"].to_numpy(dtype=np.float64)
    counts = np.bincount(codes)

    def means(column: Floats) -> Floats:
        return np.asarray(np.bincount(codes, weights=column) / counts)

    outer = np.column_stack([means(column) for column in matrix.T])
    slope, error, degrees = np.zeros(len(names)), np.zeros(len(names)), np.ones(len(names))
    if (~between).any():
        inner = (matrix - outer[codes])[:, ~between]
        slope[~between], error[~between], degrees[~between] = _fit(inner, y - means(y)[codes], len(counts))
    left = means(y) - outer[:, ~between] @ slope[~between]
    slope[between], error[between], degrees[between] = _fit(outer[:, between], left, 0)
    return Effects(
        _effects(names, slope, error, degrees, level),
        "least squares of logs in two strata: start means, and iterations within starts",
        (f"{problem}; start means were used instead",),
    )


def _fit(x: Floats, y: Floats, taken: int) -> tuple[Floats, Floats, float]:
    """Coefficients, their standard errors, and the degrees left, `taken` being spent already."""
    beta = np.linalg.lstsq(x, y, rcond=None)[0]
    left = max(1.0, float(len(y) - x.shape[1] - taken))
    rest = y - x @ beta
    cover = np.linalg.pinv(x.T @ x) * float(rest @ rest) / left
    return np.asarray(beta), np.asarray(np.sqrt(np.diag(cover))), left


def _constant_within(column: Floats, codes: np.ndarray[tuple[int], np.dtype[np.intp]]) -> bool:
    first: dict[int, float] = {}
    for code, value in zip(codes, column, strict=True):
        if abs(first.setdefault(int(code), float(value)) - value) > 1e-9:
            return False
    return True


def _logged(data: pd.DataFrame, response: str) -> pd.DataFrame:
    if response not in data:
        raise LabError(f"there is no column {response!r}; there are {', '.join(map(str, data.columns))}")
    values = data[response].to_numpy(dtype=np.float64)
    if not (values > 0).all():
        raise LabError(f"{response} holds values that are not above zero: no logarithm, so no ratios")
    return data.assign(_log=np.log(values))


def _least_squares(data: pd.DataFrame, response: str, formula: str):  # type: ignore[no-untyped-def]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a rank-deficient matrix, which is refused below
            fitted = smf.ols(f"_log ~ {formula}", _logged(data, response)).fit()
    except LabError:
        raise
    except Exception as error:  # the parser raises what it likes; a person sees one sentence
        raise LabError(f"the model {formula!r} cannot be made of these columns: {error}") from error
    matrix = np.asarray(fitted.model.exog)
    rank = int(np.linalg.matrix_rank(matrix))
    if rank < matrix.shape[1]:
        raise LabError(
            f"the model {formula!r} has {matrix.shape[1]} terms, of which these runs tell {rank} apart; "
            "drop terms, or add runs that separate them"
        )
    if len(matrix) <= matrix.shape[1]:
        raise LabError(
            f"{len(matrix)} runs for {matrix.shape[1]} terms leave none to measure the error: replicate, or "
            "use Lenth's method"
        )
    return fitted


def _effects(
    names: Sequence[str], slope: Floats, error: Floats, degrees: Floats, level: float
) -> tuple[Effect, ...]:
    reach = np.asarray(stats.t.ppf(0.5 + fraction(level, "the level") / 2.0, degrees)) * error
    with np.errstate(divide="ignore", invalid="ignore"):
        p = np.asarray(2.0 * stats.t.sf(np.abs(slope) / error, degrees))
    return tuple(
        Effect(str(n), math.exp(s), math.exp(s - r), math.exp(s + r), float(q), float(d))
        for n, s, r, q, d in zip(names, slope, reach, p, degrees, strict=True)
    )


@dataclass(frozen=True)
class AnovaRow:
    """A term's share of the variation."""

    term: str
    degrees: float
    squares: float
    f: float
    p: float


def anova(data: pd.DataFrame, response: str, formula: str) -> tuple[AnovaRow, ...]:
    """Type II analysis of variance of log(response), of independent runs; the last row is the residual."""
    table = anova_lm(_least_squares(data, response, formula), typ=2)
    return tuple(
        AnovaRow(str(term), float(row["df"]), float(row["sum_sq"]), float(row["F"]), float(row["PR(>F)"]))
        for term, row in table.iterrows()
    )


@dataclass(frozen=True)
class Lenth:
    """Effects of an unreplicated two-level design beside the error that most of them show.

    `pse` is the pseudo standard error; an effect beyond `margin` is one of its own at the level, beyond
    `simultaneous` even with all of them looked at. `half_normal` are the places for a half-normal plot, in
    the order of the effects.
    """

    pse: float
    margin: float
    simultaneous: float
    active: tuple[str, ...]
    likely: tuple[str, ...]
    half_normal: tuple[float, ...]


def lenth(effects: Mapping[str, float], level: float = 0.95) -> Lenth:
    """Which effects stand out where no run was repeated (Lenth 1989, Technometrics 31).

    It supposes that most effects are next to nothing. Raises LabError for fewer than three effects, or if
    most are exactly zero.
    """
    if len(effects) < 3:
        raise LabError(f"{len(effects)} effects: Lenth's method needs at least 3, most of them inactive")
    fraction(level, "the level")
    size = np.abs(np.array(list(effects.values()), dtype=np.float64))
    first = 1.5 * float(np.median(size))
    if first == 0:
        raise LabError("most effects are exactly zero: there is no error to be read from them")
    pse = 1.5 * float(np.median(size[size < 2.5 * first]))
    degrees = len(size) / 3.0
    margin = float(stats.t.ppf(0.5 + level / 2.0, degrees)) * pse
    each = 0.5 * (1.0 + level ** (1.0 / len(size)))
    simultaneous = float(stats.t.ppf(each, degrees)) * pse
    rank = stats.rankdata(size)
    places = stats.halfnorm.ppf((rank - 0.5) / len(size))
    names = list(effects)
    return Lenth(
        pse,
        margin,
        simultaneous,
        tuple(n for n, s in zip(names, size, strict=True) if s > simultaneous),
        tuple(n for n, s in zip(names, size, strict=True) if margin < s <= simultaneous),
        tuple(float(q) for q in places),
    )
