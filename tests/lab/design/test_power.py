"""Power, against published sizes and against experiments that are simulated."""

import os

import numpy as np
import pytest
from scipy import stats

from kvik_lab.design.estimability import information
from kvik_lab.design.factor import Factor
from kvik_lab.design.model import FloatArray, IntArray, build_model, model_matrix
from kvik_lab.design.power import contrast_power, group_size, parse_contrast, t_power
from kvik_lab.errors import LabError
from tests.lab.design.spaces import nested_factors, nested_rows


@pytest.mark.parametrize(("effect", "size"), [(0.71, 33), (0.625, 42), (0.161, 607), (0.5, 64), (0.8, 26)])
def test_group_sizes_are_those_of_tables(effect: float, size: int) -> None:
    # 64 and 26 are in Cohen's tables (Statistical Power Analysis, 1988, ch. 2) for 80 % at 5 %, two-sided.
    assert group_size(effect) == size


def test_power_without_an_effect_is_the_level_and_far_out_it_is_one() -> None:
    assert t_power(0.0, 7) == pytest.approx(0.05)
    assert t_power(1e4, 7) == pytest.approx(1.0)
    assert t_power(-2.0, 7) == t_power(2.0, 7)


@pytest.mark.parametrize("df", [1, 2, 5, 13, 74, 500])
def test_power_is_that_of_scipy_and_goes_on_where_its_series_fails(df: int) -> None:
    limit = stats.t.ppf(0.975, df)
    last = 0.0
    for shift in np.linspace(0, 60, 241):
        power = t_power(shift, df)
        assert last - 1e-6 <= power <= 1
        last = power
        with np.errstate(all="ignore"):
            above, below = stats.nct.sf(limit, df, shift), stats.nct.cdf(-limit, df, shift)
        if np.isfinite(above):
            assert power == pytest.approx(above + np.nan_to_num(below), abs=2e-6)


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
    hard = contrast_power(parse_contrast("transport", model), matrix, starts, 1.0)
    easy = contrast_power(parse_contrast("tokens", model), matrix, starts, 1.0)
    mixed = contrast_power(parse_contrast("transport@tokens=4000", model), matrix, starts, 1.0)
    assert (hard.df, hard.stratum) == (12 - 3, "starts")
    assert (easy.df, easy.stratum) == (108 - 12 - 6, "runs")
    assert (mixed.df, mixed.stratum) == (9, "starts and runs")
    # 4 starts of each: a start's mean has variance 1 + 1/9, the difference of two arms half of that.
    assert hard.se == pytest.approx(np.sqrt((1 + 1 / 9) / 2))
    assert hard.smallest is not None
    again = contrast_power(parse_contrast("transport", model), matrix, starts, 1.0, delta=hard.smallest)
    assert again.power == pytest.approx(0.8, abs=1e-6)


def test_more_runs_in_a_start_do_not_replace_starts() -> None:
    factors = (Factor("arm", ("a", "b"), hard=True),)
    contrast = parse_contrast("arm", build_model("arm", factors))
    column = np.repeat([-1.0, 1.0], 60)
    matrix = np.column_stack([np.ones(120), column])
    one = contrast_power(contrast, matrix, np.repeat(np.arange(2), 60), 1.0)
    many = contrast_power(contrast, matrix, np.repeat(np.arange(20), 6), 1.0)
    assert (one.df, one.power) == (0, None)
    assert many.df == 18
    assert many.power is not None
    assert many.power > 0.4


def test_what_cannot_be_estimated_has_no_power() -> None:
    model = build_model("mode/transport * tokens", nested_factors())
    rows = nested_rows()
    matrix = model_matrix(model, rows[rows["transport"] != "efa"])
    found = contrast_power(parse_contrast("transport", model), matrix)
    assert (found.se, found.power) == (None, None)


@pytest.mark.parametrize(("delta", "seed"), [(0.0, 1), (1.5, 2)])
def test_simulated_experiments_find_an_effect_as_often_as_planned(delta: float, seed: int) -> None:
    experiments = 40_000 if os.environ.get("KVIK_LAB_FULL") else 4000
    model = build_model("mode/transport * (tokens + concurrency)", nested_factors())
    matrix, starts = replicated(4)
    contrast = parse_contrast("transport", model)
    ratio = 0.5
    planned = contrast_power(contrast, matrix, starts, ratio, delta)
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
    error = np.sqrt(planned.power * (1 - planned.power) / experiments)
    assert abs(found - planned.power) < 4 * error, f"seed {seed}: {found:.4f}, planned {planned.power:.4f}"
