"""One request's load on one decode rank: reads that end as one, and what is left to do after them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvik.handover.native import JointRead, Report, error_code
from kvik.handover.protocol import GroupLoad, Load, Read

# After these there is nothing at the owner that a release could end, or that this side has a right to end.
NOTHING_TO_RELEASE = frozenset(
    {
        "content_mismatch", "content_required",
        "grant_unknown", "grant_expired", "grant_consumed", "grant_revoked", "stale_generation",
        "ticket_invalid", "ticket_version", "ticket_foreign",
        "peer_unreachable", "peer_not_kvik", "peer_restarted", "peer_lost", "version_mismatch",
        "secret_required", "secret_mismatch", "tls_required", "engine_closed", "engine_forked",
    }
)  # fmt: skip


class NotKeptError(Exception):
    """Prefill has not kept the KV blocks of a window that this server wants: it looks back further."""


class Share(NamedTuple):
    """What this rank reads for a load from one prefill rank, of one group or part."""

    group: GroupLoad
    read: Read


@dataclass
class OpenLoad:
    """A load on its way. Without `transfer` nothing of it was begun, because `shares[at]` was `refused`.

    began_at: by the wall clock. cancelled: its request was aborted meanwhile."""

    load: Load
    shares: list[Share]
    began_at: float
    transfer: JointRead | None = None
    refused: Exception | None = None
    at: int = 0
    cancelled: bool = False

    @property
    def done(self) -> bool:
        return self.transfer is None or self.transfer.done

    def failure(self) -> tuple[Exception, int | None]:
        """Why a load that ended badly did, and the place of the share that failed first; None of one that was
        cancelled."""
        if self.transfer is not None:
            error = self.transfer.error()
            return error or RuntimeError("the reads ended without a report"), getattr(error, "read", None)
        return self.refused or RuntimeError("the reads were not begun"), self.at

    def outcomes(self) -> Sequence[Report | Exception | None]:
        """What became of each share of an ended load; None of one that was not begun."""
        if self.transfer is not None:
            return self.transfer.outcomes() or ()
        return [self.refused if place == self.at else None for place in range(len(self.shares))]

    def to_release(self) -> Iterator[Share]:
        """The shares of an ended load whose grants are live as far as is known here, and not used up."""
        for share, outcome in zip(self.shares, self.outcomes(), strict=True):
            if isinstance(outcome, Exception):
                live = error_code(outcome) not in NOTHING_TO_RELEASE
            else:
                live = outcome is None or not share.group.to_the_end
            if live:
                yield share

    def cancel(self) -> None:
        """Stop what still runs."""
        if self.transfer is not None:
            self.transfer.cancel()
