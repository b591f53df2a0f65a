"""The parts in their order. What one finds does not keep the next from running."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from kvik.bench.options import OPS
from kvik.selftest.conformance import conformance
from kvik.selftest.first import first
from kvik.selftest.grid import IN_FLIGHT, THREADS, grid
from kvik.selftest.here import Heard, here
from kvik.selftest.nics import nics
from kvik.selftest.part import Part, Say, bounded
from kvik.selftest.plan import BLOCKS, Plan
from kvik.selftest.sides import Session
from kvik.selftest.sweep import sweep

Work = Callable[[Part, Session, Say], None]

_SHORT_S, _CONFORMANCE_S = 60.0, 240.0
_POINT_SPARE_S = 10.0
"""Seconds that a point may take beside its measuring: a grant, a warm-up, the comparison of bytes."""


@dataclass
class Results:
    """What was found so far."""

    plan: Plan
    parts: list[Part] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    """What kvik's transports logged, each line once."""
    interrupted: bool = False

    @property
    def passed(self) -> bool:
        """Whether every part ran to its end, and no part failed."""
        return not self.interrupted and all(part.state != "failed" for part in self.parts)


@dataclass(frozen=True)
class Step:
    """A part before it has begun."""

    name: str
    title: str
    work: Work
    limit_s: float


def steps(plan: Plan, heard: Heard) -> list[Step]:
    """All parts, each with the bound on its time."""
    point_s = 3 * plan.asked.seconds_per_point + _POINT_SPARE_S
    sweep_s = _SHORT_S + len(OPS) * len(BLOCKS) * point_s
    grid_s = _SHORT_S + len(OPS) * len(THREADS) * len(IN_FLIGHT) * point_s

    def first_of_all(part: Part, session: Session, say: Say) -> None:
        here(part, session, heard, say)

    return [
        Step("here", "what is here and what is used", first_of_all, _SHORT_S),
        Step("conformance", "what a user may rely on", conformance, _CONFORMANCE_S),
        Step("first", "first and warm transfers", first, 2 * _SHORT_S),
        Step("sweep", "block sizes", sweep, sweep_s),
        Step("grid", "submitting threads and transfers in flight", grid, grid_s),
        Step("nics", "each NIC's part", nics, _SHORT_S),
    ]


def _bound(step: Step, session: Session, say: Say) -> Callable[[Part], None]:
    return lambda part: step.work(part, session, say)


def execute(results: Results, heard: Heard, say: Say, interrupt: socket.socket) -> None:
    """Run all parts; results hold what was found until `interrupt` can be read."""
    session = Session(results.plan)

    def tell(text: str) -> None:
        if not results.interrupted:  # What a part says while it is cut short is about the cut.
            say(text)

    results.log = heard.lines
    for number, step in enumerate(steps(results.plan, heard), start=1):
        part = Part(number, step.name, step.title)
        try:
            say(f"part {number}, {step.title}")
            part = bounded(part, _bound(step, session, tell), step.limit_s, session.cut, interrupt)
            results.parts.append(part)
            say(part.line)
            say("")
        except KeyboardInterrupt:
            results.interrupted = True
            session.cut()
            if len(results.parts) < number:
                results.parts.append(Part(number, step.name, step.title, said="interrupted"))
            return
