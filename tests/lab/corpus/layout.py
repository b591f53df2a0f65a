"""Documents of tables and sentences, and how they are written as Markdown, HTML and CSV."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tests.lab.corpus.figures import Number

Format = Literal["markdown", "ragged", "bare", "html", "csv"]
Part = str | Number


@dataclass(frozen=True)
class Cell:
    """What stands in a cell: text and numbers, one after the other."""

    parts: tuple[Part, ...]
    bold: bool = False


def cell(*parts: Part, bold: bool = False) -> Cell:
    """A cell of these parts."""
    return Cell(parts, bold)


@dataclass(frozen=True)
class Table:
    """A header and a body. With `merged`, equal neighbours in the first column are one merged cell.

    `groups` is a row of headings above the header, each with the columns that it spans; only HTML shows it.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    merged: bool = False
    groups: tuple[tuple[str, int], ...] = ()

    @property
    def cells(self) -> int:
        """How many cells the body has."""
        return len(self.rows) * len(self.header)


@dataclass(frozen=True)
class Sentence:
    """One line of prose."""

    parts: tuple[Part, ...]


def sentence(*parts: Part) -> Sentence:
    """A sentence of these parts."""
    return Sentence(parts)


@dataclass(frozen=True)
class Heading:
    """A title."""

    text: str


Block = Table | Sentence | Heading


@dataclass(frozen=True)
class Document:
    """What is published: blocks in order, in one format. CSV shows only the (one) table."""

    blocks: tuple[Block, ...]
    format: Format

    @property
    def cells(self) -> int:
        """How many cells its tables have."""
        return sum(block.cells for block in self.blocks if isinstance(block, Table))


@dataclass(frozen=True, order=True)
class Spot:
    """Where a number stands: a cell (0-based table, body row, column) or, in prose, a line (1-based)."""

    table: int | None
    row: int | None
    column: int | None
    line: int | None


def spots(document: Document) -> dict[int, Spot]:
    """Where each number of a document stands, by the number's id."""
    found: dict[int, Spot] = {}
    table = -1
    lines = write(document).splitlines()
    for at, block in enumerate(document.blocks):
        if isinstance(block, Table):
            table += 1
            for row, cells in enumerate(block.rows):
                for column, one in enumerate(cells):
                    for part in one.parts:
                        if isinstance(part, Number):
                            found[part.id] = Spot(table, row, column, None)
        elif isinstance(block, Sentence) and document.format != "csv":
            line = 1 + lines.index(_prose(document, at, {}))
            for part in block.parts:
                if isinstance(part, Number) and part.rule is not None:
                    found[part.id] = Spot(None, None, None, line)
    return found


def write(document: Document, instead: Mapping[int, str] | None = None) -> str:
    """The document's text; `instead` gives other texts for some numbers, by their ids."""
    texts = instead or {}
    if document.format == "csv":
        return "".join(_csv(block, texts) for block in document.blocks if isinstance(block, Table))
    parts = []
    for at, block in enumerate(document.blocks):
        if isinstance(block, Table):
            body = (
                _html(block, texts) if document.format == "html" else _markdown(block, texts, document.format)
            )
            parts.append(body)
        else:
            parts.append(_prose(document, at, texts))
    text = "\n\n".join(parts) + "\n"
    return f"<html><body>\n{text}</body></html>\n" if document.format == "html" else text


def _prose(document: Document, at: int, texts: Mapping[int, str]) -> str:
    block = document.blocks[at]
    if isinstance(block, Heading):
        return f"<h2>{html.escape(block.text)}</h2>" if document.format == "html" else f"## {block.text}"
    if isinstance(block, Sentence):
        text = _join(block.parts, texts)
        return f"<p>{html.escape(text)}</p>" if document.format == "html" else text
    raise TypeError("a table is not prose")


def _join(parts: tuple[Part, ...], texts: Mapping[int, str]) -> str:
    return "".join(part if isinstance(part, str) else texts.get(part.id, part.text) for part in parts)


def _grid(table: Table, texts: Mapping[int, str], bold: tuple[str, str], blank: bool) -> list[list[str]]:
    """The body as text; with `blank`, a merged first cell shows only once."""
    rows = []
    before = None
    for cells in table.rows:
        row = []
        for one in cells:
            text = _join(one.parts, texts)
            row.append(f"{bold[0]}{text}{bold[1]}" if one.bold and text else text)
        label = row[0]
        if blank and table.merged and label == before:
            row[0] = ""
        before = label
        rows.append(row)
    return rows


def _markdown(table: Table, texts: Mapping[int, str], form: Format) -> str:
    rows = _grid(table, texts, ("**", "**"), blank=True)
    header = list(table.header)
    rule = ["---"] + ["---:"] * (len(header) - 1)
    if form == "bare":
        lines = [" | ".join(row) for row in (header, rule, *rows)]
        return "\n".join(f"{line} |" if line.endswith("| ") else line for line in lines)
    lines = [f"| {' | '.join(row)} |" for row in (header, rule)]
    for number, row in enumerate(rows):
        shown = list(row)
        if form == "ragged":
            # A row whose last cells are empty ends early, and every third row has no closing pipe.
            while shown and shown[-1] == "":
                shown.pop()
            gap = " " * (1 + number % 3)
            line = "|" + "|".join(f"{gap}{text} " for text in shown)
            lines.append(line.rstrip() if number % 3 == 2 else line + "|")
        else:
            lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines)


def _html(table: Table, texts: Mapping[int, str]) -> str:
    rows = [[html.escape(text) for text in row] for row in _grid(table, texts, ("", ""), blank=False)]
    lines = ["<table>", "<thead>"]
    if table.groups:
        heads = "".join(
            f'<th colspan="{span}">{html.escape(name)}</th>' if span > 1 else f"<th>{html.escape(name)}</th>"
            for name, span in table.groups
        )
        lines.append(f"<tr>{heads}</tr>")
    lines.append("<tr>" + "".join(f"<th>{html.escape(name)}</th>" for name in table.header) + "</tr>")
    lines += ["</thead>", "<tbody>"]
    for at, row in enumerate(rows):
        lines.append("<tr>" + "".join(_td(table, rows, at, column) for column in range(len(row))) + "</tr>")
    return "\n".join([*lines, "</tbody>", "</table>"])


def _td(table: Table, rows: list[list[str]], at: int, column: int) -> str:
    text = f"<b>{rows[at][column]}</b>" if table.rows[at][column].bold else rows[at][column]
    if column or not table.merged:
        return f"<td>{text}</td>"
    if at and rows[at - 1][0] == rows[at][0]:
        return ""
    span = 1
    while at + span < len(rows) and rows[at + span][0] == rows[at][0]:
        span += 1
    return f'<td rowspan="{span}">{text}</td>' if span > 1 else f"<td>{text}</td>"


def _csv(table: Table, texts: Mapping[int, str]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(table.header)
    writer.writerows(_grid(table, texts, ("", ""), blank=False))
    return out.getvalue()
