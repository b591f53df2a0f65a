# ruff: noqa: RUF001 - the marks and words that texts print
"""Claims whose inputs stand further away are recomputed; what follows passes, what does not is named."""

from __future__ import annotations

import pytest

from kvik_lab.audit import Audit, Check, audit_text

SWEEP = """## Sweep on a host (16 NICs × 200 Gbps)

| setting | write (GB/s) | read (GB/s) |
|---|---|---|
| threads=8, batch=128 | 318.71 | 277.06 |
| threads=16, batch=128 | 388.52 | 301.44 |
| threads=32, batch=64 | 388.83 | 299.61 |
| threads=32, batch=128 | 388.90 | 250.90 |

"""


def audited(sentence: str) -> Audit:
    return audit_text(SWEEP + sentence + "\n", "sweep")


def claims(sentence: str) -> list[Check]:
    return [check for check in audited(sentence).checks if check.kind == "claim"]


@pytest.mark.parametrize(
    ("sentence", "formula"),
    [
        (
            "Any (threads, batch) between (16, 128) and (32, 128) is within 0.1% of peak.",
            "(388.9 - 388.52) / 388.9",
        ),
        ("Both (32, 256) and (64, 128) (both at the 8192 cap) fail.", "32 × 256, 64 × 128"),
        ("The aggregate ceiling of all is 400 GB/s.", "16 NICs × 200 Gbps"),
        ("Output has 1.5K tokens. A transfer of 150 ms adds 0.1 ms to each token.", "150 ms / 1.5K"),
        ("With block_size = 16 we copy 8192 tokens, 512 blocks.", "ceil(8192 tokens / 16)"),
    ],
)
def test_a_claim_that_follows_is_recognised_with_its_arithmetic(sentence: str, formula: str) -> None:
    found = [check for check in claims(sentence) if formula in check.formula]
    assert found, [check.text for check in claims(sentence)]
    assert not audited(sentence).findings


@pytest.mark.parametrize(
    ("sentence", "follows"),
    [
        ("Any (threads, batch) between (8, 128) and (32, 128) is within 0.1% of peak.", "18.0%"),
        ("Now (32, 256) and (64, 256) (both at the 8192 cap) fail.", "16,384"),
        ("Output has 1.5K tokens. A transfer of 150 ms adds 0.3 ms to each token.", "0.1 ms"),
        ("With block_size = 16 we copy 8190 tokens, 511 blocks.", "512 blocks"),
        ("We made 34 runs (3 sizes × 4 starts × 2 arms).", "24 runs"),
        ("With threads=16, batch=128 it writes 488.52 GB/s.", "388.52 GB/s"),
        ("With threads=16, batch=128 it writes 388.83 GB/s.", "388.52 GB/s"),
        ("Keep threads × batch_size ≤ 16 × 128 = 2048 on this host.", "at most 2048"),
    ],
)
def test_a_claim_that_does_not_follow_is_named_with_what_does(sentence: str, follows: str) -> None:
    assert [check.follows for check in audited(sentence).findings] == [follows]


def test_both_ends_of_a_range_are_recomputed() -> None:
    text = "| run | write (GB/s) |\n|---|---|\n| a | 206.9 |\n| b | 209.4 |\n| c | 213.6 |\n\n"
    checks = audit_text(text + "It is flat (~205-214 GB/s) throughout.\n").checks
    assert [check.rule for check in checks] == ["the smallest of table 1", "the largest of table 1"]


def test_a_product_of_names_takes_the_settings_above_the_table() -> None:
    def text(size: str) -> str:
        rows = f"| {size} (min: block × batch × threads) | 353.5 |\n| 4 GB | 364.9 |\n"
        return "## Sweep (threads=16 batch=128 block=1MB)\n\n| buffer | write (GB/s) |\n|---|---|\n" + rows

    assert [check.printed for check in audit_text(text("2 GB")).checks] == ["2 GB"]
    assert [check.follows for check in audit_text(text("3 GB")).findings] == ["2 GB"]


def test_a_word_for_an_extreme_is_about_one_number() -> None:
    text = "Peak write is 388.90 GB/s, where the other host has 270 GB/s and its disk 35 GB/s."
    assert [check.printed for check in claims(text)] == ["388.90 GB/s"]
    assert not audited(text).findings


