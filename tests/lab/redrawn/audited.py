"""The audit of an article's facts: all tables as one Markdown text, and its findings table by table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from kvik_lab.audit import Check, audit_text
from kvik_lab.report.model import Table
from tests.lab.redrawn.printed import Article


@dataclass(frozen=True)
class Audited:
    """Checks of one table and of the words beside it."""

    checks: tuple[Check, ...]

    @property
    def findings(self) -> tuple[Check, ...]:
        """Those that do not hold."""
        return tuple(check for check in self.checks if not check.holds)

    def as_table(self, id_: str, title: str) -> Table | None:
        """The findings, or None where there are none."""
        if not self.findings:
            return None
        columns = ("printed", "follows", "because", "arithmetic", "what may have happened")
        rows = tuple((c.printed, c.follows, c.rule, c.formula, c.diagnosis or "") for c in self.findings)
        return Table(f"{id_}-audit", f"Audit: {title}", columns, rows, self.sentence)

    @property
    def sentence(self) -> str:
        """How many numbers were recomputed, and how many follow."""
        count = len(self.checks)
        if not count:
            return "The audit found nothing here that derives from other numbers."
        numbers = "1 derived number" if count == 1 else f"{count} derived numbers"
        wrong = len(self.findings)
        if not wrong:
            return f"The audit recomputed {numbers} here; {'it follows' if count == 1 else 'all follow'}."
        verb = "does" if wrong == 1 else "do"
        return f"The audit recomputed {numbers} here; {wrong} of them {verb} not follow."


@cache
def audit_article(article: Article) -> Mapping[str, Audited]:
    """What the audit says of each table, by its id. The tables are read as one text: claims may span them."""
    text, starts = _markdown(article)
    checks: dict[str, list[Check]] = {table.id: [] for table in article.tables}
    for check in audit_text(text, article.name, "markdown").checks:
        owner = [id_ for id_, line in starts if line <= check.place.line][-1]
        checks[owner].append(check)
    return MappingProxyType({id_: Audited(tuple(found)) for id_, found in checks.items()})


def _markdown(article: Article) -> tuple[str, list[tuple[str, int]]]:
    """The text, and the line from which each table's part of it begins."""
    lines: list[str] = []
    starts: list[tuple[str, int]] = []
    for table in article.tables:
        starts.append((table.id, len(lines) + 1))
        lines += [f"## {table.title}", "", _row(table.header), "|" + "---|" * len(table.header)]
        lines += [_row(row) for row in table.rows]
        lines.append("")
        for sentence in table.said:
            lines += [sentence, ""]
    return "\n".join(lines), starts


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"
