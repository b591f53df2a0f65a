"""What a document says more than once is held against itself; what only looks like a slip is left alone."""

from __future__ import annotations

import random

import pytest

from kvik_lab.audit import Audit, Check, audit_text

RESULTS = """## Decode on one host

| engine | throughput | memory |
|---|---|---|
| baseline kernel | 3.47 t/s | 214 GB |
| fused kernel | 37.95 t/s | 61 GB |

"""


def claims(text: str) -> list[Check]:
    return [check for check in audit_text(text).checks if check.kind == "claim"]


def found(audit: Audit) -> list[tuple[str, str]]:
    return [(check.printed, check.follows) for check in audit.findings]


@pytest.mark.parametrize(
    ("sentence", "follows"),
    [
        ("The fused kernel decodes 37.95 t/s.", None),
        ("The fused kernel decodes 73.95 t/s.", "37.95 t/s"),
        ("The fused kernel decodes 47.95 t/s.", "37.95 t/s"),
        ("The fused kernel decodes 379.5 t/s.", "38.0 t/s"),
        # the last digits of another measurement
        ("With a longer prompt the fused kernel decodes 37.15 t/s.", None),
        ("The memory of the baseline kernel is 314 GB.", "214 GB"),
        # nothing else that is said with it
        ("Disks are of 314 GB.", None),
        # both are told
        ("The fused kernel decodes 37.95 t/s, and 47.95 t/s when warm.", None),
        # a number without a unit is of the next one's
        ("Decoding goes from 3.47 to 73.95 t/s.", "37.95 t/s"),
        ("Decoding goes from 4.37 to 37.95 t/s with the fused kernel of the baseline kernel.", "3.47"),
    ],
)
def test_a_slip_of_what_a_cell_says_is_found(sentence: str, follows: str | None) -> None:
    audit = audit_text(RESULTS + sentence + "\n")
    assert [check.follows for check in audit.findings] == ([] if follows is None else [follows])


def test_a_number_that_is_said_elsewhere_is_known() -> None:
    (check,) = claims(RESULTS + "The fused kernel decodes 37.95 t/s.\n")
    assert (check.printed, check.holds) == ("37.95 t/s", True)


def test_two_digits_need_several_lines_that_say_the_other_number() -> None:
    line = "The wake time of the small model is 38 ms.\n\n"
    slip = "So the wake time of the small model is 48 ms.\n"
    assert found(audit_text(line + slip)) == []
    assert found(audit_text(line * 6 + slip)) == [("48 ms", "38 ms")]


@pytest.mark.parametrize("most", [9.0, 99.0, 999.0])
def test_of_many_numbers_some_are_slips_of_others_by_chance(most: float) -> None:
    """Of a long list of measurements none is accused for it."""
    seed = 4
    print("seed", seed)
    dice = random.Random(seed)
    text = "\n\n".join(f"Run {at} of the kernel takes {dice.uniform(1, most):.2f} ms." for at in range(400))
    assert found(audit_text(text + "\n")) == []


def test_of_a_range_an_end_is_judged_where_the_other_one_is_said() -> None:
    text = "Switching the models is 123-345x faster.\n\n" * 2
    assert found(audit_text(text + "Switching the models is 223-345x faster.\n")) == [("223 x", "123 x")]
    assert found(audit_text(text + "Switching the models is 223-567x faster.\n")) == []


def test_a_rounding_says_the_same() -> None:
    text = RESULTS + "The fused kernel decodes 38.0 t/s.\n"
    assert found(audit_text(text)) == []
    assert claims(text)[0].holds


@pytest.mark.parametrize("cell", ["10.94x", "10.9x", "| 10.94 |"])
def test_a_row_is_what_the_two_above_are_to_each_other(cell: str) -> None:
    cell = cell.strip("| ")
    text = RESULTS.rstrip("\n") + f"\n| Speed-up | {cell} | |\n"
    (check,) = [one for one in audit_text(text).checks if one.kind == "cell"]
    assert (check.printed, check.holds) == (cell, True)
    wrong = text.replace(cell, cell.replace("10", "20"))
    assert [one.printed for one in audit_text(wrong).findings] == [cell.replace("10", "20")]


def test_a_row_that_is_no_slip_of_it_is_of_something_else() -> None:
    assert not audit_text(RESULTS.rstrip("\n") + "\n| Improvement | 66.6x | |\n").findings


