"""Constraints: conditions on factors and constants, checked when they are read and evaluated for many rows.

The language is a small part of Python's: comparisons, `and`, `or`, `not`, `+ - * / // % **`, `in` a list of
values, names of factors and constants, and the functions of `FUNCTIONS`. It is parsed by `ast` and walked
here; nothing is ever given to `eval`.

A factor can be absent in a row (it is nested, and its parent has another level). What depends on it is then
neither true nor false (Kleene's three-valued logic): `False and absent` is false, `True or absent` is true,
and every other value that an absent factor is part of is unknown. A constraint is violated where it is
*false*: one that cannot be told excludes no row. `exists(factor)` asks for it, and is always known.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from kvik_lab.design.factor import Factor, Level
from kvik_lab.study.problems import MistakeError, did_you_mean

Constant: TypeAlias = str | int | float | bool


class Kind(Enum):
    """What an expression comes to."""

    NUMBER = "a number"
    TEXT = "a text"
    CONDITION = "a condition"


@dataclass(frozen=True)
class Signature:
    """How a function is called: the kinds of its arguments, how many it needs, and what it gives."""

    arguments: tuple[Kind, ...]
    least: int
    about: str
    endless: bool = False
    gives: Kind = Kind.NUMBER


_N, _T = Kind.NUMBER, Kind.TEXT
FUNCTIONS: Mapping[str, Signature] = {
    "weights_bytes": Signature((_T,), 0, "weights_bytes(model): bytes of a model's weights"),
    "kv_bytes": Signature((_N, _T), 1, "kv_bytes(tokens, model): bytes of KV of so many tokens"),
    "min": Signature((_N, _N), 2, "min(a, b, ...): the least", endless=True),
    "max": Signature((_N, _N), 2, "max(a, b, ...): the greatest", endless=True),
    "log2": Signature((_N,), 1, "log2(x): the logarithm to base 2"),
    "sqrt": Signature((_N,), 1, "sqrt(x): the square root"),
    "ceil": Signature((_N,), 1, "ceil(x): the next whole number upwards"),
    "floor": Signature((_N,), 1, "floor(x): the next whole number downwards"),
    "abs": Signature((_N,), 1, "abs(x): the amount without the sign"),
    "exists": Signature((), 1, "exists(factor): whether the row has it", gives=Kind.CONDITION),
}

_ARITHMETIC: tuple[type[ast.operator], ...] = (
    ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow,
)  # fmt: skip
_ORDER: tuple[type[ast.cmpop], ...] = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_DEEPEST = 40
LARGEST_NUMBER = 2**53
"""Up to here every whole number is exact as a 64-bit float."""


@dataclass(frozen=True)
class Expression:
    """A condition that has passed its checks. `names` are the factors and constants in it, in their order."""

    text: str
    tree: ast.expr
    names: tuple[str, ...]


@dataclass(frozen=True)
class Scope:
    """The names that an expression may have. `faulty` ones are declared, but what they are is not known."""

    factors: Mapping[str, Factor]
    constants: Mapping[str, Constant]
    faulty: frozenset[str] = frozenset()

    @property
    def names(self) -> list[str]:
        """All of them."""
        return [*self.factors, *self.constants, *sorted(self.faulty)]


def kind_of(value: Level) -> Kind:
    """The kind of one level or constant."""
    if isinstance(value, bool):
        return Kind.CONDITION
    return Kind.TEXT if isinstance(value, str) else Kind.NUMBER


def parse_condition(text: str, scope: Scope) -> Expression:
    """Parse and check a condition. Raises `MistakeError` for the first thing that is wrong in it."""
    stripped = text.strip()
    if not stripped:
        raise MistakeError(0, "an empty condition", "write one, such as tokens + max_tokens <= max_model_len")
    if "\n" in stripped or "\\" in stripped:
        raise MistakeError(0, "a condition of several lines", "write it on one, joined by `and`")
    shift = len(text) - len(text.lstrip())
    try:
        tree = ast.parse(stripped, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        column = (getattr(error, "offset", None) or 1) - 1
        remedy = "conditions are written as in Python, such as not (client == 'offline' and concurrency > 1)"
        if re.search(r"[^=<>!]=[^=]", stripped):
            remedy = "write == to compare"
        if "&&" in stripped or "||" in stripped or "!" in stripped.replace("!=", ""):
            remedy = "write and, or, not"
        raise MistakeError(shift + column, f"{stripped!r} is no expression", remedy) from None
    checker = _Checker(scope)
    try:
        kind = checker.kind(tree, 0)
    except MistakeError as error:
        column = len(stripped.encode()[: error.column].decode())  # ast counts bytes
        raise MistakeError(column + shift, error.text, error.remedy) from None
    if kind not in (Kind.CONDITION, None):
        remedy = "compare it with something, such as <= max_model_len"
        raise MistakeError(shift, f"{stripped!r} is {kind.value}, not a condition", remedy)
    return Expression(stripped, tree, tuple(dict.fromkeys(checker.names)))


class _Checker:
    """Finds the kind of every part. None stands for a part whose kind cannot be told (a faulty factor)."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.names: list[str] = []

    def kind(self, node: ast.expr, depth: int) -> Kind | None:
        if depth > _DEEPEST:
            raise _wrong(node, "nested too deeply", "split it into several constraints")
        match node:
            case ast.BoolOp(values=values):
                for value in values:
                    self.need(value, Kind.CONDITION, depth, "joined by `and` or `or`")
                return Kind.CONDITION
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                self.need(operand, Kind.CONDITION, depth, "behind `not`")
                return Kind.CONDITION
            case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
                return self.need(operand, Kind.NUMBER, depth, "behind a sign")
            case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _ARITHMETIC):
                self.need(left, Kind.NUMBER, depth, "in arithmetic")
                return self.need(right, Kind.NUMBER, depth, "in arithmetic")
            case ast.BinOp(op=ast.BitAnd() | ast.BitOr() | ast.BitXor()):
                raise _wrong(node, "an operator on bits", "write and, or, not; ** is the power")
            case ast.Compare():
                return self.comparison(node, depth)
            case _:
                return self.atom(node, depth)

    def atom(self, node: ast.expr, depth: int) -> Kind | None:
        match node:
            case ast.Call():
                return self.call(node, depth)
            case ast.Name(id=name):
                return self.name(node, name)
            case ast.Constant(value=bool() | int() | float() | str() as value):
                if not isinstance(value, str) and abs(value) > LARGEST_NUMBER:
                    raise _wrong(node, "a number beyond 2**53", "numbers are exact up to 2**53 only")
                return kind_of(value)
            case _:
                raise _wrong(node, *_refusal(node))

    def need(self, node: ast.expr, wanted: Kind, depth: int, where: str) -> Kind:
        found = self.kind(node, depth + 1)
        if found is not None and found is not wanted:
            remedy = f"{wanted.value} belongs there"
            raise _wrong(node, f"{ast.unparse(node)!r} is {found.value}, {where}", remedy)
        return wanted

    def name(self, node: ast.Name, name: str) -> Kind | None:
        if name in self.scope.factors or name in self.scope.constants:
            self.names.append(name)
            factor = self.scope.factors.get(name)
            return kind_of(self.scope.constants[name] if factor is None else factor.levels[0])
        if name in self.scope.faulty:
            return None
        if name in FUNCTIONS:
            raise _wrong(node, f"{name!r} is a function", f"call it: {FUNCTIONS[name].about}")
        remedy = did_you_mean(name, self.scope.names, what="factors and constants")
        raise _wrong(node, f"{name!r} is no factor and no constant", remedy)

    def call(self, node: ast.Call, depth: int) -> Kind:
        if not isinstance(node.func, ast.Name):
            raise _wrong(node.func, *_refusal(node.func))
        name = node.func.id
        signature = FUNCTIONS.get(name)
        if signature is None:
            raise _wrong(node, f"no function {name!r}", did_you_mean(name, list(FUNCTIONS), what="functions"))
        if node.keywords or any(isinstance(one, ast.Starred) for one in node.args):
            raise _wrong(node, f"{name} with a named argument", f"write {signature.about}")
        if name == "exists":
            self.existing(node)
            return signature.gives
        most = 99 if signature.endless else len(signature.arguments)
        if not signature.least <= len(node.args) <= most:
            text = f"{name} with {len(node.args)} argument{'' if len(node.args) == 1 else 's'}"
            raise _wrong(node, text, f"write {signature.about}")
        for at, argument in enumerate(node.args):
            wanted = signature.arguments[min(at, len(signature.arguments) - 1)]
            self.need(argument, wanted, depth, f"given to {name}")
            if wanted is Kind.TEXT and not isinstance(argument, ast.Name):
                raise _wrong(argument, f"{name} of {ast.unparse(argument)!r}", "give it the name `model`")
        return signature.gives

    def existing(self, node: ast.Call) -> None:
        if len(node.args) == 1 and isinstance(node.args[0], ast.Name):
            name = node.args[0].id
            if name in self.scope.factors:
                self.names.append(name)
                return
            if name in self.scope.faulty:
                return
            remedy = did_you_mean(name, list(self.scope.factors), what="factors")
            raise _wrong(node.args[0], f"{name!r} is no factor", remedy)
        raise _wrong(node, "exists of something other than one factor", "write exists(factor)")

    def comparison(self, node: ast.Compare, depth: int) -> Kind:
        left = node.left
        for op, right in zip(node.ops, node.comparators, strict=True):
            if isinstance(op, ast.In | ast.NotIn):
                self.membership(left, right, depth)
            elif isinstance(op, ast.Is | ast.IsNot):
                raise _wrong(node, "`is` compares objects", "write == or !=")
            else:
                self.pair(left, op, right, depth)
            left = right
        return Kind.CONDITION

    def membership(self, left: ast.expr, right: ast.expr, depth: int) -> None:
        if not isinstance(right, ast.List | ast.Tuple | ast.Set) or not right.elts:
            raise _wrong(right, f"`in` {ast.unparse(right)!r}", "write a list of values, such as in [1, 2]")
        for element in right.elts:
            value = element.operand if isinstance(element, ast.UnaryOp) else element
            if not isinstance(value, ast.Constant):
                raise _wrong(element, f"{ast.unparse(element)!r} in a list", "a list has values only")
            self.pair(left, ast.Eq(), element, depth)

    def pair(self, left: ast.expr, op: ast.cmpop, right: ast.expr, depth: int) -> None:
        first, second = self.kind(left, depth + 1), self.kind(right, depth + 1)
        if first is None or second is None:
            return
        if isinstance(op, _ORDER) and Kind.NUMBER not in (first, second):
            raise _wrong(left, f"{ast.unparse(left)!r} is {first.value} and has no order", "use == or in")
        if first is not second:
            text = (
                f"{ast.unparse(left)!r} is {first.value} and {ast.unparse(right)!r} is {second.value}: they "
                "are never equal"
            )
            raise _wrong(right, text, f"compare with {first.value}")
        if isinstance(op, ast.Eq | ast.NotEq):
            self.level(left, right)
            self.level(right, left)

    def level(self, name: ast.expr, value: ast.expr) -> None:
        """Refuse a comparison of a factor with a level that it never has."""
        if not (isinstance(name, ast.Name) and isinstance(value, ast.Constant)):
            return
        factor = self.scope.factors.get(name.id)
        if factor is not None and value.value not in factor.levels:
            known = [str(level) for level in factor.levels]
            remedy = did_you_mean(str(value.value), known, what="its levels")
            raise _wrong(value, f"{name.id!r} has no level {value.value!r}", remedy)


def _wrong(node: ast.expr, text: str, remedy: str) -> MistakeError:
    return MistakeError(node.col_offset, text, remedy)


def _refusal(node: ast.expr) -> tuple[str, str]:
    """Why a kind of node is not part of the language, and what to do."""
    text = ast.unparse(node)[:60]
    match node:
        case ast.Attribute():
            return f"{text!r}: names have no parts here", "use a factor, a constant or a function by its name"
        case ast.Subscript():
            return f"{text!r}: nothing is indexed here", "name a constant for the value"
        case ast.IfExp():
            return f"{text!r}: no `if` in a condition", "write (A and B) or (not A and C)"
        case ast.List() | ast.Tuple() | ast.Set():
            return f"{text!r}: a list alone", "write NAME in [..]"
        case ast.Constant():
            return f"{text}: no value of a factor", "values are numbers, texts, True and False"
        case _:
            return f"{text!r} is not part of the language", "use comparisons, and, or, not, arithmetic, in"
