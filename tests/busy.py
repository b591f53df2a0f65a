"""How long something took, without the time in which this machine was busy with other things.

As tests/common/watch.rs. A test that says by when something ends would else fail wherever its processes wait
for a processor. On a machine that has one for them, nothing is left out.
"""

from __future__ import annotations

import threading
import time
from functools import cache

_STEP = 0.005  # seconds that the thread sleeps which finds out
_BUSY = 0.02  # woken later than this, it has waited for a processor, and others may have


class _Sleeper:
    """Sleeps and is late, since the first watch was started."""

    def __init__(self) -> None:
        self.woken = time.monotonic()
        self.late = 0.0
        self.each: list[float] = []
        threading.Thread(target=self._sleep, name="busy", daemon=True).start()

    def _sleep(self) -> None:
        while True:
            time.sleep(_STEP)
            if late := self._overdue():
                self.each.append(late)
                self.late += late
            self.woken = time.monotonic()

    def _overdue(self) -> float:
        late = time.monotonic() - self.woken - _STEP
        return late if late > _BUSY else 0.0

    def so_far(self) -> float:
        """Seconds that it was late in all, also where it was not woken yet."""
        return self.late + self._overdue()

    def longest(self, first: int) -> float:
        """The longest that it was late at once, also where it was not woken yet; not the `first` times."""
        return max([*self.each[first:], self._overdue()])


@cache
def _sleeper() -> _Sleeper:
    return _Sleeper()


class Watch:
    """Runs from its making on. For bounds from above."""

    def __init__(self) -> None:
        self._late, self._times = _sleeper().so_far(), len(_sleeper().each)
        self._began = time.monotonic()

    def seconds(self) -> float:
        """Since then."""
        return time.monotonic() - self._began - self.stood()

    def stood(self) -> float:
        """Seconds since then that are left out."""
        return max(0.0, _sleeper().so_far() - self._late)

    def longest(self) -> float:
        """The most seconds since then that are left out and are not apart."""
        return _sleeper().longest(self._times)
