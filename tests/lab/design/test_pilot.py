"""Variance components and what follows from them, on series whose components are known."""

import json
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from kvik_lab import cli
from kvik_lab.design.model import FloatArray
from kvik_lab.design.pilot import (
    Components,
    autocorrelation_time,
    optimal_iterations,
    plan_from_pilot,
    read_pilot,
    variance_components,
)
from kvik_lab.errors import LabError

EXPERIMENTS = 2000 if os.environ.get("KVIK_TEST_LAB_FULL") else 150


def simulate(
    rng: np.random.Generator, starts: int, n: int, between: float, within: float, rho: float
) -> FloatArray:
    """Series about 1 of shape (starts, n): a start's own deviation, and a first-order autoregression."""
    noise = rng.normal(size=(starts, n)) * np.sqrt(1 - rho**2)
    noise[:, 0] = rng.normal(size=starts)
    for k in range(1, n):
        noise[:, k] += rho * noise[:, k - 1]
    result: FloatArray = 1 + between * rng.normal(size=(starts, 1)) + within * noise
    return result


def components(start: float, iteration: float = 1.0, rho: float = 0.0) -> Components:
    tau = (1 + rho) / (1 - rho)
    return Components(1, 5, 150, iteration, rho, tau, start, start, 2 * start)


def test_iterations_follow_the_formula_of_kalibera_and_jones() -> None:
    # Equal components, a restart of 600 s, a request of 3 s: sqrt(200) = 14.14, rounded up.
    assert optimal_iterations(components(1.0), 600, 3) == 15
    assert optimal_iterations(components(1.0), 588, 3) == 14
    assert optimal_iterations(components(1.0, rho=0.6), 600, 3) == 29  # tau = 4, twice as many
    assert optimal_iterations(components(100.0), 1, 3) == 1
    assert optimal_iterations(components(0.0), 600, 3) == 1000


def test_no_other_number_of_iterations_is_cheaper_for_the_same_variance() -> None:
    part = components(0.7, 1.3)
    best = optimal_iterations(part, 600, 3)

    def cost(r: int) -> float:
        return (0.7 + 1.3 / r) * (600 + 3 * r)

    assert min(range(1, 500), key=cost) in (best - 1, best)


@pytest.mark.parametrize("n", [5, 14, 40])
@pytest.mark.parametrize("rho", [0.0, 0.3, 0.8])
def test_the_autocorrelation_time_is_that_of_the_mean(rho: float, n: int) -> None:
    lags = rho ** np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    assert autocorrelation_time(rho, n) == pytest.approx(lags.mean() * n)


@pytest.mark.parametrize("rho", [0.0, 0.3, 0.6])
def test_components_are_right_on_average_also_under_serial_correlation(rho: float) -> None:
    rng = np.random.default_rng(17)
    found = []
    for _ in range(EXPERIMENTS):
        series = simulate(rng, 8, 40, 0.03, 0.05, rho)
        found.append(variance_components([tuple(series)]))
    # The floor at 0 lifts the mean of T2^2 a little, so the median is looked at too.
    start = np.median([one.start for one in found])
    error = 1.25 * np.std([one.start for one in found]) / np.sqrt(EXPERIMENTS)
    expected = 0.03**2 * 0.93  # the median of a chi-squared variable of 7 degrees of freedom, less its noise
    assert abs(start - expected) < 4 * error + 0.06 * expected, f"{start:.3g} +- {error:.2g}, {expected:.3g}"
    iteration = np.array([one.iteration for one in found])
    assert iteration.mean() == pytest.approx(0.05**2, rel=0.06)
    assert np.mean([one.rho for one in found]) == pytest.approx(rho, abs=0.03)


def test_taking_iterations_for_independent_finds_starts_that_differ_where_none_do() -> None:
    rng = np.random.default_rng(3)
    naive, own = [], []
    for _ in range(EXPERIMENTS):
        part = variance_components([tuple(simulate(rng, 8, 30, 0.0, 0.05, 0.6))])
        naive.append(part.start_unadjusted)
        own.append(part.start)
    truth = 0.05**2 * (autocorrelation_time(0.6, 30) - 1) / 30
    assert np.median(naive) == pytest.approx(truth, rel=0.25)
    assert np.median(own) < 0.25 * np.median(naive)


