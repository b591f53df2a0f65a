"""How far a study is, and how long it still takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvik_lab.records import RunRecord
from kvik_lab.records.measures import PER_REQUEST
from kvik_lab.run.build import PlannedStart
from kvik_lab.run.journal import Journal
from kvik_lab.run.slots import Slot
from kvik_lab.storage.measure import LOAD_TIME
from kvik_lab.transfers.measure import TRANSFER_TIME


class Progress:
    """Says a line for each start and each run."""

    def __init__(
        self,
        slots: Sequence[Slot],
        starts: Sequence[PlannedStart],
        journal: Journal,
        say: Callable[[str], None],
    ) -> None:
        self.slots, self.starts, self.journal, self.say = slots, starts, journal, say
        self._began_start = time.monotonic()
        self._up: PlannedStart | None = None
        self._runs: list[tuple[Mapping[str, Any], float]] = []
        self._startups: list[float] = []

    def started(self, start: PlannedStart, name: str) -> None:
        """Servers are up."""
        now = time.monotonic()
        self._up = start
        self._startups.append(now - self._began_start)
        self.say(f"start {name} ({start.start.whole_plot}) is up after {self._startups[-1]:.1f} s")
        self._began_run = now

    def ended(self, record: RunRecord) -> None:
        """A run has ended."""
        now = time.monotonic()
        self._runs.append((record.levels, now - getattr(self, "_began_run", now)))
        self._began_run = self._began_start = now
        done = sum(self.journal.done(slot.id) for slot in self.slots)
        left = self.left()
        tail = f"; about {duration(left)} left" if left is not None and done < len(self.slots) else ""
        levels = " ".join(f"{name}={level}" for name, level in record.levels.items() if level is not None)
        self.say(f"[{done}/{len(self.slots)}] {levels}: {outcome_of(record)}{tail}")

    def left(self) -> float | None:
        """Seconds: what runs and starts took so far, for those that are left. None before the first run.

        A run takes what those of the same levels did, since arms may be far from each other; where there was
        none, what any did.
        """
        if not self._runs:
            return None
        runs = sum(self._takes(slot.levels) for slot in self.slots if not self.journal.done(slot.id))
        # The start that is up has been paid for.
        starts = sum(
            any(not self.journal.done(run.slot.id) for run in start.runs)
            for start in self.starts
            if start is not self._up
        )
        startup = statistics.fmean(self._startups) if self._startups else 0.0
        return runs + starts * startup

    def _takes(self, levels: Mapping[str, Any]) -> float:
        """Seconds of a run with these levels."""
        alike = [seconds for others, seconds in self._runs if others == levels]
        return statistics.fmean(alike or [seconds for _, seconds in self._runs])


def outcome_of(record: RunRecord) -> str:
    """A run in a few words: the verdict, and what was measured."""
    if record.outcome != "completed":
        return f"{record.outcome}: {(record.error or '').splitlines()[0] if record.error else ''}"
    values = [value for one in record.measured() if (value := PER_REQUEST["ttft"](one)) is not None]
    measured = f", median TTFT {statistics.median(values) * 1e3:.1f} ms of {len(values)}" if values else ""
    if loads := [figure.value for figure in record.figures if figure.metric == LOAD_TIME]:
        measured = f", median load {statistics.median(loads):.3f} s of {len(loads)}"
    if moves := [figure.value for figure in record.figures if figure.metric == TRANSFER_TIME]:
        measured = f", median transfer {statistics.median(moves) * 1e3:.3f} ms of {len(moves)}"
    reasons = [f"{one.gate}: {one.what}" for one in record.findings if one.status in ("invalid", "suspect")]
    why = f" ({'; '.join(reasons)})" if reasons else ""
    return f"{record.verdict or 'not judged'}{measured}{why}"


def duration(seconds: float) -> str:
    """In the unit that a person would take."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
