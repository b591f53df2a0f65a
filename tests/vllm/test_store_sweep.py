"""What `bench/vllm_store_sweep.py` makes of its raw data, and what it calls invalid; without a server."""

import argparse
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.python.benches import bench

SHARES = [0.0, 0.5, 1.0]
PROMPTS = 2
SECONDS = {"none": 4.0, "first": 2.0, "second": 1.0}
FACTS = {"vllm": "1", "kvik": "1", "cpu_model": "a processor", "cores_usable": 2, "load_1min": 0.1}


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    return bench("vllm_sweep_figures")


@pytest.fixture(scope="module")
def sweep() -> ModuleType:
    return bench("vllm_store_sweep")


def point(figures: ModuleType, share: float, which: str, seconds: float) -> dict[str, Any]:
    """A pass that is what it is said to be."""
    blocks = figures.stored_blocks(share)
    computed = {"none": figures.PROMPT, "first": figures.PROMPT - blocks * figures.BLOCK_TOKENS, "second": 1}
    return {
        "pass": which, "share": share, "seconds": seconds, "ttft_s": [seconds / PROMPTS] * PROMPTS,
        "tokens": [[1, 2], [3, 4]], "computed": float(PROMPTS * computed[which]), "host": 0.0,
        "remote": float(PROMPTS * blocks if which == "first" else 0),
    }  # fmt: skip


def hits(figures: ModuleType) -> dict[str, Any]:
    """Three rounds, each a little slower than the one before."""
    cells = [
        {
            "round": number,
            "points": [
                point(figures, share, which, seconds * (1 + 0.01 * number))
                for share in SHARES
                for which, seconds in SECONDS.items()
            ],
        }
        for number in range(3)
    ]
    return {"settings": {"shares": SHARES, "seed": 1}, "cells": cells, "facts": FACTS}


def test_hits_have_a_rate_of_each_pass(figures: ModuleType) -> None:
    raw = hits(figures)
    assert figures.invalid_shares(raw) == {}
    report = figures.hits_report(raw)
    assert "INVALID" not in report
    row = next(line for line in report.splitlines() if line.startswith("| 0.5 |"))
    assert row.startswith("| 0.5 | 0.50 | 0.50 (0.48 to 0.51) | 0.99 (")
    assert row.endswith("| 2.00 (2.00 to 2.00) |")


@pytest.mark.parametrize(
    ("which", "name", "value"),
    [
        ("none", "remote", 1.0),
        ("first", "remote", 8.0),
        ("first", "computed", 5.0),
        ("first", "host", 1.0),
        ("first", "tokens", [[], [3, 4]]),
        ("second", "computed", 3.0),
        ("second", "tokens", [[1, 2], [3, 5]]),
    ],
)
def test_a_share_is_invalid_that_is_not_what_it_is_said_to_be(
    figures: ModuleType, which: str, name: str, value: object
) -> None:
    raw = hits(figures)
    points = {(one["share"], one["pass"]): one for one in raw["cells"][1]["points"]}
    points[0.5, which][name] = value
    assert list(figures.invalid_shares(raw)) == [0.5]
    report = figures.hits_report(raw)
    rows = {share: next(line for line in report.splitlines() if line.startswith(f"| {share} |"))
            for share in SHARES}  # fmt: skip
    assert [row.count("invalid") for row in rows.values()] == [0, 7, 0]
    assert "INVALID share 0.5: round 1" in report


def test_a_pass_that_is_not_there_is_said(figures: ModuleType) -> None:
    raw = hits(figures)
    del raw["cells"][2]["points"][-1]
    assert figures.invalid_shares(raw) == {1.0: ["round 2, second pass: it was not measured"]}


def cell(figures: ModuleType, steps: int, stored: float | None = 3.0) -> dict[str, Any]:
    """A pair of servers whose store costs 5 %, and half as much again until the blocks are there."""
    turns = [
        {"pair": pair, "arm": arm, "seconds": seconds * (1 + 0.01 * pair), "tokens": [[1], [2]]}
        | ({"stored_s": stored} if arm == "store" else {})
        for pair in range(3)
        for arm, seconds in (("none", 2.0), ("store", 2.1))
    ]
    counted = {"computed": float(3 * 2 * figures.LONG), "host": 0.0, "remote": 0.0}
    return {
        "start": 0, "steps": steps, "cache": "on", "turns": turns,
        "counted": {arm: dict(counted) for arm in figures.ARMS},
    }  # fmt: skip


