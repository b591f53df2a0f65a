"""Conditions over many rows at once, and why one row does not meet one."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvik_lab.design.factor import Level
from kvik_lab.errors import LabError
from kvik_lab.study.expressions import Constant, Expression
from kvik_lab.study.unit import Unit

Bools = NDArray[np.bool_]
Columns = Mapping[str, NDArray[Any]]
"""A column a factor; None or NaN where a row does not have it."""

_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip
_COMPARE: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip
_MIRROR = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
_FUNCTIONS: Mapping[str, Callable[[Any], Any]] = {
    "log2": np.log2, "sqrt": np.sqrt, "ceil": np.ceil, "floor": np.floor, "abs": np.abs,
}  # fmt: skip


@dataclass(frozen=True)
class _Values:
    """A part's value in every row, and where it is known. Numbers are 64-bit floats, exact up to 2**53."""

    values: NDArray[Any]
    known: Bools


@dataclass(frozen=True)
class Violation:
    """A constraint that a combination does not meet: its text, what it reads, and what it comes to."""

    constraint: str
    values: Mapping[str, Level]
    shows: str

    def __str__(self) -> str:
        return f"{self.constraint}: {self.shows}"


def violated(
    expression: Expression, columns: Columns, rows: int, constants: Mapping[str, Constant], unit: Unit
) -> Bools:
    """For each of `rows` rows, whether the condition is false there.

    A row whose absent factors leave it open is not violated. Raises `LabError` where a part has no value,
    such as a division by zero.
    """
    found = _Evaluator(expression, columns, rows, constants, unit).value(expression.tree)
    broken: Bools = found.known & ~found.values.astype(bool)
    return broken


def explain(
    expression: Expression, levels: Mapping[str, Level], constants: Mapping[str, Constant], unit: Unit
) -> Violation | None:
    """Why one combination violates the condition; None when it does not."""
    columns = {name: np.array([value], dtype=object) for name, value in levels.items()}
    if not violated(expression, columns, 1, constants, unit)[0]:
        return None
    evaluator = _Evaluator(expression, columns, 1, constants, unit)
    read = {name: levels.get(name, constants.get(name)) for name in expression.names}
    values = {name: value for name, value in read.items() if value is not None}
    given = ", ".join(f"{name} = {shown(value)}" for name, value in values.items())
    tree = expression.tree
    if isinstance(tree, ast.Compare) and len(tree.ops) == 1 and type(tree.ops[0]) in _MIRROR:
        left, right = (evaluator.value(side).values[0] for side in (tree.left, tree.comparators[0]))
        given = f"{shown(left)} {_MIRROR[type(tree.ops[0])]} {shown(right)} does not hold, with {given}"
    else:
        given = f"does not hold with {given}"
    return Violation(expression.text, values, given)


def shown(value: Any) -> str:
    """A value as people read it: whole numbers with separators."""
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, int | float | np.number):
        number = float(value)
        return f"{number:,.0f}" if number.is_integer() else f"{number:,.6g}"
    return str(value)


