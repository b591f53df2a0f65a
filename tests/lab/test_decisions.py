"""Pages of known truth decide, hold it, and are not refused; `python -m tests.lab.validate` has 2,000 of
each."""

from __future__ import annotations

import os

import numpy as np
import pytest

from kvik_lab.infer.compare import Conclusion, compare
from kvik_lab.infer.pooled import settle
from kvik_lab.infer.states import states
from kvik_lab.infer.steady import Kind, examine
from kvik_lab.infer.table import Starts
from tests.lab import decisions_truth as truth

SEED = 20_261_125
PAGES = 2000 if os.environ.get("KVIK_TEST_LAB_FULL") else 250
SAMPLE = (truth.DESIGNS[0], truth.DESIGNS[2], truth.DESIGNS[4])


@pytest.mark.parametrize("design", SAMPLE, ids=lambda d: d.name)
@pytest.mark.parametrize("scenario", truth.SCENARIOS, ids=lambda s: s.name)
def test_pages_hold_the_truth_and_are_not_refused(design: truth.Design, scenario: truth.Scenario) -> None:
    found = truth.pages(design, scenario, 0.0, PAGES, SEED)
    reach = 3 * found.held.error
    if not scenario.step:  # whose truth nobody can say
        assert 0.92 - reach <= found.held.value <= 0.98 + reach, f"seed {SEED}: held {found.held}"
    assert found.any_decided.value - 3 * found.any_decided.error <= 0.06, f"seed {SEED}: {found.any_decided}"
    assert found.refused.value <= 0.02, f"seed {SEED}: refused {found.refused}"


@pytest.mark.parametrize("design", truth.DESIGNS, ids=lambda d: d.name)
def test_an_effect_of_20_percent_is_decided(design: truth.Design) -> None:
    found = truth.pages(design, truth.SCENARIOS[0], 0.2, PAGES, SEED)
    assert found.decided.value >= 0.95, f"seed {SEED}: {found.decided}"


@pytest.mark.parametrize("design", SAMPLE, ids=lambda d: d.name)
@pytest.mark.parametrize(("scenario", "rho"), [(truth.SCENARIOS[0], 0.0), (truth.SCENARIOS[1], truth.RHO)])
def test_the_power_that_a_plan_promises_is_the_pages(
    design: truth.Design, scenario: truth.Scenario, rho: float
) -> None:
    promised = truth.planned(design, 0.05, rho)
    found = truth.pages(design, scenario, 0.05, PAGES, SEED).decided
    assert abs(found.value - promised) <= 0.03 + 3 * found.error, f"seed {SEED}: {promised}, {found}"


def test_compare_says_of_a_page_what_the_simulation_says() -> None:
    design, scenario = truth.DESIGNS[0], truth.SCENARIOS[5]
    decided = 0
    for seed in range(12):
        pages = truth.pages(design, scenario, 0.04, 1, seed)
        values = truth.simulate(design, scenario, 0.04, 1, np.random.default_rng(seed))[0, :, 0]
        base, other = (
            Starts(str(k), {str(i): row for i, row in enumerate(arm)}) for k, arm in enumerate(values)
        )
        found = compare(base, other)
        assert found.cut >= 2
        decided += found.conclusion is Conclusion.DIFFERENT
        assert pages.decided.hits == (found.conclusion is Conclusion.DIFFERENT), f"seed {seed}"
    assert 0 < decided < 12


def series(
    count: int, n: int = 30, seed: int = SEED, between: float = 0.02, within: float = 0.03
) -> truth.Rows:
    """Starts about 100, shape (count, n)."""
    rng = np.random.default_rng(seed)
    return 100 * np.exp(between * rng.standard_normal((count, 1)) + within * rng.standard_normal((count, n)))


def test_two_slow_iterations_of_every_start_are_a_warm_up() -> None:
    rows = series(5)
    rows[:, :2] *= 1.15
    found = settle(list(rows))
    assert found is not None
    assert found.steady_from == 2
    assert found.before == pytest.approx(0.15, abs=0.06)
    assert "warm-up of 2 iterations" in str(found)


