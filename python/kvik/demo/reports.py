"""What the decode engine's connector wrote about its loads: one JSON object a line in its `report_file`."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

STEP = 0.02  # seconds between two looks at the file
_OF_OTHERS = ("sent", "nics")  # what prefill has granted, and what a rank was told of NICs


@dataclass(frozen=True)
class Load:
    """What became of one request's load on one rank. Times are in seconds, and None unless it was loaded."""

    request_id: str
    remote_request_id: str | None
    outcome: str  # "loaded", "failed", or "recomputed" (refused before any load)
    reason: str | None
    rank: int | None  # None for a decision of the scheduler
    bytes: int
    blocks: int
    pages: int
    extents: int
    transport: str | None
    mechanism: str | None
    plan_s: float | None
    post_s: float | None
    wire_s: float | None
    verify_s: float | None
    total_s: float | None
    group: int  # of the model's layers
    ended_at: float | None = None  # seconds of the wall clock


class ReportReader:
    """Follows a report file from where it was left; the file may not exist yet."""

    def __init__(self, path: Path) -> None:
        """Start at the present end of the file."""
        self.path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def new(self) -> list[Load]:
        """The loads that were reported since the last call."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]  # the last line may still be being written
        self._offset += len(whole)
        records = [json.loads(line) for line in whole.splitlines() if line.strip()]
        return [_load(record) for record in records if record.get("outcome") not in _OF_OTHERS]

    def wait(self, count: int, timeout: float = 10.0) -> list[Load]:
        """Wait until `count` new loads are there, or the time is up; returns what there is."""
        return self.wait_for(lambda loads: len(loads) >= count, timeout)

    def wait_for(self, enough: Callable[[list[Load]], bool], timeout: float = 10.0) -> list[Load]:
        """Wait until `enough(loads)` holds, or the time is up; returns what there is."""
        until = time.monotonic() + timeout
        found = self.new()
        while not enough(found) and time.monotonic() < until:
            time.sleep(STEP)  # a plain file has no event to wait for
            found += self.new()
        return found


def _load(record: dict[str, Any]) -> Load:
    return Load(**{field.name: record[field.name] for field in fields(Load) if field.name in record})
