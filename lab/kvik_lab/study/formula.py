"""The names in a model formula. What the formula means is the design's affair; here it must only be sound."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from kvik_lab.study.problems import MistakeError, did_you_mean


def check_formula(text: str, names: Sequence[str]) -> tuple[str, ...]:
    """The factors in a formula such as `log(ttft) ~ backend * tokens + tokens^2`, in their order.

    Before `~` stands what is measured, and its name is free; behind it stand factors only, joined by
    `+ - * / : ^ **` and brackets. Raises `MistakeError`, whose column counts from 0.
    """
    left, tilde, right = text.partition("~")
    if not tilde:
        raise MistakeError(
            0, "a formula without `~`", "write what is measured ~ terms, such as ttft ~ tokens"
        )
    if "~" in right:
        raise MistakeError(len(left) + 1 + right.index("~"), "a second `~`", "keep the first")
    _parsed(left, 0)
    start = len(left) + 1
    known = list(names)
    found: list[str] = []
    tree = _parsed(right, start)
    start += len(right) - len(right.lstrip())
    for node in _names(tree, start):
        if node.id not in known:
            remedy = did_you_mean(node.id, known, what="factors")
            raise MistakeError(start + node.col_offset, f"{node.id!r} is no factor", remedy)
        found.append(node.id)
    return tuple(dict.fromkeys(found))


def _parsed(side: str, start: int) -> ast.expr:
    """One side as a tree; `:` is written as another operator of the same length, and the blanks stay."""
    lead = len(side) - len(side.lstrip())
    try:
        return ast.parse(side.strip().replace(":", "@"), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        column = start + lead + max(0, (getattr(error, "offset", None) or 1) - 1)
        remedy = "join terms by + - * / : ^ and brackets"
        text = f"{side.strip()!r} is no formula" if side.strip() else "nothing on one side of `~`"
        raise MistakeError(column, text, remedy) from None


def _names(node: ast.expr, start: int) -> Iterator[ast.Name]:
    if isinstance(node, ast.Name):
        yield node
    elif isinstance(node, ast.BinOp):
        yield from _names(node.left, start)
        yield from _names(node.right, start)
    elif isinstance(node, ast.UnaryOp):
        yield from _names(node.operand, start)
    elif not (isinstance(node, ast.Constant) and isinstance(node.value, int)):
        called = isinstance(node, ast.Call)
        text = f"{'a function' if called else repr(ast.unparse(node))} among the terms of a formula"
        remedy = "join factors by + - * / : ^ and brackets"
        if called:
            remedy = "give the factor `scale: log2` for its logarithm, and write tokens^2 for a square"
        raise MistakeError(start + node.col_offset, text, remedy)
