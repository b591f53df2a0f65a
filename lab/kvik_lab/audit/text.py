"""All claims of a document: each number of the text by the first reader that knows what it is about."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from kvik_lab.audit import again, aggregates, arithmetic, lookups, pairs, spoken
from kvik_lab.audit.claims import Scene, Sentence, measured, sentences
from kvik_lab.audit.model import Check

_Reader = Callable[[Scene, Sentence], Iterator[tuple[int, Check]]]


def _alone(read: Callable[[Sentence], Iterator[tuple[int, Check]]]) -> _Reader:
    """A reader of what the sentence itself says, with no look at the scene."""
    return lambda _, sentence: read(sentence)


# what these read stands beside the number, in a form that leaves no choice
_HARD: tuple[_Reader, ...] = (
    _alone(spoken.named_products),
    spoken.within,
    _alone(spoken.tuples),
    spoken.blocks,
    _alone(arithmetic.products),
    _alone(arithmetic.sizes),
    _alone(pairs.parts),
    _alone(pairs.spread),
)
# what these read is looked for: a number that does not follow may be about something else, so it has to be
# one slip away from what does
_SOFT: tuple[_Reader, ...] = (
    again.contradicted,
    _alone(pairs.steps),
    _alone(arithmetic.totals),
    lookups.rows_named,
    aggregates.counts,
    aggregates.aggregates,
    _alone(arithmetic.conversions),
    spoken.ceilings,
    _alone(pairs.remaining),
    aggregates.members,
    aggregates.ranges,
    lookups.per_token,
    lookups.quoted,
    again.repeated,
)


def audit_claims(scene: Scene, line: int | None = None) -> list[Check]:
    """The claims of the text, or of one line of it, that were recognised, recomputed; one check a number,
    two a range."""
    checks: list[Check] = []
    previous: arithmetic.Operand | None = None
    last = 0
    for sentence in sentences(scene.document):
        if sentence.line > last + 1:
            previous = None
        if line in (None, sentence.line):
            checks += _sentence(scene, sentence, previous)
        previous, last = arithmetic.carried(sentence), sentence.line
    return checks


def _sentence(scene: Scene, sentence: Sentence, previous: arithmetic.Operand | None) -> list[Check]:
    known = _known(scene, sentence, previous)
    return [
        check
        for at in sorted(known)
        for check in known[at]
        if not check.holds or _can_fail(scene, sentence, previous, at)
    ]


def _known(scene: Scene, sentence: Sentence, previous: arithmetic.Operand | None) -> dict[int, list[Check]]:
    known: dict[int, list[Check]] = {}
    equations = arithmetic.equations(sentence, previous)
    _add(known, (one for one in equations if "sides" not in one[1].rule or _fair(sentence, *one)))
    for reader in _HARD:
        _add(known, reader(scene, sentence))
    for reader in _SOFT:
        _add(known, (one for one in reader(scene, sentence) if _fair(sentence, *one)))
    return known


def _fair(sentence: Sentence, at: int, check: Check) -> bool:
    """Whether a check may be made: it holds, or a slip that needs two digits or more explains it."""
    digits = sentence.found[at].digits.replace(".", "").lstrip("0")
    digits = digits.rstrip("0") if sentence.found[at].approx else digits
    return check.holds or (check.diagnosis is not None and len(digits) > 1)


def _can_fail(scene: Scene, sentence: Sentence, previous: arithmetic.Operand | None, at: int) -> bool:
    """Whether another number in this place would be accused: what can only be confirmed is not known."""
    quantity = sentence.found[at]
    start = sentence.text.find(quantity.digits, quantity.span[0])
    for digits in _others(quantity.digits):
        text = sentence.text[:start] + digits + sentence.text[start + len(quantity.digits) :]
        found = measured(text)
        if len(found) == len(sentence.found):
            changed = _known(scene, replace(sentence, text=text, found=found), previous)
            if any(not check.holds for check in changed.get(at, ())):
                return True
    return False


def _others(digits: str) -> Iterator[str]:
    """Two other numbers: one with another first digit, and a smaller one."""
    first = re.search(r"[1-9]", digits)
    if first:
        at = first.start()
        yield digits[:at] + str(int(first[0]) % 9 + 1) + digits[at + 1 :]
        yield digits[:at] + "0" + digits[at:] if "." in digits[:at] else digits[: at + 1]


def _add(known: dict[int, list[Check]], checks: Iterable[tuple[int, Check]]) -> None:
    """What a reader says of the numbers that no reader before it knew; of a range, both ends."""
    found: dict[int, list[Check]] = {}
    for at, check in checks:
        if at not in known and (at not in found or check.printed != found[at][-1].printed):
            found.setdefault(at, []).append(check)
    known |= found
