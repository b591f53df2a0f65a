"""The articles redrawn: their numbers, the audit's findings beside them, and what of them is left out."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvik_lab.errors import LabError
from kvik_lab.report.cells import Missing, State
from kvik_lab.report.codec import from_json, to_json
from kvik_lab.report.html import to_html
from kvik_lab.report.markdown import to_markdown
from kvik_lab.report.model import Report, Table
from kvik_lab.report.tabulate import as_table
from tests.lab.redrawn import s0, s1, s2, s3, s4
from tests.lab.redrawn.__main__ import articles_command
from tests.lab.redrawn.audited import audit_article
from tests.lab.redrawn.coverage import items
from tests.lab.redrawn.pieces import Source
from tests.lab.redrawn.printed import NAMES, number, read_article
from tests.lab.redrawn.redraw import redraw

MIB = 2**20

# docs/lab/articles.md: what is printed and what follows.
FINDINGS = {
    "S0": [
        ("14,580 patterns", "4,860 patterns"),
        ("0.1094 MB/token", "0.0547 MB/token"),
        ("2,000", "2,048"),
        ("4,000", "3,800"),
        ("414 MB", "416 MB"),
    ],
    "S1": [
        ("36.7%", "29.3%"),
        ("53.29%", "40.31%"),
        ("43.1%", "43.0%"),
        ("↓74.50%", "↓65.68%"),
    ],
    "S2": [("365 GB/s", "366 GB/s")],
    "S3": [("-2.5%", "-2.4%"), ("-13.0%", "-12.9%")],
    "S4": [("3.16", "5.92"), ("2.72", "7.27"), ("2.15", "7.08"), ("2.31", "6.44"), ("3.19", "7.69")],
}


@cache
def report(name: str) -> Report:
    return redraw(name)


def table(name: str, id_: str) -> Table:
    return next(t for s in report(name).sections for t in s.tables if t.id == id_)


@pytest.mark.parametrize("name", NAMES)
def test_each_report_is_whole(name: str) -> None:
    found = report(name)
    page = to_html(found)
    assert len(page.encode()) < 6_000_000
    assert from_json(to_json(found)) == found
    figures = [figure for section in found.sections for figure in section.figures]
    assert figures
    for figure in figures:
        assert as_table(figure).rows, figure.id
        assert f'id="{figure.id}"' in page
    assert [s.id for s in found.sections][-3:] == ["claims", "limits", "coverage"]


@pytest.mark.parametrize("name", NAMES)
def test_the_audit_finds_what_the_docs_list_and_nothing_else(name: str) -> None:
    found = [
        (check.printed, check.follows)
        for one in audit_article(read_article(name)).values()
        for check in one.findings
    ]
    assert sorted(found) == sorted(FINDINGS[name])
    audits = [t for s in report(name).sections for t in s.tables if t.id.endswith("-audit")]
    shown = [row[:2] for one in audits for row in one.rows]
    assert sorted(shown) == sorted(FINDINGS[name])


def test_every_entry_of_the_checklist_is_there_once() -> None:
    assert [item.number for name in NAMES for item in items(name)] == list(range(1, 61))
    for name in NAMES:
        assert all(item.by or item.why for item in items(name))


def test_sizes_rates_and_crossover_of_s0() -> None:
    rows = table("S0", "kv-sizes").rows
    assert rows[0][2] == pytest.approx(1000 * 2 * 28 * 4 * 128 * 2 / MIB)
    assert rows[0][4] == pytest.approx(109 * MIB / 24.2e-3 / 1e9)
    found = s0.crossing_of(Source("S0"))
    between = s0.bracket(found)
    assert (between.lo, between.hi) == (1000, 2048)
    assert found.estimates[0] == pytest.approx(1000 + 1048 * 11 / (11 + 70.91), abs=0.5)
    ttft = [row[3] for row in table("S0", "ttft").rows]
    assert isinstance(ttft[3], Missing)
    last = table("S0", "ttft").rows[4]
    assert last[5] == Missing(State.IN_PROGRESS)


def test_the_plan_of_s0_counts_as_the_study_does() -> None:
    rows = {row[0]: row[1] for row in table("S0", "plan-sizes").rows}
    assert (rows["product of levels"], rows["rows"], rows["distinct rows"]) == (6480, 58, 51)
    assert "4,860" in table("S0", "plan-sizes").note
    layers = table("S0", "plan-layers").rows
    assert [row[2] for row in layers] == [19, 20, 12, 8]


def test_means_and_fits_of_s1() -> None:
    means = table("S1", "means").rows
    assert [row[2] for row in means] == pytest.approx([-29.27, 42.96, -30.19, 50.25], abs=0.01)
    for row in table("S1", "hosts-identity").rows:
        assert isinstance(row[4], float)
        assert isinstance(row[5], float)
        assert row[5] == pytest.approx(row[4], abs=0.0051)
    knee = s1.knee(Source("S1"), 16)
    assert (knee.lo, knee.hi) == (20, 2000)
    assert not knee.found
    assert s1.ridge(s1.batched(Source("S1"), "hosts")) == pytest.approx(120, rel=0.1)


def test_shares_sweeps_and_gaps_of_s2() -> None:
    source = Source("S2")
    assert s2.peak(source, "b300-gpu", "Write") == (780.33, "32 x 32")
    assert s2.peak(source, "b200-gpu", "Write") == (302.0, "16 x 128")
    assert s2.peak(source, "b200-cpu", "Write")[0] == 222
    rate = 1e-6 / s2.ceilings(source, "Write").parameters[0].value
    assert rate == pytest.approx(1.47, abs=0.03)
    heat = s2.heat(source, "p5-gpu")
    at = heat.rows.index("write, 64 threads"), heat.columns.index("batch 128")
    cell = heat.cells[at[0]][at[1]].value
    assert isinstance(cell, Missing)
    assert cell.state is State.FAILED


def test_ranges_groups_and_times_of_s3() -> None:
    found = {(c.layout, c.model): (c.low, c.high) for c in s3.changes(Source("S3"), "swapped")}
    assert list(found["TP=4, PP=1", "others"]) == [-14, -8]
    assert list(found["TP=1", "all"]) == [-1, 1]
    assert list(found["TP=4, PP=1", "Llama-2-7b"]) == [-13.8, -13.8]
    times = table("S3", "nfs-times").rows
    assert times[3][1:5] == pytest.approx((665.422, 579.420, -86.002, -12.924), abs=0.001)


def test_tiers_and_ratios_of_s4() -> None:
    source = Source("S4")
    starts = [s4.startup(source, name).value for name in s4.TIERS]
    assert starts == pytest.approx([1095, 1.26, 92.0, 159.7], rel=0.01)
    assert s4.over("0.77", "0.130").value == pytest.approx(5.923, abs=0.001)
    assert s4.kv_bytes("Qwen2.5-7B-Instruct") == 8192 * 57344


def test_numbers_are_read_as_printed() -> None:
    assert number("~1,313 MB") == 1313
    assert number("-1m26.002s") == pytest.approx(-86.002)
    assert number("↓74.50%") == 74.5
    with pytest.raises(LabError, match="no number"):
        number("others")


def test_the_command_writes_each_form(tmp_path: Path) -> None:
    done = CliRunner().invoke(articles_command, ["S3", "--out", str(tmp_path / "out"), "--json"])
    assert done.exit_code == 0, done.output
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["S3.html", "S3.json", "S3.md"]
    said = json.loads(done.output)
    assert [entry["number"] for entry in said["checklist"]] == [47, 48, 49, 50, 51, 52]
    assert (tmp_path / "out" / "S3.md").read_text(encoding="utf-8") == to_markdown(report("S3"))
    assert CliRunner().invoke(articles_command, ["S9", "--out", str(tmp_path)]).exit_code == 2
