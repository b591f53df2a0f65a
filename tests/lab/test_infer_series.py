"""Changes, classes, headlines and coincidence in series of iterations."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from kvik_lab.errors import LabError
from kvik_lab.infer.changes import find_changes
from kvik_lab.infer.coincide import coincidence
from kvik_lab.infer.screen import optimal
from kvik_lab.infer.steady import Kind, examine
from kvik_lab.infer.trailing import level_from
from tests.lab.inference_truth import detection, wandering_step
from tests.lab.warmup_truth import ends

SEED = 11


def levels(*parts: tuple[float, int], noise: float = 0.01, seed: int = SEED) -> NDArray[np.float64]:
    """A series of levels and their lengths, with relative noise."""
    rng = np.random.default_rng(seed)
    level = np.concatenate([np.full(length, value) for value, length in parts])
    return np.asarray(level * (1.0 + noise * rng.standard_normal(len(level))))


def test_the_segmentation_is_the_best_of_all_there_are() -> None:
    rng = np.random.default_rng(SEED)
    for n in (9, 12):
        row = rng.permutation(n).astype(float)
        row[n // 2 :] += 5
        ranks = (np.argsort(np.argsort(row)) - (n - 1) / 2.0) / np.sqrt((n**2 - 1) / 12.0)

        def cost(cuts: tuple[int, ...], ranks: NDArray[np.float64] = ranks, n: int = n) -> float:
            edges = [0, *cuts, n]
            spans = list(itertools.pairwise(edges))
            if min(b - a for a, b in spans) < 3:
                return np.inf
            return sum(float(ranks[a:b].var() * (b - a)) for a, b in spans) + len(cuts) * 2.0

        every = itertools.chain.from_iterable(itertools.combinations(range(1, n), k) for k in range(n // 3))
        best = min(every, key=cost)
        assert tuple(np.flatnonzero(optimal(ranks[None, :], 2.0, 3)[0])) == best, f"seed {SEED}, n {n}"


def test_a_step_is_reported_with_its_size_and_segments() -> None:
    found = find_changes(levels((1900, 17), (1463, 13), seed=2))
    (change,) = found.changes
    assert change.at == 17
    assert change.earliest <= 17 <= change.latest
    assert change.percent_low <= -23.0 <= change.percent_high
    assert change.p < 0.01
    assert [(s.start, s.length) for s in found.segments] == [(0, 17), (17, 13)]
    low, high = found.segments[0].low, found.segments[0].high
    assert low is not None
    assert high is not None
    assert low < 1900 < high


def test_several_levels_are_told_apart() -> None:
    # The order of levels that the article "EFA vs TCP" describes for 3,800 tokens: down twice, and up again.
    found = find_changes(levels((3460, 7), (2870, 6), (2407, 6), (2860, 5), (3460, 6)))
    assert [c.at for c in found.changes] == [7, 13, 19, 24]


def test_an_outlier_is_not_a_state() -> None:
    row = levels((100, 30))
    row[12:14] = 500
    assert not find_changes(row).changes


def test_a_step_in_a_wandering_series_is_still_found_when_it_is_large() -> None:
    found = detection(wandering_step(100, SEED, 15, 30), 15, -0.15)
    assert found.found.hits >= 95, f"seed {SEED}: {found}"
    assert found.spurious <= 0.06, f"seed {SEED}: {found}"


def test_values_without_any_spread_are_flat_and_an_exact_step_is_a_change() -> None:
    assert not find_changes([5.0] * 20).changes
    assert [c.at for c in find_changes([5.0] * 10 + [4.0] * 10).changes] == [10]


def test_scale_and_unit_change_nothing() -> None:
    row = levels((10, 15), (8, 15), noise=0.03)
    one, other = find_changes(row), find_changes(1e6 * row)
    assert [c.at for c in one.changes] == [c.at for c in other.changes]
    assert [c.percent for c in one.changes] == pytest.approx([c.percent for c in other.changes])


@pytest.mark.parametrize(
    ("parts", "kind", "steady"),
    [
        (((100, 30),), Kind.FLAT, 0),
        (((130, 10), (100, 20)), Kind.WARM_UP, 10),
        (((100, 10), (130, 20)), Kind.SLOWDOWN, 10),
        (((100, 22), (130, 8)), Kind.NO_STEADY_STATE, None),
        (((100, 8), (130, 7), (100, 8), (130, 7)), Kind.OSCILLATING, None),
    ],
)
def test_series_are_classed(parts: tuple[tuple[float, int], ...], kind: Kind, steady: int | None) -> None:
    result = examine({"1": levels(*parts)})
    assert result.kind is kind
    assert result.starts[0].verdict.steady_from == steady


def test_a_rate_that_rises_warms_up() -> None:
    assert examine({"1": levels((100, 10), (130, 20))}, smaller_is_better=False).kind is Kind.WARM_UP


@pytest.mark.parametrize(("noise", "rho", "seen"), [(0.02, 0.0, 0.95), (0.05, 0.6, 0.75)])
def test_a_warm_up_ends_soon_where_there_is_none_and_later_where_there_is(
    noise: float, rho: float, seen: float
) -> None:
    """A flat series costs hardly more than the least; less is left of a warm-up than after a count."""
    flat = ends("none", noise, rho, 40, SEED)
    assert np.quantile(flat.requests, 0.9) <= 18, flat
    assert flat.bound == 0.0, flat
    step = ends("30 % above until request 8", noise, rho, 40, SEED)
    assert (step.requests >= 17).mean() >= seen, step
    falling = ends("twofold, falls by 1/e in 10", noise, rho, 40, SEED)
    assert falling.left < 0.5 * falling.counted, falling


def test_a_slow_fall_goes_on_by_its_slope() -> None:
    """Where no step is seen in the last ten: a segmentation alone would end it earlier."""
    falling = ends("twofold, falls by 1/e in 20", 0.02, 0.0, 40, SEED)
    assert falling.left < 0.3 * falling.counted, falling


def test_a_level_that_never_comes_and_one_that_comes_with_gaps() -> None:
    rng = np.random.default_rng(SEED)
    falls = np.linspace(2.0, 1.0, 60) * (1 + 0.001 * rng.standard_normal(60))
    turns = (1.0 + 0.5 * (np.arange(60) // 5 % 2)) * (1 + 0.01 * rng.standard_normal(60))
    for values in (falls, turns):
        assert {level_from([*values[:n]], 10) for n in range(61)} == {None}
    gaps = [3.0, None, 3.1, 2.9, None, *[1.0] * 10]
    assert level_from(gaps[:14], 10) is None
    assert level_from(gaps, 10) == 5
    assert level_from([1.0] * 9, 10) is None
    assert level_from([1.0] * 10, 10) == 0


def test_starts_that_differ_in_class_are_inconsistent() -> None:
    result = examine({"a": levels((100, 30)), "b": levels((130, 10), (100, 20), seed=2)})
    assert result.kind is Kind.INCONSISTENT
    assert result.headline is not None


def test_the_headline_is_of_the_steady_part_and_unsteady_runs_have_none() -> None:
    good = examine({str(i): levels((130, 10), (100, 20), seed=i + 5) for i in range(4)})
    assert good.headline is not None
    assert good.headline.holds(100)
    assert not good.headline.holds(110)
    bad = examine({"a": levels((100, 30)), "b": levels((100, 22), (130, 8))})
    assert bad.headline is None
    assert "unsteady" in bad.why
    assert "b" in bad.why


def test_one_start_has_a_mean_and_is_told_what_it_does_not_say() -> None:
    result = examine({"1": levels((100, 30))})
    assert "one start" in result.why


def test_coincidence_is_exact_for_two_series() -> None:
    # 25 places of 30 iterations can hold a change; one shift of them meets exactly.
    assert coincidence([[18], [18]], 30).p == pytest.approx(1 / 25)
    assert coincidence([[18], [19]], 30).p == pytest.approx(3 / 25)
    assert coincidence([[18], [24]], 30).p == 1.0
    assert coincidence([[18], [18], [18]], 30).p == pytest.approx(1 / 25**2)
    assert coincidence([[18], [18]], 30).together == (18,)


def test_coincidence_by_chance_is_as_rare_as_its_p() -> None:
    rng = np.random.default_rng(SEED)
    p = [coincidence([[int(a)], [int(b)]], 60).p for a, b in rng.integers(5, 56, (2000, 2))]
    share = np.mean(np.array(p) <= 0.1)
    assert share <= 0.1 + 3 * np.sqrt(0.09 / 2000), f"seed {SEED}: {share}"


@pytest.mark.parametrize(
    ("values", "text"),
    [([1.0] * 5, "at least 8"), ([1.0] * 9 + [float("nan")], "position 9"), ([[1.0] * 9], "one row")],
)
def test_what_is_no_series_is_refused(values: list[float], text: str) -> None:
    with pytest.raises(LabError, match=text):
        find_changes(values)


def test_a_series_too_long_is_refused_with_what_to_do() -> None:
    with pytest.raises(LabError, match="take means of 3 in a row"):
        find_changes(np.arange(5000.0))


def test_coincidence_refuses_what_has_no_change() -> None:
    with pytest.raises(LabError, match="series 2 has no change"):
        coincidence([[5], []], 30)
    with pytest.raises(LabError, match="outside"):
        coincidence([[5], [29]], 30)
