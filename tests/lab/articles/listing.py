"""What a person counted in an article: its tables, derived cells and claims, from a YAML file, recomputed.

A formula is arithmetic on the numbers as the article prints them. A number with a decimal point stands for
every value that rounds to it; a whole number is taken as it is. What is printed follows when its own rounding
meets the bounds that come out.
"""

from __future__ import annotations

import ast
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

Follows = Literal["yes", "no", "cut", "loose"]
Bounds = tuple[float, float]

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Item:
    """One derived cell or claim: its line in the article, the digits printed, and what follows.

    `follows` is `cut` where digits were cut off in place of rounding, and `loose` where the article names a
    rounder number than it has, so that a careful reader may let it pass. `right` is what follows where it is
    not printed; `rival` is another value that follows just as well, from another reading.
    """

    kind: Literal["cell", "claim"]
    line: int
    printed: str
    how: str
    formula: str
    follows: Follows
    right: str | None
    rival: str | None
    note: str

    @property
    def value(self) -> float:
        """What is printed, as a number."""
        return float(self.printed)

    def bounds(self) -> Bounds:
        """What the formula gives, at the least and at the most."""
        return evaluate(self.formula)

    def meets(self, printed: str) -> bool:
        """Whether these digits are a rounding of what the formula gives."""
        low, high = self.bounds()
        half = half_step(printed)
        slack = 1e-9 * max(1.0, abs(low), abs(high))
        return low - half - slack <= float(printed) <= high + half + slack


@dataclass(frozen=True)
class TableFacts:
    """A table of the article: the line of its header, what it is about, and its numbers."""

    line: int
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Article:
    """An article: its name among the studies, its title, its file, and what was counted in it."""

    name: str
    title: str
    file: str
    tables: tuple[TableFacts, ...]
    items: tuple[Item, ...]
    optional: tuple[Item, ...]


def half_step(printed: str) -> float:
    """Half a unit of the last digit."""
    return float(0.5 * 10.0 ** -len(printed.partition(".")[2]))


def evaluate(formula: str) -> Bounds:
    """The bounds of a formula of numbers, + - * / ** and max, min, mean.

    Raises ValueError for anything else.
    """
    return _bounds(ast.parse(formula, mode="eval").body, formula)


def _bounds(node: ast.expr, source: str) -> Bounds:
    match node:
        case ast.Constant():
            text = ast.get_source_segment(source, node) or ""
            half = half_step(text) if "." in text else 0.0
            return float(text) - half, float(text) + half
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            low, high = _bounds(operand, source)
            return -high, -low
        case ast.BinOp(left=left, op=op, right=right):
            return _binary(op, _bounds(left, source), _bounds(right, source))
        case ast.Call(func=ast.Name(id=name), args=args) if name in ("max", "min", "mean"):
            ends = [_bounds(arg, source) for arg in args]
            lows, highs = [end[0] for end in ends], [end[1] for end in ends]
            if name == "mean":
                return sum(lows) / len(lows), sum(highs) / len(highs)
            return (max(lows), max(highs)) if name == "max" else (min(lows), min(highs))
    raise ValueError(f"{source!r}: {ast.unparse(node)} is not arithmetic")


def _binary(op: ast.operator, a: Bounds, b: Bounds) -> Bounds:
    match op:
        case ast.Add():
            return a[0] + b[0], a[1] + b[1]
        case ast.Sub():
            return a[0] - b[1], a[1] - b[0]
        case ast.Mult():
            values = [x * y for x, y in itertools.product(a, b)]
        case ast.Div():
            values = [x / y for x, y in itertools.product(a, b)]
        case ast.Pow():
            values = [x**y for x, y in itertools.product(a, b)]
        case _:
            raise ValueError(f"{ast.dump(op)} is not arithmetic")
    return min(values), max(values)


def load(path: Path) -> Article:
    """Read one listing."""
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    tables = tuple(
        TableFacts(one["line"], one["title"], tuple(one["header"]), tuple(tuple(row) for row in one["rows"]))
        for one in data.get("tables", ())
    )
    items = tuple(
        _item(kind, entry)
        for kind, name in (("cell", "cells"), ("claim", "claims"))
        for entry in data.get(name, ())
    )
    optional = tuple(_item("claim", entry) for entry in data.get("optional", ()))
    return Article(data["name"], data["title"], data["file"], tables, items, optional)


def _item(kind: Any, entry: dict[str, Any]) -> Item:
    known = {"line", "printed", "how", "formula", "follows", "right", "rival", "note"}
    if not set(entry) <= known:
        raise ValueError(f"unknown keys {sorted(set(entry) - known)} in {entry}")
    return Item(
        kind,
        entry["line"],
        entry["printed"],
        entry["how"],
        entry["formula"],
        entry.get("follows", "yes"),
        entry.get("right"),
        entry.get("rival"),
        entry.get("note", ""),
    )


def articles() -> list[Article]:
    """All listings, S0 first."""
    return [load(path) for path in sorted(FOLDER.glob("*.yaml"))]
