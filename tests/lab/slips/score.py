"""Counts of slips that were made and found, over the marked numbers of a document."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from kvik_lab.audit import audit_text
from kvik_lab.audit.engine import audit_document
from kvik_lab.audit.reader import read
from tests.lab.articles.listing import Item, load
from tests.lab.slips.mutate import SLIPS, changed, seen, slips, spots


@dataclass
class Score:
    """How many slips of each kind were made and found, by cells and claims; errors that the document has
    of its own; findings of the unchanged document where no mark says that something is wrong."""

    made: Counter[tuple[str, str]] = field(default_factory=Counter)
    found: Counter[tuple[str, str]] = field(default_factory=Counter)
    own: Counter[str] = field(default_factory=Counter)
    numbers: Counter[str] = field(default_factory=Counter)
    missed: list[str] = field(default_factory=list)

    def __add__(self, other: Score) -> Score:
        return Score(
            self.made + other.made,
            self.found + other.found,
            self.own + other.own,
            self.numbers + other.numbers,
            self.missed + other.missed,
        )

    def rate(self, kind: str) -> float:
        """The share of the slips of cells or claims that was found; 1 when none was made."""
        made = sum(n for (one, _), n in self.made.items() if one == kind)
        return sum(n for (one, _), n in self.found.items() if one == kind) / made if made else 1.0

    def lines(self) -> list[str]:
        """A line a kind, with each slip's counts."""
        answer = []
        for kind in ("cell", "claim"):
            parts = [f"{slip} {self.found[kind, slip]}/{self.made[kind, slip]}" for slip in SLIPS]
            share = f"{100 * self.rate(kind):.1f} %"
            answer.append(f"  {kind}s: {self.numbers[kind]} marked, {share} found: {', '.join(parts)}")
        own = f"{self.own['found']}/{self.own['wrong']}"
        return [*answer, f"  own errors found: {own}; other findings: {self.own['other']}"]


def _right(item: Item, digits: str) -> bool:
    """Whether changed digits are as right as those that were printed."""
    plain = digits.replace(",", "")
    return plain.replace(".", "").isdigit() and (item.meets(plain) or item.meets("-" + plain))


def score(marks: Path, folder: Path) -> Score:
    """The score of the document that a file of marks names. Raises ValueError when they do not fit."""
    article = load(marks)
    text = (folder / article.file).read_text(encoding="utf-8").replace("\r\n", "\n")
    before = audit_text(text, article.file)
    result = Score()
    places = spots(text, article.items)
    for spot in places:
        item = spot.item
        if item.follows != "yes":
            if item.follows == "no":
                result.own.update({"wrong": 1, "found": int(seen(before, spot, spot.digits))})
            continue
        result.numbers[item.kind] += 1
        for slip, digits in slips(spot, before):
            if _right(item, digits):
                continue
            result.made[item.kind, slip] += 1
            after = audit_document(read(changed(text, spot, digits), article.file), spot.line)
            if seen(after, spot, digits):
                result.found[item.kind, slip] += 1
            else:
                result.missed.append(
                    f"{item.kind} {spot.line}: {spot.digits} as {digits} ({slip}): {item.how}"
                )
    known = {(spot.line, spot.digits) for spot in places if spot.item.follows != "yes"}
    result.own["other"] = sum(not any(f.place.line == line for line, _ in known) for f in before.findings)
    return result
