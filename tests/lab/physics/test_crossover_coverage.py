"""The crossover's set holds the true crossover as often as it says, from simulation."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytest

from kvik_lab.physics.crossover import crossover, plausible
from kvik_lab.physics.curve import curve
from kvik_lab.physics.data import Samples
from tests.lab.physics.simulate import FULL, Floats, Transport, line

RUNS = 10_000 if FULL else 1_000
SIZES = np.array([1e6, 3e6, 1e7, 3e7, 1e8])


@dataclass(frozen=True)
class Scenario:
    """Two transports, what is measured of each, and where their true means cross."""

    name: str
    first: Transport
    second: Transport
    crossing: float
    method: Literal["line", "interpolate"] = "line"
    sizes: tuple[float, ...] = tuple(SIZES)
    repeats: int = 10
    starts: int = 1


def _bent(size: Floats) -> Floats:
    return np.asarray(np.interp(size, SIZES, [1.2e-3, 3.4e-3, 8.0e-3, 4.0e-2, 1.1e-1]))


def _bent_more(size: Floats) -> Floats:
    return np.asarray(np.interp(size, SIZES, [3.0e-3, 4.4e-3, 8.0e-3, 3.0e-2, 0.9e-1]))


TCP, EFA = line(1e-3, 1e9), line(3e-3, 2e9)  # cross at 4 MB
STEEP = line(1e-3, 1e9)
ALMOST = line(4e-3, 1.045e9)  # crosses STEEP at 69.7 MB, at an angle that noise hides
SCENARIOS = (
    Scenario("equal noise", Transport(TCP, 0.05), Transport(EFA, 0.05), 4e6),
    Scenario("unequal noise", Transport(TCP, 0.03), Transport(EFA, 0.15), 4e6, repeats=5),
    Scenario("noise not proportional", Transport(TCP, absolute=2e-4), Transport(EFA, absolute=8e-4), 4e6),
    Scenario(
        "two sizes",
        Transport(TCP, 0.05),
        Transport(EFA, 0.1),
        4e6,
        method="interpolate",
        sizes=(1e6, 1e8),
        repeats=8,
    ),
    Scenario("one repeat a size", Transport(TCP, 0.05), Transport(EFA, 0.05), 4e6, repeats=1),
    Scenario(
        "almost parallel, sets unbounded",
        Transport(STEEP, 0.05),
        Transport(ALMOST, 0.05),
        3e-3 / (1e-9 - 1 / 1.045e9),
        repeats=6,
    ),
    Scenario(
        "no line, at the edge of a piece",
        Transport(_bent, 0.05),
        Transport(_bent_more, 0.05),
        1e7,
        method="interpolate",
    ),
    Scenario(
        "server starts vary",
        Transport(TCP, 0.03, start=0.06),
        Transport(EFA, 0.03, start=0.06),
        4e6,
        repeats=4,
        starts=4,
    ),
)


def _measure(scenario: Scenario, rng: np.random.Generator) -> tuple[Samples, Samples]:
    sizes = np.array(scenario.sizes)
    first, second = (
        transport.measure(rng, sizes, scenario.repeats, scenario.starts, name)
        for transport, name in ((scenario.first, "first"), (scenario.second, "second"))
    )
    return first, second


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_the_nominal_95_percent_set_covers_between_92_and_98_percent(scenario: Scenario) -> None:
    rng = np.random.default_rng(20260101)
    at = np.array([scenario.crossing])
    assert scenario.first.truth(at)[0] == pytest.approx(scenario.second.truth(at)[0])
    hits = 0
    for _ in range(RUNS):
        first, second = (curve(data, scenario.method) for data in _measure(scenario, rng))
        hits += bool(plausible(first, second, at)[0])
    share = hits / RUNS
    error = float(np.sqrt(share * (1 - share) / RUNS))
    print(f"{scenario.name}: covers {share:.4f} +- {error:.4f} ({RUNS} runs, seed 20260101)")
    assert 0.92 <= share <= 0.98, f"{share:.4f} +- {error:.4f}"


def test_the_shown_stretches_are_the_tested_set_where_crossings_are_hard_to_see() -> None:
    """What is printed (bounded, open to a side, everything) is the same set; and each kind occurs."""
    rng = np.random.default_rng(7)
    scenario = next(item for item in SCENARIOS if item.name.startswith("almost parallel"))
    kinds: Counter[str] = Counter()
    probe = np.geomspace(1e5, 1e10, 41)
    hits = 0
    for _ in range(60):
        first, second = _measure(scenario, rng)
        found = crossover(first, second, method="line", draws=10)
        assert not isinstance(found.region, tuple)
        kinds[type(found.region).__name__] += 1
        hits += found.region.contains(scenario.crossing)
        expected = plausible(curve(first, "line"), curve(second, "line"), probe)
        assert [found.region.contains(float(size)) for size in probe] == expected.tolist()
    print(f"kinds {dict(kinds)}, covers {hits / 60:.2f} (60 runs, seed 7)")
    assert hits >= 51
    assert kinds["Bounded"]
    assert kinds["AboveOnly"]


def test_choosing_lines_or_pieces_by_their_fit_keeps_the_coverage() -> None:
    rng = np.random.default_rng(11)
    runs, hits = 300, 0
    for _ in range(runs):
        found = crossover(*_measure(SCENARIOS[0], rng), draws=2)
        assert not isinstance(found.region, tuple)
        hits += found.region.contains(4e6)
    assert hits / runs >= 0.92 - 2 * np.sqrt(0.05 * 0.95 / runs), f"{hits} of {runs}, seed 11"


def test_repeats_of_few_starts_taken_as_independent_cover_far_too_rarely() -> None:
    """Why starts are asked for: the same data without them."""
    scenario = next(item for item in SCENARIOS if item.starts > 1)
    rng = np.random.default_rng(3)
    runs, hits = 400, 0
    for _ in range(runs):
        blind = [Samples(data.name, data.unit, data.size, data.seconds) for data in _measure(scenario, rng)]
        first, second = (curve(data, "line") for data in blind)
        hits += bool(plausible(first, second, np.array([4e6]))[0])
    print(f"without starts: covers {hits / runs:.3f} ({runs} runs, seed 3)")
    assert hits / runs < 0.85
