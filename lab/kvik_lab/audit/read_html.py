"""Tables of HTML, with cells that span rows and columns."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

from kvik_lab.audit.grid import Line, build
from kvik_lab.audit.model import Document, Prose, Table
from kvik_lab.audit.quantity import plain


@dataclass
class _Raw:
    text: str
    line: int
    rows: int
    columns: int
    head: bool


@dataclass
class _Open:
    line: int
    heading: str
    caption: str = ""
    rows: list[list[_Raw]] = field(default_factory=list)


_BLOCKS = {"p", "li", "h1", "h2", "h3", "h4", "h5", "h6", "div", "caption", "pre", "blockquote", "dd", "dt"}


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tables: list[_Open] = []
        self.prose: list[Prose] = []
        self.outer: list[_Open | None] = []
        self.open: _Open | None = None
        self.cell: _Raw | None = None
        self.skip = 0
        self.text = ""
        self.text_line = 1
        self.heading = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open what the tag opens."""
        if tag in ("script", "style"):
            self.skip += 1
        elif tag == "table":  # that a page is laid out by a table does not make its cells one
            self._flush()
            self.outer.append(self.open)
            self.cell = None
            self.open = _Open(self.getpos()[0], self.heading)
        elif tag == "tr" and self.open is not None:
            self.open.rows.append([])
        elif tag in ("td", "th") and self.open is not None:
            self._start_cell(tag, dict(attrs))
        elif tag == "br" and self.cell is not None:
            self.cell.text += " ; "
        elif tag == "sup":
            self.handle_data("^")
        elif tag in _BLOCKS and self.cell is None:
            self._flush()

    def _start_cell(self, tag: str, attrs: dict[str, str | None]) -> None:
        assert self.open is not None  # noqa: S101 - the caller saw it
        if not self.open.rows:
            self.open.rows.append([])
        rows, columns = _span(attrs.get("rowspan")), _span(attrs.get("colspan"))
        self.cell = _Raw("", self.getpos()[0], rows, columns, tag == "th")
        self.open.rows[-1].append(self.cell)

    def handle_endtag(self, tag: str) -> None:
        """Close what the tag closes."""
        if tag in ("script", "style"):
            self.skip = max(0, self.skip - 1)
        elif tag in ("td", "th"):
            self.cell = None
        elif tag == "caption" and self.open is not None:
            self.open.caption, self.text = self.text.strip(), ""
        elif tag == "table" and self.open is not None:
            self.tables.append(self.open)
            self.open, self.cell, self.text = self.outer.pop(), None, ""
        elif tag in _BLOCKS and self.cell is None:
            self._flush()

    def handle_data(self, data: str) -> None:
        """Text belongs to the open cell, or to the prose."""
        if self.skip:
            return
        if self.cell is not None:
            self.cell.text += data
            return
        if not self.text.strip() and data.strip():
            self.text_line = self.getpos()[0] + data[: len(data) - len(data.lstrip())].count("\n")
        self.text += data

    def _flush(self) -> None:
        text = plain(" ".join(self.text.split()))
        self.text = ""
        if text and self.open is None:
            table = len(self.tables) - 1 if self.tables else None
            self.prose.append(Prose(text, self.text_line, self.heading, table, code=False))
            self.heading = text

    def finish(self) -> None:
        """Take what is left."""
        self.close()
        self._flush()


def _span(value: str | None) -> int:
    return min(int(value), 1000) if value and value.isdigit() and int(value) > 0 else 1


def _expand(rows: list[list[_Raw]]) -> list[list[_Raw]]:
    """The rows with every spanning cell repeated where it spans."""
    grid: list[dict[int, _Raw]] = [{} for _ in rows]
    for at, row in enumerate(rows):
        column = 0
        for cell in row:
            while column in grid[at]:
                column += 1
            for down in range(min(cell.rows, len(rows) - at)):
                for right in range(cell.columns):
                    grid[at + down][column + right] = cell
            column += cell.columns
    return [[line[column] for column in sorted(line)] for line in grid if line]


def _table(raw: _Open) -> Table | None:
    grid = _expand(raw.rows)
    if not grid:
        return None
    heads = 0
    while heads < len(grid) - 1 and all(cell.head for cell in grid[heads]):
        heads += 1
    heads = max(heads, 1)
    width = max(len(row) for row in grid)
    names = []
    for column in range(width):
        above = [plain(row[column].text) for row in grid[:heads] if column < len(row)]
        names.append(" ".join(dict.fromkeys(text for text in above if text)))
    body = [Line(tuple(cell.text for cell in row), max(cell.line for cell in row)) for row in grid[heads:]]
    return build(tuple(names), body, raw.line, plain(raw.caption) or raw.heading) if body else None


def read_html(text: str, name: str) -> Document:
    """The tables and the text of an HTML page or fragment."""
    parser = _Parser()
    parser.feed(text)
    parser.finish()
    tables = [table for table in map(_table, parser.tables) if table is not None]
    return Document(name, tuple(tables), tuple(parser.prose))
