"""A run as gates look at it: sums over requests and roles, and the four things a gate can say."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from kvik_lab.records import Counters, Finding, Gate, Request, Role, RunRecord, Stated

_SERIES = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\Z", re.DOTALL)
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ORDER = ("unchecked", "passed", "suspect", "invalid")


@lru_cache(maxsize=65536)
def split(series: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """A series' name and its labels; the text itself where it is none."""
    match = _SERIES.match(series)
    return (match.group(1), tuple(_LABEL.findall(match.group(2) or ""))) if match else (series, ())


def growth(before: Counters, after: Counters, name: str, **labels: str) -> float | None:
    """How much all series of this name and with these labels grew, together; None where there is none.

    A series that was not there before began at 0.
    """
    found: float | None = None
    for series, value in after.items():
        own, has = split(series)
        if own == name and labels.items() <= dict(has).items():
            found = (found or 0.0) + value - before.get(series, 0.0)
    return found


def total(roles: Sequence[Role], name: str, **labels: str) -> float | None:
    """How much a counter of these roles grew, together; None where none of them has it, or one of them told
    nothing at all: without its part the sum is too small."""
    if not all(role.after for role in roles):
        return None
    found = [one for role in roles if (one := growth(role.before, role.after, name, **labels)) is not None]
    return sum(found) if found else None


def first_total(roles: Sequence[Role], names: Sequence[str]) -> float | None:
    """That of the first of these counters that is there."""
    return next((found for name in names if (found := total(roles, name)) is not None), None)


def length(request: Request) -> int | None:
    """Its prompt's tokens as the server counted them, else as they were sent."""
    counted = request.prompt_tokens_counted
    return request.prompt_tokens if counted is None else counted


@dataclass(frozen=True)
class Case:
    """A run, and the other runs of its study."""

    record: RunRecord
    beside: Sequence[RunRecord] = ()

    @property
    def stated(self) -> Stated:
        """What the study says of it."""
        return self.record.stated

    @property
    def disaggregated(self) -> bool:
        """Whether KV was to be handed over."""
        return self.stated.mode == "disaggregated"

    @cached_property
    def answered(self) -> tuple[Request, ...]:
        """All requests that were answered whole, those of the warm-up, too: counters count them as well."""
        return tuple(request for request in self.record.requests if request.ok)

    @cached_property
    def prompt_tokens(self) -> int:
        """Prompt tokens of the answered requests."""
        return sum(length(request) or 0 for request in self.answered)


def passed(gate: Gate, what: str, measured: float | None = None, expected: float | None = None) -> Finding:
    """Nothing is wrong."""
    return Finding(gate=gate, status="passed", what=what, measured=measured, expected=expected)


def unchecked(gate: Gate, what: str, remedy: str = "") -> Finding:
    """Nothing was stated that could be wrong."""
    return Finding(gate=gate, status="unchecked", what=what, remedy=remedy)


def suspect(
    gate: Gate, what: str, remedy: str, measured: float | None = None, expected: float | None = None
) -> Finding:
    """Not shown to be right."""
    return Finding(
        gate=gate, status="suspect", what=what, remedy=remedy, measured=measured, expected=expected
    )


def invalid(
    gate: Gate, what: str, remedy: str, measured: float | None = None, expected: float | None = None
) -> Finding:
    """Shown to be wrong."""
    return Finding(
        gate=gate, status="invalid", what=what, remedy=remedy, measured=measured, expected=expected
    )


def not_seen(record: RunRecord, finding: Finding, what: str) -> Finding:
    """What passed, of a load by another driver than the lab's, which shows less: it is not judged."""
    client = record.client
    if finding.status != "passed" or client is None or client.driver == "builtin" or not record.requests:
        return finding
    return unchecked(finding.gate, f"not seen, as {client.driver} does not record it: {what}; {finding.what}")


def worst(findings: Sequence[Finding]) -> Finding:
    """The gravest of what one gate has to say; others of the same gravity are said with it."""
    gravest = max((one.status for one in findings), key=_ORDER.index)
    same = [one for one in findings if one.status == gravest]
    if len(same) == 1:
        return same[0]
    remedies = dict.fromkeys(one.remedy for one in same if one.remedy)
    return same[0].model_copy(
        update={"what": "; ".join(one.what for one in same), "remedy": "; ".join(remedies)}
    )
