"""How many tokens of prompts the serving engine computes in a second, by its own steps.

A step's time is that from its beginning, or from the end of the step before it where that was later, to its
end: so steps that overlap are not counted twice. Only steps that compute prompts for the most part count, and
those that compute much count more."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection

# Of one request in one step: fewer may be an answer's, with tokens that were guessed.
LEAST_OF_REQUEST = 32
LEAST_OF_STEP = 128
KEEP = 0.9  # of what was counted, when a step is added
MOST_OPEN = 64  # steps that have begun and not ended


class StepRate:
    """See the module."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: deque[tuple[float, int]] = deque()
        self._ended_at = 0.0
        self._tokens = 0.0
        self._seconds = 0.0

    def began(self, scheduled: Collection[int]) -> None:
        """A step has begun, which computes so many tokens of each request."""
        if len(self._open) >= MOST_OPEN:  # their ends are not told
            self._open.clear()
        prompts = sum(count for count in scheduled if count >= LEAST_OF_REQUEST)
        counts = prompts >= LEAST_OF_STEP and 2 * prompts >= sum(scheduled)
        self._open.append((self._clock(), prompts if counts else 0))

    def ended(self) -> None:
        """The oldest step has ended."""
        if not self._open:
            return
        began, tokens = self._open.popleft()
        now = self._clock()
        seconds = now - max(began, self._ended_at)
        self._ended_at = now
        if tokens and seconds > 0:
            self._tokens = KEEP * self._tokens + tokens
            self._seconds = KEEP * self._seconds + seconds

    @property
    def rate(self) -> float | None:
        """Tokens a second; None before the first step that counts."""
        return self._tokens / self._seconds if self._seconds else None
