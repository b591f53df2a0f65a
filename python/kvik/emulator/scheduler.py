"""What one replica does in its next step, and what becomes of its requests.

Continuous batching: every step computes one token for each request that generates, and fills the rest of its
token budget with prompts, the oldest first, cutting long ones into pieces. Waiting requests are admitted in
order of arrival, when pages for prompt and longest answer can be had; because those are reserved, no running
request ever has to be preempted. That is the one place where it is more careful than vLLM, which admits with
the prompt's pages only.

The handover's scheduler side is asked and told exactly as `kvik.vllm.connector` does.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvik.emulator.content import MASK
from kvik.emulator.pool import Page, PagePool
from kvik.emulator.requests import Event, Request, Status
from kvik.emulator.store_side import StoreSide
from kvik.emulator.tokens import EOS, next_token
from kvik.handover.scheduler import SchedulerSide

MOST_WAITING = 4096
ContentKeys = Callable[[Request, int], list[bytes]]


class QueueFullError(Exception):
    """So many requests wait that another one is better sent elsewhere."""


@dataclass(frozen=True)
class Limits:
    """What a replica can hold and do at a time.

    recompute: whether a failed load is computed here, or ends the request. reread: 0 to read all KV of a
    request for each token, or N to read all of it for its first token and every Nth, and only what is new in
    between.
    """

    page_tokens: int
    step_tokens: int
    sequences: int
    vocab_size: int
    prefix_cache: bool
    recompute: bool
    reread: int


@dataclass(frozen=True)
class Work:
    """One request's part of a step: tokens `first` to `first + count` are computed; `sample`: the next one is
    chosen, for which the KV of the tokens from `read_from` on is read."""

    request: Request
    first: int
    count: int
    fill_from: int
    sample: bool
    read_from: int


@dataclass
class Step:
    """A step's works, and what the compute model wants to know of it."""

    works: list[Work] = field(default_factory=list)
    prefill: int = 0
    decode: int = 0
    context: int = 0


@dataclass
class LoadOutput:
    """What `SchedulerSide.update_output` reads: request ids that all ranks have reported."""

    finished_sending: set[str]
    finished_recving: set[str]


class Observer:
    """What the scheduler tells of requests, for metrics; every method may be overridden."""

    def admitted(self, request: Request) -> None:
        """A request has pages; `local_tokens` and `external_tokens` say where its KV comes from."""

    def first_token(self, request: Request, computed: int) -> None:
        """Its prompt is done; so many tokens of it were computed here."""

    def token(self, request: Request, seconds: float) -> None:
        """Another token, so long after the one before."""

    def finished(self, request: Request, reason: str) -> None:
        """It has ended."""

    def recomputed(self, tokens: int) -> None:
        """A failed load's tokens are computed here."""


