"""A report as one HTML file that needs nothing else: plotly's JavaScript, styles and data are in it."""

from __future__ import annotations

import json
from html import escape

from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

from kvik_lab.report.answer_html import anchor, answer_html
from kvik_lab.report.draw import draw
from kvik_lab.report.figures import Figure
from kvik_lab.report.markdown import cell_text, estimate_text
from kvik_lab.report.model import Cell, Claim, Report, Section, Table, Verdict
from kvik_lab.report.page import SCRIPT, STYLE
from kvik_lab.report.tabulate import as_table

_CLASSES = {
    Verdict.SUPPORTED: "yes",
    Verdict.NOT_SUPPORTED: "no",
    Verdict.INSUFFICIENT: "open",
    Verdict.EQUIVALENT: "same",
}
SHOWN = 2
"""Figures of a section that are open; more of one kind are folded, and printed."""
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:"
)


def to_html(report: Report) -> str:
    """The page. Its own policy forbids it to load anything."""
    title = escape(report.title)
    plotted = any(section.figures for section in report.sections)
    library = f"<script>{get_plotlyjs()}</script>" if plotted else ""
    contents = "".join(f'<li><a href="#{anchor(s.id)}">{escape(s.title)}</a></li>' for s in report.sections)
    first = "" if report.answer is None else answer_html(report.answer)
    body = first + "\n".join(_section(section) for section in report.sections)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n{library}\n</head>\n<body>\n"
        f'<nav aria-label="Contents"><strong>Contents</strong><ol>{contents}</ol></nav>\n'
        f"<main>\n<h1>{title}</h1>\n{body}\n</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _section(section: Section) -> str:
    parts = [f"<h2>{escape(section.title)}</h2>"]
    parts += [f"<p>{escape(text)}</p>" for text in section.text]
    parts += [_table(table) for table in section.tables]
    parts += [_figure(figure) for figure in section.figures[:SHOWN]]
    if rest := section.figures[SHOWN:]:
        inner = "".join(_figure(figure) for figure in rest)
        parts.append(f"<details class='more'><summary>{len(rest)} more figures</summary>{inner}</details>")
    if section.claims:
        parts.append(_claims(section.claims))
    return f'<section id="{anchor(section.id)}">\n' + "\n".join(parts) + "\n</section>"


def _figure(figure: Figure) -> str:
    # "<" as an escape: no data can end the script element that holds them.
    data = json.dumps(draw(figure), allow_nan=False, ensure_ascii=False).replace("<", "\\u003c")
    name, title = anchor(figure.id), escape(figure.title)
    return (
        f'<figure id="{name}"><figcaption>{title}</figcaption>'
        f'<div class="plot" role="img" aria-label="{title}"></div>'
        f'<script type="application/json">{data}</script>'
        f"<details><summary>Data</summary>{_table(as_table(figure), caption=False)}</details></figure>"
    )


def _table(table: Table, caption: bool = True) -> str:
    head = "".join(f"<th scope='col'>{escape(name)}</th>" for name in table.columns)
    rows = "".join("<tr>" + "".join(_cell(cell) for cell in row) + "</tr>" for row in table.rows)
    title = f"<caption>{escape(table.title)}</caption>" if caption else ""
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    name = f' id="{anchor(table.id)}"'
    inner = f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div class="table"{name}>{inner}</div>{note}'


def _cell(cell: Cell) -> str:
    if isinstance(cell, str):
        return f"<td>{escape(cell)}</td>"
    text = escape(cell_text(cell))
    missing = isinstance(cell, float | int) or cell is None or cell_text(cell)[:1] in "-0123456789"
    return f'<td class="{"number" if missing else "missing"}">{text}</td>'


def _claims(claims: tuple[Claim, ...]) -> str:
    return '<div class="claims">' + "\n".join(_claim(claim) for claim in claims) + "</div>"


def _claim(claim: Claim) -> str:
    links = ", ".join(f'<a href="#{anchor(name)}">{escape(name)}</a>' for name in claim.rests_on)
    because = f'<p class="because">{escape(claim.because)}</p>' if claim.because else ""
    estimate = escape(estimate_text(claim))
    return (
        f'<article class="claim {_CLASSES[claim.verdict]}" id="{anchor(claim.id)}">'
        f'<p><span class="id">{escape(claim.id)}</span> {escape(claim.sentence)} '
        f'<span class="verdict">{escape(claim.verdict.value)}</span></p>{because}'
        f"<dl><dt>Estimate</dt><dd>{estimate}</dd><dt>Interval</dt><dd>{escape(str(claim.interval))}</dd>"
        f"<dt>Rests on</dt><dd>{links}</dd></dl></article>"
    )
