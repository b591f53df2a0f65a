# ruff: noqa: RUF001 - the marks and words that tables print
"""Claims about named rows of a table: so much at this prompt length, the one row against the other,
of the peak."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvik_lab.audit import rules as r
from kvik_lab.audit.claims import Scene, Sentence, claim, computed, loose
from kvik_lab.audit.groups import best, overlap, same_kind
from kvik_lab.audit.model import Check, Document
from kvik_lab.audit.quantity import Quantity
from kvik_lab.audit.rules import Value
from kvik_lab.audit.series import Series, Slot, View
from kvik_lab.audit.slips import slip

_CHANGE = re.compile(
    r"faster|slower|better|worse|higher|lower|improve|reduc|gain|differ|more|less|drop|fall|rise|over|increase|cut"
    r"|改善|短縮|高速|向上|低下|削減|増|减|降|提升|提高|快|慢|差",
    re.IGNORECASE,
)
_KV_SIZE = re.compile(r"KV.{0,12}(size|サイズ|大小)", re.IGNORECASE)
_PEAK = re.compile(r"^\s*(of|の)\s*(the\s)?(peak|maximum|max|best|ピーク|最大)", re.IGNORECASE)


@dataclass(frozen=True)
class _Row:
    table: int
    index: int
    used: tuple[int, ...]


def _rows(view: View, sentence: Sentence, table: int) -> list[_Row]:
    """The rows of a table that a sentence names, with the quantities of the sentence that name them."""
    answer = []
    first = next((series for series in view.series if series.position == 0 and series.note == 0), None)
    keyed = first is not None and first.count == len(view.labels)
    for index, label in enumerate(view.labels):
        key = first.slots[index] if keyed and first is not None else None
        if key is not None:
            used = tuple(at for at, q in enumerate(sentence.found) if _is_key(q, key.quantity))
            if used:
                answer.append(_Row(table, index, used))
        elif label and len(label) > 1 and _mentions(sentence.text, label):
            answer.append(_Row(table, index, ()))
    return answer


def _mentions(text: str, label: str) -> bool:
    return bool(re.search(rf"(?<![A-Za-z0-9_]){re.escape(label)}(?![A-Za-z0-9_])", text, re.IGNORECASE))


def _is_key(quantity: Quantity, key: Quantity) -> bool:
    """Whether a quantity of a sentence is the key of a row: 3800 tokens for 3,800."""
    if quantity.signed or not quantity.single or quantity.unit.kind in ("percent", "ratio", "time"):
        return False
    if quantity.unit.dimension and key.unit.dimension and quantity.unit.dimension != key.unit.dimension:
        return False
    if quantity.unit.kind == "plain" and quantity.number < 16:
        return False
    mine = {quantity.number * quantity.unit.scale, quantity.number * quantity.unit.binary}
    return bool(mine & {key.number * key.unit.scale, key.number * key.unit.binary})


def rows_named(scene: Scene, sentence: Sentence) -> Iterator[tuple[int, Check]]:
    """Checks of percentages and ratios about one or two named rows, and of differences in a named
    row."""
    if sentence.code or _in_table(scene.document, sentence):
        return
    named: dict[int, list[_Row]] = {}
    for at, printed in enumerate(sentence.found):
        if printed.unit.kind not in ("percent", "ratio") and not printed.unit.dimension:
            continue
        if printed.bound:
            continue
        named = named or {table: _rows(scene.views[table], sentence, table) for table in scene.near(sentence)}
        for all_rows in named.values():
            rows = [row for row in all_rows if at not in row.used]
            check = _about(scene, sentence, at, rows) if rows else None
            if check is not None:
                yield at, check
                break


def _about(scene: Scene, sentence: Sentence, at: int, rows: list[_Row]) -> Check | None:
    printed = loose(sentence.found[at])
    columns = _columns(scene.views[rows[0].table], sentence)
    if _PEAK.match(sentence.after(at)):
        rows = [row for row in rows if at - 1 in row.used] or rows
    if _PEAK.match(sentence.after(at)) and len(rows) == 1:
        return _of_peak(scene, sentence, printed, rows[0], columns)
    relative = printed.unit.kind in ("percent", "ratio")
    if not relative and not _CHANGE.search(sentence.text):
        return None
    if len(rows) == 2 and relative and len(columns) >= 1:
        both = [row.index for row in rows]
        pairs = [(series.slots[a], series.slots[b]) for series in columns for a, b in (both, both[::-1])]
        # each of two rows may be told by itself: "a is 2.0x faster than before, b 1.25x"
        pairs += [pair for row in rows for pair in _within(columns, row.index)]
        named = [s for s in columns if overlap(_beside(sentence, at), s.name)]
        return _decide(sentence, printed, pairs, decided=len(named) == 1 and len(columns) == 1)
    if len(rows) == 1:
        pairs = _within(columns, rows[0].index)
        return _decide(sentence, printed, pairs, decided=relative and len(columns) == 2)
    return None


def _within(columns: list[Series], row: int) -> list[tuple[Slot | None, Slot | None]]:
    """Any two cells of a row."""
    return list(itertools.permutations([series.slots[row] for series in columns], 2))


def _beside(sentence: Sentence, at: int) -> str:
    return sentence.before(at)[-50:] + " " + re.split(r"[,;。]", sentence.after(at))[0][:40]


def _columns(view: View, sentence: Sentence) -> list[Series]:
    """The measured columns of a table that the sentence names; all when it names none."""
    measured = [
        s
        for s in view.series
        if s.note == 0
        and s.position
        and s.count
        and all(x is None or x.quantity.unit.kind not in ("percent", "ratio") for x in s.slots)
    ]
    named = [s for s in measured if overlap(sentence.text, s.name)]
    return named or measured


def _decide(
    sentence: Sentence,
    printed: Quantity,
    pairs: list[tuple[Slot | None, Slot | None]],
    *,
    decided: bool,
) -> Check | None:
    """The first pair that explains what is printed; else a finding where there is no choice."""
    checks = []
    for a, b in pairs:
        if a is None or b is None or not (a.quantity.single and b.quantity.single):
            continue
        if not same_kind(a.quantity, b.quantity):
            continue
        family = _family(printed, a.best)
        if family is None or (family is r.RATIO and a.quantity.number < b.quantity.number):
            continue
        value = computed(family, [a.best, b.best], printed)
        if value is not None:
            formula = family.pattern.format(a.best.text, b.best.text)
            checks.append(claim(sentence, printed, value, f"the {family.name} of two cells", formula))
    good = next((check for check in checks if check.holds), None)
    if good is not None:
        return good
    if decided and checks and _CHANGE.search(sentence.text):
        return checks[0]
    slips = [check for check in checks if slip(printed.digits, _number(check.follows))]
    one = len({check.follows for check in slips}) == 1 and len(_significant(printed)) > 2
    return slips[0] if one else None


def _number(text: str) -> str:
    """The digits in what follows, as it is shown."""
    return re.search(r"\d[\d,]*(?:\.\d+)?|$", text)[0]  # type: ignore[index]


def _significant(printed: Quantity) -> str:
    return printed.digits.replace(",", "").replace(".", "").lstrip("0")


def _family(printed: Quantity, cell: Quantity) -> r.Family | None:
    """What a quantity may be of two cells, of which one is given."""
    if printed.unit.kind == "percent":
        return r.CHANGE
    if printed.unit.kind == "ratio":
        return r.RATIO
    same = printed.unit.dimension == cell.unit.dimension or cell.unit.kind == "plain"
    return r.DIFFERENCE if same else None


def _of_peak(
    scene: Scene, sentence: Sentence, printed: Quantity, row: _Row, columns: list[Series]
) -> Check | None:
    first: Check | None = None
    for series in columns:
        slot = series.slots[row.index]
        values = [best(scene, s) for s in series.slots if s is not None]
        if slot is None or len(values) < 2:
            continue
        top = max(values, key=lambda v: v.middle)
        if top.low <= 0:
            continue
        own = best(scene, slot)
        value = Value(own.low / top.high, own.middle / top.middle, own.high / top.low, printed.unit.scale)
        formula = f"{slot.quantity.text} / {top.middle / top.scale:g}"
        check = claim(sentence, printed, value, f"the part of the peak of {series.name}", formula)
        first = first or check
        if check.holds:
            return check
    return first


def per_token(scene: Scene, sentence: Sentence) -> Iterator[tuple[int, Check]]:
    """Checks of "1000 tokens = 109 MB" against what a table of the document gives a token."""
    factor = _bytes_a_token(scene.views)
    if factor is None:
        return
    each, table = factor
    for at, size in enumerate(sentence.found):
        if size.unit.kind != "bytes" or size.unit.scale < 1000 or size.bound or size.upper is not None:
            continue
        near = [
            q
            for i, q in enumerate(sentence.found)
            if abs(i - at) == 1 and q.unit.kind == "tokens" and not q.bound and q.single
        ]
        gap = [q for q in near if _beside_size(sentence.text, q, size)]
        if len(gap) == 1:
            count = gap[0]
            half = count.half * count.unit.scale if count.approx else 0.0
            tokens = count.number * count.unit.scale
            value = Value(
                (tokens - half) * each.low, tokens * each.middle, (tokens + half) * each.high, size.unit.scale
            )
            rule = f"bytes a token as in table {table + 1}, times tokens"
            formula = f"{count.text} × {each.middle:.6g} bytes"
            yield at, claim(sentence, loose(size), value, rule, formula)


def _beside_size(text: str, count: Quantity, size: Quantity) -> bool:
    """Whether a size is that of the tokens: close by, or with words that say so between them."""
    between = text[min(count.span[1], size.span[1]) : max(count.span[0], size.span[0])]
    return len(between) < 12 or (len(between) < 40 and bool(_KV_SIZE.search(between)))


def _bytes_a_token(views: Sequence[View]) -> tuple[Value, int] | None:
    """The bytes a token that a table's columns of tokens and sizes agree on."""
    for table, view in enumerate(views):
        for size, count in itertools.permutations(view.series, 2):
            pairs = [
                (a.quantity, b.quantity) for a, b in zip(size.slots, count.slots, strict=True) if a and b
            ]
            if len(pairs) < 3 or any(a.unit.kind != "bytes" or a.decimals > 3 for a, _ in pairs):
                continue
            words = f"{count.name}".lower()
            if not re.search(r"token|トークン|prompt|context|上下文|提示", words):
                continue
            if any(b.decimals or b.number <= 0 or b.upper is not None for _, b in pairs):
                continue
            low = max(a.low * a.unit.scale / (b.number * b.unit.scale) for a, b in pairs)
            high = min(a.high * a.unit.scale / (b.number * b.unit.scale) for a, b in pairs)
            if low <= high * (1 + 1e-9):
                return Value(low, (low + high) / 2, high, 1.0), table
    return None


