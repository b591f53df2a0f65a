"""The tables of `bench/store_stages.py` and `bench/vllm_store.py`."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.python.benches import bench


@pytest.fixture(scope="module")
def stage_table() -> ModuleType:
    return bench("stage_table")


def test_a_source_is_the_mean_of_its_stages(stage_table: ModuleType) -> None:
    stages = stage_table.Stages("requests/s", 1, rising=True)
    for number, source in enumerate(stage_table.SOURCES):
        for figure in (10.0 * number + 1.0, 10.0 * number + 2.0):
            stages.add(f"{number} first", source, figure)
            stages.add(f"{number} second", source, figure + 2.0)
            stages.add(f"{number} killed", source, 0.0)
    by_source = stages.by_source(without="killed")
    assert "| recompute | 2.5 | -3.9 to 8.9 | - | 2 |" in by_source
    by_stage = stages.by_stage(longest=dict.fromkeys(stages.figures, 99.0))
    assert "| 0 first | recompute | 1.5 | 99.0 |" in by_stage
    assert by_stage.count("\n") == 13


@pytest.mark.parametrize("rising", [True, False])
def test_a_slow_round_is_slow_for_all(stage_table: ModuleType, rising: bool) -> None:
    """So sources may be in their order in each round although their intervals are not apart."""
    for step, said in ((1.2, "yes"), (1.0, "NO"), (0.8, "NO")):
        stages = stage_table.Stages("s", 3, rising=rising)
        for number, source in enumerate(stage_table.SOURCES):
            for of_round, noise in ((1.0, 1.0), (9.0, 1.01), (3.0, 0.99)):
                figure = of_round * noise**number * step**number
                stages.add(source, source, figure if rising else 1 / figure)
        by_source = stages.by_source()
        assert f"by rounds, in this order: {said}" in by_source
        assert by_source.endswith("intervals apart, in this order: NO")


@pytest.mark.parametrize("rising", [True, False])
def test_intervals_are_apart_in_the_order_of_speed(stage_table: ModuleType, rising: bool) -> None:
    figures = {source: [10.0 ** (4 + number), 10.0 ** (4 + number) + 1.0]
               for number, source in enumerate(stage_table.SOURCES)}  # fmt: skip
    for turned in (False, True):
        stages = stage_table.Stages("s", 3, rising=rising)
        values = list(figures.values())
        for source, samples in zip(figures, reversed(values) if turned else values, strict=True):
            for sample in samples:
                stages.add(source, source, sample)
        assert stages.by_source().endswith("yes" if rising != turned else "NO")
