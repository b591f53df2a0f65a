"""Power, against published sizes and against experiments that are simulated."""

import os

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.power import TTestIndPower

from kvik_lab.design.estimability import information
from kvik_lab.design.factor import Factor
from kvik_lab.design.model import FloatArray, IntArray, build_model, model_matrix
from kvik_lab.design.power import Contrast, Power, contrast_powers, parse_contrast
from kvik_lab.errors import LabError
from tests.lab.design.spaces import nested_factors, nested_rows


def power(
    contrast: Contrast,
    matrix: FloatArray,
    starts: IntArray | None = None,
    ratio: float = 0.0,
    delta: float = 1.0,
) -> Power:
    """Of one contrast, which is all that there is to judge."""
    return contrast_powers([contrast], matrix, starts, ratio, delta)[0]


def test_contrasts_are_read_with_levels_and_settings() -> None:
    model = build_model("mode/transport * tokens", nested_factors())
    plain = parse_contrast("transport", model)
    assert plain.text == "transport: efa vs tcp"
    assert dict(zip(model.names, plain.row, strict=True))["transport[efa]"] == 2
    at = parse_contrast("transport[tcp vs efa]@tokens=4000", model)
    assert dict(zip(model.names, at.row, strict=True)) == pytest.approx(
        {"intercept": 0, "mode[disagg]": 0, "transport[efa]": -2, "tokens": 0, "mode[disagg]:tokens": 0,
         "transport[efa]:tokens": -2}
    )  # fmt: skip
    assert parse_contrast("tokens[3000 vs 1000]", model).row[3] == pytest.approx(np.log2(3))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("speed", "factors are mode"),
        ("transport[tcp]", "write the levels as"),
        ("transport[tcp vs udp]", "no level 'udp'"),
        ("transport@tokens", "is not factor=level"),
        ("transport@mode=unified", "only within mode=disagg"),
        ("tokens[a vs b]", "no level 'a'"),
    ],
)
def test_contrasts_that_make_no_sense_are_refused(text: str, words: str) -> None:
    with pytest.raises(LabError, match=words):
        parse_contrast(text, build_model("mode/transport * tokens", nested_factors()))


def replicated(starts: int) -> tuple[FloatArray, IntArray]:
    """Each arm of `nested_rows` started so often, its 9 runs in each start."""
    model = build_model("mode/transport * (tokens + concurrency)", nested_factors())
    matrix = model_matrix(model, nested_rows())
    return np.vstack([matrix] * starts), np.repeat(np.arange(3 * starts), 9)


def test_effects_of_hard_factors_have_the_degrees_of_freedom_of_the_starts() -> None:
    model = build_model("mode/transport * (tokens + concurrency)", nested_factors())
    matrix, starts = replicated(4)
    hard = power(parse_contrast("transport", model), matrix, starts, 1.0)
    easy = power(parse_contrast("tokens", model), matrix, starts, 1.0)
    mixed = power(parse_contrast("transport@tokens=4000", model), matrix, starts, 1.0)
    assert (hard.df, hard.stratum) == (12 - 3, "starts")
    assert (easy.df, easy.stratum) == (108 - 12 - 6, "runs")
    assert mixed.stratum == "starts and runs"
    assert 9 <= mixed.df < 20  # mostly of starts
    # 4 starts of each: a start's mean has variance 1 + 1/9, the difference of two arms half of that.
    assert hard.se == pytest.approx(np.sqrt((1 + 1 / 9) / 2))
    assert hard.smallest is not None
    again = power(parse_contrast("transport", model), matrix, starts, 1.0, delta=hard.smallest)
    assert again.power == pytest.approx(0.8, abs=1e-3)


def test_several_contrasts_share_the_error_rate() -> None:
    model = build_model("mode/transport * (tokens + concurrency)", nested_factors())
    matrix, starts = replicated(4)
    texts = ("transport", "tokens", "concurrency")
    both = contrast_powers([parse_contrast(text, model) for text in texts], matrix, starts, 1.0)
    alone = power(parse_contrast("transport", model), matrix, starts, 1.0)
    assert both[0].halfwidth is not None
    assert alone.halfwidth is not None
    wider = stats.t.ppf(1 - 0.025 / 3, 9) / stats.t.ppf(0.975, 9)
    assert both[0].halfwidth / alone.halfwidth == pytest.approx(wider, rel=1e-6)


@pytest.mark.parametrize("delta", [0.0, 0.5, 1.0])
def test_of_independent_runs_it_is_the_power_of_statsmodels(delta: float) -> None:
    contrast = parse_contrast("arm", build_model("arm", (Factor("arm", ("a", "b")),)))
    matrix = np.column_stack([np.ones(40), np.repeat([-1.0, 1.0], 20)])
    exact = TTestIndPower().power(delta, 20, 0.05) if delta else 0.05
    assert power(contrast, matrix, delta=delta).power == pytest.approx(exact, abs=0.025)


def test_more_runs_in_a_start_do_not_replace_starts() -> None:
    factors = (Factor("arm", ("a", "b"), hard=True),)
    contrast = parse_contrast("arm", build_model("arm", factors))
    column = np.repeat([-1.0, 1.0], 60)
    matrix = np.column_stack([np.ones(120), column])
    one = power(contrast, matrix, np.repeat(np.arange(2), 60), 1.0)
    many = power(contrast, matrix, np.repeat(np.arange(20), 6), 1.0)
    assert (one.df, one.power) == (0, None)
    assert many.df == 18
    assert many.power is not None
    assert many.power > 0.4


def test_what_cannot_be_estimated_has_no_power() -> None:
    model = build_model("mode/transport * tokens", nested_factors())
    rows = nested_rows()
    matrix = model_matrix(model, rows[rows["transport"] != "efa"])
    found = power(parse_contrast("transport", model), matrix)
    assert (found.se, found.power) == (None, None)


@pytest.mark.parametrize(("delta", "seed"), [(0.0, 1), (1.5, 2)])
def test_simulated_experiments_find_an_effect_as_often_as_planned(delta: float, seed: int) -> None:
    experiments = 40_000 if os.environ.get("KVIK_TEST_LAB_FULL") else 4000
    model = build_model("mode/transport * (tokens + concurrency)", nested_factors())
    matrix, starts = replicated(4)
    contrast = parse_contrast("transport", model)
    ratio = 0.5
    planned = power(contrast, matrix, starts, ratio, delta)
    rng = np.random.default_rng(seed)
    beta = contrast.row / (contrast.row @ contrast.row) * delta
    noise = rng.normal(size=(experiments, 12))[:, starts] * np.sqrt(ratio)
    noise += rng.normal(size=(experiments, len(matrix)))
    response = matrix @ beta + noise
    # The analysis of a split plot: start means, fitted by the hard factors, with their own error.
    means = np.add.reduceat(response, np.arange(0, 108, 9), axis=1) / 9
    hard = matrix[::9][:, :3]
    fit, *_ = np.linalg.lstsq(hard, means.T, rcond=None)
    rest = means.T - hard @ fit
    variance = np.sum(rest**2, axis=0) / planned.df
    spread = contrast.row[:3] @ np.linalg.inv(information(hard)) @ contrast.row[:3]
    t = contrast.row[:3] @ fit / np.sqrt(variance * spread)
    found = np.mean(np.abs(t) > stats.t.ppf(0.975, planned.df))
    assert planned.power is not None
    # Both are simulated, the planned one of 4,000.
    error = np.sqrt(planned.power * (1 - planned.power) * (1 / experiments + 1 / 4000))
    assert abs(found - planned.power) < 4 * error, f"seed {seed}: {found:.4f}, planned {planned.power:.4f}"
