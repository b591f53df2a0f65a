"""Claims that a document makes more than once: a number of the text that is said elsewhere too, in a
sentence or a cell, and one that is a slip of such a number.

Numbers of one unit that differ by such a slip are rare in one document: 28 of 19,193 numbers of this
project's pages, of the documentation of five others, and of five reports. The words that both are said
with, and how often the other one is said, tell most of these apart.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from kvik_lab.audit.claims import Scene, Sentence, claim, sentences
from kvik_lab.audit.groups import tokens
from kvik_lab.audit.model import Check, Document
from kvik_lab.audit.quantity import Quantity
from kvik_lab.audit.rules import exactly
from kvik_lab.audit.said import Fact, Kind, Said
from kvik_lab.audit.series import View
from kvik_lab.audit.slips import slip

_COMMON = """an as are be been can each has have if into it its may more most no not only or our over so
still such than that their then there these they this up was we were when which while will you your"""
_SMALL = frozenset(_COMMON.split())


def said(document: Document, views: Sequence[View]) -> Said:
    """Everything that a document prints with a unit."""
    facts: dict[Kind, list[Fact]] = {}
    for sentence in sentences(document):
        if not sentence.code:
            words = _words(f"{sentence.text} {sentence.heading}")
            for quantity in sentence.found:
                _add(facts, Fact(quantity, sentence.line, words, cell=False))
    for table, view in zip(document.tables, views, strict=True):
        for series in view.series:
            for label, slot in zip(view.labels, series.slots, strict=True):
                if slot is not None:
                    words = _words(f"{label} {series.name} {table.heading}")
                    _add(facts, Fact(slot.quantity, slot.place.line, words, cell=True))
    every = [fact for found in facts.values() for fact in found]
    counts = Counter(word for fact in every for word in fact.words)
    weights = {word: math.log(1 + len(every) / count) for word, count in counts.items()}
    return Said({kind: tuple(found) for kind, found in facts.items()}, weights)


def _add(facts: dict[Kind, list[Fact]], fact: Fact) -> None:
    if fact.quantity.unit.kind != "plain" and not fact.quantity.bound:
        for end in _ends(fact.quantity):
            facts.setdefault(_kind(end), []).append(replace(fact, quantity=end))


def _ends(quantity: Quantity) -> list[Quantity]:
    """A number; of a range, both of its ends."""
    if quantity.upper is None:
        return [quantity]
    last = re.findall(r"\d[\d,]*(?:\.\d+)?", quantity.text)[-1]
    ends = ((quantity.number, quantity.digits), (math.copysign(quantity.upper, quantity.number), last))
    symbol = quantity.unit.symbol
    return [
        replace(quantity, number=number, digits=digits, upper=None, text=f"{digits} {symbol}".strip())
        for number, digits in ends
    ]


def _kind(quantity: Quantity) -> Kind:
    """What may be compared: the same dimension, and without one the same kind."""
    return ("" if quantity.unit.dimension else quantity.unit.kind, quantity.unit.dimension)


def _words(text: str) -> frozenset[str]:
    return tokens(text) - _SMALL


def contradicted(scene: Scene, sentence: Sentence) -> Iterator[tuple[int, Check]]:
    """Findings: a number that is said nowhere else, and is a slip of one that is, about the same."""
    words = _words(f"{sentence.text} {sentence.heading}")
    for at, printed, end in _told(sentence):
        others = _elsewhere(scene, sentence, printed)
        if any(_says(fact.quantity, printed) for fact in others):
            continue
        # a range is about what is said elsewhere where its other end is
        if end is not None and not any(_says(fact.quantity, end) for fact in others):
            continue
        beside = [q for q in sentence.found if q is not printed and _kind(q) == _kind(printed)]
        found = [
            group
            for group in _groups(
                fact
                for fact in others
                if slip(printed.digits, fact.quantity.digits)
                or slip(printed.digits, _digits_at(fact.quantity, printed))
            )
            if group[0].quantity.unit.scale == printed.unit.scale
            and not any(_same(group[0].quantity, other) for other in beside)
        ]
        weighed = [(max(_weight(scene, words, fact) for fact in group), group) for group in found]
        sure = [(weight, group) for weight, group in weighed if _enough(printed, weight, group)]
        if sure:
            yield at, _check(sentence, printed, max(sure, key=lambda one: one[0])[1][0])


def repeated(scene: Scene, sentence: Sentence) -> Iterator[tuple[int, Check]]:
    """Checks that hold: a number that is said elsewhere too."""
    for at, printed, _ in _told(sentence):
        same = [fact for fact in _elsewhere(scene, sentence, printed) if _says(fact.quantity, printed)]
        if same:
            yield at, _check(sentence, printed, same[0])


def _told(sentence: Sentence) -> Iterator[tuple[int, Quantity, Quantity | None]]:
    """The numbers of a sentence that have a unit, and two digits or more that say something; of a range both
    ends, each with the other one."""
    for at, quantity in enumerate(sentence.found):
        if not sentence.code and quantity.unit.kind != "plain" and not quantity.bound:
            first, *last = _ends(quantity)
            for one, other in ((first, last[0] if last else None), *((end, first) for end in last)):
                if _digits(one) > 1:
                    yield at, one, other


def _digits(quantity: Quantity) -> int:
    """How many digits say something: zeros at the end of a whole number do not."""
    digits = quantity.digits.replace(",", "")
    return len(digits.replace(".", "").lstrip("0") if "." in digits else digits.strip("0"))


def _elsewhere(scene: Scene, sentence: Sentence, printed: Quantity) -> list[Fact]:
    return [fact for fact in scene.said.facts.get(_kind(printed), ()) if fact.line != sentence.line]


def _same(a: Quantity, b: Quantity) -> bool:
    return math.isclose(abs(a.number) * a.unit.scale, abs(b.number) * b.unit.scale, rel_tol=1e-9)


def _says(fact: Quantity, printed: Quantity) -> bool:
    """Whether a number is one that is said elsewhere, or its rounding."""
    return _same(fact, printed) or (
        fact.unit.scale == printed.unit.scale and _digits_at(fact, printed) == printed.digits
    )


def _digits_at(fact: Quantity, printed: Quantity) -> str:
    """The digits of a number, rounded by one where it has one more than another."""
    finer = fact.decimals == printed.decimals + 1
    return f"{abs(fact.number):.{printed.decimals}f}" if finer else fact.digits


def _groups(facts: Iterable[Fact]) -> list[list[Fact]]:
    """Facts of the same value."""
    found: dict[float, list[Fact]] = {}
    for fact in facts:
        found.setdefault(abs(fact.quantity.number) * fact.quantity.unit.scale, []).append(fact)
    return list(found.values())


def _weight(scene: Scene, words: frozenset[str], fact: Fact) -> float:
    """How much two places have in common: shared words, rare ones counting more."""
    return sum(scene.said.weights.get(word, 0.0) for word in words & fact.words)


def _enough(printed: Quantity, weight: float, group: Sequence[Fact]) -> bool:
    """Whether it is the same that is meant, by shared words and by the lines that say the other number. The
    more digits there are, the less likely is a slip by chance."""
    digits, lines, cell = _digits(printed), len({fact.line for fact in group}), any(f.cell for f in group)
    if digits > 3:
        return True
    if digits == 3:
        return weight >= 1.5 if lines > 1 else weight >= 8 and cell
    least = 1.5 if lines > 5 else 6 if lines > 2 else 9 if lines > 1 else math.inf
    return weight >= min(least, 14 if cell else math.inf)


def _check(sentence: Sentence, printed: Quantity, fact: Fact) -> Check:
    number = math.copysign(fact.quantity.number, printed.number)
    value = exactly(number * fact.quantity.unit.scale, printed.unit.scale)
    return claim(sentence, printed, value, f"as in line {fact.line}", fact.quantity.text)
