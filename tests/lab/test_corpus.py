"""The corpus that the audit is measured on is itself right, and the audit does well on it."""

import csv
import html
import math
import os
import re
from collections import Counter
from types import SimpleNamespace

import pytest

from tests.lab.corpus import score as scoring
from tests.lab.corpus.drafting import KINDS
from tests.lab.corpus.inject import numbers
from tests.lab.corpus.layout import Spot, Table, spots
from tests.lab.corpus.roster import Case, corpus
from tests.lab.corpus.score import names_right, read, score
from tests.lab.corpus.verify import follows

SEED = 6
# What the audit was made with is one corpus; the long version also measures it on others, made alike.
SEEDS = range(SEED, SEED + 5) if os.environ.get("KVIK_TEST_LAB_FULL") == "1" else (SEED,)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return corpus(SEED)


def test_sixty_tables_carry_five_errors_of_each_kind(cases: list[Case]) -> None:
    assert len({case.name for case in cases}) == 60
    assert Counter(case.injected.kind for case in cases) == dict.fromkeys(KINDS, 5)


@pytest.mark.parametrize("seed", range(SEED, SEED + 5))
def test_every_derived_number_of_a_clean_table_follows_from_what_is_printed(seed: int) -> None:
    wrong = [
        (case.name, number.text, number.rule)
        for case in corpus(seed)
        for number in numbers(case.document)
        if not follows(number)
    ]
    assert not wrong


def test_an_error_changes_the_text_only_where_the_truth_says(cases: list[Case]) -> None:
    for case in cases:
        clean, spoiled = case.text.splitlines(), case.injected.text.splitlines()
        assert len(clean) == len(spoiled), case.name
        differing = [at for at, pair in enumerate(zip(clean, spoiled, strict=True), 1) if pair[0] != pair[1]]
        assert 1 <= len(differing) <= len(case.injected.wrong), case.name
        for wrong in case.injected.wrong:
            if wrong.spot.table is None:
                assert differing == [wrong.spot.line], case.name


def test_the_truth_names_a_number_that_no_rounding_explains(cases: list[Case]) -> None:
    for case in cases:
        places = spots(case.document)
        for wrong in case.injected.wrong:
            assert wrong.printed != wrong.right, case.name
            assert any(n.text == wrong.right and places[n.id] == wrong.spot for n in numbers(case.document))
            assert names_right(wrong, case.injected.kind, wrong.right), case.name
            assert not names_right(wrong, case.injected.kind, wrong.printed), case.name


def test_csv_and_html_show_every_row(cases: list[Case]) -> None:
    for case in cases:
        (table,) = [block for block in case.document.blocks if isinstance(block, Table)]
        lines = case.text.splitlines()
        if case.document.format == "csv":
            assert len(lines) == 1 + len(table.rows), case.name
        elif case.document.format == "html":
            assert sum(line.startswith("<tr>") for line in lines) >= 1 + len(table.rows), case.name
        else:
            assert sum("|" in line for line in lines) == 2 + len(table.rows), case.name


def _grid(text: str, form: str) -> list[list[str]]:
    """The body of the one table of a text, read by other means than it was written with."""
    if form == "csv":
        return list(csv.reader(text.splitlines()))[1:]
    if form != "html":
        lines = [line for line in text.splitlines() if "|" in line][2:]
        return [[part.strip() for part in line.removeprefix("|").split("|")] for line in lines]
    body = text.partition("<tbody>")[2].partition("</tbody>")[0]
    rows: list[list[str]] = []
    label, left = "", 0
    for line in re.findall(r"<tr>(.*?)</tr>", body):
        found = re.findall(r"<td(?: rowspan=\"(\d+)\")?>(.*?)</td>", line)
        cells = [html.unescape(re.sub("<.*?>", "", content)) for _, content in found]
        if left:
            cells, left = [label, *cells], left - 1
        elif found[0][0]:
            label, left = cells[0], int(found[0][0]) - 1
        rows.append(cells)
    return rows


def test_the_error_stands_where_the_truth_says(cases: list[Case]) -> None:
    for case in cases:
        clean, spoiled = (_grid(text, case.document.format) for text in (case.text, case.injected.text))
        lines = case.injected.text.splitlines()
        for wrong in case.injected.wrong:
            at = wrong.spot
            if at.row is None or at.column is None:
                assert at.line is not None
                assert wrong.printed in lines[at.line - 1], case.name
            else:
                assert wrong.printed in spoiled[at.row][at.column], case.name
                assert wrong.right in clean[at.row][at.column], case.name


def test_values_are_read_as_they_are_written() -> None:
    assert read("-1m26.002s")[0] == pytest.approx(-86.002)
    assert read("\N{MINUS SIGN}12.5 %")[0] == -12.5
    assert read("↓36.7%")[0] == -36.7
    assert read("13.51 GB/s") == (13.51, "GB/s")
    assert read("~1,313 MiB") == (1313.0, "MiB")
    assert math.isnan(read("none")[0])


class _Told:
    """An audit that was told the truth: it names every error with its value, and `extra` besides."""

    def __init__(self, cases: list[Case], extra: Spot | None, value: str | None) -> None:
        self.errors = {case.injected.text: case.injected.wrong for case in cases}
        self.extra, self.value = extra, value

    def __call__(self, text: str, _name: str, _kind: str) -> SimpleNamespace:
        found = [self._check(wrong.spot, self.value or wrong.right) for wrong in self.errors.get(text, ())]
        if self.extra is not None:
            found.append(self._check(self.extra, "1"))
        return SimpleNamespace(checks=found, findings=found)

    @staticmethod
    def _check(spot: Spot, follows: str) -> SimpleNamespace:
        place = SimpleNamespace(table=spot.table, row=spot.row, column=spot.column, line=spot.line)
        return SimpleNamespace(place=place, follows=follows, printed="", rule="")


def test_an_audit_that_names_all_and_no_more_scores_full(
    cases: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "audit_text", _Told(cases, None, None))
    result = score(cases)
    assert (result.recall, result.false_clean, result.false_beside) == (1.0, 0.0, 0.0)


def test_a_wrong_value_is_no_recall_and_a_wrong_place_is_a_false_alarm(
    cases: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "audit_text", _Told(cases, Spot(9, 0, 0, None), "123456.7"))
    result = score(cases)
    assert result.recall == 0.0
    assert result.false_clean == result.false_beside == pytest.approx(60_000 / result.cells)


@pytest.mark.timeout(240)  # 120 audits, on a machine that may be busy
@pytest.mark.parametrize("seed", SEEDS)
def test_the_audit_names_the_errors_and_raises_no_false_alarms(seed: int) -> None:
    result = score(corpus(seed))
    text = "\n".join([f"seed {seed}", *result.lines(), *result.missed()])
    assert result.recall >= 0.95, text
    assert result.false_clean <= 1.0, text
    assert result.false_beside <= 1.0, text
