"""Searches against the true optimum, found by trying every plan, and against an independent package."""

import importlib
import itertools
import os

import numpy as np
import pandas as pd
import pytest

from kvik_lab.design.estimability import assess, find_rank, information
from kvik_lab.design.factor import Factor, Scale
from kvik_lab.design.model import FloatArray, build_model, model_matrix
from kvik_lab.design.optimal import (
    Criterion,
    Goal,
    Search,
    augment,
    columns_of_terms,
    find_optimum,
    plan_score,
    relative_d_efficiency,
)
from kvik_lab.design.splitplot import find_split_plot
from kvik_lab.errors import LabError
from tests.lab.design.spaces import FULL_MODEL, article_space, nested_factors, nested_rows

# Without types, so not by `import`.
pydoe = importlib.import_module("pydoe")

GOALS = {
    "D": Goal(),
    "Ds": Goal(focus=(1, 2), weight=0.7),
    "I": Goal(Criterion.I),
    "A": Goal(Criterion.A),
}


def every_plan(candidates: FloatArray, runs: int, goal: Goal, fixed: FloatArray | None = None) -> float:
    """The best score of all plans of so many runs, repeats allowed."""
    before = np.zeros((candidates.shape[1],) * 2) if fixed is None else fixed.T @ fixed
    picks = itertools.combinations_with_replacement(range(len(candidates)), runs)
    return max(
        plan_score(before + candidates[list(p)].T @ candidates[list(p)], candidates, goal) for p in picks
    )


def small_set() -> FloatArray:
    """9 candidates of a nested factor and a numeric one, 4 columns."""
    rows = nested_rows()
    rows = rows[rows["concurrency"] == 1]
    return model_matrix(build_model("mode/transport + tokens", nested_factors()), rows)


