"""Orders of runs: balance, anchors, and what they cost."""

import itertools
from collections import Counter

import pandas as pd
import pytest

from kvik_lab.design.cost import Rates, check_rates, schedule_cost
from kvik_lab.design.factor import Factor
from kvik_lab.design.schedule import ANCHOR, Anchor, Order, make_schedule, williams
from kvik_lab.errors import LabError
from tests.lab.design.spaces import nested_factors, nested_rows


def rows_with_ids() -> pd.DataFrame:
    rows = nested_rows()
    return rows.set_axis([f"r{k}" for k in range(len(rows))], axis=0)


@pytest.mark.parametrize("arms", [2, 3, 4, 5, 6])
def test_a_williams_square_balances_places_and_followers(arms: int) -> None:
    square = williams(arms)
    assert len(square) == (arms if arms % 2 == 0 else 2 * arms)
    places = Counter((place, arm) for row in square for place, arm in enumerate(row))
    follows = Counter(pair for row in square for pair in itertools.pairwise(row))
    assert set(places.values()) == {len(square) // arms}
    assert set(follows.values()) == {len(square) // arms}
    assert len(follows) == arms * (arms - 1)


def test_two_arms_in_williams_order_run_as_abba() -> None:
    factors = (Factor("transport", ("tcp", "efa"), hard=True),)
    rows = pd.DataFrame({"transport": ["tcp", "efa"]}, index=["a", "b"])
    schedule = make_schedule(rows, factors, blocks=4, order=Order.WILLIAMS, seed=3)
    order = "".join(start.runs[0] for start in schedule.starts)
    assert order in ("abbaabba", "baabbaab")


def test_each_block_has_each_start_and_each_run_once_in_an_order_of_its_own() -> None:
    schedule = make_schedule(rows_with_ids(), nested_factors(), blocks=5, seed=2)
    assert len(schedule.starts) == 15
    assert (schedule.runs, schedule.anchors) == (5 * 27, 0)
    orders = set()
    for block in range(5):
        starts = [start for start in schedule.starts if start.block == block]
        assert sorted(r for s in starts for r in s.runs) == sorted(f"r{k}" for k in range(27))
        orders.add(tuple(r for s in starts for r in s.runs))
        for start in starts:
            assert len({(int(r[1:])) // 9 for r in start.runs}) == 1
    assert len(orders) == 5
    assert make_schedule(rows_with_ids(), nested_factors(), blocks=5, seed=2) == schedule


def test_the_order_as_given_is_kept() -> None:
    schedule = make_schedule(rows_with_ids(), nested_factors(), order=Order.GIVEN)
    assert [r for s in schedule.starts for r in s.runs] == [f"r{k}" for k in range(27)]


def test_an_anchor_with_hard_levels_begins_halves_and_ends_each_block() -> None:
    anchor = Anchor({"mode": "unified", "tokens": 2000, "concurrency": 1})
    schedule = make_schedule(rows_with_ids(), nested_factors(), blocks=2, anchor=anchor)
    for block in range(2):
        kinds = [start.anchor for start in schedule.starts if start.block == block]
        assert kinds == [True, False, False, True, False, True]
    assert schedule.anchors == 6


def test_an_anchor_with_easy_levels_begins_and_ends_each_start() -> None:
    anchor = Anchor({"tokens": 2000, "concurrency": 1}, every=4)
    schedule = make_schedule(rows_with_ids(), nested_factors(), anchor=anchor)
    for start in schedule.starts:
        assert [k for k, run in enumerate(start.runs) if run == ANCHOR] == [0, 5, 10, 12]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"anchor": Anchor({"mode": "disagg"})}, "no level of transport"),
        ({"anchor": Anchor({"speed": 1})}, "'speed', which is not a factor"),
        ({"blocks": 0}, "at least one block"),
        ({"plots": [0] * 27}, "other hard levels"),
        ({"plots": [0]}, "27 rows but 1 plots"),
    ],
)
def test_schedules_that_make_no_sense_are_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(LabError, match=words):
        make_schedule(rows_with_ids(), nested_factors(), **change)  # type: ignore[arg-type]


def test_a_williams_order_of_many_arms_is_refused() -> None:
    factors = (Factor("x", tuple("abcdef"), hard=True),)
    rows = pd.DataFrame({"x": list("abcdef")})
    with pytest.raises(LabError, match="2 to 4 arms"):
        make_schedule(rows, factors, order=Order.WILLIAMS)


def test_hours_and_money_are_what_their_formulas_say() -> None:
    mode, _, *rest = nested_factors()
    dear = Factor(
        "transport", ("tcp", "efa"), within={"mode": "disagg"}, hard=True, price_per_hour={"efa": 6.0}
    )
    factors = (mode, dear, *rest)
    schedule = make_schedule(rows_with_ids(), factors, blocks=2)
    rates = Rates(2, 10, 4)
    cost = schedule_cost(schedule, rows_with_ids(), factors, rates)
    assert cost.restarts.value == 6
    assert cost.hours is not None
    assert cost.money is not None
    assert cost.hours.value == pytest.approx((6 * 10 + 54 * 2) / 60)
    efa = (2 * 10 + 18 * 2) / 60
    assert cost.money.value == pytest.approx(cost.hours.value * 4 + efa * 6)
    assert cost.hours.formula == "(6 starts x 10 min + 54 runs x 2 min) / 60"
    assert schedule_cost(schedule, rows_with_ids(), factors, Rates()).hours is None
    with pytest.raises(LabError, match="below 0"):
        check_rates(Rates(-1))
