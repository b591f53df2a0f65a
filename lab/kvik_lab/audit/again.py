"""Claims that a document makes more than once: a number of the text that is said elsewhere too, in a
sentence or a cell, and one that is a slip of such a number.

Numbers of one unit that differ by such a slip are rare in one document: 28 of 19,193 numbers of this
project's pages, of the documentation of five others, and of five reports. The words that both are said
with, and how often the other one is said, tell most of these apart.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvik_lab.audit.claims import Scene, Sentence, claim, sentences
from kvik_lab.audit.groups import tokens
from kvik_lab.audit.model import Check, Document
from kvik_lab.audit.quantity import Quantity
from kvik_lab.audit.rules import exactly
from kvik_lab.audit.said import Fact, Kind, Said
from kvik_lab.audit.series import View
from kvik_lab.audit.slips import slips

_COMMON = """an as are be been can each has have if into it its may more most no not only or our over so
still such than that their then there these they this up was we were when which while will you your"""
_SMALL = frozenset(_COMMON.split())


def said(document: Document, views: Sequence[View]) -> Said:
    """Everything that a document prints with a unit."""
    facts = [replace(fact, quantity=end) for fact in _facts(document, views) for end in _ends(fact.quantity)]
    values: dict[tuple[Kind, str], list[Fact]] = {}
    digits: dict[tuple[Kind, float, str], list[Fact]] = {}
    for fact in facts:
        quantity, kind = fact.quantity, _kind(fact.quantity)
        values.setdefault((kind, _value(quantity)), []).append(fact)
        for text in {_bare(quantity.digits), *_rounded(quantity)}:
            digits.setdefault((kind, quantity.unit.scale, text), []).append(fact)
    counts = Counter(word for fact in facts for word in fact.words)
    return Said(
        {key: tuple(found) for key, found in values.items()},
        {key: tuple(found) for key, found in digits.items()},
        Counter((kind, scale, _places(text)) for kind, scale, text in digits),
        {word: math.log(1 + len(facts) / count) for word, count in counts.items()},
    )


def _facts(document: Document, views: Sequence[View]) -> Iterator[Fact]:
    for sentence in sentences(document):
        if not sentence.code:
            words = _words(f"{sentence.text} {sentence.heading}")
            for quantity in filter(_measures, sentence.found):
                yield Fact(quantity, sentence.line, words, cell=False)
    for table, view in zip(document.tables, views, strict=True):
        for series in view.series:
            for label, slot in zip(view.labels, series.slots, strict=True):
                if slot is not None and _measures(slot.quantity):
                    words = _words(f"{label} {series.name} {table.heading}")
                    yield Fact(slot.quantity, slot.place.line, words, cell=True)


def _measures(quantity: Quantity) -> bool:
    """Whether it has a unit, and is no bound."""
    return quantity.unit.kind != "plain" and not quantity.bound


def _bare(digits: str) -> str:
    return digits.replace(",", "")


def _rounded(quantity: Quantity) -> list[str]:
    """Its digits with one less behind the point."""
    return [f"{abs(quantity.number):.{quantity.decimals - 1}f}"] if quantity.decimals else []


def _value(quantity: Quantity, factor: float = 1.0) -> str:
    return f"{abs(quantity.number) * quantity.unit.scale * factor:.9g}"


def _places(digits: str) -> str:
    """Where digits and the point stand."""
    return re.sub(r"\d", "0", digits)


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
        if _says(scene, sentence, printed):
            continue
        # a range is about what is said elsewhere where its other end is
        if end is not None and not _says(scene, sentence, end):
            continue
        told = {_value(other) for other in sentence.found if other is not printed}
        sure = [
            (weight, group)
            for group in _slips(scene, sentence, printed)
            if _value(group[0].quantity) not in told
            and _enough(scene, printed, weight := max(_weight(scene, words, fact) for fact in group), group)
        ]
        if sure:
            yield at, _check(sentence, printed, max(sure, key=lambda one: one[0])[1][0])


def repeated(scene: Scene, sentence: Sentence) -> Iterator[tuple[int, Check]]:
    """Checks that hold: a number that is said elsewhere too."""
    for at, printed, _ in _told(sentence):
        same = _says(scene, sentence, printed)
        if same:
            yield at, _check(sentence, printed, same[0])


def _told(sentence: Sentence) -> Iterator[tuple[int, Quantity, Quantity | None]]:
    """The numbers of a sentence that have a unit, and two digits or more that say something; of a range both
    ends, each with the other one."""
    for at, quantity in enumerate(sentence.found):
        if not sentence.code and _measures(quantity):
            first, *last = _ends(quantity)
            for one, other in ((first, last[0] if last else None), *((end, first) for end in last)):
                if _digits(one) > 1:
                    yield at, one, other


def _digits(quantity: Quantity) -> int:
    """How many digits say something: zeros at the end of a whole number do not."""
    digits = quantity.digits.replace(",", "")
    return len(digits.replace(".", "").lstrip("0") if "." in digits else digits.strip("0"))


def _says(scene: Scene, sentence: Sentence, printed: Quantity) -> list[Fact]:
    """Who says the same number elsewhere, or one of which it is the rounding."""
    kind, said = _kind(printed), scene.said
    same = said.values.get((kind, _value(printed)), ())
    finer = said.digits.get((kind, printed.unit.scale, _bare(printed.digits)), ())
    return [fact for fact in (*same, *finer) if fact.line != sentence.line]


def _slips(scene: Scene, sentence: Sentence, printed: Quantity) -> list[list[Fact]]:
    """Who says numbers elsewhere of which it is a slip: facts of the same value together."""
    kind, scale, said = _kind(printed), printed.unit.scale, scene.said
    near = [said.digits.get((kind, scale, text), ()) for text in slips(_bare(printed.digits))]
    moved = [said.values.get((kind, _value(printed, factor)), ()) for factor in (10.0, 0.1)]
    found: dict[str, list[Fact]] = {}
    for fact in itertools.chain(*near, *moved):
        if fact.line != sentence.line and fact.quantity.unit.scale == scale:
            found.setdefault(_value(fact.quantity), []).append(fact)
    return list(found.values())


def _weight(scene: Scene, words: frozenset[str], fact: Fact) -> float:
    """How much two places have in common: shared words, rare ones counting more."""
    return sum(scene.said.weights.get(word, 0.0) for word in words & fact.words)


def _enough(scene: Scene, printed: Quantity, weight: float, group: Sequence[Fact]) -> bool:
    """Whether it is the same that is meant, by shared words and by the lines that say the other number. The
    more digits there are, and the fewer numbers of this form, the less likely is a slip by chance."""
    digits, lines, cell = _digits(printed), len({fact.line for fact in group}), any(f.cell for f in group)
    text = _bare(printed.digits)
    forms = scene.said.alike.get((_kind(printed), printed.unit.scale, _places(text)), 0)
    # of so many numbers at random, one pair or more would be slips of each other
    dense = forms**2 * len(slips(text)) >= 10.0**digits
    if digits > 3 and not dense:
        least = 0.0
    elif digits > 2:
        least = math.inf if lines == 1 else 6 if dense else 1.5
    else:
        least = 1.5 if lines > 5 else 6 if lines > 2 else 9 if lines > 1 else math.inf
    of_cell = (8 if digits > 2 else 14) if cell else math.inf
    return weight >= min(least, of_cell)


def _check(sentence: Sentence, printed: Quantity, fact: Fact) -> Check:
    number = math.copysign(fact.quantity.number, printed.number)
    value = exactly(number * fact.quantity.unit.scale, printed.unit.scale)
    return claim(sentence, printed, value, f"as in line {fact.line}", fact.quantity.text)
