"""What of an article's tables, figures and procedures its report redraws, and what it does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from kvik_lab.errors import LabError
from kvik_lab.report.model import Report, Section, Table
from tests.lab.redrawn.printed import PRINTED


@dataclass(frozen=True)
class Item:
    """An entry of the checklist. `by`: ids of the report's pieces; `why`: what is left out, and why."""

    number: int
    what: str
    by: tuple[str, ...]
    why: str


def items(name: str) -> tuple[Item, ...]:
    """The entries of an article."""
    text = (PRINTED / "checklist.yaml").read_text(encoding="utf-8")
    data: Any = yaml.safe_load(text)
    return tuple(Item(one["number"], one["what"], tuple(one["by"]), one["why"]) for one in data[name])


def section(name: str, report: Report) -> Section:
    """The checklist of an article. Raises LabError where an entry names what the report does not have."""
    there = {piece.id for s in report.sections for piece in (*s.tables, *s.figures, *s.claims)}
    rows = []
    for item in items(name):
        if lost := [id_ for id_ in item.by if id_ not in there]:
            raise LabError(f"checklist entry {item.number} names {lost[0]!r}, which the report does not have")
        rows.append((str(item.number), item.what, ", ".join(item.by) or "not redrawn", item.why))
    text = f"{sum(bool(item.by) for item in items(name))} of {len(rows)} entries are redrawn here."
    columns = ("no.", "what the article has", "redrawn by", "what is left out, and why")
    return Section(
        "coverage",
        "What of the article is redrawn",
        (text,),
        (Table("checklist", "Checklist", columns, tuple(rows)),),
    )
