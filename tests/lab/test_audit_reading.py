"""Tables and quantities are read as people publish them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvik_lab.audit import audit_files, audit_text
from kvik_lab.audit.quantity import parse_cell, quantities
from kvik_lab.errors import LabError


def read(text: str) -> list[tuple[float, str]]:
    return [(part.quantity.number, part.quantity.unit.symbol) for part in parse_cell(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("TE: 0.195 (↓36.7%)", [(0.195, ""), (-36.7, "%")]),
        ("90.0 ms (-25.0%)", [(90.0, "ms"), (-25.0, "%")]),
        ("90.0 ms (1.3x, -30.0 ms)", [(90.0, "ms"), (1.3, "x"), (-30.0, "ms")]),
        ("90.0 -> 120.0", [(90.0, ""), (120.0, "")]),
        ("~109 MB", [(109.0, "MB")]),
        ("8m14.902s", [(494.902, "s")]),
        ("-1m26.002s", [(-86.002, "s")]),
        ("12:31.05", [(751.05, "s")]),
        ("**+11.8ms (TCP 優位)**", [(11.8, "ms")]),
        ("<span style='color:red'>↓70.39% </span>", [(-70.39, "%")]),
        ("1,717.07", [(1717.07, "")]),
        ("222 GB/s (stable over 6 runs)", [(222.0, "GB/s")]),
        ("16 KiB", [(16.0, "KiB")]),
        ("$1,200", [(1200.0, "$")]),
        ("($1,200)", [(-1200.0, "$")]),
        ("(27)%", [(-27.0, "%")]),
        ("12.5 ± 0.3 ms", [(12.5, "ms")]),
        ("12.5 ms ± 0.3 ms", [(12.5, "ms")]),
        ("12.5¹", []),
        ("10⁶", []),
        ("10<sup>-6</sup> s", []),
        ("12.5<sup>a</sup>", [(12.5, "")]),
        ("-", []),
        ("(測定中)", []),
        ("1K, 2K, 3K", []),
        ("Llama-3.2-1B", []),
        ("block=1MB, threads=16", []),
        ("192.168.3.77:2379", []),
    ],
)
def test_a_cell_is_read_as_its_quantities_or_as_none(text: str, expected: list[tuple[float, str]]) -> None:
    assert read(text) == expected


def test_printed_digits_give_the_interval() -> None:
    (one,) = parse_cell("36.70 ms")
    assert (one.quantity.low, one.quantity.high) == pytest.approx((36.695, 36.705))
    (about,) = parse_cell("~200 MB")
    assert (about.quantity.low, about.quantity.high) == (150.0, 250.0)
    (span,) = parse_cell("285-296 GB/s")
    assert (span.quantity.number, span.quantity.upper) == (285.0, 296.0)
    (bound,) = parse_cell("±1%以内")
    assert bound.quantity.bound


def test_what_follows_is_shown_as_the_cell_prints() -> None:
    shown = {text: parse_cell(text)[0].quantity.show(value) for text, value in _SHOWN}
    assert shown == {
        "-1m26.002s": "-1m5.500s",
        "1,717.07": "2,000.00",
        "↓36.7%": "↓12.3%",
        "+4 ms": "+7 ms",
        "$72.00": "$27.00",
        "-$1,200": "-$900",
    }


_SHOWN = [
    ("-1m26.002s", -65.5),
    ("1,717.07", 2000.0),
    ("↓36.7%", -12.34),
    ("+4 ms", 7.2),
    ("$72.00", 27.0),
    ("-$1,200", -900.0),
]


def test_running_text_keeps_identifiers_out() -> None:
    found = quantities("On Qwen2.5-7B at threads=16, 1,908.5ms -> 1,467.6ms (-23.1%, -441ms) in v0.15.1")
    assert [q.number for q in found if q.unit.symbol] == [1908.5, 1467.6, -23.1, -441.0]


def test_a_size_stands_before_what_is_counted() -> None:
    found = quantities("4 KB pages, 10K requests, 20 ms steps, 1.5K tokens and 5 s-7 s")
    assert [(q.number * q.unit.scale, q.unit.kind) for q in found] == [
        (4000.0, "bytes"),
        (10_000.0, "count"),
        (0.02, "time"),
        (1500.0, "tokens"),
        (5.0, "time"),
    ]
    assert not audit_text("4 KB pages * 262,144 = 1 GB.\n").findings


def test_exponents_and_marks_of_footnotes_are_no_digits() -> None:
    (table,) = audit_text(
        "<table><tr><th>a<th>b</tr><tr><td>12.5<sup>1</sup><td>10<sup>6</sup></tr></table>"
    ).tables
    assert [cell.parts for cell in table.rows[0]] == [(), ()]
    assert [q.number for q in quantities("2^20 bytes or 10^-6 of 7 GB")] == [7.0]


def test_a_table_without_outer_pipes_and_with_a_header_one_cell_short() -> None:
    text = "a (s) | b | delta-b | |\n---|---|---|---|\nfirst | 2.00 | 4.00 | 2.00 |\n"
    text += "second | 3.00 | 9.00 | 3.00 |\n"
    (table,) = audit_text(text).tables
    assert table.header == ("", "a (s)", "b", "delta-b")
    assert [cell.text for cell in table.rows[1]] == ["second", "3.00", "9.00", "3.00"]


@pytest.mark.parametrize(
    "code",
    ["```\nx\n~~~\n```", "````md\n```sh\nx\n```\n````", "```x``` is code", "~~~\n```\n~~~", "```\n```y\n```"],
)
def test_code_ends_at_a_fence_like_the_one_that_began_it(code: str) -> None:
    assert len(audit_text(f"{code}\n\n| a | b |\n|---|---|\n| 1 | 2 |\n").tables) == 1


def test_cells_merged_from_above_are_put_under_their_column() -> None:
    text = (
        "| set | model | change | note |\n|---|---|---|---|\n| TP=2 | one | +8.6% | best |\n"
        "| two | +4.5% | ||\n| three | +1-2% | ||\n"
    )
    (table,) = audit_text(text).tables
    assert [cell.text for cell in table.rows[1]] == ["TP=2", "two", "+4.5%", ""]


def test_html_cells_span_rows_and_columns() -> None:
    text = (
        "<table><tr><th rowspan=2>size</th><th colspan=2>time (ms)</th></tr><tr><th>a</th><th>b</th></tr>"
        "<tr><td rowspan=2>4K</td><td>1.0</td><td>2.0</td></tr><tr><td>3.0</td><td>4.0</td></tr></table>"
    )
    (table,) = audit_text(text).tables
    assert table.header == ("size", "time (ms) a", "time (ms) b")
    assert [cell.text for cell in table.rows[1]] == ["4K", "3.0", "4.0"]


def test_a_table_in_a_table_is_one_of_its_own() -> None:
    inner = "<table><tr><th>run<th>a<th>b</tr><tr><td>x<td>1.0<td>2.0</tr></table>"
    page = f"<html><table><tr><td>menu<td>{inner}</tr></table><p>It is 5 ms.</p>{inner}</html>"
    assert [table.header for table in audit_text(page).tables] == [("run", "a", "b")] * 2


def test_a_table_whose_cells_became_paragraphs() -> None:
    cells = ["Configuration", "Write", "Read", "threads=8", "318.71 GB/s", "277.06 GB/s"]
    cells += ["threads=16", "365.66 GB/s", "-", "threads=32", "364.21 GB/s", "250.90 GB/s"]
    (table,) = audit_text("Measured:\n\n" + "\n\n".join(cells) + "\n\nThat is all of it.\n").tables
    assert table.header == ("Configuration", "Write", "Read")
    assert [len(row) for row in table.rows] == [3, 3, 3]


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_separated_values(mark: str) -> None:
    rows = [("run", "before", "after", "difference"), ("a", "2.0", "5.0", "3.0")]
    rows.append(("b", "4.0", "9.0", "5.5"))
    audit = audit_text("\n".join(mark.join(row) for row in [*rows, ("c", "1.0", "7.0", "6.0")]))
    assert [(check.place.row, check.place.column, check.follows) for check in audit.findings] == [
        (1, 3, "5.0")
    ]


def test_a_cell_of_any_length_is_text_or_refused() -> None:
    """Python's csv takes none above 128 KiB: as a table it is refused by name. In a page it may be a picture,
    and takes no time: it would be hours if each letter of it were tried as the beginning of a name."""
    long = "x" * 200_000
    with pytest.raises(LabError, match="this is no table"):
        audit_text(f"a,b\n1,{long}\n", "long.csv", kind="csv")
    audit_text(f"{long}\n\n| a | b |\n|---|---|\n| 1 | 2 |\n", "page.md")
    audit_text(f"{long}\n{long}\n", "text")


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    bad = tmp_path / "bad.csv"
    bad.write_bytes(b"\xff\xfe\x00a")
    with pytest.raises(LabError, match="UTF-8"):
        audit_files([bad])
    with pytest.raises(LabError, match="give the path"):
        audit_files([tmp_path / "absent.md"])


@pytest.mark.parametrize("cell", ["1e999", "1e-400", "9" * 400])
def test_a_number_that_no_arithmetic_survives_is_none(cell: str) -> None:
    rows = f"| a | 120.0 | 90.0 | -25.0% |\n| b | 200.0 | 170.0 | -15.0% |\n| c | {cell} | 50.0 | -60.0% |"
    head = "| run | before (ms) | after (ms) | change |\n|---|---|---|---|"
    assert not audit_text(f"{head}\n{rows}\n\nOf {cell}.\n").findings
