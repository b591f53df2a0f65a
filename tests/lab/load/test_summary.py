"""The few figures of a load: what so many requests can say, and no more."""

from __future__ import annotations

import pytest

from kvik_lab.load.summary import lines, summarise
from tests.lab.test_records import request


@pytest.mark.parametrize(
    ("count", "known", "said"),
    [
        (3, [], " (p50 takes 4 values, p90 takes 20 values, p95 takes 40 values, p99 takes 200 values)"),
        (19, ["p50"], " (p90 takes 20 values, p95 takes 40 values, p99 takes 200 values)"),
        (30, ["p50", "p90"], " (p95 takes 40 values, p99 takes 200 values)"),
        (40, ["p50", "p90", "p95"], " (p99 takes 200 values)"),
        (200, ["p50", "p90", "p95", "p99"], ""),
    ],
)
def test_a_percentile_takes_two_values_beyond_it(count: int, known: list[str], said: str) -> None:
    figures = summarise([request(i, 1.0, 0.1 + 0.001 * i, 0.6) for i in range(count)])
    for metric in ("load_ttft", "load_e2e", "load_tpot", "load_itl"):
        assert [one.statistic for one in figures if one.metric == metric] == ["mean", *known]
    shown = lines(figures)
    (ttft,) = (line for line in shown if line.split()[0] == "ttft")
    assert ttft.partition(" (")[1:] == (said[:2], said[2:])
    assert not any("takes" in line for line in shown if line.split()[0] in ("failed", "throughput"))
