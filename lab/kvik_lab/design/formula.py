"""Model formulas as text: which terms a model has.

The notation is that of Wilkinson and Rogers (1973), as statistics packages read it, with one addition: a
power of a numeric factor (`tokens^2`) is that power, not the factor itself.

    a + b        both
    a:b          their interaction
    a * b        a + b + a:b
    a / b        a + a:b, b nested in a
    (a + b)^2    all interactions of up to two of them; ** is another way to write ^
    a - b        without b
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from kvik_lab.errors import LabError

Term = tuple[tuple[str, int], ...]
"""A product of factors, each with its power, in the order in which the formula first names them."""

_TOKEN = re.compile(r"\s*(?:(?P<name>[A-Za-z_][\w.]*)|(?P<number>\d+)|(?P<sign>\*\*|[-+*:/^()]))")


@dataclass(frozen=True)
class Formula:
    """The terms of a model. The intercept is always among them and is not listed."""

    text: str
    response: str | None
    terms: tuple[Term, ...]


def parse_formula(text: str, names: Iterable[str]) -> Formula:
    """Read a formula over the factors called `names`.

    What stands before a `~` is kept as the response. Terms come in the order in which they are first made.
    Raises LabError with the place in the text when it cannot be read, or names a factor that does not exist.
    """
    left, tilde, right = text.rpartition("~")
    parser = _Parser(right, tuple(names))
    return Formula(text.strip(), left.strip() if tilde else None, tuple(parser.read()))


def term_name(term: Term) -> str:
    """A term as it would be written in a formula."""
    return ":".join(name if power == 1 else f"{name}^{power}" for name, power in term) or "1"


class _Parser:
    """Recursive descent: sum > product > interaction > power > atom."""

    def __init__(self, text: str, names: tuple[str, ...]) -> None:
        self.text = text
        self.names = names
        self.tokens = self._tokens()
        self.at = 0

    def _tokens(self) -> list[tuple[str, str, int]]:
        found, place, end = [], 0, len(self.text.rstrip())
        while place < end:
            match = _TOKEN.match(self.text, place)
            if match is None:
                raise self._error(place, f"{self.text[place:].strip()[:10]!r} is not part of a formula")
            kind = match.lastgroup or ""
            found.append((kind, match.group(kind), match.start(kind)))
            place = match.end()
        return found

    def _error(self, place: int, what: str) -> LabError:
        return LabError(f"formula {self.text.strip()!r}, character {place + 1}: {what}")

    def _peek(self) -> str:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else ""

    def _place(self) -> int:
        return self.tokens[self.at][2] if self.at < len(self.tokens) else len(self.text)

    def read(self) -> list[Term]:
        terms = self._sum()
        if self.at < len(self.tokens):
            raise self._error(self._place(), f"{self._peek()!r} was not expected here; put + or : before it")
        return [term for term in terms if term]

    def _sum(self) -> list[Term]:
        terms = self._product()
        while self._peek() in ("+", "-"):
            sign, place = self._peek(), self._place()
            self.at += 1
            more = self._product()
            if sign == "+":
                terms = _union(terms, more)
                continue
            if () in more:
                raise self._error(place, "a plan keeps its intercept; leave out the 1")
            terms = [term for term in terms if term not in more]
        return terms

    def _product(self) -> list[Term]:
        terms = self._interaction()
        while self._peek() in ("*", "/"):
            sign = self._peek()
            self.at += 1
            right = self._interaction()
            if sign == "*":
                terms = _union(terms, right, _cross(terms, right))
                continue
            whole: Term = ()
            for term in terms:
                whole = _times(whole, term)
            terms = _union(terms, _cross([whole], right))
        return terms

    def _interaction(self) -> list[Term]:
        terms = self._power()
        while self._peek() == ":":
            self.at += 1
            terms = _cross(terms, self._power())
        return terms

    def _power(self) -> list[Term]:
        bracket = self._peek() == "("
        terms = self._atom()
        if self._peek() not in ("^", "**"):
            return terms
        self.at += 1
        place, number = self._place(), self._peek()
        if not number.isdecimal() or not 1 <= int(number) <= 9:
            raise self._error(place, "^ takes a whole number from 1 to 9")
        self.at += 1
        if not bracket:
            return [tuple((name, int(number)) for name, _ in term) for term in terms]
        result = terms
        for _ in range(int(number) - 1):
            result = _union(result, _cross(result, terms))
        return result

    def _atom(self) -> list[Term]:
        place = self._place()
        if self.at == len(self.tokens):
            raise self._error(place, "ends where a factor should stand")
        kind, text, _ = self.tokens[self.at]
        self.at += 1
        if kind == "name":
            if text not in self.names:
                raise self._error(place, f"there is no factor {text!r}{_suggestion(text, self.names)}")
            return [((text, 1),)]
        if text == "1":
            return [()]
        if text == "(":
            terms = self._sum()
            if self._peek() != ")":
                raise self._error(place, "this bracket is not closed")
            self.at += 1
            return terms
        raise self._error(place, f"{text!r} stands where a factor should")


def _suggestion(text: str, names: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(text, names, 1)
    return f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(names)}"


def _times(left: Term, right: Term) -> Term:
    powers = dict(left)
    for name, power in right:
        powers[name] = max(power, powers.get(name, 0))
    return tuple(powers.items())


def _cross(left: list[Term], right: list[Term]) -> list[Term]:
    return _union([_times(a, b) for a in left for b in right])


def _union(*parts: list[Term]) -> list[Term]:
    seen: dict[frozenset[tuple[str, int]], Term] = {}
    for part in parts:
        for term in part:
            seen.setdefault(frozenset(term), term)
    return list(seen.values())
