"""Part 2: what a user may rely on, asked over the public API."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import kvik
from kvik.bench.errors import BenchError
from kvik.selftest import death, ends, landing, refusals
from kvik.selftest.part import Check, Part, Say, checked, words
from kvik.selftest.sides import Session, Sides

BUFFER = 16 << 20
_NOT_OURS = "left out: the other side was not started by this command"

Question = Callable[[Sides], str]


def questions(session: Session) -> dict[str, Question]:
    """All that one pair of sides is asked, in order."""
    asked: dict[str, Question] = {
        "pages that are read land in place": partial(landing.lands, "read"),
        "pages that are written land in place": partial(landing.lands, "write"),
    }
    for name, refusal in refusals.REFUSALS.items():
        asked[name] = partial(refusals.refused, refusal)
    if session.plan.secret is not None:
        asked["another secret is refused"] = partial(refusals.another_secret, session)
    return asked | {
        "cancel ends a transfer that waits": ends.cancelled_waiting,
        "cancel ends a transfer that moves": ends.cancelled_moving,
        "a deadline ends a transfer that waits": ends.deadline_waiting,
        "a deadline ends a transfer that moves": ends.deadline_moving,
        "revoke gives pages back": ends.revoke_gives_back,
    }


def _ask(part: Part, sides: Sides, waiting: list[tuple[str, Question]], say: Say) -> None:
    """Ask until an answer is wrong, or nothing waits any more."""
    while waiting:
        name, question = waiting.pop(0)
        if not checked(part, name, partial(question, sides), say):
            return


def conformance(part: Part, session: Session, say: Say) -> None:
    """Ask everything; after an answer that is wrong, the next question goes to fresh sides."""
    waiting = list(questions(session).items())
    while waiting:
        before = len(waiting)
        try:
            with session.sides(part.name, BUFFER, counted=False) as sides:
                _ask(part, sides, waiting, say)
        except (kvik.KvikError, BenchError, OSError) as error:
            if len(waiting) == before:
                raise  # They could not even be opened, so the next ones will not be, either.
            part.checks.append(Check("both sides close in order", "failed", words(error), 0.0))
            say(part.checks[-1].line)
    name = "a killed peer is noticed, and a new one serves"
    if session.plan.own_target:
        checked(part, name, partial(death.killed, session, part.name), say)
    else:
        part.checks.append(Check(name, "left out", _NOT_OURS, 0.0))
        say(part.checks[-1].line)
    part.data["seed"] = session.plan.asked.seed
    passed = sum(check.state == "passed" for check in part.checks)
    part.settle(f"{passed} of {len(part.checks)} checks passed, seed {session.plan.asked.seed}")