def quoted(scene: Scene, sentence: Sentence) -> Iterator[tuple[int, Check]]:
    """Checks of cells that the text repeats. A number that is no cell is judged where the sentence names a
    row or a column in which one cell is a slip of digits away; one that is the cell of another row, where
    the sentence names a single row and has no other number of that kind."""
    for at, printed in enumerate(sentence.found):
        if sentence.code and not (printed.signed and printed.unit.dimension):
            continue
        if len(_significant(printed).rstrip("0")) < 2 or not printed.single:
            continue
        near, told = scene.near(sentence), {quantity.digits for quantity in sentence.found}
        for table in near if printed.approx else near[:3]:
            view = scene.views[table]
            slot = _cell(view, printed)
            named = _named(view, sentence, table, printed) if slot or table in near[:2] else []
            if slot is not None:
                alone = sum(same_kind(printed, q) for q in sentence.found) == 1
                rows = {one.place.row for one in named}
                beside = [one for one in named if one.place.column == slot.place.column]
                if len(rows) == len(beside) == 1 and alone and slot.place.row not in rows:
                    check = _repeats(scene, sentence, printed, beside[0])
                    yield at, replace(check, diagnosis=check.diagnosis or "the value of another row")
                else:
                    yield at, _repeats(scene, sentence, printed, slot)
                break
            if (
                len(_significant(printed)) < 3
                or printed.unit.kind == "plain"
                or _in_table(scene.document, sentence)
            ):
                continue
            checks = [
                _repeats(scene, sentence, printed, one)
                for one in named
                if not one.quantity.approx and one.quantity.digits not in told
            ]
            slips = [check for check in checks if slip(printed.digits, _number(check.follows))]
            if len({check.follows for check in slips}) == 1:
                yield at, slips[0]
                break


