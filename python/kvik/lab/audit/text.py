"""All claims of a document: each number of the text by the first reader that knows what it is about."""

from __future__ import annotations

from kvik.lab.audit import aggregates, arithmetic, lookups, pairs
from kvik.lab.audit.claims import Scene, Sentence, sentences
from kvik.lab.audit.model import Check

_READERS = (
    arithmetic.products,
    arithmetic.sizes,
    lookups.rows_named,
    pairs.steps,
    pairs.parts,
    aggregates.counts,
    aggregates.aggregates,
    arithmetic.conversions,
    pairs.spread,
    pairs.remaining,
    aggregates.members,
    aggregates.ranges,
    lookups.per_token,
    lookups.quoted,
)


def audit_claims(scene: Scene) -> list[Check]:
    """The claims of the text that were recognised, recomputed; one check a number."""
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
    known: dict[int, Check] = {}
    for at, check in arithmetic.equations(scene, sentence, previous):
        known.setdefault(at, check)
    for reader in _READERS:
        for at, check in reader(scene, sentence):
            known.setdefault(at, check)
    return [known[at] for at in sorted(known)]
