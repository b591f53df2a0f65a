"""A report says the same in HTML, Markdown and JSON, escapes what files bring, and shows what is missing."""

from __future__ import annotations

import dataclasses
import json
import re
from html import unescape
from html.parser import HTMLParser
from typing import Any

import pytest
from markdown_it import MarkdownIt

from kvik_lab.errors import LabError
from kvik_lab.report.cells import Estimate, Missing, State
from kvik_lab.report.codec import from_json, json_schema, to_json
from kvik_lab.report.draw import draw
from kvik_lab.report.figures import Bars, Line
from kvik_lab.report.html import to_html
from kvik_lab.report.markdown import to_markdown
from kvik_lab.report.model import Claim, NoInterval, Report, Section, Table, Verdict
from kvik_lab.report.tabulate import as_table
from tests.lab.report.gallery import HOSTILE, figures, gallery


class Page(HTMLParser):
    """The elements of a page, and the JSON of its figures."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.figures: dict[str, Any] = {}
        self._figure, self._json = "", False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append((tag, given))
        self._figure = given.get("id") or "" if tag == "figure" else self._figure
        self._json = tag == "script" and given.get("type") == "application/json"

    def handle_data(self, data: str) -> None:
        if self._json:
            self.figures[self._figure] = json.loads(data)
            self._json = False


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(to_html(gallery()))


def test_json_gives_back_the_same_report_and_names_its_version() -> None:
    report = gallery(HOSTILE)
    assert from_json(to_json(report)) == report
    assert json.loads(to_json(report))["schema"] == "kvik-lab-report/1"
    assert json_schema()["properties"]["schema"]["const"] == "kvik-lab-report/1"


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"title": "x", "sections": [], "schema": "kvik-lab-report/2"}']
)
def test_json_that_is_no_report_is_refused(text: str) -> None:
    with pytest.raises(LabError, match="this is no report"):
        from_json(text)


def test_the_page_embeds_each_figures_numbers(page: Page) -> None:
    drawn = {name: figure["data"] for name, figure in page.figures.items()}
    assert drawn["run-order"][0]["y"] == [2.0, 3.0, None, 9.0]
    assert drawn["run-order"][1]["y"] == [2.5, 2.5]
    assert drawn["distributions"][0]["x"] == [1.0, 2.0, 3.0]
    assert drawn["distributions"][0]["y"] == pytest.approx([1 / 3, 2 / 3, 1.0], abs=1e-6)
    assert drawn["forest"][0]["x"] == [0.9]
    assert drawn["forest"][0]["error_x"]["array"] == pytest.approx([0.2])
    assert drawn["forest"][0]["error_x"]["arrayminus"] == pytest.approx([0.1])
    assert drawn["factor"][0]["y"] == drawn["bars"][0]["y"] == [1.5, None]
    assert drawn["size-time"][1]["y"] == [679.33, 1646.16, 3058.02]
    waterfall = {trace["name"]: trace for trace in drawn["waterfall"]}
    assert waterfall["first token"]["base"] == [231.69]
    assert waterfall["transfer"]["x"] == []
    assert drawn["heat"][0]["z"] == [[-7.0, 0.5], [-1.5, None]]
    assert drawn["lines"][0]["y"] == [20.0, None]
    assert drawn["roofline"][0]["x"] == [64, 1024]
    assert set(drawn) == {f.id for f in figures()} | {"hostile"}


def test_an_open_band_reaches_to_the_edge_of_what_was_measured(page: Page) -> None:
    shapes = page.figures["size-time"]["layout"]["shapes"]
    band = next(s for s in shapes if s["type"] == "rect")
    assert (band["x0"], band["x1"]) == (1000.0, 12000.0)
    assert next(s for s in shapes if s["type"] == "line")["x0"] == 1150.0


def test_what_is_missing_is_said_and_never_zero(page: Page) -> None:
    said = {name: [n["text"] for n in f["layout"].get("annotations", [])] for name, f in page.figures.items()}
    for name, word in {
        "run-order": "failed",
        "forest": "failed",
        "bars": "failed",
        "factor": "failed",
        "size-time": "in progress",
        "waterfall": "not measured",
        "heat": "not possible",
        "lines": "in progress",
    }.items():
        assert any(word in text for text in said[name]), name
    for figure in page.figures.values():
        for trace in figure["data"]:
            assert 0 not in (trace.get("y") or [])[1:] or trace.get("orientation") == "h"
    text = to_markdown(gallery())
    for word in ("in progress", "failed: ran out of memory", "not possible: the model does not fit"):
        assert word in text


def test_significance_is_marked_and_what_was_not_tested_is_not(page: Page) -> None:
    words = [note["text"] for note in page.figures["heat"]["layout"]["annotations"]]
    assert words[:3] == ["<b>-7 *</b>", "+0.5 n.s.", "-1.5<br>-1 to -2"]


def test_markdown_tables_have_every_row_and_column() -> None:
    tokens = MarkdownIt("commonmark").enable("table").parse(to_markdown(gallery(HOSTILE)))
    rows = sum(token.type == "tr_open" for token in tokens)
    wanted = sum(len(as_table(f).rows) + 1 for f in gallery().sections[0].figures) + 5 + 3
    assert rows == wanted
    assert not any(token.type in {"html_block", "html_inline"} for token in tokens)


def test_figures_as_tables_keep_the_bounds() -> None:
    table = as_table(Bars("b", "B", "x", "y", ("1",), (Line("EFA", (Estimate(1.5, 1.25, 1.75),)),)))
    assert table.rows == (("1", Estimate(1.5, 1.25, 1.75)),)
    assert "1.5 \\[1.25, 1.75\\]" in to_markdown(Report("r", (Section("s", "s", (), (table,)),)))


def test_names_from_files_never_become_markup() -> None:
    page = Page(to_html(gallery(HOSTILE)))
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert len([tag for tag, given in page.tags if tag == "script" and not given]) == 2
    assert not [given for _, given in page.tags if any(name.startswith("on") for name in given)]
    for text in _strings(page.figures):
        assert not re.search(r"<(?!/?b>|br>|extra></extra>|/extra>)", text), text
    rendered = MarkdownIt("commonmark", {"html": True}).enable("table").render(to_markdown(gallery(HOSTILE)))
    assert "<img" not in rendered
    assert "<script" not in rendered
    assert "<a " not in rendered
    assert HOSTILE.partition("|")[0] in unescape(rendered)


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for item in inner for text in _strings(item)]


def test_the_page_loads_nothing_and_is_small() -> None:
    text = to_html(gallery())
    page = Page(text)
    loads = [given[name] or "" for _, given in page.tags for name in ("src", "href") if name in given]
    assert loads
    assert all(load.startswith(("#", "data:")) for load in loads)
    style = text[text.index("<style>") : text.index("</style>")]
    assert "@import" not in style
    assert "url(" not in style
    assert "default-src 'none'" in text
    assert len(text.encode()) < 6_000_000
    assert text.count("plotly.js v") == 1


def test_every_link_of_the_page_leads_somewhere(page: Page) -> None:
    ids = {given["id"] for _, given in page.tags if "id" in given}
    links = {given["href"] or "" for tag, given in page.tags if tag == "a"}
    assert links
    assert {link.removeprefix("#") for link in links} <= ids
    assert len(ids) == len([given for _, given in page.tags if "id" in given])


def test_a_claim_rests_on_something_that_is_there() -> None:
    none = Claim("C", "x", 1.0, "", NoInterval("why"), ("nowhere",), Verdict.SUPPORTED)
    with pytest.raises(LabError, match="rests on 'nowhere'"):
        Report("r", (Section("s", "s", claims=(none,)),))
    with pytest.raises(LabError, match="rests on nothing"):
        Report("r", (Section("s", "s", claims=(dataclasses.replace(none, rests_on=()),)),))


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(LabError, match="swap its bounds"):
        Estimate(1.0, 2.0, 1.0)
    with pytest.raises(LabError, match="say with Missing"):
        Estimate(float("nan"))
    with pytest.raises(LabError, match="1 cells for 2 columns"):
        Table("t", "t", ("a", "b"), (("x",),))
    with pytest.raises(LabError, match="2 cells for 1 levels"):
        Bars("b", "b", "x", "y", ("1",), (Line("l", (Estimate(1.0), Estimate(Missing(State.FAILED)))),))
    with pytest.raises(LabError, match="more than once"):
        Report("r", (Section("s", "s"), Section("s", "s")))


def test_equal_names_stay_apart_in_a_figure() -> None:
    line = Line("EFA", (Estimate(1.0), Estimate(2.0)))
    drawn = draw(Bars("b", "b", "x", "y", ("same", "same"), (line,)))
    assert drawn["data"][0]["x"] == [0.0, 1.0]
    assert drawn["layout"]["xaxis"]["ticktext"] == ["same", "same"]


def test_a_logarithmic_axis_names_its_ticks_in_full(page: Page) -> None:
    axis = page.figures["roofline"]["layout"]["xaxis"]
    assert axis["type"] == "log"
    assert {"50", "100", "200", "500", "1000", "2000"} <= set(axis["ticktext"])
    assert [float(text) for text in axis["ticktext"]] == pytest.approx(axis["tickvals"])