def _in_table(document: Document, sentence: Sentence) -> bool:
    """Whether a sentence is the text of a cell: that is about its own row."""
    if sentence.table is None:
        return False
    return any(row and row[0].line == sentence.line for row in document.tables[sentence.table].rows)


def _named(view: View, sentence: Sentence, table: int, printed: Quantity) -> list[Slot]:
    """The cells of the kind of a quantity in the rows that a sentence names; where it names none and the
    quantity has four digits, in the columns that it names."""
    rows = {row.index for row in _rows(view, sentence, table)}
    series = [s for s in view.series if s.position]
    slots = [
        (s, slot)
        for s in series
        for slot in s.slots
        if slot is not None and same_kind(slot.quantity, printed)
    ]
    if rows:
        return [slot for s, slot in slots if slot.place.row in rows]
    if len(_significant(printed)) < 4:
        return []
    return [slot for s, slot in slots if overlap(sentence.text, s.name)]


def _repeats(scene: Scene, sentence: Sentence, printed: Quantity, slot: Slot) -> Check:
    value = best(scene, slot)
    middle = value.middle if slot.quantity.upper is not None else slot.quantity.number * value.scale
    middle = min(max(middle, value.low), value.high)
    unit = slot.quantity.unit.scale if printed.unit.kind == "plain" else printed.unit.scale
    value = Value(value.low, middle, value.high, unit)
    if value.middle < 0 < printed.number and not printed.signed:  # the text leaves the sign to its words
        value = -value
    table = slot.place.table or 0
    name = scene.views[table].labels[slot.place.row or 0]
    rule = f"a cell of table {table + 1} ({name}), repeated"
    return claim(sentence, loose(printed), value, rule, slot.quantity.text)


def _cell(view: View, printed: Quantity) -> Slot | None:
    for series in view.series:
        for slot in series.slots:
            if slot is None or (slot.quantity.unit.kind == "plain" and series.position == 0):
                continue
            quantity = slot.quantity
            same = printed.unit.kind == "plain" or (
                same_kind(printed, quantity) and printed.unit.scale == quantity.unit.scale
            )
            alike = abs(printed.number) == abs(quantity.number) and printed.decimals == quantity.decimals
            if printed.approx and printed.unit.dimension and same and len(printed.digits) > 2:
                alike = loose(printed).low <= quantity.number <= loose(printed).high
            if same and alike and (printed.unit.kind != "plain" or printed.decimals):
                return slot
    return None
