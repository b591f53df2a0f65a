# ruff: noqa: RUF001 - the marks and words that tables print
"""Claims that sum up a table: on average, at best, up to, in total, so many patterns."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace

from kvik_lab.audit import rules as r
from kvik_lab.audit.claims import Scene, Sentence, claim, loose
from kvik_lab.audit.groups import Group, groups, overlap, ranked, tokens, total
from kvik_lab.audit.model import Check
from kvik_lab.audit.quantity import Quantity
from kvik_lab.audit.rules import Value, exactly, holds
from kvik_lab.audit.series import View
from kvik_lab.audit.slips import DIGITS

_BEHIND: tuple[tuple[str, str], ...] = (
    (r"on average|in the mean|平均で|\bmean\b|average", "mean"),
    (r"at best", "best"),
    (r"at worst", "worst"),
    # What is a part of the peak is no peak.
    (
        r"at most|at (the )?peak|at its peak|(?<!% of )(?<!% of the )\bpeak\b|maximum|最大で|が最大|で最大",
        "maximum",
    ),
    (r"at least|minimum|最小で", "minimum"),
    (r"in total|in all|altogether|になる合計", "sum"),
)
_BEFORE: tuple[tuple[str, str], ...] = (
    (r"geometric mean|geomean|几何平均|幾何平均", "geometric mean"),
    (r"\bmean\b|average|平均|均值", "mean"),
    (r"median|中央値|中位", "median"),
    (r"best|fastest", "best"),
    (r"slowest", "slowest"),
    (
        r"\bmax(imum|imal)?\b|peak|highest|up to|at most|as much as|largest|greatest"
        r"|最大|最高|最多|top\b|峰值|ピーク",
        "maximum",
    ),
    (r"\bmin\b|minimum|minimal|lowest|smallest|at least|最小|最低|最短", "minimum"),
    (r"\btotal|\bsum\b|合計|合计|总共|総|总计|altogether|全部で", "sum"),
)
_FUNCTIONS = {
    family.name: family.function for family in (r.MEAN, r.GEOMETRIC, r.MEDIAN, r.LARGEST, r.SMALLEST, r.SUM)
}


# what a word says of times, of rates, and of what is neither
_JUDGED = {
    "best": ("minimum", "maximum", "maximum"),
    "slowest": ("maximum", "minimum", "minimum"),
    "worst": ("maximum", "minimum", "maximum"),
}


def _extreme(name: str, printed: Quantity) -> str:
    """The aggregate that a word is of a quantity: the best time is the least, the best rate the greatest."""
    power = dict(printed.unit.dimension).get("time", 0)
    return _JUDGED[name][0 if power > 0 else 1 if power < 0 else 2] if name in _JUDGED else name


def named(sentence: Sentence) -> dict[int, str]:
    """Which number each word for an aggregate is about: the one right before "on average", else the
    nearest behind it. A word is about one number, and a number has one."""
    answer: dict[int, str] = {}
    taken: list[tuple[int, int]] = []
    for patterns, behind in ((_BEHIND, True), (_BEFORE, False)):
        for pattern, name in patterns:
            for match in re.finditer(pattern, sentence.text, re.IGNORECASE):
                if any(match.start() < end and start < match.end() for start, end in taken):
                    continue
                at = _about_which(sentence, match, behind=behind)
                if at is not None and at not in answer:
                    answer[at] = name
                    taken.append(match.span())
    for at in range(1, len(sentence.found)):
        inherited = _inherited(sentence, at, answer) if at not in answer else None
        if inherited:
            answer[at] = inherited
    return answer


def _about_which(sentence: Sentence, match: re.Match[str], *, behind: bool) -> int | None:
    if behind:
        before = [at for at, q in enumerate(sentence.found) if q.span[1] <= match.start()]
        gap = sentence.text[sentence.found[before[-1]].span[1] : match.start()] if before else ","
        return before[-1] if len(gap) < 30 and not re.search(r"[,;。、(]| and | und ", gap) else None
    after = [at for at, q in enumerate(sentence.found) if q.span[0] >= match.end()]
    gap = sentence.text[match.end() : sentence.found[after[0]].span[0]] if after else ";"
    return after[0] if len(gap) < 50 and not re.search(r"[;。]", gap) else None


def _inherited(sentence: Sentence, at: int, names: dict[int, str]) -> str | None:
    """The aggregate of a parallel clause: of "36.7% (up to 53%) here, 30.2% (up to 53%) there"."""
    for earlier in range(at - 1, -1, -1):
        same = sentence.found[earlier].unit.kind == sentence.found[at].unit.kind == "percent"
        parallel = all(re.match(r"\s?\(", sentence.after(one)) for one in (earlier, at))
        if same and parallel and earlier in names and not _depth(sentence, at):
            return names[earlier]
    return None


def aggregates(scene: Scene, sentence: Sentence) -> Iterator[tuple[int, Check]]:
    """Checks of sentences that sum up columns, or the derived values of a row of cells."""
    names = named(sentence)
    for at, printed in enumerate(sentence.found):
        name = names.get(at)
        if name is None or (
            not printed.unit.dimension and printed.unit.kind not in ("percent", "ratio", "count")
        ):
            continue
        check = _one(scene, sentence, at, _extreme(name, printed))
        if check is not None:
            yield at, check


def _depth(sentence: Sentence, at: int) -> int:
    text = sentence.text[: sentence.found[at].span[0]]
    return text.count("(") - text.count(")")


def _one(scene: Scene, sentence: Sentence, at: int, name: str) -> Check | None:
    near = scene.near(sentence)
    order = ranked(scene, sentence, at, near)
    if not order:
        return None
    top = order[0][0]
    first = [group for score, group in order if score >= top - 1]
    decided = [group for score, group in order if score >= top]
    printed = loose(sentence.found[at])
    for group in first:
        value = _value(group, name, printed)
        if value is not None and holds(printed, value):
            return _claim(sentence, printed, group, name, value)
    if not _about(scene, sentence, decided[0], order):
        return None
    checks = [
        _claim(sentence, printed, group, name, value)
        for group in decided
        if (value := _value(group, name, printed)) is not None
    ]
    if len(checks) > 1:
        checks = [check for check in checks if (check.diagnosis or "").startswith(DIGITS)]
    if not checks:
        return None
    # a number that is no slip of what follows, and is not printed there either, is about something else
    why = checks[0].diagnosis or _elsewhere(order, decided[0], name, printed)
    if why is None and name.endswith("mean") and tokens(decided[0].names) <= tokens(sentence.text):
        why = "a mean of other values"
    return replace(checks[0], diagnosis=why)


def _about(scene: Scene, sentence: Sentence, group: Group, order: list[tuple[int, Group]]) -> bool:
    """Whether the sentence names the group, or anything of the only table that it can be about."""
    if order[0][0] >= 8:
        return True
    table = scene.document.tables[group.table]
    known = " ".join((*table.header, table.heading))
    return len({one.table for _, one in order}) == 1 and overlap(sentence.text, known) > 0


def _elsewhere(order: list[tuple[int, Group]], meant: Group, name: str, printed: Quantity) -> str | None:
    """Which single value is printed in place of the summary that was meant, or the same of another table."""
    fine = replace(printed, approx=False)
    for value, label in zip(meant.values, meant.labels, strict=True):
        if holds(fine, value) or holds(fine, -value):
            return f"a single value is printed: that of {label or 'one cell'}"
    for _, group in order:
        other = _value(group, name, printed) if group.names == meant.names else None
        if other is not None and holds(fine, other):
            return f"the {name} of {group.what} ({group.heading}) is printed"
    return None


def _value(group: Group, name: str, printed: Quantity) -> Value | None:
    """The aggregate of a group; of sizes, where the text leaves the sign to its words."""
    values = group.values
    falling = sum(v.middle < 0 for v in values) * 2 > len(values)
    if falling:  # the largest of reductions is the one of the largest size
        values = tuple(-v for v in values)
    function = _FUNCTIONS[name]
    ends = [function([v.low for v in values]), function([v.high for v in values])]
    middle = function([v.middle for v in values])
    if not all(map(math.isfinite, (*ends, middle))):  # a geometric mean of what is not above zero
        return None
    value = Value(min(ends), middle, max(ends), printed.unit.scale)
    return -value if falling and printed.number < 0 else value


def _claim(sentence: Sentence, printed: Quantity, group: Group, name: str, value: Value) -> Check:
    shown = [f"{v.middle / value.scale:.6g}" for v in group.values]
    listed = ", ".join(shown if len(shown) <= 12 else [*shown[:11], "…"])
    return claim(sentence, printed, value, f"the {name} of {group.what}", f"{name} of {listed}")


def ranges(scene: Scene, sentence: Sentence) -> Iterator[tuple[int, Check]]:
    """Checks of "flat at ~205-214 GB/s" against the least and the greatest value of the nearest table. An
    end is judged when the other one is that of the table, which says what the range is about."""
    for at, printed in enumerate(sentence.found):
        if printed.upper is None or not printed.unit.dimension or not scene.views:
            continue
        table = scene.near(sentence)[0]
        values = [v for group in groups(scene, printed, [table]) for v in group.values]
        if len(values) < 3:
            continue
        scale = printed.unit.scale
        found = (min(v.middle for v in values), max(v.middle for v in values))
        ends = (printed.number, printed.upper)
        # a range may be a little wider than what it holds
        near = [
            abs(end * scale - value) <= 0.015 * abs(value) for end, value in zip(ends, found, strict=True)
        ]
        formula = f"{found[0] / scale:g} to {found[1] / scale:g}"
        for end, value, good, what in zip(ends, found, near, ("smallest", "largest"), strict=True):
            if any(near):
                low, right, high = (end * scale,) * 3 if good else (0.985 * value, value, 1.015 * value)
                one = replace(printed, number=end, upper=None, text=f"{end:g} {printed.unit.symbol}".strip())
                one = replace(one, digits=f"{end:.{printed.decimals}f}")
                rule = f"the {what} of table {table + 1}"
                yield at, claim(sentence, one, Value(low, right, high, scale), rule, formula)


_COUNTED = re.compile(
    r"(combinations|patterns|runs|points|cells|パターン|通り|组合|種|种|个组合|configurations"
    r"|full factorial|全因子|全組)"
)
_FACTORIAL = re.compile(
    r"full factorial|combinations|全因子|全組|全组合|組み合わせ|通り|all levels|全パターン", re.IGNORECASE
)
_LEVELS = re.compile(r"level|水準|水平|count|数$|個数", re.IGNORECASE)


def counts(scene: Scene, sentence: Sentence) -> Iterator[tuple[int, Check]]:
    """Checks of stated numbers of combinations and of runs against the tables of factors and layers.

    Where one follows, the others of the sentence are of something else: "24 patterns, 3 times each: 72 runs".
    """
    found = list(_counts(scene, sentence))
    held = [one for one in found if one[1].holds]
    yield from held or found


def _counts(scene: Scene, sentence: Sentence) -> Iterator[tuple[int, Check]]:
    for at, printed in enumerate(sentence.found):
        context = sentence.after(at)[:14]
        if printed.unit.dimension or printed.decimals or printed.unit.kind not in ("plain", "count"):
            continue
        if not _COUNTED.search(context + printed.text) or printed.number < 10:
            continue
        for table in scene.near(sentence)[:3]:
            check = _product(scene.views[table], sentence, printed, table)
            if check is not None:
                # "full factorial" leaves no choice of what is counted
                yield at, check if check.holds else replace(check, diagnosis="another number of levels")
                break


def _product(view: View, sentence: Sentence, printed: Quantity, table: int) -> Check | None:
    for series in view.series:
        slots = [slot for slot in series.slots if slot is not None]
        numbers = [slot.quantity.number for slot in slots]
        if not _LEVELS.search(series.name) or series.note or len(numbers) < 2 or max(numbers) > 100:
            continue
        if any(slot.quantity.decimals or slot.quantity.unit.dimension for slot in slots):
            continue
        total = math.prod(numbers)
        value = exactly(total, printed.unit.scale)
        formula = " × ".join(f"{n:g}" for n in numbers)
        rule = f"the product of {series.name} of table {table + 1}"
        check = claim(sentence, printed, value, rule, formula)
        if check.holds or _FACTORIAL.search(sentence.text):
            return check
    return None


_KINDS = (
    ("layer", "層", "层", "レイヤー", "レイヤ"),
    ("factor", "因子", "parameter", "パラメータ", "参数"),
    ("model", "モデル", "模型"),
    ("configuration", "構成", "配置", "config"),
    ("host", "ホスト", "主机", "node", "ノード", "节点"),
    ("pattern", "パターン"),
    ("stage", "段階", "阶段"),
)


def members(scene: Scene, sentence: Sentence) -> Iterator[tuple[int, Check]]:
    """Checks of "the plan has 4 layers" against the rows of the table whose first column is of
    layers."""
    for at, printed in enumerate(sentence.found):
        if (
            printed.unit.kind not in ("plain", "count")
            or printed.decimals
            or not printed.single
            or printed.signed
        ):
            continue
        noun = (printed.unit.symbol + sentence.after(at)[:14]).strip().lower()
        kind = next((kind for kind in _KINDS if any(noun.startswith(word) for word in kind)), None)
        if kind is None or printed.number < 2:
            continue
        for table in scene.near(sentence)[:2]:
            head = scene.document.tables[table].header[0].lower()
            labels = {label for label in scene.views[table].labels if not total(label)}
            if any(word in head for word in kind) and len(labels) > 1:
                value = exactly(len(labels), printed.unit.scale)
                rule = f"the rows of table {table + 1}, without totals"
                yield at, claim(sentence, printed, value, rule, f"{len(labels)} rows")
                break
