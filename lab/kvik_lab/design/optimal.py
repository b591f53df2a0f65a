"""Optimal plans: the n rows of a candidate set that tell most about a model.

Exchange after Fedorov (Theory of Optimal Experiments, 1972) in the order of Cook and Nachtsheim
(Technometrics 22, 1980): for each row of the plan in turn, the best candidate takes its place if that is a
gain, until a whole pass gains nothing. So no exchange of one row betters the result. A search from several
random beginnings guards against plans that only single exchanges cannot better. All candidates are weighed at
once.

    D   largest |M|, the smallest joint confidence region of all coefficients
    Ds  largest |M| / |M22| ** weight: coefficients in `focus` count more, M22 being the part of the others
    I   smallest mean variance of prediction over the candidates
    A   smallest mean variance of the coefficients
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from kvik_lab.design.model import FloatArray, IntArray
from kvik_lab.errors import LabError

RIDGE = 1e-8
"""Added to the diagonal while searching, so that a poor beginning can still be bettered."""

GAIN = 1e-9
"""An exchange must gain more than this in the logarithm of the score, or rounding would exchange for ever."""

COLLAPSE = 1e-6
"""An exchange that leaves less than this of |M| costs a coefficient, whatever else it gains."""

TINY = 1e-300
"""In the place of 0 under a logarithm."""

PASSES = 100


class Criterion(Enum):
    """By what a plan is better than another."""

    D = "D"
    I = "I"  # noqa: E741
    A = "A"


@dataclass(frozen=True)
class Goal:
    """The criterion, and for D the columns that matter more (Ds), with a weight from 0 (none) to 1 (only
    they)."""

    criterion: Criterion = Criterion.D
    focus: tuple[int, ...] = ()
    weight: float = 0.5


@dataclass(frozen=True)
class Optimum:
    """The best plan that was found."""

    rows: tuple[int, ...]
    """Positions in the candidates, ascending; a candidate taken twice stands twice."""
    score: float
    """Logarithm of what is made large: |M| for D, |M| / |M22| ** weight for Ds, 1 / mean variance for I and
    A."""
    scores: tuple[float, ...]
    """The score from each beginning, in order."""
    exchanges: int
    """Exchanges made, over all beginnings."""
    weighed: int
    """Exchanges considered, over all beginnings."""


@dataclass(frozen=True)
class Search:
    """How to search: number of random beginnings, seed, and whether a candidate may be taken twice."""

    beginnings: int = 10
    seed: int = 1
    repeats: bool = True


def find_optimum(
    candidates: FloatArray,
    runs: int,
    goal: Goal = Goal(),
    search: Search = Search(),
    fixed: FloatArray | None = None,
) -> Optimum:
    """Choose `runs` rows of the coded candidates (rows, columns), beside `fixed` rows that ran already.

    Raises LabError when no such plan can estimate every column: reduce the model to what the candidates can
    estimate (`find_rank`) first.
    """
    columns = candidates.shape[1]
    before = np.zeros((columns, columns)) if fixed is None else fixed.T @ fixed
    _check(candidates, runs, goal, search, before)
    rng = np.random.default_rng(search.seed)
    found = [_improve(candidates, runs, goal, search, before, rng) for _ in range(search.beginnings)]
    scores = [
        plan_score(before + candidates[rows].T @ candidates[rows], candidates, goal) for rows, *_ in found
    ]
    best = int(np.argmax(scores))
    if not np.isfinite(scores[best]):
        raise LabError(
            f"no plan of {runs} runs that estimates all {columns} coefficients was found; take more runs, "
            "or fewer terms"
        )
    return Optimum(
        tuple(sorted(int(k) for k in found[best][0])),
        scores[best],
        tuple(scores),
        sum(made for _, made, _ in found),
        sum(weighed for *_, weighed in found),
    )


def plan_score(info: FloatArray, candidates: FloatArray, goal: Goal) -> float:
    """The score of a plan from its information matrix; -inf where a coefficient cannot be estimated."""
    if np.linalg.matrix_rank(info, hermitian=True) < len(info):
        return -np.inf
    if goal.criterion is not Criterion.D:
        moments = _moments(candidates, goal)
        return -float(np.log(np.trace(np.linalg.solve(info, moments))))
    score = float(np.linalg.slogdet(info)[1])
    if goal.focus:
        rest = _rest(len(info), goal)
        score -= goal.weight * float(np.linalg.slogdet(info[np.ix_(rest, rest)])[1])
    return score


def _check(candidates: FloatArray, runs: int, goal: Goal, search: Search, before: FloatArray) -> None:
    columns = candidates.shape[1]
    if goal.focus and (goal.criterion is not Criterion.D or not 0 <= goal.weight <= 1):
        raise LabError("terms that matter more go with criterion D, and a weight from 0 to 1")
    if search.beginnings < 1 or runs < 1:
        raise LabError("a search needs at least one run and one random beginning")
    if not search.repeats and runs > len(candidates):
        raise LabError(f"{runs} runs of {len(candidates)} candidates need some of them twice; allow repeats")
    rank = int(np.linalg.matrix_rank(before, hermitian=True)) if before.any() else 0
    if runs + rank < columns:
        raise LabError(
            f"{runs} runs cannot estimate {columns} coefficients; take at least {columns - rank} runs"
        )


class _Spread:
    """x' D x for every candidate x, where D is the inverse information of the plan, kept up to date."""

    def __init__(self, candidates: FloatArray, info: FloatArray) -> None:
        self.candidates = candidates
        self.restart(info)

    def restart(self, info: FloatArray) -> None:
        """Compute anew: updates gather rounding errors."""
        self.inverse = np.linalg.inv(info)
        self.variance = np.einsum("ij,ij->i", self.candidates @ self.inverse, self.candidates)

    def with_row(self, out: int) -> FloatArray:
        """x' D y for every candidate x, y being candidate `out`."""
        product: FloatArray = self.candidates @ (self.inverse @ self.candidates[out])
        return product

    def growth(self, out: int, with_out: FloatArray) -> FloatArray:
        """|M after| / |M before| for `out` leaving and each candidate entering."""
        growth: FloatArray = (1 + self.variance) * (1 - self.variance[out]) + with_out**2
        return growth

    def exchange(self, out: int, into: int) -> None:
        """Row `out` leaves, `into` enters: an update of rank two."""
        left, right = self.with_row(into), self.with_row(out)
        core = np.array(
            [
                [1 - self.variance[out], left[out]],
                [left[out], -(1 + self.variance[into])],
            ]
        )
        core /= (1 + self.variance[into]) * (1 - self.variance[out]) + left[out] ** 2
        pair = np.column_stack([left, right])
        sides = self.inverse @ self.candidates[[into, out]].T
        self.variance = self.variance - np.einsum("ij,ij->i", pair @ core, pair)
        self.inverse = self.inverse - sides @ core @ sides.T


