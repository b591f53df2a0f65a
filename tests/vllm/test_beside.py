"""What `bench/vllm_beside.py` makes of its raw data, and what it calls invalid; without a server."""

import argparse
import json
import os
from types import ModuleType
from typing import Any

import pytest

from tests.python.benches import bench

LENGTHS = (513, 2049)
PROMPTS = 2


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    return bench("vllm_beside_figures")


@pytest.fixture(scope="module")
def beside() -> ModuleType:
    return bench("vllm_beside")


def cell(arm: str, start: int, added: float) -> dict[str, Any]:
    """A start in which each handover adds so many seconds."""
    sides = ("decode",) if arm == "none" else ("prefill", "decode")
    request: dict[str, Any] = {
        "ttft_s": 0.01 + added, "cached_s": 0.01, "tokens": [5, 6], "cached_tokens": [5, 6],
        "ttft_cpu_s": dict.fromkeys(sides, 0.03), "cached_cpu_s": dict.fromkeys(sides, 0.01),
    }  # fmt: skip
    if arm != "none":
        request["prefill_s"] = 0.2
    cores = dict.fromkeys((*sides, "client", "others"), 0.1)
    return {
        "start": start, "arm": arm, "first_s": 0.5, "idle_cores": cores, "busy_cores": cores,
        "elsewhere": dict.fromkeys(sides, 0), "faults": [],
        "requests": [request | {"length": length} for length in LENGTHS for _ in range(PROMPTS)],
    }  # fmt: skip


def raw_of(starts: int = 5) -> dict[str, Any]:
    """A run in which kvik adds half of what NIXL does, give or take."""
    arms = {"kvik": 0.5, "nixl": 1.0, "none": 9.0}
    cells = [
        cell(arm, start, 0.01 * much * (1 + 0.01 * start * (arm == "nixl")))
        for start in range(starts)
        for arm, much in arms.items()
    ]
    settings = {
        "arms": list(arms), "lengths": list(LENGTHS), "prompts": PROMPTS, "seed": 1, "tokens": 2,
        "transport": "auto", "cores": "shared", "nixl_threads": None,
    }  # fmt: skip
    names = ("vllm", "kvik", "nixl", "cpu_model", "cores_usable")
    return {"settings": settings, "cells": cells, "facts": dict.fromkeys(names, "1")}


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.706), (2, 4.303), (4, 2.776), (5, 2.571), (30, 2.042)]
)
def test_intervals_are_students(figures: ModuleType, freedom: int, quantile: float) -> None:
    assert figures.t_quantile(freedom) == pytest.approx(quantile, abs=6e-4)


def test_a_ratio_is_of_rounds_and_is_judged_by_its_interval(figures: ModuleType) -> None:
    found = figures.ratio([1.0, 2.0, 4.0], [2.0, 4.0, 8.0])
    assert found.value == pytest.approx(0.5)
    assert found.interval == pytest.approx((0.5, 0.5))
    assert figures.judged(found) == "met"
    assert figures.judged(figures.ratio([1.0, 1.0, 1.01], [1.0, 1.01, 1.0])) == "missed"
    assert figures.judged(figures.ratio([0.5, 0.9], [1.0, 1.0])).startswith("open")
    assert figures.judged(figures.ratio([0.5], [1.0])).startswith("open")
    assert figures.ratio([0.0, 0.5], [1.0, 1.0]) is None, "nothing was added: no ratio of that"


def test_a_sound_run_is_reported_with_its_ratios(figures: ModuleType) -> None:
    raw = raw_of()
    assert figures.invalid(raw) == {}
    text = figures.report(raw)
    assert "INVALID" not in text
    assert text.count("| met |") == len(LENGTHS)
    assert "| 513 | kvik | 5 | 5.00 (5.00 to 5.00) | 15.00 (15.00 to 15.00) | 10.00 " in text


def test_other_tokens_make_an_arm_invalid(figures: ModuleType) -> None:
    raw = raw_of()
    next(cell for cell in raw["cells"] if cell["arm"] == "kvik")["requests"][1]["tokens"] = [5, 7]
    assert list(figures.invalid(raw)) == ["kvik"]
    text = figures.report(raw)
    assert "INVALID kvik: start 0: 1 answers with other tokens" in text
    assert "| met |" not in text
    assert "not judged" in text


def test_tokens_that_nothing_was_compared_with_are_said(figures: ModuleType) -> None:
    raw = raw_of()
    raw["cells"] = [one for one in raw["cells"] if one["arm"] != "none" or one["start"] != 2]
    assert "tokens not compared, since `none` has not run: starts 2" in figures.report(raw)


