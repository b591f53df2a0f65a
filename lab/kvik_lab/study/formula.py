"""Model formulas as text: which terms a model has. Plans and fits read them here, and nowhere else.

The notation is that of Wilkinson and Rogers (1973), read by the package formulaic, with one addition: a power
of a numeric factor (`tokens^2`) is that power, not the factor itself.

    a + b        both
    a:b          their interaction
    a * b        a + b + a:b
    a / b        a + a:b, b nested in a
    (a + b)^2    all interactions of up to two of them; ** is another way to write ^
    a - b        without b

Before a `~` stands what is measured: a name, or `log(name)`, whose effects are ratios.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvik_lab.study.problems import MistakeError, did_you_mean

Term = tuple[tuple[str, int], ...]
"""A product of factors, each with its power, in the order in which the formula first names them."""

_TOKEN = re.compile(
    r"(?P<blank>\s+)|(?P<name>[A-Za-z_][\w.]*)(?:\s*(?:\^|\*\*)\s*(?P<power>[1-9])(?!\d))?"
    r"|(?P<number>\d+)|(?P<sign>(?P<raise>\*\*|\^)(?!\s*[1-9](?!\d))|\*\*|[-+*:/^()])"
)
_MEASURED = re.compile(r"\s*(?P<log>log\s*\(\s*)?(?P<name>[A-Za-z_][\w.]*)\s*(?(log)\)\s*)")
_MARK = "\u29db"  # formulaic's, before what it finds wrong
_SAID = (
    (r"Could not find matching context marker", "a bracket without its other half"),
    (r"Missing operator between `(.*)` and `(.*)`", r"nothing between \1 and \2"),
    (r"Numeric literals .*", "a number among the terms"),
    (r"Operator `(.*)` has insuff.*", r"`\1` without a factor on one of its sides"),
)
_JOIN = "join factors by + - * / : ^ and brackets"
_DEEPEST = 12


@dataclass(frozen=True)
class Formula:
    """The terms of a model. The intercept is always among them and is not listed."""

    text: str
    response: str | None
    """What stands before `~`, as it is written."""
    measured: str | None
    """The name in it."""
    logarithmic: bool
    """Whether the model is of its logarithm, so that effects are ratios."""
    terms: tuple[Term, ...]


def parse_formula(text: str, names: Sequence[str]) -> Formula:
    """Read a formula over the factors called `names`, with or without a `~`.

    Terms come in the order in which they are first made. Raises `MistakeError`, whose column counts from 0,
    when it cannot be read, or names a factor that does not exist.
    """
    left, tilde, right = text.partition("~")
    if "~" in right:
        raise MistakeError(len(left) + 1 + right.index("~"), "a second `~`", "keep the first")
    if not tilde:
        return Formula(text.strip(), None, None, False, _terms(text, 0, names))
    measured = _MEASURED.fullmatch(left)
    if measured is None:
        told = f"{left.strip()!r} is nothing that is measured" if left.strip() else "nothing before `~`"
        raise MistakeError(0, told, "write a name or log(name), such as log(ttft) ~ tokens")
    terms = _terms(right, len(left) + 1, names)
    return Formula(text.strip(), left.strip(), measured["name"], measured["log"] is not None, terms)


def term_name(term: Term) -> str:
    """A term as it would be written in a formula."""
    return ":".join(name if power == 1 else f"{name}^{power}" for name, power in term) or "1"


def _terms(text: str, start: int, names: Sequence[str]) -> tuple[Term, ...]:
    """The terms of a right side that begins at the column `start`."""
    pieces = list(_pieces(text, start, names))
    if not pieces:
        raise MistakeError(start, "no terms", _JOIN)
    # Slow to import, and most plans have no formula.
    from kvik_lab.study.wilkinson import PARSER, FormulaSyntaxError

    try:
        found = PARSER.get_terms("".join(piece for piece, _at in pieces))
    except FormulaSyntaxError as error:
        raise _mistake(str(error), pieces) from None
    terms = [tuple(_powers(str(factor.expr) for factor in term.factors)) for term in found]
    if () not in terms:
        raise MistakeError(start, "a model without intercept", "a plan keeps its intercept; leave out the 1")
    kept: dict[frozenset[tuple[str, int]], Term] = {}
    for term in filter(None, terms):
        kept.setdefault(frozenset(term), term)
    return tuple(kept.values())


def _pieces(text: str, start: int, names: Sequence[str]) -> Iterator[tuple[str, int]]:
    """The formula in formulaic's words, each with its column: a factor with its power is one quoted name."""
    place = depth = 0
    while place < len(text):
        match, at = _TOKEN.match(text, place), start + place
        if match is None:
            raise MistakeError(at, f"{text[place:].strip()[:10]!r} is not part of a formula", _JOIN)
        place = match.end()
        name = match["name"]
        if match["raise"] is not None:
            raise MistakeError(at, "a power that is no whole number from 1 to 9", _JOIN)
        if name is None:
            depth += {"(": 1, ")": -1}.get(match.group(), 0)
            if depth > _DEEPEST:
                raise MistakeError(at, f"brackets more than {_DEEPEST} deep", "multiply them out")
            if match["blank"] is None:
                yield match.group(), at
            continue
        if name not in names:
            if text[place:].lstrip().startswith("("):
                remedy = "give the factor `scale: log2` for its logarithm, and write tokens^2 for a square"
                raise MistakeError(at, "a function among the terms of a formula", remedy)
            raise MistakeError(at, f"{name!r} is no factor", did_you_mean(name, names, what="factors"))
        if match["power"] and text[place:].lstrip().startswith(("^", "**")):
            raise MistakeError(at, f"a power of {name}^{match['power']}", "write its power once")
        yield f"`{name}^{match['power'] or 1}`", at


def _powers(factors: Iterator[str]) -> Iterator[tuple[str, int]]:
    """The factors of a term without the intercept's 1; one that is there twice has its higher power."""
    powers: dict[str, int] = {}
    for text in factors:
        if text != "1":
            name, _, power = text.rpartition("^")
            powers[name] = max(int(power), powers.get(name, 0))
    yield from powers.items()


def _mistake(said: str, pieces: Sequence[tuple[str, int]]) -> MistakeError:
    """What formulaic says, with the column of the piece that it marks."""
    told, _, shown = said.partition("\n\n")
    marked, length, at = shown.find(_MARK), 0, pieces[-1][1]
    for piece, column in pieces:
        length += len(piece)
        if 0 <= marked < length:
            at = column
            break
    told = re.sub(r"\^1\b", "", told.strip().rstrip("."))
    for theirs, ours in _SAID:
        told = re.sub(theirs, ours, told)
    return MistakeError(at, told, _JOIN)