class _Evaluator:
    def __init__(
        self,
        expression: Expression,
        columns: Columns,
        rows: int,
        constants: Mapping[str, Constant],
        unit: Unit,
    ) -> None:
        self.expression, self.rows, self.constants, self.unit = expression, rows, constants, unit
        self.columns = columns
        self.everywhere = np.ones(rows, dtype=bool)

    def value(self, node: ast.expr) -> _Values:
        match node:
            case ast.BoolOp(op=op, values=values):
                return self.joined([self.value(one) for one in values], isinstance(op, ast.And))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner = self.value(operand)
                return _Values(~inner.values.astype(bool), inner.known)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner = self.value(operand)
                return _Values(-inner.values, inner.known)
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return self.value(operand)
            case ast.BinOp(left=left, op=op, right=right):
                one, two = self.value(left), self.value(right)
                return self.number(node, _ARITHMETIC[type(op)], [one, two])
            case ast.Compare():
                return self.compared(node)
            case ast.Call(func=ast.Name(id=name), args=arguments):
                return self.called(node, name, arguments)
            case ast.Name(id=name):
                return self.named(name)
            case ast.Constant(value=bool() | int() | float() | str() as value):
                return self.same(value)
        raise LabError(f"{self.expression.text!r}: {ast.unparse(node)!r} passed no check")

    def same(self, value: Constant) -> _Values:
        kind: Any = object if isinstance(value, str) else bool if isinstance(value, bool) else float
        return _Values(np.full(self.rows, value, dtype=kind), self.everywhere)

    def named(self, name: str) -> _Values:
        if name in self.constants:
            return self.same(self.constants[name])
        column = self.columns.get(name)
        if column is None:
            return _Values(np.zeros(self.rows), ~self.everywhere)
        if column.dtype != object:
            known = ~np.isnan(column) if column.dtype.kind == "f" else self.everywhere
            values = column if column.dtype.kind == "b" else np.where(known, column, 0).astype(float)
            return _Values(values, known)
        known = np.array([value is not None and value == value for value in column], dtype=bool)
        present = column[known]
        if present.size and isinstance(present[0], int | float | np.number):
            kind = bool if isinstance(present[0], bool) else float
            filled = np.zeros(self.rows, dtype=kind)
            filled[known] = present.astype(kind)
            return _Values(filled, known)
        return _Values(column, known)

    def joined(self, parts: list[_Values], every: bool) -> _Values:
        """`and` and `or` of three values: one part that is false (true) and known decides."""
        truth = [part.values.astype(bool) & part.known for part in parts]
        untruth = [~part.values.astype(bool) & part.known for part in parts]
        if every:
            false, true = np.logical_or.reduce(untruth), np.logical_and.reduce(truth)
        else:
            false, true = np.logical_and.reduce(untruth), np.logical_or.reduce(truth)
        return _Values(true, true | false)

    def compared(self, node: ast.Compare) -> _Values:
        parts = []
        left = node.left
        for op, right in zip(node.ops, node.comparators, strict=True):
            if isinstance(op, ast.In | ast.NotIn) and isinstance(right, ast.List | ast.Tuple | ast.Set):
                pairs = [self.pair(left, ast.Eq(), one) for one in right.elts]
                found = self.joined(pairs, every=False)
                parts.append(_Values(~found.values, found.known) if isinstance(op, ast.NotIn) else found)
            else:
                parts.append(self.pair(left, op, right))
            left = right
        return self.joined(parts, every=True)

    def pair(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> _Values:
        one, two = self.value(left), self.value(right)
        known = one.known & two.known
        result = np.zeros(self.rows, dtype=bool)
        result[known] = _COMPARE[type(op)](one.values[known], two.values[known])
        return _Values(result, known)

    def number(self, node: ast.expr, call: Callable[..., Any], parts: list[_Values]) -> _Values:
        known = np.logical_and.reduce([part.known for part in parts])
        result = np.zeros(self.rows)
        with np.errstate(all="ignore"):
            result[known] = call(*(part.values[known] for part in parts))
        wrong = known & ~np.isfinite(result)
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            given = {name: self.columns[name][row] for name in self.expression.names if name in self.columns}
            where = ", ".join(f"{name} = {shown(value)}" for name, value in given.items()) or "the constants"
            raise LabError(
                f"constraint {self.expression.text!r}: {ast.unparse(node)} has no finite value with {where}; "
                "exclude those levels, or write it without that operation"
            )
        return _Values(result, known)

    def called(self, node: ast.expr, name: str, arguments: list[ast.expr]) -> _Values:
        if name == "exists":
            return _Values(self.value(arguments[0]).known, self.everywhere)
        if name == "weights_bytes":
            return self.by_model(arguments[0] if arguments else None, self.unit.weights_bytes)
        if name == "kv_bytes":
            each = self.by_model(arguments[1] if len(arguments) > 1 else None, self.unit.token_bytes)
            return self.number(node, operator.mul, [self.value(arguments[0]), each])
        parts = [self.value(one) for one in arguments]
        if name in ("min", "max"):
            pick = np.minimum if name == "min" else np.maximum
            return self.number(node, lambda *all_of: pick.reduce(all_of), parts)
        return self.number(node, _FUNCTIONS[name], parts)

    def by_model(self, argument: ast.expr | None, size: Callable[[str | None], int]) -> _Values:
        if argument is None:
            factor = "model" if "model" in self.columns else None
            models = self.named("model") if factor else None
        else:
            models = self.value(argument)
        if models is None:
            return self.same(float(size(None)))
        sizes = {model: float(size(str(model))) for model in set(models.values[models.known])}
        values = [
            sizes[model] if known else 0.0 for model, known in zip(models.values, models.known, strict=True)
        ]
        return _Values(np.array(values, dtype=float), models.known)
