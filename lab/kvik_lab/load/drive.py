"""Sends a load, and gives what its client saw."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import numpy as np

from kvik_lab.errors import LabError
from kvik_lab.load.answer import Answer, understand
from kvik_lab.load.arrivals import due_times
from kvik_lab.load.bodies import Bodies, Form, Slot
from kvik_lab.load.http import Exchange, Pool
from kvik_lab.load.prompts import Made, Maker
from kvik_lab.load.spec import Closed, Constant, Gamma, LoadSpec, Poisson, Rounds, Trace, Turns, UntilSteady
from kvik_lab.load.timer import Alarm
from kvik_lab.load.tokens import Content, open_tokenizer
from kvik_lab.load.traces import Replay
from kvik_lab.load.watch import Watch
from kvik_lab.records import Phase, Request, WarmUp
from kvik_lab.records.measures import PER_REQUEST

LEAD_S = 0.05
"""From the end of the preparations to the zero of an open load, so that its first request is not late."""
_UNREAD_BYTES = 64 << 20
_ASK_SECONDS = 30.0
_PROBE_TOKENS = 16


@dataclass(frozen=True)
class Planned:
    """A request that is to be sent. `due`: seconds from the load's beginning; None: when another has
    ended."""

    iteration: int
    phase: Phase
    prompt: Made
    output: int
    slot: Slot | None
    due: float | None = None
    conversation: int | None = None
    turn: int | None = None


@dataclass
class Sent:
    """One that was sent, and what came back. `due` in ns of the monotonic clock."""

    planned: Planned
    due: int | None
    exchange: Exchange
    answer: Answer | None = None


class Driver:
    """One load on one server. `opened` makes it; `run` sends a part of it; `requests` is what was seen."""

    def __init__(self, spec: LoadSpec, pool: Pool, model: str, watch: Watch) -> None:
        self.spec = spec
        self.zero = time.monotonic_ns()
        self._watch = watch
        self._overhead = spec.prompt.overhead or 0
        self._pool = pool
        self._form = Form(spec, model)
        self._tokenizer = open_tokenizer(spec.prompt.by)
        self._maker = Maker(spec.prompt, self._tokenizer, spec.seed)
        self._draw = np.random.default_rng([spec.seed, 0])
        self._bodies = Bodies()
        self._room = asyncio.Semaphore(spec.most_in_flight)
        self._mark = secrets.token_hex(4)
        self.sent: list[Sent] = []
        self._unread = 0
        self._made = 0

    # Preparing.

    def plan(self, count: int, phase: Phase, dues: Sequence[float] | None = None) -> list[Planned]:
        """The next requests, their bodies made."""
        if self.spec.arrival.kind == "trace" and phase != "warmup":
            return self._replayed(self.spec.arrival, count)
        outputs, length = self.spec.prompt.output, self.spec.prompt.tokens - self._overhead
        if length < 1:
            raise LabError(
                f"prompt.tokens is {self.spec.prompt.tokens}, and the server adds {self._overhead} to each "
                "prompt; state more"
            )
        made = []
        for at in range(count):
            due = None if dues is None else float(dues[at])
            made.append(self._planned(self._maker.make(length), outputs, phase, due))
        return made

    def _replayed(self, trace: Trace, count: int) -> list[Planned]:
        replay = Replay(trace, self._tokenizer, self.spec.seed)
        return [self._planned(one.prompt, one.output, "measure", one.due) for one in replay.requests(count)]

    def _planned(self, prompt: Made, output: int, phase: Phase, due: float | None) -> Planned:
        slot = self._bodies.put(self._form.write(prompt.content, output))
        number, self._made = self._made, self._made + 1
        return Planned(number, phase, prompt, output, slot, due)

    # Sending.

    async def warm_up(self) -> WarmUp:
        """The requests before those that count, one by one; of chat first one that tells what its template
        adds."""
        if self.spec.endpoint == "chat" and self.spec.prompt.overhead is None:
            await self._learn_overhead()
        asked = self.spec.warmup
        if isinstance(asked, UntilSteady):
            return await self._until_steady(asked)
        plan, began = self.plan(asked, "warmup"), time.monotonic()
        for planned in plan:
            await self._one(planned, None)
        return WarmUp(rule="count", requests=asked, seconds=time.monotonic() - began)

    async def _until_steady(self, asked: UntilSteady) -> WarmUp:
        """Until their times keep a level, or as many as are allowed."""
        # scipy takes half a second, which a warm-up by count does without.
        from kvik_lab.infer.trailing import level_from

        values: list[float | None] = []
        level: int | None = None
        # All that may be sent are made, so that what is measured is the same however many were.
        plan, began = self.plan(asked.max, "warmup"), time.monotonic()
        for planned in plan:
            seen = self.record(await self._one(planned, None))
            values.append(PER_REQUEST[asked.metric](seen) if seen.ok else None)
            level = level_from(values, asked.min)
            if level is not None:
                break
        seconds = time.monotonic() - began
        return WarmUp(
            rule="changepoint", requests=len(values), seconds=seconds, metric=asked.metric, level_from=level
        )

    async def _learn_overhead(self) -> None:
        """Tokens that the server adds to a prompt, by a short one. Raises `LabError` where it does not
        count."""
        planned = self._planned(self._maker.make(_PROBE_TOKENS), 1, "warmup", None)
        answer = read(await self._one(planned, None))
        if answer.prompt_tokens is None or answer.prompt_tokens < _PROBE_TOKENS:
            raise LabError(
                f"{self.spec.url}: how many tokens its chat template adds was not learnt: "
                f"{answer.error or 'no usage in its answer'}; state prompt.overhead"
            )
        self._overhead = answer.prompt_tokens - _PROBE_TOKENS

    async def run(self) -> None:
        """The load that the specification states (but a search: see `search`)."""
        arrival = self.spec.arrival
        if self.spec.turns is not None:
            await self._conversations(self.spec.turns)
        elif arrival.kind == "closed":
            await self._closed(self.plan(self.spec.requests, "measure"), arrival)
        elif arrival.kind == "rounds":
            await self._rounds(self.plan(self.spec.requests, "measure"), arrival)
        elif arrival.kind == "trace":
            await self.open_loop(self.plan(self.spec.requests, "measure"))
        else:
            await self.open_loop(self.plan(self.spec.requests, "measure", self.dues(arrival)))

    def dues(self, arrival: Constant | Poisson | Gamma, count: int | None = None) -> list[float]:
        """When as many requests as the specification says are due, in seconds."""
        return [float(due) for due in due_times(arrival, count or self.spec.requests, self._draw)]

    async def _closed(self, plan: list[Planned], arrival: Closed) -> None:
        rest = iter(plan)

        async def user() -> None:
            for planned in rest:
                await self._one(planned, None)
                if arrival.pause:
                    await asyncio.sleep(arrival.pause)

        with self._watch.timed():
            await asyncio.gather(*(user() for _ in range(min(arrival.concurrency, len(plan)))))

    async def _rounds(self, plan: list[Planned], arrival: Rounds) -> None:
        with self._watch.timed():
            for at in range(0, len(plan), arrival.concurrency):
                if at and arrival.pause:
                    await asyncio.sleep(arrival.pause)
                due = time.monotonic_ns()
                await asyncio.gather(*(self._one(one, due) for one in plan[at : at + arrival.concurrency]))

    async def open_loop(self, plan: Iterable[Planned]) -> list[Sent]:
        """Each when it is due, whatever becomes of the others; returns when all have ended."""
        running = []
        with self._watch.timed():
            async with _alarm() as alarm, asyncio.TaskGroup() as tasks:
                begin = time.monotonic_ns() + int(LEAD_S * 1e9)
                for planned in plan:
                    due = begin + int((planned.due or 0.0) * 1e9)
                    await alarm.until(due)
                    running.append(tasks.create_task(self._one(planned, due)))
        return [task.result() for task in running]

    async def _one(self, planned: Planned, due: int | None, body: bytes | None = None) -> Sent:
        """Send one and keep what came; read it later, unless so much is unread."""
        async with self._room:
            if body is None:
                if planned.slot is None:
                    raise AssertionError("a request without a body")
                body = self._bodies.get(planned.slot)
            exchange = await self._pool.exchange(
                "POST", self._form.path, body, f"{self._mark}-{planned.iteration}", self.spec.timeout
            )
        sent = Sent(planned, due, exchange)
        self.sent.append(sent)
        self._unread += sum(len(piece) for _, piece in exchange.pieces)
        if self._unread > _UNREAD_BYTES:
            self._read()
        return sent

    def _read(self) -> None:
        for sent in self.sent:
            read(sent)
        self._unread = 0

    # Conversations.

    async def _conversations(self, turns: Turns) -> None:
        """`requests` conversations, begun as their arrivals say. Raises `LabError`, see `_next`."""
        spec, arrival = self.spec, self.spec.arrival
        if arrival.kind in ("constant", "poisson", "gamma"):
            plan = self.plan(spec.requests, "measure", self.dues(arrival))
            with self._watch.timed():
                await self._begun_when_due(plan, turns)
            return
        if arrival.kind != "closed":
            raise LabError(f"turns do not go with {arrival.kind} arrivals")
        rest = iter(enumerate(self.plan(spec.requests, "measure")))

        async def user() -> None:
            for number, planned in rest:
                await self._conversation(number, planned, None, turns)
                await asyncio.sleep(arrival.pause)

        with self._watch.timed():
            await asyncio.gather(*(user() for _ in range(min(arrival.concurrency, spec.requests))))

    async def _begun_when_due(self, plan: list[Planned], turns: Turns) -> None:
        try:
            async with _alarm() as alarm, asyncio.TaskGroup() as tasks:
                begin = time.monotonic_ns() + int(LEAD_S * 1e9)
                for number, planned in enumerate(plan):
                    due = begin + int((planned.due or 0.0) * 1e9)
                    await alarm.until(due)
                    tasks.create_task(self._conversation(number, planned, due, turns))
        except ExceptionGroup as group:
            refused, others = group.split(LabError)
            if refused is None or others is not None:
                raise
            raise refused.exceptions[0] from None

    async def _conversation(self, number: int, first: Planned, due: int | None, turns: Turns) -> None:
        """One after another; ends early where a turn fails, since the next would not be what was stated."""
        planned = replace(first, conversation=number, turn=0)
        body: bytes | None = None
        said: tuple[tuple[str, str], ...] = ()
        for turn in range(turns.turns):
            sent = await self._one(planned, due, body)
            answer = read(sent)
            if answer.error is not None or turn + 1 == turns.turns:
                return
            planned, body, said = self._next(planned, answer, said, turns)
            async with _alarm() as alarm:
                # That the answer was read and this turn made took time, which is not the server's.
                due = max((sent.exchange.ended or 0) + int(turns.pause * 1e9), time.monotonic_ns())
                await alarm.until(due)

    def _next(
        self, last: Planned, answer: Answer, said: tuple[tuple[str, str], ...], turns: Turns
    ) -> tuple[Planned, bytes, tuple[tuple[str, str], ...]]:
        """The next turn: all that was said, and something new. Raises `LabError` where what was answered
        cannot be sent again."""
        new = self._maker.more(turns.new_tokens)
        content: Content
        if self.spec.endpoint == "chat":
            said = (*said, ("user", str(last.prompt.content)), ("assistant", answer.text))
            # What a template makes of several messages, the server knows; its count is in the answer.
            before = (answer.prompt_tokens or 0) + (answer.output_tokens or len(answer.tokens))
            prompt = Made(new, None, before)
            body = self._form.write(new, last.output, said)
        elif isinstance(last.prompt.content, str):
            content = f"{last.prompt.content}{answer.text}{new}"
            before = self._tokenizer.count(f"{last.prompt.content}{answer.text}")
            prompt = Made(content, self._tokenizer.count(content), before)
            body = self._form.write(content, last.output)
        else:
            if len(answer.ids) != len(answer.tokens):
                raise LabError(
                    "turns by ids need the ids of the answers, which this server does not give "
                    "(`return_token_ids`); state prompt.by with kind bytes or hf"
                )
            ids = (*last.prompt.content, *answer.ids)
            content = (*ids, *(one for one in new if isinstance(one, int)))
            prompt = Made(content, len(content), len(ids))
            body = self._form.write(content, last.output)
        number, self._made = self._made, self._made + 1
        return (
            replace(last, iteration=number, prompt=prompt, slot=None, due=None, turn=(last.turn or 0) + 1),
            body,
            said,
        )

    # What was seen.

    def requests(self) -> tuple[Request, ...]:
        """All that were sent, in the order in which they were planned."""
        self._read()
        ordered = sorted(self.sent, key=lambda sent: sent.planned.iteration)
        return tuple(self.record(sent) for sent in ordered)

    def repeated_share(self) -> float:
        """Share of all prompt tokens sent that an earlier prompt of this load began with, too."""
        tokens = sum(self._tokens(sent.planned) or read(sent).prompt_tokens or 0 for sent in self.sent)
        repeated = sum(sent.planned.prompt.repeated for sent in self.sent)
        return repeated / tokens if tokens else 0.0

    def record(self, sent: Sent) -> Request:
        """One request as a record has it."""
        planned, exchange, answer = sent.planned, sent.exchange, read(sent)
        return Request(
            id=f"{self._mark}-{planned.iteration}",
            iteration=planned.iteration,
            phase=planned.phase,
            conversation=planned.conversation,
            turn=planned.turn,
            due=self._since(sent.due),
            sent=self._since(exchange.sent),
            tokens=tuple((when - self.zero) / 1e9 for when in answer.tokens),
            end=self._since(exchange.ended),
            status=exchange.status,
            error=answer.error,
            prompt_tokens=self._tokens(planned),
            prompt_tokens_counted=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            output_tokens=planned.output,
            output_tokens_counted=answer.output_tokens,
            prompt_digest=planned.prompt.digest(),
            answer_digest=answer.digest,
            finish_reason=answer.finish_reason,
            timing=answer.timing,
            headers=answer.headers,
        )

    def _tokens(self, planned: Planned) -> int | None:
        """Of its prompt, as the server should count them."""
        return None if planned.prompt.tokens is None else planned.prompt.tokens + self._overhead

    def _since(self, when: int | None) -> float | None:
        return None if when is None else (when - self.zero) / 1e9

    def close(self) -> None:
        """Let the bodies go."""
        self._bodies.close()


def read(sent: Sent) -> Answer:
    """What came, understood once; the pieces are let go."""
    if sent.answer is None:
        sent.answer = understand(sent.exchange)
        sent.exchange.pieces.clear()
    return sent.answer


@asynccontextmanager
async def opened(spec: LoadSpec) -> AsyncIterator[tuple[Driver, Watch]]:
    """A driver whose server answers, and the watch over this process. Raises `LabError` where none does."""
    pool = Pool(spec.url, spec.headers)
    watch = Watch()
    driver: Driver | None = None
    try:
        model = spec.model or await _model(pool, spec.url)
        driver = Driver(spec, pool, model, watch)
        yield driver, watch
    finally:
        await watch.stop()
        pool.close()
        if driver is not None:
            driver.close()


async def _model(pool: Pool, url: str) -> str:
    """The name of the model that the server has."""
    exchange = await pool.exchange("GET", "/v1/models", b"", f"models-{secrets.token_hex(4)}", _ASK_SECONDS)
    try:
        if exchange.error is None and exchange.status == 200:
            return str(json.loads(b"".join(piece for _, piece in exchange.pieces))["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        pass
    why = exchange.error or f"HTTP {exchange.status} without a model's name"
    raise LabError(f"{url}/v1/models: {why}; is the server up? A model can be named by `model`")


@asynccontextmanager
async def _alarm() -> AsyncIterator[Alarm]:
    alarm = Alarm()
    try:
        yield alarm
    finally:
        alarm.close()
