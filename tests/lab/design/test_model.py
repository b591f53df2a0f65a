"""Formulas and the matrices that come from them."""

import importlib

import numpy as np
import pandas as pd
import pytest

from kvik_lab.design.factor import Factor, Scale
from kvik_lab.design.model import build_model, model_matrix, profile_row
from kvik_lab.errors import LabError
from kvik_lab.study.formula import parse_formula, term_name
from kvik_lab.study.problems import MistakeError
from tests.lab.design.spaces import article_factors, nested_factors, nested_rows, product_space

# Without types, so not by `import`.
formulaic = importlib.import_module("formulaic")


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("y ~ a + b", ["a", "b"]),
        ("a*b", ["a", "b", "a:b"]),
        ("a/b", ["a", "a:b"]),
        ("a/b * (c + c^2)", ["a", "c", "a:b", "c^2", "a:c", "a:b:c", "a:c^2", "a:b:c^2"]),
        ("(a + b + c)^2", ["a", "b", "c", "a:b", "a:c", "b:c"]),
        ("(a + b)**2 - a:b", ["a", "b"]),
        ("a:a + a", ["a"]),
        ("1 + a", ["a"]),
        ("(a + b):c", ["a:c", "b:c"]),
        ("(a + b)/c", ["a", "b", "a:b:c"]),
    ],
)
def test_a_formula_expands_as_in_other_packages(text: str, terms: list[str]) -> None:
    found = parse_formula(text, ["a", "b", "c"]).terms
    assert sorted(map(term_name, found)) == sorted(terms)


@pytest.mark.parametrize(
    ("text", "column", "words"),
    [
        ("y ~ tokns", 4, "did you mean 'tokens'"),
        ("y ~ tokens +", 11, "`+` without a factor on one of its sides"),
        ("tokens:", 6, "`:` without a factor"),
        ("(tokens + gmu", 0, "a bracket without its other half"),
        ("tokens + gmu)", 12, "a bracket without its other half"),
        ("tokens  gmu", 0, "nothing between tokens and gmu"),
        ("gmu + tokens^x", 12, "whole number from 1 to 9"),
        ("tokens ** 10", 7, "whole number from 1 to 9"),
        ("(tokens + gmu)^0", 14, "whole number from 1 to 9"),
        ("gmu + tokens^2^2", 6, "a power of tokens^2"),
        ("gmu + 2", 6, "a number among the terms"),
        ("tokens - 1", 0, "keeps its intercept"),
        ("0 + tokens", 0, "keeps its intercept"),
        ("tokens + %", 9, "'%' is not part"),
        ("tokens + log(gmu)", 9, "a function among the terms"),
        ("a ~ b ~ tokens", 6, "a second `~`"),
        (" ~ tokens", 0, "nothing before `~`"),
        ("sqrt(y) ~ tokens", 0, "write a name or log(name)"),
        ("y ~ ", 3, "no terms"),
    ],
)
def test_a_formula_that_cannot_be_read_is_refused_with_the_place(text: str, column: int, words: str) -> None:
    with pytest.raises(MistakeError) as error:
        parse_formula(text, ["tokens", "gmu"])
    assert words in str(error.value)
    assert error.value.column == column


@pytest.mark.parametrize(
    ("text", "measured", "logarithmic"),
    [("y ~ a", "y", False), ("log( ttft ) ~ a", "ttft", True), ("log ~ a", "log", False), ("a", None, False)],
)
def test_what_is_measured_may_be_a_logarithm(text: str, measured: str | None, logarithmic: bool) -> None:
    found = parse_formula(text, ["a"])
    assert (found.measured, found.logarithmic) == (measured, logarithmic)


def test_the_matrix_spans_what_formulaic_spans_with_sum_contrasts() -> None:
    factors = article_factors()[:3]
    rows = product_space(factors)
    own = model_matrix(build_model("backend * (tokens + concurrency) + tokens^2", factors), rows)
    coded = rows.assign(
        t=np.log2(rows["tokens"]), c=np.log2(rows["concurrency"]), backend=rows["backend"].astype(str)
    )
    other = formulaic.model_matrix("C(backend, contr.sum) * (t + c) + I(t**2)", coded).to_numpy(float)
    assert own.shape == other.shape
    both = np.linalg.matrix_rank(np.hstack([own, other]))
    assert both == np.linalg.matrix_rank(own) == np.linalg.matrix_rank(other) == own.shape[1]


