"""Which numbers of which table a sentence speaks of."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from kvik_lab.audit.claims import Scene, Sentence
from kvik_lab.audit.quantity import Quantity, plain
from kvik_lab.audit.rules import CHANGE, RATIO, Value, compute
from kvik_lab.audit.series import Slot, label_above


@dataclass(frozen=True)
class Group:
    """Numbers of a table that a claim may sum up, with the names under which they stand."""

    table: int
    names: str
    heading: str
    values: tuple[Value, ...]
    labels: tuple[str, ...]
    series: int

    @property
    def what(self) -> str:
        """How a rule names it."""
        return f"{self.names.strip() or 'the values'} of table {self.table + 1}"


_TOTALS = re.compile(
    r"^(total|sum|mean|average|avg|median|max|min|合計|合计|总计|総計|平均|geomean|overall|speed.?up)\b|^(合計|合计|总计|平均)",
    re.IGNORECASE,
)


def total(label: str) -> bool:
    """Whether a row label is that of a summary of the other rows."""
    return bool(_TOTALS.match(label))


def groups(scene: Scene, printed: Quantity, near: list[int]) -> Iterator[Group]:
    """The columns of the tables whose unit is that of a printed quantity; and, for derived values
    inside cells, those of a whole row label."""
    for table in near:
        view = scene.views[table]
        heading = scene.document.tables[table].heading
        pooled: dict[str, list[tuple[Slot, Value, str]]] = {}
        for series in view.series:
            found: list[tuple[Slot, Value, str]] = []
            for row, (label, slot) in enumerate(zip(view.labels, series.slots, strict=True)):
                if slot is None or not same_kind(slot.quantity, printed) or _TOTALS.match(label):
                    continue
                found.append((slot, best(scene, slot), label))
                if series.note:
                    pooled.setdefault(label_above(scene.document.tables[table], row), []).append(found[-1])
            if len(found) >= 2 and (series.position or series.note):
                yield _group(table, f"{series.name}", heading, found, series.position)
        for metric, found in pooled.items():
            if len({slot.place.column for slot, _, _ in found}) > 1:
                yield _group(table, metric, heading, found, -1)
        everything = [one for found in pooled.values() for one in found]
        if len(pooled) > 1:
            yield _group(table, "all", heading, everything, -2)
        yield from _relations(scene, printed, table)


def _relations(scene: Scene, printed: Quantity, table: int) -> Iterator[Group]:
    """What two columns are to each other, row by row, where a table has just two columns of one kind."""
    if printed.unit.kind not in ("percent", "ratio"):
        return
    view = scene.views[table]
    measured = [
        s
        for s in view.series
        if s.position and not s.note and s.count and s.uniform and s.unit.kind not in ("percent", "ratio")
    ]
    if len(measured) != 2 or measured[0].unit != measured[1].unit:
        return
    family = CHANGE if printed.unit.kind == "percent" else RATIO
    for one, other in itertools.permutations(measured):
        found = []
        for label, a, b in zip(view.labels, one.slots, other.slots, strict=True):
            if a is not None and b is not None and not _TOTALS.match(label):
                value = compute(family, [a.best, b.best], printed)
                if value is not None:
                    found.append((a, value, label))
        if len(found) >= 2:
            heading = scene.document.tables[table].heading
            yield _group(table, f"{one.name} against {other.name}", heading, found, one.position)


def _group(table: int, names: str, heading: str, found: list[tuple[Slot, Value, str]], series: int) -> Group:
    return Group(
        table, names, heading, tuple(v for _, v, _ in found), tuple(label for _, _, label in found), series
    )


def same_kind(a: Quantity, b: Quantity) -> bool:
    """Whether two quantities measure the same kind of thing."""
    if a.unit.dimension != b.unit.dimension or a.bound:
        return False
    if a.unit.dimension:
        return True
    special = {"percent", "ratio", "points"}
    return (
        a.unit.kind == b.unit.kind
        or not {a.unit.kind, b.unit.kind} & special
        or ({a.unit.kind, b.unit.kind} == {"plain", "ratio"})
    )


def best(scene: Scene, slot: Slot) -> Value:
    """A printed value, the interval in which it lies after its own recomputation, or what follows."""
    quantity, scale = slot.quantity, slot.quantity.unit.scale
    value = Value(quantity.low * scale, quantity.number * scale, quantity.high * scale, scale)
    if quantity.upper is not None:
        value = Value(value.low, (value.low + value.high) / 2, value.high, scale)
    finer = scene.known.get((slot.place, quantity.span[0]))
    if finer is None:
        return value
    low, high = max(value.low, finer.low), min(value.high, finer.high)
    if low > high:  # it does not follow: what does stands in its place
        return Value(finer.low, finer.middle, finer.high, scale)
    return Value(low, min(max(finer.middle, low), high), high, scale)


# a full stop or comma at its end is not of the word
_WORD = re.compile(
    r"[a-z][a-z0-9_.]*[a-z0-9_]|\d(?:[\d,.]*\d)?[a-z]*|[\u3040-\u30ff]{2,}|[\u4e00-\u9fff]+", re.IGNORECASE
)
_COMMON = {
    "the",
    "of",
    "and",
    "on",
    "to",
    "a",
    "in",
    "by",
    "for",
    "is",
    "at",
    "from",
    "vs",
    "with",
    "mean",
    "average",
}


@lru_cache(maxsize=8192)
def tokens(text: str) -> frozenset[str]:
    """The words of a text for comparing names: Latin words by their stems, Chinese characters in
    pairs."""
    answer: set[str] = set()
    for word in _WORD.findall(plain(text).lower().replace("-", " ").replace("_", " ")):
        if re.match(r"[\u4e00-\u9fff]", word):
            answer |= {word[i : i + 2] for i in range(max(len(word) - 1, 1))}
        elif word not in _COMMON:
            answer.add(word if len(word) < 4 else re.sub(r"(ing|es|s|ed|e)$", "", word))
    return frozenset(answer)


def overlap(text: str, names: str) -> int:
    """How many words two texts share."""
    return len(tokens(text) & tokens(names))


def ranked(scene: Scene, sentence: Sentence, at: int, near: list[int]) -> list[tuple[int, Group]]:
    """The groups that a quantity may speak of with their scores, those that the sentence names best
    first.

    Words beside the quantity count three times, words of the rest of the sentence once; a table's
    heading counts where it tells tables apart.
    """
    close = sentence.before(at)[-60:] + " " + re.split(r"[,;。、(]", sentence.after(at))[0][:40]
    before = sentence.before(at)[-60:]
    if "(" in before and at:  # what stands in parentheses is about what stands before them
        before = sentence.before(at - 1)[-60:] + before
    before = re.sub(r"[\d.,]+", " ", before)
    lead = sentence.text[: sentence.found[at].span[0]]
    answer = []
    for order, group in enumerate(groups(scene, sentence.found[at], near)):
        score = (
            3 * overlap(close, group.names) + 2 * overlap(before, group.heading) + overlap(lead, group.names)
        )
        rank = near.index(group.table)
        # a sentence that names no column is about all of them together
        answer.append((10 * score - min(rank, 4) + (5 if group.series < 0 else 0), order, group))
    answer.sort(key=lambda one: (-one[0], one[1]))
    return [(score, group) for score, _, group in answer]
