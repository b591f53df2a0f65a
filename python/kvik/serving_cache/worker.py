"""The half in a worker process: blocks are looked for, read and written on threads, and only a step that has
nothing to compute waits a little for one of them.

A step's plan is started before the step's forward pass. In host memory the serving engine's own work on the
plan's KV blocks is done by then; on a GPU the threads wait for what its stream was given by then. What has
ended is collected once a step. A load is reported exactly once, and then nothing lands in its KV blocks any
more; so is the end of a save, and then nobody reads them.

No queue grows without bound: a request has one lookup and one load at a time, and how many saves there may be
is bounded by the scheduler's half."""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kvik.handover.metrics import LoadStats
from kvik.serving_cache.config import CacheConfig
from kvik.serving_cache.plan import Answer, CacheLoad, CachePlan, Kept, Lookup, Save
from kvik.serving_cache.tiers import Behind, Loaded, Saved, Stop, Tiers

logger = logging.getLogger("kvik.serving_cache")

# Saves, which nobody waits for, leave the wire to the others.
LOOKERS, LOADERS, SAVERS, PREFETCHERS = 2, 4, 1, 1


@dataclass
class _LoadEnd:
    load: CacheLoad
    loaded: Loaded
    seconds: float


@dataclass
class _SaveEnd:
    save: Save
    saved: Saved


@dataclass
class _LookEnd:
    number: int
    answer: Answer
    failures: dict[str, str]