def test_sum_contrasts_leave_the_first_level_out() -> None:
    factors = (Factor("backend", ("unified", "tcp", "efa")), Factor("tokens", (1024, 2048, 4096), Scale.LOG2))
    rows = pd.DataFrame({"backend": ["unified", "tcp", "efa"], "tokens": [1024, 2048, 4096]})
    model = build_model("backend + tokens", factors)
    assert model.names == ("intercept", "backend[tcp]", "backend[efa]", "tokens")
    assert model_matrix(model, rows).tolist() == [[1, -1, -1, -1], [1, 1, 0, 0], [1, 0, 1, 1]]


def test_a_nested_factor_is_a_contrast_within_its_parent_and_nothing_elsewhere() -> None:
    model = build_model("log(ttft) ~ mode/transport * tokens", nested_factors())
    assert model.names == (
        "intercept", "mode[disagg]", "transport[efa]", "tokens", "mode[disagg]:tokens",
        "transport[efa]:tokens",
    )  # fmt: skip
    rows = nested_rows()
    matrix = model_matrix(model, rows)
    assert np.linalg.matrix_rank(matrix) == 6
    by_arm = {(m, t): x for m, t, x in zip(rows["mode"], rows["transport"], matrix[:, 2], strict=True)}
    assert [by_arm[k] for k in (("disagg", "tcp"), ("disagg", "efa"))] == [-1, 1]
    assert all(x == 0 for (m, _), x in by_arm.items() if m == "unified")


def test_what_is_not_set_is_averaged_and_a_nested_level_sets_its_parent() -> None:
    model = build_model("mode/transport * tokens", nested_factors())
    assert profile_row(model, {"transport": "efa"}).tolist() == [1, 1, 1, 0, 0, 0]
    assert profile_row(model, {"mode": "disagg", "tokens": 4000}).tolist() == [1, 1, 0, 1, 1, 0]
    with pytest.raises(LabError, match="only within mode=disagg"):
        profile_row(model, {"mode": "unified", "transport": "efa"})


def test_levels_that_do_not_fit_are_refused_with_the_row() -> None:
    model = build_model("mode/transport", nested_factors())
    rows = nested_rows().astype({"transport": object})
    with pytest.raises(LabError, match="row 9: transport has no level"):
        model_matrix(model, rows.assign(transport=pd.Series([None] * len(rows), dtype=object)))
    with pytest.raises(LabError, match="row 0: transport exists only within"):
        model_matrix(model, rows.assign(transport=["tcp"] * len(rows)))
    with pytest.raises(LabError, match="mode has no level 'apart'"):
        model_matrix(build_model("mode", nested_factors()[:1]), pd.DataFrame({"mode": ["apart"]}))


@pytest.mark.parametrize(
    ("factor", "formula", "words"),
    [
        (Factor("x", ("a", "b")), "x^2", "categorical"),
        (Factor("x", ("a", "b"), Scale.LINEAR), "x", "not a number"),
        (Factor("x", (0, 1), Scale.LOG2), "x", "no logarithm"),
        (Factor("x", (1, 2), within={"y": 1}), "x", "not a factor"),
    ],
)
def test_a_factor_that_cannot_be_coded_is_refused(factor: Factor, formula: str, words: str) -> None:
    with pytest.raises(LabError, match=words):
        model_matrix(build_model(formula, (factor,)), pd.DataFrame({"x": list(factor.levels)}))


def test_a_factor_of_one_level_is_announced_and_left_out() -> None:
    model = build_model("x + y + x:y", (Factor("x", (1, 2), Scale.LINEAR), Factor("y", ("only",))))
    assert model.names == ("intercept", "x")
    assert len(model.notes) == 2
    assert "y has one level" in model.notes[0]
