"""One decode request that came with an offer, and what is said of it when it has ended."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from kvik.handover.mapping import RankMap
from kvik.handover.protocol import Handover, Own, decode_note
from kvik.handover.streaming import Stream


class Phase(enum.Enum):
    """Where a request's pull stands."""

    OFFERED = enum.auto()
    LOADING = enum.auto()
    SETTLED = enum.auto()


@dataclass
class Pull:
    """`handover` is None where it could not be read; `ranks` and `own`, by group, are None until the offer is
    checked. `stream`: where it comes in parts, and `parts`, how many of them are being loaded. `recomputed`:
    why the offer was refused, or its load has failed."""

    handover: Handover | None
    phase: Phase = Phase.OFFERED
    stream: Stream | None = None
    parts: int = 0
    ranks: list[RankMap] | None = None
    own: list[Own] | None = None
    local_tokens: int = 0
    asked_at: float | None = None
    waited_s: float | None = None
    recomputed: str | None = None

    def note(self) -> dict[str, Any] | None:
        """What the request's answer says of its KV; None of a request that has ended before that was
        known."""
        if self.recomputed is not None:
            return decode_note("recomputed", self.recomputed, self.waited_s)
        if self.phase is not Phase.SETTLED:
            return None
        return decode_note("not_needed" if self.waited_s is None else "loaded", None, self.waited_s)