class CacheRank:
    """Worker-process half of a serving engine's store, for one rank. `follows`: as of `Tiers`."""

    def __init__(self, tiers: Tiers, config: CacheConfig, rank: int, follows: bool = False) -> None:
        self._tiers = tiers
        self._config = config
        self._rank = rank
        self._follows = follows
        self._ended: queue.SimpleQueue[_LoadEnd | _SaveEnd | _LookEnd] = queue.SimpleQueue()
        self._looking = 0  # lookups that have begun and were not collected
        self._stops: dict[str, Stop] = {}
        self._looks = ThreadPoolExecutor(LOOKERS, "kvik-look")
        self._loads = ThreadPoolExecutor(LOADERS, "kvik-load")
        self._saves = ThreadPoolExecutor(SAVERS, "kvik-save")
        self._prefetches = ThreadPoolExecutor(PREFETCHERS, "kvik-prefetch")
        self._answers: dict[int, Answer] = {}
        self._received: set[str] = set()
        self._invalid: set[int] = set()
        self._saved: list[str] = []
        self._kept: list[Kept] = []
        self.stats = LoadStats()

    # One step.

    def begin_step(self, plan: CachePlan) -> None:
        """Start everything that the scheduler's half decided on."""
        if plan.namespaces is not None:
            self._tiers.set_namespace(plan.namespaces[self._rank])
        now = time.monotonic()
        self._looking += len(plan.lookups)
        for lookup in plan.lookups:
            self._looks.submit(self._look, lookup, now + self._config.deadline)
        if plan.loads or plan.saves:
            self._move(plan, now, self._tiers.behind())
        for request_id in plan.cancels:
            if (stop_of := self._stops.get(request_id)) is not None:
                stop_of.ask()

    def _move(self, plan: CachePlan, now: float, behind: Behind) -> None:
        for load in plan.loads:
            stop = self._stops[load.request_id] = Stop()
            self._loads.submit(self._load, load, now, stop, behind)
        for save in plan.saves:
            self._saves.submit(self._save, save, now + self._config.save_deadline, behind)

    @property
    def awaited(self) -> bool:
        """Whether a request waits for an answer or a load."""
        return bool(self._looking or self._stops)

    def collect(self, wait_s: float = 0.0) -> None:
        """Take what has ended by now.

        wait_s: seconds to wait for something to end where nothing has and a request waits for an answer or a
        load; for a step that has nothing else to do.
        """
        try:
            if wait_s > 0.0 and self.awaited:
                self._take(self._ended.get(timeout=wait_s))
            while True:
                self._take(self._ended.get_nowait())
        except queue.Empty:
            return

    def _take(self, ended: _LoadEnd | _SaveEnd | _LookEnd) -> None:
        if isinstance(ended, _LoadEnd):
            self._end_load(ended)
        elif isinstance(ended, _SaveEnd):
            self._end_save(ended)
        else:
            self._looking -= 1
            self._answers[ended.number] = ended.answer
            self._count_failures("lookups", ended.failures)

    def take_received(self) -> set[str]:
        """Request ids of loads that have ended, since the last call."""
        received, self._received = self._received, set()
        return received

    def take_invalid_blocks(self) -> set[int]:
        """KV blocks that loads were to fill and have not, since the last call."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def take_saved(self) -> list[str]:
        """Keys of saves that have ended, since the last call."""
        saved, self._saved = self._saved, []
        return saved

    def take_kept(self) -> list[Kept]:
        """What this rank has of saves that have ended, since the last call, in their order; nothing where
        nobody follows it."""
        kept, self._kept = self._kept, []
        return kept

    def take_answers(self) -> dict[int, Answer]:
        """Answers to lookups, since the last call."""
        answers, self._answers = self._answers, {}
        return answers

    def take_stats(self) -> dict[str, Any]:
        """Counts since the last call."""
        stats, self.stats = self.stats, LoadStats()
        return stats.data

    def close(self) -> None:
        """Begin nothing any more; what is under way ends with the engine."""
        for stop in self._stops.values():
            stop.ask()
        for threads in (self._looks, self._loads, self._saves, self._prefetches):
            threads.shutdown(wait=False, cancel_futures=True)
        self._tiers.close()

    # On threads. Whatever happens there, what waits for it must not wait for ever.

    def _look(self, lookup: Lookup, until: float) -> None:
        """Nobody waits for an answer after `until`: one that comes to its turn later asks no store, so that a
        store which stands still leaves no more behind than was asked for within a deadline."""
        answer, failures = Answer(0, 0), {"lookup": "internal"}
        try:
            if time.monotonic() >= until:
                failures = {"lookup": "deadline_exceeded"}
            else:
                answer, failures = self._answer(lookup)
            if answer.loadable > answer.host:
                with contextlib.suppress(RuntimeError):  # closed meanwhile
                    self._prefetches.submit(self._prefetch, lookup.links, answer.host, until)
        except Exception:
            logger.exception("kvik: looking for blocks has failed in a way that is no answer of a store")
        self._ended.put(_LookEnd(lookup.number, answer, failures))

    def _answer(self, lookup: Lookup) -> tuple[Answer, dict[str, str]]:
        met = self._follows and self._tiers.has_server
        blocks, host, failures = self._tiers.look(lookup.links)
        choice = ""
        if blocks > host and lookup.rate is not None:
            choice = self._tiers.choose(blocks - host, lookup.rate)
        return Answer(blocks, host, asked=host, sure=met and not failures, choice=choice), failures

    def _prefetch(self, links: bytes, host: int, until: float) -> None:
        if time.monotonic() < until:
            self._tiers.prefetch(links, host)

    def _load(self, load: CacheLoad, began: float, stop: Stop, behind: Behind) -> None:
        loaded = Loaded(failures={"load": "internal"})
        try:
            loaded = self._tiers.load(load.links, load.blocks, began + load.deadline, stop, behind)
        except Exception:
            logger.exception(
                "kvik: request %s: a load has failed in a way that is no answer of a store", load.request_id
            )
        self._ended.put(_LoadEnd(load, loaded, time.monotonic() - began))

    def _save(self, save: Save, until: float, behind: Behind) -> None:
        saved = Saved(failures={"save": "internal"})
        try:
            saved = self._tiers.save(save.links, save.blocks, until, behind)
        except Exception:
            logger.exception("kvik: a save has failed in a way that is no answer of a store")
        self._ended.put(_SaveEnd(save, saved))

    # What has ended.

    def _end_load(self, ended: _LoadEnd) -> None:
        load, loaded = ended.load, ended.loaded
        stop = self._stops.pop(load.request_id)
        self._received.add(load.request_id)
        self.stats.count("cache_host_blocks", loaded.host)
        self.stats.count("cache_remote_blocks", loaded.remote)
        self._count_failures("loads", loaded.failures)
        missing = len(load.blocks) - loaded.blocks
        if stop.asked:  # maybe only after it had ended
            # An aborted request's blocks are freed by the engine; naming them could hit their next owner.
            self.stats.count("cache_loads_cancelled")
        elif missing:
            self._invalid.update(load.blocks[loaded.blocks :])
            self.stats.count("cache_loads_short")
            self.stats.count("cache_missing_blocks", missing)
            logger.warning(
                "kvik: request %s: %d of %d KV blocks were not read from the store (%s): they are computed",
                load.request_id, missing, len(load.blocks),
                _said(loaded.failures) or "they have gone meanwhile",
            )  # fmt: skip
        else:
            self.stats.count("cache_loads")
            self.stats.count("cache_load_s", ended.seconds)
            logger.log(
                logging.INFO if self._rank == 0 else logging.DEBUG,
                "kvik: request %s: %d KV blocks loaded, %d from this process and %d from the store, in "
                "%.2f ms", load.request_id, loaded.blocks, loaded.host, loaded.remote, ended.seconds * 1e3,
            )  # fmt: skip

    def _end_save(self, ended: _SaveEnd) -> None:
        self._saved.append(ended.save.key)
        for name, count in ended.saved.counts.items():
            self.stats.count(f"cache_{name}_blocks", count)
        self._count_failures("saves", ended.saved.failures)
        if self._follows:
            there = ended.saved.there
            self._kept.append(
                Kept(ended.save.key, there.get("host", 0), there.get("remote", 0), ended.saved.gone)
            )

    def _count_failures(self, operation: str, failures: dict[str, str]) -> None:
        for tier, code in failures.items():
            self.stats.count(f"cache_{operation}_failed_{tier}_{code}")


def _said(failures: dict[str, str]) -> str:
    return ", ".join(f"{tier}: {code}" for tier, code in failures.items())
