"""Markdown and plain text: pipe tables as people publish them, tables in HTML between them, and the
text."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from kvik_lab.audit.grid import Line, build
from kvik_lab.audit.model import Document, Prose, Table
from kvik_lab.audit.quantity import plain
from kvik_lab.audit.read_html import read_html
from kvik_lab.audit.stacked import candidate, stacked

_RULE = re.compile(r"^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$")
# an info string behind backticks has none: what has is code within a line
_FENCE = re.compile(r"^\s*(`{3,}(?=[^`]*$)|~{3,})(.*)")


@dataclass
class _State:
    lines: list[str]
    tables: list[Table] = field(default_factory=list)
    prose: list[Prose] = field(default_factory=list)
    heading: str = ""
    fence: str = ""

    @property
    def code(self) -> bool:
        """Whether the lines are code, up to a fence like the one above them."""
        return bool(self.fence)


def read_markdown(text: str, name: str) -> Document:
    """The tables and the text of a Markdown file or of plain text."""
    state = _State(text.splitlines())
    at = 0
    while at < len(state.lines):
        at = _step(state, at)
    return Document(name, tuple(state.tables), tuple(state.prose))


def is_rule(line: str) -> bool:
    """Whether a line is the rule under a pipe table's header."""
    return bool(_RULE.match(line)) and "|" in line


def _step(state: _State, at: int) -> int:
    """Take what begins at a line; the line after it."""
    line = state.lines[at]
    mark = _FENCE.match(line)
    if mark and not state.code:
        state.fence = mark[1]
        return at + 1
    if mark and mark[1].startswith(state.fence) and not mark[2].strip():
        state.fence = ""
        return at + 1
    if not state.code:
        below = state.lines[at + 1] if at + 1 < len(state.lines) else ""
        if "|" in line and is_rule(below) and not is_rule(line):
            return _pipes(state, at)
        if "<table" in line.lower():
            return _html(state, at)
        after = _stack(state, at)
        if after is not None:
            return after
    _text(state, at)
    return at + 1


def _text(state: _State, at: int) -> None:
    raw = state.lines[at]
    text = raw.strip() if state.code else plain(re.sub(r"^\s*(#+|>+)\s*", "", raw))
    if not text:
        return
    if not state.code and (raw.lstrip().startswith("#") or len(text) < 200):
        state.heading = text
    above = len(state.tables) - 1 if state.tables else None
    state.prose.append(Prose(text, at + 1, state.heading, above, state.code))


def split_row(line: str, bare: int = 0) -> tuple[str, ...]:
    """The cells of a pipe table's line, with or without the pipes at its ends.

    `bare` is the width of a table whose header has no pipe before its first cell: there a leading pipe may be
    the end of an empty cell.
    """
    line = line.strip()
    if line.startswith("|") and not (bare and len(split_row(line[1:])) < bare):
        line = line[1:]
    if line.endswith("|") and not line.endswith("\\|"):
        line = line[:-1]
    return tuple(cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line))


def _pipes(state: _State, at: int) -> int:
    header = split_row(state.lines[at])
    bare = 0 if state.lines[at].strip().startswith("|") else len(header)
    body: list[Line] = []
    end = at + 2
    while end < len(state.lines) and "|" in state.lines[end] and not _FENCE.match(state.lines[end]):
        below = state.lines[end + 1] if end + 1 < len(state.lines) else ""
        if is_rule(below):
            break
        if not is_rule(state.lines[end]):
            body.append(Line(split_row(state.lines[end], bare), end + 1))
        end += 1
    if body:
        state.tables.append(build(header, body, at + 1, state.heading))
    return end


def _html(state: _State, at: int) -> int:
    end = at
    while end < len(state.lines) - 1 and "</table" not in state.lines[end].lower():
        end += 1
    inner = read_html("\n".join(state.lines[at : end + 1]), "")
    for table in inner.tables:
        rows = tuple(tuple(replace(cell, line=cell.line + at) for cell in row) for row in table.rows)
        heading = table.heading or state.heading
        state.tables.append(Table(table.header, rows, table.line + at, heading))
    return end + 1


def _stack(state: _State, at: int) -> int | None:
    """A table whose cells became paragraphs, when one begins here."""
    if at and state.lines[at - 1].strip():
        return None
    cells: list[tuple[int, str]] = []
    while at < len(state.lines) and candidate(state.lines[at].strip()):
        alone = at + 1 >= len(state.lines) or not state.lines[at + 1].strip()
        if not alone:
            return None
        cells.append((at + 1, state.lines[at].strip()))
        at += 1
        while at < len(state.lines) and not state.lines[at].strip():
            at += 1
    found = stacked(cells) if len(cells) >= 5 else None
    if found is None:
        return None
    header, rows, line = found
    state.tables.append(build(header, rows, line, state.heading))
    return at
