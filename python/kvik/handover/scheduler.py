"""The half in a serving engine's scheduler process: decides, moves nothing, never waits.

Prefill side: a finished request's blocks are kept, and its `kv_transfer_params` are composed from ticket
templates that the ranks gave at start plus fresh random grant ids. The next engine step carries the ids to
the workers, which issue the grants; a reader that is faster than that step waits at the owner within its
deadline.

Decode side: one `Pull` a request, in one of three phases::

    OFFERED   the parameters look usable; nothing was taken yet
    LOADING   blocks are allocated, the workers read into them
    SETTLED   loaded, failed, refused, or not needed; the engine computes whatever is missing

`get_num_new_matched_tokens` may be asked many times and only looks (the content is computed once and kept).
An offer that is not taken is released, so that the prefill server gets its blocks back before their expiry.

Whoever sends the parameters is not trusted: they only say whom to ask. What is asked for, and what is
released, is the content of the request's own prompt, and the owner of the pages refuses anything else. The
digest in the parameters is compared only because a difference can be told so before anything is asked. A
request without the right content (another prompt, embeddings, another namespace, parameters that cannot be
read) therefore releases nothing: such an offer ends by its expiry, or is taken by the request it is for.

Where the parameters have the seed of a stream (`streaming.py`), both sides begin at once: the prefill side
issues grants as it computes (`sending.py`), and the decode side's load is of many parts that wait for theirs.

Grants are issued, and ends noticed, with engine steps. vLLM makes them without help, with pauses of 1 ms,
while a finished request's blocks are held (`has_finished_requests`, the same in 0.28 to 0.33) and while a
load is awaited, without being asked to (`has_pending_push_work`). What is done about the cost of that
stepping, and where vLLM is asked, is in `holding.py`.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvik.handover import digest, protocol, streaming
from kvik.handover.adapters import Adapters
from kvik.handover.contents import Contents
from kvik.handover.holding import HeldBlocks
from kvik.handover.items import Items, by_name
from kvik.handover.mapping import RankMap, map_ranks
from kvik.handover.native import Native
from kvik.handover.protocol import (
    LINK_BYTES,
    GroupLoad,
    GroupSend,
    Handover,
    KvShape,
    Load,
    Own,
    RankHello,
    RankTicket,
    RefusedError,
    Release,
    Send,
    StepPlan,
    Unwanted,
    params_of,
    server_shapes,
)
from kvik.handover.pulls import Phase, Pull
from kvik.handover.reach import beyond_reach, usable
from kvik.handover.report import LoadRecord, ReportFile, in_log
from kvik.handover.sending import Sendings, Steps
from kvik.handover.streaming import MAX_OPEN_PARTS

logger = logging.getLogger("kvik.handover")

HANDED_OVER = frozenset({"FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"})


@dataclass(frozen=True)
class Identity:
    """What this server is: its id, what its KV depends on besides tokens and shape, its worker ranks, and its
    roles. `null_block` stands in a request's KV blocks for one that its group does not keep. `streams`: its
    adapter tells what each step computes, so that it can hand over in parts."""

    engine_id: str
    model: Mapping[str, str]
    ranks: int
    is_producer: bool
    is_consumer: bool
    null_block: int | None = None
    streams: bool = False


class SchedulerSide:
    """Scheduler-process half of a server. Its methods have the names and arguments of vLLM's connector
    hooks, which other engines' adapters call at the same points of a request's life."""

    def __init__(
        self,
        native: Native,
        identity: Identity,
        expiry_s: float,
        held: HeldBlocks,
        report: ReportFile,
        items: Items | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self._native = native
        self._identity = identity
        self.held = held
        self._expiry_s = expiry_s
        self._report = report
        self._contents = Contents(native, identity.model, items or Items(by_name), adapters or Adapters())
        self._sendings: Sendings | None = None
        self._unbegun: set[str] = set()
        self._ranks: dict[int, RankHello] = {}
        self._shapes: tuple[KvShape, ...] = ()
        self._parts: list[dict[int, bytes]] = []
        self._pulls: dict[str, Pull] = {}
        self._plan = StepPlan()
        self.counters: Counter[str] = Counter()

    # Start.

    @property
    def has_ranks(self) -> bool:
        """Whether the worker ranks have said what they are; until then nothing is handed over."""
        return bool(self._ranks)

    def set_ranks(self, hellos: Mapping[int, RankHello]) -> None:
        """Take what every worker rank said at start, by rank. `ValueError` when one is missing or unlike."""
        shapes = server_shapes(hellos, self._identity.ranks)
        self._ranks, self._shapes = dict(hellos), shapes
        self._parts = [{rank: digest.part_bytes(shape, shape, rank) for rank in hellos} for shape in shapes]
        self._contents.set_shapes(shapes)
        if (
            self._identity.is_producer
            and self._identity.streams
            and len(shapes) == 1
            and not shapes[0].window
        ):
            self._sendings = Sendings(self.held, shapes[0], sorted(hellos), self._template())
        logger.info(
            "kvik: %d rank(s), KV %s, namespace %s of %s", len(hellos), _said(shapes),
            self._contents.namespace_hex[:16], dict(self._identity.model),
        )  # fmt: skip

    def _template(self) -> dict[str, Any]:
        model, engine_id = self._identity.model.get("model", ""), self._identity.engine_id
        namespace = self._contents.namespace_hex
        return streaming.template_of(engine_id, self._ranks, self._own_shapes()[0], namespace, model)

    @property
    def loading(self) -> bool:
        """Whether a load is on its way."""
        return any(pull.phase is Phase.LOADING for pull in self._pulls.values())

    def reset(self) -> None:
        """From now on the model may be another one, as of `Contents`. A load that is on its way would bring
        KV of the one before."""
        self._contents.reset()
        for pull in self._pulls.values():
            pull.ranks = pull.own = None  # compared anew
        if self._sendings is not None:
            self._sendings.template = self._template()
        logger.info("kvik: reset, the namespace is %s from now on", self._contents.namespace_hex[:16])

    # Decode side.

    def on_new_request(self, request: Any) -> None:
        """Read the offer of an arriving request, so that it can be released even if it is never scheduled."""
        self._contents.arrived(request)
        self._pull_of(request)
        self._contents.settled(request)  # its adapter's files are read from now on
        self._begin_sending(request)

    def is_sending(self, request_id: str) -> bool:
        """Whether this request is handed over in parts, and so has to be computed here."""
        return self._sendings is not None and request_id in self._sendings

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many prompt tokens beyond the local hit a load would bring; (0, False): compute them. None: ask
        again, an image or adapter is being read, or as many streams as may be are on their way."""
        if request.request_id in self._unbegun and not self._begin_sending(request):
            return None, False
        if self._sendings is not None:
            self._sendings.found(request.request_id, num_computed_tokens)
        pull = self._pull_of(request)
        if pull is None or pull.handover is None or pull.phase is not Phase.OFFERED:
            return 0, False
        # Some requests are to have every token computed (log probabilities of the prompt).
        if getattr(request, "skip_reading_prefix_cache", False):
            return 0, False
        if pull.ranks is None and not self._contents.settled(request):
            return None, False
        if self._verify(request, pull, pull.handover) is None:
            return 0, False
        offered, shapes = pull.handover.num_tokens, self._own_shapes()
        taken = usable(shapes, offered, offered == request.num_tokens)
        # The last prompt token is computed anyway, to sample from it: a load of it alone saves nothing.
        gain = min(taken, request.num_tokens - 1) - num_computed_tokens
        if gain <= 0 or any(num_computed_tokens % shape.block_tokens for shape in shapes):
            return 0, False
        if (gone := beyond_reach(shapes, pull.handover, taken)) is not None:
            self._refused(request.request_id, pull, gone)
            self._release_all(request, pull)
            return 0, False
        loading = sum(other.parts for other in self._pulls.values() if other.phase is Phase.LOADING)
        if pull.stream is not None and 0 < loading > MAX_OPEN_PARTS - pull.stream.most_parts(pull.handover):
            return None, False
        pull.local_tokens = num_computed_tokens
        return taken - num_computed_tokens, True

    def update_state_after_alloc(
        self, request: Any, block_ids: Sequence[Sequence[int]], external: int
    ) -> None:
        """Blocks are allocated: start the load, or give the offer back when nothing of it is used.

        An engine may call a second time with 0 once a load is there, as vLLM does; the phase tells the two
        zeros apart.
        """
        pull = self._pulls.get(request.request_id)
        if pull is None or pull.phase is not Phase.OFFERED or pull.handover is None:
            return
        if external == 0 or pull.ranks is None or pull.own is None:
            pull.phase = Phase.SETTLED
            self.counters["not_needed"] += 1
            self._release_all(request, pull, self._expiry_s)
            return
        pull.phase = Phase.LOADING
        pull.asked_at = time.monotonic()
        load = Load(request.request_id, pull.handover.remote_request_id, [])
        end = pull.local_tokens + external  # the engine may take fewer than it was offered
        if pull.stream is not None:
            self._stream(pull, load, block_ids[0], end)
            return
        for group, (ranks, own) in enumerate(zip(pull.ranks, pull.own, strict=True)):
            loaded = self._load_of(group, ranks, own, pull.handover, block_ids[group], pull.local_tokens, end)
            load.groups.append(loaded)
            copies = {rank: ticket for rank, ticket in loaded.tickets.items() if not ranks.readers[rank]}
            self._release(request, own, copies)
        self._plan.loads.append(load)

    def _stream(self, pull: Pull, load: Load, blocks: Sequence[int], end: int) -> None:
        """Queue the load of a stream, up to token `end`; parts that this side has already, or does not take,
        are given back when it has ended."""
        load.deadline = self._expiry_s
        for part, wanted in self._parts_of(pull, blocks, (pull.local_tokens, end)):
            if wanted:
                load.groups.append(part)
            unread = {
                rank: text for rank, text in part.tickets.items() if not (wanted and part.readers[rank])
            }
            if unread:
                load.unread.append(Unwanted(unread, part.own))
        pull.parts = len(load.groups)
        self._plan.loads.append(load)

    def _parts_of(
        self, pull: Pull, blocks: Sequence[int] = (), tokens: tuple[int, int] = (0, 0)
    ) -> Iterator[tuple[GroupLoad, bool]]:
        """The parts of a stream that is checked; wanted are those with some of these tokens (from, to)."""
        if pull.stream is None or pull.handover is None or not pull.ranks or not pull.own:
            return iter(())
        model = self._own_shapes()[0]
        return streaming.part_loads(
            self._native, pull.handover, pull.stream, pull.ranks[0], pull.own[0], model,
            blocks=blocks, block_tokens=model.block_tokens, tokens=tokens,
        )  # fmt: skip

    def _load_of(
        self,
        group: int,
        ranks: RankMap,
        own: Own,
        offer: Handover,
        blocks: Sequence[int],
        start: int,
        end: int,
    ) -> GroupLoad:
        """What a load of these tokens is in one group, without KV blocks that are not kept."""
        tokens = self._own_shapes()[group].block_tokens
        last = -(-end // tokens)
        first = self._first_kept(blocks, start // tokens, last)
        start = max(start, first * tokens)
        return GroupLoad(
            group=group,
            local_blocks=list(blocks[first:last]),
            local=ranks.local_pages(blocks, start, end),
            remote=ranks.remote_positions(start, end, offer.firsts[group]),
            reads=dict(enumerate(ranks.reads)),
            tickets=offer.by_rank(group),
            readers=dict(enumerate(ranks.readers)),
            own=own,
        )

    def _first_kept(self, blocks: Sequence[int], first: int, end: int) -> int:
        """The place of the first of these KV blocks behind which none is missing; `end` if there is none."""
        null = self._identity.null_block
        missing = [place for place, block in enumerate(blocks[first:end], first) if block == null]
        return missing[-1] + 1 if missing else first

    def update_output(self, output: Any, parked_ends: Mapping[str, int], failures: Mapping[str, str]) -> None:
        """What all ranks have reported: ended loads (also failed ones), ended sends, ended parked sends; and
        what any rank has: why loads have failed there, by request id."""
        self.held.sent(output.finished_sending or ())
        self.held.ended(parked_ends)
        for request_id, reason in failures.items():
            if request_id in self._pulls:
                self._pulls[request_id].recomputed = reason
        for request_id in output.finished_recving or ():
            pull = self._pulls.get(request_id)
            if pull is not None:
                pull.phase = Phase.SETTLED
                if pull.asked_at is not None:
                    pull.waited_s = time.monotonic() - pull.asked_at

    def not_filled(self, blocks: Collection[int]) -> None:
        """As of `Contents`."""
        self._contents.not_filled(blocks)

    # Prefill side, and the end of a request on either side.

    def request_finished(
        self, request: Any, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended. True and parameters: its blocks stay until every rank reports it as sent."""
        ended = self._ended(request, block_ids)
        self._contents.forget(request)
        return ended

    def _ended(self, request: Any, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        note = self._drop_pull(request)
        self._unbegun.discard(request.request_id)
        if self._sendings is not None and request.request_id in self._sendings:
            ended = self._sendings.end(request.request_id)
            if ended.whole and request.status.name in HANDED_OVER:
                self.counters["streamed"] += 1
                return False, {"kvik": self._sendings.answer()}
            if ended.sending.planned:
                self._plan.revokes.append(request.request_id)
        if not self._identity.is_producer or not params_of(request).get("do_remote_decode"):
            return False, None if note is None else {"kvik": note}
        num_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        if request.status.name not in HANDED_OVER or num_tokens < 1 or not self._ranks:
            logger.info(
                "kvik: request %s ended as %s: nothing to hand over", request.request_id, request.status.name
            )
            return False, None
        try:
            chains = self._contents.chains(request, num_tokens, self._own_shapes())
            self._contents.check(request, {block for group in block_ids for block in group})
        except RefusedError as refused:
            logger.warning("kvik: request %s is not handed over: %s", request.request_id, refused)
            return False, None
        groups, firsts = [], []
        for shape, chain, blocks, parts in zip(
            self._own_shapes(), chains, block_ids, self._parts, strict=True
        ):
            end = -(-num_tokens // shape.block_tokens)
            first = self._first_kept(blocks, 0, end)
            # An id a rank, from the system's random source: knowing one opens nothing at another rank.
            grants = {rank: secrets.token_hex(16) for rank in self._ranks}
            groups.append(GroupSend(list(blocks[first:end]), grants, chain[first * LINK_BYTES :], parts))
            firsts.append(first)
        if not all(group.blocks for group in groups):
            logger.info("kvik: request %s: its last KV block is not kept", request.request_id)
            return False, None
        return True, self._offer(request, num_tokens, digest.links(chains[0])[-1], groups, firsts)

    def _begin_sending(self, request: Any) -> bool:
        """Hand a request over in parts from its first step on, where its parameters say so; where that cannot
        be, it is offered when it has ended. False: not yet, its adapter is being read."""
        if self._sendings is None or request.request_id in self._sendings:
            return True
        if streaming.asks(params_of(request)) and not self._contents.adapters.settled(request):
            self._unbegun.add(request.request_id)
            return False
        self._unbegun.discard(request.request_id)
        try:
            self._sendings.begin(
                request,
                lambda: self._contents.chains(request, request.num_prompt_tokens, self._own_shapes())[0],
                lambda: self._contents.check(request),
            )
        except RefusedError as refused:
            self.counters[f"not_streamed_{refused.code}"] += 1
            logger.info("kvik: request %s is not handed over in parts: %s", request.request_id, refused)
        return True

    def _offer(
        self, request: Any, num_tokens: int, content: bytes, groups: list[GroupSend], firsts: list[int]
    ) -> dict[str, Any]:
        """Queue the grants of one finished prefill and compose its parameters."""
        tickets = tuple(
            RankTicket(
                group, hello.place.tp, hello.place.pp, hello.place.dp,
                self._compose(hello.ticket_templates[group], send.grants[rank]),
            )
            for group, send in enumerate(groups)
            for rank, hello in self._ranks.items()
        )  # fmt: skip
        self._plan.sends.append(Send(request.request_id, groups))
        held = [block for send in groups for block in send.blocks]
        self.held.hold(request.request_id, held)
        self.counters["offered"] += 1
        logger.info(
            "kvik: request %s: %d tokens in %d KV blocks offered, grant %s",
            request.request_id,
            num_tokens,
            len(held),
            groups[0].grants[0],
        )
        params = Handover(
            remote_request_id=request.request_id,
            remote_engine_id=self._identity.engine_id,
            address=self._ranks[0].address,
            num_tokens=num_tokens,
            tickets=tickets,
            digest=content.hex(),
            namespace=self._contents.namespace_hex,
            model=self._identity.model.get("model", ""),
            shapes=self._own_shapes(),
            firsts=tuple(firsts),
            expires_in=self._expiry_s,
        ).encode([send.blocks for send in groups])
        if self._sendings is not None and streaming.asks(params_of(request)):
            params["kvik"] |= self._sendings.answer()
        return params

    def _compose(self, template: str, grant_id: str) -> str:
        return str(self._native.Ticket(template).with_grant(grant_id, self._expiry_s))

    # Every step.

    def take_plan(self, steps: Steps | None = None, loading: bool = False) -> StepPlan:
        """What the workers shall start with this step; the queue is empty afterwards. `steps`: what the step
        computes, of an adapter whose server streams; `loading` as of `Sendings.plan`."""
        plan, self._plan = self._plan, StepPlan()
        if self._sendings is not None and steps is not None:
            plan.segments = self._sendings.plan(steps, loading)
        plan.parks = self.held.park_overdue()
        return plan

    def take_counters(self) -> Counter[str]:
        """Counts since the last call."""
        counters, self.counters = self.counters, Counter()
        return counters

    def _own_shapes(self) -> tuple[KvShape, ...]:
        if not self._shapes:
            raise RuntimeError("kvik: the worker ranks have not said how their KV lies")
        return self._shapes

    # Offers.

    def _pull_of(self, request: Any) -> Pull | None:
        """The pull of a request, read from its parameters at first sight; None without an offer."""
        request_id: str = request.request_id
        pull = self._pulls.get(request_id)
        params = params_of(request)
        if pull is None and self._identity.is_consumer and params.get("do_remote_prefill"):
            try:
                asked = streaming.asked(params)
                if asked is None or asked.seed is None:
                    pull = Pull(protocol.decode(params))
                else:
                    num_tokens = request.num_prompt_tokens
                    offer, stream = streaming.offered(self._native, asked, num_tokens, self._expiry_s)
                    pull = Pull(offer, stream=stream)
            except RefusedError as refused:
                pull = Pull(None)
                self._refused(request_id, pull, refused, str(params.get("remote_request_id"))[:1024])
            self._pulls[request_id] = pull
        return pull

    def _verify(self, request: Any, pull: Pull, offer: Handover) -> list[RankMap] | None:
        """Compare the offer with this server and this request, once. None: refused."""
        if pull.ranks is None:
            try:
                pull.ranks, pull.own = self._check(request, offer, pull.stream is not None)
            except RefusedError as refused:
                self._refused(request.request_id, pull, refused)
                self._release_all(request, pull)
        return pull.ranks

    def _check(self, request: Any, offer: Handover, in_parts: bool) -> tuple[list[RankMap], list[Own]]:
        if not self._ranks:
            raise RefusedError("not_ready", "this server's ranks have not registered their KV memory")
        ours = self._own_shapes()
        if len(offer.shapes) != len(ours):
            raise RefusedError(
                "shape_mismatch",
                f"unlike groups of layers: prefill has {_said(offer.shapes)}, decode has {_said(ours)}",
            )
        ranks = [map_ranks(theirs, own) for theirs, own in zip(offer.shapes, ours, strict=True)]
        return ranks, self._own(request, offer, in_parts)

    def _own(self, request: Any, offer: Handover, in_parts: bool = False) -> list[Own]:
        """What the request has a right to, in the KV blocks and among the ranks that the offer speaks of.
        `in_parts`: the offer came before anything was computed, and says of no content.

        Computed from the request's own prompt and this server's own model; `RefusedError` where that is not
        what the offer says of itself, or its groups are not divided alike.
        """
        offer.check_ranks()
        if offer.namespace != self._contents.namespace_hex:
            raise RefusedError(
                "namespace_mismatch",
                f"prefill computed namespace {offer.namespace[:16]} (model {offer.model!r}), this server has "
                f"{self._contents.namespace_hex[:16]} (model {self._identity.model.get('model')!r}); each "
                "server's log says at its start what that is made of",
            )
        if offer.num_tokens > request.num_prompt_tokens:
            raise RefusedError(
                "digest_mismatch",
                f"the offer covers {offer.num_tokens} tokens, the prompt has {request.num_prompt_tokens}",
            )
        # A link is of one KV block of the side that has the grant.
        chains = self._contents.chains(request, offer.num_tokens, offer.shapes)
        content = digest.links(chains[0])[-1].hex()
        if content != offer.digest and not in_parts:
            raise RefusedError(
                "digest_mismatch",
                f"content digest of the first {offer.num_tokens} tokens: prefill {offer.digest[:16]}, "
                f"own prompt {content[:16]}",
            )
        return [
            Own(
                chain[first * LINK_BYTES :],
                {rank: digest.part_bytes(model, theirs, rank) for rank in sorted(offer.by_rank(group))},
            )
            for group, (chain, first, model, theirs) in enumerate(
                zip(chains, offer.firsts, self._own_shapes(), offer.shapes, strict=True)
            )
        ]

    def _refused(
        self, request_id: str, pull: Pull, refused: RefusedError, remote_request_id: str | None = None
    ) -> None:
        """Say, count and record that an offer is not used. remote_request_id: of one that cannot be read."""
        pull.phase, pull.recomputed = Phase.SETTLED, refused.code
        if pull.handover is not None:
            remote_request_id = pull.handover.remote_request_id
        logger.warning(
            "kvik: request %s, with KV of prefill's request %s, is recomputed (%s): %s", request_id,
            in_log(remote_request_id or "?"), refused.code, in_log(str(refused)),
        )  # fmt: skip
        self.counters[f"recomputed_{refused.code}"] += 1
        self._report.write(LoadRecord(request_id, remote_request_id, "recomputed", refused.code, None))

    def _release_all(self, request: Any, pull: Pull, deadline: float | None = None) -> None:
        """Give an offer back, where the request has a right to its content."""
        offer, owns = pull.handover, pull.own
        if offer is None or not self._ranks:
            return
        if pull.stream is not None:
            if pull.ranks is None:  # it has ended before the engine has asked for it
                try:
                    pull.ranks, pull.own = self._check(request, offer, True)
                except RefusedError:
                    return
            parts = [Unwanted(part.tickets, part.own) for part, _ in self._parts_of(pull)]
            if parts:
                self._plan.releases.append(Release(request.request_id, parts, deadline))
            return
        if owns is None and len(offer.shapes) == len(self._own_shapes()):
            try:
                owns = self._own(request, offer)
            except RefusedError:
                return
        for group, own in enumerate(owns or ()):
            self._release(request, own, offer.by_rank(group))

    def _release(self, request: Any, own: Own, tickets: Mapping[int, str]) -> None:
        """Give tickets of one group back."""
        mine = {rank: ticket for rank, ticket in tickets.items() if rank in own.parts}
        if mine:
            self._plan.releases.append(Release(request.request_id, [Unwanted(mine, own)]))

    def _drop_pull(self, request: Any) -> dict[str, Any] | None:
        """The request is over: give back what was never taken, stop what is still loading. Returns what its
        answer says of that (`Pull.note`)."""
        pull = self._pull_of(request)
        if pull is None:
            return None
        del self._pulls[request.request_id]
        if pull.phase is Phase.OFFERED and pull.handover is not None:
            self.counters["abandoned"] += 1
            self._release_all(request, pull)
        elif pull.phase is Phase.LOADING:
            self._plan.cancels.append(request.request_id)
        return pull.note()


def _said(shapes: Sequence[KvShape]) -> str:
    """Shapes for a person."""
    return " ".join(f"[{shape}]" for shape in shapes)
