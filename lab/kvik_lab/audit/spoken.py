# ruff: noqa: RUF001, RUF002 - the marks and words that texts print
"""Claims whose inputs stand further away: in named settings, in the sentences before, in the heading."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace

from kvik_lab.audit.claims import Scene, Sentence, claim, loose
from kvik_lab.audit.groups import best
from kvik_lab.audit.model import Check, Document
from kvik_lab.audit.quantity import Quantity, quantities
from kvik_lab.audit.rules import Value, exactly
from kvik_lab.audit.series import Series
from kvik_lab.audit.slips import general
from kvik_lab.audit.units import unit


def _lead(document: Document, sentence: Sentence) -> list[str]:
    """The lines above a sentence that lead to it, the nearest first."""
    above = [line.text for line in document.prose if line.line < sentence.line]
    return above[:-4:-1]


_NAMES = re.compile(r"\(([A-Za-z_]+(?:\s*,\s*[A-Za-z_]+)+)\)")
_SETTINGS = re.compile(r"\((\d+(?:\s*,\s*\d+)+)\)")


def _settings(text: str) -> Iterator[tuple[int, ...]]:
    """The tuples of whole numbers in a text: (16, 128)."""
    for match in _SETTINGS.finditer(text):
        yield tuple(int(number) for number in match[1].split(","))


def _rows_set(labels: tuple[str, ...], sentence: str) -> list[int]:
    """The rows that "any (threads, batch) between (16, 128) and (32, 128)" speaks of: those whose
    labels give the names values inside."""
    names = _NAMES.search(sentence)
    if names is None:
        return []
    keys = [name.strip() for name in names[1].split(",")]
    ends = [one for one in _settings(sentence) if len(one) == len(keys)]
    if not ends:
        return []
    rows = []
    for index, label in enumerate(labels):
        found = [re.search(rf"\b{re.escape(key)}\w*\s*[=:]\s*(\d+)", label) for key in keys]
        own = [int(match[1]) for match in found if match is not None]
        between = "between" in sentence and len(ends) == 2
        inside = all(min(v) <= n <= max(v) for n, v in zip(own, zip(*ends, strict=True), strict=False))
        if len(own) == len(keys) and (inside if between else tuple(own) in ends):
            rows.append(index)
    return rows


_WITHIN = re.compile(r"within\s*$", re.IGNORECASE)
_OF_PEAK = re.compile(r"^\s*of\s+(the\s+)?(peak|maximum|max|best|highest)\b", re.IGNORECASE)


def within(scene: Scene, sentence: Sentence) -> Iterator[tuple[int, Check]]:
    """Checks of "any (threads, batch) between (16, 128) and (32, 128) lands within 0.1 % of peak"."""
    for at, printed in enumerate(sentence.found):
        if printed.unit.kind != "percent" or not _OF_PEAK.match(sentence.after(at)):
            continue
        if not _WITHIN.search(sentence.before(at)):
            continue
        for table in scene.near(sentence)[:1]:
            rows = _rows_set(scene.views[table].labels, sentence.text)
            columns = [s for s in scene.views[table].series if s.note == 0 and s.position]
            checks = [
                check
                for series in columns
                if (check := _behind(scene, sentence, printed, series, rows)) is not None
            ]
            held = [check for check in checks if check.holds]
            # which column is meant is not always said: it is a finding only where none will do
            if checks:
                yield at, (held or checks)[0]


def _behind(
    scene: Scene, sentence: Sentence, printed: Quantity, series: Series, rows: list[int]
) -> Check | None:
    """How far the rows that are named stay behind the peak of a column, at most."""
    values = [best(scene, slot) for slot in series.slots if slot is not None]
    named = [best(scene, slot) for row in rows if (slot := series.slots[row]) is not None]
    if len(named) < 2 or len(values) < 3:
        return None
    top, least = max(values, key=lambda v: v.middle), min(named, key=lambda v: v.middle)
    if top.middle <= 0:
        return None
    value = Value(
        max(1 - least.high / top.low, 0.0), 1 - least.middle / top.middle, 1 - least.low / top.high, 0.01
    )
    formula = f"({top.middle / top.scale:g} - {least.middle / least.scale:g}) / {top.middle / top.scale:g}"
    rule = f"how far the rows named stay behind the peak of {series.name}"
    return claim(sentence, replace(printed, bound="<="), value, rule, formula)


_EACH_AT = re.compile(
    r"((?:\(\d+(?:, ?\d+)+\)[ ,]*(?:and|or|und)?\s*)+)\((?:both|all|each)\b[^()\d]*(\d[\d,]*)"
)


def tuples(sentence: Sentence) -> Iterator[tuple[int, Check]]:
    """Checks of "(32, 256) and (64, 128) (both at the 8192 cap)": the product of each."""
    for match in _EACH_AT.finditer(sentence.text):
        products = [math.prod(one) for one in _settings(match[1])]
        for at, printed in enumerate(sentence.found):
            if printed.span[0] != match.start(2):
                continue
            other = next((n for n in products if n != printed.number), int(printed.number))
            if printed.number not in products and (
                len(set(products)) > 1 or general(printed, exactly(other, printed.unit.scale)) is None
            ):
                continue
            formula = ", ".join(" × ".join(map(str, one)) for one in _settings(match[1]))
            value = exactly(other, printed.unit.scale)
            yield at, claim(sentence, printed, value, "the product of each", formula)


_TIMES = re.compile(
    r"(?<![\d.,])(\d[\d,]*)\s*(?:[A-Za-z]+\s)?[×x*]\s*(\d[\d,]*(?:\.\d+)?)\s*([KMGT]?b(?:ps|/s|it/s))"
)
_CEILING = re.compile(r"line rate|ceiling|aggregate|theoretical|理论|理論|上限|合計|总", re.IGNORECASE)


def ceilings(scene: Scene, sentence: Sentence) -> Iterator[tuple[int, Check]]:
    """Checks of "the aggregate ceiling is 400 GB/s" under a heading "(32 EFA × 100 Gbps)"."""
    for at, printed in enumerate(sentence.found):
        each_of = next(
            (found for line in _lead(scene.document, sentence) if (found := _TIMES.search(line))), None
        )
        if each_of is None or printed.unit.kind != "rate" or not _CEILING.search(sentence.before(at)):
            continue
        each = unit(each_of[3])
        if each is None or each.dimension != printed.unit.dimension:
            continue
        total = float(each_of[1].replace(",", "")) * float(each_of[2].replace(",", "")) * each.scale
        value = exactly(total, printed.unit.scale)
        rule = "count times the rate of one, as the heading says"
        yield at, claim(sentence, loose(printed), value, rule, each_of[0])


_LEAST = re.compile(r"\((?:min|minimum|at least)?:?\s*([A-Za-z_]+(?:\s*[×x*]\s*[A-Za-z_]+)+)\)")


def named_products(sentence: Sentence) -> Iterator[tuple[int, Check]]:
    """Checks of "2 GB (min: block × batch × threads)" where all of these are set above the table."""
    for match in _LEAST.finditer(sentence.text):
        earlier = [(at, q) for at, q in enumerate(sentence.found) if q.span[1] <= match.start()]
        names = [name for name in re.split(r"\s*[×x*]\s+|\s+[×*]\s*", match[1]) if name]
        factors = [setting(sentence.heading, name) for name in names]
        known = [factor for factor in factors if factor is not None]
        if not earlier or len(known) < len(factors) or len(known) < 2:
            continue
        at, printed = earlier[-1]
        measured = [factor for factor in known if factor.unit.dimension]
        if len(measured) != 1 or measured[0].unit.dimension != printed.unit.dimension:
            continue
        total = math.prod(factor.number * factor.unit.binary for factor in known)
        value = exactly(total, printed.unit.binary)
        formula = " × ".join(one.text if one.unit.dimension else one.digits for one in known)
        yield at, claim(sentence, printed, value, f"the product of {match[1]}", formula)


def setting(text: str, name: str) -> Quantity | None:
    """The value that a text sets for a name: "block=1MB"."""
    match = re.search(rf"\b{re.escape(name)}\w*\s*[=:]\s*(?=\d)", text, re.IGNORECASE)
    found = quantities(text[match.end() :]) if match else []
    return found[0] if found and found[0].span[0] == 0 and found[0].single else None


_BLOCK = re.compile(r"\b(block|page)_?\s?size\s*(?:[=:]|is|of)\s*(\d+)\b", re.IGNORECASE)
_TOKEN = re.compile(r"^\s*个?\s*(tokens?\b|トークン)", re.IGNORECASE)


def blocks(scene: Scene, sentence: Sentence) -> Iterator[tuple[int, Check]]:
    """Checks of "8192 tokens, 512 blocks" where the text above says how many tokens a block has."""
    sizes = [m for p in scene.document.prose if p.line <= sentence.line for m in _BLOCK.finditer(p.text)]
    for at in range(1, len(sentence.found)):
        count, printed = sentence.found[at - 1 : at + 1]
        holds_tokens = count.unit.kind == "tokens" or _TOKEN.match(sentence.after(at - 1))
        noun = (printed.unit.symbol + " " + sentence.after(at)).strip().lower()
        if not sizes or not holds_tokens or not noun.startswith(sizes[-1][1].lower()):
            continue
        if printed.unit.dimension or printed.decimals or not (printed.single and count.single):
            continue
        size = int(sizes[-1][2])
        if size < 2 or count.approx:
            continue
        value = exactly(math.ceil(count.number * count.unit.scale / size), printed.unit.scale)
        formula = f"ceil({count.text} / {size})"
        yield at, claim(sentence, printed, value, "tokens in blocks", formula)
