"""All claims of a document: each number of the text by the first reader that knows what it is about."""

from __future__ import annotations

from collections.abc import Iterable

from kvik_lab.audit import aggregates, arithmetic, lookups, pairs, spoken
from kvik_lab.audit.claims import Scene, Sentence, sentences
from kvik_lab.audit.model import Check

_READERS = (
    spoken.named_products,
    spoken.within,
    spoken.tuples,
    spoken.blocks,
    arithmetic.products,
    arithmetic.sizes,
    lookups.rows_named,
    pairs.steps,
    pairs.parts,
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
    known: dict[int, list[Check]] = {}
    _add(known, arithmetic.equations(scene, sentence, previous))
    for reader in _READERS:
        _add(known, reader(scene, sentence))
    return [check for at in sorted(known) for check in known[at]]


def _add(known: dict[int, list[Check]], checks: Iterable[tuple[int, Check]]) -> None:
    """What a reader says of the numbers that no reader before it knew; of a range, both ends."""
    found: dict[int, list[Check]] = {}
    for at, check in checks:
        if at not in known and (at not in found or check.printed != found[at][-1].printed):
            found.setdefault(at, []).append(check)
    known |= found
