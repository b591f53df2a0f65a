"""Factor effects: models against simulated truths, and a published unreplicated design."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from kvik_lab.errors import LabError
from kvik_lab.infer.model import anova, clustered_runs, independent_runs, lenth, random_starts

SEED = 14


def runs(
    starts: int = 6, iterations: int = 10, between: float = 0.05, within: float = 0.02, seed: int = SEED
) -> pd.DataFrame:
    """Two backends on starts of their own, two sizes within each: B is 0.9 of A, size 4000 twice 2000, and B
    gains another 0.95 at 4000."""
    rng = np.random.default_rng(seed)
    rows = []
    for start in range(2 * starts):
        backend = "AB"[start % 2]
        level = between * rng.standard_normal()
        for i in range(iterations):
            tokens = "4000" if i % 2 else "2000"
            log = math.log(100.0) + level + within * rng.standard_normal()
            log += math.log(0.9) * (backend == "B") + math.log(2) * (tokens == "4000")
            log += math.log(0.95) * (backend == "B" and tokens == "4000")
            rows.append((start, backend, tokens, math.exp(log)))
    return pd.DataFrame(rows, columns=["start", "backend", "tokens", "ttft"])


def test_random_starts_judge_the_backend_by_starts_and_the_size_by_iterations() -> None:
    found = random_starts(runs(), "ttft", "backend * tokens")
    backend, tokens = found.get("backend[T.B]"), found.get("tokens[T.4000]")
    assert backend.degrees == 10
    assert tokens.degrees == 120 - 12 - 2
    assert tokens.low < 2.0 < tokens.high
    assert found.get("backend[T.B]:tokens[T.4000]").high < 1.0
    assert math.log(backend.high / backend.low) > 3 * math.log(tokens.high / tokens.low)
    assert found.between == pytest.approx(0.05, rel=0.6)
    assert found.within == pytest.approx(0.02, rel=0.2)
    assert not found.notes


def test_a_mixed_models_interval_holds_a_backends_ratio_and_least_squares_alone_does_not() -> None:
    held = alone = 0
    for seed in range(16):
        data = runs(4, 6, seed=seed)
        effect = random_starts(data, "ttft", "backend + tokens").get("backend[T.B]")
        plain = independent_runs(data, "ttft", "backend + tokens").get("backend[T.B]")
        truth = 0.9 * math.sqrt(0.95)
        held += effect.low <= truth <= effect.high
        alone += plain.low <= truth <= plain.high
    assert held >= 13
    assert alone <= 12


def test_a_boundary_fit_is_said_and_start_means_are_used() -> None:
    data = runs(between=0.0)
    # Within each start the deviations sum to zero: starts differ less than chance, and the fit ends at zero.
    log = np.log(data["ttft"]) - np.log(data["ttft"]).groupby(data["start"]).transform("mean")
    data["ttft"] = np.exp(log + math.log(100) + math.log(0.9) * (data["backend"] == "B"))
    found = random_starts(data, "ttft", "backend * tokens")
    assert "start means" in found.notes[0]
    assert "two strata" in found.method
    backend = found.get("backend[T.B]")
    assert backend.degrees == 10


def test_two_strata_give_the_t_test_of_start_means() -> None:
    data = runs(between=0.0, seed=3)
    found = random_starts(data, "ttft", "backend")
    means = np.log(data["ttft"]).groupby(data["start"]).mean().to_numpy()
    ratio = math.exp(means[1::2].mean() - means[::2].mean())
    assert found.get("backend[T.B]").ratio == pytest.approx(ratio)


def test_effects_of_independent_runs_are_ratios() -> None:
    rng = np.random.default_rng(SEED)
    size = np.repeat([1.0, 2.0, 3.0], 20)
    data = pd.DataFrame({"size": size, "t": np.exp(0.3 * size + 0.05 * rng.standard_normal(60))})
    effect = independent_runs(data, "t", "size").get("size")
    assert effect.low < math.exp(0.3) < effect.high
    assert effect.degrees == 58
    rows = anova(data, "t", "C(size)")
    assert rows[0].degrees == 2
    assert rows[0].p < 1e-10
    assert rows[-1].term == "Residual"


def test_clusters_are_counted_and_few_of_them_are_said() -> None:
    found = clustered_runs(runs(), "ttft", "backend * tokens")
    assert found.get("backend[T.B]").degrees == 11
    assert "12 starts" in found.notes[0]


@pytest.mark.parametrize(
    ("formula", "text"),
    [
        ("backend + backen", "cannot be made"),
        ("backend + tokens + twin", "tell 3 apart"),
        ("C(start) * C(tokens) * C(number)", "apart|leave none"),
    ],
)
def test_models_that_cannot_be_estimated_are_refused(formula: str, text: str) -> None:
    data = runs()
    data["twin"] = (data["backend"] == "B").astype(float)
    data["number"] = np.arange(len(data))
    data = data.head(24) if "number" in formula else data
    with pytest.raises(LabError, match=text):
        independent_runs(data, "ttft", formula)


def test_one_start_an_arm_has_no_error_to_judge_a_backend_by() -> None:
    with pytest.raises(LabError, match="replicate starts"):
        random_starts(runs(1), "ttft", "backend + tokens")


def test_times_that_are_not_positive_have_no_ratio() -> None:
    data = runs()
    data.loc[3, "ttft"] = 0.0
    with pytest.raises(LabError, match="above zero"):
        independent_runs(data, "ttft", "backend")
    with pytest.raises(LabError, match="no column 'tpot'"):
        independent_runs(data, "tpot", "backend")


def test_lenths_method_finds_the_two_effects_that_stand_out_of_fifteen() -> None:
    # By hand: the median is 0.15, so s0 = 0.225; without those beyond 2.5 s0 it is 0.15 again. The factors
    # are t at 5 degrees: 2.571, and 5.219 for fifteen at once (Lenth 1989, Technometrics 31, table 1).
    names = ["D", "H", "DH", "G", "C2", "GH", "E", "A", "e1", "J", "F", "AC", "e2", "C", "B"]
    values = [0.13, 0.15, 0.30, 0.15, 0.40, 0.025, 0.38, 0.13, 0.05, 0.15, 0.13, 0.08, 0.43, 2.15, 3.10]
    found = lenth(dict(zip(names, values, strict=True)))
    assert found.pse == pytest.approx(0.225)
    assert set(found.active) == {"B", "C"}
    assert found.margin == pytest.approx(2.571 * 0.225, rel=1e-3)
    assert found.simultaneous == pytest.approx(5.219 * 0.225, rel=1e-3)
    with pytest.raises(LabError, match="at least 3"):
        lenth({"A": 1.0, "B": 2.0})