@pytest.mark.parametrize("name", GOALS)
def test_the_search_finds_the_true_optimum_of_a_small_set(name: str) -> None:
    candidates = small_set()
    found = find_optimum(candidates, 6, GOALS[name], Search(6, seed=3))
    assert found.score == pytest.approx(every_plan(candidates, 6, GOALS[name]), abs=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_the_search_finds_the_true_optimum_of_random_candidates(seed: int) -> None:
    rng = np.random.default_rng(seed)
    candidates = np.column_stack([np.ones(11), rng.normal(size=(11, 3))])
    found = find_optimum(candidates, 5, Goal(), Search(8, seed))
    assert found.score == pytest.approx(every_plan(candidates, 5, Goal()), abs=1e-9)


def test_what_is_added_to_a_study_that_runs_is_the_best_that_can_be_added() -> None:
    candidates = small_set()
    ran = candidates[[0, 0, 1, 4]]
    found = augment(candidates, ran, 3)
    assert found.score == pytest.approx(every_plan(candidates, 3, Goal(), ran), abs=1e-9)


@pytest.mark.parametrize("name", GOALS)
def test_no_exchange_of_one_row_betters_the_plan(name: str) -> None:
    rng = np.random.default_rng(11)
    candidates = np.column_stack([np.ones(40), rng.normal(size=(40, 4))])
    rows = list(find_optimum(candidates, 9, GOALS[name], Search(1, seed=2)).rows)
    score = plan_score(candidates[rows].T @ candidates[rows], candidates, GOALS[name])
    for k, into in itertools.product(range(9), range(40)):
        other = candidates[[*rows[:k], into, *rows[k + 1 :]]]
        assert plan_score(other.T @ other, candidates, GOALS[name]) <= score + 1e-6


@pytest.mark.parametrize("runs", [8, 11, 14])
def test_scores_are_those_of_pydoe_or_better(runs: int) -> None:
    levels = [-1.0, -0.5, 0.0, 0.5, 1.0]
    points = np.array(list(itertools.product(levels, levels)))
    factors = tuple(Factor(name, tuple(levels), Scale.LINEAR) for name in "xy")
    model = build_model("(x + y)^2 + x^2 + y^2", factors)
    candidates = model_matrix(model, pd.DataFrame(points, columns=["x", "y"]))
    design, info = pydoe.optimal_design(points, runs, 2, criterion="D", method="fedorov")
    theirs = model_matrix(model, pd.DataFrame(design, columns=["x", "y"]))
    # First that both compute the same score of the same plan, then whose plan has the higher one.
    assert np.linalg.slogdet(theirs.T @ theirs)[1] == pytest.approx(np.log(info["det_XTX"]), abs=1e-8)
    ours = find_optimum(candidates, runs, Goal(), Search(6))
    assert ours.score >= np.log(info["det_XTX"]) - 1e-9


def test_the_same_seed_gives_the_same_plan_and_no_candidate_comes_twice_if_so_wanted() -> None:
    rng = np.random.default_rng(4)
    candidates = np.column_stack([np.ones(30), rng.normal(size=(30, 3))])
    once = [find_optimum(candidates, 12, search=Search(2, 7, repeats=False)) for _ in range(2)]
    assert once[0] == once[1]
    assert len(set(once[0].rows)) == 12


def test_weight_on_terms_lowers_their_standard_errors() -> None:
    space = article_space()
    model = build_model("backend * (tokens + concurrency + gmu) + tokens^2 + online", space.factors)
    coded = model_matrix(model, space.candidates)
    focus = columns_of_terms(model.names, ["backend"])
    errors = {}
    for goal in (Goal(), Goal(focus=focus, weight=1.0)):
        rows = find_optimum(coded, 24, goal, Search(2)).rows
        told = assess(coded[list(rows)], model.names)
        errors[goal] = np.mean([told.coefficients[k].se for k in focus])
    plain, weighted = errors.values()
    assert weighted < plain


def test_40_runs_estimate_all_main_effects_and_interactions_that_the_article_s_factors_allow() -> None:
    space = article_space()
    model = build_model(FULL_MODEL, space.factors)
    coded = model_matrix(model, space.candidates)
    rank = find_rank(coded, model.names)
    kept = coded[:, list(rank.kept)]
    found = find_optimum(kept, 40, search=Search(2))
    told = assess(kept[list(found.rows)], [model.names[k] for k in rank.kept])
    assert told.estimable == tuple(name for name in model.names if name != "concurrency:online[True]")
    # A plan of 40 that were orthogonal in all of them would have 1 / sqrt(40) = .158.
    assert max(c.se or 9 for c in told.coefficients if c.name == "tokens" or ":" in c.name) < 0.45


def test_a_plan_of_fewer_runs_than_columns_is_refused_with_the_number() -> None:
    with pytest.raises(LabError, match="take at least 4 runs"):
        find_optimum(small_set(), 3)
    with pytest.raises(LabError, match="allow repeats"):
        find_optimum(small_set(), 10, search=Search(repeats=False))
    with pytest.raises(LabError, match="no plan of 5 runs"):
        find_optimum(np.ones((8, 2)), 5)


def test_relative_efficiency_counts_runs() -> None:
    x = np.array([[1.0, 1], [1, -1]])
    assert relative_d_efficiency(x, np.vstack([x, x])) == pytest.approx(1.0)
    assert relative_d_efficiency(x * [1, 0.5], x) == pytest.approx(0.5)


def _best_split_plot(coded: FloatArray, members: list[list[int]], ratio: float) -> float:
    starts = np.array([0, 0, 1, 1, 2, 2])
    wholes = [pair for group in members for pair in itertools.combinations_with_replacement(group, 2)]
    best = -np.inf
    for three in itertools.combinations_with_replacement(wholes, 3):
        info = information(coded[[row for pair in three for row in pair]], starts, ratio)
        if np.linalg.matrix_rank(info, hermitian=True) == len(info):
            best = max(best, float(np.linalg.slogdet(info)[1]))
    return best


@pytest.mark.parametrize("ratio", [0.0, 0.5, 10.0])
def test_the_split_plot_search_finds_the_true_optimum_of_a_small_set(ratio: float) -> None:
    factors = (Factor("hard", (0, 1), Scale.LINEAR, hard=True), Factor("easy", (0, 1, 2), Scale.LINEAR))
    rows = pd.DataFrame(list(itertools.product((0, 1), (0, 1, 2))), columns=["hard", "easy"])
    coded = model_matrix(build_model("hard * easy", factors), rows)
    found = find_split_plot(rows, coded, factors, 3, 2, ratio, Search(10, seed=1))
    assert found.score == pytest.approx(_best_split_plot(coded, [[0, 1, 2], [3, 4, 5]], ratio), abs=1e-9)


def test_a_split_plot_keeps_the_hard_levels_of_a_start_and_beats_random_grouping() -> None:
    factors, rows = nested_factors(), nested_rows()
    coded = model_matrix(build_model("mode/transport * (tokens + concurrency)", factors), rows)
    found = find_split_plot(rows, coded, factors, 6, 4, 1.0, Search(3))
    for start in found.starts:
        assert rows.iloc[list(start)].groupby(["mode", "transport"], dropna=False).ngroups == 1
    free = find_optimum(coded, 24, search=Search(3))
    ordered = information(coded[list(free.rows)], np.repeat(np.arange(6), 4), 1.0)
    assert np.isfinite(found.score)
    assert found.score > np.linalg.slogdet(ordered)[1] - 3


def test_the_search_finds_the_true_optimum_of_many_random_sets() -> None:
    goals = GOALS.values() if os.environ.get("KVIK_TEST_LAB_FULL") else [GOALS["I"]]
    for seed in range(40 if os.environ.get("KVIK_TEST_LAB_FULL") else 2):
        rng = np.random.default_rng(1000 + seed)
        candidates = np.column_stack([np.ones(9), rng.normal(size=(9, 3))])
        for goal in goals:
            found = find_optimum(candidates, 5, goal, Search(10, seed))
            assert found.score == pytest.approx(every_plan(candidates, 5, goal), abs=1e-9), (seed, goal)
