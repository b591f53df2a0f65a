"""Where the time of one request went, from sending it to its first token: spans that follow each other, and
whose sum is the measured time.

The pieces come from four clocks of one machine, each reading its own interval: the client (TTFT), the router
(`Server-Timing`: route, prefill, first_token, and kv_wait where the decode engine says it), the engines'
counters (queue and prefill times, as the difference of two readings around the request), and the report of
the transfer. An interval lies within the one that contains it::

    TTFT = route + prefill + first_token + what lies between
           prefill = queue + compute + answer
           first_token = kv_wait + compute of the last token + what lies between
           kv_wait = transfer (asking + wire) + what the decode engine does before and after it

A piece that would not fit into what is left of the interval around it (two readings of different clocks may
disagree by microseconds) is cut to fit; what nothing accounts for is the rest, and is shown as that. So the
spans always add up.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Place = Literal["router", "prefill", "kv", "decode", "rest"]


@dataclass(frozen=True)
class Span:
    """A stretch of the way to the first token. `start` counts from sending the request; both in seconds."""

    name: str
    place: Place
    start: float
    seconds: float

    @property
    def end(self) -> float:
        """Where the next one begins."""
        return self.start + self.seconds


@dataclass(frozen=True)
class Compute:
    """What an engine's own counters say of one request, in seconds; None where it does not count that."""

    queue: float | None
    prefill: float | None  # from being scheduled to the first token


@dataclass(frozen=True)
class Moving:
    """The transfer of one request's KV, in seconds: until the first byte, and from there to the end."""

    ask: float
    wire: float


@dataclass(frozen=True)
class Evidence:
    """All that was measured of one request. `phases` are the router's, in seconds, by name."""

    ttft: float
    phases: Mapping[str, float]
    prefill: Compute
    decode: Compute
    moving: Moving | None


class _Interval:
    """Time that is handed out piece by piece, and never more of it than there is."""

    def __init__(self, seconds: float) -> None:
        self.left = max(0.0, seconds)

    def take(self, seconds: float | None) -> float | None:
        """As much of `seconds` as is left; None stays None: nobody measured it."""
        if seconds is None:
            return None
        taken = min(max(0.0, seconds), self.left)
        self.left -= taken
        return taken


def server_timing(header: str) -> dict[str, float]:
    """The phases of a `Server-Timing` header in seconds; entries without a duration are left out."""
    phases: dict[str, float] = {}
    for entry in header.split(","):
        name, *parameters = (part.strip() for part in entry.split(";"))
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key == "dur":
                phases[name] = float(value) / 1e3
    return phases


def spans(evidence: Evidence) -> list[Span]:
    """The spans in the order in which they happened, the rest last; they add up to the TTFT."""
    whole = _Interval(evidence.ttft)
    pieces: list[tuple[str, Place, float | None]] = []
    pieces.append(("router: takes it in", "router", whole.take(evidence.phases.get("route"))))
    pieces += _prefill(whole.take(evidence.phases.get("prefill")), evidence.prefill)
    pieces += _decode(whole, evidence)
    pieces.append(("rest: HTTP, turns", "rest", whole.left))
    found = []
    start = 0.0
    for name, place, seconds in pieces:
        if seconds is not None:
            found.append(Span(name, place, start, seconds))
            start = found[-1].end
    return found


def _prefill(whole: float | None, counted: Compute) -> list[tuple[str, Place, float | None]]:
    if whole is None:
        return []
    inside = _Interval(whole)
    return [
        ("prefill: queue", "prefill", inside.take(counted.queue)),
        ("prefill: compute", "prefill", inside.take(counted.prefill)),
        ("prefill: answer", "prefill", inside.left),
    ]


def _decode(whole: _Interval, evidence: Evidence) -> list[tuple[str, Place, float | None]]:
    first_token = whole.take(evidence.phases.get("first_token"))
    inside = _Interval(whole.left if first_token is None else first_token)
    moving = evidence.moving
    moved = None if moving is None else moving.ask + moving.wire
    said = evidence.phases.get("kv_wait")
    around = _Interval(inside.take(moved if said is None else said) or 0.0)
    ask = around.take(None if moving is None else moving.ask)
    wire = around.take(None if moving is None else moving.wire)
    compute = inside.take(evidence.decode.prefill)
    if said is None:
        inside.left += around.left
    # What the router saw pass, but nobody in the engine accounts for, goes to the rest.
    whole.left = inside.left + (whole.left if first_token is not None else 0.0)
    return [
        ("decode: schedules it", "decode", None if said is None else around.left),
        ("KV: grant, first byte", "kv", ask),
        ("KV: on the wire", "kv", wire),
        ("decode: first token", "decode", compute),
    ]