def test_a_slow_drift_is_a_drift_and_no_step() -> None:
    steps, drifts = 0, []
    for seed in range(60):
        rows = series(6, 100, seed) * np.linspace(1.0, 1.03, 100)
        found = settle(list(rows))
        assert found is not None
        steps += found.steady_from != 0
        drifts.append(found.drift)
    assert steps <= 3, f"{steps} of 60 are called a step"
    assert np.median([d or 0.0 for d in drifts]) == pytest.approx(0.03, abs=0.008)


def test_one_start_of_twenty_that_changes_voids_nothing() -> None:
    rows = series(20)
    rows[7, 25:] *= 1.5
    one = Starts("a", {str(i): row for i, row in enumerate(rows)})
    two = Starts("b", {str(i): 1.2 * row for i, row in enumerate(series(20, seed=3))})
    found = compare(one, two)
    assert found.conclusion is Conclusion.DIFFERENT
    assert found.ratio is not None
    assert found.ratio.holds(1.2)
    assert examine(one.values).unlike == ("7",)


def test_a_change_that_all_starts_make_too_late_gives_no_mean() -> None:
    rows = series(5)
    rows[:, 24:] *= 1.4
    found = examine({str(i): row for i, row in enumerate(rows)})
    assert found.headline is None
    assert found.kind is Kind.NO_STEADY_STATE
    assert "iteration 24" in found.why
    side = Starts("a", {str(i): row for i, row in enumerate(rows)})
    assert compare(side, side).conclusion is Conclusion.UNSTEADY


def test_an_odd_start_is_left_out_and_both_results_are_given() -> None:
    rows = series(8)
    rows[2] *= 1.3
    found = compare(
        Starts("a", {str(i): row for i, row in enumerate(rows)}),
        Starts("b", {str(i): row for i, row in enumerate(series(8, seed=9))}),
    )
    assert found.odd == ("a: 2",)
    assert found.ratio is not None
    assert found.all_kept is not None
    assert found.ratio.holds(1.0)
    assert found.all_kept.high - found.all_kept.low > 2 * (found.ratio.high - found.ratio.low)
    assert found.a.all_kept is not None


def test_states_that_alternate_have_levels_and_weights() -> None:
    rng = np.random.default_rng(SEED)
    rows = series(6, 60)
    high = np.zeros(rows.shape, dtype=bool)
    for row in high:
        edges = np.sort(rng.choice(np.arange(8, 52), 3, replace=False))
        row[edges[0] : edges[1]] = True
        row[edges[2] :] = True
    found = examine({str(i): row for i, row in enumerate(rows * np.where(high, 1.3, 1.0))})
    listed = states(found)
    assert len(listed) == 2, f"seed {SEED}: {listed}"
    by_level = sorted(listed, key=lambda s: s.level.estimate)
    assert by_level[0].level.holds(100)
    assert by_level[1].level.holds(130)
    assert by_level[1].share.holds(float(high.mean()))
    assert sum(s.share.estimate for s in listed) == pytest.approx(1.0)


def test_heavy_tails_are_no_states() -> None:
    rng = np.random.default_rng(SEED)
    rows = series(6, 60) * (1 + (rng.random((6, 60)) < 0.08) * rng.exponential(0.5, (6, 60)))
    assert states(examine({str(i): row for i, row in enumerate(rows)})) == ()


def test_so_few_pairs_that_no_sign_flip_can_reject_are_told_so_and_still_judged() -> None:
    def side(name: str, level: float, seed: int) -> Starts:
        rows = level * series(4, seed=seed)
        values = {f"{name}{i}": row for i, row in enumerate(rows)}
        return Starts(name, values, {start: f"b{i}" for i, start in enumerate(values)})

    found = compare(side("a", 1.0, 1), side("b", 1.3, 2))
    assert found.conclusion is Conclusion.DIFFERENT
    assert found.exact_p is None
    assert found.exact_starts == 6
    assert found.test is not None
    assert found.test.smallest == pytest.approx(1 / 8)


def test_what_is_undecided_says_how_many_starts_would_decide_it() -> None:
    found = compare(
        Starts("a", {str(i): row for i, row in enumerate(series(5, between=0.05))}),
        Starts("b", {str(i): 1.03 * row for i, row in enumerate(series(5, between=0.05, seed=1))}),
        comparisons=3,
    )
    assert found.conclusion is Conclusion.UNDECIDED
    needed = found.would_decide(0.05)
    assert needed is not None
    assert needed.starts > 10
    assert needed.power >= 0.8