GROUPS = """| model | kind | rate | to fp16 |
|---|---|---|---|
| a | fp16 | 14.98 | 1.0 |
| a | int8 | 19.01 | 1.27 |
| a | int4 | 20.81 | 1.39 |
| b | fp16 | 8.55 | 1.0 |
| b | int8 | 10.96 | 1.28 |
| b | int4 | 11.91 | 1.39 |
| c | fp16 | 24.13 | 1.0 |
| c | int8 | 25.28 | 1.05 |
| c | int4 | 25.80 | 1.07 |
"""


def test_ratios_are_of_the_row_of_1_of_their_group() -> None:
    assert not audit_text(GROUPS).findings
    assert found(audit_text(GROUPS.replace("1.28", "1.82"))) == [("1.82", "1.28")]
    assert found(audit_text(GROUPS.replace("1.05", "1.50"))) == [("1.50", "1.05")]


MIXED = """| metric | no sleep | sleep | improvement |
|---|---|---|---|
| total | 357.1 s | 124.6 s | 65.1% faster |
| switch of a | 37.60 s | 0.85 s | 44.2x faster |
| switch of b | 58.10 s | 2.58 s | 22.5x faster |
| inference of a | 3.67 s | 0.53 s | 85.6% faster |
| inference of b | 6.30 s | 0.76 s | 87.9% faster |
| inference of c | 5.20 s | 1.14 s | 78.1% faster |
"""


def test_percentages_and_ratios_of_one_column_derive_apart() -> None:
    assert not audit_text(MIXED).findings
    assert found(audit_text(MIXED.replace("85.6%", "58.6%"))) == [("58.6%", "85.6%")]
    assert found(audit_text(MIXED.replace("44.2x", "24.2x"))) == [("24.2x", "44.2x")]


def test_escaped_signs_are_read() -> None:
    rows = [("8.00", "7.76", "\\+3.0%"), ("11.14", "10.67", "\\+4.2%"), ("13.49", "11.31", "\\+16.2%")]
    text = "| batch | before (ms) | after (ms) | improvement |\n|---|---|---|---|\n"
    text += "".join(f"| {at} | {a} | {b} | {c} |\n" for at, (a, b, c) in enumerate(rows))
    assert sum(check.kind == "cell" for check in audit_text(text).checks) == 3
    assert [one.printed for one in audit_text(text.replace("+16.2", "+26.2")).findings] == ["+26.2%"]


@pytest.mark.parametrize(
    ("sentence", "findings"),
    [
        ("At best 70 / 223 ≈ 0.31 t/s.", []),
        ("At best 70 / 223 ≈ 0.41 t/s.", ["≈ 0.41 t/s"]),
        ("8192 tokens a step, 203 s → token/s ≈ 8192 / 203 ≈ 40.35", []),
        ("K of 4 bits + V of 2 bits = average 3 bits", []),
        ("In all 2048 blocks * 16 tokens * 4 heads * 196 bytes = 25.7 MB.", []),
        ("In all 2048 blocks * 16 tokens * 4 heads * 196 bytes = 35.7 MB.", ["35.7 MB"]),
        ("It is 26.5 → 32.74 tok/s on 8 hosts of type 5090, 90% of them warm.", []),
        ("It is 3.5x as large (61→214 GB).", []),
        ("It is 4.5x as large (61→214 GB).", ["4.5x"]),
    ],
)
def test_what_is_written_out_is_read_as_it_is_meant(sentence: str, findings: list[str]) -> None:
    assert [check.printed for check in audit_text(sentence + "\n").findings] == findings


NUMBERED = """| run | data | time | zero-shot | few-shot |
|---|---|---|---|---|
| (1) Baseline | 300B | 260hr | 42.5 | 44.0 |
| (2) best metric | 300B | 259hr | 43.6 | 44.9 |
| (3) dropping | 300B | 263hr | 43.7 | 44.9 |
| (5) Baseline | 150B | 130hr | 42.0 | 42.7 |
| (6) best metric | 150B | 129hr | 42.6 | 43.7 |
| (7) dropping | 150B | 131hr | 42.7 | 43.5 |

"""


@pytest.mark.parametrize(
    "sentence",
    [
        "The best metric alone is on average 43.1.",
        "On average a step takes 2.6 s.",
        "GPT has 150B of data, a mean of 1.5x less.",
    ],
)
def test_the_number_of_an_item_and_a_name_that_sums_nothing_up_are_no_rules(sentence: str) -> None:
    assert not audit_text(NUMBERED + sentence + "\n").findings
