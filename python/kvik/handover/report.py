"""One JSON line a finished load or recomputed request, for measurements and tests.

Several processes append to one file: a line is one `write` on a descriptor opened with O_APPEND, so lines
never mix.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass

from kvik.handover.native import Report

logger = logging.getLogger("vllm.kvik")


@dataclass(frozen=True)
class LoadRecord:
    """What became of one request's load on one rank; `rank` is null for a decision of the scheduler.

    outcome: "loaded" (the KV is there), "failed" (a load that ended in an error; vLLM's policy decides),
    "recomputed" (the offer was refused before any load). Times in seconds; `bytes` on the wire are zero
    unless loaded.
    """

    request_id: str
    remote_request_id: str | None
    outcome: str
    reason: str | None
    rank: int | None
    blocks: int = 0
    bytes: int = 0
    pages: int = 0
    extents: int = 0
    transport: str | None = None
    way: str | None = None
    plan_s: float | None = None
    post_s: float | None = None
    wire_s: float | None = None
    verify_s: float | None = None
    total_s: float | None = None


def loaded(request_id: str, remote_request_id: str, rank: int, blocks: int, report: Report) -> LoadRecord:
    """The record of a load that succeeded."""
    copied = (
        "bytes",
        "pages",
        "extents",
        "transport",
        "way",
        "plan_s",
        "post_s",
        "wire_s",
        "verify_s",
        "total_s",
    )
    return LoadRecord(
        request_id,
        remote_request_id,
        "loaded",
        None,
        rank,
        blocks,
        **{key: getattr(report, key) for key in copied},
    )


class ReportFile:
    """Appends records; a file that cannot be written is said once and never fails a request."""

    def __init__(self, path: str | None) -> None:
        self._fd: int | None = None
        if path is not None:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, record: LoadRecord) -> None:
        """Append one line."""
        if self._fd is None:
            return
        try:
            os.write(self._fd, json.dumps(asdict(record)).encode() + b"\n")
        except OSError as error:
            logger.warning("kvik: report_file is not written any more: %s", error)
            self.close()

    def close(self) -> None:
        """Close the file; later records are dropped."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
