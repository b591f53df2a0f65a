# ruff: noqa: RUF001, RUF002 - the marks and words that tables print
"""Arithmetic that a text writes out: equations in code and prose, products in parentheses, equal
sizes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from kvik_lab.audit.claims import Sentence, claim, loose
from kvik_lab.audit.model import Check
from kvik_lab.audit.quantity import Quantity
from kvik_lab.audit.rules import Value, exactly, holds

_OPERATOR = re.compile(r"^[^=≈\d+×*/÷]*?([×*+/÷-]|(?<![A-Za-z])x(?![A-Za-z]))[^=≈\d+×*/÷]*?$")
_EQUALS = re.compile(r"^[^=≈<>]*(?:=|≈|=>)[^=<>]*$")


# behind the equals sign, what is not the value of the expression: "4 bit + 2 bit = average 3 bit"
_OTHERWISE = re.compile(r"[=≈][^=]*\b(average|avg|mean|平均)", re.IGNORECASE)


@dataclass(frozen=True)
class Operand:
    """A side of an equation: a printed quantity, or what an expression comes to, in the unit of its
    last."""

    quantity: Quantity
    value: float | None = None
    text: str = ""


def equations(sentence: Sentence, previous: Operand | None) -> Iterator[tuple[int, Check]]:
    """Checks of "a × b = c = d", with the index of the quantity that each is about.

    `previous` is what the line before came to: an equation may go on over the lines of a code block.
    """
    for at, printed in enumerate(sentence.found):
        if not (
            _EQUALS.match(sentence.before(at)) or (_nearly(printed) and not sentence.before(at).strip(" )"))
        ):
            continue
        left, start = _left(sentence, at)
        if not left and not at and previous is not None and sentence.text.lstrip().startswith("="):
            if len(sentence.found) == 1:
                yield at, _equal(sentence, printed, previous)
        elif len(left) == 1 and start is not None:
            if left[0].unit.dimension and left[0].unit.dimension == printed.unit.dimension:
                yield at, _equal(sentence, printed, Operand(left[0]))
        elif start is not None:
            value = None if _OTHERWISE.search(sentence.before(at)) else _evaluate(sentence, start, at)
            if value is not None:
                yield at, _result(sentence, (start, at), value)


def carried(sentence: Sentence) -> Operand | None:
    """What a line comes to, for an equation that goes on in the next: its last size, or its
    expression."""
    if len(sentence.found) == 1:
        return Operand(sentence.found[0]) if "=" in sentence.before(0) else None
    if "=" not in sentence.before(0) or not sentence.code:
        return None
    end = len(sentence.found)
    value = _evaluate(sentence, 0, end)
    return None if value is None else Operand(sentence.found[-1], value, sentence.text.lstrip("= "))


def _left(sentence: Sentence, at: int) -> tuple[list[Quantity], int | None]:
    """The operands to the left of an equals sign before a quantity, and the index of the first."""
    start = at
    while start > 0:
        joint = sentence.before(start)
        joined = start == at or bool(_OPERATOR.match(joint)) or sentence.found[start].text[:1] in "+-"
        if not joined or len(joint) > 40 or (start < at and _nearly(sentence.found[start])):
            break
        start -= 1
    return list(sentence.found[start:at]), start if start < at else None


def _nearly(quantity: Quantity) -> bool:
    """Whether its mark of approximation is an equals sign, too."""
    return quantity.text[:1] in "≈≒"


def _evaluate(sentence: Sentence, start: int, at: int) -> float | None:
    """The value of the expression between two quantities, in plain numbers; None when it is none."""
    items: list[str] = []
    first = sentence.found[start]
    opening = sentence.text[max(0, first.span[0] - 2) : first.span[0]].count("(")
    items += ["("] * opening
    for index in range(start, at):
        quantity = sentence.found[index]
        if index > start:
            joint = sentence.before(index)
            mark = _OPERATOR.match(joint)
            sign = quantity.text[:1] if quantity.text[:1] in "+-" else ""
            if mark is None and not sign:
                return None
            closing, opened = joint.count(")"), joint.count("(")
            symbol = mark[1] if mark else sign
            items += [")"] * closing + [{"×": "*", "x": "*", "÷": "/"}.get(symbol, symbol)] + ["("] * opened
        items.append(repr(abs(quantity.number)))
    tail = sentence.after(at - 1).count(")")
    balance = items.count("(") - items.count(")")
    items += [")"] * min(tail, balance) if balance > 0 else []
    if items.count("(") > items.count(")"):
        items = [item for item in items if item not in "()"]
    return _calculate(items) if at - start > 1 else None


def _calculate(items: list[str]) -> float | None:
    """The value of an expression in numbers, + - * / and parentheses."""
    output: list[float] = []
    waiting: list[str] = []
    rank = {"+": 1, "-": 1, "*": 2, "/": 2, "(": 0}
    try:
        for item in items:
            if item == "(":
                waiting.append(item)
            elif item == ")":
                while waiting and waiting[-1] != "(":
                    _apply(output, waiting.pop())
                if waiting:
                    waiting.pop()
            elif item in rank:
                while waiting and rank[waiting[-1]] >= rank[item]:
                    _apply(output, waiting.pop())
                waiting.append(item)
            else:
                output.append(float(item))
        while waiting:
            _apply(output, waiting.pop())
    except (IndexError, ZeroDivisionError):
        return None
    return output[0] if len(output) == 1 and math.isfinite(output[0]) else None


def _apply(output: list[float], operator: str) -> None:
    if operator == "(":
        return
    right, left = output.pop(), output.pop()
    results = {
        "+": left + right,
        "-": left - right,
        "*": left * right,
        "/": left / right if right else math.nan,
    }
    output.append(results[operator])


def _result(sentence: Sentence, span: tuple[int, int], value: float) -> Check:
    start, at = span
    printed = sentence.found[at]
    formula = sentence.text[sentence.found[start].span[0] : sentence.found[at - 1].span[1]].strip()
    if formula.count(")") < formula.count("("):
        formula += ")"
    scale = 0.01 if printed.unit.kind == "percent" else 1.0
    units = {q.unit.symbol: q.unit for q in sentence.found[start:at] if q.unit.dimension}
    same = {name: one for name, one in units.items() if one.dimension == printed.unit.dimension}
    units = same or units  # what else there is has been counted: 16 tokens of 196 bytes
    factor = 1.0
    if len(units) == 1 and printed.unit.dimension:
        (one,) = units.values()
        if one.dimension == printed.unit.dimension:
            factor = one.scale / printed.unit.scale
    elif not units and printed.unit.kind == "bytes":
        sizes = [1.0, 1 / printed.unit.scale, 1 / printed.unit.binary]
        factor = next((f for f in sizes if printed.low <= value * f <= printed.high), 1.0)
    number = value * factor
    return claim(sentence, printed, exactly(number, scale), "the equation as written", formula)


def _equal(sentence: Sentence, printed: Quantity, other: Operand) -> Check:
    """Two sizes that are set equal, prefixes read both ways."""
    one = other.quantity
    low, middle, high = one.low, one.number, one.high
    if other.value is not None:
        low = middle = high = other.value
    elif one.unit.dimension and not one.decimals and one.number >= 1000:
        low = high = middle
    values = [
        Value(low * theirs, middle * theirs, high * theirs, mine)
        for mine in (printed.unit.scale, printed.unit.binary)
        for theirs in (one.unit.scale, one.unit.binary)
    ]
    best = next((value for value in values if holds(loose(printed), value)), values[0])
    if not holds(loose(printed), best):
        doubles = [v for v in values if math.isclose(printed.number, 2 * v.middle / v.scale, rel_tol=2e-3)]
        best = doubles[0] if doubles else best
    formula = other.text or one.text
    return claim(sentence, loose(printed), best, "the two sides of an equals sign", formula)


_PRODUCT = re.compile(
    r"(?<![\d.,A-Za-z])(\d[\d,]*)\s*(?:EFA |NICs? |[A-Za-z]+ )?[×x*]"
    r"\s*(\d[\d,]*(?:\.\d+)?)\s*([KMGT]?i?[bB](?:ps|/s|it/s)?)\b"
)


def products(sentence: Sentence) -> Iterator[tuple[int, Check]]:
    """Checks of "800 GB/s (16×400 Gbps)": a product in parentheses behind the rate that it gives."""
    from kvik_lab.audit.units import unit

    for match in _PRODUCT.finditer(sentence.text):
        each = unit(match[3])
        if each is None or sentence.text[: match.start()].rstrip()[-1:] != "(":
            continue
        earlier = [
            (at, q)
            for at, q in enumerate(sentence.found)
            if q.span[1] <= match.start() and q.unit.dimension == each.dimension and each.dimension
        ]
        if not earlier or match.start() - earlier[-1][1].span[1] > 40:
            continue
        at, printed = earlier[-1]
        total = float(match[1].replace(",", "")) * float(match[2].replace(",", "")) * each.scale
        value = exactly(total, printed.unit.scale)
        yield at, claim(sentence, loose(printed), value, "count times the rate of one", match[0])


_TIMES = re.compile(r"\s*(?:[A-Za-z-]+\s+){0,3}(?P<mark>[×x*]|with|of|by)\s*", re.IGNORECASE)
_TOLD = re.compile(
    r"[^.;]{0,25}(?:\(|:|=|\bfrom|\bas)\s*|[^.;]{0,30}?(?:total|all|make|makes|give|gives|:|→)\s*"
)


def totals(sentence: Sentence) -> Iterator[tuple[int, Check]]:
    """Checks of a count beside its factors: "24 runs (3 sizes × 4 starts × 2 arms)", "4 hosts with 8 GPUs
    each, in all 32"."""
    found, start = sentence.found, 0
    while start < len(found):
        end = start + 1
        marks = []
        while end < len(found) and (joint := _TIMES.fullmatch(sentence.before(end))):
            marks.append(joint["mark"])
            end += 1
        chain = found[start:end]
        plain = all(q.single and not q.decimals and q.unit.kind in ("plain", "count") for q in chain)
        each = "each" in sentence.after(end - 1)[:20] or all(mark in "×x*" for mark in marks)
        if len(chain) > 1 and plain and each:
            for at, gap in ((start - 1, sentence.before(start)), (end, sentence.after(end - 1))):
                told = 0 <= at < len(found) and _TOLD.fullmatch(gap) is not None
                if told and found[at].single and found[at].unit.kind in ("plain", "count"):
                    product = math.prod(q.number * q.unit.scale for q in chain)
                    value = exactly(product, found[at].unit.scale)
                    formula = " × ".join(q.text for q in chain)
                    yield at, claim(sentence, found[at], value, "the product beside it", formula)
        start = end