def overhead(figures: ModuleType) -> dict[str, Any]:
    """Pairs of servers of two sizes."""
    settings = {"pairs": 3, "steps": [64, 32], "caches": ["on", "off"], "seed": 1}
    cells = [cell(figures, 64), cell(figures, 32)]
    return {"settings": settings, "cells": cells, "facts": FACTS}


def test_overhead_is_a_ratio_over_pairs(figures: ModuleType) -> None:
    report = figures.overhead_report(overhead(figures))
    assert "| 64 | on | 2.02 (1.97 to 2.07) | 1.050 (1.050 to 1.050) | 1.485 (" in report
    assert "| 64 | off | - | - | - | - |" in report
    assert "| 3 pairs |" in report
    assert "INVALID" not in report


def test_starts_are_samples_and_their_pairs_are_not(figures: ModuleType) -> None:
    """Pairs that agree within a start say nothing of how far starts are apart."""
    raw = overhead(figures)
    for start, cost in ((1, 1.2), (2, 1.5)):
        one = cell(figures, 64) | {"start": start}
        for turn in one["turns"]:
            turn["seconds"] *= cost if turn["arm"] == "store" else 1.0
        raw["cells"].append(one)
    row = next(line for line in figures.overhead_report(raw).splitlines() if line.startswith("| 64 | on |"))
    assert "| 1.277 (0.771 to 2.115) |" in row
    assert row.endswith("| 3 starts |")


@pytest.mark.parametrize("change", ["loaded", "not computed", "not stored", "tokens"])
def test_a_pair_of_servers_is_invalid(figures: ModuleType, change: str) -> None:
    raw = overhead(figures)
    one = raw["cells"][0] = cell(figures, 64, None if change == "not stored" else 3.0)
    if change == "loaded":
        one["counted"]["store"]["remote"] = 1.0
    elif change == "not computed":
        one["counted"]["none"]["computed"] -= 1.0
    elif change == "tokens":
        one["turns"][1]["tokens"] = [[1], [3]]
    ((bad, faults),) = figures.invalid_cells(raw)
    assert (bad["steps"], len(faults)) == (64, 1)
    report = figures.overhead_report(raw)
    assert "| 64 | on | invalid | invalid | invalid | invalid |" in report
    assert "| 32 | on | 2.02 " in report
    assert "INVALID 64 tokens a step" in report


def settings_of(sweep: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["vllm_store_sweep.py", *words])
    settings = sweep.parse()
    assert isinstance(settings, argparse.Namespace)
    return settings


def test_what_was_given_goes_before_quick(sweep: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings_of(sweep, monkeypatch, "hits").rounds == 10
    settings = settings_of(sweep, monkeypatch, "hits", "--quick", "--shares", "0.1,1")
    assert (settings.rounds, settings.shares) == (2, [0.1, 1.0])
    assert len(settings_of(sweep, monkeypatch, "overhead").steps) == 8


@pytest.mark.parametrize(
    "words",
    [
        ("hits", "--shares", "0.25"), ("hits", "--shares", "1.1"), ("hits", "--go-on"),
        ("overhead", "--caches", "maybe"), ("overhead", "--table"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused(
    sweep: ModuleType, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        settings_of(sweep, monkeypatch, *words)


def test_going_on_does_what_is_missing_in_the_same_order(
    sweep: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = settings_of(sweep, monkeypatch, "overhead", "--starts", "2", "--seed", "7")
    parts = sweep.overhead_parts(settings)
    assert len(parts) == 2 * 8 * 2
    assert parts == sweep.overhead_parts(settings)
    names = ["which", "seed", *sweep.KINDS["overhead"].settings]
    raw = sweep.kept.begun(settings, names)
    raw["cells"] += [{**part, "turns": []} for part in parts[:5]]
    out = tmp_path / "raw.json"
    sweep.kept.write(out, raw)
    again = settings_of(sweep, monkeypatch, "overhead", "--out", str(out), "--go-on")
    read = sweep.kept.read(out, again, names)
    assert json.loads(out.read_text()) == read
    assert (again.seed, again.starts) == (7, 2)
    assert sweep.missing(read, sweep.overhead_parts(again)) == parts[5:]


def test_prompts_are_whole_blocks_and_a_token(sweep: ModuleType, figures: ModuleType) -> None:
    assert figures.PROMPT == figures.BLOCKS * figures.BLOCK_TOKENS + 1
    assert [figures.stored_blocks(share) for share in sweep.KINDS["hits"].settings["shares"][0]] == [
        *range(11)
    ]
