"""The half in a serving engine's scheduler process: names blocks, asks, decides; moves nothing and never
waits.

One `Wanted` a request, from its arrival on::

    NAMING    what its KV depends on is being found out (weights, adapter and images by their bytes)
    ASKED     the ranks look for its blocks
    ANSWERED  they have said how many are there
    LOADING   KV blocks are allocated, the ranks read into them
    SETTLED   loaded, failed, too late, or nothing to load: the engine computes whatever is missing

A request is asked for when it arrives, so that the answer is there by the time it has come to the head of the
engine's queue. What it costs the request besides, waiting for an answer and for a load, is bounded by one
deadline.

Blocks are saved when their prompt is computed and the engine has said that all it was computed upon is there
(`unsure.py`), and those of the answer when the request has ended well. They are held by references of our own
(`kvik.handover.holding`) until every rank has ended with them, so the engine gives nobody else a block that
is being read. Where too many would be held, nothing is saved: a slow store leaves room for requests."""

from __future__ import annotations

import enum
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvik.handover.holding import HeldBlocks
from kvik.handover.items import NoContentError
from kvik.handover.protocol import KvShape
from kvik.handover.sending import Scheduled
from kvik.serving_cache.config import CacheConfig
from kvik.serving_cache.ledger import Event, Ledger
from kvik.serving_cache.naming import Naming
from kvik.serving_cache.plan import LINK_BYTES, Answer, CacheLoad, CachePlan, Kept, Lookup, Save
from kvik.serving_cache.rate import StepRate
from kvik.serving_cache.unsure import Unsure

logger = logging.getLogger("kvik.serving_cache")

Steps = Callable[[Mapping[str, "Wanted"]], list[Scheduled]]

KEPT = frozenset({"FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"})
# Of the engine's KV blocks, the share that may wait for saves, and how many saves may.
MOST_HELD = 0.25
MOST_SAVES = 256
# An answer that is older is asked for again: blocks may have gone meanwhile.
ANSWER_AGE_S = 10.0
MOST_REASONS = 64  # each is logged once
# Where the rate is measured: computing takes the time of other requests, too, so it has to be faster than
# fetching by this factor.
FAVOUR = 2.0


class Phase(enum.Enum):
    """Where a request's blocks stand."""

    NAMING = enum.auto()
    ASKED = enum.auto()
    ANSWERED = enum.auto()
    LOADING = enum.auto()
    SETTLED = enum.auto()


@dataclass
class Wanted:
    """One request's blocks. local, gain: tokens that the engine last said it has itself, and
    was then told of. since: when it was first told
    to ask again, for this answer; waited: how long it had to. saved: how many of the first blocks are there
    or on their way. blocks: the KV blocks, until the prompt is computed. outdated: its KV has no name (any
    more), nothing of it is saved."""

    request: Any
    phase: Phase = Phase.NAMING
    number: int = 0
    links: bytes = b""
    answer: Answer | None = None
    answered_at: float = 0.0
    local: int = 0
    gain: int = 0
    since: float | None = None
    waited: float = 0.0
    preemptions: int = 0
    saved: int = 0
    blocks: list[int] = field(default_factory=list)
    outdated: bool = False


