"""Crossovers: what kind of answer data can give, and what they cannot."""

from __future__ import annotations

import numpy as np
import pytest

from kvik_lab.errors import LabError
from kvik_lab.physics.crossover import (
    AboveOnly,
    Bounded,
    Bracket,
    Everywhere,
    NoCrossing,
    Several,
    crossover,
)
from kvik_lab.physics.data import Samples, Summary, parse_measured
from kvik_lab.physics.sentences import crossover_sentences
from tests.lab.physics.resample import bootstrap_crossover
from tests.lab.physics.simulate import Transport, line

SIZES = np.array([1e6, 3e6, 1e7, 3e7, 1e8])
# "EFA vs TCP: KV-Cache 転送性能の徹底比較": phase 13, means of the time to the first token in ms.
PHASE_13 = {1000: (668.33, 679.33), 2048: (1717.07, 1646.16), 3800: (3161.41, 3058.02)}


def _table(column: int, name: str) -> Summary:
    text = "tokens,mean_ms\n" + "\n".join(f"{tokens},{row[column]}" for tokens, row in PHASE_13.items())
    data = parse_measured(text, name)
    assert isinstance(data, Summary)
    return data


def test_a_published_table_of_means_gives_a_bracket_and_says_why_there_is_no_interval() -> None:
    found = crossover(_table(0, "TCP"), _table(1, "EFA"))
    assert found.region == (Bracket(1000, 2048),)
    # By hand: +11.00 ms at 1,000 and -70.91 ms at 2,048 tokens.
    assert list(found.estimates) == pytest.approx([1000 + 1048 * 11.00 / 81.91])
    assert found.none_in_range is None
    text = " ".join(crossover_sentences(found))
    assert "No interval is possible" in text
    assert "between 1,000 tokens and 2,048 tokens" in text


def test_the_same_table_with_the_spread_of_its_iterations_gives_no_bound() -> None:
    """With the spread that the article's own steps imply (over 10 %), no size is excluded."""
    tables = []
    for column, name in ((0, "TCP"), (1, "EFA")):
        rows = "\n".join(f"{t},{row[column]},{0.12 * row[column]},30" for t, row in PHASE_13.items())
        tables.append(parse_measured("tokens,mean_ms,sd,n\n" + rows, name))
    found = crossover(*tables)
    assert isinstance(found.region, Everywhere)
    assert found.none_in_range is not None
    assert found.none_in_range > 0.05


def test_two_exact_lines_cross_where_algebra_says() -> None:
    rng = np.random.default_rng(1)
    tcp = Transport(line(1e-3, 1e9), 1e-4).measure(rng, SIZES, 5, name="tcp")
    efa = Transport(line(3e-3, 2e9), 1e-4).measure(rng, SIZES, 5, name="efa")
    found = crossover(tcp, efa)
    assert list(found.estimates) == pytest.approx([4e6], rel=1e-3)
    assert isinstance(found.region, Bounded)
    assert found.region.lo < 4e6 < found.region.hi
    assert found.region.hi / found.region.lo < 1.01
    assert found.none_in_range == 0


def test_the_set_of_two_lines_is_fiellers() -> None:
    """Against the closed form, where variances are known: roots of d(x)^2 = z^2 var d(x)."""
    size = np.array([1e6, 1e8])
    sure = np.full(2, np.inf)
    first = Summary("a", "bytes", size, np.array([2e-3, 1.01e-1]), np.array([1e-4, 2e-3]), sure)
    second = Summary("b", "bytes", size, np.array([3.5e-3, 5.3e-2]), np.array([2e-4, 1e-3]), sure)
    found = crossover(first, second, method="line")
    to_line = np.linalg.inv(np.column_stack([np.ones(2), size]))
    gap = to_line @ (first.seconds - second.seconds)
    assert first.error is not None
    assert second.error is not None
    covariance = to_line @ np.diag(first.error**2 + second.error**2) @ to_line.T
    z2 = 1.959964**2
    roots = np.roots(
        [
            gap[1] ** 2 - z2 * covariance[1, 1],
            2 * (gap[0] * gap[1] - z2 * covariance[0, 1]),
            gap[0] ** 2 - z2 * covariance[0, 0],
        ]
    )
    assert isinstance(found.region, Bounded)
    assert [found.region.lo, found.region.hi] == pytest.approx(sorted(roots), rel=1e-3)


def test_transports_that_never_cross_say_which_is_faster() -> None:
    rng = np.random.default_rng(2)
    slow = Transport(line(2e-3, 1e9), 0.02).measure(rng, SIZES, 10, name="slow")
    fast = Transport(line(1e-3, 2e9), 0.02).measure(rng, SIZES, 10, name="fast")
    found = crossover(slow, fast, method="interpolate")
    assert found.region == NoCrossing("fast", 1e6, 1e8)
    assert found.estimates == ()
    assert found.none_in_range == 1.0
    assert found.faster_throughout == (0.0, 1.0)