def test_the_planned_half_width_is_reached_by_the_experiment_that_was_planned() -> None:
    part = components(0.02**2, 0.05**2)
    found = plan_from_pilot(part, 600, 3, 0.03)
    rng = np.random.default_rng(8)
    one = found.difference
    shape = (EXPERIMENTS * 4, one.starts)
    spread = np.sqrt(0.02**2 + 0.05**2 / one.iterations)
    difference = rng.normal(size=shape).mean(axis=1) - rng.normal(size=shape).mean(axis=1)
    inside = np.mean(np.abs(difference * spread) < one.halfwidth)
    # The t quantile allows for not knowing the variance; with it known the cover is somewhat more than 95 %.
    assert 0.95 - 4 * np.sqrt(0.05 * 0.95 / shape[0]) < inside < 0.99
    assert one.halfwidth <= 0.03
    assert found.mean.starts <= one.starts <= found.cautious.starts
    assert found.ratio == pytest.approx(0.02**2 / (0.05**2 / one.iterations))


def frame(series: FloatArray, **more: object) -> pd.DataFrame:
    starts, n = series.shape
    return pd.DataFrame(
        {
            "start": np.repeat(np.arange(starts), n),
            "iteration": np.tile(np.arange(n), starts),
            "value": series.ravel() * 250,
            **more,
        }
    )


def test_configurations_are_kept_apart() -> None:
    rng = np.random.default_rng(12)
    one, other = (simulate(rng, 6, 20, 0.02, 0.05, 0.0) for _ in range(2))
    both = pd.concat([frame(one, arm="tcp"), frame(other * 4, arm="efa")])
    groups, notes = read_pilot(both)
    apart = variance_components(groups)
    assert (len(groups), apart.configurations, apart.starts, apart.iterations) == (2, 2, 12, 240)
    assert apart.start < 0.05**2  # the arms differ fourfold, which is no variance between starts
    assert notes == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: f.drop(columns="start"), "no column 'start'"),
        (lambda f: f.assign(value=0.0), "above 0"),
        (lambda f: f.assign(value="fast"), "must be numbers"),
        (lambda f: f.assign(iteration=1), "there twice"),
        (lambda f: f[f["start"] == 0], "two starts"),
        (lambda f: f[f["iteration"] < 3], "fewer than 4 iterations"),
    ],
)
def test_data_that_cannot_tell_are_refused(change: object, words: str) -> None:
    data = frame(simulate(np.random.default_rng(1), 3, 6, 0.02, 0.05, 0.0))
    with pytest.raises(LabError, match=words):
        read_pilot(change(data))  # type: ignore[operator]


def test_widths_that_take_too_many_starts_and_costs_below_zero_are_refused() -> None:
    for arguments in ((-1, 3, 0.03), (600, 0, 0.03), (600, 3, 0.0), (600, 3, 1e-6)):
        with pytest.raises(LabError):
            plan_from_pilot(components(0.02**2, 0.05**2), *arguments)


def test_the_command_prints_numbers_and_json(tmp_path: Path) -> None:
    path = tmp_path / "pilot.csv"
    frame(simulate(np.random.default_rng(2), 5, 30, 0.02, 0.05, 0.3)).to_csv(path, index=False)
    arguments = ["pilot", str(path), "--cost-restart", "600", "--cost-iteration", "3", "--halfwidth", "0.03"]
    shown = CliRunner().invoke(cli.lab, arguments)
    assert shown.exit_code == 0, shown.output
    assert "iterations = ceil(sqrt(600 s / 3 s" in shown.output
    told = json.loads(CliRunner().invoke(cli.lab, [*arguments, "--json"]).output)
    assert told["difference"]["starts"] >= 3
    assert told["components"]["starts"] == 5
    bad = tmp_path / "bad.csv"
    bad.write_text("a,b\n1,2\n")
    refused = CliRunner().invoke(cli.lab, ["pilot", str(bad), *arguments[2:]])
    assert refused.exit_code == 2
    assert "no column 'start'" in refused.output