def _improve(
    candidates: FloatArray,
    runs: int,
    goal: Goal,
    search: Search,
    before: FloatArray,
    rng: np.random.Generator,
) -> tuple[IntArray, int, int]:
    """From one random beginning to a plan that no single exchange betters."""
    rows = rng.choice(len(candidates), runs, replace=search.repeats or runs > len(candidates))
    ridge = RIDGE * np.eye(candidates.shape[1])
    rest = _rest(candidates.shape[1], goal) if goal.focus else np.zeros(0, np.intp)
    moments = None if goal.criterion is Criterion.D else _moments(candidates, goal)

    def info() -> FloatArray:
        result: FloatArray = before + ridge + candidates[rows].T @ candidates[rows]
        return result

    whole = _Spread(candidates, info())
    part = _Spread(candidates[:, rest], info()[np.ix_(rest, rest)])
    made = weighed = 0
    # With a focus, first to a plan that estimates all: that for the focus alone would do without the others.
    poor = np.linalg.matrix_rank(info() - ridge, hermitian=True) < len(ridge)
    aim = Goal() if goal.focus and poor else goal
    for _ in range(PASSES):
        changed = False
        for k in rng.permutation(runs):
            gains = _gains(whole, part, int(rows[k]), aim, moments)
            if not search.repeats:
                gains[rows] = -np.inf
            into = int(np.argmax(gains))
            weighed += len(gains)
            if gains[into] <= GAIN:
                continue
            whole.exchange(int(rows[k]), into)
            if len(rest):
                part.exchange(int(rows[k]), into)
            rows[k] = into
            made += 1
            changed = True
        whole.restart(info())
        if len(rest):
            part.restart(info()[np.ix_(rest, rest)])
        if not changed and aim is goal:
            break
        aim = aim if changed else goal
    return rows, made, weighed


