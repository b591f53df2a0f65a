"""All claims of a document: each number of the text by the first reader that knows what it is about."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kvik.lab.audit import aggregates, arithmetic, lookups, pairs, spoken
from kvik.lab.audit.claims import Scene, Sentence, sentences
from kvik.lab.audit.model import Check
from kvik.lab.audit.quantity import quantities

# what these read stands beside the number, in a form that leaves no choice
_HARD = (
    spoken.named_products,
    spoken.within,
    spoken.tuples,
    spoken.blocks,
    arithmetic.products,
    arithmetic.sizes,
    pairs.steps,
    pairs.parts,
)
# what these read is looked for: a number that does not follow may be about something else, so it has to be
# one slip away from what does
_SOFT = (
    lookups.rows_named,
    aggregates.counts,
    aggregates.aggregates,
    arithmetic.conversions,
    spoken.ceilings,
    spoken.times_than,
    pairs.spread,
    spoken.spread_from_before,
    pairs.remaining,
    aggregates.members,
    aggregates.ranges,
    lookups.per_token,
    lookups.quoted,
)


def audit_claims(scene: Scene) -> list[Check]:
    """The claims of the text that were recognised, recomputed; one check a number, two a range."""
    checks: list[Check] = []
    previous: arithmetic.Operand | None = None
    line = 0
    for sentence in sentences(scene.document):
        if sentence.line > line + 1:
            previous = None
        checks += _sentence(scene, sentence, previous)
        previous, line = arithmetic.carried(sentence), sentence.line
    return checks


def _sentence(scene: Scene, sentence: Sentence, previous: arithmetic.Operand | None) -> list[Check]:
    known = _known(scene, sentence, previous)
    return [
        check
        for at in sorted(known)
        for check in known[at]
        if not check.holds or _can_fail(scene, sentence, previous, at)
    ]


def _known(
    scene: Scene, sentence: Sentence, previous: arithmetic.Operand | None
) -> dict[int, list[Check]]:
    known: dict[int, list[Check]] = {}
    _add(known, arithmetic.equations(scene, sentence, previous))
    for reader in _HARD:
        _add(known, reader(scene, sentence))
    for reader in _SOFT:
        _add(known, (one for one in reader(scene, sentence) if _fair(sentence, *one)))
    return known


def _fair(sentence: Sentence, at: int, check: Check) -> bool:
    """Whether a check may be made: it holds, or a slip that needs two digits or more explains it."""
    digits = sentence.found[at].digits.replace(".", "").strip("0")
    return check.holds or (check.diagnosis is not None and len(digits) > 1)


def _can_fail(scene: Scene, sentence: Sentence, previous: arithmetic.Operand | None, at: int) -> bool:
    """Whether another number in this place would be accused: what can only be confirmed is not known."""
    digits = sentence.found[at].digits
    first = next((i for i, digit in enumerate(digits) if digit in "123456789"), None)
    if first is None:
        return False
    start = sentence.text.find(digits, sentence.found[at].span[0]) + first
    other = str(int(digits[first]) % 9 + 1)
    text = sentence.text[:start] + other + sentence.text[start + 1 :]
    found = tuple(quantities(text))
    if len(found) != len(sentence.found):
        return False
    changed = _known(scene, replace(sentence, text=text, found=found), previous)
    return any(not check.holds for check in changed.get(at, ()))


def _add(known: dict[int, list[Check]], checks: Iterable[tuple[int, Check]]) -> None:
    """What a reader says of the numbers that no reader before it knew; of a range, both ends."""
    found: dict[int, list[Check]] = {}
    for at, check in checks:
        if at not in known and (at not in found or check.printed != found[at][-1].printed):
            found.setdefault(at, []).append(check)
    known |= found
