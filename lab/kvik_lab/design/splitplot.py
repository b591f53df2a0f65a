"""Optimal plans where some factors change only with a restart of the servers.

A start is a whole plot: its hard factors are set once, its runs differ in the easy ones, and they share the
start's deviation. The plan is D-optimal for the information X' V^-1 X under a stated variance ratio, found by
two kinds of exchange in turn (after Goos and Vandebroek, J. Quality Technology 33, 2001, and Trinca and
Gilmour, Technometrics 43, 2001): a run for another with the same hard levels, and the hard levels of a whole
start for others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from kvik_lab.design.estimability import information
from kvik_lab.design.factor import Factor
from kvik_lab.design.model import FloatArray, IntArray
from kvik_lab.design.optimal import GAIN, PASSES, RIDGE, Search
from kvik_lab.errors import LabError


@dataclass(frozen=True)
class SplitPlot:
    """The best plan that was found: for each start its rows among the candidates."""

    starts: tuple[tuple[int, ...], ...]
    score: float
    """log |X' V^-1 X|."""
    scores: tuple[float, ...]
    """The score from each random beginning."""


def hard_settings(frame: pd.DataFrame, factors: Sequence[Factor]) -> IntArray:
    """Number the combinations of hard levels, from 0 in the order of appearance; all 0 without a hard
    factor."""
    return _number(frame, [factor.name for factor in factors if factor.hard])


def find_split_plot(
    frame: pd.DataFrame,
    coded: FloatArray,
    factors: Sequence[Factor],
    starts: int,
    runs_a_start: int,
    ratio: float = 1.0,
    search: Search = Search(),  # noqa: B008 - frozen
) -> SplitPlot:
    """Choose `starts` hard settings and `runs_a_start` candidates for each.

    `coded` are the candidates `frame` as model columns that they can estimate; `ratio` is the variance
    between starts over that of a run. Raises LabError where starts and runs are too few for the coefficients.
    """
    _check(frame, coded, factors, starts, runs_a_start, ratio)
    setting = hard_settings(frame, factors)
    easy = _number(frame, [factor.name for factor in factors if not factor.hard])
    members = [np.flatnonzero(setting == k) for k in range(setting.max() + 1)]
    place = {(int(s), int(e)): k for k, (s, e) in enumerate(zip(setting, easy, strict=True))}
    problem = _Problem(coded, members, easy, place, ratio / (1 + ratio * runs_a_start))
    rng = np.random.default_rng(search.seed)
    plot = np.repeat(np.arange(starts), runs_a_start)
    best: tuple[float, IntArray] | None = None
    scores = []
    for _ in range(search.beginnings):
        rows = _improve(problem, starts, runs_a_start, rng)
        info = information(coded[rows.ravel()], plot, ratio)
        full = np.linalg.matrix_rank(info, hermitian=True) == len(info)
        score = float(np.linalg.slogdet(info)[1]) if full else -np.inf
        scores.append(score)
        if full and (best is None or score > best[0] + GAIN):
            best = (score, rows)
    if best is None:
        raise LabError(
            f"no plan of {starts} starts with {runs_a_start} runs each estimates all {coded.shape[1]} "
            "coefficients; take more starts, or fewer terms in the hard factors"
        )
    chosen = tuple(tuple(sorted(int(k) for k in row)) for row in best[1])
    return SplitPlot(tuple(sorted(chosen)), best[0], tuple(scores))


@dataclass(frozen=True)
class _Problem:
    coded: FloatArray
    members: list[IntArray]
    """The candidates of each hard setting."""
    easy: IntArray
    place: dict[tuple[int, int], int]
    """The candidate with a hard setting and an easy one."""
    share: float
    """ratio / (1 + ratio * runs a start): what the common deviation of a start takes from its information."""

    def of_start(self, rows: IntArray) -> FloatArray:
        """The information of one start."""
        x = self.coded[rows]
        total = x.sum(axis=0)
        result: FloatArray = x.T @ x - self.share * np.outer(total, total)
        return result

    def total(self, rows: IntArray) -> FloatArray:
        """The information of all starts."""
        x = self.coded[rows]
        sums = x.sum(axis=1)
        flat = x.reshape(-1, x.shape[-1])
        result: FloatArray = flat.T @ flat - self.share * sums.T @ sums + RIDGE * np.eye(x.shape[-1])
        return result


