"""Permutation tests, effects, equivalence, multiplicity, power and stopping rules."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestIndPower

from kvik_lab.errors import LabError
from kvik_lab.infer.effect import (
    Difference,
    brunner_munzel,
    cliffs_delta,
    equivalence,
    log_ratio,
    log_ratio_of_series,
    paired_log_ratio,
)
from kvik_lab.infer.metrics import Metric, Timeline, TransferCost, collect
from kvik_lab.infer.multiple import benjamini_hochberg, holm
from kvik_lab.infer.permute import Block, sign_flip, within_blocks
from kvik_lab.infer.power import Spread, power, units_needed
from kvik_lab.infer.sequential import Decision, Spending, StopRule, boundaries, follow, look

SEED = 13


def test_sign_flips_are_those_of_a_full_listing() -> None:
    x = np.random.default_rng(SEED).standard_normal(9) + 0.5
    found = sign_flip(x)
    other = stats.permutation_test(
        (x, -x), lambda a, b: (a - b).mean(), permutation_type="samples", n_resamples=10**6
    )
    assert found.exact
    assert found.arrangements == 512
    assert found.p == pytest.approx(other.pvalue)


def test_labels_of_starts_are_permuted_exactly() -> None:
    rng = np.random.default_rng(SEED)
    x, y = rng.standard_normal(4), 1 + rng.standard_normal(5)
    found = within_blocks([Block(x, y)])
    other = stats.permutation_test(
        (x, y), lambda a, b: abs(b.mean() - a.mean()), alternative="greater", n_resamples=10**6
    )
    assert found.arrangements == math.comb(9, 4)
    assert found.p == pytest.approx(other.pvalue)
    assert found.statistic == pytest.approx(y.mean() - x.mean())


def test_blocks_hold_what_differs_between_them_out_of_the_test() -> None:
    days = np.array([0.0, 100.0, 200.0, 300.0, 400.0, 500.0])
    blocks = [Block(np.array([d]), np.array([d + 1.0])) for d in days]
    assert within_blocks(blocks).p == pytest.approx(2 / 64)
    assert within_blocks([Block(days, days + 1.0)]).p > 0.8


def test_a_drawn_p_is_near_the_exact_one_and_says_its_error() -> None:
    x = np.random.default_rng(SEED).standard_normal(16) + 0.4
    exact, longer = sign_flip(x), sign_flip(np.concatenate([x, [0.0, 0.0]]))
    assert exact.exact
    assert not longer.exact
    # Two zeros change the statistic by a factor only, so that the p-values are the same.
    assert abs(longer.p - exact.p) <= 4 * longer.error + 1e-4


def test_too_few_starts_are_known_not_to_reach_a_level() -> None:
    found = within_blocks([Block(np.array([1.0, 2.0, 3.0]), np.array([7.0, 8.0, 9.0]))])
    assert found.p == found.smallest == pytest.approx(0.1)


def test_grouped_permutation_keeps_its_level_where_iterations_do_not() -> None:
    rng = np.random.default_rng(SEED)
    starts = rng.standard_normal((400, 8))
    rejected = np.mean([within_blocks([Block(s[:4], s[4:])]).p <= 0.05 for s in starts])
    assert rejected <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400), f"seed {SEED}: {rejected}"


def test_log_ratio_is_welchs_test_of_logs() -> None:
    rng = np.random.default_rng(SEED)
    x, y = np.exp(rng.standard_normal(5)), np.exp(2 * rng.standard_normal(7))
    found = log_ratio(x, y)
    other = stats.ttest_ind(np.log(y), np.log(x), equal_var=False)
    assert found.p() == pytest.approx(other.pvalue)
    assert found.degrees == pytest.approx(other.df)
    assert found.ratio().holds(math.exp(found.estimate))
    paired = paired_log_ratio(x, y[:5])
    assert paired.p() == pytest.approx(stats.ttest_rel(np.log(y[:5]), np.log(x)).pvalue)


def test_a_ratio_of_two_series_respects_their_correlation() -> None:
    rng = np.random.default_rng(SEED)
    x = 100 + np.cumsum(rng.standard_normal(40)) * 0.5
    y = 100 + rng.standard_normal(40)
    assert log_ratio_of_series(x, y).degrees < 20
    assert log_ratio_of_series(x, y).error > 2 * math.sqrt((x.var() + y.var()) / 40) / 100


def test_brunner_munzel_is_scipys() -> None:
    rng = np.random.default_rng(SEED)
    x, y = rng.standard_normal(12), 0.8 + 3 * rng.standard_normal(15)
    found = brunner_munzel(x, y)
    assert found.p == pytest.approx(stats.brunnermunzel(x, y).pvalue)
    assert found.larger.estimate == pytest.approx(np.mean(x[:, None] < y[None, :]))
    with pytest.raises(LabError, match="do not overlap"):
        brunner_munzel([1.0, 2.0], [3.0, 4.0])


def test_cliffs_delta_counts_pairs_and_its_interval_holds() -> None:
    assert cliffs_delta([1.0, 2.0, 3.0], [2.0, 3.0, 4.0]).estimate == pytest.approx(5 / 9)
    assert cliffs_delta([1.0, 2.0], [3.0, 4.0]).estimate == 1.0
    rng = np.random.default_rng(SEED)
    truth = 2 * stats.norm.cdf(1 / math.sqrt(2)) - 1
    held = np.mean([cliffs_delta(a[:20], 1 + a[20:]).holds(truth) for a in rng.standard_normal((1000, 40))])
    assert abs(held - 0.95) <= 0.03, f"seed {SEED}: {held}"


def test_equivalence_holds_exactly_when_the_narrower_interval_lies_within_the_margin() -> None:
    for estimate in (0.0, 0.004, 0.02):
        found = equivalence(Difference(estimate, 0.003, 12, "given"), 0.01)
        inside = found.interval.low >= 1 / 1.01 and found.interval.high <= 1.01
        assert found.equivalent == inside
    assert not equivalence(Difference(0.0, 0.02, 12, "given"), 0.01).equivalent
    with pytest.raises(LabError, match="margin"):
        equivalence(Difference(0.0, 0.02, 12, "given"), 0.0)


def test_adjusted_p_values_are_statsmodels() -> None:
    p = np.random.default_rng(SEED).random(20) ** 3
    assert holm(p) == pytest.approx(multipletests(p, method="holm")[1])
    assert benjamini_hochberg(p) == pytest.approx(multipletests(p, method="fdr_bh")[1])
    with pytest.raises(LabError, match="position 1"):
        holm([0.1, 1.2])


def test_power_is_statsmodels_and_the_numbers_needed_are_the_known_ones() -> None:
    assert power(0.7, 1.0, 20) == pytest.approx(TTestIndPower().power(0.7, 20, 0.05))
    assert power(0.0, 1.0, 5) == pytest.approx(0.05)
    # Cohen 1988, table 2.4.1: at 80 % power a large effect (0.8) takes 26 a side, a medium one (0.5) 64.
    assert units_needed(0.8, 1.0) == 26
    assert units_needed(0.5, 1.0) == 64
    assert Spread(0.03, 0.08).of_start(4) == pytest.approx(0.05)


def test_boundaries_are_those_of_published_tables() -> None:
    # Five even looks at 5 %, two-sided, by Lan and DeMets' functions (Reboussin et al. 2000, Controlled
    # Clinical Trials 21).
    shares = (0.2, 0.4, 0.6, 0.8, 1.0)
    assert boundaries(shares, 0.05, Spending.OBRIEN_FLEMING) == pytest.approx(
        (4.8769, 3.3569, 2.6803, 2.2898, 2.0310), abs=2e-4
    )
    assert boundaries(shares, 0.05, Spending.POCOCK) == pytest.approx(
        (2.4380, 2.4268, 2.4101, 2.3966, 2.3859), abs=2e-4
    )
    assert boundaries((1.0,), 0.05, Spending.POCOCK) == pytest.approx((1.959964,), abs=1e-5)


def test_a_rule_stops_when_precise_and_says_that_the_data_decided() -> None:
    rule = StopRule((5, 10, 20), half_width=0.05)
    wide, narrow = Difference(0.1, 0.03, 8, "given"), Difference(0.1, 0.01, 18, "given")
    record = follow(rule, [wide, narrow])
    assert [entry.decision for entry in record.looks] == [Decision.CONTINUE, Decision.PRECISE]
    assert record.data_dependent
    assert "data-dependent" in str(record)
    assert "look 2 of 3" in str(record)


def test_a_rule_gives_up_when_the_last_look_cannot_be_precise_enough() -> None:
    rule = StopRule((5, 10, 20), half_width=0.01)
    assert look(rule, 0, Difference(0.1, 0.2, 8, "given")).decision is Decision.FUTILE
    assert look(rule, 2, Difference(0.1, 0.2, 38, "given")).decision is Decision.EXHAUSTED


def test_a_rule_stops_on_a_difference_only_when_declared() -> None:
    found = Difference(1.0, 0.05, 8, "given")
    assert look(StopRule((5, 10), 0.05), 0, found).decision is not Decision.DIFFERENT
    assert look(StopRule((5, 10), 0.05, stop_when_different=True), 0, found).decision is Decision.DIFFERENT


def test_looks_not_declared_are_refused() -> None:
    with pytest.raises(LabError, match="rise"):
        StopRule((10, 5), 0.05)
    with pytest.raises(LabError, match="not declared"):
        look(StopRule((5, 10), 0.05), 2, Difference(0.0, 0.1, 8, "given"))


def test_metrics_of_a_request_are_kept_apart() -> None:
    request = Timeline(sent=1.0, due=0.9, tokens=(1.5, 1.75, 1.8, 1.85, 1.9))
    values = {m: request.get(m) for m in Metric}
    expected = {
        Metric.TTFT: 0.5,
        Metric.TTFT_FROM_SCHEDULE: 0.6,
        Metric.SECOND_TOKEN: 0.75,
        Metric.TPOT: 0.1,
        Metric.DECODE_STEP: 0.05,
        Metric.HANDOVER_GAP: 0.2,
    }
    assert values == pytest.approx(expected)
    short = Timeline(0.0, (0.2,))
    assert short.get(Metric.TPOT) is None
    assert collect([request, short], Metric.TTFT) == pytest.approx([0.5, 0.2])
    with pytest.raises(LabError, match="handover gap"):
        collect([short], Metric.HANDOVER_GAP)
    with pytest.raises(LabError, match="before"):
        Timeline(1.0, (0.5,))


def test_a_transfer_costs_a_wait_or_a_share_of_each_token() -> None:
    # The article on batched submission: 150 ms over 1,500 output tokens are 0.1 ms a token.
    assert TransferCost(0.150, 1500).per_token == pytest.approx(0.0001)
    with pytest.raises(LabError, match="output tokens"):
        _ = TransferCost(0.1, 0)
