# ruff: noqa: RUF001, RUF002 - the marks and words that tables print
"""Claims whose inputs stand beside them: from A to B by so much, so many times A against B, percent
of a rate."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace

from kvik_lab.audit import rules as r
from kvik_lab.audit.claims import Sentence, claim, computed, loose
from kvik_lab.audit.model import Check
from kvik_lab.audit.quantity import Quantity, quantities

_FROM_TO = re.compile(r"(->|→|=>|⇒|\bto\b|から|到|降至|提升至|增至|vs\.?|versus|against|対|に対し|对比|相比)")
_VERSUS = re.compile(r"(vs\.?|versus|against|対|に対し|对比|相比)")


def _alike(a: Quantity, b: Quantity) -> bool:
    return bool(a.unit.dimension) and a.unit.dimension == b.unit.dimension


def steps(sentence: Sentence) -> Iterator[tuple[int, Check]]:
    """Checks of "A -> B (-23.1%, -441 ms)" and of "~4× faster (26 ms vs 99 ms)"."""
    measured = [at for at, q in enumerate(sentence.found) if q.unit.dimension and q.single]
    for one, two in itertools.pairwise(measured):
        a, b = sentence.found[one], sentence.found[two]
        between = sentence.text[a.span[1] : b.span[0]]
        if not _alike(a, b) or not _FROM_TO.search(between) or len(between) > 60:
            continue
        for at in range(two + 1, len(sentence.found)):
            if (
                sentence.found[at].span[0] - b.span[1] > 70
                or "->" in sentence.text[b.span[1] : sentence.found[at].span[0]]
            ):
                break
            yield from _against(sentence, (one, two), at)
        near = one - 1
        close = near >= 0 and a.span[0] - sentence.found[near].span[1] < 60
        if close and (_VERSUS.search(between) or _explained(sentence, (one, two), near)):
            yield from _against(sentence, (one, two), near)


def _against(sentence: Sentence, pair: tuple[int, int], at: int) -> Iterator[tuple[int, Check]]:
    a, b, printed = sentence.found[pair[0]], sentence.found[pair[1]], loose(sentence.found[at])
    kind = printed.unit.kind
    options: list[tuple[r.Family, list[Quantity], str]] = []
    if kind == "percent":
        options = [
            (r.CHANGE, [b, a], f"({b.text} - {a.text}) / {a.text}"),
            (r.CHANGE, [a, b], f"({a.text} - {b.text}) / {b.text}"),
            (r.RATIO, [a, b], f"{a.text} / {b.text}"),
            (r.RATIO, [b, a], f"{b.text} / {a.text}"),
        ]
    elif kind == "ratio":
        options = [(r.RATIO, [a, b], f"{a.text} / {b.text}"), (r.RATIO, [b, a], f"{b.text} / {a.text}")]
        options.sort(key=lambda o: -o[1][0].number * o[1][0].unit.scale)
    elif _alike(printed, a) and (printed.signed or printed.arrow):
        options = [(r.DIFFERENCE, [b, a], f"{b.text} - {a.text}")]
    checks = []
    for family, inputs, formula in options:
        value = computed(family, inputs, printed)
        if value is not None:
            checks.append(claim(sentence, printed, value, f"{family.name} of two values", formula))
    if checks:
        best = next((check for check in checks if check.holds), checks[0])
        listed = not any(q.unit.kind == "plain" for q in sentence.found[pair[1] + 1 : at])
        follows = listed and re.fullmatch(r"\s*[(,=]+\s*", sentence.before(at))
        if follows or _explained(sentence, pair, at):
            # nothing else can be meant
            best = replace(best, diagnosis=best.diagnosis or "another computation")
        yield at, best


def _explained(sentence: Sentence, pair: tuple[int, int], at: int) -> bool:
    """Whether a pair of values stands in parentheses behind a ratio, in its clause, by itself: "5.5x
    faster with the first (21.6 ms against 83.9 ms)"."""
    if at != pair[0] - 1 or sentence.found[at].unit.kind != "ratio":
        return False
    enclosed = re.fullmatch(r"[^,;:()。、，]*[(（]", sentence.before(pair[0]).rstrip())
    return enclosed is not None and sentence.after(pair[1]).lstrip()[:1] in (")", "）")


