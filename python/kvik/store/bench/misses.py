"""What a store costs an engine that finds nothing in it: pure misses, and puts of all that it computes."""

from __future__ import annotations

import time
from dataclasses import dataclass

import kvik
from kvik.store.bench.figures import Rounds
from kvik.store.bench.models import TOKENS, BlockShape
from kvik.store.bench.pages import Pages
from kvik.store.bench.served import served

STEPS = (1024, 768, 512, 384, 256, 128, 64, 32)
"""Tokens of one step of an engine, as in the article."""
SYNC, ASYNC = "synchronous", "asynchronous"
_KEPT = 3  # prompts for which the store has room


@dataclass
class Steps:
    """One size of steps: seconds of a step that the engine's own thread spends, by way."""

    tokens: int
    rounds: Rounds


@dataclass(frozen=True)
class Plan:
    """What is measured. rate: tokens a second that the engine computes; a step takes as long, in which the
    engine's thread does nothing else."""

    transport: kvik.TransportName
    prompts: int
    prompt_tokens: int
    rate: float
    seed: int


def measure(shape: BlockShape, plan: Plan) -> list[Steps]:
    """Prompts that nobody has asked for before, computed in steps of each size.

    Before a prompt the store is asked for all of it, which is a miss; after each step its blocks are put:
    *synchronous* waits until they are stored, *asynchronous* until the store has taken the put up, and waits
    for its end after the next step. Raises `KvikError`.
    """
    blocks = plan.prompt_tokens // TOKENS
    memory = _KEPT * blocks * shape.bytes + (1 << 28)
    measured = []
    arguments = ["--memory", str(memory), "--transport", plan.transport]
    with served(arguments) as address, kvik.Engine(transport=plan.transport) as engine:
        pages = Pages.make(engine, shape, blocks, by_layer=True, seed=plan.seed)
        store = kvik.Store.connect(engine, address, shape.namespace(), pages.layout)
        runner = _Runner(store, pages, plan.rate)
        for _ in range(_KEPT + 2):  # Memory that nobody has touched yet is another figure.
            runner.prompt(STEPS[0], SYNC, Rounds())
        for tokens in STEPS:
            steps = Steps(tokens, Rounds())
            for _ in range(plan.prompts):
                for way in (SYNC, ASYNC):
                    runner.prompt(tokens, way, steps.rounds)
            measured.append(steps)
    return measured


class _Runner:
    def __init__(self, store: kvik.Store, pages: Pages, rate: float) -> None:
        self._store, self._pages, self._rate = store, pages, rate
        self._prompts = 0

    def prompt(self, step_tokens: int, way: str, rounds: Rounds) -> None:
        """One prompt; adds the seconds of a step that were spent on the store."""
        self._prompts += 1
        count = self._pages.blocks
        first = self._prompts * count * TOKENS
        keys = self._store.keys(range(first, first + count * TOKENS))
        region, layout = self._pages.regions[0], self._pages.layout
        began = time.perf_counter()
        if self._store.get(keys, region.pages(layout, range(count))).wait():
            raise kvik.KvikError("a prompt that nobody has computed was found in the store")
        spent = time.perf_counter() - began
        each, steps, before = max(step_tokens // TOKENS, 1), 0, None
        for at in range(0, count, each):
            upto = min(at + each, count)
            time.sleep((upto - at) * TOKENS / self._rate)  # the engine computes
            began = time.perf_counter()
            put = self._store.put(
                keys[32 * at : 32 * upto],
                region.pages(layout, range(at, upto)),
                before=keys[: 32 * at],
                ack="stored" if way == SYNC else "accepted",
            )
            put.acknowledged()
            if way == SYNC:
                put.wait()
            elif before is not None:
                before.wait()
            before = put
            spent += time.perf_counter() - began
            steps += 1
        if before is not None:
            before.wait()
        rounds.add(way, spent / steps)
