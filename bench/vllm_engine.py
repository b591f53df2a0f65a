"""A vLLM server on CPU, with a store or without one: started, restarted and counted.

For the programs of this folder that ask one server, or two in turns.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.request import Request, urlopen

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.vllm.forked import ForkParent
from tests.vllm.pairs import COMPUTED, START_LIMIT, USAGE, prompt_of, start_engine, wait_for

from kvik.demo import client
from kvik.demo.checkpoint import FIRST_BYTE_TOKEN
from kvik.demo.engines import BLOCK_TOKENS, Connector, EngineSpec
from kvik.roles.ports import free_ports
from kvik.roles.processes import Fleet, HttpServer, descendants

LIMIT = 180.0
LOADED = "vllm:kvik_store_blocks_loaded_{}_total"
SAVED = "vllm:kvik_store_blocks_saved_remote_total"
QUIET = 0.1
"""Of a core: what a server takes that has nothing to do is less."""
LOOK = 0.1
"""Seconds over which that is seen."""


class Counts(NamedTuple):
    """What a server has counted: prompt tokens that it computed, and blocks that it loaded."""

    computed: float
    host: float
    remote: float

    def since(self, before: Counts) -> Counts:
        """What was counted since then."""
        return Counts(*(after - count for after, count in zip(self, before, strict=True)))


@dataclass
class Engine:
    """A vLLM server, which is started by `begin`, and can be started again."""

    parent: ForkParent
    model: Path
    spec: EngineSpec
    fleet: Fleet
    folder: Path
    server: HttpServer = field(init=False)
    _looks: int = 0

    def begin(self) -> None:
        """Start it, without waiting until it is up."""
        (port,) = free_ports(1)
        self._looks = 0
        self.server = self.fleet.add(start_engine(self.parent, self.model, self.spec, port, self.folder))

    def wait_ready(self) -> None:
        """Wait until it answers."""
        self.server.wait_ready(time.monotonic() + START_LIMIT)
        client.complete(self.server.url, [7] * (BLOCK_TOKENS - 1), 1)  # no whole block

    def wait_keeping(self) -> None:
        """Wait until it keeps what it computes: it has met the store, and has the digest of its weights."""
        seed = 0

        def kept() -> float:
            nonlocal seed
            seed -= 1
            client.complete(self.server.url, prompt_of(BLOCK_TOKENS + 1, seed), 1)
            return client.metrics(self.server.url).get(SAVED, 0.0)

        if not wait_for(kept, bool, LIMIT):
            raise SystemExit(f"no block comes into the store\n{self.server.tail()}")

    def restart(self) -> None:
        """End it if it runs, and start it, with nothing in its memory."""
        if hasattr(self, "server"):
            self.stop()
        self.begin()
        self.wait_ready()

    def stop(self) -> None:
        """End it."""
        self.fleet.stop(self.server)

    def forget(self) -> None:
        """Empty its own prefix cache, and nothing else."""
        order = Request(f"{self.server.url}/reset_prefix_cache", method="POST")  # noqa: S310 - http
        urlopen(order, timeout=LIMIT).close()  # noqa: S310

    def _idle(self) -> bool:
        """Let it step, since counts come with steps: whether no KV block is in use then."""
        self._looks += 1
        client.complete(self.server.url, [FIRST_BYTE_TOKEN], 1)
        return client.metrics(self.server.url)[USAGE] == 0

    def counts(self) -> Counts:
        """What it has counted, once no KV block waits for a save any more."""
        if not wait_for(self._idle, bool, LIMIT):
            raise SystemExit(f"KV blocks still wait for saves\n{self.server.tail()}")
        counted = client.metrics(self.server.url)
        names = (COMPUTED, LOADED.format("host"), LOADED.format("remote"))
        computed, host, remote = (counted.get(name, 0.0) for name in names)
        return Counts(computed - self._looks, host, remote)

    def saved(self) -> float:
        """Blocks that it has put into the server, as far as it has counted them."""
        return client.metrics(self.server.url).get(SAVED, 0.0)


def engine_spec(store: object, ranks: int = 1, **more: object) -> EngineSpec:
    """A server with this store, or without a connector where there is none. `more` as of `EngineSpec`."""
    options = {"name": "engine", "tensor_parallel": ranks, "arguments": ("--max-num-batched-tokens", "1024")}
    connector = Connector("kv_both", extra={"store": store}) if store else None
    return EngineSpec(**{**options, "connector": connector, **more})


def cpu_of(pid: int) -> float:
    """CPU seconds of a process, its ended threads included: what `clock_getcpuclockid` names."""
    return time.clock_gettime(~pid << 3 | 2)


def rest(engines: Iterable[Engine], *others: int) -> None:
    """Wait until servers, and other processes, have come to rest: after an answer the queues of vLLM spin for
    a second, and a store's puts go on."""
    pids = [*others, *(pid for engine in engines for pid in descendants(engine.server.pid))]

    def taken() -> float:
        return sum(map(cpu_of, pids))

    until = time.monotonic() + LIMIT
    while True:
        before = taken()
        time.sleep(LOOK)  # rest has no event
        if taken() - before < QUIET * LOOK:
            return
        if time.monotonic() > until:
            raise SystemExit("a server does not come to rest")
