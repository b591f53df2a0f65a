"""Clients of a store of several servers that read prompts, compare each block, and put what they miss."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import kvik
from tests.busy import Watch
from tests.python.store_rig import NAMESPACE, Bytes

DEADLINE = 6.0
"""Of each call: longer than it takes until a process that has stopped is noticed."""
LIMIT = 60.0
"""For what is waited for."""
BLOCKS, RUN = 200, 512
PROMPTS = 24

Servers = Path | str | Sequence[str]
Tokens = Callable[[int], Sequence[int]]


def becomes(so: Callable[[], bool]) -> None:
    """Wait until it is so."""
    until = time.monotonic() + LIMIT
    while not so():
        assert time.monotonic() < until, "it does not become so"
        time.sleep(0.02)  # nobody tells a client's user that the servers are others


@dataclass(frozen=True)
class Call:
    """One call of a client: when it began and ended, the blocks that it named, and those that were there."""

    what: str
    began: float
    ended: float
    asked: int
    there: int

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended - self.began


@dataclass(frozen=True)
class Workload:
    """Prompts of so many blocks, each of so many bytes. tokens: of a prompt by its number; by default no two
    have a block that is alike. parts: calls in which a prompt is read."""

    blocks: int = BLOCKS
    run: int = RUN
    prompts: int = PROMPTS
    parts: int = 2
    tokens: Tokens | None = None

    def of(self, prompt: int) -> Sequence[int]:
        """The tokens of a prompt."""
        if self.tokens is None:
            return [prompt] * (self.blocks * NAMESPACE.block_tokens)
        return self.tokens(prompt)


class Client:
    """A client of several servers, with pages for a prompt; each block that it reads is compared."""

    def __init__(self, servers: Servers, copies: int, workload: Workload | None = None) -> None:
        self.workload = workload or Workload()
        blocks, run = self.workload.blocks, self.workload.run
        self.engine = kvik.Engine()
        self.layout = kvik.Layout(blocks, run)
        self.region = self.engine.allocate(self.layout.nbytes)
        self.bytes: Bytes = np.frombuffer(memoryview(self.region), dtype=np.uint8).reshape(blocks, run)
        self.store = kvik.Store.connect(
            self.engine, servers, NAMESPACE, self.layout, copies=copies, deadline=LIMIT
        )
        self.calls: list[Call] = []
        self.longest = 0.0  # seconds of the longest call, without those that the machine stood still
        self.wrong = 0

    def keys(self, prompt: int) -> bytes:
        return self.store.keys(self.workload.of(prompt))

    def content(self, keys: bytes) -> Bytes:
        """Of each block bytes that are its own."""
        words = np.frombuffer(keys, dtype=np.uint8).reshape(-1, 32)
        return np.tile(words, (1, self.workload.run // 32))

    def put(self, prompt: int) -> kvik.Stored:
        keys = self.keys(prompt)
        self.bytes[:] = self.content(keys)
        began, watch = time.monotonic(), Watch()
        stored = self.store.put(
            keys, self.region.pages(self.layout, range(len(self.bytes))), deadline=DEADLINE
        ).wait()
        self.longest = max(self.longest, watch.seconds())
        self.calls.append(Call("put", began, time.monotonic(), len(self.bytes), stored.stored + stored.known))
        return stored

    def got(self, prompt: int) -> int:
        """How many blocks are read; one call more for each part, until one of them has less than it."""
        keys, there, blocks = self.keys(prompt), 0, len(self.bytes)
        cuts = random.Random(prompt).sample(range(1, blocks), self.workload.parts - 1)
        self.bytes[:] = 0xEE
        for first, end in zip([0, *sorted(cuts)], [*sorted(cuts), blocks], strict=True):
            pages = self.region.pages(self.layout, range(first, end))
            began, watch = time.monotonic(), Watch()
            got = self.store.get(
                keys[32 * first : 32 * end], pages, before=keys[: 32 * first], deadline=DEADLINE
            ).wait()
            self.longest = max(self.longest, watch.seconds())
            self.calls.append(Call("get", began, time.monotonic(), end - first, got))
            there += got
            if there < end:
                break
        self.wrong += int((self.bytes[:there] != self.content(keys)[:there]).any(axis=1).sum())
        return there

    def up(self) -> int:
        return sum(member.up for member in self.store.members())

    def names(self) -> set[str]:
        """The servers that it knows."""
        return {member.name for member in self.store.members()}

    def close(self) -> None:
        del self.bytes
        self.engine.close()


class Load:
    """Clients that read prompts, and put what they miss, until it ends."""

    def __init__(self, servers: Servers, copies: int, clients: int, workload: Workload | None = None) -> None:
        self.clients = [Client(servers, copies, workload) for _ in range(clients)]
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(one,)) for one in self.clients]
        self._rounds = [0] * clients
        self._moved = threading.Condition()
        self.failures: list[BaseException] = []
        for thread in self._threads:
            thread.start()

    def _run(self, client: Client) -> None:
        number = self.clients.index(client)
        chance = random.Random(number)
        try:
            while not self._ended.is_set():
                prompt = chance.randrange(client.workload.prompts)
                if client.got(prompt) < client.workload.blocks:
                    client.put(prompt)
                with self._moved:
                    self._rounds[number] += 1
                    self._moved.notify_all()
        except BaseException as error:
            self.failures.append(error)
            with self._moved:
                self._moved.notify_all()

    def goes_on(self, rounds: int = 5) -> None:
        """Waits until each client has come so much further."""
        with self._moved:
            aims = [done + rounds for done in self._rounds]
            assert self._moved.wait_for(
                lambda: self.failures or all(map(int.__ge__, self._rounds, aims)), LIMIT
            ), self._rounds
        assert not self.failures, self.failures

    def lasts(self, seconds: float) -> None:
        """Lets so much time pass, in which no call may fail."""
        with self._moved:
            self._moved.wait_for(lambda: self.failures, seconds)
        assert not self.failures, self.failures

    def all_hit(self) -> None:
        """Waits until each client has read twice as many prompts as there are, and missed nothing."""
        for client in self.clients:
            begun = len(client.calls)
            wanted = 2 * client.workload.prompts * client.workload.parts

            def hit(client: Client = client, begun: int = begun, wanted: int = wanted) -> bool:
                assert not self.failures, self.failures
                last = client.calls[begun:][-wanted:]
                return len(last) == wanted and all(call.there == call.asked for call in last)

            becomes(hit)

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(LIMIT)
        for client in self.clients:
            client.close()
