"""Permutation tests, the one analysis beside scipy's and its power."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.power import TTestIndPower

from kvik_lab.errors import LabError
from kvik_lab.infer.effect import log_ratio_of_series
from kvik_lab.infer.judge import Layout, Plan, judge, odd_levels
from kvik_lab.infer.permute import Permutation, within_blocks
from kvik_lab.infer.power import Spread, effect_seen, promise, starts_for_width, starts_needed

SEED = 13


def flips(differences: np.ndarray) -> Permutation:
    """Pairs, as blocks of one unit of each group."""
    return within_blocks([(np.zeros(1), np.array([d])) for d in differences])


def test_sign_flips_are_those_of_a_full_listing() -> None:
    x = np.random.default_rng(SEED).standard_normal(9) + 0.5
    found = flips(x)
    other = stats.permutation_test(
        (x, -x), lambda a, b: (a - b).mean(), permutation_type="samples", n_resamples=10**6
    )
    assert found.exact
    assert found.arrangements == 512
    assert found.p == pytest.approx(other.pvalue)


def test_labels_of_starts_are_permuted_exactly() -> None:
    rng = np.random.default_rng(SEED)
    x, y = rng.standard_normal(4), 1 + rng.standard_normal(5)
    found = within_blocks([(x, y)])
    other = stats.permutation_test(
        (x, y), lambda a, b: abs(b.mean() - a.mean()), alternative="greater", n_resamples=10**6
    )
    assert found.arrangements == math.comb(9, 4)
    assert found.p == pytest.approx(other.pvalue)
    assert found.statistic == pytest.approx(y.mean() - x.mean())


def test_blocks_hold_what_differs_between_them_out_of_the_test() -> None:
    days = np.array([0.0, 100.0, 200.0, 300.0, 400.0, 500.0])
    blocks = [(np.array([d]), np.array([d + 1.0])) for d in days]
    assert within_blocks(blocks).p == pytest.approx(2 / 64)
    assert within_blocks([(days, days + 1.0)]).p > 0.8


def test_a_drawn_p_is_near_the_exact_one_and_says_its_error() -> None:
    x = np.random.default_rng(SEED).standard_normal(16) + 0.4
    exact, longer = flips(x), flips(np.concatenate([x, [0.0, 0.0]]))
    assert exact.exact
    assert not longer.exact
    # Two zeros change the statistic by a factor only, so that the p-values are the same.
    assert abs(longer.p - exact.p) <= 4 * longer.error + 1e-4


def test_too_few_starts_are_known_not_to_reach_a_level() -> None:
    found = within_blocks([(np.array([1.0, 2.0, 3.0]), np.array([7.0, 8.0, 9.0]))])
    assert found.p == found.smallest == pytest.approx(0.1)


def test_grouped_permutation_keeps_its_level_where_iterations_do_not() -> None:
    rng = np.random.default_rng(SEED)
    starts = rng.standard_normal((400, 8))
    rejected = np.mean([within_blocks([(s[:4], s[4:])]).p <= 0.05 for s in starts])
    assert rejected <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400), f"seed {SEED}: {rejected}"


def test_the_analysis_is_scipys_test_of_logs() -> None:
    rng = np.random.default_rng(SEED)
    x, y = np.exp(rng.standard_normal(5)), np.exp(2 * rng.standard_normal(7))
    found = judge(np.log(np.concatenate([x, y]))[None, :], Layout.grouped(5, 7), leave_out=False)
    other = stats.ttest_ind(np.log(y), np.log(x), equal_var=False)
    assert found.p()[0] == pytest.approx(other.pvalue)
    assert found.degrees[0] == pytest.approx(other.df)
    bounds = other.confidence_interval()
    assert (found.low[0], found.high[0]) == pytest.approx((bounds.low, bounds.high))
    levels = np.log(np.concatenate([x, y[:5]]))[None, :]
    paired = judge(levels, Layout.paired(5), leave_out=False)
    assert paired.p()[0] == pytest.approx(stats.ttest_rel(np.log(y[:5]), np.log(x)).pvalue)


def test_a_ratio_of_two_series_respects_their_correlation() -> None:
    rng = np.random.default_rng(SEED)
    x = 100 + np.cumsum(rng.standard_normal(40)) * 0.5
    y = 100 + rng.standard_normal(40)
    assert log_ratio_of_series(x, y).degrees < 20
    assert log_ratio_of_series(x, y).error > 2 * math.sqrt((x.var() + y.var()) / 40) / 100


def test_starts_within_blocks_are_compared_by_least_squares() -> None:
    rng = np.random.default_rng(SEED)
    block = np.repeat([0, 1, 2], 4)
    of_arm = np.tile([False, True], 6)
    y = rng.standard_normal(12) + 10 * block + 0.7 * of_arm
    found = judge(y[None, :], Layout(of_arm, block), leave_out=False)
    matrix = np.column_stack([block == k for k in range(3)] + [of_arm]).astype(float)
    slope, rest, *_ = np.linalg.lstsq(matrix, y, rcond=None)
    error = math.sqrt(rest[0] / 8 * np.linalg.inv(matrix.T @ matrix)[3, 3])
    assert (found.estimate[0], found.error[0]) == pytest.approx((slope[3], error))
    assert found.degrees[0] == 8
    assert Layout(of_arm, block).plan is Plan.BLOCKED


def test_an_interval_excludes_one_exactly_where_the_adjusted_p_is_below_alpha() -> None:
    rng = np.random.default_rng(SEED)
    found = judge(0.3 * rng.standard_normal((500, 10)), Layout.grouped(5, 5), 0.05, 3)
    assert ((found.p(3) <= 0.05) == found.different).all()
    assert 0 < found.different.sum() < 50


def test_a_start_far_off_is_left_out_and_two_groups_of_starts_are_not() -> None:
    near = [0.0, 0.01, -0.01, 0.02, 0.0, -0.02]
    assert odd_levels(np.array([[*near, 0.3]]))[0].tolist() == [False] * 6 + [True]
    assert not odd_levels(np.array([[*near, 0.08]])).any(), "15 % is what counts at least"
    assert not odd_levels(np.array([[0.0, 0.01, -0.01, 0.02, 0.3, 0.31, 0.3]])).any()
    assert not odd_levels(np.array([[0.0, 0.3]])).any()
    pairs = np.array([[0.0, 1.0, 2.0, 3.0, 4.0, 0.11, 1.1, 2.4, 3.1, 4.09]])
    assert judge(pairs, Layout.paired(5)).kept[0].tolist() == [True, True, False, True, True] * 2


def test_one_start_is_not_judged() -> None:
    with pytest.raises(LabError, match="replicate the starts"):
        judge(np.zeros((1, 3)), Layout.grouped(1, 2))


@pytest.mark.parametrize(("effect", "starts"), [(0.7, 20), (0.5, 10), (0.0, 8)])
def test_simulated_power_is_statsmodels(effect: float, starts: int) -> None:
    # Small effects on the scale of logs, so that a ratio and a difference are one.
    found = promise(math.expm1(effect * 0.01), 0.01, starts)
    exact = TTestIndPower().power(effect, starts, 0.05) if effect else 0.05
    assert abs(found.power - exact) <= 4 * found.error + 0.005, f"{found} and {exact}"


def test_the_starts_needed_are_the_known_ones() -> None:
    # Cohen 1988, table 2.4.1: at 80 % power a large effect (0.8) takes 26 a side.
    assert abs(starts_needed(math.expm1(0.008), 0.01).starts - 26) <= 1
    assert starts_needed(0.2, 0.02, wanted=0.95, comparisons=3).starts == 4
    wide, narrow = starts_for_width(0.03, 0.02), starts_for_width(0.03, 0.02, comparisons=10)
    assert wide.half_width <= 0.03
    assert narrow.starts > wide.starts
    seen = effect_seen(0.02, 5)
    assert promise(seen, 0.02, 5).power == pytest.approx(0.8, abs=0.03)
    assert Spread(0.03, 0.08).of_start(4) == pytest.approx(0.05)
    with pytest.raises(LabError, match="over 500 starts"):
        starts_needed(0.0001, 0.1)