class CacheSide:
    """Scheduler-process half of a serving engine's store, for one data-parallel replica. Its methods have the
    names of vLLM's connector hooks, as those of `kvik.handover.scheduler.SchedulerSide`. ledger: of what is
    told to whoever follows the store; None where nobody does."""

    def __init__(
        self,
        naming: Naming,
        config: CacheConfig,
        ranks: int,
        held: HeldBlocks,
        clock: Callable[[], float] = time.monotonic,
        ledger: Ledger | None = None,
    ) -> None:
        self._ledger = ledger
        measured = config.address is not None and config.prefill_rate == "measured"
        self._steps = StepRate() if measured else None
        self._naming = naming
        self._config = config
        self._ranks = ranks
        self._held = held
        self._clock = clock
        self._shape: KvShape | None = None
        self._told: bytes | None = None
        self._wanted: dict[str, Wanted] = {}
        self._unnamed: dict[str, Wanted] = {}
        self._computing: dict[str, Wanted] = {}
        self._asked: dict[int, Wanted] = {}
        self._saves: dict[str, tuple[int, int]] = {}
        self._unsure: Unsure[Wanted] = Unsure()
        self._numbers = 0
        self._plan = CachePlan()
        self._reasons: set[str] = set()
        self.counters: Counter[str] = Counter()

    def set_shape(self, shape: KvShape) -> None:
        """How the model's KV lies on this server: of its one group of layers."""
        self._shape = shape
        self._naming.set_shape(shape)
        self._tell_namespaces()  # begins to read the weights, long before the first request

    # Loads.

    def on_new_request(self, request: Any) -> None:
        """A request has arrived: ask for its blocks at once."""
        self._of(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond the engine's own hit a load would bring; (0, False): compute them. None: ask
        again, the answer is not there yet."""
        wanted, now = self._of(request), self._clock()
        self._begins(wanted)
        self._again(wanted, now)
        if wanted.phase is Phase.NAMING and not self._naming.knows_weights:
            self._settle(wanted)  # they may take long to read; nothing can be there under no name
        if wanted.phase in (Phase.NAMING, Phase.ASKED):
            wanted.since = now if wanted.since is None else wanted.since
            if now - wanted.since < self._config.deadline:
                return None, False
            self.counters["cache_late"] += 1
            self._settle(wanted)
        if wanted.phase is not Phase.ANSWERED or wanted.answer is None or self._shape is None:
            return 0, False
        tokens = self._shape.block_tokens
        gain = wanted.answer.loadable * tokens - num_computed_tokens
        if gain <= 0 or num_computed_tokens % tokens:
            return 0, False
        wanted.local, wanted.gain = num_computed_tokens, gain
        return gain, True

    def offers(self, request_id: str) -> bool:
        """Whether the engine was last told that a load brings something, and has not decided yet."""
        wanted = self._wanted.get(request_id)
        return wanted is not None and wanted.gain > 0

    def loads(self, request_id: str) -> bool:
        """Whether a request's blocks are being loaded."""
        wanted = self._wanted.get(request_id)
        return wanted is not None and wanted.phase is Phase.LOADING

    def pass_over(self, request_id: str) -> None:
        """The engine was told of something else that it can load for a request, or that it cannot."""
        if (wanted := self._wanted.get(request_id)) is not None:
            self._begins(wanted)

    def update_state_after_alloc(self, request: Any, block_ids: Sequence[int], external: int) -> None:
        """KV blocks are allocated: start the load of so many tokens behind the engine's own, if any."""
        wanted = self._wanted.get(request.request_id)
        if wanted is None or wanted.phase is not Phase.ANSWERED or self._shape is None:
            return
        wanted.gain = 0
        if external == 0:
            self._settle(wanted)
            return
        tokens = self._shape.block_tokens
        # The engine may take fewer than it was offered.
        first, end = wanted.local // tokens, -(-(wanted.local + external) // tokens)
        left = max(self._config.deadline - wanted.waited, self._config.deadline / 10)
        links = wanted.links[: end * LINK_BYTES]
        self._plan.loads.append(CacheLoad(request.request_id, links, list(block_ids[first:end]), left))
        wanted.phase = Phase.LOADING
        self.counters["cache_hit_tokens"] += external

    def sources(self, request_id: str, external: int) -> tuple[int, int]:
        """Of so many tokens that a load is to bring: from the process' own memory, and from a server."""
        wanted = self._wanted.get(request_id)
        if wanted is None or wanted.answer is None or self._shape is None:
            return 0, external
        host = min(max(0, wanted.answer.host * self._shape.block_tokens - wanted.local), external)
        return host, external - host

    def update_output(
        self,
        received: Iterable[str],
        invalid: Collection[int],
        answers: Mapping[int, Answer],
        ends: Mapping[str, int],
        kept: Mapping[int, Sequence[Kept]],
    ) -> None:
        """What ranks have reported: loads that have ended on all of them, KV blocks that loads of any
        connector have not filled, answers, on how many of them saves have ended, and what each has of these,
        where that is followed."""
        if invalid:
            self._not_filled(invalid)
        for request_id in received:
            wanted = self._wanted.get(request_id)
            if wanted is not None and wanted.phase is Phase.LOADING:
                wanted.saved = 0 if invalid else wanted.saved  # what had gone is put again
                self._settle(wanted)
        for number, answer in answers.items():
            self._answered(number, answer)
        if self._ledger is not None:
            for rank, reports in kept.items():
                self._ledger.kept(rank, reports, self._numbers)
        for key in ends.keys() & self._saves.keys():
            blocks, missing = self._saves[key]
            if missing <= ends[key]:
                del self._saves[key]
            else:
                self._saves[key] = blocks, missing - ends[key]

    def _answered(self, number: int, answer: Answer) -> None:
        """Some ranks have answered; the last one's answer settles it."""
        wanted = self._asked.get(number)
        if wanted is None:
            return
        wanted.answer = answer if wanted.answer is None else wanted.answer.with_other(answer)
        if wanted.answer.ranks < self._ranks:
            return
        del self._asked[number]
        wanted.phase, wanted.answered_at = Phase.ANSWERED, self._clock()
        wanted.waited = 0.0 if wanted.since is None else wanted.answered_at - wanted.since
        # What only the server has comes into the process' own memory by a save, where there is that.
        host = self._config.host_cache is not None
        wanted.saved = max(wanted.saved, wanted.answer.host if host else wanted.answer.blocks)
        self.counters["cache_found_blocks"] += wanted.answer.blocks
        if wanted.answer.choice:
            self.counters[f"cache_choices_{wanted.answer.choice}"] += 1
        if self._ledger is not None:
            self._ledger.looked(wanted.request, wanted.links, number, wanted.answer)

    def _of(self, request: Any) -> Wanted:
        """What is wanted for a request, asked for at first sight."""
        wanted = self._wanted.get(request.request_id)
        if wanted is None:
            wanted = self._wanted[request.request_id] = Wanted(request)
            self._begins(wanted)
            self._ask(wanted)
        return wanted

    def _begins(self, wanted: Wanted) -> None:
        """The engine has not begun a request, or begins it again, without the KV blocks that it had."""
        wanted.gain, wanted.blocks = 0, []
        self._computing[wanted.request.request_id] = wanted

    def _again(self, wanted: Wanted, now: float) -> None:
        """Ask again where the answer is old, and for a request that has lost its KV blocks."""
        preemptions = getattr(wanted.request, "num_preemptions", 0)
        old = wanted.phase is Phase.ANSWERED and now - wanted.answered_at > ANSWER_AGE_S
        if old or (wanted.phase is Phase.SETTLED and preemptions > wanted.preemptions):
            wanted.since, wanted.waited, wanted.preemptions = None, 0.0, preemptions
            wanted.saved = 0  # what has gone meanwhile is put again; the answer says what has not
            self._ask(wanted)
        elif wanted.phase is Phase.NAMING:
            self._ask(wanted)

    def _ask(self, wanted: Wanted) -> None:
        """Ask the ranks, once it is known what the request's KV depends on; until then it stays unnamed."""
        request, links = wanted.request, b""
        # Some requests are to have every token computed (log probabilities of the prompt).
        if not getattr(request, "skip_reading_prefix_cache", False):
            # At least the last token is computed, to sample from it.
            found = self._links(wanted, request.num_tokens - 1)
            if found is None:
                wanted.phase = Phase.NAMING
                self._unnamed[request.request_id] = wanted
                return
            links = found
        self._unnamed.pop(request.request_id, None)
        if not links:
            self._settle(wanted)
            return
        self._numbers += 1
        wanted.number, wanted.links, wanted.answer = self._numbers, links, None
        wanted.phase = Phase.ASKED
        self._asked[wanted.number] = wanted
        self._plan.lookups.append(Lookup(wanted.number, links, self._rate()))
        self.counters["cache_asked_blocks"] += len(links) // LINK_BYTES

    def _rate(self) -> float | None:
        """Tokens a second that fetching has to compete with; None where it need not."""
        if self._steps is not None:
            return self._steps.rate and self._steps.rate / FAVOUR
        given = self._config.prefill_rate
        return None if isinstance(given, str) else given

    def _settle(self, wanted: Wanted) -> None:
        wanted.phase = Phase.SETTLED
        self._asked.pop(wanted.number, None)
        self._unnamed.pop(wanted.request.request_id, None)

    def _links(self, wanted: Wanted, num_tokens: int, computed: bool = False) -> bytes | None:
        """As `Naming.links`; nothing of a request whose content cannot be had, which is counted and said."""
        try:
            return b"" if wanted.outdated else self._naming.links(wanted.request, num_tokens, computed)
        except NoContentError as error:
            self._not_kept(wanted, str(error))
            return b""

    def _not_kept(self, wanted: Wanted, why: str) -> None:
        """From now on nothing of a request is kept, which is counted and said."""
        wanted.outdated = True
        self.counters["cache_requests_not_kept"] += 1
        if why not in self._reasons and len(self._reasons) < MOST_REASONS:
            self._reasons.add(why)
            logger.warning(
                "kvik: request %s, and others like it, are not kept in a store: %s",
                wanted.request.request_id, why,
            )  # fmt: skip

    def _not_filled(self, blocks: Collection[int]) -> None:
        """Loads that KV was computed upon have not filled these KV blocks: of the requests that have one,
        nothing is kept. (Those that this side loads for wait, and have computed nothing.)"""
        not_kept = {
            wanted.request.request_id: wanted
            for wanted in self._computing.values()
            if wanted.phase is not Phase.LOADING and not set(blocks).isdisjoint(wanted.blocks)
        }
        owners, saves = self._unsure.without(blocks)
        not_kept |= {wanted.request.request_id: wanted for wanted in owners}
        for save in saves:
            self._let_go(save)
        for wanted in not_kept.values():
            self._not_kept(wanted, "another connector has not loaded KV that it was computed upon")

    def _let_go(self, save: Save) -> None:
        """A save that no rank has been told of is not made."""
        del self._saves[save.key]
        self._held.ended({save.key: self._ranks})

    # Saves, and the end of a request.

    def request_finished(self, request: Any, block_ids: Sequence[int]) -> None:
        """A request has ended: stop what is loading, save what is new."""
        wanted = self._of(request)
        if wanted.phase is Phase.LOADING:
            self._plan.cancels.append(request.request_id)
        elif request.status.name in KEPT:
            # The last token was sampled and is not computed; what was guessed and not taken lies behind it.
            num_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
            dropped = self._save(wanted, block_ids, num_tokens, self._unsure.answered)
            self.counters["cache_dropped_blocks"] += dropped
        self._settle(wanted)
        del self._wanted[request.request_id]
        self._computing.pop(request.request_id, None)
        self._naming.forget(request)

    def _computed(self, steps: Steps) -> None:
        """Save the prompts that this step completes: when it has written them, and its output has come."""
        for one in steps(self._computing):
            wanted = self._computing[one.request_id]
            if not one.starts and not wanted.blocks:
                # Nor is it known whether another connector has filled the blocks that it began with.
                del self._computing[one.request_id]
                self._not_kept(wanted, "it had begun before this server's ranks had said how their KV lies")
                continue
            wanted.blocks = list(one.blocks) if one.starts else [*wanted.blocks, *one.blocks]
            num_tokens = wanted.request.num_prompt_tokens
            if one.computed + one.scheduled >= num_tokens:
                del self._computing[one.request_id]
                # One that has no room now may have it when its request ends.
                self._save(wanted, wanted.blocks, num_tokens, self._unsure.computed)
                self._unsure.begun_upon(wanted, wanted.blocks)
                wanted.blocks = []

    def _save(
        self,
        wanted: Wanted,
        block_ids: Sequence[int],
        num_tokens: int,
        queue: Callable[[Wanted, Save], None],
    ) -> int:
        """Queue the whole blocks of so many tokens, where some are new, and hold them. Gives how many new
        ones there is no room for."""
        links = self._links(wanted, num_tokens, computed=True)
        count = min(len(links or b"") // LINK_BYTES, len(block_ids))
        if not links or count <= wanted.saved:
            return 0
        if not self._has_room(count):
            return count - wanted.saved
        self._numbers += 1
        # An id of a request came in a header, and has no end of a line.
        key = f"\nsave-{self._numbers}"
        # From the first one on: the store may have lost what it had, and then refuses what comes behind.
        save = Save(key, links[: count * LINK_BYTES], list(block_ids[:count]))
        self._held.take(key, save.blocks)
        self._saves[key] = count, self._ranks
        queue(wanted, save)
        wanted.saved = count
        return 0

    def _has_room(self, count: int) -> bool:
        """Whether so many blocks more may be held."""
        holding = sum(blocks for blocks, _ in self._saves.values())
        return len(self._saves) < MOST_SAVES and holding + count <= MOST_HELD * self._held.pool_blocks

    # Every step.

    @property
    def pending(self) -> bool:
        """Whether blocks are held for saves: the engine has to step, to be told that they have ended."""
        return bool(self._saves)

    def take_plan(self, steps: Steps) -> CachePlan:
        """What the ranks shall start with this step; the queue is empty afterwards. `steps`: what the step
        computes of these requests."""
        for wanted in list(self._unnamed.values()):
            self._ask(wanted)
        self._tell_namespaces()
        for wanted, save in self._unsure.certain():
            self._plan.saves.append(save)
            if self._ledger is not None:
                self._ledger.saving(save.key, wanted.request, save.links, self._numbers)
        plan, self._plan = self._plan, CachePlan()
        if self._computing:
            self._computed(steps)  # saved with a later plan
        return plan

    def _tell_namespaces(self) -> None:
        """Say what ranks' blocks are of, once it is known and when it changes."""
        try:
            namespace = self._naming.namespace()
            if namespace is not None and namespace != self._told:
                self._told = namespace
                self._plan.namespaces = [self._naming.of_rank(rank) for rank in range(self._ranks)]
        except NoContentError:
            return  # said with the first request that is not kept

    def reset(self) -> bool:
        """Forget everything: who says so may have changed the weights in place, so from now on this server
        keeps to itself. False while a load is on its way, which would bring what is to be forgotten."""
        if any(wanted.phase is Phase.LOADING for wanted in self._wanted.values()):
            return False
        self._naming.part()
        for wanted in self._wanted.values():
            wanted.outdated = True
            self._settle(wanted)
        self._plan.lookups.clear()
        for save in self._unsure.clear():
            self._let_go(save)
        if self._ledger is not None:
            self._ledger.reset()
        return True

    def step_began(self, scheduled: Collection[int]) -> None:
        """The engine begins a step, which computes so many tokens of each request."""
        self._unsure.began()
        if self._steps is not None:
            self._steps.began(scheduled)

    def step_ended(self) -> None:
        """The oldest of the engine's steps has ended, and its output was told by `update_output`, if any."""
        self._unsure.ended()
        if self._steps is not None:
            self._steps.ended()

    def take_events(self) -> list[Event]:
        """What has come into the store and gone, since the last call."""
        if self._ledger is None:
            return []
        if self._ledger.untold:
            self.counters["cache_untold_blocks"] += self._ledger.untold
            self._ledger.untold = 0
        return self._ledger.take()

    def take_counters(self) -> Counter[str]:
        """Counts since the last call."""
        counters, self.counters = self.counters, Counter()
        return counters