@pytest.mark.parametrize("change", ["recomputed", "failed", "moved nothing", "cache", None])
def test_a_handover_that_was_none_is_a_fault(beside: ModuleType, change: str | None) -> None:
    one = cell("kvik", 0, 0.01)
    arm = beside.ARMS["kvik"]
    counted = dict.fromkeys((*beside.FAILURES, *beside.MOVED.values()), 0.0)
    counted[beside.MOVED["kvik"]] = 1e6
    counted[beside.COMPUTED] = len(one["requests"])  # the last token of each from the cache
    one["counted"] = counted
    if change == "recomputed":
        counted[beside.COMPUTED] += 513
    elif change == "failed":
        counted["vllm:kvik_loads_failed_total"] = 1.0
    elif change == "moved nothing":
        counted[beside.MOVED["kvik"]] = 0.0
    elif change == "cache":
        one["requests"][0]["cached_tokens"] = [1, 1]
    assert len(beside.faults_of(one, arm)) == (change is not None)


def test_what_decode_computes_by_itself(beside: ModuleType) -> None:
    lengths = [513, 512, 1]
    from_cache = 1 + 128 + 1
    assert beside.expected_computed(lengths, beside.ARMS["kvik"]) == from_cache
    assert beside.expected_computed(lengths, beside.ARMS["none"]) == from_cache + sum(lengths)


def test_going_on_does_what_is_missing_in_the_same_order(beside: ModuleType) -> None:
    settings = argparse.Namespace(seed=7, starts=3, arms=["kvik", "nixl", "none"], out=None)
    raw: dict[str, Any] = {"cells": []}
    run = beside.Run(settings, raw)
    wanted = run.missing()
    assert sorted(wanted) == sorted((start, arm) for start in range(3) for arm in settings.arms)
    raw["cells"] += [{"start": start, "arm": arm} for start, arm in wanted[:4]]
    assert run.missing() == wanted[4:]


def test_a_start_that_breaks_off_ends_its_arm_alone(
    beside: ModuleType, figures: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = raw_of(3)
    raw["cells"] = [one for one in raw["cells"] if (one["arm"], one["start"]) != ("nixl", 2)]
    settings = argparse.Namespace(seed=7, starts=3, arms=["kvik", "nixl", "none"], out=None)
    run = beside.Run(settings, raw)

    def hangs() -> dict[str, Any]:
        raise TimeoutError("no answer in 60 s")

    run.keep(2, "nixl", hangs)
    assert "start 2 nixl: broke off: TimeoutError: no answer in 60 s" in capsys.readouterr().out
    assert run.missing() == []
    assert list(figures.invalid(raw)) == ["nixl"]
    text = figures.report(raw)
    assert "INVALID nixl: start 2 broke off: TimeoutError: no answer in 60 s" in text
    assert "| met |" not in text
    raw["cells"] = []
    assert figures.report(raw).startswith("no start has ended\n\nINVALID nixl")


def test_all_arms_of_a_round_are_asked_the_same(beside: ModuleType) -> None:
    one, again, next_round = (beside.plan_of(7, start, LENGTHS, 3) for start in (0, 0, 1))
    assert one == again != next_round
    assert sorted(map(len, one[beside.WARM_UP :])) == [513] * 3 + [2049] * 3


def test_nixl_is_configured_as_vllm_wants(beside: ModuleType) -> None:
    settings = argparse.Namespace(transport="auto", nixl_threads=2)
    decode, prefill = beside._specs(beside.ARMS["nixl"], settings, "/nowhere", (1, 2))
    config = json.loads(prefill.connector.config())
    assert (config["kv_connector"], config["kv_role"]) == ("NixlConnector", "kv_producer")
    assert "kv_connector_module_path" not in config
    assert config["kv_connector_extra_config"] == {"num_threads": 2}
    ports = {one.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] for one in (decode, prefill)}
    assert ports == {"1", "2"}
    assert [one.name for one in beside._specs(beside.ARMS["none"], settings, "/nowhere", (1, 2))] == [
        "decode"
    ]


def test_cores_apart_are_all_cores(beside: ModuleType) -> None:
    ours = os.sched_getaffinity(0)
    assert set(beside.cores_of("shared")) == {"prefill", "decode"}
    assert all(cores == ours for cores in beside.cores_of("shared").values())
    prefill, decode = beside.cores_of("apart").values()
    assert prefill | decode == ours
    assert not prefill & decode