def test_a_crossing_beyond_the_measured_sizes_is_open_above() -> None:
    rng = np.random.default_rng(4)
    first = Transport(line(1e-3, 1e9), 0.02).measure(rng, SIZES, 10, name="first")
    second = Transport(line(8e-2, 2e9), 0.10).measure(rng, SIZES, 10, name="second")  # crosses at 158 MB
    found = crossover(first, second, method="interpolate")
    assert isinstance(found.region, AboveOnly | NoCrossing)
    lines = crossover(first, second, method="line")
    assert not isinstance(lines.region, tuple)
    assert lines.region.contains(1.58e8)


def test_transports_that_cross_twice_have_two_stretches() -> None:
    size = np.array([1e6, 1e7, 1e8])
    error, freedom = np.full(3, 1e-4), np.full(3, 20.0)
    first = Summary("a", "bytes", size, np.array([5e-3, 9e-3, 9e-2]), error, freedom)
    second = Summary("b", "bytes", size, np.array([3e-3, 1.2e-2, 8e-2]), error, freedom)
    found = crossover(first, second)
    assert len(found.estimates) == 2
    assert isinstance(found.region, Several)
    assert all(found.region.contains(estimate) for estimate in found.estimates)
    assert not found.region.contains(1e7)


def test_the_bootstrap_agrees_with_the_inverted_test_where_repeats_are_many() -> None:
    rng = np.random.default_rng(5)
    first = Transport(line(1e-3, 1e9), 0.05).measure(rng, SIZES, 60, name="first")
    second = Transport(line(3e-3, 2e9), 0.05).measure(rng, SIZES, 60, name="second")
    drawn = bootstrap_crossover(first, second)
    tested = crossover(first, second, method="interpolate")
    assert isinstance(drawn.region, Bounded)
    assert isinstance(tested.region, Bounded)
    assert drawn.region.lo == pytest.approx(tested.region.lo, rel=0.05)
    assert drawn.region.hi == pytest.approx(tested.region.hi, rel=0.05)
    assert drawn.note is None


def test_the_bootstrap_is_wider_with_starts_and_says_that_few_are_few() -> None:
    rng = np.random.default_rng(6)
    first = Transport(line(1e-3, 1e9), 0.02, start=0.1).measure(rng, SIZES, 10, starts=5, name="first")
    second = Transport(line(3e-3, 2e9), 0.02, start=0.1).measure(rng, SIZES, 10, starts=5, name="second")
    with_starts = bootstrap_crossover(first, second, draws=500)
    blind = [Samples(data.name, data.unit, data.size, data.seconds) for data in (first, second)]
    without = bootstrap_crossover(*blind, draws=500)
    assert with_starts.note is not None
    assert isinstance(with_starts.region, Bounded)
    assert isinstance(without.region, Bounded)
    assert with_starts.region.hi - with_starts.region.lo > 2 * (without.region.hi - without.region.lo)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bytes,seconds\n1,x\n", "line 1, column seconds: 'x' is no number"),
        ("bytes,seconds\n1\n", "data line 1 has 1 cells"),
        ("bytes,speed\n1,2\n", "column 'speed' is not known"),
        ("bytes,sd\n1,2\n", "lacks a time"),
        ("bytes,seconds\n", "no data"),
        ("bytes,seconds\n-1,2\n", "size is a number above 0"),
        ("bytes,seconds\n1,nan\n", "seconds is a number above 0"),
        ("bytes,seconds\n1e308,1\n", "size is a number above 0, and below 1e"),
        ("bytes,mean_ms\n1,inf\n2,3\n", "sizes and mean times are numbers above 0, and below 1e"),
        ("bytes,mean_ms,sd\n1,2,1\n", "add n, or give se"),
        ("bytes,ms,sd\n1,2,1\n", "name the time mean_ms"),
        ("bytes,mean_ms\n1,2\n1,3\n", "each once"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused_with_the_place(text: str, said: str) -> None:
    with pytest.raises(LabError, match=said):
        parse_measured(text, "x")


def test_starts_that_lack_a_size_are_named() -> None:
    data = parse_measured("bytes,seconds,start\n1,1,a\n2,2,a\n1,1,b\n1,2,b\n2,2,a\n", "x")
    with pytest.raises(LabError, match=r"start 'b' has no measurement of 2 bytes"):
        crossover(data, data)


def test_repeats_that_are_equal_to_the_last_digit_give_no_interval() -> None:
    text = "bytes,seconds\n" + "1e6,{0}\n2e6,{1}\n3e6,{2}\n" * 4
    first = parse_measured(text.format(1, 2, 3), "first")
    second = parse_measured(text.format(2, 2.5, 2.6), "second")
    found = crossover(first, second)
    assert found.region == (Bracket(2e6, 3e6),)
    assert any("equal to the last digit" in note for note in found.notes)
