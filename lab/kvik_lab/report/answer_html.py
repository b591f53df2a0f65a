"""The first screen of a page: question, answer, the comparisons with their intervals, how sure, and what
changes it."""

from __future__ import annotations

import math
from html import escape

from kvik_lab.report.cells import Missing, change
from kvik_lab.report.model import Answer, Claim, Interval, Verdict

ON_FIRST = 6
"""Comparisons on the first screen; more are folded below it."""
_TONES = {
    Verdict.SUPPORTED: "",
    Verdict.NOT_SUPPORTED: "",
    Verdict.INSUFFICIENT: "open",
    Verdict.EQUIVALENT: "same",
}


def anchor(name: str) -> str:
    """An id as an attribute has it."""
    return escape(name.replace(" ", "-"))


def answer_html(answer: Answer) -> str:
    """The answer as the page's first section."""
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in answer.facts)
    scale = _scale(answer.claims)
    rows = [_row(claim, scale, answer) for claim in answer.claims]
    first = _strip(rows[:ON_FIRST], scale, answer.beside)
    more = _strip(rows[ON_FIRST:], scale, answer.beside)
    rest = f"<details class='more'><summary>{len(rows) - ON_FIRST} more</summary>{more}</details>"
    return (
        f'<section class="answer" id="answer"><p class="question">{escape(answer.question)}</p>'
        f'<p class="sentence">{escape(answer.sentence)}</p>{first}{rest if len(rows) > ON_FIRST else ""}'
        f'<div class="three"><div><h3>How sure</h3><p>{escape(answer.sure)}</p></div>'
        f"<div><h3>What would change it</h3><p>{escape(answer.change)}</p></div>"
        f"<div><h3>When, where, with what</h3><dl>{facts}</dl></div></div></section>\n"
    )


def _strip(rows: list[str], scale: tuple[float, float], beside: str) -> str:
    if not rows:
        return ""
    low, high = (f"{100 * math.expm1(end):+.0f} %" for end in scale)
    head = (
        f"<tr><th></th><th><div class='ends'><span>{low}</span><span>{high}</span></div></th>"
        f"<th class='number'>{escape(f'against {beside}' if beside else 'change')}</th>"
        "<th class='number'>interval</th><th></th></tr>"
    )
    return f'<div class="strip"><table><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table></div>'


def _ratio(claim: Claim) -> bool:
    return claim.unit == "times" and isinstance(claim.interval, Interval)


def _scale(claims: tuple[Claim, ...]) -> tuple[float, float]:
    """The logarithms of ratio at both ends of the drawing; 1 is in it."""
    ends = [0.0]
    for claim in claims:
        if _ratio(claim) and isinstance(claim.interval, Interval):
            ends += [
                math.log(e) for e in (claim.interval.low, claim.interval.high) if e is not None and e > 0
            ]
    reach = max(0.01, max(ends) - min(ends))
    return min(ends) - 0.05 * reach, max(ends) + 0.05 * reach


def _row(claim: Claim, scale: tuple[float, float], answer: Answer) -> str:
    name = escape(claim.where or claim.id)
    note = f'<p class="because">{escape(claim.because)}</p>' if claim.because else ""
    links = ", ".join(f'<a href="#{anchor(r)}">{escape(r)}</a>' for r in claim.rests_on)
    tone = _TONES[claim.verdict]
    if not _ratio(claim):
        body = f"<td colspan='3' class='said'>{escape(claim.sentence)}{note}</td>"
    else:
        body = _numbers(claim, scale, note)
    verdict = f"<td class='{tone}'>{escape(_word(claim, answer))}<br><small>see {links}</small></td>"
    return f'<tr id="{anchor(claim.id)}"><th scope="row">{name}</th>{body}{verdict}</tr>'


def _numbers(claim: Claim, scale: tuple[float, float], note: str) -> str:
    interval, value = claim.interval, claim.estimate
    if not isinstance(interval, Interval) or isinstance(value, Missing):
        return f"<td colspan='3' class='said'>{escape(claim.sentence)}{note}</td>"
    low, high = interval.low or 0.0, interval.high or math.inf
    bar = _bar(low, value, high, scale, _TONES[claim.verdict])
    shown = f"{change(low)} to {change(high)}"
    return (
        f"<td class='bar'>{bar}{note}</td><td class='number big'>{change(value)}</td>"
        f"<td class='number'>{shown}</td>"
    )


def _word(claim: Claim, answer: Answer) -> str:
    if claim.verdict is Verdict.INSUFFICIENT:
        return "not decided"
    if claim.verdict is Verdict.EQUIVALENT:
        return "equal within the margin"
    if not _ratio(claim) or isinstance(claim.estimate, Missing):
        return "decided"
    return answer.more if claim.estimate > 1 else answer.less


def _bar(low: float, value: float, high: float, scale: tuple[float, float], tone: str) -> str:
    """The interval on a scale of logarithms, and a line at no difference."""

    def at(ratio: float) -> float:
        place = (math.log(max(ratio, 1e-9)) - scale[0]) / (scale[1] - scale[0])
        return round(100 * min(1.0, max(0.0, place)), 2)

    zero = at(1.0)
    return (
        '<svg viewBox="0 0 100 12" preserveAspectRatio="none" aria-hidden="true">'
        f'<line class="zero" x1="{zero}" x2="{zero}" y1="0" y2="12"/>'
        f'<line class="interval {tone}" x1="{at(low)}" x2="{max(at(high), at(low) + 0.4)}" y1="6" y2="6"/>'
        f'<line class="point {tone}" x1="{at(value)}" x2="{at(value)}" y1="2" y2="10"/></svg>'
    )
