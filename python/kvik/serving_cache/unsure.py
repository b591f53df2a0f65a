"""Saves of KV that may not be there: of steps whose output has not come.

A connector beside this one may load KV during the very step that computes upon it, and say only with the
step's output which KV blocks it has not filled. By then another request of the step, or of one that has begun
meanwhile, may have been given these blocks by the engine's prefix cache. So a save waits for the output of
the last step that had part in it, and is dropped where any block of it was not filled. A prompt is remembered
for as long also where none of its blocks is saved: its answer may be, and is computed upon them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvik.serving_cache.plan import Save

Owner = TypeVar("Owner")


@dataclass(frozen=True)
class _Waiting(Generic[Owner]):
    step: int
    owner: Owner
    blocks: Collection[int]
    save: Save | None


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

    def begun_upon(self, owner: Owner, blocks: Collection[int]) -> None:
        """The step that has begun last computes upon these KV blocks."""
        self._waiting.append(_Waiting(self._begun, owner, blocks, None))

    def computed(self, owner: Owner, save: Save) -> None:
        """A save of what the step computes that has begun last."""
        self._waiting.append(_Waiting(self._begun, owner, save.blocks, save))

    def answered(self, owner: Owner, save: Save) -> None:
        """A save of a request that ends by the output that is looked at, if any is."""
        self._waiting.append(_Waiting(min(self._begun, self._ended + 1), owner, save.blocks, save))

    def certain(self) -> list[tuple[Owner, Save]]:
        """Those that wait for no output any more, once."""
        return _saves(self._take(lambda one: one.step <= self._ended))

    def without(self, blocks: Collection[int]) -> tuple[list[Owner], list[Save]]:
        """Who computes upon one of these KV blocks, which were not filled; and their saves, taken back."""
        missing = set(blocks)
        taken = self._take(lambda one: not missing.isdisjoint(one.blocks))
        return [one.owner for one in taken], [save for _, save in _saves(taken)]

    def clear(self) -> list[Save]:
        """Take back all."""
        return [save for _, save in _saves(self._take(lambda _: True))]

    def _take(self, wanted: Callable[[_Waiting[Owner]], bool]) -> list[_Waiting[Owner]]:
        taken: list[_Waiting[Owner]] = []
        rest: list[_Waiting[Owner]] = []
        for one in self._waiting:
            (taken if wanted(one) else rest).append(one)
        self._waiting = rest
        return taken


def _saves(waiting: Iterable[_Waiting[Owner]]) -> list[tuple[Owner, Save]]:
    return [(one.owner, one.save) for one in waiting if one.save is not None]
