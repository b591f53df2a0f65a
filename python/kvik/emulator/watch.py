"""kvik's module as `kvik.handover.worker` uses it, with a record of what is open.

`WorkerSide` is made for an engine that steps all the time, and asks in each step what has ended. A rank here
sleeps until something happens, so it wants to know which transfers' ends to wait for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import kvik
from kvik.handover.native import Engine, Grant, JointRead, Native, Transfer

# A grant has no descriptor to wait for, so its end is looked for: often at first, seldom later.
YOUNG_S, YOUNG_LOOK_S = 0.25, 0.002
GROWN_S, GROWN_LOOK_S = 2.0, 0.01
OLD_LOOK_S = 0.05


class WatchedEngine:
    """An engine whose transfers and grants are told to others."""

    def __init__(self, engine: Any, watch: Watch) -> None:
        self._engine = engine
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def read_all(self, *args: Any, **kwargs: Any) -> JointRead:
        """As the engine's."""
        reads: JointRead = self._engine.read_all(*args, **kwargs)
        self._watch.opened(reads)
        return reads

    def release(self, *args: Any, **kwargs: Any) -> Transfer:
        """As the engine's."""
        transfer: Transfer = self._engine.release(*args, **kwargs)
        self._watch.opened(transfer)
        return transfer

    def grant(self, *args: Any, **kwargs: Any) -> Grant:
        """As the engine's."""
        return self._watch.grant(self._engine.grant(*args, **kwargs))


def unwatched(engine: Any) -> kvik.Engine:
    """The engine itself, of one that is watched."""
    return cast(kvik.Engine, engine._engine if isinstance(engine, WatchedEngine) else engine)


class Watch:
    """What is open. `opened` is called with each transfer."""

    def __init__(self, opened: Callable[[Any], None]) -> None:
        self.opened = opened
        self._grants: list[tuple[float, Grant]] = []

    def native(self, native: Native) -> Native:
        """The module, with engines that are watched."""
        return cast(Native, WatchedNative(native, self))

    def grant(self, grant: Grant) -> Grant:
        """A grant was issued."""
        self._grants.append((time.monotonic(), grant))
        return grant

    def look_in(self) -> float | None:
        """Seconds until grants should be looked at again; None while there are none."""
        if not self._grants:
            return None
        age = time.monotonic() - self._grants[-1][0]
        if age < YOUNG_S:
            return YOUNG_LOOK_S
        return GROWN_LOOK_S if age < GROWN_S else OLD_LOOK_S

    def forget_ended(self) -> None:
        """Grants that have ended need no look any more."""
        self._grants = [entry for entry in self._grants if entry[1].state == "live"]


class WatchedNative:
    """The module `kvik`, with watched engines."""

    def __init__(self, native: Native, watch: Watch) -> None:
        self._native = native
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def Engine(self, **options: Any) -> Engine:  # noqa: N802  (kvik's own name)
        """Start an engine."""
        return cast(Engine, WatchedEngine(self._native.Engine(**options), self._watch))
