"""Faults on order: `--fault SPEC`, and `POST /fault` where that was allowed.

==============================  ========================================================================
SPEC                            what happens
==============================  ========================================================================
slow[:factor=F][,ms=M]          every step takes F times as long (default 2, or 1 with ms), and M ms more
stalled[:after=N][,ms=M]        from step N on the engine loop stands still: for M ms once, or for good.
                                With what=rank a rank's process is stopped (SIGSTOP), and with it all that
                                its engine serves; dp= and rank= say which (default 0 and 0)
wrong-page[:after=N][,times=T]  one bit of one page is flipped, after its prefill and before anybody reads
                                it: of the Nth request and the T - 1 after it (default 1 and 1; times=0: all)
dead[:after=N][,what=W]         W (server, or rank with dp= and rank=) is killed (SIGKILL) as step N begins
==============================  ========================================================================

`after` counts from the moment the fault was ordered; its default is 1, the next.
"""

from __future__ import annotations

import difflib
import logging
import os
import random
import signal
from dataclasses import dataclass, fields, replace
from typing import Any

from kvik.errors import InvalidArgument

logger = logging.getLogger("kvik.emulator")

KINDS = {
    "slow": ("factor", "ms"),
    "stalled": ("after", "ms", "what", "dp", "rank"),
    "wrong-page": ("after", "times"),
    "dead": ("after", "what", "dp", "rank"),
}
_MOST = 10**9 - 1
TARGETS = {"stalled": ("engine", "rank"), "dead": ("server", "rank")}
# What a target has no use for.
WITHOUT = {("stalled", "engine"): {"rank"}, ("stalled", "rank"): {"ms"}, ("dead", "server"): {"dp", "rank"}}


@dataclass(frozen=True)
class Fault:
    """One order; see the module's table. `what` is empty where there is no choice."""

    kind: str
    after: int = 1
    times: int = 1
    factor: float = 2.0
    ms: float = 0.0
    what: str = ""
    dp: int = 0
    rank: int = 0


def parse_fault(text: str, dp: int, tp: int) -> Fault:
    """Read a SPEC for a server of `dp` replicas of `tp` ranks; `InvalidArgument` says what is known."""
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InvalidArgument(f"fault {text!r}: {kind!r} is none of {', '.join(KINDS)}{hint}")
    values: dict[str, Any] = {"what": TARGETS.get(kind, ("",))[0]}
    types = {field.name: str(field.type) for field in fields(Fault)}
    most = {"dp": dp - 1, "rank": tp - 1}
    for part in filter(None, rest.split(",")):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key not in KINDS[kind]:
            raise InvalidArgument(f"fault {text!r}: {kind} takes {', '.join(KINDS[kind])}, not {key!r}")
        values[key] = _value(text, key, value, types[key], most.get(key, _MOST))
    if kind == "slow" and "ms" in values and "factor" not in values:
        values["factor"] = 1.0
    if values["what"] not in TARGETS.get(kind, ("",)):
        raise InvalidArgument(f"fault {text!r}: what is one of {', '.join(TARGETS[kind])}")
    for key in sorted(WITHOUT.get((kind, values["what"]), set()) & values.keys()):
        raise InvalidArgument(f"fault {text!r}: {key} is without effect where what={values['what']}")
    return Fault(kind, **values)


def _value(text: str, key: str, value: str, kind: str, most: int) -> Any:
    if kind == "str":
        return value
    try:
        number = int(value) if kind == "int" else float(value)
    except ValueError as error:
        raise InvalidArgument(f"fault {text!r}: {key}={value!r} is not a number") from error
    least = 1 if key == "after" else 0
    if not least <= number <= most:
        raise InvalidArgument(f"fault {text!r}: {key}={value} is out of range: here it is {least} to {most}")
    return number


@dataclass(frozen=True)
class StepFaults:
    """What a step suffers: `factor` and `extra_s` of its time, `stand_s` (None: for good) before it, and
    signals: (rank, number)."""

    factor: float = 1.0
    extra_s: float = 0.0
    stand_s: float | None = 0.0
    signals: tuple[tuple[int, int], ...] = ()


@dataclass
class _Order:
    """A fault that is still to come, or lasts; `left` counts down to it, and below."""

    fault: Fault
    left: int


class Faults:
    """The orders of one server."""

    def __init__(self, orders: tuple[Fault, ...], seed: int = 0) -> None:
        self._orders = [_Order(fault, fault.after) for fault in orders]
        self._random = random.Random(seed)  # noqa: S311  (which byte is flipped is no secret)

    def order(self, fault: Fault) -> None:
        """One more."""
        self._orders.append(_Order(fault, fault.after))
        logger.warning("fault ordered: %s", fault)

    def of_step(self, dp: int) -> StepFaults:
        """What the step that begins now on replica `dp` suffers. A server that shall die does so here."""
        suffered = StepFaults()
        for order in list(self._orders):
            fault = order.fault
            if fault.kind == "slow":
                suffered = replace(
                    suffered, factor=suffered.factor * fault.factor, extra_s=suffered.extra_s + fault.ms / 1e3
                )
            elif fault.kind in ("stalled", "dead") and (fault.what == "server" or fault.dp == dp):
                order.left -= 1
                if order.left <= 0:
                    self._orders.remove(order)
                    suffered = _strike(fault, suffered)
        return suffered

    def wrong_page(self, pages: list[int], ranks: int) -> tuple[int, int, int] | None:
        """Whether the request whose prefill has ended shall have a wrong page: (rank, page, place)."""
        hit = False
        for order in list(self._orders):
            if order.fault.kind != "wrong-page":
                continue
            order.left -= 1
            hit = hit or order.left <= 0
            if order.fault.times and order.left <= 1 - order.fault.times:
                self._orders.remove(order)
        if not hit or not pages:
            return None
        return self._random.randrange(ranks), self._random.choice(pages), self._random.randrange(2**40)


def _strike(fault: Fault, suffered: StepFaults) -> StepFaults:
    """A fault whose time has come."""
    logger.warning("fault: %s", fault)
    if fault.what == "server":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.what == "rank":
        number = signal.SIGKILL if fault.kind == "dead" else signal.SIGSTOP
        return replace(suffered, signals=(*suffered.signals, (fault.rank, int(number))))
    stand = None if fault.ms == 0 or suffered.stand_s is None else suffered.stand_s + fault.ms / 1e3
    return replace(suffered, stand_s=stand)
