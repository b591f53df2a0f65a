"""Tables of comma-, semicolon- or tab-separated values; lines that begin with # are text."""

from __future__ import annotations

import csv
import io

from kvik_lab.audit.grid import Line, build
from kvik_lab.audit.model import Document, Prose, Table
from kvik_lab.audit.quantity import plain

_DELIMITERS = ",\t;|"


def delimiter(lines: list[str]) -> str | None:
    """The delimiter that cuts all lines into the same number of cells, two or more; or None."""
    lines = [line for line in lines if line.strip() and not line.startswith("#")]
    for mark in _DELIMITERS:
        try:
            widths = {len(row) for row in csv.reader(lines, delimiter=mark)}
        except csv.Error:  # such as a cell of more than 128 KiB
            continue
        if len(lines) > 1 and len(widths) == 1 and widths.pop() > 1:
            return mark
    return None


def read_csv(text: str, name: str) -> Document:
    """A CSV text: blank lines part tables, lines that begin with # are text beside them."""
    lines = text.splitlines()
    mark = delimiter(lines) or ("\t" if "\t" in text else ",")
    rows: list[Line] = []
    prose: list[Prose] = []
    tables: list[Table] = []
    heading = ""
    source = csv.reader(io.StringIO(text), delimiter=mark, skipinitialspace=True)
    for cells in [*((tuple(row), source.line_num) for row in source), ((), len(lines) + 1)]:
        row, number = cells
        if row and row[0].startswith("#"):
            heading = plain(mark.join(row).lstrip("# "))
            prose.append(Prose(heading, number, heading, len(tables) - 1 if tables else None, code=False))
        elif any(cell.strip() for cell in row):
            rows.append(Line(row, number))
        elif rows:
            if len(rows) > 1:
                tables.append(build(rows[0].cells, rows[1:], rows[0].number, heading))
            rows = []
    return Document(name, tuple(tables), tuple(prose))
