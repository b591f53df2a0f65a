"""What is measured of requests: each by its own name and formula, in seconds, requests or tokens.

Between engines that prefill and engines that decode, the KV moves before a request's first token or between
its first and its second, depending on who sends the first one. A single figure hides which; these do not.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvik_lab.errors import LabError
from kvik_lab.records.schema import Request


def _origin(request: Request) -> float | None:
    """When the user would have begun to wait: when it was due, else when it was sent."""
    return request.sent if request.due is None else request.due


def ttft(request: Request) -> float | None:
    """Time to first token, from when the request was due; where nothing was scheduled, from sending it."""
    origin = _origin(request)
    return request.tokens[0] - origin if request.tokens and origin is not None else None


def ttft_from_send(request: Request) -> float | None:
    """Time to first token from sending the request: leaves out what a late sender adds."""
    return request.tokens[0] - request.sent if request.tokens and request.sent is not None else None


def second_token(request: Request) -> float | None:
    """From when the request was due to its second token."""
    origin = _origin(request)
    return request.tokens[1] - origin if len(request.tokens) > 1 and origin is not None else None


def end_to_end(request: Request) -> float | None:
    """From when the request was due to its last token."""
    origin = _origin(request)
    return request.tokens[-1] - origin if request.tokens and origin is not None else None


def tpot(request: Request) -> float | None:
    """Time per output token: from the first token to the last, over the tokens after the first."""
    times = request.tokens
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None


def output_rate(request: Request) -> float | None:
    """Output tokens a second of one request, from sending it to its last token."""
    if not request.tokens or request.sent is None or request.tokens[-1] <= request.sent:
        return None
    return len(request.tokens) / (request.tokens[-1] - request.sent)


def decode_step(request: Request) -> float | None:
    """Time per token after the second: the decode engine's pace, without the handover."""
    times = request.tokens
    return (times[-1] - times[1]) / (len(times) - 2) if len(times) > 2 else None


def handover_gap(request: Request) -> float | None:
    """First to second token, less the median gap after it, so that one preempted step is not the pace."""
    times = request.tokens
    if len(times) < 3:
        return None
    later = [b - a for a, b in pairwise(times[1:])]
    return times[1] - times[0] - statistics.median(later)


def gaps(request: Request) -> list[float]:
    """Inter-token latencies: from one arrival to the next. Tokens of one message arrived at once: one gap."""
    times = request.tokens
    return [b - a for a, b in pairwise(times) if b > a]


def longest_gap(request: Request) -> float | None:
    """The longest inter-token latency: the stall that a reader of the answer sees."""
    found = gaps(request)
    return max(found) if found else None


def median_gap(request: Request) -> float | None:
    """The median inter-token latency of the request."""
    found = gaps(request)
    return statistics.median(found) if found else None


PER_REQUEST: Mapping[str, Callable[[Request], float | None]] = {
    "ttft": ttft,
    "ttft_from_send": ttft_from_send,
    "second_token": second_token,
    "e2e": end_to_end,
    "tpot": tpot,
    "output_rate": output_rate,
    "decode_step": decode_step,
    "handover_gap": handover_gap,
    "itl": median_gap,
    "itl_max": longest_gap,
}
"""Name -> value in seconds, of `output_rate` in tokens a second; None where a request cannot show it (too few
tokens)."""


TIMING = "timing."
"""What stands before the name of a part of `Server-Timing`, as a metric: `timing.kv_wait`."""


def of_request(metric: str) -> Callable[[Request], float | None] | None:
    """What a metric of requests takes from one: of `PER_REQUEST`, or a part of its `Server-Timing`; else
    None."""
    if metric.startswith(TIMING):
        part = metric.removeprefix(TIMING)
        return lambda request: request.timing.get(part)
    return PER_REQUEST.get(metric)


@dataclass(frozen=True)
class Goals:
    """What a request has to hold to be good, in seconds; None: not asked for."""

    ttft: float | None = None
    itl: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def __post_init__(self) -> None:
        """Raise LabError where nothing is asked for: then every answer would be good."""
        if not any(goal is not None for goal in (self.ttft, self.itl, self.tpot, self.e2e)):
            raise LabError("no goal is stated; state at least one of ttft, itl, tpot and e2e, in seconds")

    def met(self, request: Request) -> bool:
        """Whether it was answered, and within all goals. `itl` holds for every gap of the request."""
        if not request.ok:
            return False
        asked = (
            (self.ttft, ttft(request)),
            (self.itl, longest_gap(request)),
            (self.tpot, tpot(request)),
            (self.e2e, end_to_end(request)),
        )
        return all(goal is None or value is None or value <= goal for goal, value in asked)


def span(requests: Iterable[Request]) -> float | None:
    """Seconds from the first request that was due (or sent) to the last that ended; None without any."""
    begins = [begin for request in requests if (begin := _origin(request)) is not None]
    ends = [request.end for request in requests if request.end is not None]
    return max(ends) - min(begins) if begins and ends else None


def throughput(requests: Sequence[Request]) -> float | None:
    """Answered requests a second."""
    seconds = span(requests)
    return sum(request.ok for request in requests) / seconds if seconds else None


def output_throughput(requests: Sequence[Request]) -> float | None:
    """Output tokens a second, of answered requests."""
    seconds = span(requests)
    return sum(len(request.tokens) for request in requests if request.ok) / seconds if seconds else None


def goodput(requests: Sequence[Request], goals: Goals) -> float | None:
    """Requests a second that hold all goals (Zhong et al., DistServe, OSDI 2024, section 2.2)."""
    seconds = span(requests)
    return sum(goals.met(request) for request in requests) / seconds if seconds else None


PER_RUN: Mapping[str, Callable[[Sequence[Request]], float | None]] = {
    "throughput": throughput,
    "output_throughput": output_throughput,
}
"""Name -> value of a whole run: requests or tokens a second."""

UNITS: Mapping[str, str] = {
    "output_rate": "tokens/s",
    "throughput": "requests/s",
    "output_throughput": "tokens/s",
    "goodput": "requests/s",
}
"""Name -> unit of what is no time; all others are in s."""