def test_a_column_is_named_at_the_end_of_a_sentence() -> None:
    text = "| tokens | TCP (ms) | RDMA (ms) |\n|---|---|---|\n| 4,000 | 441.7 | 110.9 |\n"
    text += "| 16,000 | 1,756.3 | 431.8 |\n| 64,000 | 7,012.9 | 1,702.4 |\n\n"
    text += "From 16,000 to 64,000 tokens the time grows 3.99x over TCP and 3.94x over RDMA.\n"
    audit = audit_text(text)
    assert [check.printed for check in audit.checks] == ["3.99x", "3.94x"]
    assert not audit.findings


def test_one_count_of_a_sentence_is_that_of_all_combinations() -> None:
    text = "| factor | levels |\n|---|---|\n| size | 3 |\n| threads | 4 |\n| arm | 2 |\n\n"
    assert not audit_text(text + "All combinations are 24 patterns, each made 3 times: 72 runs.\n").findings
    (found,) = audit_text(text + "All combinations are 42 patterns, on 3 hosts.\n").findings
    assert found.follows == "24 patterns"


def test_two_rows_may_be_told_each_by_itself() -> None:
    text = (
        "| run | old (ms) | new (ms) |\n|---|---|---|\n| alpha | 200.0 | 100.0 |\n| beta | 300.0 | 240.0 |\n"
    )
    audit = audit_text(text + "\nalpha is 2.0x faster than before, beta 1.25x.\n")
    assert [(check.printed, check.holds) for check in audit.checks] == [("1.25x", True)]


@pytest.mark.parametrize(
    "sentence",
    [
        "The geometric mean of the change is 12.5%.",
        "At 4,000 tokens the hits are 50% of the peak.",
        "(0 - 0) / 0 = 25%",
        "1e90 * 1e90 * 1e90 * 1e90 = 33",
        "1e90 × 1e90 × 1e90 × 1e90 runs, in all 33.",
    ],
)
def test_arithmetic_that_has_no_result_is_no_claim(sentence: str) -> None:
    text = "| tokens | hits (GB/s) | change |\n|---|---|---|\n| 1,000 | 0.0 | -50.0% |\n"
    text += "| 4,000 | 0.0 | +10.0% |\n| 16,000 | 0.0 | +20.0% |\n\n"
    assert not audit_text(text + sentence + "\n").checks


def test_what_can_only_be_confirmed_is_not_counted() -> None:
    assert not claims("It is flat above 388 GB/s on 3 hosts.")


@pytest.mark.parametrize(
    ("sentence", "follows"),
    [
        ("The best latency is 165.2 ms.", []),
        ("The fastest run has a latency of 165.2 ms, the slowest one of 240.1 ms.", []),
        ("The latency is 165.2 ms at best, 240.1 ms at worst.", []),
        ("The throughput is 14.63 GB/s at best, 9.12 GB/s at worst.", []),
        ("The best latency is 183.5 ms.", ["165.2 ms"]),
        ("The slowest run has a throughput of 11.07 GB/s.", ["9.12 GB/s"]),
    ],
)
def test_the_best_time_is_the_least_and_the_best_rate_the_greatest(sentence: str, follows: list[str]) -> None:
    text = "| run | latency (ms) | throughput (GB/s) |\n|---|---|---|\n| a | 183.5 | 12.41 |\n"
    text += "| b | 240.1 | 9.12 |\n| c | 198.7 | 11.07 |\n| d | 165.2 | 14.63 |\n\n"
    audit = audit_text(text + sentence + "\n")
    assert audit.checks
    assert [check.follows for check in audit.findings] == follows


@pytest.mark.parametrize(
    ("sentence", "follows"),
    [
        ("A call is 5.5x faster with the first (21.6 ms against 83.9 ms).", ["3.9x"]),
        ("The store is 5.5x smaller, and calls are quick (21.6 ms against 83.9 ms).", []),
        ("Of 9,960 patterns 113 remain, a reduction of 59.50%.", ["98.87%"]),
        ("It fell from 250.0 ms to 200.0 ms; the store shrank by 21.5%.", []),
        ("It fell from 250.0 ms to 200.0 ms; that is 20.4%.", ["20.0%"]),
        ("We cut 200 lines from 3 files and reduced the time by 20%.", []),
    ],
)
def test_a_form_that_leaves_no_choice_needs_no_slip(sentence: str, follows: list[str]) -> None:
    assert [check.follows for check in audit_text(sentence + "\n").findings] == follows
