"""The inference against simulation: intervals hold as often as they say, and alarms are as rare.

`python -m tests.lab.validate` prints the same with many more repetitions.
"""

import math
import os

import pytest

from kvik_lab.infer.power import Spread
from tests.lab import inference_truth as truth

_MORE = 10 if os.environ.get("KVIK_TEST_LAB_FULL") else 1
SEED = 20_261_122


@pytest.mark.parametrize("n", [30, 100])
@pytest.mark.parametrize("rho", [0.0, 0.3, 0.6, 0.8])
def test_an_interval_of_a_mean_holds_it_as_often_as_it_says_though_values_depend(rho: float, n: int) -> None:
    ours, naive = truth.mean_coverage(rho, n, 20_000 * _MORE, SEED)
    low = 0.90 if (rho, n) == (0.8, 30) else 0.92
    assert ours.within(low, 0.98), f"rho {rho}, n {n}, seed {SEED}: {ours}"
    if rho >= 0.6:
        assert naive.within(0.40, 0.75), f"the naive interval at rho {rho}, n {n}, seed {SEED}: {naive}"


@pytest.mark.parametrize(
    ("starts", "n", "between", "rho", "uneven"),
    [
        (3, 30, 2.0, 0.6, False),
        (5, 30, 2.0, 0.0, False),
        (5, 100, 2.0, 0.6, False),
        (4, 30, 0.5, 0.6, True),
        (5, 30, 0.0, 0.6, False),
    ],
)
def test_an_interval_over_starts_holds_the_truth_as_often_as_it_says(
    starts: int, n: int, between: float, rho: float, uneven: bool
) -> None:
    rows = (3_000 if uneven else 1_500) * _MORE
    ours, naive = truth.starts_coverage(starts, n, between, rho, rows, SEED, uneven)
    assert ours.within(0.92, 0.98), (
        f"{starts} starts, n {n}, between {between}, rho {rho}, seed {SEED}: {ours}"
    )
    assert naive.value < 0.90, f"the naive interval, seed {SEED}: {naive}"


@pytest.mark.parametrize(("probability", "n", "sides"), [(0.5, 30, 2), (0.95, 59, 1), (0.99, 299, 1)])
def test_bounds_of_a_quantile_hold_it_at_least_as_often_as_they_say(
    probability: float, n: int, sides: int
) -> None:
    rate = truth.quantile_coverage(probability, n, sides, 1_000 * _MORE, SEED)
    assert rate.value + 3 * rate.error >= 0.95, f"p{100 * probability:g}, n {n}, seed {SEED}: {rate}"


@pytest.mark.parametrize("n", [30, 100])
@pytest.mark.parametrize(
    ("name", "draw"),
    [
        ("independent", truth.correlated(0.0)),
        ("heavy tails (t3)", truth.student),
        ("heavy tails (outliers)", truth.outliers),
        ("heavy tails (lognormal)", truth.lognormal),
        ("AR(0.6)", truth.correlated(0.6)),
    ],
)
def test_series_without_a_change_rarely_alarm(name: str, draw: truth.Draw, n: int) -> None:
    rate = truth.false_alarms(draw, n, 2_000 * _MORE, SEED)
    assert rate.within(-1.0, 0.05), f"{name}, n {n}, seed {SEED}: {rate}"


def test_a_step_of_23_percent_at_17_of_30_is_found_where_it_is_and_nothing_else() -> None:
    found = truth.detection(truth.step_series(300 * _MORE, SEED), 17, -0.23)
    assert found.found.within(0.90, 1.1), f"found within one, seed {SEED}: {found.found}"
    assert found.spurious + 3 * found.spurious_error <= 0.1, (
        f"spurious a series, seed {SEED}: {found.spurious}"
    )
    assert found.located.value + 3 * found.located.error >= 0.95, f"located, seed {SEED}: {found.located}"
    assert found.sized.value + 3 * found.sized.error >= 0.92, f"sized, seed {SEED}: {found.sized}"


def test_power_is_as_planned() -> None:
    for effect, starts in ((0.10, 5), (0.15, 3), (0.0, 4)):
        spread = Spread(between=0.04, within=0.08, rho=0.5)
        planned, rate = truth.power_as_planned(effect, spread, starts, 60, 4_000 * _MORE, SEED)
        # The effective number is that of a long series: a slight difference remains at n = 60.
        allowed = 3.5 * rate.error + 0.005
        assert math.isclose(planned, rate.value, abs_tol=allowed), f"{effect}, seed {SEED}: {planned}, {rate}"
