"""How much of what a person counted in an article an audit recomputes, and what else it finds."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from kvik_lab.audit import Audit, Check
from tests.lab.articles.listing import Article, Item, half_step

_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
_TIME = re.compile(r"(\d+)m(\d+(?:\.\d+)?)s")


def values(text: str) -> list[float]:
    """The numbers in a printed text, without their signs; minutes and seconds also as seconds."""
    timed = [60 * float(minutes) + float(seconds) for minutes, seconds in _TIME.findall(text)]
    return [*timed, *(float(found.replace(",", "")) for found in _NUMBER.findall(text))]


@dataclass(frozen=True)
class Matched:
    """What the audit made of an article."""

    article: Article
    audit: Audit
    pairs: tuple[tuple[Item, Check], ...]
    missed: tuple[Item, ...]
    beyond: tuple[Check, ...]

    @property
    def recognised(self) -> float:
        """The share of the counted cells and claims that were recomputed."""
        return 1 - len(self.missed) / len(self.article.items)

    def lines(self) -> Iterable[str]:
        """What is printed of it."""
        items = self.article.items
        cells = sum(item.kind == "cell" for item in items)
        seen = {id(item) for item, _ in self.pairs}
        seen_cells = sum(item.kind == "cell" for item in items if id(item) in seen)
        seen_claims = sum(item.kind == "claim" for item in items if id(item) in seen)
        yield (
            f"{self.article.name}: {cells} cells and {len(items) - cells} claims counted, "
            f"recognised {seen_cells} and {seen_claims} ({100 * self.recognised:.1f} %), "
            f"{len(self.audit.findings)} findings"
        )
        for item in self.missed:
            yield f"  missed: line {item.line}: {item.printed} = {item.formula} ({item.how})"
        for item, check in self.pairs:
            told = _verdict(item, check)
            if told:
                yield f"  {told}: line {item.line}: printed {item.printed}, audit {check.follows}"
        for check in self.beyond:
            text = f"{check.printed} -> {check.follows} ({check.rule}: {check.formula})"
            yield f"  not in the list: line {check.place.line}: {text}"


def _verdict(item: Item, check: Check) -> str:
    if item.follows in ("cut", "loose"):
        return f"{item.follows}, {'passed' if check.holds else 'found'}"
    if check.holds:
        return "" if item.follows == "yes" else f"NOT FOUND, right is {item.right}"
    if item.rival is not None and _near(check, float(item.rival), float(item.rival), item.rival):
        return "found from another reading"
    if item.follows == "yes":
        return "FALSE, it follows"
    found = _near(check, *item.bounds(), item.printed)
    return "found" if found else f"found with another value than {item.right}"


def _near(check: Check, low: float, high: float, digits: str) -> bool:
    """Whether a check names a value between bounds, to a unit of the last digit."""
    low, high = sorted((abs(low), abs(high)))
    slack = 2 * half_step(digits)
    return any(low - slack <= value <= high + slack for value in values(check.follows))


def match(article: Article, audit: Audit) -> Matched:
    """Pair what was counted with what was recomputed: same line, same printed number, each once."""
    left = list(audit.checks)
    pairs: list[tuple[Item, Check]] = []
    missed: list[Item] = []
    for at, item in enumerate((*article.items, *article.optional)):
        found = next((check for check in left if _same(item, check)), None)
        if found is not None:
            left.remove(found)
            pairs.append((item, found))
        elif at < len(article.items):
            missed.append(item)
    beyond = tuple(check for check in left if not check.holds)
    return Matched(article, audit, tuple(pairs), tuple(missed), beyond)


def _same(item: Item, check: Check) -> bool:
    return check.place.line == item.line and any(
        abs(value - abs(item.value)) < 1e-9 * max(1.0, value) for value in values(check.printed)
    )
