# ruff: noqa: RUF001 - the marks and words that tables print
"""Derived cells are recognised by rule, recomputed, and named with what follows when they do not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from kvik_lab.audit import Check, audit_text
from kvik_lab.audit.command import audit as command


def table(*rows: str) -> str:
    head, *body = rows
    return "\n".join([head, "|".join(["---"] * (head.count("|") + 1)), *body]) + "\n"


def only(text: str) -> Check:
    findings = audit_text(text).findings
    assert len(findings) == 1, [f"{f.place} {f.text}" for f in findings]
    return findings[0]


TIMES = (
    "1,000 | 668.33 | 679.33 | +11.00",
    "2,048 | 1,717.07 | 1,646.16 | -70.91",
    "3,800 | 3,161.41 | 3,058.02 | {}",
)


@pytest.mark.parametrize(
    ("printed", "diagnosis"),
    [
        ("+103.39", "the sign"),
        ("-103.93", "two digits changed places"),
        ("-1033.90", "factor of 10"),
        ("-70.91", "row 2"),
    ],
)
def test_a_wrong_difference_is_named_with_its_slip(printed: str, diagnosis: str) -> None:
    rows = [row.format(printed) for row in TIMES]
    found = only(table("Tokens | TCP (ms) | EFA (ms) | EFA-TCP diff (ms)", *rows))
    assert (found.place.row, found.place.column, found.follows) == (2, 3, "-103.39")
    assert found.diagnosis is not None
    assert diagnosis in found.diagnosis


def test_a_wrong_base_is_told_from_an_error_of_rounding() -> None:
    rows = ("a | 120.0 | 90.0 | -25.0%", "b | 200.0 | 170.0 | -15.0%", "c | 80.0 | 50.0 | -60.0%")
    found = only(table("run | before (ms) | after (ms) | change", *rows))
    assert found.follows == "-37.5%"
    assert found.diagnosis == "the wrong base: relative to after (ms)"


def test_columns_named_as_others_follow_their_rule() -> None:
    names = "| base (s) | tcp | ipc | get | delta-tcp | delta-ipc | delta-get"
    rows = (
        "A | 0.131 | 0.561 | 0.572 | 0.770 | 4.28 | 4.37 | 4.37",
        "B | 0.033 | 0.120 | 0.124 | 0.240 | 3.64 | 3.76 | 3.76",
        "C | 0.065 | 0.300 | 0.290 | 0.500 | 4.62 | 4.46 | 4.46",
    )
    findings = audit_text(table(names, *rows)).findings
    assert [(f.place.column, f.follows) for f in findings] == [(7, "5.88"), (7, "7.27"), (7, "7.69")]
    assert all("another column" in (f.diagnosis or "") for f in findings)


def test_sums_that_lack_a_row_are_found() -> None:
    rows = ("L1 | 19 | ~6 h", "L2 | 20 | ~5 h", "L3 | 12 | ~3 h", "L4 | 8 | ~2 h", "**Total** | 51 | ~16 h")
    found = only(table("Layer | Patterns | Time", *rows))
    assert (found.place.row, found.place.column, found.follows) == (4, 1, "59")
    assert "off by one" in (found.diagnosis or "")


def test_composite_cells_over_paired_lines() -> None:
    rows = (
        "16K | NEW: 0.195 (↓36.7%) | NEW: 1.112 (↓27.5%)",
        " | OLD: 0.308 | OLD: 1.533",
        "128K | NEW: 0.194 (↓40.3%) | NEW: 1.205 (↓27.3%)",
        " | OLD: 0.325 | OLD: 1.534",
        "1M | NEW: 0.384 (↓42.0%) | NEW: 2.405 (↓20.8%)",
        " | OLD: 0.662 | OLD: 3.036",
    )
    found = only(table("size | 20 blocks | 200 blocks", *rows))
    assert (found.place.row, found.place.column, found.follows) == (2, 2, "↓21.4%")


def test_the_sign_of_a_value_in_parentheses_counts() -> None:
    rows = ("a | 120.0 | 90.0 (-25.0%)", "b | 100.0 | 113.0 (-13.0%)", "c | 200.0 | 158.0 (-21.0%)")
    found = only(table("run | before (ms) | after (ms)", *rows))
    assert (found.place.row, found.printed, found.follows) == (1, "-13.0%", "+13.0%")
    assert found.diagnosis == "the sign"


def test_only_bytes_and_counts_have_prefixes_of_1024() -> None:
    def why(unit: str) -> str | None:
        rows = ("load | 4.00 | 0.24", "run | 5.00 | 0.66", "save | 1.00 | 0.10", "total | 10.74 | 1.00")
        return only(table(f"phase | a ({unit}) | b ({unit})", *rows)).diagnosis

    assert "GiB" in (why("GB") or "")
    assert "GiB" not in (why("ms") or "")


@pytest.mark.parametrize(
    ("rule", "chunks", "follows"),
    [
        ("Keep streams × chunk ≤ 64 MB.", ("2 MB", "1 MB", "512 KB", "4 MB"), [("256 MB", "at most 64 MB")]),
        ("Keep streams × chunk ≤ 4K.", ("128", "64", "128", "32"), []),
        ("Keep streams × chunk ≤ 4K.", ("128", "64", "128", "128"), [("8 K", "at most 4 K")]),
        ("Keep streams × chunk ≤ 4096.", ("2 MB", "1 MB", "512 KB", "4 MB"), []),
        (
            "Keep streams × chunk ≤ 4096 tokens.",
            ("128", "64", "128", "128"),
            [("8192 tokens", "at most 4096 tokens")],
        ),
        (
            "Keep streams × chunk ≤ 4096.",
            ("128 tokens", "64 tokens", "128 tokens", "128 tokens"),
            [("8192", "at most 4096")],
        ),
    ],
)
def test_a_cap_counts_in_its_unit(rule: str, chunks: tuple[str, ...], follows: list[tuple[str, str]]) -> None:
    rows = [f"{n} | {chunk} | 3.{n}" for n, chunk in zip((16, 16, 32, 64), chunks, strict=True)]
    findings = audit_text(f"{rule}\n\n" + table("streams | chunk | GB/s", *rows)).findings
    assert [(found.printed, found.follows) for found in findings] == follows


WARM_UPS = table(
    "warm-up | noise 2 %: ends at | left | noise 5 %: ends at | left | left after 10",
    "none | 10 | 0.0 % | 10 | 0.0 % | 0.0 %",
    "30 % above until request 8 | 18 | 0.0 % | 18 | 0.0 % | 0.0 %",
    "30 % above, falls to 1/e of that in 10 requests | 23 | 3.2 % | 17 | 6.2 % | 11.0 %",
    "100 % above, falls to 1/e of that in 10 | 34 | 3.6 % | 26 | 8.2 % | 36.8 %",
    "100 % above, falls to 1/e of that in 20 | 44 | 11.7 % | 24 | 32.1 % | 60.7 %",
    "100 % above, falls to nothing over 60 | 60 | 25.6 % | 12 | 76.5 % | 83.3 %",
)


def test_a_number_and_a_percentage_have_no_difference() -> None:
    assert not [check.text for check in audit_text(WARM_UPS).checks if check.kind == "cell"]
    rows = ("a | 12.1 % | 14.6 % | 2.5", "b | 10.2 % | 9.1 % | -1.1", "c | 8.8 % | 11.0 % | 3.2")
    assert only(table("run | old | new | difference", *rows)).follows == "2.2"


def test_the_label_of_a_row_says_nothing_of_its_cells() -> None:
    assert not [check.text for check in audit_text(WARM_UPS).checks if check.kind == "claim"]


def test_bandwidth_is_size_times_count_over_time() -> None:
    rows = (
        "16 KiB | 16 | 0.055 | 4.77 GB/s",
        "64 KiB | 128 | 0.633 | 13.25 GB/s",
        "256 KiB | 16 | 0.269 | 15.59 GB/s",
    )
    head = "Block | Blocks | Time (ms) | Bandwidth"
    assert not audit_text(table(head, *rows)).findings
    found = only(table(head, *rows, "1 MiB | 64 | 4.000 | 17.98 GB/s"))
    assert found.follows == "16.78 GB/s"


def test_what_follows_from_a_wrong_value_is_set_right_with_it() -> None:
    rows = (
        "a | 10.1 | 12.3 | 22.4 | 3.9 | 18.5",
        "b | 11.7 | 14.2 | 25.9 | 4.3 | 21.6",
        "c | 19.6 | 21.4 | 61.0 | 7.7 | 53.3",
        "d | 23.3 | 15.8 | 39.1 | 9.2 | 29.9",
        "e | 31.2 | 26.5 | 57.7 | 6.6 | 51.1",
    )
    head = "run | x (s) | y (s) | total (s) | idle (s) | total - idle (s)"
    found = {(f.place.row, f.place.column): f for f in audit_text(table(head, *rows)).findings}
    assert found[2, 3].follows == "41.0"
    assert (found[2, 5].follows, found[2, 5].diagnosis) == ("33.3", "carried on from an input")


def test_times_in_minutes_and_seconds() -> None:
    rows = (
        "a | 8m14.902s | 8m4.041s | -10.861s | -2.2%",
        "b | 11m5.422s | 9m39.420s | -1m36.002s | -12.9%",
        "c | 10m40.740s | 10m0.765s | -39.975s | -6.2%",
    )
    found = only(table("run | NFS/TCP | NFS/RDMA | difference | change", *rows))
    assert (found.place.row, found.follows) == (1, "-1m26.002s")


def test_other_digits_of_a_cell_in_another_table_are_used() -> None:
    first = table(
        "model | base (s) | other (s)", "A | 0.130 | 0.335", "B | 0.024 | 0.049", "C | 0.065 | 0.161"
    )
    second = table(
        "model | base (s) | tcp | delta-tcp",
        "A | 0.13 | 0.56 | 4.31",
        "B | 0.02 | 0.10 | 5.00",
        "C | 0.06 | 0.30 | 4.62",
    )
    found = only(f"{first}\ntext\n\n{second}")
    assert (found.place.table, found.place.row, found.follows) == (1, 1, "4.17")


def test_lists_are_counted_against_their_levels() -> None:
    rows = (
        "Backend | 3 | a, b, c",
        "Prompt | 5 | 1K, 2K, 4K, 8K",
        "Batch | 2 | 2048, 4096",
        "Cache | 2 | on, off",
    )
    text = table("Factor | Levels | Values", *rows)
    found = only(text + "\nThere is nothing more.\n")
    assert (found.place.row, found.place.column, found.follows) == (1, 1, "4")


def test_counts_of_one_value_are_no_counts_of_a_list() -> None:
    rows = ("TP=2, PP=1 | 2 | 812 req/s", "TP=1, PP=2 | 2 | 640 req/s", "TP=2, PP=2 | 4 | 1,440 req/s")
    assert not audit_text(table("setup | GPUs | throughput", *rows)).findings


def test_thousands_in_a_list_are_not_two_values() -> None:
    rows = ("prompt | 3 | 1,000, 2,000, 4,000", "threads | 2 | 1, 2", "arm | 4 | tcp, rdma, efa")
    found = only(table("factor | levels | values", *rows))
    assert (found.place.row, found.follows) == (2, "3")


def test_the_same_measurement_under_two_keys() -> None:
    first = table("Tokens | TCP (ms) | RDMA (ms)", "1,000 | 662.21 | 674.00", "2,000 | 1,717.07 | 1,646.16")
    second = table("Tokens | TCP (ms) | RDMA (ms)", "1,000 | 668.33 | 679.33", "2,048 | 1,717.07 | 1,646.16")
    found = only(f"{first}\nlater\n\n{second}")
    assert (found.place.table, found.place.row, found.printed, found.follows) == (0, 1, "2,000", "2,048")


@pytest.mark.parametrize(
    ("first", "second"),
    [(("32768", "32768"), ("32768", "65536")), (("16384", "32768"), ("16384", "65536"))],
)
def test_a_setting_is_no_measurement(first: tuple[str, str], second: tuple[str, str]) -> None:
    head = "batch | context | time (ms)"
    one = table(head, f"10 | {first[0]} | 12.3", f"20 | {first[1]} | 14.3")
    two = table(head, f"16 | {second[0]} | 11.1", f"32 | {second[1]} | 19.0")
    assert not audit_text(f"{one}\nlater\n\n{two}").findings


def test_a_value_that_comes_again_and_again_tells_no_keys_apart() -> None:
    head = "batch | limit (ms) | rate (%)"
    one = table(head, "10 | 312.57 | 100.00", "20 | 312.57 | 98.31")
    two = table(head, "16 | 312.57 | 100.00", "32 | 312.57 | 97.42")
    assert not audit_text(f"{one}\nlater\n\n{two}").findings


@pytest.mark.parametrize(
    ("sentence", "follows"),
    [
        ("Speed-up is 3.1x on average.", "2.4x"),
        ("The best speed-up is 3.9x.", "3.0x"),
        ("It fell from 250.0 ms to 200.0 ms (-25.0%).", "-20.0%"),
        ("A link gives 20 GB/s (16×100 Gbps = 1,700 Gbps).", "1,600 Gbps"),
        ("(14,580 - 59) / 14,580 = 96.9%", "99.6%"),
        ("Warm-up is 25x faster (1.1 s vs 17 s).", "15x"),
        ("It reaches 780 GB/s, 92.5% of the 800 GB/s line rate.", "97.5%"),
    ],
)
def test_claims_in_the_text_are_recomputed(sentence: str, follows: str) -> None:
    rows = ("a | 200.0 | 100.0 | 2.0x", "b | 300.0 | 100.0 | 3.0x", "c | 220.0 | 100.0 | 2.2x")
    text = table("run | old (ms) | new (ms) | speed-up", *rows) + f"\n{sentence}\n"
    assert follows in [f.follows for f in audit_text(text).findings if f.kind == "claim"]


def test_the_maximum_of_another_table_is_named() -> None:
    def part(name: str, values: tuple[float, float, float]) -> str:
        rows = [f"r{i} | 100.0 | {100 - v:.1f} | {-v:.1f}%" for i, v in enumerate(values)]
        return f"## {name}\n\n" + table("row | old (ms) | new (ms) | change", *rows) + "\n"

    text = part("Across nodes", (36.7, 27.5, 40.3)) + part("Within a node", (53.3, 12.1, 35.9))
    found = only(text + "Across nodes the change is at most -53.3%, within a node at most -53.3%.\n")
    assert found.follows == "-40.3%"
    assert "table 2" in (found.diagnosis or "")


def test_measured_tables_raise_no_alarm() -> None:
    rng = np.random.default_rng(20261122)
    alarms, cells = 0, 0
    for number in range(12):
        columns, rows = int(rng.integers(3, 6)), int(rng.integers(4, 8))
        base = np.exp(rng.normal(4, 1, (rows, 1))) * np.exp(rng.normal(0, 0.2, (rows, columns)))
        head = "run | " + " | ".join(f"c{i} (ms)" for i in range(columns))
        body = [f"r{i} | " + " | ".join(f"{v:.1f}" for v in line) for i, line in enumerate(base)]
        result = audit_text(table(head, *body), name=f"table {number}, seed 20261122")
        alarms, cells = alarms + len(result.findings), cells + result.cells
    assert alarms == 0, f"{alarms} in {cells} cells, seed 20261122"


def test_the_command_counts_and_exits_by_what_it_found(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.md", tmp_path / "bad.md"
    rows = ["a | 2.0 | 5.0 | 3.0", "b | 4.0 | 9.0 | 5.0", "c | 1.0 | 7.0 | 6.0"]
    good.write_text(table("run | x | y | diff", *rows), encoding="utf-8")
    bad.write_text(table("run | x | y | diff", *rows[:2], "c | 1.0 | 7.0 | 9.0"), encoding="utf-8")
    run = CliRunner()
    assert run.invoke(command, [str(good)]).exit_code == 0
    result = run.invoke(command, [str(good), str(bad), "--json"])
    assert result.exit_code == 1
    shown = json.loads(result.output)
    assert shown["counts"] == {"tables": 2, "cells": 24, "derived_cells": 6, "claims": 0, "findings": 1}
    assert shown["checks"][0]["follows"] == "6.0"
    assert run.invoke(command, [str(tmp_path / "absent.md")]).exit_code == 2
