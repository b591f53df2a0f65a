"""How long something took between processes, without the time in which one of them stood still.

As `tests.busy` for one: what a lab says of kvik's bounds is not to be the machine's. A side that is stopped
on purpose, or killed, is none of a clock's.
"""

import time

from tests.busy import Watch
from tests.faults.side import Handle

HANG = 60.0  # seconds after which what has not ended never does


class Clock:
    """Runs from its making on, for the lab's own process and these sides. For bounds from above."""

    def __init__(self, *sides: Handle) -> None:
        self._watch = Watch()
        self._before = [(side, self._of(side)) for side in sides]
        self.began = time.monotonic()

    def stood(self) -> float:
        """Seconds since then that are left out."""
        return self._watch.stood() + sum(max(0.0, self._of(side) - before) for side, before in self._before)

    def seconds(self) -> float:
        """Since then."""
        now = time.monotonic()
        return now - self.began - self.stood()

    @staticmethod
    def _of(side: Handle) -> float:
        return float(side.ask("stood")["seconds"])
