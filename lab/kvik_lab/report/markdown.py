"""A report as Markdown: its text and tables, its figures as tables of their data."""

from __future__ import annotations

import re

from kvik_lab.report.cells import Estimate, Missing, show, show_estimate
from kvik_lab.report.model import Answer, Cell, Claim, Report, Section, Table
from kvik_lab.report.tabulate import as_table

_MARKUP = re.compile(r"([\\`*_{}\[\]<>#|~$!])")


def to_markdown(report: Report) -> str:
    """The report as CommonMark with pipe tables."""
    parts = [f"# {escape(report.title)}"]
    if report.answer is not None:
        parts += _answer(report.answer)
    for section in report.sections:
        parts += _section(section)
    return "\n\n".join(parts) + "\n"


def escape(text: str) -> str:
    """Text that Markdown shows as it is: no markup, HTML, or end of line gets through."""
    return _MARKUP.sub(r"\\\1", " ".join(text.split())).replace("&", "&amp;").replace("://", ":&#47;/")


def cell_text(cell: Cell) -> str:
    """What a cell shows."""
    if isinstance(cell, str):
        return cell
    if isinstance(cell, Estimate):
        return show_estimate(cell)
    return show(cell)


def estimate_text(claim: Claim) -> str:
    """A claim's estimate with its unit, which what is missing does not have."""
    unit = "" if isinstance(claim.estimate, Missing) else claim.unit
    return f"{show(claim.estimate)} {unit}".strip()


def _answer(answer: Answer) -> list[str]:
    parts = [f"*{escape(answer.question)}*", f"**{escape(answer.sentence)}**"]
    if answer.claims:
        parts.append(_claims(answer.claims))
    parts += [f"How sure: {escape(answer.sure)}", f"What would change it: {escape(answer.change)}"]
    return [*parts, "\n".join(f"- {escape(name)}: {escape(value)}" for name, value in answer.facts)]


def _section(section: Section) -> list[str]:
    parts = [f"## {escape(section.title)}", *(escape(text) for text in section.text)]
    for table in section.tables:
        parts += _table(table)
    for figure in section.figures:
        parts += _table(as_table(figure))
    if section.claims:
        parts.append(_claims(section.claims))
    return parts


def _table(table: Table) -> list[str]:
    lines = [_row(table.columns), _rule(len(table.columns))]
    lines += [_row(tuple(cell_text(cell) for cell in row)) for row in table.rows]
    parts = [f"**{escape(table.title)}** (`{table.id}`)", "\n".join(lines)]
    return [*parts, escape(table.note)] if table.note else parts


def _claims(claims: tuple[Claim, ...]) -> str:
    header = ("id", "claim", "estimate", "interval", "rests on", "verdict")
    lines = [_row(header), _rule(len(header))]
    for claim in claims:
        verdict = claim.verdict.value + (f": {claim.because}" if claim.because else "")
        estimate = estimate_text(claim)
        rests = ", ".join(claim.rests_on)
        lines.append(_row((claim.id, claim.sentence, estimate, str(claim.interval), rests, verdict)))
    return "\n".join(lines)


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(escape(cell) for cell in cells) + " |"


def _rule(columns: int) -> str:
    return "|" + " --- |" * columns
