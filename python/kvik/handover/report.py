"""One JSON line a finished transfer, failed load or recomputed request, for measurements and tests.

Several processes append to one file: a line is one `write` on a descriptor opened with O_APPEND, so lines
never mix.
"""

from __future__ import annotations

import io
import json
import logging
from dataclasses import asdict, dataclass

from kvik.handover.native import Report
from kvik.handover.protocol import GroupLoad, Load

logger = logging.getLogger("kvik.handover")


@dataclass(frozen=True)
class LoadRecord:
    """What became of one request's load on one rank; `rank` is null for a decision of the scheduler.

    outcome: "loaded" (the KV is there), "failed" (a load that ended in an error; the serving engine
    recomputes), "recomputed" (the offer was refused before any load). A load of one rank that succeeded is a
    line for each prefill rank that it read from and each group of the model's layers, and `bytes`, `pages`,
    `extents` add up over them; one that failed is one line, about the prefill rank that failed it, and about
    none where it was cancelled.
    remote_rank: the prefill rank. group: of layers. blocks: the local KV blocks that the load fills, of this
    group, the same for each prefill rank. pages: moved by this transfer; parts count as pages where the two
    sides' KV blocks are unequal. Times in seconds; `bytes` are zero unless loaded.
    ended_at: of a transfer that succeeded, by the wall clock.
    """

    request_id: str
    remote_request_id: str | None
    outcome: str
    reason: str | None
    rank: int | None
    remote_rank: int | None = None
    blocks: int = 0
    bytes: int = 0
    pages: int = 0
    extents: int = 0
    transport: str | None = None
    mechanism: str | None = None
    plan_s: float | None = None
    post_s: float | None = None
    wire_s: float | None = None
    verify_s: float | None = None
    total_s: float | None = None
    group: int = 0
    ended_at: float | None = None


@dataclass(frozen=True)
class SendRecord:
    """What became of what one prefill rank granted of a request; `outcome` is "sent".

    remote_request_id: what decode calls it, of a stream by a name of its own. reason: how its grants have
    ended. parts: how many there were. computed_at: when the last layer before them was written, in seconds of
    the wall clock; 0 where the serving engine does not say.
    """

    request_id: str
    remote_request_id: str
    reason: str
    rank: int
    parts: int
    computed_at: float
    outcome: str = "sent"


@dataclass(frozen=True)
class NicRecord:
    """What a rank's engine was told of NICs, where it was told of any: `nics` as the engine takes it, and
    `why` it is that, where nobody has named them; `unknown`, what could not be looked up, and made it all of
    them. `outcome` is "nics"."""

    rank: int
    nics: str
    why: str
    unknown: str
    outcome: str = "nics"


def loaded(
    load: Load, group: GroupLoad, rank: int, remote_rank: int, report: Report, ended_at: float
) -> LoadRecord:
    """The record of one transfer of a load that succeeded."""
    copied = (
        "bytes",
        "pages",
        "extents",
        "transport",
        "mechanism",
        "plan_s",
        "post_s",
        "wire_s",
        "verify_s",
        "total_s",
    )
    return LoadRecord(
        load.request_id,
        load.remote_request_id,
        "loaded",
        None,
        rank,
        remote_rank,
        len(group.local_blocks),
        group=group.group,
        ended_at=ended_at,
        **{key: getattr(report, key) for key in copied},
    )


def in_log(text: str) -> str:
    """What came through clients for a line of a log, such as the prefill side's request id, which is as that
    side's log has it. What is not printable, such as the end of a line, is escaped."""
    return text if text.isprintable() else ascii(text)


class ReportFile:
    """Appends records; a file that cannot be written is said once and never fails a request."""

    def __init__(self, path: str | None) -> None:
        # Unbuffered, so that one record is one `write`; closed with its holder at the latest.
        self._file = None if path is None else io.FileIO(path, "ab")

    def write(self, record: LoadRecord | SendRecord | NicRecord) -> None:
        """Append one line."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(asdict(record)).encode() + b"\n")
        except OSError as error:
            logger.warning("kvik: report_file is not written any more: %s", error)
            self.close()

    def close(self) -> None:
        """Close the file; later records are dropped."""
        if self._file is not None:
            self._file.close()
            self._file = None
