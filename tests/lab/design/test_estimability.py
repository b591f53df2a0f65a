"""What rows can tell, against statsmodels and against arithmetic."""

import importlib

import numpy as np
import pytest

from kvik_lab.design.estimability import assess, find_rank, information
from kvik_lab.design.model import build_model, model_matrix
from kvik_lab.design.pairs import duplicates, matched_pairs
from tests.lab.design.spaces import FULL_MODEL, article_space, nested_factors, nested_rows

# Without types, so not by `import`.
sm = importlib.import_module("statsmodels.api")
influence = importlib.import_module("statsmodels.stats.outliers_influence")


def test_a_constraint_makes_an_interaction_a_combination_of_main_effects() -> None:
    space = article_space()
    model = build_model(FULL_MODEL, space.factors)
    rank = find_rank(model_matrix(model, space.candidates), model.names)
    assert (len(model.names), len(rank.kept)) == (30, 29)
    assert [alias.column for alias in rank.aliases] == ["concurrency:online[True]"]
    # Where online is -1, x of concurrency is -1: x online = 1 + x - online... holds in both halves.
    assert dict(rank.aliases[0].parts) == pytest.approx(
        {"intercept": 1.0, "concurrency": 1.0, "online[True]": -1.0}
    )
    assert rank.aliases[0].text == "concurrency:online[True] = intercept + concurrency - online[True]"


def test_a_quadratic_of_two_levels_is_aliased_with_the_intercept() -> None:
    x = np.array([-1.0, 1, -1, 1])
    rank = find_rank(np.column_stack([np.ones(4), x, x**2]), ["intercept", "x", "x^2"])
    assert rank.aliases[0].text == "x^2 = intercept"


def test_a_half_fraction_aliases_the_interactions_that_its_generator_says() -> None:
    signs = np.array([[a, b, c, a * b * c] for a in (-1, 1) for b in (-1, 1) for c in (-1, 1)], float)
    pairs = [(0, 1), (2, 3), (0, 2), (1, 3)]
    matrix = np.column_stack([np.ones(8), signs, *[signs[:, i] * signs[:, j] for i, j in pairs]])
    names = ["intercept", *"ABCD", *["ABCD"[i] + "ABCD"[j] for i, j in pairs]]
    told = assess(matrix, names)
    assert [alias.text for alias in told.aliases] == ["CD = AB", "BD = AC"]
    assert set(told.estimable) == {"intercept", "A", "B", "C", "D"}
    assert {c.name: c.aliased_with for c in told.coefficients if c.aliased_with} == {
        "AB": ("CD",),
        "AC": ("BD",),
    }
    assert told.d_efficiency == pytest.approx(1.0)


def test_standard_errors_and_inflation_equal_those_of_statsmodels() -> None:
    rng = np.random.default_rng(5)
    model = build_model("mode/transport * (tokens + concurrency) + tokens^2", nested_factors())
    matrix = model_matrix(model, nested_rows())[rng.permutation(27)[:20]]
    fit = sm.OLS(rng.normal(size=20), matrix).fit()
    told = assess(matrix, model.names)
    assert [c.se for c in told.coefficients] == pytest.approx(fit.bse / np.sqrt(fit.scale))
    inflation = [influence.variance_inflation_factor(matrix, k) for k in range(1, matrix.shape[1])]
    assert [c.vif for c in told.coefficients[1:]] == pytest.approx(inflation)


def test_standard_errors_with_starts_equal_those_of_generalised_least_squares() -> None:
    rng = np.random.default_rng(6)
    matrix = np.column_stack([np.ones(12), np.repeat([-1.0, 1, 1, -1], 3), rng.normal(size=12)])
    starts = np.repeat(np.arange(4), 3)
    covariance = np.eye(12) + 0.7 * (starts[:, None] == starts)
    told = assess(matrix, ["intercept", "hard", "easy"], starts, ratio=0.7)
    fit = sm.GLS(rng.normal(size=12), matrix, sigma=covariance).fit()
    assert [c.se for c in told.coefficients] == pytest.approx(fit.bse / np.sqrt(fit.scale))
    assert information(matrix, starts, 0.0) == pytest.approx(matrix.T @ matrix)


def test_matched_pairs_look_past_what_is_nested_in_the_factor() -> None:
    rows = nested_rows().set_axis([f"r{k}" for k in range(27)], axis=0)
    report = matched_pairs(rows, nested_factors())
    counts = {(p.factor, p.first, p.second): p.pairs for p in report.contrasts}
    assert counts["mode", "unified", "disagg"] == 18  # 9 settings, each with tcp and with efa
    assert counts["transport", "tcp", "efa"] == 9
    assert counts["tokens", "1000", "4000"] == 9  # 3 arms x 3 concurrencies
    assert report.alone == ()


def test_rows_that_differ_in_two_factors_at_once_are_in_no_pair() -> None:
    rows = nested_rows().iloc[[0, 4, 9]].set_axis(["a", "b", "c"], axis=0)
    report = matched_pairs(rows, nested_factors())
    assert [(p.factor, p.pairs) for p in report.contrasts] == [("mode", 1)]
    assert report.alone == ("b",)


def test_duplicates_are_named() -> None:
    rows = nested_rows().iloc[[0, 10, 0, 10, 3]].set_axis(list("abcde"), axis=0)
    assert duplicates(rows, nested_factors()) == (("a", "c"), ("b", "d"))
