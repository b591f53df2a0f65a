"""Intervals: against formulas, tables and other implementations."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from kvik_lab.errors import LabError
from kvik_lab.infer.arrays import Interval, TooFew
from kvik_lab.infer.order import Quantile, median_interval, needed_for_bound, quantile, quantile_over_starts
from kvik_lab.infer.serial import mean_interval, naive_interval, serial
from kvik_lab.infer.steady import mean_over_starts

SEED = 12


def test_the_effective_number_follows_from_the_correlation() -> None:
    rng = np.random.default_rng(SEED)
    x = np.zeros(5000)
    for i in range(1, len(x)):
        x[i] = 0.6 * x[i - 1] + rng.standard_normal()
    found = serial(x)
    assert found.rho == pytest.approx(0.6, abs=0.05)
    assert found.effective == pytest.approx(5000 * 0.4 / 1.6, rel=0.15)


def test_alternating_values_get_no_credit() -> None:
    found = serial([1.0, 2.0] * 10)
    assert found.measured < -0.9
    assert found.rho == 0.0
    assert found.effective == 20.0


def test_values_without_correlation_give_students_t() -> None:
    # Alternating deviations: a correlation below zero counts as none, and the formula is the textbook's.
    x = [10.0, 12.0, 9.0, 13.0, 10.0, 12.0, 9.0, 13.0]
    one, other = mean_interval(x), naive_interval(x)
    assert (one.low, one.high) == pytest.approx((other.low, other.high))


def test_a_mean_over_even_starts_is_students_t_of_their_means() -> None:
    rng = np.random.default_rng(SEED)
    data = rng.standard_normal((5, 30)) + 10 * rng.standard_normal((5, 1))
    means = data.mean(axis=1)
    found = mean_over_starts(means)
    low, high = stats.t.interval(0.95, 4, means.mean(), means.std(ddof=1) / np.sqrt(5))
    assert (found.low, found.high) == pytest.approx((low, high))
    same = mean_over_starts([2.0, 2.0, 2.0])
    assert (same.low, same.high) == (2.0, 2.0)
    with pytest.raises(LabError, match="at least 2"):
        mean_over_starts([1.0])


def test_a_percentile_over_starts_is_that_of_a_typical_start() -> None:
    rng = np.random.default_rng(SEED)
    held = 0
    for _ in range(400):
        levels = np.exp(0.02 * rng.standard_normal((6, 1)))
        found = quantile_over_starts(list(levels * np.exp(0.05 * rng.standard_normal((6, 40)))), 0.9)
        assert isinstance(found, Interval)
        held += found.holds(np.exp(0.05 * stats.norm.ppf(0.9)))
    assert 0.90 <= held / 400 <= 0.985, f"seed {SEED}: {held}"


def test_a_percentile_that_starts_are_too_short_or_too_few_for_is_not_given() -> None:
    few = quantile_over_starts([np.arange(1.0, 31.0)] * 4, 0.99)
    assert isinstance(few, TooFew)
    assert few.needed == 200
    alone = quantile_over_starts([np.arange(1.0, 301.0)], 0.5)
    assert isinstance(alone, TooFew)
    assert "starts" in alone.what


@pytest.mark.parametrize(
    ("p", "needed"), [(0.99, 299), (0.95, 59), (0.9, 29), (0.5, 5), (0.999, 2995), (0.01, 299)]
)
def test_the_number_that_a_tail_needs_is_the_known_one(p: float, needed: int) -> None:
    assert needed_for_bound(p) == needed
    data = np.arange(needed, dtype=float)
    assert isinstance(quantile(data, p), Quantile)
    refused = quantile(data[:-1], p)
    assert isinstance(refused, TooFew)
    assert refused.needed == needed
    assert str(needed) in str(refused)


def test_thirty_values_bound_neither_p95_nor_p99() -> None:
    data = np.arange(30.0)
    assert isinstance(quantile(data, 0.95), TooFew)
    assert isinstance(quantile(data, 0.99), TooFew)
    assert isinstance(quantile(data, 0.9), Quantile)


def test_a_quantile_of_dependent_values_takes_more_of_them() -> None:
    found = quantile(np.arange(400.0), 0.99, rho=0.5)
    assert isinstance(found, TooFew)
    assert found.needed == 897


@pytest.mark.parametrize(("n", "low", "high"), [(6, 1, 6), (10, 2, 9), (20, 6, 15), (30, 10, 21)])
def test_the_median_lies_between_the_tabulated_order_statistics(n: int, low: int, high: int) -> None:
    found = median_interval(np.arange(1.0, n + 1))
    assert isinstance(found, Interval)
    assert (found.low, found.high) == (low, high)


def test_a_quantiles_bounds_cover_what_they_say() -> None:
    found = quantile(np.arange(100.0), 0.9, sides=2)
    assert isinstance(found, Quantile)
    assert found.low is not None
    assert found.high is not None
    below, above = int(found.low) + 1, int(found.high) + 1
    exact = stats.binom.cdf(above - 1, 100, 0.9) - stats.binom.cdf(below - 1, 100, 0.9)
    assert found.covers == pytest.approx(exact)
    assert exact >= 0.95


@pytest.mark.parametrize("bad", [0.0, 1.0, -1.0, 2.0])
def test_levels_that_are_none_are_refused(bad: float) -> None:
    with pytest.raises(LabError, match="between 0 and 1"):
        mean_interval([1.0, 2.0, 3.0], bad)
    with pytest.raises(LabError, match="between 0 and 1"):
        quantile([1.0, 2.0, 3.0], bad)