def parts(sentence: Sentence) -> Iterator[tuple[int, Check]]:
    """Checks of "780 GB/s, 97.5% of the 800 GB/s line rate"."""
    for at, printed in enumerate(sentence.found):
        if printed.unit.kind != "percent" or at + 1 >= len(sentence.found):
            continue
        whole = sentence.found[at + 1]
        joint = sentence.after(at)
        if not whole.unit.dimension or not re.fullmatch(r"\s*(of|の)\s[^.,;()]{0,30}", joint):
            continue
        earlier = [q for q in sentence.found[:at] if _alike(q, whole) and q.single]
        if earlier:
            value = computed(r.RATIO, [earlier[-1], whole], printed)
            if value is not None:
                formula = f"{earlier[-1].text} / {whole.text}"
                yield at, claim(sentence, loose(printed), value, "the part of a whole", formula)


# behind what says how many there are, a mean may be of anything
_EACH = re.compile(r"tpot|per token|each token|每个|1 トークン|spread over", re.IGNORECASE)
_EACH_BESIDE = re.compile(rf"{_EACH.pattern}|稀释|平均", re.IGNORECASE)


def spread(sentence: Sentence) -> Iterator[tuple[int, Check]]:
    """Checks of "150 ms over 1.5K tokens adds 0.1 ms to each": a time spread over a count, which may stand in
    a sentence before."""
    counts = [q for q in sentence.found if q.unit.kind in ("tokens", "count")]
    if not (_EACH_BESIDE if counts else _EACH).search(sentence.text):
        return
    counts = counts or [q for q in quantities(sentence.lead) if q.unit.kind in ("tokens", "count")]
    counts = [q for q in counts if q.number * q.unit.scale >= 100]
    times = [(at, q) for at, q in enumerate(sentence.found) if q.unit.kind == "time"]
    if len(counts) == 1 and len(times) == 2 and times[0][1].number > times[1][1].number:
        (_, total), (at, each) = times
        each_of = total.unit.scale / (counts[0].number * counts[0].unit.scale)
        low, middle, high = (n * each_of for n in (total.low, total.number, total.high))
        value = r.Value(low, middle, high, each.unit.scale)
        formula = f"{total.text} / {counts[0].text}"
        yield at, claim(sentence, loose(each), value, "a time spread over a count", formula)


_REMAIN = re.compile(r"reduc|remain|削減|絞|减少|减|省|cut", re.IGNORECASE)
# what is left over of a count, and by how much that is less
_LEFT = re.compile(r"\bremain|\bleft\b|残|剩|减少到|に(絞|削減)")
_LESS = re.compile(r"(reduction of|減少|削減率は|削減|减少了?)\s*$", re.IGNORECASE)


def remaining(sentence: Sentence) -> Iterator[tuple[int, Check]]:
    """Checks of "of 4,860 patterns 59 remain, a reduction of 98.8%"."""
    if not _REMAIN.search(sentence.text):
        return
    counts = [q for q in sentence.found if q.unit.kind in ("plain", "count") and not q.decimals and q.single]
    for at, printed in enumerate(sentence.found):
        earlier = [q for q in counts if q.span[1] <= printed.span[0]]
        if printed.unit.kind != "percent" or len(earlier) < 2 or sentence.code:
            continue
        if len(earlier) > 2 and any(q.unit.kind != "count" for q in earlier[-2:]):
            continue
        most, least = sorted(earlier[-2:], key=lambda q: -q.number)
        if most.number <= 0 or "=" in sentence.before(at):
            continue
        part = 1 - least.number / most.number
        value = r.exactly(part, printed.unit.scale)
        formula = f"({most.text} - {least.text}) / {most.text}"
        check = claim(sentence, loose(printed), value, "the reduction of a count", formula)
        told = sentence.text[earlier[-2].span[1] : printed.span[0]]
        if not check.holds and len(earlier) == 2 and _LEFT.search(told) and _LESS.search(told):
            check = replace(check, diagnosis=check.diagnosis or "another computation")
        yield at, check
