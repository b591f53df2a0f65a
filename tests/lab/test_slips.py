"""The mutation score itself, on a document of a few numbers; and that marks are arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvik_lab.audit import audit_text
from tests.lab.articles.listing import load
from tests.lab.slips.mutate import changed, seen, slips, spots
from tests.lab.slips.score import score

HELD = sorted((Path(__file__).parent / "slips" / "held").glob("*.yaml"))

TEXT = """# A sweep

| run | before (ms) | after (ms) | change |
|---|---|---|---|
| a | 120.0 | 90.0 | -25.0% |
| b | 200.0 | 170.0 | -15.0% |
| c | 80.0 | 50.0 | -37.5% |
| d | 150.0 | 145.0 | -3.3% |

Run b went from 200.0 ms to 170.0 ms (-15.0%).
"""

MARKS = """name: T
title: a test
file: t.md
cells:
  - {line: 5, printed: "-25.0", how: change, formula: "100 * (90.0 - 120.0) / 120.0"}
  - {line: 6, printed: "-15.0", how: change, formula: "100 * (170.0 - 200.0) / 200.0"}
  - {line: 7, printed: "-37.5", how: change, formula: "100 * (50.0 - 80.0) / 80.0"}
  - {line: 8, printed: "-3.3", how: change, formula: "100 * (145.0 - 150.0) / 150.0"}
claims:
  - {line: 10, printed: "-15.0", how: change, formula: "100 * (170.0 - 200.0) / 200.0"}
"""


@pytest.fixture
def marks(tmp_path: Path) -> Path:
    (tmp_path / "t.md").write_text(TEXT, encoding="utf-8")
    path = tmp_path / "t.yaml"
    path.write_text(MARKS, encoding="utf-8")
    return path


def test_every_slip_is_made_and_found_in_a_plain_document(marks: Path) -> None:
    result = score(marks, marks.parent)
    assert result.numbers == {"cell": 4, "claim": 1}
    assert sum(result.made.values()) > 15
    assert (result.rate("cell"), result.rate("claim")) == (1.0, 1.0), result.missed
    assert result.own["other"] == 0


def test_a_slip_changes_one_number_and_only_its_own_line_counts(marks: Path) -> None:
    spot = spots(TEXT, load(marks).items)[0]
    audit = audit_text(TEXT)
    made = dict(slips(spot, audit))
    assert made["leading digit"] == "35.0"
    assert made["neighbours swapped"] == "52.0"
    assert made["factor of 10"] == "250"
    assert made["a cell, repeated"] == "15.0"
    spoiled = changed(TEXT, spot, "35.0")
    assert [a for a, b in zip(spoiled.splitlines(), TEXT.splitlines(), strict=True) if a != b] == [
        "| a | 120.0 | 90.0 | -35.0% |"
    ]
    assert seen(audit_text(spoiled), spot, "35.0")
    assert not seen(audit_text(spoiled), spot, "25.0")


def test_a_mark_that_the_text_lacks_is_refused(marks: Path) -> None:
    with pytest.raises(ValueError, match="line 5 has no"):
        spots(TEXT.replace("-25.0%", "-26.0%"), load(marks).items)


@pytest.mark.parametrize("path", HELD, ids=lambda path: path.stem)
def test_every_held_mark_follows_or_not_as_it_says(path: Path) -> None:
    for item in load(path).items:
        assert item.meets(item.printed) == (item.follows == "yes"), item
