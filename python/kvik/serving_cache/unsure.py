"""Saves of KV that may not be there: of steps whose output has not come.

A connector beside this one may load KV during the very step that computes upon it, and say only with the
step's output which KV blocks it has not filled. By then another request of the step, or of one that has begun
meanwhile, may have been given these blocks by the engine's prefix cache. So a save waits for the output of
the last step that had part in it, and is dropped where any block of it was not filled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvik.serving_cache.plan import Save

Owner = TypeVar("Owner")


@dataclass(frozen=True)
class _Waiting(Generic[Owner]):
    step: int
    owner: Owner
    save: Save


class Unsure(Generic[Owner]):
    """Saves, each of an owner, until the outputs that decide on them are in. Outputs come in the order of
    their steps."""

    def __init__(self) -> None:
        self._begun = 0
        self._ended = 0
        self._waiting: list[_Waiting[Owner]] = []

    def began(self) -> None:
        """The engine begins a step."""
        self._begun += 1

    def ended(self) -> None:
        """The output of the oldest step has been looked at."""
        self._ended = min(self._ended + 1, self._begun)

    def computed(self, owner: Owner, save: Save) -> None:
        """A save of what the step computes that has begun last."""
        self._waiting.append(_Waiting(self._begun, owner, save))

    def answered(self, owner: Owner, save: Save) -> None:
        """A save of a request that ends by the output that is looked at, if any is."""
        self._waiting.append(_Waiting(min(self._begun, self._ended + 1), owner, save))

    def certain(self) -> list[tuple[Owner, Save]]:
        """Those that wait for no output any more, once."""
        return self._take(lambda one: one.step <= self._ended)

    def without(self, blocks: Collection[int]) -> list[tuple[Owner, Save]]:
        """Take back those that have one of these KV blocks, which were not filled."""
        missing = set(blocks)
        return self._take(lambda one: not missing.isdisjoint(one.save.blocks))

    def clear(self) -> list[tuple[Owner, Save]]:
        """Take back all."""
        return self._take(lambda _: True)

    def _take(self, wanted: Callable[[_Waiting[Owner]], bool]) -> list[tuple[Owner, Save]]:
        taken: list[tuple[Owner, Save]] = []
        rest: list[_Waiting[Owner]] = []
        for one in self._waiting:
            if wanted(one):
                taken.append((one.owner, one.save))
            else:
                rest.append(one)
        self._waiting = rest
        return taken