def _gains(whole: _Spread, part: _Spread, out: int, goal: Goal, moments: FloatArray | None) -> FloatArray:
    """By how much the score grows when each candidate takes the place of `out`."""
    with_out = whole.with_row(out)
    growth = np.maximum(whole.growth(out, with_out), TINY)
    if moments is not None:
        return _mean_variance_gains(whole, out, with_out, growth, moments)
    gains: FloatArray = np.log(growth)
    if goal.focus:
        other = np.maximum(part.growth(out, part.with_row(out)), TINY)
        gains = np.where(growth > COLLAPSE, gains - goal.weight * np.log(other), -np.inf)
    return gains


def _mean_variance_gains(
    spread: _Spread, out: int, with_out: FloatArray, growth: FloatArray, moments: FloatArray
) -> FloatArray:
    """The same for the mean variance trace(D W): with F the rows that enter and leave, D changes by
    D F (F'DF + diag(1, -1))^-1 F' D, and the trace by what that is under W."""
    inner = spread.inverse @ moments @ spread.inverse
    products = spread.candidates @ inner
    own = np.einsum("ij,ij->i", products, spread.candidates)
    cross = products @ spread.candidates[out]
    less = (1 - spread.variance[out]) * own + 2 * with_out * cross - (1 + spread.variance) * own[out]
    now = float(np.sum(spread.inverse * moments))
    left = np.maximum(1 - less / np.maximum(growth, COLLAPSE) / now, TINY)
    gains: FloatArray = np.where(growth > COLLAPSE, -np.log(left), -np.inf)
    return gains


def _moments(candidates: FloatArray, goal: Goal) -> FloatArray:
    if goal.criterion is Criterion.A:
        return np.asarray(np.eye(candidates.shape[1]) / candidates.shape[1], float)
    result: FloatArray = candidates.T @ candidates / len(candidates)
    return result


def _rest(columns: int, goal: Goal) -> IntArray:
    return np.array([k for k in range(columns) if k not in goal.focus], np.intp)


def augment(
    candidates: FloatArray,
    ran: FloatArray,
    more: int,
    goal: Goal = Goal(),
    search: Search = Search(),
) -> Optimum:
    """The `more` candidates that add most to the coded rows `ran`, which stay."""
    return find_optimum(candidates, more, goal, search, fixed=ran)


def relative_d_efficiency(one: FloatArray, other: FloatArray) -> float:
    """How much of `other`'s information a run of `one` gives: (|M1|/|M2|)**(1/p) * n2/n1."""
    sign1, det1 = np.linalg.slogdet(one.T @ one)
    sign2, det2 = np.linalg.slogdet(other.T @ other)
    if sign1 <= 0 or sign2 <= 0:
        return 0.0
    return float(np.exp((det1 - det2) / one.shape[1]) * len(other) / len(one))


def columns_of_terms(names: Sequence[str], wanted: Sequence[str]) -> tuple[int, ...]:
    """Positions of the columns whose name is, or contains as a factor, one of `wanted`.

    `transport` matches `transport[efa]` and `transport[efa]:tokens`; `transport:tokens` only the latter.
    Raises LabError for a wanted term that no column has.
    """
    found: set[int] = set()
    for text in wanted:
        parts = set(text.split(":"))
        hits = {k for k, name in enumerate(names) if parts <= _labels(name)}
        if not hits:
            raise LabError(f"no column of the model has {text!r}; it has {', '.join(names)}")
        found |= hits
    return tuple(sorted(found))


def _labels(name: str) -> set[str]:
    parts = name.split(":")
    return set(parts) | {part.partition("[")[0] for part in parts}
