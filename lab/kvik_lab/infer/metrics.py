"""What is measured of a request, each metric by its own name and formula.

Between engines that prefill and engines that decode, the KV moves between a request's first and second token,
or before its first, depending on who sends the first one. A single figure hides which; these do not.
All times are seconds; smaller is better for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from kvik_lab.errors import LabError
from kvik_lab.infer.arrays import series


class Metric(Enum):
    """The metrics, with what each is."""

    TTFT = "time to first token: from sending the request to its first token"
    TTFT_FROM_SCHEDULE = (
        "time to first token from when the request was due: counts what a late sender would hide"
    )
    SECOND_TOKEN = "time to second token: from sending the request to its second token"  # noqa: S105
    TPOT = "time per output token: from the first token to the last, over the tokens after the first"
    DECODE_STEP = "time per token after the second: the decode engine's pace, without the handover"
    HANDOVER_GAP = "handover gap: first to second token, less the pace of the tokens after"


@dataclass(frozen=True)
class Timeline:
    """When a request was due (None: nothing was scheduled) and sent, and when each of its tokens came."""

    sent: float
    tokens: tuple[float, ...]
    due: float | None = None

    def __post_init__(self) -> None:
        """Raise LabError where time runs backwards."""
        times = series((self.sent, *self.tokens), "the timeline")
        if len(times) > 1 and np.diff(times).min() < 0:
            raise LabError("a token comes before the one before it, or before the request was sent")
        if self.due is not None and self.due > self.sent:
            raise LabError("the request was sent before it was due")

    def get(self, metric: Metric) -> float | None:
        """The metric in seconds; None where this request cannot show it (too few tokens, no schedule)."""
        tokens, count = self.tokens, len(self.tokens)
        if not count:
            return None
        match metric:
            case Metric.TTFT:
                return tokens[0] - self.sent
            case Metric.TTFT_FROM_SCHEDULE:
                return None if self.due is None else tokens[0] - self.due
            case Metric.SECOND_TOKEN:
                return tokens[1] - self.sent if count > 1 else None
            case Metric.TPOT:
                return (tokens[-1] - tokens[0]) / (count - 1) if count > 1 else None
            case Metric.DECODE_STEP:
                return (tokens[-1] - tokens[1]) / (count - 2) if count > 2 else None
            case Metric.HANDOVER_GAP:
                # The median, so that one preempted step does not pass for the pace.
                return tokens[1] - tokens[0] - float(np.median(np.diff(tokens[1:]))) if count > 2 else None


@dataclass(frozen=True)
class TransferCost:
    """What a transfer costs a request: the same seconds as a wait, and spread over its output tokens."""

    waiting: float
    """Seconds that the user waits longer, once."""
    tokens: int

    def __post_init__(self) -> None:
        """Raise LabError for a request without output."""
        if self.tokens < 1:
            raise LabError(f"{self.tokens} output tokens: there is nothing to spread a cost over")

    @property
    def per_token(self) -> float:
        """Seconds for each output token: what the time per output token grows by, at most."""
        return self.waiting / self.tokens


def collect(timelines: Sequence[Timeline], metric: Metric) -> list[float]:
    """The metric of each request that can show it, in order; raises LabError where none can."""
    found = [value for t in timelines if (value := t.get(metric)) is not None]
    if not found:
        raise LabError(f"none of {len(timelines)} requests can show the {metric.value.partition(':')[0]}")
    return found