def sizes(sentence: Sentence) -> Iterator[tuple[int, Check]]:
    """Checks of "1 MB (1048576)", "1<<20 (1 MB)": a size and the same in bytes."""
    for match in re.finditer(r"(\d+)<<(\d+) \((\d+ [KMGT]i?B)\)", sentence.text):
        for at, printed in enumerate(sentence.found):
            if printed.span[0] >= match.start(3) and printed.span[1] <= match.end():
                total = float(int(match[1]) << int(match[2]))
                value = exactly(total, printed.unit.binary)
                yield at, claim(sentence, printed, value, "the same size", f"{match[1]}<<{match[2]}")
    for at in range(len(sentence.found) - 1):
        size, number = sentence.found[at], sentence.found[at + 1]
        joint = sentence.before(at + 1)
        enclosed = re.fullmatch(r"\s*\(", joint) and sentence.after(at + 1).startswith(")")
        if enclosed and number.unit.kind == "plain" and size.unit.kind == "bytes" and number.number >= 1024:
            total = size.number * size.unit.binary
            value = exactly(total, 1.0)
            yield at + 1, claim(sentence, number, value, "the same size", size.text)


_SAME_RATE = re.compile(r"理论|理論|theoretical|line rate|上限|=|equals|i\.e\.")


def conversions(sentence: Sentence) -> Iterator[tuple[int, Check]]:
    """Checks of a rate in bits with the same in bytes: "a 200 Gbps NIC, in theory 25 GB/s"."""
    for at in range(len(sentence.found) - 1):
        a, b = sentence.found[at], sentence.found[at + 1]
        if a.unit.dimension != b.unit.dimension or a.unit.kind != "rate" or a.unit.scale == b.unit.scale:
            continue
        bits = ("b" in a.unit.symbol.replace("bytes", "")) != ("b" in b.unit.symbol.replace("bytes", ""))
        if bits and _SAME_RATE.search(sentence.before(at + 1)):
            value = exactly(a.number * a.unit.scale, b.unit.scale)
            yield at + 1, claim(sentence, loose(b), value, "the same rate", a.text)