class Scheduler:
    """One replica's requests and pages. Not thread-safe; never waits."""

    def __init__(
        self,
        limits: Limits,
        pool: PagePool,
        side: SchedulerSide,
        ranks: int,
        keys: ContentKeys,
        observer: Observer,
        store: StoreSide | None = None,
    ) -> None:
        self._limits = limits
        self._pool = pool
        self._side = side
        self._ranks = ranks
        self._keys = keys
        self._observer = observer
        self._store = store
        self.waiting: deque[Request] = deque()
        self.loading: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self._sending: dict[str, list[Page]] = {}
        self._sent: Counter[str] = Counter()
        self._received: Counter[str] = Counter()
        self._invalid: set[int] = set()

    # Arrival and departure.

    def add(self, request: Request) -> None:
        """Queue a request; `QueueFullError` when too many wait."""
        if len(self.waiting) >= MOST_WAITING:
            raise QueueFullError(f"{MOST_WAITING} requests are waiting already")
        if self._limits.prefix_cache:
            request.keys = self._keys(request, request.num_tokens // self._limits.page_tokens)
        self._side.on_new_request(request)
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """The client has left."""
        if not request.status.finished:
            self._finish(request, Status.FINISHED_ABORTED, Event(finish_reason="abort"))

    def unfinished(self) -> list[Request]:
        """All requests that still expect something, the oldest first."""
        open_requests = [*self.running.values(), *self.loading.values(), *self.waiting]
        return [request for request in open_requests if not request.status.finished]

    @property
    def sending(self) -> int:
        """Finished requests whose pages are held for their reader."""
        return len(self._sending)

    # A step.

    def schedule(self) -> Step:
        """The next step; one without works when there is nothing to compute."""
        step = Step()
        budget = self._limits.step_tokens
        for request in self.running.values():
            budget -= self._plan(step, request, budget)
        while self.waiting and budget > 0 and len(self.running) + len(self.loading) < self._limits.sequences:
            if not self._admit(self.waiting[0]):
                break
            request = self.waiting.popleft()
            if request.status is Status.RUNNING:
                budget -= self._plan(step, request, budget)
        return step

    def _plan(self, step: Step, request: Request, budget: int) -> int:
        """Add a request's work, within the budget; how many tokens it computes."""
        first, last = request.num_computed_tokens, request.num_tokens
        count = min(last - first, budget)
        if count <= 0:
            return 0
        request.times.computing = request.times.computing or time.monotonic()
        sample = first + count == last
        read_from = 0
        if sample and self._limits.reread and request.digests:
            request.steps_since_whole = (request.steps_since_whole + 1) % self._limits.reread
            read_from = request.digested if request.steps_since_whole else 0
        step.works.append(Work(request, first, count, max(first, request.present), sample, read_from))
        if request.outputs and count == 1:
            step.decode += 1
        else:
            step.prefill += count
        step.context += first + count
        return count

    def _admit(self, request: Request) -> bool:
        """Take pages for a waiting request; False when there are too few for now."""
        page_tokens = self._limits.page_tokens
        # At least the last token is computed, to choose the next one.
        found = self._pool.find(request.keys[: (request.num_tokens - 1) // page_tokens])
        local = len(found) * page_tokens
        external, _ = self._side.get_num_new_matched_tokens(request, local)
        external = external or 0
        more = -(-request.most_tokens // page_tokens) - len(found)
        if not self._pool.can_take(found, more):
            return False
        self._pool.touch(found)
        request.pages = [*found, *self._pool.take(more)]
        request.cached_pages = len(found)
        request.local_tokens, request.external_tokens = local, external
        request.num_computed_tokens = request.present = local
        self._side.update_state_after_alloc(request, (_numbers(request.pages),), external)
        if request.times.admitted is None:  # else it began anew, and was told of
            request.times.admitted = time.monotonic()
            self._observer.admitted(request)
        if external:
            self._load(request)
        else:
            self._run(request)
        return True

    def _load(self, request: Request) -> None:
        request.status = Status.LOADING
        request.times.load_began = time.monotonic()
        self.loading[request.request_id] = request

    def _run(self, request: Request) -> None:
        """Compute what is missing, or first look for it in the store."""
        if self._store is not None and self._store.fetch(request):
            self._load(request)
            return
        request.status = Status.RUNNING
        self.running[request.request_id] = request

    def finish_step(
        self, step: Step, digests: Sequence[Sequence[int]], weigh: Callable[[Sequence[int]], int]
    ) -> None:
        """Take a step's results. digests: of each sampling work, one a rank; `weigh` makes them one."""
        sums = iter(digests)
        for work in step.works:
            request = work.request
            news = next(sums) if work.sample else None
            if request.status is not Status.RUNNING:
                continue  # it was aborted meanwhile
            request.num_computed_tokens = work.first + work.count
            request.present = max(request.present, request.num_computed_tokens)
            self._cache_full_pages(request)
            if self._store is not None and work.sample and not request.outputs:
                self._store.put(request)
            if news is not None:
                before = request.digests if work.read_from else [0] * len(news)
                request.digests = [(old + new) & MASK for old, new in zip(before, news, strict=True)]
                request.digested = request.num_computed_tokens
                self._sample(request, weigh(request.digests))

    def _sample(self, request: Request, digest: int) -> None:
        """Choose the next token, and see whether it is the last."""
        sampling = request.sampling
        may_end = not sampling.ignore_eos and len(request.outputs) >= sampling.min_tokens
        token = next_token(digest, request.num_tokens, self._limits.vocab_size, may_end=may_end)
        self._observe_token(request)
        request.add(token)
        stopped = (token == EOS and may_end) or (
            token in sampling.stop_token_ids and len(request.outputs) > sampling.min_tokens
        )
        if stopped:
            reason = None if token == EOS else token
            self._finish(
                request, Status.FINISHED_STOPPED, Event(token, finish_reason="stop", stop_reason=reason)
            )
        elif len(request.outputs) >= sampling.max_tokens:
            self._finish(request, Status.FINISHED_LENGTH_CAPPED, Event(token, finish_reason="length"))
        else:
            request.events.put_nowait(Event(token))

    def _observe_token(self, request: Request) -> None:
        now, times = time.monotonic(), request.times
        if not request.counted:
            request.counted = True
            cached = request.local_tokens + request.external_tokens
            self._observer.first_token(request, request.num_tokens - min(cached, request.num_tokens - 1))
        if times.first_token is None:
            times.first_token = now
        else:
            self._observer.token(request, now - (times.last_token or now))
        times.last_token = now

    # Ends.

    def _finish(self, request: Request, status: Status, event: Event) -> None:
        """A request ends: tell the handover and the client, give back or hold its pages."""
        loading = request.status is Status.LOADING
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        self.running.pop(request.request_id, None)
        request.status = status
        if self._limits.prefix_cache and request.outputs and not loading:
            request.keys = self._keys(request, request.present // self._limits.page_tokens)
            self._cache_full_pages(request)
        if self._store is not None and request.outputs and not loading:
            self._store.put(request)
        hold, params = self._side.request_finished(request, (_numbers(request.pages),))
        if hold:
            self._sending[request.request_id] = request.pages
        elif not loading:
            self._pool.free_blocks(reversed(request.pages))
        # The pages of a load that is being cancelled stay until every rank has said that it ended.
        reason = event.finish_reason or "error"
        request.events.put_nowait(
            Event(event.token, event.finish_reason, event.stop_reason, event.error, params)
        )
        self._observer.finished(request, reason)

    def _cache_full_pages(self, request: Request) -> None:
        full = min(request.present // self._limits.page_tokens, len(request.keys))
        for index in range(request.cached_pages, full):
            self._pool.cache(request.pages[index], request.keys[index])
        request.cached_pages = max(request.cached_pages, full)

    # What ranks report.

    def on_report(
        self,
        sent: Iterable[str],
        received: Iterable[str],
        parked_ends: Iterable[str],
        invalid: Iterable[int],
        failures: Mapping[str, str],
    ) -> None:
        """One rank's news: request ids whose sends and loads have ended there, pages not filled, and why."""
        self._invalid.update(invalid)
        output = LoadOutput(self._complete(self._sent, sent), self._complete(self._received, received))
        self._side.update_output(output, Counter(parked_ends), failures)
        for request_id in output.finished_sending:
            self._pool.free_blocks(reversed(self._sending.pop(request_id, [])))
        for request_id in output.finished_recving:
            self._loaded(self.loading.pop(request_id))

    def _complete(self, counts: Counter[str], reported: Iterable[str]) -> set[str]:
        """Which of these all ranks have reported now."""
        complete = set()
        for request_id in reported:
            counts[request_id] += 1
            if counts[request_id] == self._ranks:
                del counts[request_id]
                complete.add(request_id)
        return complete

    def _loaded(self, request: Request) -> None:
        """All ranks' loads of a request have ended, well or not."""
        page_tokens = self._limits.page_tokens
        end = request.local_tokens + request.external_tokens
        bad = [
            index
            for index in range(request.local_tokens // page_tokens, -(-end // page_tokens))
            if request.pages[index].number in self._invalid
        ]
        self._invalid.difference_update(request.pages[index].number for index in bad)
        if request.status.finished:
            self._pool.free_blocks(reversed(request.pages))
            return
        self._waited(request)
        present = bad[0] * page_tokens if bad else end
        if bad and not self._limits.recompute:
            text = (
                f"request {request.request_id}: its KV could not be loaded from the prefill server "
                "(the log has the reason), and --load-failure is 'fail'"
            )
            # Its load is over: its pages go back as those of a running request do.
            request.status = Status.RUNNING
            self._finish(request, Status.FINISHED_ERROR, Event(error=text))
            return
        if bad:
            self._observer.recomputed(end - present)
        request.external_tokens = present - request.local_tokens
        request.present = present
        request.num_computed_tokens = min(present, request.num_tokens - 1)
        self._cache_full_pages(request)
        self._run(request)

    def on_store(self, fetched: Iterable[Mapping[str, Any]], ended: Iterable[Mapping[str, Any]]) -> None:
        """One rank's loads and puts of the store that have ended."""
        if self._store is None:
            raise ValueError("a rank tells of a store, and there is none")
        for loaded in fetched:
            if (whole := self._store.fetched(loaded)) is not None:
                self._fetched(*whole)
        for stored in ended:
            self._store.ended(stored)

    def _fetched(self, request: Request, blocks: int) -> None:
        """All ranks' loads from the store have ended: all of them have so many blocks of what was missing."""
        del self.loading[request.request_id]
        if request.status.finished:
            self._pool.free_blocks(reversed(request.pages))
            return
        self._waited(request)
        tokens = blocks * self._limits.page_tokens
        request.external_tokens += tokens
        request.present += tokens
        request.num_computed_tokens = request.present
        self._cache_full_pages(request)
        self._run(request)

    def _waited(self, request: Request) -> None:
        times = request.times
        if times.load_began is not None:
            times.kv_wait = (times.kv_wait or 0.0) + time.monotonic() - times.load_began

    def gauges(self) -> dict[str, float]:
        """Requests and pages now."""
        return {
            "running": len(self.running),
            "waiting": len(self.waiting) + len(self.loading),
            "usage": self._pool.usage,
            "held": self.sending,
        }


def _numbers(pages: Iterable[Page]) -> list[int]:
    return [page.number for page in pages]


def weigh_ranks(heads: Sequence[Any]) -> Callable[[Sequence[int]], int]:
    """How the ranks' digests become one. heads: which heads each rank holds, in order of ranks.

    Ranks with different heads add up. Ranks that hold the same heads (MLA, or more ranks than KV heads) must
    have the same digest: the first counts, and a difference of another changes the result. So the result does
    not depend on the number of ranks as long as the KV is right, and does depend on every rank's every byte.
    """
    first: dict[tuple[int, ...], int] = {}
    for rank, held in enumerate(heads):
        first.setdefault(tuple(held), rank)

    def weigh(digests: Sequence[int]) -> int:
        total = 0
        for rank, digest in enumerate(digests):
            original = first[tuple(heads[rank])]
            total += digest if original == rank else (digest - digests[original]) * (2 * rank + 1)
        return total & MASK

    return weigh