def _improve(problem: _Problem, starts: int, size: int, rng: np.random.Generator) -> IntArray:
    settings = rng.choice(len(problem.members), starts, replace=starts > len(problem.members))
    rows = np.array([rng.choice(problem.members[s], size) for s in settings], np.intp)
    settings = settings.astype(np.intp)
    for _ in range(PASSES):
        changed = False
        for start in rng.permutation(starts):
            changed |= _change_runs(problem, rows, settings, int(start))
            changed |= _change_setting(problem, rows, settings, int(start))
        if not changed:
            break
    return rows


def _change_runs(problem: _Problem, rows: IntArray, settings: IntArray, start: int) -> bool:
    """Give each run of a start the best easy levels, one after the other."""
    changed = False
    choices = problem.members[settings[start]]
    for k in range(rows.shape[1]):
        inverse = np.asarray(np.linalg.inv(problem.total(rows)), float)
        growth = _growth(problem, rows[start], k, choices, inverse)
        best = int(np.argmax(growth))
        if growth[best] > 1 + GAIN * 10:
            rows[start, k] = choices[best]
            changed = True
    return changed


def _growth(problem: _Problem, rows: IntArray, k: int, choices: IntArray, inverse: FloatArray) -> FloatArray:
    """|M after| / |M before| for each choice z in place of run k, r, of a start whose rows sum to s.

    M changes by F C F' with F = [z, r, s] and C = diag(1, -1, share) - share u u', u = (1, -1, 1).
    """
    z = problem.coded[choices]
    fixed = np.stack([problem.coded[rows[k]], problem.coded[rows].sum(axis=0)])
    gram = np.empty((len(choices), 3, 3))
    gram[:, 0, 0] = np.einsum("ij,ij->i", z @ inverse, z)
    gram[:, 0, 1:] = gram[:, 1:, 0] = z @ inverse @ fixed.T
    gram[:, 1:, 1:] = fixed @ inverse @ fixed.T
    sign = np.array([1.0, -1.0, 1.0])
    core = np.diag([1.0, -1.0, problem.share]) - problem.share * np.outer(sign, sign)
    growth: FloatArray = np.linalg.det(np.eye(3) + core @ gram)
    return growth


def _change_setting(problem: _Problem, rows: IntArray, settings: IntArray, start: int) -> bool:
    """Move a whole start to the best other hard setting, its easy levels kept where they exist there."""
    if len(problem.members) == 1:
        return False
    now = problem.total(rows)
    without = now - problem.of_start(rows[start])
    moved = np.array([_moved(problem, rows[start], s) for s in range(len(problem.members))], np.intp)
    infos = np.array([without + problem.of_start(row) for row in moved])
    signs, scores = np.linalg.slogdet(infos)
    scores[signs <= 0] = -np.inf
    best = int(np.argmax(scores))
    if scores[best] <= np.linalg.slogdet(now)[1] + GAIN * 10:
        return False
    rows[start], settings[start] = moved[best], best
    return True


def _moved(problem: _Problem, rows: IntArray, setting: int) -> list[int]:
    first = int(problem.members[setting][0])
    return [problem.place.get((setting, int(problem.easy[row])), first) for row in rows]


def _number(frame: pd.DataFrame, names: Sequence[str]) -> IntArray:
    if not names:
        return np.zeros(len(frame), np.intp)
    keys = frame[list(names)].astype(object).where(frame[list(names)].notna(), None)
    return pd.factorize(pd.Series(list(keys.itertuples(index=False, name=None)), dtype=object))[0]


def _check(
    frame: pd.DataFrame, coded: FloatArray, factors: Sequence[Factor], starts: int, size: int, ratio: float
) -> None:
    if len(frame) != len(coded):
        raise LabError(f"{len(frame)} candidates but {len(coded)} coded rows")
    if not any(factor.hard for factor in factors):
        raise LabError("a split-plot plan needs a factor that only a restart changes; mark it as hard")
    if starts < 1 or size < 1 or ratio < 0:
        raise LabError("a split-plot plan needs at least one start, one run a start, a variance ratio from 0")
    if starts * size < coded.shape[1]:
        raise LabError(f"{starts} starts x {size} runs cannot estimate {coded.shape[1]} coefficients")
